"""The README's Python runs as a reader would paste it, and prints what is shown."""

from tests import pages
from tests.pages import README


def test_python_blocks_run_in_order_and_print_what_is_shown(capsys, monkeypatch):
    assert pages.blocks(README, "python")
    pages.run(README, monkeypatch)
    assert capsys.readouterr().out == "".join(pages.blocks(README, "text"))
