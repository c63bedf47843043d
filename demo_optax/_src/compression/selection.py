"""Selectors, which decide which coefficients of each block are sent. Each kind has its own file.

A choice of the user's own is made a selector by `Chosen`. To add a selector here, write a frozen
dataclass with the methods that `Selector` names, and enter it in `Selection` and in `SELECTORS`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

from jaxtyping import Array, Float, Int32, Shaped

from demo_optax._src.compression.bins import Bins
from demo_optax._src.compression.known_positions import SharedSet, SharedSlice
from demo_optax._src.compression.sparse import AllCoefficients
from demo_optax._src.compression.top_k import TopK


class Selector(Protocol):
    """Decides which ``k`` of the ``n`` coefficients of a block are sent.

    Only the selector knows what its positions mean; they are an int32 array with a row for each
    block. It may assume ``k < n``. Selectors are frozen dataclasses: `with_count` replaces ``k``,
    and their ``repr`` enters the checksum.

    A selector whose positions every worker knows has also:

    - ``positions(num_blocks, step)``: the positions of a step, the same on all workers and unique
      in each block.

    A selector whose positions each worker chooses and sends has also:

    - ``workers_at_once``: the number of workers whose messages are decoded and averaged together.
    - ``select(coefficients)``: the positions that it chooses by the coefficients.
    - ``add_all(blocks, positions, values)``: adds the values of several workers, in arrays with an
      axis of workers in front, one worker after the other.
    - ``sender_weight_sums(positions, weights)``: float32 ``(workers, blocks, k)``, for each of
      these coefficients the sum of the weights ``(workers, 1, 1)`` of its senders. A rejected
      worker has the weight 0.
    - ``position_words(num_blocks)``: how many words the positions of so many blocks take in a
      packet.
    - ``encode(positions)``: the positions, packed into so many words.
    - ``decode(words, num_blocks)``: untrusted words, unpacked into positions that `add` accepts;
      and False if others were sent.
    """

    n: int
    k: int
    sends_positions: bool
    """Whether the packet holds positions; if not, all workers know them from the step."""

    def take(
        self, blocks: Shaped[Array, "blocks n"], positions: Int32[Array, "blocks places"]
    ) -> Shaped[Array, "blocks k"]:
        """Returns the elements at these positions."""
        ...

    def add(
        self,
        blocks: Float[Array, "blocks n"],
        positions: Int32[Array, "blocks places"],
        values: Float[Array, "blocks k"],
    ) -> Float[Array, "blocks n"]:
        """Adds values at these positions, which are unique in each block."""
        ...


Selection = Literal["topk", "bins", "random", "random-slicing", "striding", "slicing"]
SELECTIONS = get_args(Selection)

SELECTORS: dict[str, Callable[[int, int, int, int], Any]] = {
    "topk": lambda n, k, seed, stream: TopK(n, k),
    "bins": lambda n, k, seed, stream: Bins(n, k),
    "random": lambda n, k, seed, stream: SharedSet(n, k, "random", seed, stream),
    "striding": lambda n, k, seed, stream: SharedSet(n, k, "striding", seed, stream),
    "random-slicing": lambda n, k, seed, stream: SharedSlice(n, k, "random-slicing", seed, stream),
    "slicing": lambda n, k, seed, stream: SharedSlice(n, k, "slicing", seed, stream),
}


def with_count(selector: Any, k: int) -> Any:
    """Returns the same selector of another number of coefficients."""
    return AllCoefficients(selector.n) if k >= selector.n else dataclasses.replace(selector, k=k)
