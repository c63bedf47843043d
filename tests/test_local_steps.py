"""Local steps: DiLoCo and SparseLoCo beside a simulation in NumPy, and what workers may rely on."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import demo_optax
from benchmarks.hlo import collectives
from tests import model, oracles, workers
from tests.local_methods import BOTH, dense, local, sparse, train
from tests.sweeps import sweep

# --- a simulation in NumPy of least squares with three workers


def least_squares(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] + params["b"][None] - batch["y"]))


def gradient_of(params, x, y):
    residual = 2 * (x @ params["w"] + params["b"] - y) / y.size
    return {"w": x.T @ residual, "b": residual.sum(0)}


def rows(step):
    random = np.random.default_rng(step + 1)
    x, y = random.normal(size=(12, 16)), random.normal(size=(12, 8))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


class AdamW:
    def __init__(self):
        self.count, self.m, self.v = 0, 0.0, 0.0

    def update(self, params, g):
        rate = 3e-2 + (3e-3 - 3e-2) * self.count / 15
        self.count += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g**2
        m, v = self.m / (1 - 0.9**self.count), self.v / (1 - 0.95**self.count)
        return params - rate * (m / (np.sqrt(v) + 1e-8) + 0.1 * params)


class Nesterov:
    """DiLoCo's outer optimizer."""

    def __init__(self):
        self.trace = 0.0

    def update(self, params, differences):
        mean = np.mean(differences, axis=0)
        self.trace = mean + 0.9 * self.trace
        return params - 0.7 * (mean + 0.9 * self.trace)


class Sparse:
    """SparseLoCo's: error feedback, the four largest of each 8 x 8, and their mean."""

    def __init__(self, values):
        self.values, self.errors, self.round = values, 0.0, 0

    def update(self, params, differences):
        self.errors = 0.95 * self.errors + np.stack(differences)
        sent = np.stack([self.sparse(error) for error in self.errors])
        self.errors = self.errors - sent
        rate = 1.0 - 0.5 * self.round / 5
        self.round += 1
        return params - rate * sent.mean(axis=0)

    def sparse(self, error):
        sent = np.zeros_like(error)
        for start in range(0, len(error), 8):
            block, target = error[start : start + 8], sent[start : start + 8]
            chosen = np.argsort(-np.abs(block), axis=None)[:4]
            target.flat[chosen] = self.coded(block.flat[chosen])
        return sent

    def coded(self, values):
        if self.values == "float32":
            return values
        bits = np.float32(np.abs(values).mean() / 2.2).view(np.uint32)
        scale = np.uint32((bits + (1 << 20)) >> 21 << 21).view(np.float32)  # two bits of mantissa
        return scale * np.sign(values) * np.where(np.abs(values) > 2.5 * scale, 3, 2)


SIMULATED = {
    "diloco": (dense(), Nesterov),
    "sparseloco, float32": (sparse("float32"), lambda: Sparse("float32")),
    "sparseloco, int2": (sparse(), lambda: Sparse("int2")),
}


@sweep("diloco", "sparseloco, int2", name=SIMULATED)
def test_five_rounds_follow_a_simulation(name):
    outer, simulated = SIMULATED[name]
    tx = local(outer)
    random = np.random.default_rng(0)
    shared = {"w": 0.3 * random.normal(size=(16, 8)), "b": 0.3 * random.normal(size=8)}
    params = {n: jnp.asarray(x, jnp.float32) for n, x in shared.items()}
    mesh = workers.mesh_of(3)
    state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(least_squares, tx, mesh)
    inner = [{n: AdamW() for n in shared} for _ in range(3)]
    simulated = {n: simulated() for n in shared}
    for i in range(15):
        if i % 3 == 0:
            own = [dict(shared) for _ in range(3)]
        for worker in range(3):
            g = gradient_of(own[worker], **model.part(rows(i), worker, 3))
            own[worker] = {n: inner[worker][n].update(own[worker][n], g[n]) for n in g}
        if i % 3 == 2:
            shared = {
                n: simulated[n].update(x, [x - own[worker][n] for worker in range(3)])
                for n, x in shared.items()
            }
        params, state, metrics = step(params, state, rows(i))
        assert bool(metrics.exchanged) == (i % 3 == 2)
        for n in shared:
            np.testing.assert_allclose(params[n], shared[n], rtol=1e-4, atol=2e-6)
    assert {int(x) for x in optax.tree.get(state.inner, "ScaleByScheduleState").count} == {15}


@pytest.mark.slow
def test_what_is_exchanged_is_what_the_workers_went_and_nothing_of_it_is_lost():
    record = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda g, s, p=None: (g, g)
    )
    tx = local(optax.chain(record, sparse()), inner=optax.sgd(0.25))

    def linear(params, batch):  # whose gradient is the batch
        return sum(jnp.sum(params[n] * batch[n][0]) for n in params)

    def batch(step):
        random = np.random.default_rng(step)
        return {
            n: random.normal(size=(4, *x.shape)).astype(np.float32) for n, x in model.init().items()
        }

    def errors(state):
        """The momenta of each worker, in the parameters' shapes."""
        return {n: np.stack([of(n, x) for x in own]) for n, own in momenta(state).items()}

    def of(name, stored):
        shape = model.init()[name].shape
        return oracles.to_tensor(stored, shape, oracles.block_sides(shape, 8, "pad"), np.array)

    def momenta(state):
        return state.outer[1][0].momentum

    params, state, _ = train(tx, range(3), loss=linear, batch=batch)
    before, old = jax.tree.map(np.asarray, params), errors(state)
    params, state, _ = train(tx, range(3, 6), start=(params, state), loss=linear, batch=batch)
    for n, left in errors(state).items():
        went = 0.25 * sum(batch(i)[n] for i in (3, 4, 5))
        np.testing.assert_allclose(state.outer[0][n], went, rtol=1e-5, atol=1e-6)
        sent = 0.95 * old[n] + went - left
        np.testing.assert_allclose(before[n] - params[n], 0.9 * sent.mean(0), atol=1e-6)


EIGHT = workers.mesh_of(8)


@functools.cache
def scanned(name):
    """A program of 25 steps of eight workers."""
    step = workers.step_of(BOTH[name], EIGHT)
    batches = jax.tree.map(lambda *x: np.stack(x), *[model.batch(i) for i in range(25)])

    def body(carry, batch):
        *carry, metrics = step(*carry, batch)
        return tuple(carry), metrics.loss.mean()

    return jax.jit(lambda carry: jax.lax.scan(body, carry, batches))


@sweep("sparseloco", name=BOTH)
def test_replicas_are_bit_identical_after_200_steps_of_eight_workers(name):
    params, state = workers.initial(BOTH[name], EIGHT)
    for _ in range(8):
        (params, state), losses = jax.block_until_ready(scanned(name)((params, state)))
    assert losses[-1] < 0.5
    for leaf in jax.tree.leaves(params):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
    assert demo_optax.check_replicas((params, state), EIGHT) == ()
    own = demo_optax.local_parameters(
        jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), params), state
    )
    assert 200 % 3 and len({np.asarray(x).tobytes() for x in own["hidden"]}) == 8


def test_parameters_of_ones_own_need_no_transfer():
    params, state = workers.initial(BOTH["sparseloco"], EIGHT)
    params = jax.device_put(params, jax.NamedSharding(EIGHT, P()))
    with jax.transfer_guard("disallow"):
        demo_optax.local_parameters(params, state)


def test_a_round_that_was_begun_longer_ends_at_once():
    params, state, seen = train(local(dense(), every=6), range(5))
    assert not any(bool(metrics.exchanged) for metrics in seen)
    _, state, seen = train(local(dense(), every=3), range(5, 9), start=(params, state))
    assert [bool(metrics.exchanged) for metrics in seen] == [True, False, False, True]
    assert int(state.mini_step) == 0


@pytest.mark.parametrize("merge", [None, 0.5])
def test_progress_that_the_outer_optimizer_refuses_is_kept_whole(merge):
    options = dict(decay=1.0, gradient_weight=lambda _: jnp.float32(jnp.inf), mean="workers")
    outer = demo_optax.decoupled(optax.sgd(1.0), demo_optax.Compression(4, 8), **options)
    tx = demo_optax.local_steps(optax.sgd(1.0), outer, every=1, merge=merge)
    params, gradient = jnp.zeros((8, 8)), jnp.full((8, 8), -3.0)
    updated, after = jax.jit(tx.update)(gradient, tx.init(params), params)
    outbox, sent = jax.jit(tx.send)(gradient, tx.init(params), params, worker=0)
    applied, late = jax.jit(tx.apply)(outbox.packets, outbox, sent, params, worker=0)
    for updates, state in (updated, after), (applied, late):
        assert not np.asarray(updates).any() and not np.asarray(state.outer[0].momentum).any()
        np.testing.assert_array_equal(state.displacement, -gradient)


def test_inner_steps_may_accumulate():
    inner = demo_optax.multi_steps(optax.sgd(0.1), 2, axis_name="data")
    _, state, seen = train(local(dense(), inner=inner, every=4), range(8))
    assert [bool(metrics.exchanged) for metrics in seen] == 2 * [False, False, False, True]
    assert state.inner.round.tolist() == 4 * [4]


@sweep("sparseloco", name=BOTH)
def test_a_scan_over_rounds_is_their_steps_to_the_bit(name):
    carry, _ = scanned(name)(workers.initial(BOTH[name], EIGHT))
    chex.assert_trees_all_equal(carry, train(BOTH[name], range(25), mesh=EIGHT)[:2])


@sweep(("sparseloco", "sharded"), name=BOTH, inside=["alone", "sharded"])
def test_workers_meet_in_one_exchange_at_the_end_of_a_round(name, inside):
    inside = inside == "sharded"
    tx, shape = BOTH[name], (4, 2) if inside else (8,)
    mesh = workers.mesh_of(*shape, kind=AxisType.Auto)
    specs = {"hidden": P(None, "fsdp"), "bias": P(), "out": P("fsdp")} if inside else None
    state = demo_optax.init_opt_state(tx, model.init(), mesh, param_specs=specs)
    step = demo_optax.make_train_step(model.loss, tx, mesh, param_specs=specs, clip_norm=1.0)
    text = step.lower(model.init(), state, model.batch(0)).compile().as_text()
    crossing = [x for x in collectives(text) if x.crosses(mesh, "data")]
    sent = demo_optax.packet_bytes(tx, model.init(), mesh=mesh, param_specs=specs)
    assert {x.kind for x in crossing} == {"all-reduce" if name == "diloco" else "all-gather"}
    assert sum(x.operand_bytes for x in crossing) * mesh.size // mesh.shape["data"] == sent
    assert len(crossing) == 1 or name == "diloco"  # of which XLA may combine the tensors

    conditional = re.search(
        r" conditional\(.*(?:branch_computations=\{|true_computation=)(.*)", text
    )
    branches = re.findall(r"%([\w.\-]+)", conditional[1])
    entered = [x for x in re.split(r"\n(?=\S)", text) if re.match(r"%([\w.\-]+)", x)]
    apart = [x for x in entered if re.match(r"%([\w.\-]+)", x)[1] in branches]
    header = text.splitlines()[0] + "\n"
    found = [x for body in apart for x in collectives(header + body) if x.crosses(mesh, "data")]
    assert found == crossing
