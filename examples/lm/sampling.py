"""Text that a model writes by itself."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .tokens import Tokens


def samples(
    logits_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    tokens: Tokens,
    context: int,
    prompts: list[str],
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """Each prompt and ``length`` tokens after it.

    Args:
      logits_fn: from parameters and tokens ``(1, context)`` to logits
        ``(1, context, vocabulary)``.
      params: the model's parameters, on one device.
      tokens: of the model.
      context: the last tokens that the model sees, as many as it was trained on.
      prompts: an empty one begins a document.
      length: of what is written, in tokens.
      temperature: below 1 the likely gets likelier; 0 always takes the likeliest.
      seed: of the draws.
    """
    write = jax.jit(functools.partial(_write, logits_fn, tokens.vocabulary, context, temperature))
    written = []
    for number, prompt in enumerate(prompts):
        start = np.roll(tokens.encode([prompt]), 1)  # the end of a document comes to the front
        room = np.pad(start.astype(np.int32), (0, length + context))
        key = jax.random.fold_in(jax.random.key(seed), number)
        whole = write(params, room, jnp.arange(len(start), len(start) + length), key)
        written.append(tokens.decode(np.asarray(whole)[1 : len(start) + length]))
    return written


def _write(logits_fn, vocabulary, context, temperature, params, room_T, positions, key):
    """Fills positions of the tokens ``room_T`` in their order, each from those before it."""

    def one(room_T, position):
        first = jnp.maximum(position - context, 0)
        seen = jax.lax.dynamic_slice(room_T, (first,), (context,))
        logits_V = logits_fn(params, seen[None])[0, position - 1 - first, :vocabulary]
        draw = jax.random.categorical(jax.random.fold_in(key, position), logits_V / temperature)
        token = draw if temperature else jnp.argmax(logits_V)
        return room_T.at[position].set(token.astype(jnp.int32)), None

    return jax.lax.scan(one, room_T, positions)[0]
