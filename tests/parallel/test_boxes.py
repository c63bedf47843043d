"""Masks, labels and dimension numbers made from parameters in Flax's boxes."""

import chex
import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import demo_optax
from demo_optax._src import matrices
from demo_optax._src.arrays import unboxed
from tests import model, workers
from tests.sweeps import sweep

SMALL = demo_optax.Compression(4, 6)
DEMO = demo_optax.demo_scaled(1e-2, SMALL, axis_name="data")
PLAIN = model.affine()
BOXES = {
    "Partitioned": lambda x: nn.Partitioned(x, names=("embed", "mlp")),
    "LogicallyPartitioned": lambda x: nn.LogicallyPartitioned(x, names=("embed", "mlp")),
    "nnx.Param": nnx.Param,
}


def boxed(kind):
    tree = jax.tree.map(BOXES[kind], PLAIN)
    return nnx.State(tree) if kind == "nnx.Param" else tree


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda x: "decoupled" if x.ndim > 1 else "frozen", params)


def numbers(params):
    return jax.tree.map(lambda x: matrices.DimensionNumbers() if x.ndim > 1 else None, params)


def partition(tree):
    return optax.partition({"decoupled": DEMO, "frozen": optax.set_to_zero()}, tree)


def decayed(tree, look_ahead=None):
    options = dict(look_ahead=look_ahead, axis_name="data")
    return demo_optax.demo_scaled(1e-2, SMALL, weight_decay=0.1, mask=tree, **options)


def muon(tree):
    return demo_optax.demo_muon(1e-2, SMALL, weight_dimension_numbers=tree, axis_name="data")


USES = {
    "mask of the weight decay": (is_matrix, decayed),
    "mask before": (
        is_matrix,
        lambda tree: optax.chain(optax.masked(optax.clip(1e-3), tree), DEMO),
    ),
    "labels": (labels, partition),
    "dimension numbers": (numbers, muon),
    "partition of dimension numbers": (
        lambda params: (labels(params), numbers(params)),
        lambda trees: optax.partition(
            {"decoupled": muon(trees[1]), "frozen": optax.set_to_zero()}, trees[0]
        ),
    ),
    "mask of the inner optimizer": (
        is_matrix,
        lambda tree: demo_optax.local_steps(
            optax.adamw(1e-2, mask=tree), DEMO, every=2, axis_name="data"
        ),
    ),
    "mask of the outer optimizer": (
        is_matrix,
        lambda tree: demo_optax.local_steps(
            optax.sgd(1e-2), decayed(tree), every=2, axis_name="data"
        ),
    ),
    "accumulation": (
        labels,
        lambda tree: demo_optax.multi_steps(partition(tree), every=2, axis_name="data"),
    ),
    "look-ahead": (is_matrix, lambda tree: decayed(tree, look_ahead=1.0)),
    "injected hyperparameters": (
        is_matrix,
        lambda tree: optax.inject_hyperparams(demo_optax.demo_scaled, static_args="compression")(
            1e-2, SMALL, weight_decay=0.1, mask=tree, axis_name="data"
        ),
    ),
    "baseline": (
        is_matrix,
        lambda tree: optax.chain(
            demo_optax.mean_over_workers("data"), optax.adamw(1e-2, mask=tree)
        ),
    ),
}


def loss(params, batch):
    return model.affine_loss(dict(unboxed(params)), batch)


def trained(tx, params, mesh, **options):
    carry = params, demo_optax.init_opt_state(tx, params, mesh, **options)
    step = demo_optax.make_train_step(loss, tx, mesh, donate=False, **options)
    for i in range(2):
        *carry, _ = step(*carry, model.batch(i))
    return carry


@sweep(
    ("labels", "Partitioned"),
    ("dimension numbers", "nnx.Param"),
    ("mask of the inner optimizer", "LogicallyPartitioned"),
    use=USES,
    kind=BOXES,
)
def test_trees_made_from_boxed_parameters_serve_as_plain_ones(use, kind):
    make, optimizer = USES[use]
    mesh, params = workers.mesh_of(2), boxed(kind)
    given, state = trained(optimizer(make(params)), params, mesh)
    expected = trained(optimizer(make(PLAIN)), PLAIN, mesh)
    assert jax.tree.structure(given) == jax.tree.structure(params)
    assert jax.tree.structure(unboxed(state)) == jax.tree.structure(state)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, ((given, state), expected)))
    assert np.any(unboxed(given)["out"] != PLAIN["out"])
