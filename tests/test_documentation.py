"""The documentation builds without a warning, shows every public name, and its code runs."""

import inspect
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest

import demo_optax
from demo_optax import checkpoint

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in (demo_optax, checkpoint)
    for name, value in vars(module).items()
    if not name.startswith("_")
    and getattr(value, "__module__", "").startswith("demo_optax")
    and (module is demo_optax or value.__module__.startswith(module.__name__))
}


def test_the_site_builds_with_warnings_as_errors(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ROOT / "docs", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "api.html").read_text()
    for name in PUBLIC:
        assert f'id="{name}"' in page, f"{name} is not in docs/api.md"
    for notebook in NOTEBOOKS:
        page = (tmp_path / "notebooks" / notebook.with_suffix(".html").name).read_text()
        assert "image/png" in page or "_images/" in page, f"no picture in {notebook.stem}"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    if inspect.isfunction(PUBLIC[name]) or inspect.isclass(PUBLIC[name]):
        documented = PUBLIC[name].__doc__ or ""
        assert ">>>" in documented, name
        assert len(documented.split()) > 20, name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_python_on_a_page_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "page"})
    assert capsys.readouterr().out or not blocks


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda script: script.stem)
def test_a_notebook_is_its_script_with_results(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    expected = jupytext.read(script)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [
        (c.cell_type, c.source) for c in expected.cells
    ], "run `make notebooks`"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert str(ROOT) not in str(outputs)
    assert not re.search(r"/(tmp|home|root|Users)/|\\x1b", str(outputs))
