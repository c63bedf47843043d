"""What many workers agree on, against the algorithm written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import demo_optax
from tests import draws, oracles

pytestmark = pytest.mark.sweep

DECAY, WEIGHT, WORKERS = 0.9, 0.3, 3
decoupled = demo_optax.decoupled_momentum


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


@pytest.mark.parametrize("mean", ["senders", "workers"])
@draws.examples(10)
@given(
    shapes=draws.trees,
    topk=st.integers(1, 10),
    chunk=draws.chunks,
    rule=draws.rules,
    alpha=st.sampled_from([1.0, 0.2]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=draws.seeds,
)
def test_steps_of_several_workers(mean, shapes, topk, chunk, rule, alpha, dtype, seed):
    compression = demo_optax.Compression(topk, chunk, block_rule=rule)
    tx = decoupled(
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


@draws.examples(5)
@given(shapes=draws.trees, compression=draws.compressions, seed=draws.seeds)
def test_identical_workers_are_one_worker(shapes, compression, seed):
    one, one_state = draws.start(decoupled(DECAY, compression), shapes)
    many, many_state = draws.start(decoupled(DECAY, compression, axis_name="data"), shapes, WORKERS)
    for step in range(2):
        gradients = draws.gradients(seed + step, shapes)
        same = [np.stack([gradient] * WORKERS) for gradient in gradients]
        alone, one_state = one(gradients, one_state)
        together, many_state = many(same, many_state)
        for ours, theirs in zip(
            [*together, *many_state.momentum], [*alone, *one_state.momentum], strict=True
        ):
            for of_worker in np.asarray(ours):
                np.testing.assert_allclose(of_worker, theirs, rtol=1e-4, atol=1e-6)


@draws.examples(6)
@given(
    shapes=draws.trees,
    compression=draws.compressions,
    mean=st.sampled_from(["senders", "workers"]),
    order=st.permutations(range(WORKERS)),
    seed=draws.seeds,
)
def test_order_of_workers_does_not_matter(shapes, compression, mean, order, seed):
    tx = decoupled(DECAY, compression, mean=mean, axis_name="data")
    update, state = draws.start(tx, shapes, WORKERS)
    permuted = state
    for step in range(2):
        gradients = draws.gradients(seed + step, shapes, WORKERS)
        aggregate, state = update(gradients, state)
        again, permuted = update([g[list(order)] for g in gradients], permuted)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), aggregate, again
        )
        for momentum, other in zip(state.momentum, permuted.momentum, strict=True):
            np.testing.assert_array_equal(np.asarray(momentum)[list(order)], other)
