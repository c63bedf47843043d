"""Selectors, which decide which coefficients of each block are sent. Each kind has its own file.

A choice of the user's own is made a selector by `Chosen`. To add a selector here, write a frozen
dataclass with the methods of `SharedSelector` or `ChoosingSelector`, and enter it in `Selection`
and in `SELECTORS`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

from demo_optax._src.arrays import BoolScalar, IntScalar
from demo_optax._src.compression.bins import Bins
from demo_optax._src.compression.known_positions import SharedSet, SharedSlice
from demo_optax._src.compression.sparse import AllCoefficients
from demo_optax._src.compression.top_k import TopK

At = Int32[Array, "blocks places"]
AtOfAll = Int32[Array, "workers blocks places"]


class Selector(Protocol):
    """Decides which ``k`` of the ``n`` coefficients of a block are sent.

    Only the selector knows what its positions mean; they are an int32 array with a row for each
    block. It may assume ``k < n``. Selectors are frozen dataclasses: `with_count` replaces ``k``,
    and their ``repr`` enters the checksum.
    """

    n: int
    k: int
    sends_positions: bool
    """Whether the packet holds positions; if not, all workers know them from the step."""

    def take(self, blocks: Shaped[Array, "blocks n"], positions: At) -> Shaped[Array, "blocks k"]:
        """Returns the elements at these positions."""
        ...

    def add(
        self, blocks: Float[Array, "blocks n"], positions: At, values: Float[Array, "blocks k"]
    ) -> Float[Array, "blocks n"]:
        """Adds values at these positions, which are unique in each block."""
        ...


class SharedSelector(Selector, Protocol):
    """A selector whose positions every worker knows."""

    def positions(self, num_blocks: int, step: IntScalar) -> At:
        """Returns the positions of a step, the same on all workers and unique in each block."""
        ...


class ChoosingSelector(Selector, Protocol):
    """A selector whose positions each worker chooses and sends."""

    workers_at_once: int
    """The number of workers whose messages are decoded and averaged together."""

    def select(self, coefficients: Float[Array, "blocks n"]) -> At:
        """Chooses positions by the coefficients."""
        ...

    def add_all(
        self,
        blocks: Float[Array, "blocks n"],
        positions: AtOfAll,
        values: Float[Array, "workers blocks k"],
    ) -> Float[Array, "blocks n"]:
        """Adds the values of several workers, one worker after the other."""
        ...

    def sender_weight_sums(
        self, positions: AtOfAll, weights: Float32[Array, "workers 1 1"]
    ) -> Float32[Array, "workers blocks k"]:
        """Returns, for each of these coefficients, the sum of the weights of its senders.

        A rejected worker has the weight 0.
        """
        ...

    def position_words(self, num_blocks: int) -> int:
        """Returns how many words the positions of ``num_blocks`` blocks take in a packet."""
        ...

    def encode(self, positions: At) -> UInt32[Array, "words"]:
        """Packs positions into ``position_words(num_blocks)`` words."""
        ...

    def decode(self, words: UInt32[Array, "words"], num_blocks: int) -> tuple[At, BoolScalar]:
        """Unpacks untrusted words into positions that `add` accepts; False if others were sent."""
        ...


Selection = Literal["topk", "bins", "random", "random-slicing", "striding", "slicing"]
SELECTIONS = get_args(Selection)

AnySelector = Any
"""Either a `SharedSelector` or a `ChoosingSelector`."""

SELECTORS: dict[str, Callable[[int, int, int, int], AnySelector]] = {
    "topk": lambda n, k, seed, stream: TopK(n, k),
    "bins": lambda n, k, seed, stream: Bins(n, k),
    "random": lambda n, k, seed, stream: SharedSet(n, k, "random", seed, stream),
    "striding": lambda n, k, seed, stream: SharedSet(n, k, "striding", seed, stream),
    "random-slicing": lambda n, k, seed, stream: SharedSlice(n, k, "random-slicing", seed, stream),
    "slicing": lambda n, k, seed, stream: SharedSlice(n, k, "slicing", seed, stream),
}


def with_count(selector: AnySelector, k: int) -> AnySelector:
    """Returns the same selector of another number of coefficients."""
    return AllCoefficients(selector.n) if k >= selector.n else dataclasses.replace(selector, k=k)
