"""What the numbers of a stored momentum are coefficients of, and the way to others."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from demo_optax.compression import transforms
from demo_optax.compression.blocks import BlockGeometry, BlockRule, block_geometry
from demo_optax.compression.transforms import Basis, TransformName

Shape = tuple[int, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Coordinates:
    """The part of a compression that decides how a momentum is stored.

    A static node of the optimizer state: it holds no array, takes no part in computations, and
    tells states of different transforms or blocks apart. Attributes as in
    `demo_optax.Compression`; ``seed`` is that of the ``"random"`` transform, and 0 for others.
    """

    transform: TransformName
    chunk_size: int
    block_rule: BlockRule
    seed: int

    def geometry(self, shape: Shape) -> BlockGeometry:
        """The blocks of a tensor."""
        return block_geometry(shape, self.chunk_size, self.block_rule)

    def basis(self, step: jax.Array) -> Basis | None:
        """The transform's basis at a step, the same on all workers; None for the identity."""
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return transforms.make_basis(self.transform, jax.random.fold_in(key, 0))


def same_numbers(
    one: tuple[Coordinates, Shape], other: tuple[Coordinates, Shape], shape: Shape
) -> bool:
    """Whether a tensor's coefficients are the same numbers in both coordinates.

    Each with the number of shards along every dimension, whose blocks end where they end.
    """

    def blocks(coordinates, counts):
        geometry = coordinates.geometry(_part(shape, counts))
        starts = [
            [shard * dim + start for shard in range(count) for start in range(0, dim, side)]
            for dim, side, count in zip(geometry.shape, geometry.sides, counts, strict=True)
        ]
        return coordinates.transform, coordinates.seed, geometry.sides, starts

    return blocks(*one) == blocks(*other)


def to_parameters(coefficients: np.ndarray, placed, shape: Shape, step: int) -> np.ndarray:
    """The tensor ``shape`` whose coefficients these are, after the update of ``step``."""
    coordinates, counts = placed
    geometry = coordinates.geometry(_part(shape, counts))
    result = np.zeros(shape, np.float32)
    for stored, real in _shards(geometry, counts):
        part = jnp.asarray(coefficients[stored], jnp.float32)
        result[real] = transforms.inverse(part, geometry, coordinates.basis(step))
    return result


def from_parameters(tensor: np.ndarray, placed, step: int) -> np.ndarray:
    """Its coefficients, float32, as they stand after the update of ``step``."""
    coordinates, counts = placed
    geometry = coordinates.geometry(_part(tensor.shape, counts))
    rank = len(tensor.shape)
    grid = [n * count for n, count in zip(geometry.stored_shape[:rank], counts, strict=True)]
    result = np.zeros((*grid, *geometry.stored_shape[rank:]), np.float32)
    for stored, real in _shards(geometry, counts):
        part = jnp.asarray(tensor[real], jnp.float32)
        result[stored] = transforms.forward(part, geometry, coordinates.basis(step))
    return result


def _part(shape: Shape, counts: Shape) -> Shape:
    """The shape of one of the shards."""
    return tuple(dim // count for dim, count in zip(shape, counts, strict=True))


def _shards(geometry: BlockGeometry, counts: Shape):
    """For each shard where its coefficients are stored, and where the tensor has it."""
    for place in itertools.product(*map(range, counts)):
        yield tuple(
            tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True))
            for sizes in (geometry.grid, geometry.shape)
        )
