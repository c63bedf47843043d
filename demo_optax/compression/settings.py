"""Settings as small values: what is sent, and the coordinates in which a momentum is stored."""

import dataclasses
from typing import Literal, get_args

import jax
from jaxtyping import PRNGKeyArray

from demo_optax import checks
from demo_optax.arrays import IntScalar
from demo_optax.compression import transforms
from demo_optax.compression.blocks import BLOCK_RULES, BlockGeometry, BlockRule, block_geometry
from demo_optax.compression.indices import INDEX_CODINGS, IndexCoding
from demo_optax.compression.selection import SELECTIONS, Selection
from demo_optax.compression.transforms import TRANSFORMS, Basis, TransformName
from demo_optax.compression.values import ROUNDINGS, VALUE_CODINGS, Rounding, ValueCoding

BASIS, DRAW, ROUND, STORE, ROUND_BACK = range(5)
"""Purposes of keys: the redrawn basis, shared positions, rounding of sent values, of stored momenta
and of what owners send back."""

Exchange = Literal["all-gather", "two-phase"]
EXCHANGES = get_args(Exchange)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Coordinates:
    """The part of a compression that decides how a momentum is stored.

    A static node of the optimizer state: it holds no array, takes no part in computations, and
    tells states of different transforms or blocks apart. Attributes as in
    `demo_optax.Compression`; ``seed`` is that of the ``"random"`` transform, and 0 for others.
    """

    transform: TransformName
    block_side: int
    block_rule: BlockRule
    seed: int

    def geometry(self, shape: tuple[int, ...]) -> BlockGeometry:
        """The blocks of a tensor."""
        return block_geometry(shape, self.block_side, self.block_rule)

    def basis(self, step: IntScalar) -> Basis | None:
        """The transform's basis at a step, the same on all workers; None for the identity."""
        return transforms.make_basis(self.transform, _key(self.seed, step, BASIS))


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is sent of a momentum, and how.

    Attributes:
      topk: coefficients sent of each block; all of them where a block has fewer.
      block_side: elements per side of a block (see `demo_optax.compression.blocks`).
      value_coding: of the values on the wire, from 32 bits down to 1: ``"float32"``,
        ``"bfloat16"``, ``"float8"``, ``"int8"``, ``"int4"``, ``"int2"``, ``"sign"``.
      transform: ``"dct"``, ``"hadamard"``, ``"randomized-dct"`` (the DCT of a block whose elements
        have taken fixed random signs, for shared positions), ``"random"`` (orthogonal matrices
        redrawn on each step) or ``"identity"``.
      block_rule: ``"pad"`` or ``"divisor"``, for dimensions that ``block_side`` does not divide.
      selection: ``"topk"``; ``"bins"``, the largest of each of ``topk`` bins, which costs no sort
        and fewer bits (take powers of two); or one that all workers know from the step, so that no
        positions travel: ``"random"`` positions; ``"random-slicing"``, a run from a random position
        on, the same in all blocks, which costs slices where others cost gathers and scatters and
        wants ``transform="randomized-dct"``; FlexDeMo's ``"striding"`` and ``"slicing"``.
      index_coding: of the positions of ``"topk"``, ``"packed"``, ``"elias-fano"`` or ``"bitmap"``;
        with ``"auto"`` the smallest for each block size.
      rounding: of the values, to the ``"nearest"`` or ``"stochastic"``.
      norm_limit: largest norm of a worker's message, as a multiple of the median of all workers'
        messages; what is more stays in its momentum. It bounds what one broken or malicious worker
        can do, but in two phases only on the way to the owners, each of whom decides alone on its
        share of the blocks. Of a worker with sharded parameters, each shard's. None sets no limit.
      seed: of everything that is drawn.
      exchange: ``"all-gather"`` gives every worker all packets, traffic that grows with their
        number. In ``"two-phase"`` each worker owns an equal share of the blocks: it averages what
        the others send of these, and sends the mean back, compressed as well; what that leaves out
        stays with the owner for the next steps. The traffic is that of a packet and of all owners'
        together, which hardly grow with the number of workers.
      topk_back: coefficients of each block that an owner sends back; four times ``topk`` by
        default, and with shared positions the very same.
      value_coding_back: of the values that it sends back; ``value_coding`` by default.
      delay: 0, or 1 to exchange the packets of the last step while this one computes its gradient.
        What they carry leaves the momentum where they count, a step later.

    Raises:
      ValueError: a setting is out of range, or needs another one.
      TypeError: an integer setting is an array, as under ``optax.inject_hyperparams``.

    Example:
      >>> Compression(topk=8, value_coding="int4").block_side
      64
    """

    topk: int = 32
    block_side: int = 64
    value_coding: ValueCoding = "float32"
    transform: TransformName = "dct"
    block_rule: BlockRule = "pad"
    selection: Selection = "topk"
    index_coding: IndexCoding | Literal["auto"] = "auto"
    rounding: Rounding = "nearest"
    norm_limit: float | None = None
    seed: int = 0
    exchange: Exchange = "all-gather"
    topk_back: int | None = None
    value_coding_back: ValueCoding | None = None
    delay: int = 0

    def __post_init__(self):
        checks.static_integer("topk", self.topk, at_least=1)
        checks.static_integer("block_side", self.block_side, at_least=1)
        checks.static_integer("seed", self.seed, at_least=0)
        checks.one_of("value_coding", self.value_coding, VALUE_CODINGS)
        checks.one_of("transform", self.transform, TRANSFORMS)
        checks.one_of("block_rule", self.block_rule, BLOCK_RULES)
        checks.one_of("selection", self.selection, SELECTIONS)
        checks.one_of("index_coding", self.index_coding, ("auto", *INDEX_CODINGS))
        if self.selection != "topk" and self.index_coding != "auto":
            raise ValueError(
                f"index_coding={self.index_coding!r} is for selection='topk': with "
                f"selection={self.selection!r} positions have one coding, or do not travel. "
                "Leave it out."
            )
        checks.one_of("rounding", self.rounding, ROUNDINGS)
        if self.norm_limit is not None:
            checks.in_interval("norm_limit", self.norm_limit, "[1, inf)")
        checks.one_of("exchange", self.exchange, EXCHANGES)
        checks.static_integer("delay", self.delay, at_least=0)
        checks.one_of("delay", self.delay, (0, 1))
        back = {"topk_back": self.topk_back, "value_coding_back": self.value_coding_back}
        given = [name for name, value in back.items() if value is not None]
        if given and self.exchange != "two-phase":
            raise ValueError(
                f"{given[0]}={back[given[0]]!r} says what owners send back, but "
                f"exchange={self.exchange!r} knows no owners: leave it out, or set "
                'exchange="two-phase".'
            )
        if self.topk_back is not None:
            checks.static_integer("topk_back", self.topk_back, at_least=1)
            if not self.positions_travel:
                raise ValueError(
                    f"topk_back={self.topk_back} is for selection='topk' and 'bins': with "
                    f"selection={self.selection!r} owners send back the {self.topk} coefficients "
                    "that were sent to them. Leave it out."
                )
        if self.value_coding_back is not None:
            checks.one_of("value_coding_back", self.value_coding_back, VALUE_CODINGS)

    @property
    def positions_travel(self) -> bool:
        """Whether each worker sends the positions of its own coefficients."""
        return self.selection in ("topk", "bins")

    @property
    def coordinates(self) -> Coordinates:
        """What decides how a momentum is stored."""
        seed = self.seed if transforms.is_redrawn(self.transform) else 0
        return Coordinates(self.transform, self.block_side, self.block_rule, seed)

    @property
    def way_back(self) -> "Compression":
        """How owners compress what they send back."""
        four_times = 4 * self.topk if self.positions_travel else self.topk
        return dataclasses.replace(
            self,
            topk=self.topk_back or four_times,
            topk_back=None,
            value_coding=self.value_coding_back or self.value_coding,
            value_coding_back=None,
        )

    def rounding_key(self, step: IntScalar, purpose: int, worker: IntScalar) -> PRNGKeyArray | None:
        """The key by which a worker rounds values; None where it rounds to the nearest."""
        if self.rounding == "nearest":
            return None
        return jax.random.fold_in(self.key(step, purpose), worker)

    def key(self, step: IntScalar, purpose: int) -> PRNGKeyArray:
        """The key of a step's draws, the same on all workers."""
        return _key(self.seed, step, purpose)


def _key(seed: int, step: IntScalar, purpose: int) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), purpose)
