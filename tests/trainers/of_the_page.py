"""What a section of docs/how_to/trainers.md says, carried out in an environment of its own."""

import functools
import glob
import pathlib
import re
import shlex
import subprocess
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_to" / "trainers.md"


class Section(NamedTuple):
    """The blocks of one trainer's section.

    Attributes:
      installs: the words after each ``pip install``.
      settings: the lines ``name: value`` of its YAML block.
      edits: for each edit the file, the old lines and the new ones, of its diff blocks.
      added, removed: how many lines its diff blocks add and remove.
    """

    installs: list[list[str]]
    settings: dict[str, str]
    edits: list[tuple[str, str, str]]
    added: int
    removed: int


def section(heading: str, page: str | None = None) -> Section:
    """The section of the page under this heading.

    >>> text = '''## One
    ... ```sh
    ... pip install one==1 \\
    ...     two
    ... pip install .
    ... ```
    ... ```yaml
    ... steps: 3  # of them
    ... ```
    ... ```diff
    ... --- a.py
    ...  kept
    ... -old
    ... +new
    ... ```
    ... '''
    >>> section("One", text)[:2]
    ([['one==1', 'two'], ['.']], {'steps': '3'})
    >>> section("One", text).edits
    [('a.py', 'kept\\nold\\n', 'kept\\nnew\\n')]
    """
    page = PAGE.read_text() if page is None else page
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?:^## |\Z)", page, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    shell = "".join(body for kind, body in blocks if kind == "sh").replace("\\\n", " ")
    installs = re.findall(r"^pip install (.*)$", shell, re.MULTILINE)
    settings = re.findall(
        r"^(\w+): +([^#\n]*?) *(?:#.*)?$",
        "".join(body for kind, body in blocks if kind == "yaml"),
        re.MULTILINE,
    )
    edits, added, removed = [], 0, 0
    for kind, body in blocks:
        if kind == "diff":
            name, *lines = body.splitlines(keepends=True)
            added += sum(line.startswith("+") for line in lines)
            removed += sum(line.startswith("-") for line in lines)
            for hunk in re.split(r"^@@.*\n", "".join(lines), flags=re.MULTILINE):
                lines = hunk.splitlines(keepends=True)
                old = "".join(line[1:] for line in lines if line[0] != "+")
                new = "".join(line[1:] for line in lines if line[0] != "-")
                if lines:
                    edits.append((name.removeprefix("--- ").strip(), old, new))
    return Section(list(map(shlex.split, installs)), dict(settings), edits, added, removed)


def apply(edits: list[tuple[str, str, str]], folder: pathlib.Path) -> None:
    """Makes the edits in an installed copy; the old lines of each must be there exactly once."""
    for name, old, new in edits:
        text = (folder / name).read_text()
        assert text.count(old) == 1, f"{name} has these lines {text.count(old)} times:\n{old}"
        (folder / name).write_text(text.replace(old, new))


def environment(name: str, installs: list[list[str]], version: str = "3.12") -> pathlib.Path:
    """The interpreter of ``.venv-NAME``, which is made anew when what it installs changes.

    Skips the test where it cannot be made.
    """
    folder = ROOT / f".venv-{name}"
    python, ready = folder / "bin" / "python", folder / "installed"
    if ready.exists() and ready.read_text() == str(installs):
        return python
    base = _interpreter(version)
    try:
        _run(base, "-m", "venv", "--clear", folder)
        for words in installs:
            own = [part for word in words for part in _WORDS.get(word, [word])]
            _run(python, "-m", "pip", "install", "--quiet", *own)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no environment for {name}: {error.stderr.strip()[-500:]}")
    ready.write_text(str(installs))
    return python


_WORDS = {".": ["--editable", str(ROOT)]}


@functools.cache
def _interpreter(version: str) -> str:
    of_pyenv = glob.glob(str(pathlib.Path.home() / f".pyenv/versions/{version}*/bin/python"))
    for candidate in (f"python{version}", *of_pyenv):
        try:
            _run(candidate, "-c", "")
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip(f"there is no Python {version}")


def _run(*command, **options) -> str:
    command = [str(word) for word in command]
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout
