"""Selection by a function of the user's own, which leaves slots empty where it likes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from demo_optax._src import checks
from demo_optax._src.compression import sparse
from demo_optax._src.compression.sparse import Dense, Picked, Picks
from demo_optax._src.compression.top_k import TopK

Choice = Callable[[Any, int], Any]
"""Returns int32 positions ``(blocks, k)`` for coefficients ``(blocks, n)`` and ``k``."""


@dataclasses.dataclass(frozen=True)
class Chosen(TopK):
    """Selector of up to ``k`` of the ``n`` coefficients of a block, which ``choose`` chooses.

    It is that of ``k`` positions in a block with ``k`` more elements behind it, which are zero and
    go nowhere. The position of an empty slot is one of these.
    """

    choose: Choice

    @property
    def places(self) -> int:
        return self.n + self.k

    def select(self, coefficients: Float[Array, "blocks n"]) -> Picks:
        positions = self.choose(coefficients, self.k)
        shape = len(coefficients), self.k
        checks.made_arrays("selection", self.choose, [positions], [shape], jnp.int32)
        positions = jnp.sort(positions, axis=1)
        slots = jnp.arange(self.k, dtype=jnp.int32)[None]
        return jnp.where(positions < self.n, positions, self.n + slots)

    def take(self, blocks: Dense, positions: Picks) -> Picked:
        return sparse.take(self._longer(blocks), positions)

    def add(self, blocks: Dense, positions: Picks, values: Picked) -> Dense:
        return sparse.add(self._longer(blocks), positions, values)[:, : self.n]

    def add_all(
        self,
        blocks: Float[Array, "blocks n"],
        positions: Int32[Array, "workers blocks k"],
        values: Float32[Array, "workers blocks k"],
    ) -> Float[Array, "blocks n"]:
        return sparse.add_all(self._longer(blocks), positions, values)[:, : self.n]

    def _longer(self, blocks: Dense) -> Shaped[Array, "blocks longer"]:
        return jnp.pad(blocks, ((0, 0), (0, self.k)))
