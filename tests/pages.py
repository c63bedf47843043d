"""All pages, and the Python of one, which runs from top to bottom as a reader would paste it."""

import functools
import pathlib
import re

import demo_optax
from docs import reading_ease

ROOT = pathlib.Path(__file__).parents[1]
TEXTS = reading_ease.pages()
README, *PAGES = [ROOT / name for name in TEXTS]

# Most pages make the same optimizer. As long as it is the same object, it is traced only once for
# all of them whose parameters have the same shapes.
demo_scaled = functools.cache(demo_optax.demo_scaled)


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def few(*limits: int) -> range:
    """A loop of hundreds of steps shows no more of a page than one of some."""
    return range(*limits)[:10]


def run(page: pathlib.Path, monkeypatch) -> dict:
    """The names that the page's Python has made in the end."""
    monkeypatch.setattr(demo_optax, "demo_scaled", demo_scaled)
    names = {"__name__": "page", "range": few}
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), names)
    return names
