"""The collectives of a step, which send data replicated over a worker's devices only once."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, UInt32

from demo_optax._src import axes, checks
from demo_optax._src.axes import AxisName
from demo_optax._src.compression.packet import MULTIPLE

Gather = Callable[[Any, Any], Any]


def gather(
    packet: UInt32[Array, "words"], axis_name: AxisName, own: Gather | None = None
) -> UInt32[Array, "workers words"]:
    """Gathers all workers' packets, with a type that marks them as equal under ``shard_map``.

    If the user has a function of their ``own`` for it, that one gathers them.
    """
    along = functools.partial(_gather_by, own) if own else gather_along
    if axis_name is None:
        return packet[None]
    if axes.manual_names(axis_name) != axes.names(axis_name):
        return along(packet, axis_name)
    return split_across_devices(lambda x: along(x, axis_name), packet, axis_name)


def _gather_by(own: Gather, words: UInt32[Array, "words"], axis_name: AxisName) -> Array:
    rows, shape = own(words, axis_name), (axes.size(axis_name), words.size)
    checks.made_arrays("gather", own, [rows], [shape], jnp.uint32)
    return declare_equal(rows, axis_name)


def declare_equal(x: Array, axis_name: AxisName) -> Array:
    """Types an array as equal on all workers, which JAX cannot know of a result of ``ppermute``.

    `demo_optax.AllGather` does it for its ``gather``. An exchange of your own needs it for packets
    that come neither from ``jax.lax.all_gather(..., to="invarying")`` nor from ``jax.lax.psum``.
    The program stays as it is, so it must be true.

    Args:
      x: any array, inside ``jax.shard_map`` or ``jax.vmap`` over the axis.
      axis_name: the workers' axis or axes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def largest(x):
      ...     neighbours = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
      ...     return declare_equal(jnp.maximum(x, neighbours), "data")
      >>> jax.vmap(largest, axis_name="data", out_axes=None)(jnp.array([3, 5]))
      Array(5, dtype=int32)
    """
    return _declare_equal.bind(x, names=axes.names(axis_name))


_declare_equal = Primitive("declare_equal")
_declare_equal.def_impl(lambda x, *, names: x)
mlir.register_lowering(_declare_equal, lambda context, x, *, names: [x])


@_declare_equal.def_abstract_eval
def _without_axes(x: Any, *, names: tuple[str, ...]) -> Any:
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=kind.varying - {*names}))


def _of_one_worker(axis_data: Any, arrays, dims, *, names: tuple[str, ...]) -> tuple[Any, Any]:
    (x,), (dim,) = arrays, dims
    if axis_data.name in names:
        x, dim = (x if dim is None else jax.lax.index_in_dim(x, 0, dim, keepdims=False)), None
        names = tuple(name for name in names if name != axis_data.name)
    return _declare_equal.bind(x, names=names), dim


batching.fancy_primitive_batchers[_declare_equal] = _of_one_worker


def gather_along(
    words: UInt32[Array, "words"], axis_name: AxisName
) -> UInt32[Array, "devices words"]:
    """Gathers the words of all devices along an axis and sends nothing along the others."""
    manual = axes.manual_names(axis_name)
    if manual != axes.names(axis_name):
        gathered = words  # vmap supports only the untiled form, for one axis at a time
        for name in reversed(axes.names(axis_name)):
            to = "invarying" if name in manual else "varying"
            gathered = jax.lax.all_gather(gathered, name, to=to)
        return gathered.reshape(-1, words.size)

    # On 64 TPUs XLA turns this gather into an all-reduce if it gathers the rows of a matrix, or is
    # fused with its producer.
    row = jax.lax.optimization_barrier(words[None])
    row = jax.lax.all_gather(row, axis_name, axis=1, tiled=True, to="invarying")
    return row.reshape(-1, words.size)


def sum_over_shards(
    arrays: Sequence[Float[Array, "..."]], over: Sequence[tuple[str, ...]]
) -> list[Float[Array, "..."]]:
    """Adds each array over the axes that shard its tensor, in float32 and in a fixed order.

    The order of an all-reduce may vary. ``over`` are the axes of each array; one without any stays
    as it is.
    """
    totals = list(arrays)
    for names in dict.fromkeys(filter(None, over)):
        members = [i for i, along in enumerate(over) if along == names]
        flat = jnp.concatenate([arrays[i].ravel().astype(jnp.float32) for i in members])
        words = gather_along(jax.lax.bitcast_convert_type(flat, jnp.uint32), names)
        total = jax.lax.bitcast_convert_type(words, jnp.float32).sum(axis=0)
        ends = itertools.accumulate(arrays[i].size for i in members)
        for i, x in zip(members, jnp.split(total, list(ends)), strict=False):
            totals[i] = x.reshape(arrays[i].shape).astype(arrays[i].dtype)
    return totals


def all_to_all(
    packets: UInt32[Array, "workers words"], axis_name: AxisName
) -> UInt32[Array, "workers words"]:
    """Gives worker ``i`` the ``i``-th packet of each worker."""
    if axis_name is None:
        return packets
    all_names = axes.names(axis_name)
    if axes.manual_names(axis_name) != all_names:
        # Under vmap the shape would be wrong for an array that does not vary, so make it vary.
        packets = packets + jnp.uint32(0) * axes.index(axis_name).astype(jnp.uint32)
        exchanged = packets.reshape(*map(axes.size, all_names), -1)
        for place, name in enumerate(all_names):
            exchanged = jax.lax.all_to_all(exchanged, name, place, place, tiled=True)
        return exchanged.reshape(packets.shape)
    return split_across_devices(
        lambda x: jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True), packets, axis_name
    )


def split_across_devices(
    collective: Callable, words: UInt32[Array, "*some words"], axis_name: AxisName
):
    """Runs a collective in which each device of a worker sends a different part of the words.

    The received parts are then gathered inside the worker, along the axes over which the types say
    that the words are the same.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    differs = {*axes.names(axis_name), *axes.varying(words)}
    replicated = tuple(name for name in manual if name not in differs)
    if not replicated or not axes.types_are_tracked(manual):
        return collective(words)
    size = words.shape[-1]
    padding = [(0, 0)] * (words.ndim - 1) + [(0, -size % (axes.size(replicated) * MULTIPLE))]
    parts = jnp.pad(words, padding)
    parts = parts.reshape(*words.shape[:-1], axes.size(replicated), -1)
    part = jnp.take(parts, jax.lax.axis_index(replicated), axis=-2)
    received = collective(part)
    whole = jax.lax.all_gather(
        received, replicated, axis=received.ndim - 1, tiled=True, to="invarying"
    )
    return whole[..., :size]
