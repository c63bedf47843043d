"""DeMo with orthogonal gradients, also where a worker's devices hold shards of the matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src import matrices
from tests import workers
from tests.sweeps import sweep

SHAPES = {"embed": (128, 64), "in": (64, 128), "in2": (64, 128), "out": (128, 64), "b": (64,)}
mesh_of = functools.partial(workers.mesh_of, kind=AxisType.Auto)


def parameters():
    rng = np.random.default_rng(0)
    return {k: (rng.normal(size=s) / 8).astype(np.float32) for k, s in SHAPES.items()}


def numbers(params):
    """All matrices but the embedding."""
    return {
        k: None if k == "embed" or x.ndim < 2 else matrices.DimensionNumbers()
        for k, x in params.items()
    }


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, 0]] + params["b"][None]
    hidden = jnp.tanh(x @ params["in"]) * (x @ params["in2"])
    logits = (x + hidden @ params["out"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1]).mean()


@functools.cache
def step_and_state(layout, compression):
    mesh, specs = mesh_of(*LAYOUTS[layout][0]), LAYOUTS[layout][1]
    tx = demo_optax.demo_muon(
        5e-4,
        compression,
        eps=1e-2,  # or rounding errors of the smallest elements become as large as a step
        axis_name="data",
        weight_dimension_numbers=numbers,
        momentum_dtype="float32",  # or a rounding differs where the order of additions does
        look_ahead=1.0,
    )
    state = demo_optax.init_opt_state(tx, parameters(), mesh, param_specs=specs)
    step = demo_optax.make_train_step(loss_fn, tx, mesh, param_specs=specs, donate=False)
    return step, state


@functools.cache
def trained(layout, steps, compression):
    step, state = step_and_state(layout, compression)
    params, losses = parameters(), []
    batch = np.random.default_rng(2).integers(0, 128, (16, 2))
    for _ in range(steps):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics.loss.mean()))
    return jax.tree.map(np.asarray, params), losses


ROWS = {"embed": P("fsdp"), "in": P("fsdp"), "in2": P("fsdp"), "out": P("fsdp"), "b": P()}
BOTH = {"embed": P("tensor"), "in": P("fsdp", "tensor"), "in2": P(None, "tensor"), "out": P()}
BOTH["b"] = P("fsdp")
LAYOUTS = {"whole": ((2,), None), "rows": ((2, 2), ROWS), "both": ((2, 2, 2), BOTH)}

# Blocks that no shard cuts
ONE_BIT = demo_optax.Compression(8, 32, value_coding="sign", selection="bins")
EVERYTHING = demo_optax.Compression(1024, 32)  # no rounding error changes a selection


@sweep((20, "both"), (2, "rows"), steps=[20, 2], layout=["rows", "both"])
def test_shards_train_like_whole_matrices(steps, layout):
    compression = EVERYTHING if steps == 20 else ONE_BIT
    params, _ = trained(layout, steps, compression)
    wanted, losses = trained("whole", steps, compression)
    assert losses[-1] < losses[0] - 2e-3 * steps
    for name, x in params.items():
        np.testing.assert_allclose(x, wanted[name], atol=1e-5, rtol=0, err_msg=name)


def test_second_moments_of_shards_are_those_of_whole_matrices():
    rng = np.random.default_rng(0)
    gradients = {
        "in": rng.normal(size=(3, 8, 12)) * np.arange(1, 13),
        "deep": rng.normal(size=(3, 2, 4, 6)) * np.arange(1, 5)[:, None],
        "b": rng.normal(size=(3, 12)),
    }
    gradients = {name: x.astype(np.float32) for name, x in gradients.items()}
    dims = optax.contrib.MuonDimensionNumbers
    tx = matrices.scale_by_output_rms({"in": dims(0, 1), "deep": dims(-1, -2), "b": None}, 0.9, 0)
    specs = {"in": P("fsdp", "tensor"), "deep": P(None, "tensor", "fsdp"), "b": P("tensor")}

    def run(gradients, **extra_args):
        def update(state, gradient):
            scaled, state = tx.update(gradient, state, **extra_args)
            return state, scaled

        first = jax.tree.map(lambda x: x[0], gradients)
        return jax.lax.scan(update, tx.init(first), gradients)

    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
    stacked = {name: P(None, *spec) for name, spec in specs.items()}
    sharded = jax.shard_map(
        lambda x: run(x, param_specs=specs)[1],
        mesh=mesh,
        in_specs=(stacked,),
        out_specs=stacked,
        check_vma=False,
    )
    state, whole = jax.jit(run)(gradients)
    assert {name: x.shape for name, x in state.nu.items()} == {
        "in": (1, 12),
        "deep": (2, 4, 1),
        "b": (12,),
    }
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), jax.jit(sharded)(gradients), whole
    )
    mean = np.zeros(12)
    for i, x in enumerate(gradients["in"]):
        mean = 0.9 * mean + 0.1 * np.square(x.astype(np.float64)).mean(0)
        expected = x / np.sqrt(mean / (1 - 0.9 ** (i + 1)))
        np.testing.assert_allclose(whole["in"][i], expected, rtol=1e-5)


def test_each_shape_of_matrices_travels_twice_inside_the_worker():
    step, state = step_and_state("rows", ONE_BIT)
    text = step.lower(parameters(), state, np.zeros((16, 2), int)).as_text()
    assert text.count("stablehlo.all_to_all") == 2 * 2  # in and in2 together; out


def orthogonal_shards(x, spec, of, **extra_args):
    """A matrix made orthogonal, of which each device passes its shard."""
    tx = matrices.orthogonalize(lambda _: [of], None)

    def update(shard):
        ((result,), _) = tx.update([shard], (), **extra_args)
        return result

    mapped = jax.shard_map(update, mesh=mesh_of(1, 2, 2), in_specs=spec, out_specs=spec)
    return jax.jit(mapped)(x)


KERNELS = {
    "layers, rows sharded": ((6, 8, 4), P(None, "fsdp"), matrices.DimensionNumbers(-2, -1)),
    "layers sharded": ((4, 8, 6), P("tensor"), matrices.DimensionNumbers(1, 2)),
    "layers and columns": ((4, 8, 6), P("tensor", None, "fsdp"), matrices.DimensionNumbers(1, 2)),
    "heads": ((8, 4, 6), P(None, "fsdp"), matrices.DimensionNumbers(0, (1, 2))),
    "heads, transposed": (
        (4, 6, 8),
        P("fsdp", None, "tensor"),
        matrices.DimensionNumbers((0, 1), 2),
    ),
}


@pytest.mark.parametrize("shape, spec, of", KERNELS.values(), ids=KERNELS)
def test_kernels_of_more_dimensions_are_those_of_optax(shape, spec, of):
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=of)
    wanted, _ = jax.jit(lambda x: muon.update(x, muon.init(x)))(x)
    found = orthogonal_shards(x, spec, of, param_specs=[spec])
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@jax.jit
def orthogonal(x):
    """A matrix made orthogonal, by the default rule."""
    return matrices.orthogonalize(None, None).update([x], ())[0][0]


@pytest.mark.parametrize("scale", [0.0, 1e-7, 1.0, 1e4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_matrices_of_any_scale_stay_finite(dtype, scale):
    drawn = scale * np.random.default_rng(0).normal(size=(16, 12))
    result = orthogonal(drawn.astype(jnp.dtype(dtype)))
    assert result.dtype == dtype and np.isfinite(np.asarray(result, np.float32)).all()
    if scale in (1.0, 1e4):
        values = np.linalg.svd(np.asarray(result, np.float32), compute_uv=False)
        assert np.all((values > 0.6) & (values < 1.3))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_matrices_may_be_empty(shape):
    assert orthogonal(np.zeros(shape, np.float32)).shape == shape


def test_axes_may_be_integers_of_numpy():
    numbers = matrices.DimensionNumbers(np.int64(0), (np.int64(1),))
    x = np.random.default_rng(4).normal(size=(2, 3)).astype(np.float32)
    tx = matrices.orthogonalize(lambda tree: [numbers], None)
    (found,), _ = jax.jit(tx.update)([x], ())
    np.testing.assert_array_equal(found, orthogonal(x))


def test_embeddings_and_vectors_are_no_matrices_by_default():
    shapes = {"b": (4,), "token_Embedder": {"table": (8, 4)}, "w": (4, 4)}
    tree = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    assert matrices.dimension_numbers(None, tree) == [None, None, matrices.DimensionNumbers()]


@pytest.mark.parametrize("shape", [(3, 4, 4), (3, 3, 1, 8)])
def test_which_axes_of_a_kernel_are_rows_must_be_said(shape):
    with pytest.warns(UserWarning, match=r"parameter\['w'\].*give weight_dimension_numbers"):
        assert matrices.dimension_numbers(None, {"w": jnp.ones(shape)}) == [None]


def test_gradients_of_float16_as_large_as_its_range_take_part():
    tx = demo_optax.demo_muon(1e-3, demo_optax.Compression(4))
    params = {"w": np.ones((8, 8), np.float16)}
    gradient = np.random.default_rng(0).normal(size=(8, 8))
    gradient = {"w": (gradient / np.abs(gradient).max() * 6e4).astype(np.float16)}
    state = tx.init(params)
    for _ in range(10):
        updates, state = jax.jit(tx.update)(gradient, state, params)
        assert int(state[0].metrics.participants) == 1
    assert np.isfinite(updates["w"]).all()


def test_a_norm_of_each_shard_before_it_is_named_as_a_cause():
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    specs = {"a": P("fsdp"), "b": P()}
    muon = demo_optax.demo_muon(1e-3, axis_name="data")
    tx = optax.chain(optax.clip_by_global_norm(1.0), muon)
    mesh = mesh_of(2, 2)
    state = demo_optax.init_opt_state(tx, params, mesh, param_specs=specs)
    step = demo_optax.make_train_step(
        lambda p, x: jnp.mean((x @ p["a"]) @ p["b"]), tx, mesh, param_specs=specs
    )
    with pytest.raises(ValueError, match=r"use make_train_step\(clip_norm=\.\.\.\) instead"):
        step(params, state, jnp.ones((4, 8)))


def test_frozen_parameters_beside_shards():
    mesh, muon = mesh_of(2, 2), demo_optax.demo_muon(1e-2, axis_name="data")
    labels = {"in": "muon", "in2": "frozen"}
    tx = optax.partition({"muon": muon, "frozen": optax.set_to_zero()}, labels)
    params, specs = ({name: tree[name] for name in labels} for tree in (parameters(), ROWS))
    state = demo_optax.init_opt_state(tx, params, mesh, param_specs=specs)
    gradients = {name: np.stack([x, 2 * x]) for name, x in params.items()}
    stacked = demo_optax.stack_workers(tx, mesh, param_specs=specs)
    updates, _ = jax.jit(stacked.update)(gradients, state, params)
    assert not np.any(updates["in2"]) and np.all(np.abs(updates["in"]).max() > 1e-3)
