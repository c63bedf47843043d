"""Makes whole matrices orthogonal as Muon does, also where a worker's devices hold shards of them.

Orthogonal shards do not make an orthogonal matrix. Matrices of one shape are therefore stacked and
dealt out over the devices that shard them, so that each device gets some of them whole, as in Dion
(Ahn et al., `arXiv 2504.05295 <https://arxiv.org/abs/2504.05295>`_). One all-to-all brings the
shards together, and another one returns the results.

    shards of all matrices ── all_to_all ──► some whole matrices ── fn ── all_to_all ──► shards
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
from jaxtyping import Array, Float
from numpy.lib.array_utils import normalize_axis_tuple

from demo_optax._src import axes, checks
from demo_optax._src.arrays import in_dtype_of, unboxed, upcast
from demo_optax._src.axes import AxisName
from demo_optax._src.exchange.collectives import sum_over_shards

DimensionNumbers = optax.contrib.MuonDimensionNumbers

Names = tuple[str, ...]


def dimension_numbers(given: Any, tree: Any) -> list[DimensionNumbers | None]:
    """Returns the dimension numbers of each leaf, or None where it is not a matrix.

    ``given`` is the argument of ``optax.contrib.muon``: a tree or a prefix of one, or a function of
    the parameters that returns it. None stands for all leaves of two dimensions, except embeddings,
    whose paths contain "embed"; it warns about leaves of more than two dimensions.

    Example:
      >>> dimension_numbers(None, {"b": jnp.ones(2), "w": jnp.ones((2, 3))})
      [None, MuonDimensionNumbers(reduction_axis=0, output_axis=1)]
    """
    given = unboxed(given(tree) if callable(given) else given)
    tree = unboxed(tree)
    if given is None:
        return [_usual(path, x) for path, x in jax.tree.leaves_with_path(tree)]
    numbers = axes.per_leaf(given, tree, lambda x: x is None or isinstance(x, DimensionNumbers))
    for (path, x), own in zip(jax.tree.leaves_with_path(tree), numbers, strict=True):
        if own is None:
            continue
        what = f"weight_dimension_numbers of parameter{keystr(path)} are {own}, but its shape"
        if x.ndim < 2:
            raise ValueError(f"{what} {x.shape} is not that of a matrix: give None for it.")
        try:
            _rows_and_columns(own, x.ndim)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{what} is {x.shape} ({error}): give integers, and each axis once."
            ) from None
    return numbers


def _usual(path, x) -> DimensionNumbers | None:
    if x.ndim > 2:
        warnings.warn(
            f"demo_muon takes parameter{keystr(path)} of shape {x.shape} to be no matrix, "
            "because it cannot know which axes are rows and columns: give "
            "weight_dimension_numbers, a function of the parameters that returns "
            "optax.contrib.MuonDimensionNumbers(rows, columns) for each matrix and None for all "
            "others. For layers in one array they are MuonDimensionNumbers(-2, -1).",
            stacklevel=2,
        )
    is_embedding = "embed" in keystr(path).lower()
    return DimensionNumbers() if x.ndim == 2 and not is_embedding else None


class WholeMatricesState(NamedTuple):
    """Says that a transformation needs whole matrices; holds no array."""


def orthogonalize(given: Any, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """Sets all singular values of each matrix to about 1, by optax's Newton-Schulz steps.

    Where the extra argument ``param_specs`` says that matrices are sharded, each device makes some
    of them orthogonal whole. It computes one matrix after another, so that the steps need the
    memory of a single matrix. Leaves that are not matrices by `dimension_numbers` stay as they are.

    The update raises a ValueError if a matrix is sharded and its spec does not say so. With
    ``check_vma=False`` this cannot be detected, and each shard is then made orthogonal by itself.
    """

    def update_fn(updates, state, params=None, **extra_args):
        del params
        checks.real_leaves("gradient", updates)
        leaves, structure = jax.tree.flatten(updates)
        numbers = dimension_numbers(given, updates)
        stacks: dict[tuple, list[int]] = {}
        every = zip(leaves, axes.specs_of_leaves(updates, extra_args), numbers, strict=True)
        for i, (x, spec, own) in enumerate(every):
            if own is not None:
                _require_spec(x, spec, axis_name)
                form = Form.of(x.shape, spec, own)
                stacks.setdefault((x.dtype, form), []).append(i)
        results = list(leaves)
        for (_, form), members in stacks.items():
            stack = jnp.concatenate([form.matrices(leaves[i]) for i in members])
            stack = map_whole(form.orthogonal, stack, form.sharded)
            for i, x in zip(members, jnp.split(stack, len(members)), strict=True):
                results[i] = form.tensor(x)
        return structure.unflatten(results), state

    return optax.GradientTransformationExtraArgs(lambda params: WholeMatricesState(), update_fn)


def scale_by_output_rms(given: Any, b2: Any, eps: Any) -> optax.GradientTransformationExtraArgs:
    """Divides each matrix by a root mean square for every index of its output and batch dimensions.

    The mean is over ``reduction_axis``, and over steps with the decay ``b2``. The state holds it as
    a tree like the parameters, float32, in which the dimensions of the mean have the length 1. What
    is no matrix by `dimension_numbers` has a mean square over steps for each element.
    """

    def rows_of(tree) -> list[tuple[int, ...]]:
        pairs = zip(jax.tree.leaves(tree), dimension_numbers(given, tree), strict=True)
        return [_rows_and_columns(own, x.ndim)[0] if own else () for x, own in pairs]

    def init_fn(params):
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
        pairs = zip(leaves, rows_of(params), strict=True)
        zeros = [jnp.zeros_like(jnp.sum(upcast(x), rows, keepdims=True)) for x, rows in pairs]
        return optax.scale_by_rms(bias_correction=True).init(structure.unflatten(zeros))

    def update_fn(updates, state, params=None, **extra_args):
        del params
        leaves, structure = jax.tree.flatten(updates)
        sums, over, numbers = [], [], []
        specs = axes.specs_of_leaves(updates, extra_args)
        for x, rows, spec in zip(leaves, rows_of(updates), specs, strict=True):
            by_dimension = (*map(axes.names, spec), *[()] * x.ndim)
            over.append(tuple(name for i in rows for name in by_dimension[i]))
            sums.append(jnp.sum(jnp.square(upcast(x)), rows, keepdims=True))
            numbers.append(math.prod(x.shape[i] for i in rows) * axes.size(over[-1] or None))
        totals = sum_over_shards(sums, over)
        means = [x / max(number, 1) for x, number in zip(totals, numbers, strict=True)]
        with jax.numpy_dtype_promotion("standard"):  # which optax's correction of a bias needs
            nu = optax.tree.update_moment(structure.unflatten(means), state.nu, b2, 1)
            count = optax.safe_increment(state.count)
            corrected = optax.tree.bias_correction(nu, b2, count)
        scaled = [
            in_dtype_of(upcast(x) / (jnp.sqrt(v) + eps), x)
            for x, v in zip(leaves, jax.tree.leaves(corrected), strict=True)
        ]
        return structure.unflatten(scaled), state._replace(count=count, nu=nu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class Form(NamedTuple):
    """Describes how a device's shard of a tensor is a batch of matrices.

    Attributes:
      shape: shape of the shard.
      order: its dimensions: first those of the batch, then those of the rows and the columns.
      batch, rows: numbers of dimensions of the batch and of the rows.
      sharded: the axes that shard each dimension of the rows and columns.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    batch: int
    rows: int
    sharded: tuple[Names, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], spec: P, numbers: DimensionNumbers) -> "Form":
        rows, columns = _rows_and_columns(numbers, len(shape))
        batch = tuple(i for i in range(len(shape)) if i not in rows + columns)
        by_dimension = (*map(axes.names, spec), *[()] * len(shape))
        sharded = tuple(by_dimension[i] for i in rows + columns)
        return cls(shape, batch + rows + columns, len(batch), len(rows), sharded)

    def matrices(self, x: Array) -> Array:
        """Returns the tensor's matrices ``(number, *rows, *columns)``, with all dimensions kept."""
        moved = x.transpose(self.order)
        number = math.prod(moved.shape[: self.batch])
        return moved.reshape(number, *moved.shape[self.batch :])

    def tensor(self, matrices: Array) -> Array:
        """Inverts `matrices`."""
        moved = matrices.reshape([self.shape[i] for i in self.order])
        return moved.transpose([self.order.index(i) for i in range(len(self.order))])

    def orthogonal(self, whole: Array) -> Array:
        """Applies the Newton-Schulz steps to whole matrices, one after another."""
        muon: Any = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
        rows, columns = whole.shape[1 : 1 + self.rows], whole.shape[1 + self.rows :]

        def one(number, whole):
            x = whole[number]
            flat = upcast(x.reshape(math.prod(rows), math.prod(columns)))
            with jax.numpy_dtype_promotion("standard"):  # which optax's correction of a bias needs
                result = muon.update(flat, muon.init(flat))[0].reshape(x.shape)
            return whole.at[number].set(in_dtype_of(result, x))

        return jax.lax.fori_loop(0, len(whole), one, whole) if whole.size else whole


def map_whole(
    fn: Callable[[Array], Array],
    stack: Float[Array, "number *shard"],
    sharded: tuple[Names, ...],
) -> Float[Array, "number *shard"]:
    """Applies ``fn`` to whole tensors, of which each device holds a stack of shards.

    Each device calls ``fn`` with a stack of some whole tensors, filled up with zeros to a multiple
    of the number of devices, and gets back its shards of the results. ``sharded`` are the axes that
    shard each dimension of a tensor, which must be bound here.

    Example:
      >>> map_whole(lambda whole: 2 * whole, jnp.ones((1, 2, 3)), ((), ())).shape
      (1, 2, 3)
    """
    names = tuple(name for of_dimension in sharded for name in of_dimension)
    if not names:
        return fn(stack)
    grid = [math.prod(map(axes.size, of_dimension)) for of_dimension in sharded]
    devices, (number, *shard) = math.prod(grid), stack.shape
    each, rank = -(-number // devices), len(shard)
    exchange = functools.partial(jax.lax.all_to_all, axis_name=names, split_axis=0, concat_axis=0)

    # The first axis of (devices, each, *shard) is that of the receivers, then that of the senders.
    filled = jnp.pad(stack, [(0, each * devices - number)] + [(0, 0)] * rank)
    shards = exchange(filled.reshape(devices, each, *shard))
    order = [rank, *(axis for i in range(rank) for axis in (i, rank + 1 + i))]
    whole = shards.reshape(*grid, each, *shard).transpose(order)
    result = fn(whole.reshape(each, *(n * size for n, size in zip(grid, shard, strict=True))))
    pairs = [x for pair in zip(grid, shard, strict=True) for x in pair]
    shards = result.reshape(each, *pairs).transpose([order.index(i) for i in range(2 * rank + 1)])
    back = exchange(shards.reshape(devices, each, *shard))
    return back.reshape(devices * each, *shard)[:number]


def _rows_and_columns(
    numbers: DimensionNumbers, ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns nonnegative axes, each of which may occur only once."""
    rows = normalize_axis_tuple(numbers.reduction_axis, ndim)
    columns = normalize_axis_tuple(numbers.output_axis, ndim)
    normalize_axis_tuple(rows + columns, ndim)
    return rows, columns


def _require_spec(x: Array, spec: P, axis_name: AxisName) -> None:
    named = {*axes.axes_of(spec), *axes.names(axis_name)}
    if missing := sorted(axes.varying(x) - named):
        raise ValueError(
            f"a matrix of shape {x.shape} on each device differs along the axes {missing}, but the "
            f"optimizer has axis_name={axis_name!r}, and the matrix the spec {spec}. If workers "
            f"lie along these axes, give demo_muon(..., axis_name={missing[0]!r}). If parameters "
            "are sharded over them, so that each shard would be made orthogonal by itself, update "
            "by demo_optax.make_train_step or demo_optax.stack_workers with param_specs, or pass "
            "update(..., param_specs=specs). Otherwise an earlier link of the chain gave each "
            "shard its own gradient, such as clip_by_global_norm: use "
            "make_train_step(clip_norm=...) instead."
        )
