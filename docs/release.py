"""Writes the addresses of a publication into this folder, which names none until then.

    python docs/release.py https://github.com/OWNER/NAME
    python docs/release.py https://github.com/OWNER/NAME --site https://example.org/

Run it once, before the first tag. The README then gets its badges, the notebooks open in Colab, and
packages, citations and pages point to the repository and to the site. A place that is not found as
`EDITS` has it ends the script before anything is written.
"""

import argparse
import re
import string
import tomllib
from pathlib import Path
from typing import NamedTuple

import jupytext

ROOT = Path(__file__).parents[1]
REPOSITORY = re.compile(r"https://github\.com/([\w-]+)/([\w.-]+?)/?")


class Edit(NamedTuple):
    r"""One address, in each file whose path fits the pattern ``files``.

    ``place`` is a regular expression that must be found once in each of them. The text takes its
    place. ``$repository`` and other names in it stand for addresses, ``\g<0>`` for what was found.
    """

    files: str
    place: str
    text: str


def block(name: str) -> str:
    """What a Markdown page says until there is a publication."""
    return rf"(?s)<!-- unpublished {name} -->.*?<!-- end -->"


COLAB = "https://colab.research.google.com"
SHIELDS = "https://img.shields.io/badge"
CLONE = "```sh\ngit clone $repository && cd $name\n```"

EDITS = (
    Edit(
        "README.md",
        block("badges"),
        "[![Tests]($repository/actions/workflows/tests.yml/badge.svg)]($repository/actions) "
        f"[![Python 3.11 or newer]({SHIELDS}/python-3.11%2B-blue)](pyproject.toml) "
        f"[![Apache-2.0]({SHIELDS}/licence-Apache--2.0-blue)](LICENSE) "
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
        f"({COLAB}/github/$owner/$name/blob/main/notebooks/00_quick_start.ipynb) "
        "[Documentation]($site)",
    ),
    Edit("README.md", block("source"), CLONE),
    Edit("docs/how_to/install.md", block("source"), CLONE),
    Edit(
        "docs/how_to/install.md",
        block("colab"),
        "Each notebook of this project has a button at its top that opens it in Colab. In a "
        "notebook of your own one cell installs the library:\n\n"
        '```text\n%pip install "demo_optax[flax] @ git+$repository"\n```',
    ),
    Edit(
        "docs/reference/api.md",
        block("site"),
        "Read it on [the built site](${site}reference/api.html). In this file bare directives "
        "stand in place of the docstrings.",
    ),
    Edit("CHANGELOG.md", block("versions"), "$version is the first version that is released."),
    Edit("CHANGELOG.md", "(?m)(?<=^## ).*, not released yet$", "$version"),
    Edit(
        "docs/conf.py",
        r"(?m)^html_title = .*\n",
        "\\g<0>html_theme_options = {\n"
        '    "source_repository": "$repository/",\n'
        '    "source_branch": "main",\n'
        '    "source_directory": "docs/",\n'
        "}\n",
    ),
    Edit(
        "pyproject.toml",
        r"(?m)^(?=\[project\.optional-dependencies\])",
        "[project.urls]\n"
        'Repository = "$repository"\n'
        'Documentation = "$site"\n'
        'Changelog = "$repository/blob/main/CHANGELOG.md"\n'
        'Issues = "$repository/issues"\n\n',
    ),
    Edit(
        "CITATION.cff",
        r"(?m)^license: .*\n",
        '\\g<0>repository-code: "$repository"\nurl: "$site"\n',
    ),
    Edit(
        ".github/ISSUE_TEMPLATE/config.yml",
        r"(?m)^blank_issues_enabled: .*\n",
        "\\g<0>contact_links:\n  - name: Documentation\n    url: $site\n"
        "    about: How to install it, choose settings, use it, and what its messages mean.\n",
    ),
    Edit(
        ".github/workflows/release.yml",
        r"(?m)^ +name: pypi\n",
        "\\g<0>      url: https://pypi.org/project/$package/\n",
    ),
    Edit(
        "notebooks/*.py",
        r"(?m)^# In Colab, first .*$",
        f"# [![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
        f"({COLAB}/github/$owner/$name/blob/main/notebooks/$stem.ipynb)",
    ),
    Edit(
        "notebooks/*.py",
        r"(?m)^import os\nimport sys\n",
        '\\g<0>\nif not os.path.exists("../pyproject.toml"):  # in Colab\n'
        "    # !git clone -q --depth 1 $repository\n"
        '    os.chdir("$name/notebooks")\n',
    ),
)


def addresses(repository: str, site: str | None) -> dict[str, str]:
    """What the names in the texts of `EDITS` stand for.

    Raises:
      ValueError: ``repository`` is no address of a repository on GitHub.
    """
    found = REPOSITORY.fullmatch(repository)
    if not found:
        raise ValueError(f"{repository!r} is no repository: give https://github.com/OWNER/NAME.")
    owner, name = found.groups()
    site = (site or f"https://{owner.lower()}.github.io/{name}").rstrip("/") + "/"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    package = project["name"].replace("_", "-")
    repository = f"https://github.com/{owner}/{name}"
    return dict(
        repository=repository,
        owner=owner,
        name=name,
        site=site,
        package=package,
        version=project["version"],
    )


def filled_in(names: dict[str, str]) -> dict[Path, str]:
    """The new text of each file.

    Raises:
      ValueError: the place of an edit is not found once.
    """
    texts: dict[Path, str] = {}
    for edit in EDITS:
        for path in sorted(ROOT.glob(edit.files)):
            text = string.Template(edit.text).substitute(names, stem=path.stem)
            old = texts.get(path) or path.read_text()
            texts[path], times = re.subn(edit.place, text, old)
            if times != 1:
                raise ValueError(
                    f"{path.relative_to(ROOT)}: {edit.place!r} was found {times} times, expected "
                    "once. If the addresses are there already, nothing is left to do. Otherwise "
                    "restore that place, or change EDITS in docs/release.py."
                )
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", help="https://github.com/OWNER/NAME")
    parser.add_argument("--site", help="the built documentation, on GitHub's pages by default")
    args = parser.parse_args()
    try:
        texts = filled_in(addresses(args.repository, args.site))
    except ValueError as error:
        parser.error(str(error))
    for path, text in texts.items():
        path.write_text(text)
        if path.suffix == ".py" and path.parent.name == "notebooks":
            pair = path.with_suffix(".ipynb")
            notebook = jupytext.combine.combine_inputs_with_outputs(
                jupytext.read(path), jupytext.read(pair)
            )
            jupytext.write(notebook, pair)
    print(f"{len(texts)} files have the addresses now. Look at them by git diff.")


if __name__ == "__main__":
    main()
