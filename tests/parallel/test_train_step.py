"""The ready-made train step: its options, its metrics, and that it compiles once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import demo_optax
from tests import model, oracles, workers
from tests.sweeps import sweep

MESH = workers.mesh_of(model.WORKERS)
SMALL = demo_optax.Compression(4, 6)
train = functools.partial(workers.train, params=model.affine, loss=model.affine_loss)
# Everything is sent at once and nothing is kept: a step along the mean of the gradients.
PLAIN_SGD = demo_optax.demo_sgd(1.0, demo_optax.Compression(64, 8), decay=0.0, axis_name="data")


@functools.cache
def of_workers(dtype=jnp.float32):
    """The loss and the gradient of each worker for the first batch."""
    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(model.affine_loss), (None, 0)))
    found = jax.device_get(value_and_grad(model.affine(dtype), model.stacked(model.batch(0))))
    leaves, structure = jax.tree.flatten(found)
    return [structure.unflatten(of_worker) for of_worker in zip(*leaves, strict=True)]


def gradients_of_workers(dtype=jnp.float32):
    return [gradient for _, gradient in of_workers(dtype)]


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))


def median_norm():
    return float(np.median([norm(gradient) for gradient in gradients_of_workers()]))


@sweep(0.3, alpha=[1.0, 0.3])
def test_exchange_metrics_are_energies_of_what_is_sent_and_kept(alpha):
    tx = demo_optax.decoupled_momentum(
        0.9, demo_optax.Compression(2, 6), axis_name="data", subtraction_factor=alpha
    )
    *_, [metrics] = train(tx, range(1))
    total, sent, kept = 0.0, 0.0, 0.0
    for gradient in gradients_of_workers():
        for leaf in gradient.values():
            sides = oracles.block_sides(leaf.shape, 6, "pad")
            coefficients = 0.1 * oracles.to_coefficients(leaf, sides, oracles.dct)
            energies = np.sort(np.square(coefficients).reshape(-1, np.prod(sides)))
            total += energies.sum()
            sent += energies[:, -2:].sum()
            kept += energies[:, :-2].sum() + (1 - alpha) ** 2 * energies[:, -2:].sum()
    assert metrics.exchange.participants == model.WORKERS
    assert not metrics.exchange.identical
    np.testing.assert_allclose(metrics.exchange.sent_share, sent / total, rtol=1e-4)
    expected = np.sqrt(kept / model.WORKERS)
    np.testing.assert_allclose(metrics.exchange.residual_norm, expected, rtol=1e-4)
    assert metrics.packet_bytes == demo_optax.packet_bytes(tx, model.affine())


def test_clipping_acts_on_each_local_gradient_and_loss_and_norm_are_each_workers_own():
    gradients, limit = gradients_of_workers(), median_norm()
    params, _, [metrics] = train(PLAIN_SGD, range(1), clip_norm=limit)
    norms = [norm(gradient) for gradient in gradients]
    np.testing.assert_allclose(metrics.loss, [loss for loss, _ in of_workers()], rtol=1e-5)
    np.testing.assert_allclose(metrics.gradient_norm, norms, rtol=1e-5)
    scales = [min(1.0, limit / of_one) for of_one in norms]
    for n, start in model.affine().items():
        clipped = [s * g[n] for s, g in zip(scales, gradients, strict=True)]
        expected = np.asarray(start) - np.mean(clipped, axis=0)
        np.testing.assert_allclose(params[n], expected, rtol=1e-4, atol=1e-6)


def test_microbatches_are_one_big_batch():
    tx = demo_optax.demo_sgd(0.1, decay=0.9, compression=SMALL, axis_name="data")
    batch = functools.partial(model.batch, rows=6 * model.WORKERS)

    def trained(microbatches):
        params, state, metrics = train(tx, range(3), batch=batch, microbatches=microbatches)
        return params, state[0].momentum, metrics[-1].loss, metrics[-1].gradient_norm

    chex.assert_trees_all_close(trained(3), trained(1), rtol=1e-4, atol=1e-6)


def test_each_worker_and_microbatch_has_its_own_key():
    def loss_fn(params, batch, key):
        return model.affine_loss(params, batch), jax.random.bits(key, (2,))

    step = demo_optax.make_train_step(loss_fn, PLAIN_SGD, MESH, microbatches=2, random_key=True)
    params, state = workers.initial(PLAIN_SGD, MESH, model.affine)
    drawn = set()
    for i in range(3):
        key = jax.random.fold_in(jax.random.key(0), i)
        params, state, metrics = jax.block_until_ready(step(params, state, model.batch(i), key))
        assert metrics.aux.shape == (model.WORKERS, 2, 2)
        drawn |= {tuple(bits) for bits in np.asarray(metrics.aux).reshape(-1, 2).tolist()}
    assert len(drawn) == 3 * model.WORKERS * 2


AUTO = jax.sharding.AxisType.Auto
WAYS = {
    "manual": lambda: (workers.mesh_of(2, 2, kind=AUTO), "manual"),
    "mapped": lambda: (workers.mesh_of(2, kind=AUTO), "auto"),
    "simulated": lambda: (jax.sharding.AbstractMesh((2,), ("data",)), "manual"),
}


@sweep(("manual", 2), ("mapped", 1), ("simulated", 2), way=WAYS, microbatches=[1, 2])
def test_no_key_is_used_twice(way, microbatches):
    mesh, sharding = WAYS[way]()

    def loss_fn(params, state, batch, key):
        later, now = jax.random.split(state)
        noise = jax.random.normal(key) + jax.random.normal(now)
        return model.linear_loss(params, batch) + 0 * noise, (later, None)

    def draw(updates, key, params=None):
        later, now = jax.random.split(key)
        noise = 0 * jax.random.normal(now)
        return jax.tree.map(lambda x: x + noise, updates), later

    noise = optax.GradientTransformation(lambda params: jax.random.key(1), draw)
    tx = optax.chain(noise, PLAIN_SGD, noise)
    options = dict(microbatches=microbatches, sharding=sharding)
    step = demo_optax.make_train_step(
        loss_fn, tx, mesh, random_key=True, stateful=True, donate=False, **options
    )
    params = model.one_matrix()
    state = demo_optax.init_opt_state(tx, params, mesh)
    keys = demo_optax.init_model_state(jax.random.key(2), mesh)
    with jax.debug_key_reuse(True):
        *_, metrics = step(params, state, keys, model.batch(0), jax.random.key(0))
    assert np.isfinite(metrics.loss).all()


def test_an_update_is_traced_once_for_the_state_and_the_step():
    traces = []

    def update(updates, state, params=None):
        del params
        traces.append(updates)
        return updates, state

    tx = optax.chain(optax.GradientTransformation(optax.init_empty_state, update), PLAIN_SGD)
    train(tx, range(2))
    assert len(traces) == 1


def test_aux_has_an_axis_of_workers():
    def loss_fn(params, batch):
        aux = {"sum": batch["x"].sum(), "rows": batch["y"]}
        return model.affine_loss(params, batch), aux

    *_, [metrics] = train(PLAIN_SGD, range(1), loss=loss_fn)
    stacked = model.stacked(model.batch(0))
    np.testing.assert_array_equal(metrics.aux["rows"], stacked["y"])
    sums = stacked["x"].sum((1, 2))
    np.testing.assert_allclose(metrics.aux["sum"], sums, rtol=1e-4, atol=1e-4)


def test_step_compiles_once_with_schedules(compiled):
    tx = demo_optax.demo_adamw(
        optax.cosine_decay_schedule(1e-2, 5),
        demo_optax.Compression(4, 6, transform="random"),
        axis_name="data",
    )
    params = model.one_matrix()
    state = demo_optax.init_opt_state(tx, params, MESH)
    step = demo_optax.make_train_step(model.linear_loss, tx, MESH, clip_norm=1.0)
    compiled()
    params, state, _ = step(params, state, model.batch(0))
    assert any("placed_step" in name for name in compiled())
    for i in range(1, 5):
        params, state, metrics = jax.block_until_ready(step(params, state, model.batch(i)))
        demo_optax.check_metrics(metrics.exchange)
    assert not [name for name in compiled() if "step" in name]


def test_bfloat16_parameters_have_a_float32_momentum():
    tx = demo_optax.decoupled_momentum(0.9, demo_optax.Compression(1, 6), axis_name="data")
    start = functools.partial(model.affine, jnp.bfloat16)
    params, state, _ = train(tx, range(1), params=start)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.momentum))
    for worker, gradient in enumerate(gradients_of_workers(jnp.bfloat16)):
        for n, leaf in gradient.items():
            sides = oracles.block_sides(leaf.shape, 6, "pad")
            expected = 0.1 * oracles.to_coefficients(leaf, sides, oracles.dct)
            flat = expected.reshape(-1, np.prod(sides))
            np.put_along_axis(flat, np.abs(flat).argmax(1)[:, None], 0.0, axis=1)
            stored = np.asarray(state.momentum[n])[worker]
            np.testing.assert_allclose(stored, flat.reshape(stored.shape), atol=1e-5)
