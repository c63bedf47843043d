"""What many workers agree on, against the algorithm written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import demo_optax
from tests import draws, oracles
from tests.sweeps import sweep

DECAY, WEIGHT, WORKERS = 0.9, 0.3, 3


class Oracle:
    """One tensor on several workers, in float64, with the DCT."""

    def __init__(self, shape, compression, mean, alpha):
        self.shape, self.k, self.mean, self.alpha = shape, compression.topk, mean, alpha
        self.sides = oracles.block_sides(shape, compression.block_side, compression.block_rule)
        self.momenta = [self.coefficients(np.zeros(shape)) for _ in range(WORKERS)]

    def coefficients(self, tensor):
        return oracles.to_coefficients(tensor, self.sides, oracles.dct)

    def step(self, gradients):
        total, senders = 0.0, 0
        for worker, gradient in enumerate(gradients):
            momentum = DECAY * self.momenta[worker] + WEIGHT * self.coefficients(gradient)
            flat = momentum.reshape(-1, np.prod(self.sides, dtype=int))
            largest = np.argsort(-np.abs(flat), axis=1)[:, : self.k]
            chosen = np.zeros(flat.shape, bool)
            np.put_along_axis(chosen, largest, True, axis=1)
            chosen = chosen.reshape(momentum.shape)
            self.momenta[worker] = momentum - self.alpha * chosen * momentum
            total, senders = total + chosen * momentum, senders + chosen
        number = np.maximum(senders, 1) if self.mean == "senders" else WORKERS
        return oracles.to_tensor(total / number, self.shape, self.sides, oracles.inverse_dct)


@draws.cases(
    {
        "workers": dict(
            shapes=[(10, 10), (7,)],
            compression=demo_optax.Compression(4, 4),
            mean="workers",
            alpha=0.2,
            dtype=jnp.float32,
            seed=0,
        ),
        "senders": dict(
            shapes=[(5, 12, 8), (), (1,)],
            compression=demo_optax.Compression(3, 3, block_rule="divisor"),
            mean="senders",
            alpha=1.0,
            dtype=jnp.bfloat16,
            seed=0,
        ),
    },
    number=20,
    shapes=draws.trees,
    compression=st.builds(
        demo_optax.Compression,
        topk=st.integers(1, 10),
        block_side=draws.chunks,
        block_rule=draws.rules,
    ),
    mean=st.sampled_from(["senders", "workers"]),
    alpha=st.sampled_from([1.0, 0.2]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=draws.seeds,
)
def test_steps_of_several_workers(shapes, compression, mean, alpha, dtype, seed):
    # The coefficients of a block that holds one element, and zeros, are equal in pairs.
    side = compression.block_side
    lone = [sum(n > side and n % side == 1 for n in shape) > 1 for shape in shapes]
    if compression.block_rule == "pad" and any(lone):
        return
    tx = demo_optax.decoupled_momentum(
        DECAY,
        compression,
        gradient_weight=WEIGHT,
        mean=mean,
        subtraction_factor=alpha,
        axis_name="data",
    )
    update, state = draws.start(tx, shapes, WORKERS)
    tensors = [Oracle(shape, compression, mean, alpha) for shape in shapes]
    rtol, atol = (1e-2, 1e-3) if dtype == jnp.bfloat16 else (1e-4, 1e-5)
    for step in range(2):
        gradients = draws.gradients(seed + step, shapes, WORKERS, dtype)
        aggregate, state = update(gradients, state)
        for tensor, gradient, ours, momenta in zip(
            tensors, gradients, aggregate, state.momentum, strict=True
        ):
            expected = tensor.step(gradient)
            assert ours.dtype == dtype
            for of_worker in np.asarray(ours, np.float64):
                np.testing.assert_allclose(of_worker, expected, rtol=rtol, atol=atol)
            np.testing.assert_allclose(momenta, tensor.momenta, rtol=1e-4, atol=1e-5)


@sweep(0.1, weight_decay=[0.0, 0.1])
def test_demo_scaled_steps_by_the_root_of_the_mean_over_all_workers(weight_decay):
    """Five steps of its equations, with a schedule, in NumPy float64."""
    shape, rate, decay, b2 = (8, 12), lambda step: 0.1 / (1 + step), 0.98, 0.99
    compression = demo_optax.Compression(topk=3, block_side=4)
    options = dict(eps=0.3, weight_decay=weight_decay, axis_name="data")  # without ties
    tx = demo_optax.demo_scaled(rate, compression, momentum_dtype="float32", **options)
    rng = np.random.default_rng(0)
    params = rng.normal(size=shape).astype(np.float32)
    state = jax.tree.map(lambda x: np.stack([x] * WORKERS), tx.init(params))
    update = jax.jit(jax.vmap(tx.update, in_axes=(0, 0, None), axis_name="data"))
    sides, second = (4, 4), np.zeros((WORKERS, *shape))
    momenta = [oracles.to_coefficients(np.zeros(shape), sides, oracles.dct)] * WORKERS
    for step in range(5):
        gradients = rng.normal(size=(WORKERS, *shape)).astype(np.float32)
        second = b2 * second + (1 - b2) * np.square(gradients, dtype=np.float64)
        scaled = gradients / (np.sqrt(second / (1 - b2 ** (step + 1))) + 0.3)
        total = 0.0
        for worker in range(WORKERS):
            added = rate(step) * oracles.to_coefficients(scaled[worker], sides, oracles.dct)
            momentum = decay * momenta[worker] + added
            smallest = np.sort(np.abs(momentum), axis=-1)[..., -3:-2]
            sent = np.where(np.abs(momentum) >= smallest, momentum, 0)
            momenta[worker], total = momentum - sent, total + sent
        u = oracles.to_tensor(total / WORKERS, shape, sides, oracles.inverse_dct)
        mean = np.square(u).sum() / np.abs(u).sum()
        expected = np.sign(u) * np.sqrt(np.abs(u) / mean) + weight_decay * params
        updates, state = update(gradients, state, params)
        np.testing.assert_allclose(updates[0], -rate(step) * expected, atol=2e-5)
        np.testing.assert_array_equal(updates[0], updates[-1])


def test_a_tensor_of_which_nothing_was_heard_does_not_move():
    tx = demo_optax.demo_scaled(0.1, demo_optax.Compression(topk=4))
    shapes = {"heard": (3,), "silent": (2, 2), "empty": (0, 3)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    gradient = {**params, "silent": np.zeros((2, 2), np.float32)}
    updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
    np.testing.assert_allclose(updates["heard"], -0.1, rtol=1e-5)
    np.testing.assert_array_equal(updates["silent"], 0.0)
    assert updates["empty"].shape == (0, 3)


def test_rows_that_are_no_longer_heard_do_not_make_others_move_further():
    """As of an embedding whose tokens came once, or of experts that are no longer chosen."""
    tx = demo_optax.demo_scaled(0.1)
    params = np.zeros((1024, 64), np.float32)
    state, rng, sizes = tx.init(params), np.random.default_rng(0), []
    update = jax.jit(tx.update)
    for step in range(60):
        gradient = rng.normal(size=params.shape)
        if step:
            gradient[64:] = 0
        updates, state = update(gradient.astype(np.float32), state, params)
        sizes.append(np.sqrt(np.square(np.asarray(updates)[:64]).mean()) / 0.1)
    assert min(sizes) > 0.8
    assert max(sizes) < 1.4
    assert sizes[-1] < 1.1
