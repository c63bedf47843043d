"""Which coefficients of each block are sent."""

import jax
import jax.numpy as jnp


def top_k(coefficients: jax.Array, k: int, real: jax.Array | None = None) -> jax.Array:
    """Positions of the ``k`` largest magnitudes of each block.

    Args:
      coefficients: ``(blocks, n)``; compared in float32, the only dtype that XLA's fast path of
        ``top_k`` takes.
      k: how many, at most ``n``.
      real: ``(blocks, n)`` booleans; positions that are padding are taken only where a block has
        fewer than ``k`` others, as places in the message that nobody reads.

    Returns:
      int32 ``(blocks, k)``, unique in each block.
    """
    magnitudes = jnp.abs(coefficients.astype(jnp.float32))
    if real is not None:
        magnitudes = jnp.where(real, magnitudes, -1.0)
    return jax.lax.top_k(magnitudes, k)[1]
