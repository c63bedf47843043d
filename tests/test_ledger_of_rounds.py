"""The ledger of local steps by hand: progress is sent once, and what did not count comes back."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import demo_optax
from demo_optax._src.exchange.protocol import MESSAGE
from tests.by_hand import halves_of

EVERY, SHAPE, WORKERS = 2, (8, 8), 3
RATE = 2.0**-3
START = np.zeros(SHAPE, np.float32)


def full(value):
    return np.full(SHAPE, value, np.float32)


def outer(topk, value_coding, decay):
    compression = demo_optax.Compression(topk, 8, value_coding, transform="identity")
    options = dict(decay=decay, gradient_weight=1.0, mean="workers")
    return demo_optax.decoupled(optax.sgd(1.0), compression, **options)


@functools.cache
def rounds(topk=64, value_coding="float32", decay=1.0, **options):
    inner = optax.sgd(RATE)
    return demo_optax.local_steps(inner, outer(topk, value_coding, decay), EVERY, **options)


class Simulated:
    """A worker whose gradients are drawn, and whose packets travel for some steps."""

    def __init__(self, tx, number):
        self.number, self.random = number, np.random.default_rng(number)
        init, self.send_half, self.apply_half = halves_of(tx)
        self.state, self.outbox = init(START), None
        self.went, self.delivered = np.zeros(SHAPE), np.zeros(SHAPE)

    def step(self, x):
        gradient = self.random.integers(-8, 9, SHAPE).astype(np.float32)
        outbox, self.state = self.send_half(gradient, self.state, x, worker=self.number)
        self.went -= RATE * gradient
        if int(outbox.status) == MESSAGE:
            assert self.outbox is None
            self.outbox = outbox

    def apply(self, packets, x):
        outbox, self.outbox = self.outbox, None
        if packets[self.number].any():
            positions, values = (np.asarray(part[0][0]) for part in outbox.message)
            places = positions if positions.size else np.arange(64)
            message = np.zeros(64)
            message[places] = values
            self.delivered += message.reshape(SHAPE).T
        updates, self.state = self.apply_half(packets, outbox, self.state, x, worker=self.number)
        return x + np.asarray(updates)

    def residual(self):
        return np.asarray(self.state.outer[0].momentum).reshape(SHAPE).T  # columns first


KEEP = {"whole": rounds(), "int8": rounds(value_coding="int8"), "sparse": rounds(8, "int2")}


def run(tx, missing, late):
    """Trains some rounds; ``missing`` drops packets, and ``late`` steps pass before they come."""
    x, workers = START, [Simulated(tx, n) for n in range(WORKERS)]
    for number, dropped in enumerate(missing):
        for _ in range(EVERY - (late if number else 0)):
            for worker in workers:
                worker.step(x)
        packets = np.stack([worker.outbox.packet for worker in workers])
        packets[list(dropped)] = 0
        for _ in range(late):
            for worker in workers:
                worker.step(x)
        results = [worker.apply(packets, x) for worker in workers]
        assert len({result.tobytes() for result in results}) == 1
        x = results[0]
    return x, workers


@pytest.mark.parametrize("name", KEEP)
@hypothesis.given(
    st.lists(st.sets(st.integers(0, WORKERS - 1), max_size=WORKERS - 1), min_size=1, max_size=6),
    st.integers(0, EVERY - 1),
)
@hypothesis.settings(max_examples=10, deadline=None)
def test_what_a_worker_went_is_delivered_or_in_its_ledger_or_fresh(name, missing, late):
    x, workers = run(KEEP[name], missing, late)
    for worker in workers:
        fresh = np.asarray(worker.state.displacement)
        # Multiples of 1/8 are exact; a message that came back may cost one rounding.
        error = worker.went - (fresh - worker.residual() - worker.delivered)
        if name == "whole" or not any(worker.number in dropped for dropped in missing):
            assert np.abs(error).max() <= (0 if name == "whole" else 1e-5)
        else:
            assert np.abs(error).max() <= 1e-4
    if name == "whole" and not any(missing):
        mean = np.mean([worker.delivered for worker in workers], axis=0)
        np.testing.assert_allclose(x, -mean, atol=1e-6)


def test_keep_goes_on_from_its_own_progress_and_mix_moves_towards_the_shared_parameters():
    states = {}
    for merge in (None, 0.25):
        (init, send, apply), x = halves_of(rounds(merge=merge)), START
        state = init(x)
        for step in range(EVERY):
            last = step == EVERY - 1
            outbox, state = send(full(-1 / RATE), state, x, worker=0, ends_round=last)
        sent = outbox  # a progress of 2
        _, state = send(full(-1 / RATE), state, x, worker=0, ends_round=False)  # 1 more
        own = demo_optax.local_parameters(x, state)
        np.testing.assert_array_equal(own, 3.0)
        other, _ = send(full(0.0), init(x), x, worker=1, ends_round=True)
        packets = np.stack([sent.packet, other.packet])
        updates, state = apply(packets, sent, state, x, worker=0)
        u = np.asarray(updates)
        expected = 1.0 if merge is None else merge * (3.0 - u)
        np.testing.assert_allclose(np.asarray(state.displacement), expected, rtol=1e-6)
        assert int(state.round) == 1 and int(state.mini_step) == 1
        states[merge] = u
    np.testing.assert_array_equal(states[None], states[0.25])
    # Two steps weigh two, and one step weighs one: 2 * 2 / 3.
    np.testing.assert_allclose(states[None], 4 / 3, rtol=1e-6)


def test_a_second_message_before_the_first_was_applied_is_refused():
    tx, x = rounds(), jnp.zeros(SHAPE)
    init, send, _ = halves_of(tx)
    state = init(x)
    for _ in range(EVERY + 1):
        _, state = send(x, state, x, worker=0)
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.send(x, state, x, worker=0)


def test_schedules_follow_the_rounds_of_all():
    """A worker that takes few steps in its rounds, and one that takes many, have the same rate."""
    inner = optax.sgd(optax.piecewise_interpolate_schedule("linear", 1.0, {12: 1e-3}))
    tx, x = demo_optax.local_steps(inner, outer(64, "float32", 1.0), 4), START
    (init, send, apply), counts = halves_of(tx), {}
    for steps in (1, 4, 7):
        state, seen = init(x), []
        for _ in range(3):
            for step in range(steps):
                last = step == steps - 1
                outbox, state = send(x, state, x, worker=0, ends_round=last)
                seen.append(int(optax.tree.get(state.inner, "ScaleByScheduleState").count))
            _, state = apply(outbox.packets, outbox, state, x, worker=0)
        counts[steps] = seen
    assert counts[4] == [*range(1, 13)]
    assert counts[1] == [1, 5, 9]
    assert counts[7] == [1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 8, 8, 8, 9, 10, 11, 12, 12, 12, 12]


def test_progress_in_16_bits_keeps_what_the_message_rounds_off():
    init, send, apply = halves_of(rounds())
    x = jnp.zeros(SHAPE, jnp.bfloat16)
    state = init(x)
    for _ in range(EVERY):
        outbox, state = send(jnp.ones(SHAPE, jnp.bfloat16), state, x, worker=0)
    state = state._replace(displacement=state.displacement + 1e-4)
    fresh = np.asarray(state.displacement, np.float64)
    _, state = apply(outbox.packets, outbox, state, x, worker=0)
    np.testing.assert_allclose(state.displacement, fresh + 2 * RATE, rtol=1e-6)


@pytest.mark.parametrize("merge", [None, 0.25])
def test_one_that_only_follows_keeps_its_progress(merge):
    tx, x = rounds(merge=merge), START
    init, send, apply = halves_of(tx)
    other, _ = send(full(1.0), init(x), x, worker=1, ends_round=True)
    packets = np.stack([np.zeros_like(other.packet), other.packet])
    _, state = send(full(-1 / RATE), init(x), x, worker=0, ends_round=False)
    empty = tx.empty_outbox(x)
    for number in range(3):
        _, state = apply(packets, empty, state, x, worker=0)
        packets = np.zeros_like(packets)
        assert int(state.round) == number + 1 and float(state.weight) == 1.0
        np.testing.assert_array_equal(state.displacement, 1.0)


def test_schedules_that_are_injected_follow_the_rounds_too():
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    tx, x = demo_optax.local_steps(inner, outer(64, "float32", 1.0), 10), START
    init, send, apply = halves_of(tx)
    state = init(x)
    for _ in range(5):
        outbox, state = send(x, state, x, worker=0, ends_round=True)
        _, state = apply(outbox.packets, outbox, state, x, worker=0)
    _, state = send(x, state, x, worker=0, ends_round=False)
    assert float(state.inner.hyperparams["learning_rate"]) == pytest.approx(0.5)


@functools.cache
def rounds_of(every, fragments):
    """The first state of one worker whose rate tells the step, and its compiled update."""
    inner, sent = optax.sgd(lambda step: RATE * step), outer(64, "float32", 1.0)
    tx = demo_optax.local_steps(inner, sent, every, fragments=fragments)
    return jax.jit(tx.init)(START), jax.jit(tx.update)


def steps_by_schedule(update, state, number):
    """Each update's step by the schedule, whether it ended a round, and the last state."""
    seen = []
    for _ in range(number):
        _, state = update(full(1.0), state, START)
        count = optax.tree.get(state.inner, "ScaleByScheduleState").count
        seen.append((int(count) - 1, int(state.mini_step) == 0))
    return *zip(*seen, strict=True), state


@pytest.mark.parametrize("fragments", [None, 2])
@pytest.mark.parametrize("at", [8, 11])
def test_schedules_go_on_when_rounds_get_longer_or_shorter(fragments, at):
    first, update = rounds_of(4, fragments)
    _, _, state = steps_by_schedule(update, first, at)
    for every in (2, 6):
        steps, ended, _ = steps_by_schedule(rounds_of(every, fragments)[1], state, 12)
        assert steps == tuple(range(at, at + 12))
        before, length = (n // (fragments or 1) for n in (4, every))
        end = at // before * before + before - 1  # of the round that was begun
        due = [step >= end and (step - end) % length == 0 for step in steps]
        assert ended == tuple(due) or (length == 1 and all(ended))


@pytest.mark.parametrize("given", ["as of any optimizer", "and of local steps"])
def test_who_joins_with_the_shared_state_takes_the_others_steps(given):
    """Rounds of 2 steps, of which the others have taken four."""
    inner = optax.sgd(lambda step: RATE * step)
    tx = demo_optax.local_steps(inner, outer(64, "float32", 1.0), EVERY)
    (init, send, apply), x = halves_of(tx), START
    old = init(x)

    def step(state, worker):
        outbox, state = send(full(1.0), state, x, worker=worker)
        return outbox, int(optax.tree.get(state.inner, "ScaleByScheduleState").count), state

    for number in range(2 * EVERY * 2):
        outbox, _, old = step(old, 0)
        if number % EVERY == EVERY - 1:
            _, old = apply(outbox.packets, outbox, old, x, worker=0)
    new = init(x)
    (theirs, *base), (ours, *_) = old.outer, new.outer
    new = new._replace(outer=(ours._replace(count=theirs.count, metrics=theirs.metrics), *base))
    if given == "and of local steps":
        shared = dict(round=old.round, first_step=old.first_step, last_step=old.last_step)
        new = new._replace(**shared)
    for number in range(2 * EVERY):  # the first round it trains with the others
        (box, count, old), (other, same, new) = step(old, 0), step(new, 1)
        assert count == same == 2 * EVERY * 2 + number + 1
        if number % EVERY == EVERY - 1:
            packets = np.concatenate([box.packets, other.packets])
            updates, old = apply(packets, box, old, x, worker=0)
            same, new = apply(packets, other, new, x, worker=1)
            np.testing.assert_array_equal(updates, same)
            for name in ("round", "first_step", "last_step"):
                assert int(getattr(old, name)) == int(getattr(new, name))


def test_rounds_of_unequal_length_count_whole_and_loud_ones_or_heavy_ones_do_not():
    """With a limit of 10, a weight and a weight times a norm are at most 10 of their medians."""
    compression = demo_optax.Compression(64, 8, transform="identity")
    limited = demo_optax.AllGather(norm_limit=10.0)
    options = dict(decay=1.0, gradient_weight=1.0, mean="workers", exchange=limited)
    tx = demo_optax.local_steps(
        optax.sgd(1.0), demo_optax.decoupled(optax.sgd(1.0), compression, **options), EVERY
    )
    (init, send, apply), x = halves_of(tx), START
    number = 3  # of rows; the last is empty where two take part

    def sent(worker, went, weight):
        extra = dict(worker=worker, ends_round=True, message_weight=weight)
        return send(full(-went), init(x), x, **extra)

    def update(*rounds):
        results = [sent(worker, *one) for worker, one in enumerate(rounds)]
        packets = np.zeros((number, results[0][0].packet.size), np.uint32)
        packets[: len(rounds)] = [outbox.packet for outbox, _ in results]
        return apply(packets, *results[0], x, worker=0)[0]

    np.testing.assert_allclose(update((1.0, 1.0), (3.0, 3.0)), (1 + 3 * 3) / 4, rtol=1e-5)
    three = update((1.0, 1.0), (3.0, 3.0), (9.0, 9.0))
    np.testing.assert_allclose(three, (1 + 3 * 3 + 9 * 9) / 13, rtol=1e-5)
    np.testing.assert_allclose(update((1.0, 1.0), (1.0, 1e15)), (1 + 10) / 11, rtol=1e-5)
    np.testing.assert_allclose(update((1.0, 1.0), (100.0, 100.0)), (1 + 10 * 1) / 11, rtol=1e-5)
    light = update((1.0, 1.0), (1.0, 1.0), (1e9, 1e-9))
    np.testing.assert_allclose(light, (1 + 1 + 10e-9) / 2, rtol=1e-5)
    loud = update((1.0, 1.0), (1.0, 1.0), (1000.0, 1.0))
    np.testing.assert_allclose(loud, (1 + 1 + 10) / 3, rtol=1e-5)
