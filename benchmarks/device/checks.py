"""What must hold on any device: equal replicas, momenta that lose nothing, packets as on a CPU.

Each check returns its figures as JSON takes them, with whether it has ``passed``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh

import demo_optax
from demo_optax import Compression

from .models import AXIS, RATE, Model, random_on_host, tokens

WORKERS, STEPS = 8, 3
SIDE = 64  # of a block; it divides every dimension of the shapes that are checked
DECAY, WEIGHT = 0.9, 0.3
ROUNDING = 3e-6  # of the largest coefficient: some float32 operations
EQUAL_SHARE = 0.9998  # a DCT in TF32 changes one position in 1,200, in float32 hardly any
PACKETS = (
    Compression(32),
    Compression(32, value_coding="int4"),
    Compression(32, value_coding="sign", selection="bins"),
)

Figures = dict[str, Any]
Shapes = dict[str, jax.ShapeDtypeStruct]


def simulated_workers(model: Model) -> Figures:
    """Trains with eight simulated workers; all take part, and report the packets of all."""
    mesh = AbstractMesh((WORKERS,), (AXIS,))
    tx = demo_optax.demo_scaled(RATE, axis_name=AXIS)
    step = demo_optax.make_train_step(model.loss_fn, tx, mesh)
    params = jax.tree.map(jnp.asarray, random_on_host(model.shapes, 0))
    state, found = demo_optax.init_opt_state(tx, params, mesh), []
    for seed in range(STEPS):
        batch = tokens(model, 2 * WORKERS, 64, seed)
        params, state, metrics = step(params, state, batch)
        found.append(jax.device_get((metrics.exchange, metrics.loss)))
    all_metrics, losses = zip(*found, strict=True)
    participants = [int(x.participants) for x in all_metrics]
    agreed = all(x.agreed and not x.identical for x in all_metrics)
    passed = agreed and participants == [WORKERS] * STEPS and bool(np.isfinite(losses).all())
    return dict(passed=passed, participants=participants, agreed=agreed)


def equal_replicas(tx: Any, shapes: Shapes) -> Figures:
    """Gives the packets of eight workers to each of them, and compares the updates bit for bit."""
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    params = random_on_host(shapes, 0)
    states, equal, participants = [tx.init(params)] * WORKERS, [], []
    for step in range(STEPS):
        gradients = [random_on_host(shapes, 1, step, worker) for worker in range(WORKERS)]
        sent = [send(gradients[i], states[i], params, worker=i) for i in range(WORKERS)]
        packets = np.stack([outbox.packet for outbox, _ in sent])
        results = [apply(packets, *sent[i], params, worker=i) for i in range(WORKERS)]
        updates, states = zip(*results, strict=True)
        updates = jax.device_get(updates)
        equal.append(all(same_bits(updates[0], other) for other in updates) and moves(updates[0]))
        metrics = jax.device_get([demo_optax.exchange_metrics(state) for state in states])
        participants += [int(x.participants) if x.agreed else 0 for x in metrics]
        params = jax.device_get(optax.apply_updates(params, updates[0]))
    passed = all(equal) and set(participants) == {WORKERS}
    return dict(passed=passed, equal_steps=sum(equal), participants=min(participants))


def conservation(shapes: Shapes) -> Figures:
    """Compares each worker's momentum before a step with that after it and what others decode.

    The other is a worker that sends nothing, and gets one packet at a time. ``largest_error`` is a
    multiple of the largest coefficient before the step.
    """
    coding = Compression(32, SIDE, "int4")
    tx = demo_optax.decoupled_momentum(DECAY, coding, gradient_weight=WEIGHT, mean="workers")
    send, apply, params = jax.jit(tx.send), jax.jit(tx.apply), random_on_host(shapes, 0)
    states: list[Any] = [tx.init(params)] * WORKERS
    bystander, nothing, errors, is_sent = tx.init(params), tx.empty_outbox(params), [], True
    for step in range(STEPS):
        gradients = [random_on_host(shapes, 2, step, worker) for worker in range(WORKERS)]
        sent = [send(gradients[i], states[i], params, worker=i) for i in range(WORKERS)]
        packets = np.stack([outbox.packet for outbox, _ in sent])
        for i, gradient in enumerate(gradients):
            alone = np.where(np.arange(WORKERS)[:, None] == i, packets, np.uint32(0))
            decoded, _ = jax.device_get(apply(alone, nothing, bystander, params, worker=-1))
            before, (_, states[i]) = states[i], apply(packets, *sent[i], params, worker=i)
            momenta = jax.device_get((before.momentum, states[i].momentum))
            errors += [
                lost(*(tree[name] for tree in (gradient, decoded, *momenta))) for name in shapes
            ]
            is_sent &= moves(decoded)
        _, bystander = apply(packets, nothing, bystander, params, worker=-1)
    error = float(np.max(errors))
    return dict(passed=is_sent and error < ROUNDING, largest_error=error)


def lost(gradient: np.ndarray, decoded: np.ndarray, before: np.ndarray, after: np.ndarray) -> float:
    """Returns the largest difference between a momentum and its two parts, relative to it."""
    total = DECAY * before.astype(np.float64) + WEIGHT * dct_blocks(gradient)
    return np.abs(after + dct_blocks(decoded) - total).max() / np.abs(total).max()


def dct_blocks(matrix: np.ndarray) -> np.ndarray:
    """Returns the coefficients of a matrix as they are stored: float64 ``(*grid, SIDE * SIDE)``."""
    frequency, position = np.arange(SIDE)[:, None], np.arange(SIDE)
    basis = np.sqrt(2 / SIDE) * np.cos(np.pi * frequency * (2 * position + 1) / (2 * SIDE))
    basis[0] /= np.sqrt(2)
    rows, columns = (size // SIDE for size in matrix.shape)
    blocks = matrix.reshape(rows, SIDE, columns, SIDE).transpose(0, 2, 3, 1)
    return (basis @ blocks @ basis.T).reshape(rows, columns, -1)


def packets_of_a_cpu() -> Figures:
    """Compares the packets of a recorded momentum with those that the CPU makes of it."""
    devices = jax.devices()[0], jax.devices("cpu")[0]
    equal = {}
    for compression in PACKETS:
        one, other = (packet_of(compression, device) for device in devices)
        name = f"{compression.selection}, {compression.value_coding}"
        equal[name] = bool(np.array_equal(one, other) and one.any())
    return dict(passed=all(equal.values()), equal=equal)


def packet_of(compression: Compression, device: Any) -> np.ndarray:
    """Returns the packet of a gradient of zeros, which leaves the recorded momentum: its half."""
    tx = demo_optax.decoupled_momentum(0.5, compression)
    momentum = recorded_momentum()
    shape = [SIDE * size for size in momentum.shape[:2]]
    with jax.default_device(device):
        zeros = {"w": jnp.zeros(shape)}
        state: Any = tx.init(zeros)
        state = state._replace(momentum={"w": jnp.asarray(momentum)})
        outbox, _ = jax.jit(tx.send)(zeros, state, zeros, worker=0)
        return np.asarray(outbox.packet)


def recorded_momentum() -> np.ndarray:
    """Returns float32 ``(2, 3, 4096)``: six blocks of integers times a power of two.

    A block has the magnitudes 1 to 64 once, two in each of 32 bins, and else zeros. So there are no
    ties, and every sum of squares is exact in float32, in whatever order it is added.
    """
    number = np.arange(SIDE)
    places = SIDE * number + 5 * number % SIDE
    blocks = np.zeros((6, SIDE * SIDE), np.float32)
    for block in range(len(blocks)):
        magnitudes = 1 + (number * (2 * block + 1)) % SIDE
        blocks[block, places] = np.where(number % 3, magnitudes, -magnitudes) * 0.5 ** (block % 3)
    return blocks.reshape(2, 3, -1)


def coefficients_of_a_cpu(shapes: Shapes) -> Figures:
    """Compares what is sent of a normal gradient's DCT with what the CPU sends of it.

    Returns the share of the positions that both send, and among them that of equal signs.
    """
    tx = demo_optax.decoupled_momentum(DECAY, Compression(32))
    gradient, found = random_on_host(shapes, 3), []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            params = jax.tree.map(jnp.zeros_like, gradient)
            outbox, _ = jax.jit(tx.send)(gradient, tx.init(params), params, worker=0)
            found.append(jax.device_get(outbox.message))
    here, there = map(_signs, found)
    common = (here != 0) & (there != 0)
    positions = float(common.sum() / (here != 0).sum())
    signs = float((here == there)[common].mean())
    passed = min(positions, signs) >= EQUAL_SHARE
    return dict(passed=passed, equal_positions=positions, equal_signs=signs)


def _signs(message) -> np.ndarray:
    """Returns the signs of a message's values, int8 ``(blocks, 4096)``, and zeros elsewhere."""
    dense = [np.zeros((len(values), SIDE * SIDE), np.int8) for values in message.values]
    for blocks, positions, values in zip(dense, *message, strict=True):
        np.put_along_axis(blocks, positions, np.where(values < 0, -1, 1), axis=1)
    return np.concatenate(dense)


def same_bits(one, other) -> bool:
    """Tells whether two trees of float32 arrays have equal bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in pairs)


def moves(update) -> bool:
    """Tells whether all tensors of an update are finite and not zero."""
    return all(np.isfinite(x).all() and x.any() for x in jax.tree.leaves(update))
