"""Packets that are damaged, or not what they should be, on the way to all workers or into one.

Five workers take a few clean steps, whose packets are recorded. In the next step the packet of one
worker is replaced, for all receivers or for a single one; a clean step follows. A try is lost

- where a packet is accepted that should not be, or one is refused that nobody touched,
- where receivers differ and the next step does not say so to all, or says so though none does,
- where an update is not finite, or beyond what `norm_limit` bounds.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import demo_optax
from demo_optax._src.compression import make_plan, packet
from demo_optax._src.compression.packet import Origin
from demo_optax._src.exchange import collectives

from .outcomes import Try
from .workers import AXIS, DECAY, PARAMS, WORKERS, aggregate_bound, gradients, norms, start

KINDS = ("corrupt", "replayed", "foreign", "huge")
PLACES = ("sender", "receiver")
ROWS = tuple(f"{kind} packets at the {place}" for kind in KINDS for place in PLACES)
EACH = 2000
AT_ONCE = 250  # tries of one scene
CODINGS = ("float32", "int4")
LIMIT = 10.0
EXCHANGE = demo_optax.AllGather(AXIS, norm_limit=LIMIT)
BEFORE = 3  # steps that are recorded, up to the one in which a packet is replaced
EVERYBODY = -1


class Forged(NamedTuple):
    """A packet in the place of a sender's, for one receiver or for everybody; with axes of tries.

    Attributes:
      words: of the packet.
      sender: whose it should be.
      receiver: who gets it.
      refused: whether it must not be accepted.
    """

    words: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    refused: np.ndarray


class Scene(NamedTuple):
    """What is known before a packet is replaced.

    Attributes:
      state: of every worker.
      gradients: of the step in which it is replaced, and of the next one.
      packets: of all workers, on each step so far and on that one.
    """

    state: tuple
    gradients: tuple
    packets: np.ndarray


class Seen(NamedTuple):
    """What every worker saw; axes of tries and workers."""

    updates: dict
    participants: np.ndarray
    agreed_next: np.ndarray
    participants_next: np.ndarray


def run(count: int, seed: int) -> Iterator[Try]:
    for number, row in enumerate(ROWS):
        kind, place = row.split()[0], row.split()[-1]
        for first in range(0, count, AT_ONCE):
            scene_number = first // AT_ONCE
            rng = np.random.default_rng([seed, number, scene_number])
            coding = CODINGS[scene_number % len(CODINGS)]
            scene = recorded(coding, rng)
            some = min(AT_ONCE, count - first)
            sender = rng.integers(WORKERS, size=some)
            words, refused = FORGERIES[kind](coding, scene, sender, rng)
            other = (sender + rng.integers(1, WORKERS, size=some)) % WORKERS
            receiver = np.full(some, EVERYBODY) if place == "sender" else other
            forged = Forged(np.asarray(words), sender, receiver, np.broadcast_to(refused, some))
            yield from (Try(row, reason) for reason in judged(coding, scene, forged))


def compression(coding: str) -> demo_optax.Compression:
    return demo_optax.Compression(8, 16, coding)


def optimizer(coding: str):
    """Its update is the aggregate itself, but for the sign."""
    return demo_optax.demo_sgd(1.0, compression(coding), decay=DECAY, exchange=EXCHANGE)


def step(tx, gradient, state, forged: Forged | None = None):
    """Every worker's update, state and what it received, of which a packet may be replaced."""
    plain = collectives.gather

    def one(gradient, state):
        heard = []

        def gather(words, axis_name, own):
            if forged is not None:
                worker = jax.lax.axis_index(axis_name)
                sends = (worker == forged.sender) & (forged.receiver == EVERYBODY)
                words = jnp.where(sends, forged.words, words)
            heard.append(plain(words, axis_name, own))
            if forged is not None:
                changed = heard[0].at[forged.sender].set(forged.words)
                heard[0] = jnp.where(worker == forged.receiver, changed, heard[0])
            return heard[0]

        with mock.patch.object(collectives, "gather", gather):
            updates, state = tx.update(gradient, state, PARAMS)
        return updates, state, heard[0]

    return jax.vmap(one, axis_name=AXIS)(gradient, state)


@functools.cache
def clean_step(coding: str) -> Callable:
    return jax.jit(functools.partial(step, optimizer(coding)))


@functools.cache
def forged_steps(coding: str) -> Callable:
    """A step with a forged packet and a clean one behind it, of many tries at once."""
    tx = optimizer(coding)

    def both(state, now, later, forged):
        updates, state, _ = step(tx, now, state, forged)
        participants = state[0].metrics.participants
        _, state, _ = step(tx, later, state)
        metrics = state[0].metrics
        return Seen(updates, participants, metrics.agreed, metrics.participants)

    return jax.jit(jax.vmap(both, in_axes=(None, None, None, 0)))


def recorded(coding: str, rng: np.random.Generator) -> Scene:
    *past, now, later = gradients(rng, BEFORE + 1)
    state, packets = start(optimizer(coding)), []
    for gradient in [*past, now]:
        before = state
        _, state, heard = clean_step(coding)(gradient, before)
        packets.append(np.asarray(heard)[0])
    return Scene(jax.tree.map(np.asarray, before), (now, later), np.stack(packets))


def judged(coding: str, scene: Scene, forged: Forged) -> Iterator[str]:
    """For each try why it is lost, or nothing."""
    traced = forged._replace(refused=np.zeros_like(forged.sender))
    seen = jax.tree.map(np.asarray, forged_steps(coding)(scene.state, *scene.gradients, traced))
    everybody = forged.receiver == EVERYBODY
    concerned = everybody[:, None] | (forged.receiver[:, None] == np.arange(WORKERS))
    expected = WORKERS - (concerned & forged.refused[:, None])
    weight = 1 - DECAY
    bound = aggregate_bound(LIMIT, scene.state[0].momentum, scene.gradients[0], weight)
    for i in range(len(expected)):
        update = jax.tree.map(lambda x, i=i: x[i], seen.updates)
        sizes = norms(update)
        same = all((x == x[:1]).all() for x in update.values())
        if (seen.participants[i] > expected[i]).any():
            yield "it was accepted"
        elif (seen.participants[i] < expected[i]).any():
            yield "a sound packet was refused"
        elif not (sizes <= bound).all():  # as where it is not a number
            yield f"the norm of the update is {sizes.max():.3g}, beyond {bound:.3g}"
        elif everybody[i] and not same:
            yield "receivers of the same packets differ"
        elif (seen.agreed_next[i] != everybody[i]).any():
            yield f"the next step says {seen.agreed_next[i].tolist()} to whether they agreed"
        elif (seen.participants_next[i] != WORKERS).any():
            yield "a packet of the next step was refused"
        else:
            yield ""


def corrupt(coding: str, scene: Scene, sender: np.ndarray, rng: np.random.Generator):
    """Up to 16 bits flipped, or a run of bytes that becomes zeros, at most all of them."""
    return np.stack([damaged(own, rng) for own in scene.packets[-1][sender]]), True


def damaged(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    data = words.copy().view(np.uint8)
    while (data == words.view(np.uint8)).all():
        if rng.random() < 0.5:
            bits = rng.choice(8 * data.size, size=rng.integers(1, 17), replace=False)
            np.bitwise_xor.at(data, bits // 8, (1 << bits % 8).astype(np.uint8))
        else:
            first = rng.integers(data.size)
            data[first : first + rng.choice([1, 4, 64, data.size])] = 0
    return data.view(np.uint32)


def replayed(coding: str, scene: Scene, sender: np.ndarray, rng: np.random.Generator):
    """The sender's own, of an earlier step."""
    return scene.packets[rng.integers(BEFORE - 1, size=len(sender)), sender], True


def foreign(coding: str, scene: Scene, sender: np.ndarray, rng: np.random.Generator):
    """Another worker's, of the same step."""
    other = (sender + rng.integers(1, WORKERS, size=len(sender))) % WORKERS
    return scene.packets[-1][other], True


def huge(coding: str, scene: Scene, sender: np.ndarray, rng: np.random.Generator):
    """Well-formed, with the right checksum: one whose norm float32 can say is accepted, clipped."""
    refused = rng.random(len(sender)) < 0.5
    low, high = np.where(refused, 20, 3), np.where(refused, 38.4, 16.5)
    sizes = np.float32(10.0) ** rng.uniform(low, high).astype(np.float32)
    return forger(coding)(scene.packets[-1][sender], sizes, sender), refused


@functools.cache
def forger(coding: str) -> Callable:
    """Makes each value of a packet as large as is asked for, and tells the norm that it had."""
    plan = make_plan(compression(coding), tuple(x.shape for x in PARAMS.values()))
    layout = EXCHANGE.layout(plan)

    def forge(words, size, sender):
        origin = Origin(jnp.int32(BEFORE - 1), sender[None])
        opened = packet.parse_headers(layout, words[None], origin)[0]
        decoded, _ = packet.decode(layout, words[None])
        header, message = jax.tree.map(lambda x: x[0], (opened, decoded))
        values = tuple(jnp.where(v < 0, -size, size) for v in message.values)
        coded, _ = packet.encode(layout.sections, message._replace(values=values))
        return packet.build(layout, header, coded, message, jnp.array(True), origin)[0]

    return jax.jit(jax.vmap(forge))


FORGERIES = {"corrupt": corrupt, "replayed": replayed, "foreign": foreign, "huge": huge}
