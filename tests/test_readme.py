"""The README's Python runs from top to bottom, as a reader would paste it."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_python_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out
