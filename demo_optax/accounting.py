"""Bytes on the wire, from shapes alone."""

import math

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from demo_optax import axes
from demo_optax.axes import AxisName
from demo_optax.compression import scheme
from demo_optax.compression.scheme import Compression


def packet_bytes(
    tx_or_compression: optax.GradientTransformation | Compression,
    params,
    axis_name: AxisName = "data",
) -> int:
    """Bytes that each worker hands to the collectives of one update.

    Read from the program that the update traces to, so that any optax chain can be asked;
    nothing is computed or allocated.

    Args:
      tx_or_compression: an optax transformation, or a compression alone.
      params: arrays or shapes of the parameters.
      axis_name: the axis that the transformation exchanges over.

    Returns:
      Bytes: the packet's size for `decoupled_momentum`, the dense gradient's for
      `mean_over_workers`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
      >>> packet_bytes(Compression(topk=8, values="bfloat16"), params)
      27536
    """
    if isinstance(tx_or_compression, Compression):
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(params))
        return 4 * scheme.arrange(tx_or_compression, shapes).layout.words
    tx = optax.with_extra_args_support(tx_or_compression)

    def update():
        values = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        gradient = axes.as_varying(values, axis_name)
        tx.update(gradient, tx.init(values), values)
        return jnp.zeros(())

    names = axes.names(axis_name)
    mesh = AbstractMesh((1,) * len(names), names)
    program = jax.make_jaxpr(jax.shard_map(update, mesh=mesh, in_specs=(), out_specs=P()))()
    return sum(
        math.prod(operand.aval.shape) * operand.aval.dtype.itemsize
        for equation in _equations(program.jaxpr)
        if equation.primitive.name.startswith(("all_gather", "psum", "all_reduce"))
        for operand in equation.invars
    )


def _equations(jaxpr: core.Jaxpr):
    """All equations of a program, those of its loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)
