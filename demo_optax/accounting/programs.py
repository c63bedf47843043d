"""What a compiled program really sends, read from its optimised HLO."""

import math
import re
from typing import NamedTuple

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[(?P<dims>[0-9,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(?P<iota>\d+)\]|\{\{(?P<listed>[\d,]+)\})")


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: as in HLO: ``"all-gather"``, ``"all-reduce"``, ...
      dtype: of its elements, as in HLO: ``"u32"``, ``"f32"``, ...
      operand_bytes: what each participant hands to it.
      participants: devices in a group.
    """

    kind: str
    dtype: str
    operand_bytes: int
    participants: int


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a program.

    Args:
      hlo: optimised HLO, ``jax.jit(step).lower(...).compile().as_text()``.

    Example:
      >>> collectives('''
      ...   %all-gather.1 = u32[8,1232]{1,0} all-gather(%packet), replica_groups=[1,8]<=[8]
      ... ''')
      [Collective(kind='all-gather', dtype='u32', operand_bytes=4928, participants=8)]
    """
    found = []
    for line in hlo.splitlines():
        instruction = _INSTRUCTION.search(line)
        if not instruction:
            continue
        groups = _GROUPS.search(line)
        size = 1
        if groups:
            listed = groups["listed"]
            size = int(groups["iota"]) if listed is None else listed.count(",") + 1
        shapes = list(_SHAPE.finditer(instruction["result"]))
        if instruction["start"]:  # the result is (operands, results)
            shapes = shapes[: max(1, len(shapes) // 2)]
        found.append(
            Collective(
                kind=instruction["kind"],
                dtype=shapes[0]["dtype"],
                operand_bytes=sum(
                    _operand_bytes(shape, instruction["kind"], bool(instruction["start"]), size)
                    for shape in shapes
                ),
                participants=size,
            )
        )
    return found


def _operand_bytes(shape: re.Match, kind: str, is_operand: bool, participants: int) -> int:
    elements = math.prod(int(dim) for dim in shape["dims"].split(",") if dim)
    size = elements * _bits(shape["dtype"]) // 8
    if is_operand:
        return size
    if kind == "all-gather":
        return size // participants
    return size * participants if kind == "reduce-scatter" else size


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    return int(re.findall(r"\d+", dtype)[0])
