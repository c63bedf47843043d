"""Fragments of local steps beside a simulation in NumPy, and what their exchange may rely on."""

import collections
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import demo_optax
from benchmarks.hlo import arguments_behind, collectives
from demo_optax.checkpoint import Checkpointer
from tests import model, workers
from tests.local_methods import layer, local, loss_of_layer, sparse
from tests.saved_runs import carried_over
from tests.sweeps import slow

SHAPES = {"b": (16,), "w": (20, 24)}
SECTIONS = "8", "8x8"  # the sides of their blocks, of which the last rows are padded
RATE = 0.25
MESH = workers.mesh_of(4)


def params_of_shapes():
    random = np.random.default_rng(0)
    return {n: jnp.asarray(random.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


def blocks_by_hand(shapes, side, count):
    """Each block's tensor, region, section, fragment and row, counted by the documented rule."""
    seen = collections.Counter()
    for name, shape in sorted(shapes.items()):
        starts = [range(0, dim, side) for dim in shape]
        for start in itertools.product(*starts):
            region = tuple(slice(i, min(i + side, n)) for i, n in zip(start, shape, strict=True))
            section = "x".join(str(side) for _ in shape)
            row, fragment = divmod(seen[section], count)
            seen[section] += 1
            yield name, region, section, fragment, row


def fragment_masks(count):
    masks = [{n: np.zeros(s, bool) for n, s in SHAPES.items()} for _ in range(count)]
    for name, region, _, fragment, _ in blocks_by_hand(SHAPES, 8, count):
        masks[fragment][name][region] = True
    return masks


def named(stacks):
    return zip(SECTIONS, map(np.asarray, stacks), strict=True)


def tensors_of(stacks, count, *, columns_first):
    """Tensors ``(workers, *shape)`` from the stacks ``(workers, count, rows, ...)`` of a state."""
    stacks = dict(named(stacks))
    tensors = {n: np.zeros((len(stacks["8"]), *s)) for n, s in SHAPES.items()}
    for name, region, section, fragment, row in blocks_by_hand(SHAPES, 8, count):
        block, sides = stacks[section][:, fragment, row], section.split("x")
        if columns_first and len(sides) == 2:
            block = block.reshape(-1, *map(int, reversed(sides))).swapaxes(1, 2)
        target, block = tensors[name][:, *region], block.reshape(-1, *map(int, sides))
        target[...] = block[tuple(map(slice, target.shape))]
    return tensors


def held_by_owners(state):
    """Tensors of what the owners of `TwoPhase` have yet to send back, zeros without owners."""
    residual = jax.tree.leaves(state.outer[0].exchange)
    if not residual:
        return {n: np.zeros(s) for n, s in SHAPES.items()}
    stacks = []
    for x, momentum in zip(map(np.asarray, residual), state.outer[0].momentum, strict=True):
        shares = x.swapaxes(0, 1)  # (owners, fragments, share, n) before
        stacks.append(shares.reshape(1, 4, -1, x.shape[-1])[:, :, : momentum.shape[2]])
    tensors = tensors_of(stacks, 4, columns_first=True)
    return {n: x[0] for n, x in tensors.items()}


def everything(base, *exchange):
    """An outer optimizer that sends all coefficients."""
    compression = demo_optax.Compression(64, 8, "float32", transform="identity")
    return outer_of(base, compression, *exchange)


def outer_of(base, compression, exchange=demo_optax.AllGather("data")):
    options = dict(decay=1.0, gradient_weight=1.0, mean="workers", exchange=exchange)
    return demo_optax.decoupled(base, compression, **options)


OWNERS = demo_optax.TwoPhase("data", topk_back=64, value_coding_back="float32")
FEW_BACK = demo_optax.TwoPhase("data", topk_back=4, residual_decay=1.0)


def rows_of(step):
    """A matrix of each of four workers, for a loss whose gradients depend on the parameters."""
    random = np.random.default_rng(step + 1)
    return {n: random.normal(size=(4, *s)).astype(np.float32) for n, s in SHAPES.items()}


def parabola(params, batch):
    return sum(jnp.sum(0.5 * jnp.square(params[n]) + params[n] * batch[n][0]) for n in params)


OUTER = {
    "plain": (optax.sgd(1.0), 1.0, 0.0),
    "nesterov": (optax.sgd(0.7, momentum=0.9, nesterov=True), 0.7, 0.9),
}


SIMULATED = {
    "each step": ("plain", 4, 4, None, demo_optax.AllGather("data")),
    "half a round": ("nesterov", 4, 2, 0.5, demo_optax.AllGather("data")),
    "owners": ("nesterov", 3, 3, 0.5, OWNERS),
    "one fragment": ("plain", 2, 1, None, OWNERS),
}


@functools.cache
def simulated(name):
    outer, every, count, merge, exchange = SIMULATED[name]
    options = dict(every=every, inner=optax.sgd(RATE), fragments=count, merge=merge)
    return local(everything(OUTER[outer][0], exchange), **options)


@pytest.mark.parametrize("name", SIMULATED)
def test_fragments_follow_a_simulation(name):
    outer, every, count, merge, _ = SIMULATED[name]
    _, rate, momentum = OUTER[outer]
    tx = simulated(name)
    step = workers.step_of(tx, MESH, parabola)
    params, state = workers.initial(tx, MESH, params_of_shapes)
    masks, names = fragment_masks(count), list(SHAPES)

    x = {n: np.asarray(p, np.float64) for n, p in params.items()}
    d = {n: np.zeros((4, *s)) for n, s in SHAPES.items()}
    trace, sent, due = {n: np.zeros(s) for n, s in SHAPES.items()}, None, 0
    for i in range(11):
        batch = rows_of(i)
        params, state, metrics = step(params, state, batch)
        for n in names:
            d[n] = d[n] - RATE * ((x[n] + d[n]) + batch[n])
        exchanged = i % (every // count) == every // count - 1
        assert bool(metrics.exchanged) == exchanged
        if exchanged:
            if sent is not None:
                mask = masks[(due - 1) % count]
                for n in names:
                    mean = sent[n].mean(0)
                    trace[n] = np.where(mask[n], mean + momentum * trace[n], trace[n])
                    u = np.where(mask[n], rate * (mean + momentum * trace[n]), 0)
                    x[n] = x[n] + u
                    kept = d[n] - sent[n] if merge is None else merge * (d[n] - u)
                    d[n] = np.where(mask[n], kept, d[n])
            sent = {n: np.where(masks[due % count][n], d[n], 0) for n in names}
            due += 1
        for n in names:
            np.testing.assert_allclose(params[n], x[n], rtol=1e-4, atol=2e-6)
            np.testing.assert_allclose(state.displacement[n], d[n], rtol=1e-4, atol=2e-6)
    assert int(state.round) == due - 1
    applied = [len(range(number, due - 1, count)) for number in range(count)]
    assert state.outer[0].count.tolist() == applied


def linear(params, batch):  # whose gradient is the batch
    return sum(jnp.sum(params[n] * batch[n][0]) for n in params)


@functools.cache
def few(exchange):
    """Few coefficients are sent, and each step exchanges a quarter of the blocks."""
    compression = demo_optax.Compression(4, 8, "int8", transform="identity")
    outer = outer_of(optax.sgd(1.0), compression, exchange)
    return local(outer, every=4, inner=optax.sgd(RATE), fragments=4)


@pytest.mark.parametrize("exchange", [demo_optax.AllGather("data"), FEW_BACK])
def test_nothing_of_what_the_workers_went_is_lost(exchange):
    """What is shared, with an owner, under way, and not sent yet adds up to the inner steps."""
    step = workers.step_of(few(exchange), MESH, linear, donate=False)
    start, state = workers.initial(few(exchange), MESH, params_of_shapes)
    params, went, before = start, {n: 0.0 for n in SHAPES}, state
    for i in range(14):
        params, state, _ = step(params, state, rows_of(i))
        went = {n: went[n] - RATE * x for n, x in rows_of(i).items()}
        # A message under way has left the momentum, and its progress has not left the displacement:
        # the momentum of the step before holds neither.
        left = tensors_of(state.outer[0].momentum, 4, columns_first=True)
        old = tensors_of(before.outer[0].momentum, 4, columns_first=True)
        mask = fragment_masks(4)[i % 4]  # of the fragment under way
        owed = held_by_owners(state)
        for n in SHAPES:
            m = np.where(mask[n], old[n], left[n])
            total = params[n] - start[n] + (state.displacement[n] - m).mean(0) - owed[n]
            np.testing.assert_allclose(total, went[n].mean(0), rtol=1e-4, atol=2e-5)
        before = state
    assert max(np.abs(x).max() for x in jax.tree.leaves(left)) > 0.1  # much is not sent yet


def test_a_worker_that_the_outer_optimizer_excludes_keeps_its_progress():
    def weight(count):  # not finite in the second round
        return jnp.where(count == 1, jnp.nan, 1.0)

    outer = demo_optax.decoupled(
        optax.sgd(1.0),
        demo_optax.Compression(64, 8, "float32", transform="identity"),
        decay=1.0,
        gradient_weight=weight,
        mean="workers",
        axis_name="data",
    )
    tx = local(outer, every=2, inner=optax.sgd(RATE), fragments=2)
    step = workers.step_of(tx, MESH, linear, donate=False)
    start, state = workers.initial(tx, MESH, params_of_shapes)
    params = start
    went, participants = {n: 0.0 for n in SHAPES}, []
    for i in range(8):
        params, state, metrics = step(params, state, rows_of(i))
        participants.append(int(metrics.exchange.participants))
        went = {n: went[n] - RATE * x for n, x in rows_of(i).items()}
        for n in SHAPES:  # all coefficients are sent, so that the momenta hold nothing
            total = params[n] - start[n] + np.asarray(state.displacement[n]).mean(0)
            np.testing.assert_allclose(total, went[n].mean(0), rtol=1e-4, atol=2e-5)
    assert participants == [0, 4, 4, 0, 0, 4, 4, 4]


def test_eight_workers_stay_bit_identical():
    mesh, tx = workers.mesh_of(8), local(sparse(), every=5, fragments=5)
    calls = []

    def loss(params, batch):
        calls.append(1)
        return model.loss(params, batch)

    step = demo_optax.make_train_step(loss, tx, mesh)
    params, state = workers.initial(tx, mesh)
    losses, traced = [], 0
    for i in range(40):
        params, state, metrics = jax.block_until_ready(step(params, state, model.batch(i)))
        losses.append(float(metrics.loss.mean()))
        traced = len(calls) if i == 0 else traced
        assert metrics.exchanged and int(metrics.exchange.participants) == (8 if i else 0)
        assert metrics.exchange.agreed
    assert len(calls) == traced, "one program handles all fragments"
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    for leaf in jax.tree.leaves(params):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert demo_optax.check_replicas((params, state), mesh) == ()
    assert {x.shape for x in jax.tree.leaves(state.pending.outbox.progress)} >= {(8, 1, 8, 8)}


def is_conditional(text):
    """Whether an exchange is: the decoding of packets has a conditional inside of its loop."""
    return " conditional(" in text[text.index("ENTRY") :]


def compiled_step(name):
    """The text of the program that was compared with the simulation."""
    step = workers.step_of(simulated(name), MESH, parabola)
    start = workers.initial(simulated(name), MESH, params_of_shapes)
    return step.lower(*start, rows_of(0)).compile().as_text()


@pytest.mark.parametrize("name", ["each step", "half a round"])
def test_one_gather_of_a_fragments_bytes_waits_for_no_gradient(name):
    _, every, count, _, exchange = SIMULATED[name]
    text = compiled_step(name)
    (found,) = collectives(text)
    blocks = collections.Counter(section for _, _, section, _, _ in blocks_by_hand(SHAPES, 8, 1))
    values = sum(
        -(-number // count) * np.prod(list(map(int, section.split("x"))))
        for section, number in blocks.items()
    )
    assert 4 * values < found.operand_bytes < 4 * values + 612  # a header, and 512-byte units
    params, outer = params_of_shapes(), everything(optax.sgd(1.0), exchange)
    assert found.operand_bytes == demo_optax.packet_bytes(simulated(name), params)
    times = demo_optax.accounting.step_times(
        params, outer.compression, 4, 1e6, compute_time=1.0, local_steps=every, fragments=count
    )
    assert times["DeMo"].packet == found.operand_bytes
    waits = times["DeMo"].step > 1.0
    assert is_conditional(text) == waits == (every > count)
    if not waits:
        ((_, behind),) = arguments_behind(text)
        fields = (
            ".outbox.packets",
            ".outbox.step",
            ".outbox.status",
            ".format",
            ".count",
            ".sent",
            ".round",
        )
        assert behind and all(argument.endswith(fields) for argument in behind)


def test_two_phases_of_a_fragment_wait_for_no_gradient():
    text = compiled_step("owners")
    assert len(collectives(text)) == 2 and not is_conditional(text)
    for _, behind in arguments_behind(text):
        assert behind and not any("batch" in argument for argument in behind)


def test_a_rate_that_is_set_while_training_holds_for_all_fragments():
    outer = outer_of(
        optax.inject_hyperparams(optax.sgd)(0.7),
        demo_optax.Compression(4096, 8, transform="identity"),
        demo_optax.AllGather(None),
    )
    tx = demo_optax.local_steps(optax.sgd(0.1), outer, every=2, fragments=2)
    params, update = jnp.ones((16, 8)), jax.jit(tx.update)
    state = optax.tree.set(tx.init(params), learning_rate=jnp.float32(0.0))
    for _ in range(6):
        updates, state = update(params, state, params)
        np.testing.assert_array_equal(updates, 0.0)


@pytest.mark.parametrize("coding", ["int2", slow("sign")])
def test_padding_stays_zero(coding):
    base = optax.adamw(0.1, weight_decay=0.1)
    compression = demo_optax.Compression(4, 8, coding, transform="identity")
    tx = local(outer_of(base, compression), every=4, fragments=4)
    step = workers.step_of(tx, MESH, parabola)
    params, state = workers.initial(tx, MESH, params_of_shapes)
    filled = {(s, f, r) for _, _, s, f, r in blocks_by_hand(SHAPES, 8, 4)}
    for i in range(9):
        params, state, metrics = step(params, state, rows_of(i))
        assert metrics.exchange.restarted == 0
        adam = optax.tree.get(state.outer, "ScaleByAdamState")
        momentum = state.outer[0].momentum
        stacks = [momentum, *[jax.tree.map(lambda x: x[None], x) for x in (adam.mu, adam.nu)]]
        for stack, (section, x) in [(s, item) for s in stacks for item in named(s)]:
            for fragment, row in np.ndindex(x.shape[1:3]):
                inside = x[:, fragment, row]
                if (section, fragment, row) not in filled:
                    assert not inside.any()
                elif i == 8 and stack is not momentum:
                    assert inside.any()
        for section, x in named(state.pending.outbox.progress):
            for row in range(x.shape[1]):
                assert x[:, row].any() == ((section, i % 4, row) in filled)


def test_a_checkpoint_inside_a_round_goes_on_to_the_last_bit(tmp_path):
    tx = local(sparse(), every=4, fragments=2)
    train = functools.partial(workers.train, tx, mesh=MESH, params=layer, loss=loss_of_layer)
    params, state, _ = train(range(5))
    with Checkpointer(tmp_path, tx, MESH) as checkpointer:
        checkpointer.save(5, params, state)
        expected = train(range(5, 9), start=(params, state))[:2]
    with Checkpointer(tmp_path, tx, MESH) as checkpointer:
        found = checkpointer.restore(layer())
    assert (int(found.opt_state.round), int(found.opt_state.mini_step)) == (1, 1)
    ours = train(range(5, 9), start=found[1:3])[:2]
    chex.assert_trees_all_equal(ours, expected)


@pytest.mark.parametrize("count, exchange", [slow(2, demo_optax.AllGather("data")), (6, FEW_BACK)])
def test_other_workers_take_over_what_was_under_way(count, exchange, tmp_path):
    tx = few(exchange)

    def run(mesh, steps, params, state):
        step = workers.step_of(tx, mesh, linear, donate=False)
        for i in steps:
            number = mesh.size
            batch = {n: np.resize(x, (number, *x.shape[1:])) for n, x in rows_of(i).items()}
            params, state, metrics = step(params, state, batch)
        return params, state, metrics

    other, start = workers.mesh_of(count), workers.initial(tx, MESH, params_of_shapes)
    params, before, _ = run(MESH, range(6), *start)
    params, state, _ = run(MESH, [6], params, before)
    found = carried_over(tmp_path, (params, state), tx, MESH, other).opt_state

    # The momentum holds the message, whose progress left the displacement, and what was owed.
    assert not np.asarray(found.pending.outbox.packets).any()
    old, new, sent = (
        tensors_of(x.outer[0].momentum, 4, columns_first=True) for x in (before, found, state)
    )
    mask = fragment_masks(4)[6 % 4]
    owed = held_by_owners(state)
    assert any(x.any() for x in owed.values()) == (exchange is FEW_BACK)
    assert not any(x.any() for x in held_by_owners(found).values())
    for n in SHAPES:
        delta = np.where(mask[n], -np.asarray(state.displacement[n]).mean(0), 0)
        expected = np.where(mask[n], old[n].mean(0) + delta, sent[n].mean(0))
        np.testing.assert_allclose(new[n].mean(0), expected + owed[n], rtol=1e-4, atol=1e-5)
    _, _, metrics = run(other, [7], params, found)
    assert int(metrics.exchange.participants) == 4  # those of the last exchange
    _, _, metrics = run(other, [7, 8], params, found)
    assert int(metrics.exchange.participants) == count


SPARSE = local(sparse(), every=4, fragments=4)


def test_a_worker_that_skips_steps_and_simulated_workers():
    tx, ends = SPARSE, []
    for mesh in (MESH, AbstractMesh((4,), ("data",))):
        params, state = workers.initial(tx, mesh, layer)
        step = workers.step_of(tx, mesh, loss_of_layer)
        for i in range(8):
            batch = model.batch(i)
            if i == 2:
                batch["x"][8:12] = np.nan  # the third worker's rows
            params, state, metrics = step(params, state, batch)
            # It sends what it went in the other steps of the round.
            assert int(metrics.exchange.participants) == (4 if i else 0)
        assert np.asarray(state.weight)[2].tolist() == [3, 2, 1, 0]
        ends.append(jax.tree.map(np.asarray, (params, state.displacement)))
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)


def test_own_parameters_that_are_not_finite_begin_again():
    options = dict(mesh=MESH, params=layer, loss=loss_of_layer)
    params, state, _ = workers.train(SPARSE, range(5), **options)
    broken = jax.tree.map(lambda x: np.array(x), state.displacement)
    broken["hidden"][2] = np.inf
    shardings = jax.tree.map(lambda x: x.sharding, state.displacement)
    state = state._replace(displacement=jax.device_put(broken, shardings))
    params, state, seen = workers.train(SPARSE, range(5, 12), start=(params, state), **options)
    participants = [int(metrics.exchange.participants) for metrics in seen]
    assert participants == [4, 3, 4, 4, 4, 4, 4]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
