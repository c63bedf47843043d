"""The collectives of a step. What several devices of a worker share crosses its link once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.compression.packet import MULTIPLE


def gather(packet: UInt32[Array, "words"], axis_name: AxisName) -> UInt32[Array, "workers words"]:
    """All workers' packets. Under ``shard_map`` the type says that they are equal on all."""
    if axis_name is None:
        return packet[None]
    manual = axes.manual_names(axis_name)
    if manual != axes.names(axis_name):
        gathered = packet  # vmap knows only the plain form, and only one axis at a time
        for name in reversed(axes.names(axis_name)):
            to = "invarying" if name in manual else "varying"
            gathered = jax.lax.all_gather(gathered, name, to=to)
        return gathered.reshape(-1, packet.size)

    def gather_flat(x):
        # As rows of a matrix, or fused with its producer, it would be an all-reduce on 64 TPUs.
        row = jax.lax.optimization_barrier(x[None])
        row = jax.lax.all_gather(row, axis_name, axis=1, tiled=True, to="invarying")
        return row.reshape(-1, x.size)

    return split_across_devices(gather_flat, packet, axis_name)


def all_to_all(
    packets: UInt32[Array, "workers words"], axis_name: AxisName
) -> UInt32[Array, "workers words"]:
    """Gives worker ``i`` the ``i``-th packet of each worker."""
    if axis_name is None:
        return packets
    every = axes.names(axis_name)
    if axes.manual_names(axis_name) != every:
        # vmap gives a wrong shape for an array that does not vary: make it vary.
        packets = packets + jnp.uint32(0) * axes.index(axis_name).astype(jnp.uint32)
        dealt = packets.reshape(*map(axes.size, every), -1)
        for place, name in enumerate(every):
            dealt = jax.lax.all_to_all(dealt, name, place, place, tiled=True)
        return dealt.reshape(packets.shape)
    return split_across_devices(
        lambda x: jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True), packets, axis_name
    )


def split_across_devices(
    collective: Callable, words: UInt32[Array, "*some words"], axis_name: AxisName
):
    """A collective along the workers, each device of which sends another part of the same words.

    The parts are joined inside the worker.
    """
    copies = axes.replicated_axes(words, axis_name)
    if not copies:
        return collective(words)
    size = words.shape[-1]
    padding = [(0, 0)] * (words.ndim - 1) + [(0, -size % (axes.size(copies) * MULTIPLE))]
    parts = jnp.pad(words, padding)
    parts = parts.reshape(*words.shape[:-1], axes.size(copies), -1)
    own = jnp.take(parts, jax.lax.axis_index(copies), axis=-2)
    arrived = collective(own)
    whole = jax.lax.all_gather(arrived, copies, axis=arrived.ndim - 1, tiled=True, to="invarying")
    return whole[..., :size]
