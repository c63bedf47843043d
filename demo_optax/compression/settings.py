"""Settings as small values: what is sent, and the momentum_format in which a momentum is stored."""

import dataclasses

import jax
from jaxtyping import PRNGKeyArray

from demo_optax import checks
from demo_optax.arrays import IntScalar
from demo_optax.compression import transforms
from demo_optax.compression.blocks import BLOCK_RULES, BlockGeometry, BlockRule, block_geometry
from demo_optax.compression.selection import SELECTORS, Selection
from demo_optax.compression.transforms import BASIS_STREAM, TRANSFORMS, Basis, TransformName
from demo_optax.compression.values import VALUE_CODINGS, ValueCoding


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MomentumFormat:
    """The part of a compression that decides how a momentum is stored.

    A static node of the optimizer state: it holds no array and tells states of different
    transforms or blocks apart. Attributes as in `demo_optax.Compression`; ``seed`` is that of the
    ``"random"`` transform, and 0 for others.
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
        return transforms.make_basis(
            self.transform, transforms.key_of(self.seed, step, BASIS_STREAM)
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class BlockSides:
    """Sides of the blocks of every tensor: a static node of the optimizer state.

    An update compares them (`demo_optax.checks.gradient_fits_state`). ``==`` is always True:
    ``optax.tree.map_params`` compares states of different shapes, and must find them equal.
    """

    of_leaves: tuple[tuple[int, ...], ...]

    always_equal = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSides)

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is sent of a momentum. How it travels is an exchange's affair (`demo_optax.AllGather`).

    Attributes:
      topk: coefficients sent of each block; all of them where a block has fewer.
      block_side: elements per side of a block (see `demo_optax.compression.blocks`).
      value_coding: of the values on the wire, from 32 bits down to 1: ``"float32"``,
        ``"bfloat16"``, ``"int8"``, ``"int4"``, ``"int2"``, ``"sign"``.
      transform: ``"dct"``, ``"hadamard"``, ``"randomized-dct"``, ``"random"`` or ``"identity"``.
        ``"randomized-dct"`` multiplies the elements by fixed random signs first; it is for shared
        positions. ``"random"`` draws orthogonal matrices anew on each step.
      block_rule: ``"pad"`` or ``"divisor"``, for dimensions that ``block_side`` does not divide.
      selection: ``"topk"``, or ``"bins"``, the largest of each of ``topk`` bins. Bins need no sort
        and fewer bits; take powers of two. With the others all workers know the positions from the
        step, and none are sent: ``"random"``, ``"random-slicing"``, and FlexDeMo's
        ``"striding"`` and ``"slicing"``. ``"random-slicing"`` sends a run of coefficients from a
        random position on, the same in all blocks. It needs slices, not gathers and scatters. Use
        it with ``transform="randomized-dct"``.
      seed: of everything that is drawn.

    Raises:
      ValueError: a setting is out of range.
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
    seed: int = 0

    def __post_init__(self):
        for name, least in {"topk": 1, "block_side": 1, "seed": 0}.items():
            checks.static_integer(name, getattr(self, name), at_least=least)
            object.__setattr__(self, name, int(getattr(self, name)))  # whose repr is checksummed
        checks.one_of("value_coding", self.value_coding, VALUE_CODINGS)
        checks.one_of("transform", self.transform, TRANSFORMS)
        checks.one_of("block_rule", self.block_rule, BLOCK_RULES)
        checks.one_of("selection", self.selection, SELECTORS)

    @property
    def momentum_format(self) -> MomentumFormat:
        """What decides how a momentum is stored."""
        seed = self.seed if transforms.is_redrawn(self.transform) else 0
        return MomentumFormat(self.transform, self.block_side, self.block_rule, seed)

    def key(self, step: IntScalar, purpose: int) -> PRNGKeyArray:
        """The key of a step's draws, the same on all workers."""
        return transforms.key_of(self.seed, step, purpose)
