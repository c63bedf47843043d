"""Gradients of one worker's own loss."""

import functools
from collections.abc import Callable, Sequence

import jax

from demo_optax import axes
from demo_optax.axes import AxisName


def local_value_and_grad(fun: Callable, axis_name: AxisName, **kwargs) -> Callable:
    """``jax.value_and_grad`` whose gradients stay local to each worker of ``axis_name``.

    Inside ``jax.shard_map``, ``jax.grad`` with respect to replicated parameters sums over the
    axis by itself, so that nothing would be left to exchange. Here the parameters are typed as
    varying first. Under ``pmap`` and ``vmap`` gradients are local anyway, and it is the same.

    Args:
      fun: the worker's loss; its first argument is differentiated, or ``argnums``. It must not
        average over ``axis_name`` itself.
      axis_name: the workers' axis, or axes.
      **kwargs: for ``jax.value_and_grad``, such as ``has_aux``.

    Returns:
      A function like that of ``jax.value_and_grad``. Value and gradient differ between workers.

    Raises:
      NameError: ``axis_name`` is not bound where the function is called.
      TypeError: what is differentiated was not given by position.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> def gradient(w, x):
      ...     return local_value_and_grad(lambda w, x: w * x.sum(), "data")(w, x)[1][None]
      >>> jax.jit(jax.shard_map(
      ...     gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
      ... ))(jnp.float32(1), jax.device_put(jnp.ones(3), jax.NamedSharding(mesh, P("data"))))
      Array([3.], dtype=float32)
    """
    argnums = kwargs.get("argnums", 0)
    if isinstance(argnums, Sequence):
        kwargs["argnums"] = argnums = tuple(argnums)
    value_and_grad = jax.value_and_grad(fun, **kwargs)
    differentiated = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(fun)
    def wrapped(*args, **kwds):
        axes.size(axis_name)  # which raises where it is not bound
        if max(differentiated) >= len(args):
            raise TypeError(
                f"argument {max(differentiated)} is differentiated, but only {len(args)} were "
                f"given by position, and {sorted(kwds)} by name: pass it by position."
            )
        local = list(args)
        for i in differentiated:
            local[i] = axes.as_varying(local[i], axis_name)
        return value_and_grad(*local, **kwds)

    return wrapped
