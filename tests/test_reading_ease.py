"""The README and the pages stay short, and their sentences too."""

import pytest

from docs import reading_ease

PAGES = reading_ease.pages()

PAGE = """# A heading of many words that is no sentence

One sentence of six words here. And [a link](https://example.org/a.b.c) with `code.of_it`!

| a table | has no sentences. None. |
|---|---|

- An item without a full stop
- Another one! With two.

```python
print("Code. Is. Not. Counted.")
```
"""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_within_its_limits(name):
    assert not reading_ease.faults(name, reading_ease.measure(PAGES[name]))


def test_sentences_are_those_of_paragraphs_and_lists():
    assert list(reading_ease.sentences(PAGE)) == [
        "One sentence of six words here.",
        "And a link with `codeof_it`!",
        "An item without a full stop",
        "Another one!",
        "With two.",
    ]
    ease = reading_ease.measure(PAGE)
    assert (ease.lines, ease.words, ease.longest, ease.first_python) == (13, 21, 6, 11)


@pytest.mark.parametrize(
    "markdown",
    [
        "Short.\n" * 141,
        "x" * 12_001,
        "word " * 31,
        ("word " * 17 + ".\n\n") * 3,
        "\n" * 41 + "```python\npass\n```\n",
    ],
)
def test_each_limit_of_the_readme_is_checked(markdown):
    assert reading_ease.faults("README.md", reading_ease.measure(markdown))
