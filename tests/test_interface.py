"""What users of optax and Flax try: it works, or says why not."""

import functools
import gc
import pathlib
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import demo_optax
from tests import model, workers
from tests.sweeps import sweep

WORKERS = 4
SMALL = demo_optax.Compression(2, 4)
DEMO = demo_optax.demo(5e-3, SMALL, decay=0.9, axis_name="data")
FIRST_LAYER = {"hidden": "trained", "bias": "frozen", "out": "frozen"}
FREEZING = optax.partition({"trained": DEMO, "frozen": optax.set_to_zero()}, FIRST_LAYER)


MESH = workers.mesh_of(WORKERS)
train = functools.partial(workers.train, steps=range(2), mesh=MESH)


def line():
    """Parameters of one matrix, for whatever more of them would not show."""
    return {"w": np.full((12, 8), 0.1, np.float32)}


def distance(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["x"][:, :8]))


train_line = functools.partial(train, params=line, loss=distance)


BEHIND = {
    "nothing": optax.identity(),
    "schedule": optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, 10)),
    "sign": optax.scale_by_sign(),
    "injected": optax.inject_hyperparams(optax.scale)(-0.1),
}


@sweep("schedule", behind=BEHIND)
def test_frozen_parameters_stay_and_send_nothing(behind):
    params, _, metrics = train(optax.chain(FREEZING, BEHIND[behind]))
    metrics = metrics[-1]
    before = model.init()
    assert (params["hidden"] != before["hidden"]).any()
    for name in ("bias", "out"):
        np.testing.assert_array_equal(params[name], before[name])
    alone = {"hidden": before["hidden"]}
    assert metrics.packet_bytes == demo_optax.packet_bytes(SMALL, alone)


def noise(updates, _):
    """Another for each worker, which follows from its number alone."""
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
    return jax.tree.map(lambda u: jax.random.normal(key, u.shape), updates)


@pytest.mark.parametrize(
    "local",
    [
        optax.sgd(0.1),
        optax.trace(0.9),
        optax.chain(optax.set_to_zero(), optax.add_decayed_weights(0.1)),
        optax.stateless(noise),
    ],
    ids=["sgd", "trace", "decay of what is frozen", "noise"],
)
def test_updates_that_are_not_zero_are_never_taken_for_frozen(local):
    tx = optax.partition({"trained": DEMO, "frozen": local}, FIRST_LAYER)
    with pytest.raises(ValueError, match=r"'bias'.* updates may differ between the workers"):
        train(tx)


def test_only_wrappers_that_decide_alone_are_blamed(annotations_unchecked):
    """`tests/test_compositions.py` has those that are."""
    with pytest.raises((TypeError, ValueError)) as error:
        train(optax.chain(demo_optax.mean_over_workers("data"), DEMO))
    said = "".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "microbatches" not in said


def test_an_argument_without_a_default_is_that_of_the_step():
    def update(updates, state, params=None, *, temperature, **rest):
        del params, rest
        return jax.tree.map(lambda u: -temperature * u, updates), state

    heated = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    tx = optax.chain(demo_optax.mean_over_workers("data"), heated)
    params, state = workers.initial(tx, MESH)
    params, state, _ = workers.step_of(tx, MESH)(params, state, model.batch(0), temperature=0.0)
    for name, x in model.init().items():
        np.testing.assert_array_equal(params[name], x)


def test_a_preconditioner_with_random_keys_trains():
    noise = optax.add_noise(1e-3, 0.5, key=jax.random.key(3))
    tx = demo_optax.demo(5e-3, SMALL, precondition=noise, axis_name="data")
    params, state, _ = train_line(tx)
    assert np.isfinite(params["w"]).all()
    assert jnp.issubdtype(state[0].precondition.rng_key.dtype, jax.dtypes.prng_key)


def test_aux_may_hold_numbers_and_the_loss_may_come_in_a_list():
    def loss(params, batch):
        return [distance(params, batch), {"layers": 2, "rate": 0.5}]

    aux = train_line(DEMO, loss=loss)[2][-1].aux
    np.testing.assert_array_equal(aux["layers"], np.full(WORKERS, 2))
    np.testing.assert_array_equal(aux["rate"], np.full(WORKERS, 0.5))


def test_a_parameter_may_be_a_number():
    params = train(
        DEMO,
        loss=lambda p, b: jnp.mean(jnp.square(p["scale"] * b["x"] - 1.0)),
        params=lambda: {"scale": 0.5},
    )[0]
    assert params["scale"].shape == () and params["scale"] != 0.5


def test_several_arguments_are_differentiated_and_others_named():
    def both(x, y, scale):
        return jnp.sum(x * y) * scale

    fn = demo_optax.local_value_and_grad(both, "data", argnums=[0, 1])
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    _, (dx, dy) = jax.jit(jax.vmap(lambda x, y: fn(x, y, scale=2.0), axis_name="data"))(x, y)
    np.testing.assert_array_equal(dx, 2 * y)
    np.testing.assert_array_equal(dy, 2 * x)


@pytest.mark.slow
def test_replicas_that_skip_a_step_alone_hear_nobody_afterwards_and_are_reported():
    """As under vmap, where nothing else can tell that `optax.apply_if_finite` left a worker out."""
    tx = optax.apply_if_finite(DEMO, 10)
    gradient = np.random.default_rng(0).normal(size=(2, 3, 16, 8)).astype(np.float32)
    gradient[0, 1] = np.nan
    state = jax.vmap(lambda g: tx.init(g))(gradient[0])
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    for g in gradient:
        _, state = update(g, state)
    metrics = demo_optax.exchange_metrics(state)
    np.testing.assert_array_equal(metrics.participants, [2, 1, 2])
    with pytest.raises(ValueError, match="apply_if_finite"):
        demo_optax.check_metrics(metrics)


def test_optimizers_are_forgotten():
    tx = demo_optax.demo(5e-3, SMALL, axis_name="data")
    demo_optax.init_opt_state(tx, np.ones((8, 8), np.float32), MESH)
    alive = weakref.ref(tx.update)
    del tx
    gc.collect()
    assert alive() is None


def test_a_module_of_flax_is_a_tree_of_parameters():
    def loss(module, batch):
        return jnp.mean(jnp.square(module(batch["x"]) - batch["y"]))

    module, _, metrics = train(DEMO, loss=loss, params=lambda: nnx.Linear(12, 3, rngs=nnx.Rngs(0)))
    assert isinstance(module, nnx.Linear)
    assert metrics[-1].exchange.participants == WORKERS


@jax.tree_util.register_pytree_node_class
class Identical:
    """A node that is equal to itself alone."""

    def __init__(self, leaves):
        self.leaves = leaves

    def tree_flatten(self):
        return (self.leaves,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_registered_class_without_equality_is_a_tree_of_parameters():
    params, *_ = train(
        DEMO, loss=lambda p, b: distance(p.leaves, b), params=lambda: Identical(line())
    )
    plain, *_ = train_line(DEMO)
    np.testing.assert_array_equal(params.leaves["w"], plain["w"])


NESTEROV = optax.sgd(1e-2, momentum=0.9, nesterov=True)
ON_DATA: dict = dict(axis_name="data")
OUTER = functools.partial(demo_optax.decoupled, NESTEROV, SMALL, gradient_weight=1.0)


def positions():
    """A rule of shared positions; with 64 bits JAX draws others for "random"."""
    return "random-slicing" if jax.config.jax_enable_x64 else "random"


def sent(coding, selection):
    return demo_optax.Compression(4, 8, coding, selection=selection)


EVERY_KIND = {
    "demo_scaled": lambda: demo_optax.demo_scaled(1e-2, sent("int4", "striding"), **ON_DATA),
    "demo_muon": lambda: demo_optax.demo_muon(1e-2, SMALL, look_ahead=1.0, **ON_DATA),
    "demo_adamw": lambda: demo_optax.demo_adamw(1e-2, sent("sign", positions()), **ON_DATA),
    "another dtype": lambda: demo_optax.decoupled(
        optax.sgd(0.1),
        sent("bfloat16", "bins"),
        momentum_dtype="float64" if jax.config.jax_enable_x64 else "bfloat16",
        **ON_DATA,
    ),
    "two phases": lambda: demo_optax.demo(
        1e-2, SMALL, exchange=demo_optax.Delayed(demo_optax.TwoPhase("data"))
    ),
    "dense rounds": lambda: demo_optax.local_steps(
        NESTEROV, optax.chain(demo_optax.mean_over_workers("data"), NESTEROV), 2, **ON_DATA
    ),
    "rounds": lambda: demo_optax.local_steps(NESTEROV, OUTER(**ON_DATA), 2, merge=0.5, **ON_DATA),
    "fragments": lambda: demo_optax.local_steps(
        NESTEROV, OUTER(**ON_DATA), 4, fragments=2, **ON_DATA
    ),
    "multi_steps": lambda: demo_optax.multi_steps(
        demo_optax.demo_scaled(1e-2, **ON_DATA), 2, **ON_DATA
    ),
}


@sweep(
    *[(name, True) for name in EVERY_KIND],
    *[(name, False) for name in ("another dtype", "demo_adamw")],  # which are others without
    name=EVERY_KIND,
    x64=[False, True],
)
def test_every_optimizer_is_traced_under_strict_promotion(name, x64):
    """The suite cannot be, since optax's own corrections of biases and many schedules promote."""
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(x64):
        tx = EVERY_KIND[name]()
        given = jax.ShapeDtypeStruct((WORKERS, 12, 3), jnp.float32)
        init = jax.eval_shape(jax.vmap(tx.init, axis_name="data"), given)
        update = jax.vmap(lambda x, state: tx.update(x, state, x), axis_name="data")
        _, after = jax.eval_shape(update, given, init)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, init)


@sweep(
    ("demo", "float64"),
    ("float64 momentum", "float32"),
    name=["demo", "demo_muon", "float64 momentum"],
    dtype=["float32", "float64"],
)
def test_doubles_train_where_jax_has_them(name, dtype):
    options = dict(compression=SMALL, axis_name="data")
    tx = {
        "demo": lambda: demo_optax.demo(1e-2, **options),
        "demo_muon": lambda: demo_optax.demo_muon(1e-2, **options),
        "float64 momentum": lambda: demo_optax.decoupled(
            optax.sgd(0.1), momentum_dtype="float64", **options
        ),
    }[name]
    with jax.enable_x64(True):
        before = line()["w"].astype(dtype)
        params, _, metrics = train_line(tx(), params=lambda: {"w": before})
        assert metrics[-1].exchange.participants == WORKERS
        assert params["w"].dtype == dtype
        assert (np.asarray(params["w"]) != before).any()


def test_energies_beyond_float32_mute_nobody():
    state = jax.device_get(workers.initial(DEMO, MESH, line)[1])
    state[0].momentum["w"] = state[0].momentum["w"].copy()
    state[0].momentum["w"][2, :, 0, 0] = 1.5e19
    *_, [metrics] = train_line(DEMO, steps=range(1), start=(line(), state))
    assert metrics.exchange.participants == WORKERS


@pytest.mark.slow
def test_a_vmap_inside_a_shard_map_makes_workers_of_both():
    mesh = workers.mesh_of(2, names=("a",), kind=jax.sharding.AxisType.Auto)
    gradient = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16, 8)), jnp.float32)
    tx = demo_optax.demo_sgd(1.0, SMALL, axis_name=("a", "v"))
    one = demo_optax.demo_sgd(1.0, SMALL, axis_name="v")

    def mapped(tx):
        return jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="v")

    spec = jax.sharding.PartitionSpec("a")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def own(g):
        return mapped(tx)(g[0])[None]

    both = jax.jit(own)(gradient)
    expected = jax.jit(mapped(one))(gradient.reshape(6, 16, 8))
    np.testing.assert_allclose(both.reshape(expected.shape), expected, atol=1e-6)


@pytest.mark.parametrize("with_params", [True, False])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_preconditioner_keeps_its_dtype(dtypes, with_params):
    tx = demo_optax.demo(1e-2, SMALL, precondition=optax.scale_by_rms())
    params, gradient = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in dtypes)
    state = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, gradient, state, params if with_params else None)
    assert state[0].precondition.nu.dtype == dtypes[0]
    assert after[0].precondition.nu.dtype == dtypes[0]


# They forge packets that the library would never build, and write into the library's own file.
FORGERS = {"benchmarks/torture/packets.py", "benchmarks/torture/byzantine.py"}
WRITES_LOSSES = {"benchmarks/quality/__main__.py"}


def test_nothing_outside_imports_private_modules():
    root = pathlib.Path(demo_optax.__file__).parents[1]
    found = {
        path.relative_to(root).as_posix()
        for folder in ("examples", "notebooks", "docs", "benchmarks")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".md", ".ipynb") and "_build" not in path.parts
        if re.search(r"(from|import) demo_optax\._src", path.read_text())
    }
    assert found == FORGERS | WRITES_LOSSES
