"""`send` and `apply`: the two halves of an update, around any transport."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax import Compression
from tests import workers

SHAPES = {"b": (24,), "w": (16, 24)}
SMALL = Compression(topk=4, block_side=8, value_coding="int4")
MAKE = {
    "demo": functools.partial(demo_optax.demo, 1e-2, SMALL, decay=0.9),
    "demo_scaled": functools.partial(demo_optax.demo_scaled, 1e-2),
    "demo_muon": functools.partial(demo_optax.demo_muon, 1e-2),
    "norm limit": functools.partial(demo_optax.demo_scaled, 1e-2),
}


def exchange(name, axis_name=None):
    return demo_optax.AllGather(axis_name, norm_limit=1.1 if name == "norm limit" else None)


def split(name):
    return MAKE[name](exchange=exchange(name))


def initial():
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


@jax.jit
def gradient(params, seed):
    """That of a noisy parabola: local, and dependent on the parameters."""
    keys = dict(zip(SHAPES, jax.random.split(jax.random.key(seed), len(SHAPES)), strict=True))
    noise = {n: jax.random.normal(keys[n], s) for n, s in SHAPES.items()}
    return jax.tree.map(lambda p, n: 0.1 * p + n, params, noise)


@functools.cache
def halves_of(tx):
    """Compiled once for all workers: their number is traced."""
    return jax.jit(tx.send), jax.jit(tx.apply)


class Worker:
    """One of several workers that exchange by hand."""

    def __init__(self, tx, number, params, state=None):
        self.number, self.params = number, params
        self.state = tx.init(params) if state is None else state
        self.tx, self.send, self.apply = tx, *halves_of(tx)

    def prepare(self, step, **extra):
        place = demo_optax.local_parameters(self.params, self.state)
        found = gradient(place, 100 * step + self.number)
        self.outbox, self.state = self.send(
            found, self.state, self.params, worker=self.number, **extra
        )
        return np.asarray(self.outbox.packet)

    def follow(self):
        self.outbox = self.tx.empty_outbox(self.params)

    def finish(self, packets, worker=None, outbox=None):
        updates, self.state = self.apply(
            packets,
            self.outbox if outbox is None else outbox,
            self.state,
            self.params,
            worker=self.number if worker is None else worker,
        )
        self.params = optax.apply_updates(self.params, updates)


def by_hand(name, number, steps, path=None):
    tx, params = split(name), initial()
    each = [Worker(tx, i, params) for i in range(number)]
    for step in range(steps):
        packets = [worker.prepare(step) for worker in each]
        if path is not None:
            for worker, packet in zip(each, packets, strict=True):
                (path / f"{step}-{worker.number}").write_bytes(packet.tobytes())
            read = [(path / f"{step}-{i}").read_bytes() for i in range(number)]
            packets = [np.frombuffer(data, np.uint32) for data in read]
        for worker in each:
            worker.finish(np.stack(packets))
    return each


def by_shard_map(name, number, steps):
    tx = MAKE[name](exchange=exchange(name, "data"))
    mesh = workers.mesh_of(number)
    stacked, params = demo_optax.stack_workers(tx, mesh), initial()
    update, state = jax.jit(stacked.update), stacked.init(params)
    for step in range(steps):
        places = demo_optax.local_parameters(params, state)
        if places is params:
            places = jax.tree.map(lambda x: np.broadcast_to(x, (number, *x.shape)), params)
        places = jax.device_get(places)
        found = [
            gradient(jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), places), 100 * step + i)
            for i in range(number)
        ]
        gradients = jax.tree.map(lambda *x: np.stack(x), *found)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_bit_equal(one, other):
    chex.assert_trees_all_equal(*jax.device_get((one, other)))


@pytest.mark.parametrize("name", MAKE)
def test_eight_workers_over_files_train_as_with_shard_map(name, tmp_path):
    steps = 30 if name != "demo_muon" else 10
    each = by_hand(name, 8, steps, tmp_path)
    params, state = by_shard_map(name, 8, steps)
    for worker in each:
        assert_bit_equal(worker.params, params)
        momentum = jax.tree.map(lambda x, i=worker.number: x[i], jax.device_get(state[0].momentum))
        if name != "norm limit":  # there a part is put back, with a rounding of its own
            assert_bit_equal(worker.state[0].momentum, momentum)
            assert_bit_equal(worker.state[0].metrics, state[0].metrics)


def coefficients(tx, tree):
    """The coefficients of a gradient, as the momentum stores them."""
    plain = demo_optax.decoupled_momentum(0.0, SMALL, gradient_weight=1.0)
    outbox, state = plain.send(tree, plain.init(tree), tree)
    return jax.tree.map(jnp.add, state.momentum, decoded(outbox, state))


def decoded(outbox, state):
    """What the others decode of a message, as the momentum stores it."""
    before = state._replace(momentum=jax.tree.map(jnp.zeros_like, state.momentum))
    given_back = demo_optax.decoupled_momentum(0.0, SMALL, gradient_weight=1.0).apply(
        jnp.zeros((1, outbox.packet.size), jnp.uint32),
        outbox._replace(step=before.count),
        before,
        initial(),
        worker=-1,
    )
    return given_back[1].momentum


def test_the_momentum_before_is_the_momentum_after_and_the_message():
    tx, params = split("demo"), initial()
    found, before = gradient(params, 1), tx.init(params)
    for _ in range(3):  # so that the momentum is not zero
        outbox, before = tx.send(found, before, params)
        _, before = tx.apply(outbox.packets, outbox, before, params)
    outbox, sent = tx.send(found, before, params)
    message = decoded(outbox, sent[0])
    accumulated = jax.tree.map(
        lambda m, c: 0.9 * m + 1e-2 * c, before[0].momentum, coefficients(tx, found)
    )
    together = jax.tree.map(jnp.add, sent[0].momentum, message)
    chex.assert_trees_all_close(together, accumulated, atol=2e-7)
    _, counted = tx.apply(outbox.packets, outbox, sent, params)
    assert_bit_equal(counted[0].momentum, sent[0].momentum)
    _, missed = tx.apply(jnp.zeros_like(outbox.packets), outbox, sent, params, worker=-1)
    assert_bit_equal(missed[0].momentum, together)  # one rounding


def test_workers_that_miss_steps_join_and_follow_stay_equal():
    tx, params = split("demo_scaled"), initial()
    each = [Worker(tx, i, params) for i in range(4)]
    for step in range(12):
        if step == 6:  # the state of the shared half comes from another worker
            fresh, shared = tx.init(params), each[0].state
            momentum = fresh[0]._replace(count=shared[0].count, metrics=shared[0].metrics)
            each[3] = Worker(tx, 3, each[0].params, (momentum, *shared[1:]))
        packets = np.zeros((4, each[0].tx.empty_outbox(params).packet.size), np.uint32)
        for worker in each:
            if worker.number == 2 and step == 5:
                worker.follow()
            else:
                packets[worker.number] = worker.prepare(step)
        late = {1: step in (2, 3, 8), 2: step == 5, 3: 3 <= step < 6}
        for number, is_late in late.items():
            packets[number] *= not is_late
        for worker in each:
            is_late = late.get(worker.number, False)
            worker.finish(packets, -1 if is_late else worker.number)
        for worker in each[1:]:
            if worker.number != 3 or step >= 6:
                assert_bit_equal(worker.params, each[0].params)
                assert_bit_equal(worker.state[0].metrics, each[0].state[0].metrics)
        assert int(each[0].state[0].metrics.participants) == 4 - sum(late.values())


@pytest.mark.parametrize("name", ["demo_scaled", "demo_muon"])
def test_a_delay_by_hand_is_a_gradient_taken_before_apply(name):
    """A look-ahead leads to where the message under way would lead, too."""
    tx, params = split(name), initial()
    delayed = MAKE[name](exchange=demo_optax.Delayed(demo_optax.AllGather()))
    worker, state, ours = Worker(tx, 0, params), delayed.init(params), params
    worker.prepare(0)
    update = jax.jit(delayed.update)

    def gradient_of(params, state, step):
        return gradient(demo_optax.local_parameters(params, state), 100 * step)

    for step in range(8):
        found = gradient_of(worker.params, worker.state, step + 1)
        worker.finish(np.asarray(worker.outbox.packets))
        worker.outbox, worker.state = worker.send(found, worker.state, worker.params, worker=0)
        updates, state = update(gradient_of(ours, state, step), state, ours)
        ours = optax.apply_updates(ours, updates)
    updates, state = update(gradient_of(ours, state, 8), state, ours)
    assert_bit_equal(worker.params, optax.apply_updates(ours, updates))


def test_both_halves_in_a_scan_and_with_donated_states():
    tx, params = split("demo_muon"), initial()

    def step(carry, number):
        params, state = carry
        found = gradient(demo_optax.local_parameters(params, state), number)
        outbox, state = tx.send(found, state, params, worker=0)
        updates, state = tx.apply(outbox.packets, outbox, state, params, worker=0)
        return (optax.apply_updates(params, updates), state), outbox.step

    scanned = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(5)), donate_argnums=0)
    (there, state), steps = scanned((params, tx.init(params)))
    assert steps.tolist() == [*range(5)] and int(state[0].sent) == -1
    here, taken = (initial(), tx.init(initial())), jax.jit(step, donate_argnums=0)
    for number in range(5):
        here, _ = taken(here, jnp.int32(number))
    chex.assert_trees_all_close(there, here[0], atol=1e-6)


@pytest.mark.parametrize("name", ["demo_scaled", "demo_muon"])
def test_two_shards_a_worker(name):
    """Each device builds the packet of its shards, and gets the packets of the same shards."""
    number, specs = 2, {"b": P(), "w": P("fsdp")}
    tx, params = split(name), initial()
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:2])
    state_specs = demo_optax.state_specs(
        MAKE[name](axis_name="data"),
        params,
        workers.mesh_of(1, 2, names=("data", "fsdp")),
        param_specs=specs,
    )
    without_workers = jax.tree.map(
        lambda spec: P(*[e for e in spec if e != "data"]),
        state_specs,
        is_leaf=lambda x: isinstance(x, P),
    )

    def on_mesh(fn, in_specs, out_specs):
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        )

    def send(found, state, params, worker):
        outbox, state = tx.send(found, state, params, worker=worker, param_specs=specs)
        return jax.tree.map(lambda x: x[None], outbox), state

    def apply(packets, outbox, state, params, worker):
        outbox = jax.tree.map(lambda x: x[0], outbox)
        return tx.apply(packets[0], outbox, state, params, worker=worker, param_specs=specs)

    init = on_mesh(tx.init, (specs,), without_workers)
    shards = specs, without_workers, specs, P()
    send = on_mesh(send, shards, (P("fsdp"), without_workers))
    apply = on_mesh(apply, (P("fsdp"), P("fsdp"), *shards[1:]), (specs, without_workers))
    each, losses = [(params, init(params)) for _ in range(number)], []
    for step in range(4):
        sent = [
            send(gradient(own, 10 * step + i), state, own, i) for i, (own, state) in enumerate(each)
        ]
        packets = jnp.stack([outbox.packets[:, 0] for outbox, _ in sent], axis=1)
        for i, (outbox, state) in enumerate(sent):
            updates, state = apply(packets, outbox, state, each[i][0], i)
            each[i] = optax.apply_updates(each[i][0], updates), state
        assert_bit_equal(each[0][0], each[1][0])
        assert int(demo_optax.exchange_metrics(each[0][1]).participants) == number
        losses.append(float(jnp.abs(each[0][0]["w"]).sum()))
    assert len(set(losses)) == len(losses)


def test_rounds_of_local_steps_by_hand(tmp_path):
    outer = MAKE["demo"]
    params = initial()

    def rounds(exchange, axis_name=None):
        return demo_optax.local_steps(
            optax.sgd(1e-2), outer(exchange=exchange), every=3, axis_name=axis_name
        )

    tx, number = rounds(demo_optax.AllGather()), 4
    each = [Worker(tx, i, params) for i in range(number)]
    stacked = demo_optax.stack_workers(
        rounds(demo_optax.AllGather("data"), "data"), workers.mesh_of(number)
    )
    update, state, ours = jax.jit(stacked.update), stacked.init(params), params
    for step in range(9):
        places = jax.device_get(demo_optax.local_parameters(ours, state))
        found = [
            gradient(jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), places), 100 * step + i)
            for i in range(number)
        ]
        updates, state = update(jax.tree.map(lambda *x: np.stack(x), *found), state, ours)
        ours = optax.apply_updates(ours, updates)
        packets = np.stack([worker.prepare(step) for worker in each])
        assert packets.any() == (step % 3 == 2)
        if step % 3 == 2:
            for worker in each:
                worker.finish(packets)
                assert_bit_equal(worker.params, ours)


def test_in_a_round_apply_changes_nothing_and_a_follower_keeps_pace():
    tx, params = demo_optax.local_steps(optax.sgd(1e-2), MAKE["demo"](), every=3), initial()
    each = [Worker(tx, i, params) for i in range(2)]
    for step in range(9):
        packets = np.stack([worker.prepare(step) for worker in each])
        if step == 5:  # this worker comes too late for the last step of the second round
            packets[1] = 0
        for worker in each:
            worker.finish(packets)
        assert int(each[0].state.outer[0].count) == (step + 1) // 3
        assert_bit_equal(each[0].params, each[1].params)
    late, mine = Worker(tx, 1, params), each[0]
    late.state = late.state._replace(mini_step=jnp.int32(2))
    late.follow()
    late.finish(np.zeros_like(packets))
    assert int(late.state.mini_step) == 0 == int(mine.state.mini_step)


def test_both_halves_compile_once(compiled):
    tx, params = split("demo_scaled"), initial()
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    state = jax.device_put(tx.init(params))
    for step in range(4):
        outbox, state = send(gradient(params, step), state, params, worker=step % 2)
        packets = jnp.zeros((2, outbox.packet.size), jnp.uint32).at[step % 2].set(outbox.packet)
        updates, state = apply(packets, outbox, state, params, worker=step % 2)
        params = optax.apply_updates(params, updates)
        names = compiled()
        assert step == 0 or not [n for n in names if "send" in n or "apply" in n], names


def stale(tx, state, params, found):
    outbox, state = tx.send(found, state, params)
    _, state = tx.apply(outbox.packets, outbox, state, params)
    return outbox, state


BASES = {
    "demo_scaled": optax.identity(),
    "weight decay": optax.adamw(1e-2, b1=0.0, weight_decay=0.1),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}


@pytest.mark.parametrize("base", BASES)
def test_an_outbox_counts_once(base):
    tx, params = demo_optax.decoupled(BASES[base], SMALL, decay=0.9), initial()
    found = gradient(params, 0)
    outbox, state = stale(tx, tx.init(params), params, found)
    with pytest.raises(ValueError, match="the outbox is of step 0, but the state is at step 1"):
        tx.apply(outbox.packets, outbox, state, params)
    updates, after = jax.jit(tx.apply)(outbox.packets, outbox, state, params)
    assert_bit_equal(after, state)
    assert not any(map(np.any, jax.tree.leaves(updates)))


def test_a_message_under_way_needs_its_own_outbox():
    tx, params = split("demo"), initial()
    before = tx.init(params)
    outbox, state = tx.send(gradient(params, 0), before, params)
    for other, old in ((tx.empty_outbox(params), state), (outbox, before)):
        with pytest.raises(ValueError, match="but the state is at step 0"):
            tx.apply(outbox.packets, other, old, params)
        updates, after = jax.jit(tx.apply)(outbox.packets, other, old, params)
        assert_bit_equal(after, old)
        assert not any(map(np.any, jax.tree.leaves(updates)))
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.update(gradient(params, 0), state, params)


@pytest.mark.parametrize("transform", ["dct", "random"])
def test_a_worker_that_follows_keeps_its_momentum(transform):
    """As one whose gradient is not finite; also where the basis is redrawn on each step."""
    compression = dataclasses.replace(SMALL, transform=transform)
    tx, params = demo_optax.demo(1e-2, compression, decay=0.9), initial()
    other, _ = tx.send(gradient(params, 7), tx.init(params), params, worker=1)
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params, worker=0)
    packets = jnp.stack([outbox.packet, other.packet])
    _, state = tx.apply(packets, outbox, state, params, worker=0)
    skipped, muted = tx.send(gradient(params, 1), state, params, worker=0, participates=False)
    packets = jnp.zeros((2, outbox.packet.size), jnp.uint32)
    expected = tx.apply(packets, skipped, muted, params, worker=0)[1][0].momentum
    empty = tx.empty_outbox(params)
    followed = tx.apply(packets, empty, state, params, worker=0)[1][0].momentum
    chex.assert_trees_all_close(followed, expected, atol=1e-6)


def test_packets_and_states_may_come_from_files():
    tx, params = split("demo_scaled"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params)
    expected = tx.apply(outbox.packets, outbox, state, params)
    read = jax.device_get((outbox, state))
    assert_bit_equal(tx.apply(read[0].packets, *read, params), expected)


def test_what_is_given_back_is_rounded_without_bias():
    tx = demo_optax.decoupled_momentum(
        0.0,
        Compression(1, 64, "int4"),
        gradient_weight=1.0,
        subtraction_factor=0.5,
        momentum_dtype="bfloat16",
    )
    params = jnp.zeros((64, 64))
    found = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    send, apply = jax.jit(tx.send), jax.jit(tx.apply)
    state, differences = tx.init(params), []
    exact = demo_optax.decoupled_momentum(0.0, Compression(1, 64, "int4"), gradient_weight=1.0)
    _, whole = exact.update(found, exact.init(params))
    for step in range(400):
        outbox, state = send(found, state._replace(count=jnp.int32(step)), params)
        missing = jnp.zeros_like(outbox.packets)
        _, state = apply(missing, outbox, state, params, worker=0)
        (at,), (value,) = outbox.message.positions[0][0], outbox.message.values[0][0]
        everything = float(whole.momentum.ravel()[at] + value)
        stored = float(state.momentum.ravel()[at].astype(jnp.float32))
        differences.append((stored - everything) / (abs(everything) * 2.0**-7))
    error = np.std(differences) / np.sqrt(len(differences))
    assert abs(np.mean(differences)) < 4 * error + 1e-3, (np.mean(differences), error)


def test_a_second_send_in_a_step_loses_nothing():
    tx, params = split("demo_scaled"), initial()
    found = gradient(params, 0)
    outbox, state = tx.send(found, tx.init(params), params)
    with pytest.raises(ValueError, match=r"send\(\) was called in step 0 before"):
        tx.send(found, state, params)
    other, again = jax.jit(tx.send)(found, state, params)
    assert_bit_equal(again, state)
    with pytest.raises(ValueError, match=r"the outbox is of a second send\(\)"):
        tx.apply(other.packets, other, state, params)
    updates, after = jax.jit(tx.apply)(outbox.packets, other, state, params)
    assert_bit_equal(after, state)
    updates, _ = tx.apply(outbox.packets, outbox, again, params)
    assert all(map(np.any, jax.tree.leaves(updates)))


def test_a_row_that_holds_another_packet_does_not_deliver_this_one():
    tx, params = split("demo"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params)
    other, _ = tx.send(gradient(params, 1), tx.init(params), params)
    _, missed = tx.apply(jnp.zeros_like(outbox.packets), outbox, state, params, worker=-1)
    _, after = tx.apply(other.packets, outbox, state, params)
    assert int(demo_optax.exchange_metrics(after).participants) == 1
    assert_bit_equal(after[0].momentum, missed[0].momentum)


def test_a_copy_in_the_row_of_another_worker_does_not_bring_a_message_back():
    tx, params = split("demo"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params, worker=1)
    packet, none = outbox.packet, jnp.zeros_like(outbox.packet)
    honest, copied = (
        tx.apply(jnp.stack(rows), outbox, state, params, worker=1)
        for rows in [(none, packet), (packet, packet)]
    )
    assert_bit_equal(honest, copied)


def test_a_gradient_that_is_not_finite_sends_nothing():
    tx, params = split("demo"), initial()
    bad = jax.tree.map(lambda x: x * jnp.nan, gradient(params, 0))
    outbox, state = tx.send(bad, tx.init(params), params)
    updates, state = tx.apply(outbox.packets, outbox, state, params)
    assert int(demo_optax.exchange_metrics(state).participants) == 0
    assert not any(map(np.any, jax.tree.leaves((updates, state[0].momentum))))


@pytest.mark.parametrize(
    "packets",
    [jnp.zeros((2, 3), jnp.uint32), jnp.zeros((2, 128), jnp.int32), jnp.zeros(128, jnp.uint32)],
)
def test_packets_of_another_shape_or_dtype_are_refused(packets):
    tx, params = split("demo"), initial()
    outbox, state = tx.send(gradient(params, 0), tx.init(params), params)
    with pytest.raises(ValueError, match=r"packets must be uint32 \(workers, 128\)"):
        tx.apply(packets, outbox, state, params)


@pytest.mark.parametrize(
    "exchange", [demo_optax.TwoPhase(), demo_optax.Delayed(demo_optax.AllGather())]
)
def test_exchanges_without_halves_are_refused(exchange):
    tx, params = MAKE["demo"](exchange=exchange), initial()
    with pytest.raises(TypeError, match="has no halves"):
        tx.send(gradient(params, 0), tx.init(params), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrow_momentum_is_rounded_only_where_something_goes_back(dtype):
    tx = demo_optax.decoupled_momentum(0.9, SMALL, momentum_dtype=dtype)
    params = initial()
    outbox, sent = tx.send(gradient(params, 0), tx.init(params), params)
    _, counted = tx.apply(outbox.packets, outbox, sent, params)
    assert_bit_equal(counted.momentum, sent.momentum)
