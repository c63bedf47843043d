"""The collectives of a compiled program, read from its optimised HLO."""

import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from demo_optax import AxisName

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_NAMED = re.compile(r"\s*(?:ROOT )?(%\S+) = (.*)")
_ATTRIBUTES = re.compile(r", (?:calls|control-predecessors|metadata|backend_config|to_apply)=")
_CHANNEL = re.compile(r"channel_id=\d+")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[(?P<dims>[0-9,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(?P<groups>\{[\d,{}]+\})\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<ids>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]+)\]"
    r"(?:, device_ids=\(\[(?P<ids>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<over>[^:}]+)\}"
)


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: its name in HLO: ``"all-gather"``, ``"all-reduce"``, ...
      dtype: dtype of its elements, as in HLO: ``"u32"``, ``"f32"``, ...
      operand_bytes: bytes that each participant hands to it.
      groups: numbers of the devices that take part together, in the order of the mesh.
    """

    kind: str
    dtype: str
    operand_bytes: int
    groups: tuple[tuple[int, ...], ...]

    def crosses(self, mesh: Mesh, axis_name: AxisName) -> bool:
        """Whether workers along ``axis_name`` send anything to each other."""
        places = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_names), -1)
        names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
        along = places[[mesh.axis_names.index(name) for name in names]]
        return any(np.ptp(along[:, group], axis=1).any() for group in self.groups)


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a program.

    Args:
      hlo: optimised HLO, ``jax.jit(step).lower(...).compile().as_text()``.

    Example:
      >>> collectives('''
      ...   %all-gather.1 = u32[2,1232]{1,0} all-gather(%packet), replica_groups={{0,1}}
      ... ''')
      [Collective(kind='all-gather', dtype='u32', operand_bytes=4928, groups=((0, 1),))]
    """
    by_line: dict[str, Collective] = {}
    on_tpu = "AsyncCollectiveStart" in hlo
    partitions = re.search(r"(?:num_partitions|replica_count)=(\d+)", hlo)
    for line in hlo.splitlines():
        if not (instruction := _INSTRUCTION.search(line)):
            continue
        groups = _groups(line, int(partitions[1]) if partitions else 1)
        size = len(groups[0])
        kind, shapes = instruction["kind"], list(_SHAPE.finditer(instruction["result"]))
        share = {"all-gather": 1 / size, "reduce-scatter": size}.get(kind, 1)
        if instruction["start"] and kind != "all-reduce":
            # Asynchronous ones return their operands, then their results, then other things.
            shapes = shapes[:1] if kind == "collective-permute" else shapes[: len(shapes) // 2]
            share = 1
        operands = round(share * sum(map(_bytes, shapes)))
        # TPU programs write an asynchronous collective three times, with one channel.
        channel = _CHANNEL.search(line) if on_tpu else None
        key = f"{kind} {channel[0]}" if channel else line
        by_line[key] = Collective(kind, shapes[0]["dtype"], operands, groups)
    return list(by_line.values())


def arguments_behind(hlo: str) -> list[tuple[str, frozenset[str]]]:
    """Each collective of the entry computation, and the names of the arguments it depends on.

    A collective that does not depend on the batch may overlap with the gradient. Arguments without
    a name in the optimised HLO have their number.

    Example:
      >>> arguments_behind('''
      ... ENTRY %main {
      ...   %p = u32[128] parameter(0), metadata={op_name="state.pending"}
      ...   %q = f32[8] parameter(1), metadata={op_name="gradient"}
      ...   %a = u32[1024] all-gather(%p), replica_groups={{0,1}}
      ... }''')
      [('%a', frozenset({'state.pending'}))]
    """
    arguments: dict[str, frozenset[str]] = {}
    names = []
    for line in hlo[hlo.index("\nENTRY") :].splitlines()[2:]:
        if not (instruction := _NAMED.match(line)):
            continue
        name, text = instruction.groups()
        if number := re.search(r" parameter\((\d+)\)", text):
            named = re.search(r'op_name="([^"]*)"', text)
            arguments[name] = frozenset([named[1] if named else number[1]])
            continue
        # Operands come before their instruction; after them the line names computations.
        operands = re.findall(r"%[\w.-]+", _ATTRIBUTES.split(text)[0])
        arguments[name] = frozenset().union(*[arguments.get(operand, ()) for operand in operands])
        if _INSTRUCTION.search(line) or name.startswith("%async-collective-start"):
            names.append(name)
    return [(name, arguments[name]) for name in names]


def _groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    if listed := _LISTED.search(line):
        return tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", listed["groups"])))
    if iota := _IOTA.search(line):
        ids = _iota(iota["ids"], iota["order"])
        return tuple(map(tuple, ids.reshape(_numbers(iota["shape"])).tolist()))
    if mesh := _MESH.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh["mesh"])}
        over = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh["over"])]
        shape = tuple(sizes.values())
        ids = _iota(mesh["ids"] or str(shape), mesh["order"]).reshape(shape)
        last = range(ids.ndim - len(over), ids.ndim)
        members = math.prod(ids.shape[i] for i in over)
        return tuple(map(tuple, np.moveaxis(ids, over, last).reshape(-1, members).tolist()))
    if "replica_groups={}" in line or "replica_groups" not in line:
        return (tuple(range(devices)),)
    raise ValueError(
        "this collective's groups of devices are in a notation that is not known here; please "
        f"report it with the version of JAX: {line.strip()}"
    )


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Numbers of devices as ``[4,2]T(1,0)`` writes them: counted up in a shape, and transposed."""
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _bytes(shape: re.Match) -> int:
    bits = 8 if shape["dtype"] == "pred" else _numbers(shape["dtype"])[0]
    return math.prod(_numbers(shape["dims"])) * bits // 8
