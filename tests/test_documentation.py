"""The documentation builds without a warning, is complete, and its code and links work."""

import dataclasses
import inspect
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import jupytext
import nbformat
import pytest

import demo_optax
from benchmarks.tools import pages as pages_between_marks
from demo_optax import accounting, checkpoint, swarm
from demo_optax._src.commands.main import COMMANDS, main
from lm.config import Config
from tests import api_names, pages
from tests.pages import PAGES, README

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = "benchmarks", "demo_optax", "docs", "examples", "notebooks", "tests"
STUDIES = "`studies-2026-11`"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def public(*modules):
    """Public names of modules, and what they are."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("demo_optax")
    }


PUBLIC = public(demo_optax, checkpoint)
OF_LINKS = public(accounting)
OF_SWARMS = public(swarm)  # docs/how_to/swarm.md has their example


def test_the_site_builds_with_warnings_as_errors(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ROOT / "docs", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "reference" / "api.html").read_text()
    for name in PUBLIC | OF_SWARMS:
        assert f'id="{name}"' in page, f"{name} is not in docs/reference/api.md"
    for notebook in NOTEBOOKS:
        page = (tmp_path / "notebooks" / notebook.with_suffix(".html").name).read_text()
        assert "image/png" in page or "_images/" in page, f"no picture in {notebook.stem}"
    page = (tmp_path / "tutorials" / "quick_start.html").read_text()
    assert 'href="../notebooks/00_quick_start.html"><span class="doc">the notebook' in page
    page = (tmp_path / "notebooks" / "00_quick_start.html").read_text()
    assert 'href="../how_to/install.html#colab"' in page


def test_every_public_name_has_a_line_on_the_page_itself():
    outdated = pages_between_marks.outdated(api_names.PAGES, api_names.KIND, api_names.table)
    assert outdated == [], "run python -m tests.api_names"
    wanted = {name.rpartition(".")[2] for name in PUBLIC | OF_SWARMS | OF_LINKS}
    lines = api_names.names()
    assert wanted <= set(lines) and len(lines) == len(set(lines))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    if inspect.isfunction(PUBLIC[name]) or inspect.isclass(PUBLIC[name]):
        documented = PUBLIC[name].__doc__ or ""
        assert ">>>" in documented, name
        assert len(documented.split()) > 20, name


def name_of(page):
    return page.relative_to(ROOT).with_suffix("").as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_a_page_runs(page, capsys, compiled, monkeypatch, annotations_unchecked):
    names = pages.run(page, monkeypatch)
    assert capsys.readouterr().out or not pages.blocks(page, "python")
    programs = re.findall(r"jit\((\w+)\)", "\n".join(compiled()))
    assert [name for name in names if programs.count(name) > 1] == [], "compiled twice"


@pytest.mark.parametrize("page", [README, *PAGES, *NOTEBOOKS], ids=name_of)
def test_links_of_a_page_resolve(page):
    text = page.read_text()
    text = re.sub(r"^# ?", "", text, flags=re.MULTILINE) if page.suffix == ".py" else text
    for target in links(text):
        path, _, anchor = urllib.parse.unquote(target).partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.is_relative_to(ROOT) and found.exists(), f"{target}: there is no such file"
        assert found == normal(page.parent / path) or not path, f"{target}: GitHub has no such page"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text()), f"{target}: there is no such heading"


def normal(path):
    """A path without `..`, where links to folders are not followed: on GitHub they are files."""
    return pathlib.Path(os.path.normpath(path))


def links(text):
    """Targets of a page's relative links and pictures."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    inline = re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", prose)
    of_html = re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)
    named = re.findall(r"^\[[^\]]+\]: (\S+)", prose, re.MULTILINE)
    return [
        link for link in inline + of_html + named if "://" not in link and "mailto:" not in link
    ]


def anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def gone(text):
    """Paths and patterns of this repository in a text for which there is no file."""
    named = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*\w)", text)
    elsewhere = ("docs/_build", "demo_optax/notebooks")  # what is built; what Colab unpacks
    elsewhere += ("demo_optax/1",)  # what signatures begin with
    # tests/test_benchmarks.py requires the tag of studies that left on each page that names one.
    elsewhere += ("benchmarks/",) if STUDIES in text else ()
    return [path for path in named if not path.startswith(elsewhere) and not list(ROOT.glob(path))]


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_every_path_that_a_page_names_is_there(page):
    assert gone(page.read_text()) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_path_that_a_comment_or_a_docstring_names_is_there(folder):
    found = {path: gone(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    found = {path.relative_to(ROOT).as_posix(): paths for path, paths in found.items() if paths}
    assert found == {}


def test_the_command_lines_name_every_setting_of_the_trainer():
    page = (DOCS / "reference" / "command_lines.md").read_text()
    flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(Config)]
    assert [flag for flag in flags if f"`{flag}`" not in page.split("## `demo-optax")[0]] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_lines_name_every_setting_of_a_command(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (DOCS / "reference" / "command_lines.md").read_text()
    section = page.split(f"## `demo-optax {name}`")[1].split("\n## ")[0]
    assert len(flags) >= 2 or name == "key"  # which takes a name alone
    assert [flag for flag in flags if f"`{flag}`" not in section] == []


@pytest.mark.parametrize(
    "values",
    [
        demo_optax.ExchangeMetrics,
        demo_optax.TrainMetrics,
        demo_optax.WorkerGradients,
        swarm.SwarmMetrics,
    ],
)
def test_the_metrics_page_names_every_field(values):
    page = (DOCS / "reference" / "metrics.md").read_text()
    assert [field for field in values._fields if f"| `{field}` |" not in page] == []


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


def test_contributing_names_every_module():
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    source = ROOT / "demo_optax" / "_src"
    modules = [x.relative_to(source).as_posix() for x in source.rglob("*.py")]
    named = [name for name in modules if not name.endswith("__init__.py")]
    assert len(named) > 40
    assert [name for name in named if f"`{name}`" not in page] == []


def test_links_and_anchors_are_found():
    text = "[a](b.md#c) ![d](e.png) `[no](code)` [far](https://x.y)\n```\n[no](code)\n```\n"
    assert links(text) == ["b.md#c", "e.png"]
    assert anchors("# One `two`, three\n## *Four*\n") == {"one-two-three", "four"}


def test_paths_that_are_not_there_are_found():
    wrong = [f"examples/{'none'}.py", f"benchmarks/{'old'}.py"]
    text = f"`{wrong[0]}` tests/pages.py docs/*.md https://x.y/docs/none.md ({wrong[1]})"
    assert gone(text) == wrong
    assert gone(f"{text} {STUDIES}") == wrong[:1]
