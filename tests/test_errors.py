"""Wrong use is an error that says what to do."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import demo_optax
from demo_optax._src import matrices
from demo_optax._src.swarm import worker
from tests import causes_of_swarms, model, raising, swarms, workers
from tests.sweeps import sweep

pytestmark = pytest.mark.usefixtures("annotations_unchecked")

DEMO = demo_optax.demo(1e-3, demo_optax.Compression(2, 4), axis_name="data")
ALONE = demo_optax.demo(1e-3, demo_optax.Compression(4, 8))
Compression = demo_optax.Compression


MOMENTA = demo_optax.decoupled_momentum, functools.partial(demo_optax.decoupled, optax.sgd(1e-3))
SCALED = demo_optax.demo_scaled, demo_optax.demo_adamw, demo_optax.demo_muon
SCALED_AT = [functools.partial(make, 1e-3) for make in SCALED]
EXCHANGES = demo_optax.AllGather, demo_optax.TwoPhase
STEP = functools.partial(demo_optax.make_train_step, model.loss, DEMO, workers.mesh_of(2))
ROUNDS = functools.partial(demo_optax.local_steps, optax.sgd(1.0), optax.sgd(1.0), 2)
LINK = dict(workers=8, bandwidth=1e9, latency=1e-3, compute_time=1.0, batch_tokens=512, width=64)
CHOOSE = functools.partial(demo_optax.accounting.choose, **{"params": 10**6} | LINK)
REFUSED = [  # by whom, the setting, its values, the error and its message
    ([Compression], "topk", [0, -3], ValueError, "topk must be at least 1, not"),
    ([Compression], "topk", [2.5, True, "3"], TypeError, "topk must be an integer"),
    ([Compression], "topk", [jnp.array(3)], TypeError, "Python integer"),
    ([Compression], "block_side", [0], ValueError, "block_side must be at least 1, not 0"),
    ([Compression], "block_side", [jnp.array(8)], TypeError, "Python integer"),
    ([Compression], "seed", [-1], ValueError, "seed must be at least 0"),
    ([Compression], "value_coding", ["float7"], ValueError, "must be one of 'float32'"),
    ([Compression], "transform", ["hadamard"], ValueError, "must be one of 'dct', 'random"),
    ([Compression], "block_rule", ["crop"], ValueError, "must be one of 'pad', 'divisor'"),
    (MOMENTA, "decay", [1.5, -0.1, np.nan], ValueError, r"decay must lie in \[0, 1\], not"),
    (MOMENTA, "decay", ["0.9", [0.9, 0.9], jnp.ones(2)], TypeError, "decay must be a number"),
    (MOMENTA, "subtraction_factor", [0.0, 1.5], ValueError, r"must lie in \(0, 1\]"),
    (MOMENTA, "mean", ["median"], ValueError, "must be one of 'senders', 'workers'"),
    (MOMENTA[:1], "gradient_weight", [-1.0], ValueError, "gradient_weight"),
    (
        [demo_optax.demo, demo_optax.demo_sgd, *SCALED],
        "learning_rate",
        [None, np.nan, "1e-3", -1e-3, 1e30, np.inf],
        (TypeError, ValueError),
        "learning_rate|gradient_weight",
    ),
    (SCALED_AT, "b2", [1.0, 2.0, -0.1, np.nan], ValueError, "b2"),
    (SCALED_AT, "eps", [-1e-8], ValueError, "eps"),
    (SCALED_AT, "weight_decay", [-1e-8], ValueError, "weight_decay"),
    (SCALED_AT[::2], "look_ahead", [-1.0], ValueError, "look_ahead must lie in"),
    (EXCHANGES, "norm_limit", [0.5, np.inf, "3"], (TypeError, ValueError), "norm_limit"),
    ([ROUNDS], "merge", [1.5], ValueError, r"merge must lie in \[0, 1\), not 1.5"),
    ([CHOOSE], "params", [3e8, np.float64(3e8)], TypeError, "params must be .*at least 1, not"),
    ([CHOOSE], "params", [0], ValueError, "params must be at least 1, not 0"),
    ([CHOOSE], "workers", [0], ValueError, "workers must be at least 1, not 0"),
    ([CHOOSE], "latency", [-1.0], ValueError, r"latency must lie in \[0, inf\), not -1.0"),
    ([CHOOSE], "compute_time", [0.0], ValueError, r"compute_time must lie in \(0, inf\), not 0.0"),
    ([CHOOSE], "dtype", ["float16"], ValueError, "must be one of 'bfloat16', 'float32', not"),
    ([STEP], "microbatches", [0], ValueError, "microbatches must be"),
    ([STEP], "microbatches", [1.5, jnp.array(2)], TypeError, "microbatches must be"),
]


@pytest.mark.parametrize("makers, name, values, error, message", REFUSED)
def test_settings_that_cannot_be_are_refused(makers, name, values, error, message):
    for make, value in itertools.product(makers, values):
        with pytest.raises(error, match=message):
            make(**{name: value})


@pytest.mark.parametrize(
    "settings",
    [
        dict(decay=0.0),
        dict(decay=0.999),
        dict(subtraction_factor=1.0),
        dict(compression=Compression(topk=10**6)),
    ],
)
def test_limits_themselves_are_allowed(settings):
    tx = demo_optax.decoupled_momentum(**settings)
    tx.init(jnp.ones(3))


MEAN = demo_optax.mean_over_workers("data")
ENTRIES = {
    "init": ALONE.init,
    "init of local steps": demo_optax.local_steps(optax.adamw(1e-3), MEAN, 2).init,
    "init of the mean": MEAN.init,
    "init_opt_state": lambda params: demo_optax.init_opt_state(DEMO, params, workers.mesh_of(2)),
    "init of the mean's state": lambda params: demo_optax.init_opt_state(
        MEAN, params, workers.mesh_of(2)
    ),
    "worker_gradients": lambda params: demo_optax.worker_gradients(model.loss, workers.mesh_of(2))(
        params, model.batch(0), opt_state=()
    ),
    "train step": lambda params: workers.step_of(DEMO, workers.mesh_of(2))(
        params, workers.initial(DEMO, workers.mesh_of(2))[1], model.batch(0)
    ),
    "packet_bytes": lambda params: demo_optax.packet_bytes(DEMO, params),
    "packet_bytes on a mesh": lambda params: demo_optax.packet_bytes(
        DEMO, params, mesh=workers.mesh_of(2)
    ),
    "dense_bytes": demo_optax.accounting.dense_bytes,
    "reference_bytes": demo_optax.accounting.reference_bytes,
    "step_times": lambda params: demo_optax.accounting.step_times(params, Compression(), 2, 1e9),
    "init_model_state": lambda state: demo_optax.init_model_state(state, workers.mesh_of(2)),
}


@sweep(True, stateful=[False, True])
def test_a_model_that_is_split_as_advised_trains(stateful):
    whole = {**model.init(), "mask": jnp.ones(16, bool), "activation": jnp.tanh}
    params = {name: x if name in model.init() else None for name, x in whole.items()}
    mesh = workers.mesh_of(2)

    def loss(params, *args):
        mask = args[0]["mask"] if stateful else whole["mask"]
        hidden = whole["activation"](args[-1]["x"] @ params["hidden"]) * mask[None]
        value = jnp.mean(jnp.square(hidden @ params["out"] - args[-1]["y"]))
        return (value, (args[0], None)) if stateful else value

    step = demo_optax.make_train_step(loss, DEMO, mesh, donate=False, stateful=stateful)
    state = [demo_optax.init_model_state({"mask": whole["mask"]}, mesh)] if stateful else []
    opt_state = demo_optax.init_opt_state(DEMO, params, mesh)
    new, *_ = step(params, opt_state, *state, model.batch(0))
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert jnp.any(new["out"] != params["out"])


COMPLEX, REAL = {"w": jnp.full((4, 4), 1 + 2j)}, {"w": jnp.ones((4, 4))}
OPTIMIZERS = {
    "demo": ALONE,
    "demo_scaled": demo_optax.demo_scaled(1e-3),
    "demo_muon": demo_optax.demo_muon(1e-3),
    "mean_over_workers": demo_optax.mean_over_workers(None),
    "scale_by_signed_root": demo_optax.scale_by_signed_root(),
    "orthogonalize": matrices.orthogonalize(None, None),
    "local_steps": demo_optax.local_steps(optax.sgd(0.1), optax.sgd(1.0), 2),
    "multi_steps": demo_optax.multi_steps(optax.sgd(1.0), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_refuses_complex_numbers(name):
    tx = OPTIMIZERS[name]
    with pytest.raises(TypeError, match=r"gradient\['w'\] has the complex dtype.*two parameters"):
        tx.update(COMPLEX, tx.init(REAL), REAL)
    with pytest.raises(TypeError, match=r"\['w'\].* complex"):
        tx.update(COMPLEX, tx.init(COMPLEX), COMPLEX)


def in_a_swarm(params):
    with causes_of_swarms.store() as place, swarms.make_worker(ALONE, place, 0) as worker:
        worker.begin(params, model.batch(0))


SIMULATED = jax.sharding.AbstractMesh((2,), ("data",))
SIMULATED_GRADIENTS = demo_optax.worker_gradients(model.loss, SIMULATED)
OF_SCALES = {
    **{name: ENTRIES[name] for name in list(ENTRIES)[:9]},
    "simulated workers": lambda params: SIMULATED_GRADIENTS(params, model.batch(0), opt_state=()),
    "stacked gradients": lambda params: demo_optax.stack_workers(DEMO, SIMULATED).update(
        jax.tree.map(lambda p: jnp.stack([p, p]), params),
        demo_optax.init_opt_state(DEMO, REAL, SIMULATED),
        params,
    ),
    "a gradient of one's own": lambda params: jax.vmap(
        lambda batch: demo_optax.local_value_and_grad(model.loss, "data")(params, batch),
        axis_name="data",
    )(model.stacked(model.batch(0), 2)),
    "a gradient that is averaged": lambda params: OPTIMIZERS["mean_over_workers"].update(
        params, optax.EmptyState()
    ),
    "a swarm": in_a_swarm,
}


OF_COMPLEX = OF_SCALES | {
    "step_times": ENTRIES["step_times"],
    "packet_bytes of a compression": lambda params: demo_optax.packet_bytes(Compression(), params),
    "state_specs": lambda params: demo_optax.state_specs(MEAN, params, SIMULATED),
    "a part that is frozen": lambda params: demo_optax.init_opt_state(
        optax.partition({"x": DEMO, "y": optax.set_to_zero()}, {"v": "x", "other": "y"}),
        {"v": jnp.ones(3), "other": params["other"]},
        SIMULATED,
    ),
}


NO_ARRAY = r"\['other'\] is of type \w+, which is no array.*split"
NO_REAL_NUMBERS = r"\['other'\] has the dtype .*flax.nnx.split"
IS_COMPLEX = r"\['other'\] has the complex dtype complex64.*two parameters"
IS_REPLACED = r"\['scale'\] belongs to Flax's .*by stateful=True"
SCALES = "_overwrite_with_gradient"
LEAVES = {  # its name, the leaf, the error, its message, and who refuses it
    "text": ("other", "a string", TypeError, NO_ARRAY, ENTRIES),
    "function": ("other", jnp.tanh, TypeError, NO_ARRAY, ENTRIES),
    "array of text": ("other", np.array("text"), TypeError, NO_ARRAY, ENTRIES),
    "integers": ("other", jnp.ones(3, int), TypeError, NO_REAL_NUMBERS, list(ENTRIES)[:5]),
    "booleans": ("other", jnp.ones(3, bool), TypeError, NO_REAL_NUMBERS, list(ENTRIES)[:5]),
    "complex numbers": ("other", jnp.full((4, 4), 1 + 2j), TypeError, IS_COMPLEX, OF_COMPLEX),
    "scales": (SCALES, {"scale": jnp.ones(1)}, ValueError, IS_REPLACED, OF_SCALES),
}


@pytest.mark.parametrize(
    "leaf, entry", [(leaf, entry) for leaf, (*_, by) in LEAVES.items() for entry in by]
)
def test_a_leaf_that_cannot_be_trained_is_named(leaf, entry):
    """Scales are variables whose gradient is their next value; a model's state may hold them."""
    name, value, error, message, _ = LEAVES[leaf]
    with pytest.raises(error, match=message) as refused:
        (ENTRIES | OF_COMPLEX)[entry](model.init() | {name: value})
    assert "Tracer" not in str(refused.value)


def test_scales_are_a_state_of_the_model():
    assert demo_optax.init_model_state({SCALES: {"scale": jnp.ones(1)}}, SIMULATED)


def test_numbers_are_injected_and_a_compression_is_left_alone():
    tx = optax.inject_hyperparams(demo_optax.demo)(
        learning_rate=1e-3, compression=Compression(4), decay=0.9
    )
    state = tx.init(jnp.ones(3))
    assert {"learning_rate", "decay"} <= set(state.hyperparams)
    assert "compression" not in state.hyperparams


def test_gradient_in_another_order():
    zeros, ones = np.zeros((8, 8), np.float32), np.ones((8, 8), np.float32)
    tx, params = demo_optax.demo_sgd(1.0, Compression(4, 8)), {"q": zeros, "k": zeros}
    _, state = jax.jit(tx.update)({"q": zeros, "k": ones}, tx.init(params), params)
    other = collections.OrderedDict(q=zeros, k=zeros)
    with pytest.raises(ValueError, match="Make the state anew"):
        tx.update(other, state, other)


def test_every_message_shows_what_was_given_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(worker, "compile_programs", swarms.compile_once)
    messages = raising.collect()
    missing = sorted(set(raising.raise_statements()) - set(messages))
    assert not missing, "no cause for these"
    for message in messages.values():
        assert not re.search(r"\{[a-z_]+(\[\d+\])?(![rs])?\}", message), f"not formatted: {message}"
        assert re.search(r"['\"\[({/]|\d|folder", message), message
        assert re.search(
            r"[Mm]ake |[Gg]ive |[Uu]se |must |[Rr]estore |[Ll]eave |[Cc]all |[Tt]ake |[Ss]ave |"
            r"accumulate |pass |choose |report |install |name|are named by",
            message,
        ), message
