"""Settings: what is sent of a momentum, and the format in which it is stored."""

import dataclasses
from collections.abc import Sequence

import jax

from demo_optax._src import checks
from demo_optax._src.arrays import Coefficients, IntScalar
from demo_optax._src.compression import transforms
from demo_optax._src.compression.blocks import BLOCK_RULES, BlockGeometry, BlockRule, block_geometry
from demo_optax._src.compression.known_positions import AllCoefficients
from demo_optax._src.compression.selection import SELECTORS, AnySelector, Selection
from demo_optax._src.compression.transforms import BASIS_STREAM, TRANSFORMS, Basis, TransformName
from demo_optax._src.compression.values import VALUE_CODINGS, ValueCoding


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MomentumFormat:
    """The settings of a compression that decide how a momentum is stored.

    A static node of the optimizer state: it holds no array, and makes the trees of states with
    different transforms or blocks unequal. Attributes are those of `demo_optax.Compression`.
    ``seed`` is 0 unless the transform is ``"random"``.
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
        return TRANSFORMS[self.transform](transforms.key_of(self.seed, step, BASIS_STREAM))

    def advance(
        self, momentum: Coefficients, sides: Sequence[int], step: IntScalar
    ) -> Coefficients:
        """Changes blocks from the basis of the step before to that of this step."""
        if not transforms.is_redrawn(self.transform):
            return momentum
        old, new = self.basis(step - 1), self.basis(step)
        assert old and new
        return transforms.change_basis(momentum, sides, old, new)


@jax.tree_util.register_static
class TensorShapes(tuple[tuple[int, ...], ...]):
    """Shapes of all tensors: a static node of the optimizer state.

    No shapes equal all others: ``optax.tree.map_params`` makes a state of placeholders, which have
    none, and maps it against the real one.
    """

    def __eq__(self, other: object) -> bool:
        same = not self or not other or super().__eq__(other)
        return isinstance(other, TensorShapes) and same

    __ne__ = object.__ne__  # the opposite of `__eq__`, which a tuple's is not
    __hash__ = tuple.__hash__


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Compression:
    """What is sent of a momentum. An exchange decides how it travels (`demo_optax.AllGather`).

    Among arrays it is a static node: it has no leaves, and ``jax.jit`` compiles again for another.

    Attributes:
      topk: coefficients sent of each block; a block that has fewer sends all of them.
      block_side: elements per side of a block (see `demo_optax._src.compression.blocks`).
      value_coding: coding of the values in a packet, from 32 bits down to 1: ``"float32"``,
        ``"bfloat16"``, ``"int8"``, ``"int4"``, ``"int2"``, ``"sign"``.
      transform: ``"dct"``, ``"randomized-dct"``, ``"random"`` or ``"identity"``.
        ``"randomized-dct"`` multiplies the elements by fixed random signs first; it is for shared
        positions. ``"random"`` draws orthogonal matrices anew on each step.
      block_rule: for a dimension that ``block_side`` does not divide. ``"pad"``: the last block is
        smaller; only where the momentum is stored is it padded with zeros. ``"divisor"``: the side
        is a divisor of the dimension.
      selection: ``"topk"``, or ``"bins"``, the largest of each of ``topk`` bins. Bins need no sort
        and use fewer bits. Choose ``topk`` as a power of two. With the other selections all workers
        compute the positions from the step, and none are sent: ``"random"``,
        ``"random-slicing"``, and FlexDeMo's ``"striding"`` and ``"slicing"``.
        ``"random-slicing"`` sends a contiguous slice of coefficients from a random position on, the
        same in all blocks. It needs slices, not gathers and scatters. Use it with
        ``transform="randomized-dct"``.
      seed: random seed for drawn bases and positions.

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
            object.__setattr__(self, name, int(getattr(self, name)))  # its repr enters a checksum
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, not {self.seed}: give a smaller one.")
        checks.one_of("value_coding", self.value_coding, VALUE_CODINGS)
        checks.one_of("transform", self.transform, TRANSFORMS)
        checks.one_of("block_rule", self.block_rule, BLOCK_RULES)
        checks.one_of("selection", self.selection, SELECTORS)

    @property
    def momentum_format(self) -> MomentumFormat:
        """The settings that decide how a momentum is stored."""
        seed = self.seed if transforms.is_redrawn(self.transform) else 0
        return MomentumFormat(self.transform, self.block_side, self.block_rule, seed)

    def selector(self, n: int, stream: int, k: int | None = None) -> AnySelector:
        """The selector of ``k`` of the ``n`` coefficients of a block, or of all if ``k >= n``.

        Args:
          n: coefficients of a block.
          stream: number of the section; each section draws different positions.
          k: how many are sent; ``topk`` by default.
        """
        k = self.topk if k is None else k
        return AllCoefficients(n) if k >= n else SELECTORS[self.selection](n, k, self.seed, stream)


STATIC_NODES = Compression, MomentumFormat, TensorShapes
"""What states of decoupled momentum hold besides arrays: the settings that they were made for."""
