"""`send` and `apply`: the two halves of an update, around any transport."""

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
from tests import workers
from tests.by_hand import (
    MAKE,
    SMALL,
    Worker,
    assert_bit_equal,
    by_hand,
    by_shard_map,
    gradient,
    halves_of,
    initial,
    rows,
    split,
)
from tests.sweeps import sweep


@sweep("demo", "demo_muon", "norm limit", name=MAKE)
def test_eight_workers_over_files_train_as_with_shard_map(name, tmp_path):
    each = by_hand(name, 8, 5, tmp_path)
    params, state = by_shard_map(name, 8, 5)
    for worker in each:
        assert_bit_equal(worker.params, params)
        momentum = jax.tree.map(lambda x, i=worker.number: x[i], jax.device_get(state[0].momentum))
        if name != "norm limit":  # there a part is put back, with a rounding of its own
            assert_bit_equal(worker.state[0].momentum, momentum)
            assert_bit_equal(worker.state[0].metrics, state[0].metrics)


@pytest.mark.parametrize("look_ahead", [None, 1.0])
def test_copies_of_an_optimizer_keep_its_halves(look_ahead):
    tx = demo_optax.demo_muon(1e-2, look_ahead=look_ahead)
    other = demo_optax.demo(1e-2)
    as_a_tree = jax.tree.map(lambda function: function, tx)  # which holders that are trees do
    for copy in (as_a_tree, tx._replace(init=other.init), optax.with_extra_args_support(tx)):
        assert vars(copy) == vars(tx)


PLAIN = demo_optax.decoupled_momentum(0.0, SMALL, gradient_weight=1.0)


@jax.jit
def coefficients(tree):
    """The coefficients of a gradient, as the momentum stores them."""
    outbox, state = PLAIN.send(tree, PLAIN.init(tree), tree)
    return jax.tree.map(jnp.add, state.momentum, decoded(outbox, state))


@jax.jit
def decoded(outbox, state):
    """What the others decode of a message, as the momentum stores it."""
    before = state._replace(momentum=jax.tree.map(jnp.zeros_like, state.momentum))
    missing, outbox = jnp.zeros_like(outbox.packets), outbox._replace(step=before.count)
    return PLAIN.apply(missing, outbox, before, initial(), worker=-1)[1].momentum


def test_the_momentum_before_is_the_momentum_after_and_the_message():
    params, (init, send, apply) = initial(), halves_of(split("demo"))
    found, before = gradient(params, 1), init(params)
    for _ in range(3):  # so that the momentum is not zero
        outbox, before = send(found, before, params, worker=0)
        _, before = apply(rows(outbox.packet), outbox, before, params, worker=0)
    outbox, sent = send(found, before, params, worker=0)
    message = decoded(outbox, sent[0])
    accumulated = jax.tree.map(
        lambda m, c: 0.9 * m + 1e-2 * c, before[0].momentum, coefficients(found)
    )
    together = jax.tree.map(jnp.add, sent[0].momentum, message)
    chex.assert_trees_all_close(together, accumulated, atol=2e-7)
    packets = rows(outbox.packet)
    _, counted = apply(packets, outbox, sent, params, worker=0)
    assert_bit_equal(counted[0].momentum, sent[0].momentum)
    _, missed = apply(np.zeros_like(packets), outbox, sent, params, worker=-1)
    assert_bit_equal(missed[0].momentum, together)  # one rounding


def test_workers_that_miss_steps_join_and_follow_stay_equal():
    tx, params = split("demo_scaled"), initial()
    each = [Worker(tx, i, params) for i in range(4)]
    for step in range(12):
        if step == 6:
            joined = demo_optax.join_state(Worker(tx, 3, params).state, each[0].state)
            assert not jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, joined[0].momentum))
            each[3] = Worker(tx, 3, each[0].params, joined)
        sent = [worker.prepare(step) for worker in each if (worker.number, step) != (2, 5)]
        if step == 5:
            each[2].follow()
            sent.insert(2, np.zeros_like(sent[0]))
        packets = rows(*sent)
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


@sweep("demo_muon", name=["demo_scaled", "demo_muon"])
def test_a_delay_by_hand_is_a_gradient_taken_before_apply(name):
    """A look-ahead leads to where the message under way would lead, too."""
    tx, params = split(name), initial()
    delayed = MAKE[name](exchange=demo_optax.Delayed(demo_optax.AllGather()))
    worker, state, ours = Worker(tx, 0, params), jax.jit(delayed.init)(params), params
    worker.prepare(0)
    update = jax.jit(delayed.update)

    def gradient_of(params, state, step):
        return gradient(demo_optax.local_parameters(params, state), 100 * step)

    for step in range(8):
        found = gradient_of(worker.params, worker.state, step + 1)
        worker.finish(rows(worker.outbox.packet))
        worker.outbox, worker.state = worker.send(found, worker.state, worker.params, worker=0)
        updates, state = update(gradient_of(ours, state, step), state, ours)
        ours = optax.apply_updates(ours, updates)
    updates, state = update(gradient_of(ours, state, 8), state, ours)
    assert_bit_equal(worker.params, optax.apply_updates(ours, updates))


def test_both_halves_in_a_scan_and_with_donated_states():
    tx, params, init = split("demo_muon"), initial(), halves_of(split("demo_muon"))[0]

    def step(carry, number):
        params, state = carry
        found = gradient(demo_optax.local_parameters(params, state), number)
        outbox, state = tx.send(found, state, params, worker=0)
        updates, state = tx.apply(outbox.packets, outbox, state, params, worker=0)
        return (optax.apply_updates(params, updates), state), outbox.step

    scanned = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(5)), donate_argnums=0)
    (there, state), steps = scanned((params, init(params)))
    assert steps.tolist() == [*range(5)] and not state[0].sent
    here, taken = (initial(), init(initial())), jax.jit(step, donate_argnums=0)
    for number in range(5):
        here, _ = taken(here, jnp.int32(number))
    chex.assert_trees_all_close(there, here[0], atol=1e-6)


@sweep("demo_muon", name=["demo_scaled", "demo_muon"])
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


@functools.cache
def rounds(axis_name=None):
    outer = MAKE["demo"](axis_name=axis_name)
    return demo_optax.local_steps(optax.sgd(1e-2), outer, every=3, axis_name=axis_name)


def test_rounds_of_local_steps_by_hand():
    params, number = initial(), 4
    each = [Worker(rounds(), i, params) for i in range(number)]
    stacked = demo_optax.stack_workers(rounds("data"), workers.mesh_of(number))
    update, state, ours = jax.jit(stacked.update), stacked.init(params), params
    for step in range(9):
        places = jax.device_get(demo_optax.local_parameters(ours, state))
        found = [
            gradient(jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), places), 100 * step + i)
            for i in range(number)
        ]
        updates, state = update(jax.tree.map(lambda *x: np.stack(x), *found), state, ours)
        ours = optax.apply_updates(ours, updates)
        packets = rows(*[worker.prepare(step) for worker in each])
        assert packets.any() == (step % 3 == 2)
        if step % 3 == 2:
            for worker in each:
                worker.finish(packets)
                assert_bit_equal(worker.params, ours)


def test_in_a_round_apply_changes_nothing_and_a_follower_keeps_pace():
    params = initial()
    each = [Worker(rounds(), i, params) for i in range(2)]
    for step in range(9):
        packets = rows(*[worker.prepare(step) for worker in each])
        if step == 5:  # this worker comes too late for the last step of the second round
            packets[1] = 0
        for worker in each:
            worker.finish(packets)
        assert int(each[0].state.outer[0].count) == (step + 1) // 3
        assert_bit_equal(each[0].params, each[1].params)
    late, mine = Worker(rounds(), 1, params), each[0]
    late.state = late.state._replace(mini_step=jnp.int32(2))
    late.follow()
    late.finish(np.zeros_like(packets))
    assert int(late.state.mini_step) == 0 == int(mine.state.mini_step)


def test_a_worker_joins_rounds_and_follows_one_that_it_missed():
    rate, params = optax.linear_schedule(1e-2, 1e-3, 20), initial()
    tx = demo_optax.local_steps(optax.sgd(rate, momentum=0.9), MAKE["demo"](), every=3)
    each = [Worker(tx, i, params) for i in range(2)]
    for step in range(18):
        if step == 7:  # in the middle of the third round of the others
            theirs = jax.device_get(each[0].state)  # as it comes from a file
            each.append(Worker(tx, 2, each[0].params))
            each[2].state = demo_optax.join_state(each[2].state, theirs)
            for own in (each[2].state.displacement, each[2].state.outer[0].momentum):
                assert not any(jnp.any(x) for x in jax.tree.leaves(own))
        taking_part = each[:2] if 7 <= step < 9 or 12 <= step < 15 else each
        packets = rows(*[worker.prepare(step) for worker in taking_part])
        if step % 3 < 2:
            continue
        for worker in each:
            if worker not in taking_part:
                worker.follow()
            worker.finish(packets, worker.number if worker in taking_part else -1)
            assert_bit_equal(worker.params, each[0].params)
            shared = [(w.state.round, w.state.first_step) for w in (worker, each[0])]
            assert_bit_equal(*shared)
        joined = [int(worker.state.outer[0].metrics.participants) for worker in each]
        assert set(joined) == {len(taking_part)}
    momenta = [worker.state.outer[0].momentum["w"] for worker in each]
    assert (momenta[2] != momenta[0]).any()


def test_both_halves_compile_once(compiled):
    params, (init, send, apply) = initial(), halves_of(MAKE["demo_scaled"]())
    state = init(params)
    for step in range(4):
        outbox, state = send(gradient(params, step), state, params, worker=step % 2)
        packets = np.roll(rows(outbox.packet), step % 2, axis=0)
        updates, state = apply(packets, outbox, state, params, worker=step % 2)
        params = optax.apply_updates(params, updates)
        names = compiled()
        assert step == 0 or not [n for n in names if "send" in n or "apply" in n], names
