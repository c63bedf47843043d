"""Runs with each exchange, which are saved and restored on other meshes and with other settings."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src.compression import make_plan
from demo_optax._src.compression.packet import Message, Origin, merge_rows, parse_headers
from demo_optax._src.compression.plan import shared_positions
from demo_optax._src.exchange.averaging import decode_accepted
from demo_optax._src.parallel.worker_axis import find_layout
from demo_optax.checkpoint import Checkpointer
from tests import workers

SHAPES = {"v": (6,), "w": (32, 16)}
SPECS = [None, {"v": P(), "w": P("fsdp")}, {"v": P(), "w": P("fsdp", "tensor")}]
"""On a mesh of so many axes inside a worker."""
EXCHANGES = {
    "all-gather": demo_optax.AllGather("data"),
    "two-phase": demo_optax.TwoPhase("data"),
    "delayed": demo_optax.Delayed(demo_optax.AllGather("data")),
    "delayed two-phase": demo_optax.Delayed(demo_optax.TwoPhase("data")),
}
KEEPING = ["two-phase", "delayed", "delayed two-phase"]


def optimizer(exchange, subtraction_factor=1.0, **settings):
    """The same one for the same settings, so that its programs serve many tests."""
    settings = {"topk": 4, "block_side": 8, "value_coding": "int4", "selection": "topk"} | settings
    return _optimizer(exchange, subtraction_factor, **dict(sorted(settings.items())))


@functools.cache
def _optimizer(exchange, subtraction_factor, **settings):
    return optax.chain(
        demo_optax.decoupled_momentum(
            0.9,
            demo_optax.Compression(**settings),
            exchange=EXCHANGES[exchange],
            subtraction_factor=subtraction_factor,
        ),
        optax.scale_by_sign(),
        optax.scale(-1e-2),
    )


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["v"] ** 2) * jnp.mean(batch)


def batch(step):
    return np.random.default_rng(step).normal(size=(48, 32)).astype(np.float32)


def ones():
    return {n: np.ones(shape, np.float32) for n, shape in SHAPES.items()}


class Trained:
    """A run on a mesh of these sizes, which may be saved and restored."""

    def __init__(self, tx, *sizes, names=("data", "fsdp", "tensor"), specs="by size"):
        self.tx, self.mesh = tx, workers.mesh_of(*sizes, names=names)
        self.specs = SPECS[len(sizes) - 1] if specs == "by size" else specs
        self.params, self.state = workers.initial(tx, self.mesh, ones, param_specs=self.specs)
        self.step = workers.step_of(tx, self.mesh, loss, param_specs=self.specs)

    def run(self, steps):
        self.params, self.state, (*_, self.metrics) = workers.train(
            self.tx,
            steps,
            mesh=self.mesh,
            start=(self.params, self.state),
            loss=loss,
            batch=batch,
            param_specs=self.specs,
        )
        return self

    def checkpointer(self, folder):
        return Checkpointer(folder, self.tx, self.mesh, param_specs=self.specs)

    def restored(self, folder):
        with self.checkpointer(folder) as checkpointer:
            found = checkpointer.restore(self.params)
        self.params, self.state = found.params, found.opt_state
        return self

    def saved(self, folder):
        with self.checkpointer(folder) as checkpointer:
            checkpointer.save(int(self.state[0].count), self.params, self.state, wait=True)
        return self


def decoded(plan, layout, packets, origin):
    """The message in a worker's packets, as those who receive them decode it."""
    _, _, intact = parse_headers(layout, packets, origin)
    message = decode_accepted(layout, packets, intact).message
    blocks = [section.num_blocks for section in plan.sections]
    positions = [
        merge_rows(x, n) if at is None else at
        for at, x, n in zip(
            shared_positions(plan.sections, origin.step), message.positions, blocks, strict=True
        )
    ]
    return Message(tuple(positions), tuple(map(merge_rows, message.values, blocks)))


def settled(trained, exchange):
    """Momenta with pending messages and owners' residuals in them, put back by each device."""
    layout = find_layout(trained.tx, trained.params, trained.mesh, "data", trained.specs)
    specs, of_block = layout.state[0], demo_optax.Compression(block_side=8)
    compression = layout.settings.get("[0].pending.format", of_block)
    plan = make_plan(compression, layout.settings["[0].format"].shapes)

    def put_back(state):
        rows = [jnp.zeros((section.num_blocks, section.selector.n)) for section in plan.sections]
        if state.exchange:
            shares = [jax.lax.all_gather(x[0], "data", tiled=True) for x in state.exchange.residual]
            rows = [x[: len(row)] for x, row in zip(shares, rows, strict=True)]
        if state.pending:
            advance = compression.momentum_format.advance
            rows = [
                advance(x, sides, state.count - 1)
                for x, sides in zip(rows, plan.sides, strict=True)
            ]
            outbox = state.pending.outbox
            (packets,), (factor,) = outbox.packets, outbox.factor
            ids = jax.lax.axis_index("data") * len(packets) + jnp.arange(len(packets))
            origin = Origin(state.count - 1, ids)
            message = decoded(plan, EXCHANGES[exchange].layout(plan), packets, origin)
            rows = [
                section.selector.add(x, at, factor * values)
                for section, x, at, values in zip(plan.sections, rows, *message, strict=True)
            ]
        leaves, found = jax.tree.leaves(state.momentum), []
        for part, added in zip(plan.parts, plan.split_rows(rows), strict=True):
            stored = [x[0] for x in leaves[slice(*part.tensors)]]
            own = part.unpack(stored)
            sums = [m + x for m, x in zip(own, added, strict=True)]
            found += [x[None] for x in part.pack(sums, stored)]
        return jax.tree.unflatten(jax.tree.structure(state.momentum), found)

    put_back = jax.shard_map(
        put_back, mesh=trained.mesh, in_specs=(specs,), out_specs=specs.momentum, check_vma=False
    )
    return jax.jit(put_back)(trained.state[0])


def assert_nothing_kept(state):
    kept = (
        state[0].exchange,
        state[0].pending and state[0].pending.outbox._replace(status=0, step=0),
    )
    assert not any(map(np.any, jax.tree.leaves(kept)))


assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-7)
