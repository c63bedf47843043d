"""What is installed, and how: the library alone, quick to import."""

import email
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*words):
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_the_library_and_nothing_else(tmp_path):
    run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "demo_optax",
        f"demo_optax-{PROJECT['version']}.dist-info",
    }
    library = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("demo_optax/**/*.py")}
    inside = {name for name in names if name.startswith("demo_optax/")}
    data = {"demo_optax/py.typed", "demo_optax/_src/accounting/losses.json"}
    assert inside == library | data
    assert any(name.endswith("LICENSE") for name in names)
    scripts = zipfile.ZipFile(wheel).read(
        f"demo_optax-{PROJECT['version']}.dist-info/entry_points.txt"
    )
    assert b"demo-optax = demo_optax._src.commands.main:main" in scripts
    metadata = zipfile.ZipFile(wheel).read(f"demo_optax-{PROJECT['version']}.dist-info/METADATA")
    extras = email.message_from_bytes(metadata).get_all("Provides-Extra")
    assert set(extras) == {"cuda", "tpu", "flax", "checkpoint", "swarm", "examples"}


IMPORTS = """
import sys, time
times = [time.process_time()]
import jax, optax
times.append(time.process_time())
import demo_optax
times.append(time.process_time())
modules = [*sys.modules]
import demo_optax.accounting, demo_optax.checkpoint
demo_optax.accounting.choose(10**8, 16, 1e8, 0.02, 1.0, batch_tokens=4096, width=1024)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
print((times[2] - times[1]) / (times[1] - times[0]), jax.device_count(), *modules)
"""


@pytest.fixture(scope="module")
def imports():
    """Of two processes that import the library: its share of time, devices and modules."""
    return [run("-c", IMPORTS).split() for _ in range(2)]


def test_import_takes_less_than_a_third_of_what_jax_and_optax_take(imports):
    """In processor time of one process each, since a busy machine slows both alike."""
    assert min(float(share) for share, *_ in imports) < 1 / 3


def test_import_brings_nothing_that_is_optional(imports):
    _, _, *modules = imports[0]
    optional = {"flax", "orbax", "obstore", "rich", "tyro", "grain", "matplotlib"}
    assert "optax" in modules and not optional & set(modules)


def test_neither_an_import_nor_a_choice_starts_devices(imports):
    """Or settings that users make behind their imports would come too late."""
    assert [devices for _, devices, *_ in imports] == ["3"] * 2


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def make(*words):
    """What make would run, in the place of a new environment."""
    command = ["make", "--dry-run", "VENV=new", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_make_installs_jax_for_accelerators_where_it_is_told_to():
    assert "--editable '.[examples]' " in make("train")
    shown = make("train", "EXTRA=cuda")
    assert "--editable '.[examples,cuda]' " in shown
    assert "touch new/installed-cuda" in shown


def test_workflows_run_what_make_knows():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job.get("steps", []):
                if found := re.fullmatch(r"make ([a-z-]+)", step.get("run", "")):
                    make(found[1])


@pytest.mark.slow
def test_a_doctest_of_one_module_passes_alone():
    """Imported a second time, the module would have classes of its own."""
    module = "demo_optax/_src/metrics.py"
    assert "1 passed" in run("-m", "pytest", "-n", "0", "-q", module, "-k", "check_metrics")
