"""The README and the pages stay short, and are written in full sentences."""

import pytest

from docs import reading_ease
from tests.pages import TEXTS

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


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_is_within_its_limits(name):
    assert not reading_ease.faults(name, reading_ease.measure(TEXTS[name]))


def test_sentences_are_those_of_paragraphs_and_lists():
    assert list(reading_ease.sentences(PAGE)) == [
        "One sentence of six words here.",
        "And a link with `codeof_it`!",
        "An item without a full stop",
        "Another one!",
        "With two.",
    ]
    ease = reading_ease.measure(PAGE)
    assert (ease.lines, ease.words, ease.first_python) == (13, 21, 11)
    assert len(ease.fragments) == 4  # all but the item without a full stop


@pytest.mark.parametrize(
    "markdown",
    [
        "Short.\n" * 141,
        "x" * 12_001,
        ("It is " + "word " * 19 + ".\n\n") * 3,
        "A fragment of a sentence.\n",
        "\n" * 41 + "```python\npass\n```\n",
    ],
)
def test_each_limit_of_the_readme_is_checked(markdown):
    assert reading_ease.faults("README.md", reading_ease.measure(markdown))


@pytest.mark.parametrize(
    ("sentence", "is_fragment"),
    [
        ("Only the packets of the others.", True),
        ("A change of the steps, for all who want to train.", False),  # "want" is a verb
        ("No exchanges and no change to use.", True),
        ("**Cure.** A larger `topk`.", True),
        ("**Cure.** Send a larger `topk`.", False),
        ("**Workers share one device.**", False),
        ("`step` returns them.", False),
        ("The optimizer to begin with, by default, differs.", False),
        ("A label without a stop", False),
        ("DeMo (Peng et al. 2024) keeps the rest.", False),
    ],
)
def test_a_fragment_is_a_sentence_without_a_verb(sentence, is_fragment):
    found = reading_ease.measure(sentence).fragments
    assert bool(found) == is_fragment


def test_the_glossary_may_define_words_by_fragments():
    ease = reading_ease.measure("**Block.** A part of a tensor.")
    assert ease.fragments and not reading_ease.faults(reading_ease.GLOSSARY, ease)
