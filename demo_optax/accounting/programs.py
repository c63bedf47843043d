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
    partitions = re.search(r"(?:num_partitions|replica_count)=(\d+)", hlo)
    for line in hlo.splitlines():
        instruction = _INSTRUCTION.search(line)
        if not instruction:
            continue
        groups = _GROUPS.search(line)
        size = int(partitions[1]) if partitions else 1
        if groups:
            listed = groups["listed"]
            size = int(groups["iota"]) if listed is None else listed.count(",") + 1
        kind, shapes = instruction["kind"], list(_SHAPE.finditer(instruction["result"]))
        share = {"all-gather": 1 / size, "reduce-scatter": size}.get(kind, 1)
        if instruction["start"] and kind != "all-reduce":
            # Asynchronous ones return their operands, then their results, then other things.
            shapes = shapes[:1] if kind == "collective-permute" else shapes[: len(shapes) // 2]
            share = 1
        operands = round(share * sum(map(_bytes, shapes)))
        found.append(Collective(kind, shapes[0]["dtype"], operands, size))
    return found


def _bytes(shape: re.Match) -> int:
    elements = math.prod(int(dim) for dim in shape["dims"].split(",") if dim)
    return elements * _bits(shape["dtype"]) // 8


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    return int(re.findall(r"\d+", dtype)[0])
