"""Workers of several devices: sharded parameters, or a batch that is shared (FlexDeMo)."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from benchmarks import hlo
from demo_optax._src.exchange import collectives
from demo_optax._src.exchange.collectives import gather
from tests import model, workers
from tests.sweeps import sweep

# A side that the blocks do not divide, so that momenta have other sizes than parameters.
SHAPES = {"hidden": (12, 32), "bias": (32,), "out": (32, 3)}
SPECS = {"hidden": P(None, "fsdp"), "bias": P(), "out": P("fsdp")}
WAYS = {"manual": {}, "mapped": dict(sharding="auto")}
SMALL = demo_optax.Compression(4, 8)


def sgd():
    return demo_optax.demo_sgd(0.5, decay=0.9, compression=SMALL, axis_name="replica")


SGD = sgd()
OPTIMIZERS = {
    "sgd": SGD,
    "a mean of gradients in front": optax.chain(optax.ema(0.5, debias=False), SGD),
    "adamw behind a preconditioner": demo_optax.demo_adamw(
        1e-2,
        eps=1e-3,
        decay=0.9,
        precondition=optax.scale_by_rms(0.9, eps=1e-3),
        compression=SMALL,
        axis_name="replica",
    ),
}


def params():
    random = np.random.default_rng(0)
    return {n: (0.3 * random.normal(size=s)).astype(np.float32) for n, s in SHAPES.items()}


def mesh_of(*sizes, names=("fsdp", "tensor"), kind=AxisType.Auto):
    return workers.mesh_of(*sizes, names=("replica", *names), kind=kind)


def train(mesh, specs, steps=4, tx=SGD, **way):
    return workers.train(
        tx,
        range(steps),
        mesh=mesh,
        params=params,
        axis_name="replica",
        param_specs=specs,
        clip_norm=1.0,
        **way,
    )


def assert_follows(ours, theirs):
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=2e-4, atol=2e-6)
    losses = ([metrics.loss for metrics in run[2]] for run in (ours, theirs))
    chex.assert_trees_all_close(*losses, rtol=1e-4)


def assert_shards_agree(tree, mesh, specs):
    """The same bits on all devices that ought to hold the same."""
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        wanted = NamedSharding(mesh, spec).devices_indices_map(leaf.shape)
        copies = {}
        for shard in leaf.addressable_shards:
            assert shard.index == wanted[shard.device]
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(bits) == 1 for bits in copies.values())


@functools.cache
def whole(name):
    """A run on workers of one device each."""
    return train(mesh_of(2, 1), SPECS, tx=OPTIMIZERS[name])


@sweep(("sgd", "manual"), ("adamw behind a preconditioner", "mapped"), name=OPTIMIZERS, way=WAYS)
def test_two_devices_a_worker_follow_one(name, way):
    mesh, tx = mesh_of(2, 2), OPTIMIZERS[name]
    ours = train(mesh, SPECS, tx=tx, **WAYS[way])
    assert_follows(ours, whole(name))
    assert_shards_agree(ours[0], mesh, SPECS)
    specs = demo_optax.state_specs(tx, params(), mesh, "replica", SPECS)
    nodes = jax.tree.leaves(specs, is_leaf=lambda x: hasattr(x, "momentum"))
    assert next(x.momentum for x in nodes if hasattr(x, "momentum")) == {
        "hidden": P("replica", None, "fsdp"),
        "bias": P("replica"),
        "out": P("replica", "fsdp"),
    }
    assert_shards_agree(ours[1], mesh, specs)
    assert ours[2][-1].exchange.participants == 2
    sent = demo_optax.packet_bytes(tx, params(), "replica", mesh, SPECS)
    assert ours[2][-1].packet_bytes == sent


@sweep("mapped", way=["manual", "mapped"])
def test_two_sharded_axes_follow_none(way):
    mesh, specs = mesh_of(2, 2, 2), {"hidden": P(None, ("fsdp", "tensor")), "bias": P("tensor")}
    specs["out"] = P("tensor")
    ours = train(mesh, specs, **WAYS[way])
    assert_follows(ours, whole("sgd"))
    assert_shards_agree(ours[0], mesh, specs)
    assert_shards_agree(
        ours[1], mesh, demo_optax.state_specs(SGD, params(), mesh, "replica", specs)
    )


@sweep("manual", way=WAYS)
def test_a_worker_of_several_devices_may_hold_whole_parameters(way):
    mesh = mesh_of(2, 4, names=("local",))
    ours = train(mesh, None, **WAYS[way])
    assert_follows(ours, whole("sgd"))
    assert_shards_agree(ours[0], mesh, jax.tree.map(lambda _: P(), ours[0]))
    assert_shards_agree(ours[1], mesh, demo_optax.state_specs(SGD, ours[0], mesh, "replica"))


def sent_by_a_step(mesh, specs, way, tx=SGD):
    """The collectives of the step with which ``train`` trains."""
    carry = workers.initial(tx, mesh, params, "replica", specs)
    options = dict(axis_name="replica", param_specs=specs, clip_norm=1.0, **WAYS[way])
    step = workers.step_of(tx, mesh, **options)
    return hlo.collectives(step.lower(*carry, model.batch(0)).compile().as_text())


@sweep(
    ("sgd", "manual"),
    ("scaled", "mapped"),
    ("muon", "manual"),
    name=["sgd", "scaled", "muon"],
    way=["manual", "mapped"],
)
def test_only_the_packet_crosses_between_workers(name, way):
    optimizers = {
        "sgd": SGD,
        "scaled": demo_optax.demo_scaled(1e-2, SMALL, axis_name="replica"),
        "muon": demo_optax.demo_muon(1e-2, SMALL, axis_name="replica"),
    }
    mesh, tx = mesh_of(2, 2), optimizers[name]
    sent = sent_by_a_step(mesh, SPECS, way, tx)
    (packet,) = [one for one in sent if one.crosses(mesh, "replica")]
    assert (packet.kind, packet.dtype, packet.groups) == ("all-gather", "u32", ((0, 2), (1, 3)))
    of_a_shard = {"hidden": (12, 16), "bias": (32,), "out": (16, 3)}
    shards = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in of_a_shard.items()}
    assert packet.operand_bytes == demo_optax.packet_bytes(SMALL, shards, "replica")
    assert demo_optax.packet_bytes(tx, params(), "replica", mesh, SPECS) == 2 * packet.operand_bytes
    of_two = demo_optax.packet_bytes(SMALL, params(), "replica", mesh.abstract_mesh, SPECS)
    assert name != "sgd" or of_two == 2 * packet.operand_bytes
    inside = [one for one in sent if not one.crosses(mesh, "replica")]
    assert {one.groups for one in inside} == {((0, 1), (2, 3))}


def test_only_the_packet_crosses_on_a_mesh_whose_axes_are_explicit():
    mesh, specs = mesh_of(4, 2, names=("fsdp",), kind=AxisType.Explicit), {"w": P("fsdp")}
    shardings = {"w": NamedSharding(mesh, P("fsdp"))}
    params = jax.device_put({"w": np.ones((256, 256), np.float32)}, shardings)
    state = demo_optax.init_opt_state(SGD, params, mesh, "replica", specs)
    step = demo_optax.make_train_step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2),
        SGD,
        mesh,
        "replica",
        param_specs=specs,
        sharding="auto",
    )
    program = step.lower(params, state, np.ones((16, 256), np.float32)).compile()
    sent = [one for one in hlo.collectives(program.as_text()) if one.crosses(mesh, "replica")]
    assert [(one.kind, one.dtype) for one in sent] == [("all-gather", "u32")]


@sweep("manual", way=WAYS)
def test_packets_of_whole_parameters_cross_in_parts(way):
    mesh = mesh_of(2, 4, names=("local",))
    sent = sent_by_a_step(mesh, None, way)
    (part,) = [one for one in sent if one.crosses(mesh, "replica")]
    assert (part.kind, part.dtype) == ("all-gather", "u32")
    packet = demo_optax.packet_bytes(SGD, params(), "replica")
    assert part.operand_bytes == 512 * math.ceil(packet / 4 / 512)
    assert demo_optax.packet_bytes(SGD, params(), "replica", mesh) == 4 * part.operand_bytes


@sweep("mapped", way=WAYS)
def test_a_worker_is_left_out_with_all_its_shards(way):
    """The gradient of one row is infinite: no shard of that worker may take part."""
    mesh, specs = mesh_of(2, 2), {"hidden": P("fsdp"), "bias": P(), "out": P()}

    def loss(params, batch):
        return model.loss(params, batch) + jnp.mean(batch["spike"]) * params["hidden"][11].sum()

    def batch(i):
        spike = np.zeros(16, np.float32)
        spike[0] = np.inf if i == 2 else 0
        return model.batch(i) | {"spike": spike}

    train = functools.partial(
        workers.train,
        SGD,
        mesh=mesh,
        params=params,
        loss=loss,
        batch=batch,
        axis_name="replica",
        param_specs=specs,
        **WAYS[way],
    )
    _, before, _ = train(range(2))
    values, state, metrics = train(range(3))
    assert metrics[-1].exchange.participants == 1
    for name in SHAPES:
        old, new = (np.asarray(one[0].momentum[name]) for one in (before, state))
        np.testing.assert_array_equal(new[0], old[0])
        assert np.isfinite(new).all() and (new[1] != old[1]).any()
        assert np.isfinite(values[name]).all()
    assert_shards_agree(values, mesh, specs)


@sweep("manual", way=WAYS)
def test_one_damaged_packet_leaves_no_shards_apart(way, monkeypatch):
    """What all shards hold is sent by each of them, and the damage reaches but one."""

    def damaged(packet, axis_name, own):
        packets = gather(packet, axis_name, own)
        hit = jax.lax.axis_index("fsdp") == 1
        return packets.at[1, 7].add(hit.astype(packets.dtype))

    monkeypatch.setattr(collectives, "gather", damaged)
    mesh = mesh_of(2, 2)
    values, state, metrics = train(mesh, SPECS, tx=sgd(), **WAYS[way])
    assert metrics[-1].exchange.participants == 1
    assert_shards_agree(values, mesh, SPECS)
    assert_shards_agree(state, mesh, demo_optax.state_specs(SGD, params(), mesh, "replica", SPECS))


def test_a_sharded_model_trains_in_a_loop_of_ones_own():
    """The compiler shards the model inside a worker; the optimizer takes stacked gradients."""
    mesh = mesh_of(2, 2)
    tx = demo_optax.stack_workers(SGD, mesh, "replica", SPECS)
    values = jax.device_put(params(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS))
    state = tx.init(values)

    def loss_fn(values, batch):
        hidden = jnp.tanh(batch["x"] @ values["hidden"] + values["bias"][None])
        hidden = jax.lax.with_sharding_constraint(hidden, P(None, "fsdp"))
        return jnp.mean(jnp.square(hidden @ values["out"] - batch["y"]))

    def clipped_gradient(values, batch):
        loss, gradient = demo_optax.local_value_and_grad(loss_fn, "replica")(values, batch)
        norm = optax.tree.norm(gradient)
        gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), gradient)
        return jax.tree.map(lambda x: x[None], (gradient, loss))

    @jax.jit
    def step(values, state, batch):
        gradients, losses = jax.shard_map(
            clipped_gradient,
            mesh=mesh,
            axis_names={"replica"},
            in_specs=(P(), P("replica")),
            out_specs=P("replica"),
        )(values, batch)
        updates, state = tx.update(gradients, state, values)
        return optax.apply_updates(values, updates), state, losses

    theirs, _, metrics = whole("sgd")
    for i in range(4):
        batch = jax.device_put(model.batch(i), NamedSharding(mesh, P("replica")))
        values, state, loss = jax.block_until_ready(step(values, state, batch))
        np.testing.assert_allclose(loss, metrics[i].loss, rtol=1e-4)
    chex.assert_trees_all_close(values, theirs, rtol=2e-4, atol=2e-6)


@sweep("manual", way=["manual", "mapped"])
def test_sharded_steps_compile_once(way, compiled):
    mesh = mesh_of(2, 2)
    values, state = workers.initial(SGD, mesh, params, "replica", SPECS)
    step = demo_optax.make_train_step(
        model.loss, SGD, mesh, "replica", param_specs=SPECS, **WAYS[way]
    )
    values, state, _ = step(values, state, model.batch(0))
    compiled()
    for i in range(3):
        values, state, _ = jax.block_until_ready(step(values, state, model.batch(i)))
    assert not compiled()


def test_specs_of_the_state_end_with_the_name_of_an_axis():
    specs = {"hidden": P(None, "fsdp"), "bias": P(None), "out": P("fsdp", None)}
    found = demo_optax.state_specs(SGD, params(), mesh_of(2, 2), "replica", specs)
    momentum = found[0].momentum  # jax.jit returns it so, and would compile again for other specs
    assert momentum == {
        "hidden": P("replica", None, "fsdp"),
        "bias": P("replica"),
        "out": P("replica", "fsdp"),
    }
