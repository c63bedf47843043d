"""Selection by a function of the user's own, which leaves slots empty where it likes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

from demo_optax._src import checks
from demo_optax._src.arrays import BoolScalar
from demo_optax._src.compression import sparse
from demo_optax._src.compression.top_k import TopK

Choice = Callable[[Any, int], Any]
"""Returns int32 positions ``(blocks, k)`` for coefficients ``(blocks, n)`` and ``k``."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Selector of up to ``k`` of the ``n`` coefficients of a block, which ``choose`` chooses.

    It is that of ``k`` positions in a block with ``k`` more elements behind it, which are zero and
    go nowhere. The position of an empty slot is one of these.
    """

    n: int
    k: int
    choose: Choice
    sends_positions = True
    sender_weight_sums = staticmethod(sparse.sender_weight_sums)

    @property
    def _of_longer(self) -> TopK:
        return TopK(self.n + self.k, self.k)

    @property
    def workers_at_once(self) -> int:
        return self._of_longer.workers_at_once

    def select(self, coefficients: Float[Array, "blocks n"]) -> Int32[Array, "blocks k"]:
        positions = self.choose(coefficients, self.k)
        shape = len(coefficients), self.k
        checks.made_arrays("selection", self.choose, [positions], [shape], jnp.int32)
        positions = jnp.sort(positions, axis=1)
        slots = jnp.arange(self.k, dtype=jnp.int32)[None]
        return jnp.where(positions < self.n, positions, self.n + slots)

    def take(
        self, blocks: Shaped[Array, "blocks n"], positions: Int32[Array, "blocks k"]
    ) -> Shaped[Array, "blocks k"]:
        return sparse.take(self._longer(blocks), positions)

    def add(
        self,
        blocks: Shaped[Array, "blocks n"],
        positions: Int32[Array, "blocks k"],
        values: Shaped[Array, "blocks k"],
    ) -> Shaped[Array, "blocks n"]:
        return sparse.add(self._longer(blocks), positions, values)[:, : self.n]

    def add_all(
        self,
        blocks: Float[Array, "blocks n"],
        positions: Int32[Array, "workers blocks k"],
        values: Float32[Array, "workers blocks k"],
    ) -> Float[Array, "blocks n"]:
        return sparse.add_all(self._longer(blocks), positions, values)[:, : self.n]

    def position_words(self, num_blocks: int) -> int:
        return self._of_longer.position_words(num_blocks)

    def encode(self, positions: Int32[Array, "blocks k"]) -> UInt32[Array, "words"]:
        return self._of_longer.encode(positions)

    def decode(
        self, words: UInt32[Array, "words"], num_blocks: int
    ) -> tuple[Int32[Array, "{num_blocks} k"], BoolScalar]:
        return self._of_longer.decode(words, num_blocks)

    def _longer(self, blocks: Shaped[Array, "blocks n"]) -> Shaped[Array, "blocks longer"]:
        return jnp.pad(blocks, ((0, 0), (0, self.k)))
