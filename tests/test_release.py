"""No file names an address until there is a publication; docs/release.py then writes them all."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jupytext
import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = "docs/release.py"
SKIPPED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "_build", "dist", "runs")
NAMES_THEM = (SCRIPT, "tests/test_release.py")
ADDRESS = re.compile(
    r"github\.com/[\w-]+/demo_optax|\w\.github\.io/demo_optax|pypi\.org/project/demo|img\.shields\.io"
    r"|colab\.research\.google\.com|demo_optax @ |pip install ['\"]?demo_optax(?!-)"
)
REPOSITORY, SITE = "https://github.com/someone/demo_optax", "https://someone.github.io/demo_optax/"
PUBLISHED = "urls" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.skipif(PUBLISHED, reason="the addresses are there")


def addresses(root: Path) -> dict[str, set[str]]:
    """The addresses in each file of a copy that has some."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and path.suffix != ".png" and name not in NAMES_THEM:
            found[name] = set(ADDRESS.findall(path.read_text(errors="ignore")))
    return {name: some for name, some in found.items() if some}


def release(root: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, root / SCRIPT, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A copy of this folder, in which the script ran."""
    root = tmp_path_factory.mktemp("release") / "demo_optax"
    shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
    assert addresses(root) == {}
    result = release(root, REPOSITORY)
    assert result.returncode == 0, result.stderr
    return root


def test_every_address_points_to_the_repository(released):
    urls = tomllib.loads((released / "pyproject.toml").read_text())["project"]["urls"]
    assert urls == {
        "Repository": REPOSITORY,
        "Documentation": SITE,
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    citation = yaml.safe_load((released / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["url"]) == (REPOSITORY, SITE)
    options = runpy.run_path(str(released / "docs" / "conf.py"))["html_theme_options"]
    assert options["source_repository"] == f"{REPOSITORY}/"
    for page in [*released.glob("*.md"), *(released / "docs").rglob("*.md")]:
        if page.name != "CONTRIBUTING.md":
            assert "unpublished" not in page.read_text()
    for script in (released / "notebooks").glob("*.py"):
        pairs = script, script.with_suffix(".ipynb")
        cells, same = [[(x.cell_type, x.source) for x in jupytext.read(y).cells] for y in pairs]
        assert cells == same
        assert f"!git clone -q --depth 1 {REPOSITORY}\n" in cells[1][1]


def test_a_second_run_changes_nothing_and_says_so(released):
    before = addresses(released)
    result = release(released, "https://github.com/another/demo_optax")
    assert result.returncode == 2
    assert "If the addresses are there already, nothing is left to do." in result.stderr
    assert addresses(released) == before
    assert "give https://github.com/OWNER/NAME" in release(ROOT, "https://github.com/x").stderr
