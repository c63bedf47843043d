"""The README and the pages stay short, and are written in full sentences."""

import pytest

from docs import reading_ease

PAGES = reading_ease.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_within_its_limits(name):
    assert not reading_ease.faults(name, reading_ease.measure(PAGES[name]))


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
