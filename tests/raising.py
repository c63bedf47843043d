"""Which ``raise`` statements the library has, and which of them the causes reach."""

import ast
import functools
import pathlib
import traceback

import pytest

import demo_optax
from tests.causes import RAISED

LIBRARY = pathlib.Path(demo_optax.__file__).parent


@functools.cache
def raise_statements():
    """Places of all ``raise`` statements of the library: file, first line, last line."""
    return [
        (path.relative_to(LIBRARY).as_posix(), node.lineno, node.end_lineno)
        for path in sorted(LIBRARY.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and node.exc
    ]


def place_of(error):
    """The library's ``raise`` statement that an error comes from."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = pathlib.Path(frame.filename)
        if path.is_relative_to(LIBRARY):
            for place in raise_statements():
                name, first, last = place
                if path == LIBRARY / name and first <= frame.lineno <= last:
                    found = place
    return found


def collect():
    """Each place that raises, with its message; those of pairs match the pattern beside them."""
    collected = {}
    for each in RAISED:
        pattern, cause = each if isinstance(each, tuple) else (None, each)
        with pytest.raises(Exception, match=pattern) as raised:
            cause()
        place = place_of(raised.value)
        assert place, "".join(traceback.format_exception(raised.value))
        collected[place] = str(raised.value)
    return collected
