"""No file names an address until there is a publication; docs/release.py then writes them all."""

import importlib.util
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

from docs import reading_ease

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


def test_the_project_and_its_citation_point_to_the_repository(released):
    urls = tomllib.loads((released / "pyproject.toml").read_text())["project"]["urls"]
    assert urls == {
        "Repository": REPOSITORY,
        "Documentation": SITE,
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    citation = yaml.safe_load((released / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["url"]) == (REPOSITORY, SITE)


def test_the_site_and_the_workflows_point_to_each_other(released):
    options = runpy.run_path(str(released / "docs" / "conf.py"))["html_theme_options"]
    assert options["source_repository"] == f"{REPOSITORY}/"
    (link,) = yaml.safe_load((released / ".github/ISSUE_TEMPLATE/config.yml").read_text())[
        "contact_links"
    ]
    assert link["url"] == SITE
    workflow = yaml.safe_load((released / ".github/workflows/release.yml").read_text())
    environment = workflow["jobs"]["publish"]["environment"]
    assert environment == {"name": "pypi", "url": "https://pypi.org/project/demo-optax/"}


def test_pages_get_badges_and_lose_what_they_say_until_then(released):
    readme = (released / "README.md").read_text()
    assert readme.count("https://img.shields.io/badge/") == 2
    assert f"[![Tests]({REPOSITORY}/actions/workflows/tests.yml/badge.svg)]" in readme
    assert f"git clone {REPOSITORY} && cd demo_optax\n" in readme
    assert not reading_ease.faults("README.md", reading_ease.measure(readme))
    assert "not released yet" not in (released / "CHANGELOG.md").read_text()
    assert f"{SITE}reference/api.html" in (released / "docs/reference/api.md").read_text()
    for page in [*released.glob("*.md"), *(released / "docs").rglob("*.md")]:
        if page.name != "CONTRIBUTING.md":
            assert "unpublished" not in page.read_text()


def test_each_notebook_opens_in_colab_and_brings_its_folder(released):
    for script in (released / "notebooks").glob("*.py"):
        pair = script.with_suffix(".ipynb")
        cells = [[(x.cell_type, x.source) for x in jupytext.read(y).cells] for y in (script, pair)]
        assert cells[0] == cells[1]
        title, code = (source for _, source in cells[0][:2])
        assert f"/github/someone/demo_optax/blob/main/notebooks/{pair.name})" in title
        assert f"!git clone -q --depth 1 {REPOSITORY}\n" in code
        original = jupytext.read(ROOT / "notebooks" / pair.name).cells
        outputs = [x.get("outputs") for x in jupytext.read(pair).cells]
        assert outputs == [x.get("outputs") for x in original]


def test_a_second_run_changes_nothing_and_says_so(released):
    before = addresses(released)
    result = release(released, "https://github.com/another/demo_optax")
    assert result.returncode == 2
    assert "If the addresses are there already, nothing is left to do." in result.stderr
    assert addresses(released) == before


@pytest.mark.parametrize(
    "words", ["demo_optax", "https://example.org/demo_optax", "https://github.com/demo_optax"]
)
def test_what_is_no_repository_is_refused(words):
    assert "give https://github.com/OWNER/NAME" in release(ROOT, words).stderr


def test_a_site_of_ones_own(monkeypatch):
    spec = importlib.util.spec_from_file_location("release", ROOT / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.addresses(f"{REPOSITORY}/", None)["site"] == SITE
    assert module.addresses(REPOSITORY, "https://example.org")["site"] == "https://example.org/"
