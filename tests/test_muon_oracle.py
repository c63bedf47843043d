"""Twenty steps of `demo_muon` on four workers, against its equations in NumPy float64 and SciPy."""

import jax
import numpy as np

import demo_optax
from tests import oracles

WORKERS, STEPS, RATE, DECAY, B1, B2, SIDE, BINS = 4, 20, 0.03, 0.95, 0.9, 0.99, 4, 4
EPS = 0.1  # without which a vector's first step would be of equal elements, and of ties
SHAPES = {"w": (8, 12), "b": (8,)}


def orthogonal(x):
    """Five Newton-Schulz steps with the coefficients of Muon (Jordan et al., 2024)."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def one_bit_of_bins(m):
    """The largest of each bin of a block's coefficients, as plus or minus the block's scale."""
    binned = m.reshape(*m.shape[:-1], -1, BINS)
    largest = np.abs(binned).argmax(axis=-2, keepdims=True)
    chosen = np.take_along_axis(binned, largest, axis=-2)
    mean = np.abs(chosen).mean(axis=-1, keepdims=True).astype(np.float32)
    scale = ((mean.view(np.uint32) + (1 << 20)) >> 21 << 21).view(np.float32)  # 8 + 2 bits
    sent = np.zeros_like(binned)
    np.put_along_axis(sent, largest, np.sign(chosen) * scale, axis=-2)
    return sent.reshape(m.shape)


def step_of(u):
    return -RATE * np.sign(u) * np.sqrt(np.abs(u) * np.abs(u).sum() / np.square(u).sum())


class Worker:
    """The momenta of one worker, and the point where it takes its gradient."""

    def __init__(self):
        zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.h, self.v, self.displacement = np.zeros(SHAPES["w"]), dict.fromkeys(SHAPES, 0.0), zeros
        self.m = {name: to_coefficients(name, x) for name, x in zeros.items()}

    def send(self, gradient, number):
        added = (1 - B1) * gradient["w"]
        self.h = B1 * self.h + added
        directions = {"w": orthogonal(B1 * self.h + added), "b": gradient["b"]}
        squares = {name: np.square(x) for name, x in directions.items()}
        squares["w"] = squares["w"].mean(axis=0)
        sent = {}
        for name, x in directions.items():
            self.v[name] = B2 * self.v[name] + (1 - B2) * squares[name]
            scaled = x / (np.sqrt(self.v[name] / (1 - B2**number)) + EPS)
            self.m[name] = DECAY * self.m[name] + RATE * to_coefficients(name, scaled)
            sent[name] = one_bit_of_bins(self.m[name])
            self.m[name] = self.m[name] - sent[name]
            self.displacement[name] = step_of(to_tensor(name, self.m[name]))
        return sent


def sides_of(name):
    return (SIDE,) * len(SHAPES[name])


def to_coefficients(name, x):
    return oracles.to_coefficients(x, sides_of(name), oracles.dct)


def to_tensor(name, m):
    return oracles.to_tensor(m, SHAPES[name], sides_of(name), oracles.inverse_dct)


def test_twenty_steps_follow_the_equations():
    rng = np.random.default_rng(5)
    centres = {name: rng.normal(size=(WORKERS, *shape)) for name, shape in SHAPES.items()}
    factors = {name: rng.uniform(0.5, 2.0, size=shape) for name, shape in SHAPES.items()}
    compression = demo_optax.Compression(BINS, SIDE, value_coding="sign", selection="bins")
    options = dict(eps=EPS, momentum_dtype="float32", axis_name="data")
    tx = demo_optax.demo_muon(RATE, compression, **options)
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    state = jax.tree.map(lambda x: np.stack([x] * WORKERS), tx.init(params))
    mapped = jax.vmap(tx.update, in_axes=(0, 0, None), axis_name="data")
    update, ours = jax.jit(mapped), [Worker() for _ in range(WORKERS)]
    wanted = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for number in range(1, STEPS + 1):
        points = jax.tree.map(np.asarray, demo_optax.local_parameters(params, state))
        gradients = {
            name: (factors[name] * (points[name] - centres[name])).astype(np.float32)
            for name in SHAPES
        }
        updates, state = update(gradients, state, params)
        params = {name: params[name] + np.asarray(x[0]) for name, x in updates.items()}

        own = [
            {n: factors[n] * (wanted[n] + worker.displacement[n] - centres[n][i]) for n in SHAPES}
            for i, worker in enumerate(ours)
        ]
        sent = [worker.send(gradient, number) for worker, gradient in zip(ours, own, strict=True)]
        for name in SHAPES:
            mean = sum(one[name] for one in sent) / WORKERS
            wanted[name] = wanted[name] + step_of(to_tensor(name, mean))
            np.testing.assert_allclose(params[name], wanted[name], atol=2e-4 * RATE * number)
    distance = np.abs(params["w"] - centres["w"].mean(0)).mean()
    assert distance < 0.7 * np.abs(centres["w"].mean(0)).mean()
