"""The README's Python runs as a reader would paste it, and prints what is shown."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_python_blocks_run_in_order_and_print_what_is_shown(capsys):
    assert blocks("python")
    exec(compile("\n".join(blocks("python")), str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "".join(blocks("text"))
