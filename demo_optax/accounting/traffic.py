"""Bytes on the wire, from shapes alone."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from demo_optax import axes, two_phase
from demo_optax._decoupled_momentum import decoupled_momentum
from demo_optax.axes import AxisName
from demo_optax.compression import Compression, indices, make_plan
from demo_optax.compression.blocks import block_geometry
from demo_optax.parallel import shards
from demo_optax.parallel.layout import layout_of


def packet_bytes(
    tx_or_compression: optax.GradientTransformation | Compression,
    params,
    axis_name: AxisName = "data",
    mesh: Mesh | AbstractMesh | None = None,
    param_specs=None,
    workers: int = 1,
) -> int:
    """Bytes that each worker hands to the collectives of one update, with local steps of a round.

    Read from the program that the update traces to, so that any optax chain can be asked;
    nothing is computed or allocated.

    Args:
      tx_or_compression: an optax transformation, or a compression alone.
      params: arrays or shapes of the parameters.
      axis_name: the axis that the transformation exchanges over.
      mesh: where workers have several devices, their mesh; it may be a
        ``jax.sharding.AbstractMesh``. The optimizer must then exchange over ``axis_name``.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker.
        Each device sends a packet of its own shards; those that hold the same send parts of one.
      workers: how many there are, where no mesh says it. An exchange in two phases depends on it.

    Returns:
      Bytes: the packet's size for `decoupled_momentum`, the dense gradient's for
      `mean_over_workers`, 0 for an optimizer of a single worker (``axis_name=None``). Of a worker
      with several devices, what all of them send together.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
      >>> packet_bytes(Compression(topk=8, value_coding="bfloat16"), params)
      27648
    """
    if mesh is None and param_specs is not None:
        raise ValueError(
            f"param_specs={param_specs} say how a worker's devices share its parameters, but how "
            "many there are only the mesh does: give mesh as well."
        )
    if mesh is not None:
        tx = tx_or_compression
        if isinstance(tx, Compression):
            tx = decoupled_momentum(compression=tx, axis_name=axis_name)
        each = layout_of(tx, params, mesh, axis_name, param_specs).variation.sent
        return each * mesh.size // shards.num_workers(mesh, axis_name)
    if isinstance(tx_or_compression, Compression):
        plan = make_plan(tx_or_compression, tuple(x.shape for x in jax.tree.leaves(params)))
        if tx_or_compression.exchange == "two-phase":
            return 4 * sum(two_phase.words(plan, workers))
        return 4 * plan.layout.words
    tx = optax.with_extra_args_support(tx_or_compression)

    def update():
        values = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        gradient = axes.as_varying(values, axis_name)
        tx.update(gradient, tx.init(values), values, **axes.EXTRA_ARGS)

    first, *others = axes.names(axis_name) or (None,)
    sizes = {} if first is None else {first: workers, **dict.fromkeys(others, 1)}
    program = axes.trace_worker(update, sizes)
    return axes.bytes_handed_over(program, axis_name)


def received_bytes(compression: Compression, params, workers: int) -> float:
    """Bytes that each worker gets over its link in one exchange.

    All packets but its own; in two phases the parts of packets that concern its share of the
    blocks, and the other owners' packets, whose sum does not grow with the number of workers.

    Args:
      compression: what is sent.
      params: arrays or shapes of the parameters.
      workers: how many there are.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> params = jax.ShapeDtypeStruct((4096, 16384), jnp.float32)
      >>> gather = Compression(topk=8, value_coding="int4")
      >>> owners = dataclasses.replace(gather, exchange="two-phase")
      >>> [round(received_bytes(c, params, 64) / 1e6, 1) for c in (gather, owners)]
      [16.7, 1.1]
    """
    others = workers - 1
    if compression.exchange == "two-phase":
        plan = make_plan(compression, tuple(x.shape for x in jax.tree.leaves(params)))
        dealt, gathered = two_phase.words(plan, workers)
        return 4 * (dealt / workers + gathered) * others
    return packet_bytes(compression, params) * others


def reference_bytes(params, topk: int = 32, block_side: int = 64) -> int:
    """What the published code sends by its own count: 12 bytes for each coefficient.

    An int64 index and a float32 value, for blocks by the rule ``"divisor"``; the counts in the
    byte table of Peng et al., version 2.

    Args:
      params: arrays or shapes of the parameters.
      topk: coefficients of each block.
      block_side: elements per side of a block at most.

    Returns:
      Bytes per step and worker.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> reference_bytes(jax.ShapeDtypeStruct((1024, 4096), jnp.float32), topk=8)
      98304
    """
    blocks = [block_geometry(x.shape, block_side, "divisor") for x in jax.tree.leaves(params)]
    return sum(12 * b.num_blocks * min(topk, b.block_size) for b in blocks)


def dense_bytes(params, bytes_per_value: int = 4) -> int:
    """Bytes of the whole gradient, which data parallelism hands to an all-reduce.

    Example:
      >>> import jax.numpy as jnp
      >>> dense_bytes({"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, bytes_per_value=2)
      144
    """
    return bytes_per_value * sum(math.prod(x.shape) for x in jax.tree.leaves(params))


class IndexCost(NamedTuple):
    """What the position of one of ``k`` of ``n`` coefficients costs.

    Attributes:
      coding: the cheapest coding.
      bits: per position.
      bound: bits that no coding can beat, ``log2(C(n, k)) / k``.
    """

    coding: str
    bits: float
    bound: float


def index_cost(n: int, k: int) -> IndexCost:
    """Bits per position for ``k`` of ``n`` coefficients, by the coding that ``"auto"`` takes.

    Example:
      >>> cost = index_cost(4096, 8)
      >>> cost.coding, cost.bits, round(cost.bound, 2)
      ('elias-fano', 10.875, 10.09)
    """
    coding = indices.cheapest(n, k)
    return IndexCost(coding, indices.index_bits(n, k, coding) / k, indices.entropy_bits(n, k) / k)
