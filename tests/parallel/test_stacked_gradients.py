"""Trainers that leave shardings to the compiler: stacked gradients, the optimizer alone mapped."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import demo_optax
from benchmarks import hlo
from tests import model, workers
from tests.sweeps import sweep

AXES = "replica", "fsdp", "tensor"
SPECS = {"hidden": P("fsdp", "tensor"), "bias": P("tensor"), "out": P("tensor")}
TX = demo_optax.demo_sgd(0.5, demo_optax.Compression(4, 8), decay=0.9, axis_name="replica")


def mesh_of(kind=AxisType.Auto):
    return workers.mesh_of(2, 2, 2, names=AXES, kind=kind)


OPTIONS = dict(axis_name="replica", param_specs=SPECS, clip_norm=1.0)


def train(loss, mesh, **options):
    params, _, metrics = workers.train(TX, range(4), mesh=mesh, loss=loss, **OPTIONS, **options)
    return params, np.stack([one.loss for one in metrics])


@pytest.fixture(scope="module")
def manual():
    return train(model.loss, mesh_of())


def constrained(place):
    """The loss, with the hidden layer laid out by ``place``."""

    def loss(params, batch):
        hidden = place(batch["x"] @ params["hidden"] + params["bias"][None])
        return jnp.mean(jnp.square(jnp.tanh(hidden) @ params["out"] - batch["y"]))

    return loss


def with_inner_shard_map(mesh):
    def loss(params, batch):
        def own_columns(x, w, b):
            return jnp.tanh(x @ w + b[None])

        hidden = jax.shard_map(
            own_columns,
            mesh=mesh,
            in_specs=(P("fsdp"), P(None, "tensor"), P("tensor")),
            out_specs=P("fsdp", "tensor"),
        )(batch["x"], params["hidden"], params["bias"])
        return jnp.mean(jnp.square(hidden @ params["out"] - batch["y"]))

    return loss


MODELS = {
    "plain": lambda mesh: model.loss,
    "a spec": lambda mesh: constrained(
        lambda x: jax.lax.with_sharding_constraint(x, P("fsdp", "tensor"))
    ),
    "a sharding": lambda mesh: constrained(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp", "tensor")))
    ),
    "a shard_map": with_inner_shard_map,
}


@sweep("a spec", "a shard_map", name=MODELS)
def test_models_with_shardings_of_their_own_train_as_in_the_manual_step(name, manual):
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        params, losses = train(MODELS[name](mesh), mesh, sharding="auto")
    np.testing.assert_allclose(losses, manual[1], rtol=1e-4)
    chex.assert_trees_all_close(params, manual[0], rtol=2e-4, atol=2e-6)


@sweep(2, microbatches=[1, 2])
def test_an_explicit_mesh_trains_alike(microbatches, manual):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, losses = train(model.loss, mesh, sharding="auto", microbatches=microbatches)
    np.testing.assert_allclose(losses, manual[1], rtol=1e-4)
    assert {x.sharding.mesh for x in jax.tree.leaves(params)} == {mesh}


def test_a_loss_that_names_shardings_of_explicit_axes_is_told_what_to_use():
    mesh = mesh_of(AxisType.Explicit)

    def loss(params, batch):
        return jnp.sum(jnp.matmul(batch["x"], params["hidden"], out_sharding=P("fsdp")))

    with jax.set_mesh(mesh), pytest.raises(ValueError) as refused:
        train(loss, mesh, sharding="auto")
    assert "with_sharding_constraint" in "".join(refused.value.__notes__)


def test_a_batch_on_an_explicit_mesh_is_divided_where_its_type_divides_it():
    mesh, batch = mesh_of(AxisType.Explicit), np.arange(32.0).reshape(8, 4)
    gradients = demo_optax.worker_gradients(lambda w, x: w * jnp.sum(x), mesh, "replica")
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, NamedSharding(mesh, P(None, "replica")))
        found = jax.jit(lambda *args: gradients(*args, opt_state=()).loss)(1.0, placed)
    np.testing.assert_array_equal(found, [batch[:, :2].sum(), batch[:, 2:].sum()])


@pytest.mark.parametrize(
    "given",
    [P(("replica", "fsdp")), P("replica"), P("fsdp"), P(("tensor", "replica"), "fsdp"), P()],
)
def test_a_batch_on_an_explicit_mesh_is_divided_by_its_rows(given):
    mesh = mesh_of(AxisType.Explicit)
    batch = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, given))
    with jax.set_mesh(mesh):
        gradients = demo_optax.worker_gradients(lambda w, x: w * jnp.sum(x), mesh, "replica")
        found = jax.jit(lambda *args: gradients(*args, opt_state=()).gradients * 2)(1.0, batch)
    np.testing.assert_array_equal(found, [2 * sum(range(16)), 2 * sum(range(16, 32))])


def test_an_embedding_is_looked_up_in_the_copy_of_each_worker():
    mesh, spec = mesh_of(AxisType.Explicit), P("tensor", "fsdp")

    def loss(table, tokens):
        looked_up = table[tokens]
        return jnp.mean(jax.lax.with_sharding_constraint(looked_up, P("fsdp", None, "tensor")))

    def placed(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    args = placed(jnp.ones((260, 64)), spec), placed(jnp.ones((8, 16), int), P(("replica", "fsdp")))
    with jax.set_mesh(mesh):
        gradients = demo_optax.worker_gradients(loss, mesh, "replica", param_specs=spec)
        program = jax.jit(gradients).lower(*args, opt_state=()).compile().as_text()
    sent = hlo.collectives(program)
    assert [one for one in sent if one.crosses(mesh, "replica")] == []


def test_the_optimizer_gathers_no_momentum():
    mesh = mesh_of()
    tx = demo_optax.stack_workers(TX, mesh, "replica", SPECS)
    params = jax.device_put(model.init(), {n: NamedSharding(mesh, SPECS[n]) for n in SPECS})
    gradients = {
        n: jax.ShapeDtypeStruct(
            (2, *x.shape), x.dtype, sharding=NamedSharding(mesh, P("replica", *SPECS[n]))
        )
        for n, x in params.items()
    }
    program = jax.jit(tx.update).lower(gradients, tx.init(params), params).compile().as_text()
    sent = hlo.collectives(program)
    assert len([one for one in sent if one.crosses(mesh, "replica")]) == 1
    within = [one for one in sent if not one.crosses(mesh, "replica")]
    assert {one.kind for one in within} == {"all-reduce"}
    in_common = 4 * sum(x.size for n, x in model.init().items() if n != "hidden")
    numbers = 4 * 10
    assert sum(one.operand_bytes for one in within) <= in_common + numbers


def test_a_train_state_in_a_plain_jit(manual):
    mesh = mesh_of()
    tx = demo_optax.stack_workers(TX, mesh, "replica", SPECS)
    gradients = demo_optax.worker_gradients(
        model.loss, mesh, "replica", clip_norm=1.0, param_specs=SPECS
    )

    @jax.jit
    def step(state, batch):
        found = gradients(state.params, batch, opt_state=state.opt_state)
        return state.apply_gradients(grads=found.gradients), found.loss

    state = train_state.TrainState.create(apply_fn=None, params=model.init(), tx=tx)
    for i in range(4):
        state, loss = step(state, model.batch(i))
        np.testing.assert_allclose(loss, manual[1][i], rtol=1e-4)


def test_an_nnx_optimizer_of_a_sharded_model_on_an_explicit_mesh():
    class Model(nnx.Module):
        def __init__(self, rngs):
            def of(*spec):
                return {"out_sharding": P(*spec)}

            self.hidden = nnx.Linear(
                12, 16, use_bias=False, kernel_metadata=of("fsdp", "tensor"), rngs=rngs
            )
            self.out = nnx.Linear(
                16, 3, use_bias=False, kernel_metadata=of("tensor", None), rngs=rngs
            )

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))

    mesh = mesh_of(AxisType.Explicit)
    tx = demo_optax.demo(
        0.02,
        demo_optax.Compression(4, 8),
        decay=0.9,
        precondition=optax.scale_by_rms(0.95, eps_in_sqrt=False, bias_correction=True),
        axis_name="replica",
    )
    with jax.set_mesh(mesh):
        module = Model(nnx.Rngs(0))
        graph, params = nnx.split(module, nnx.Param)
        specs = nnx.get_partition_spec(params)
        stacked = demo_optax.stack_workers(tx, mesh, "replica", specs)
        optimizer = nnx.Optimizer(module, stacked, wrt=nnx.Param)

        def loss(params, batch):
            return jnp.mean(jnp.square(nnx.merge(graph, params)(batch["x"]) - batch["y"]))

        gradients = demo_optax.worker_gradients(loss, mesh, "replica", param_specs=specs)

        @nnx.jit
        def step(module, optimizer, batch):
            params = nnx.state(module, nnx.Param)
            found = gradients(params, batch, opt_state=nnx.state(optimizer))
            optimizer.update(module, found.gradients)
            return found.loss

        batch = jax.device_put(model.batch(0), NamedSharding(mesh, P(("replica", "fsdp"))))
        losses = [np.mean(step(module, optimizer, batch)) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    moment = nnx.as_pure(optimizer.opt_state)[0].precondition.nu["hidden"]["kernel"]
    assert moment.shape == (2, 12, 16)
    assert moment.sharding.spec == P("replica", "fsdp", "tensor")
    assert demo_optax.check_replicas(nnx.as_pure(nnx.state(module)), mesh, "replica") == ()


def boxed_model():
    from flax import linen as nn

    box = nn.LogicallyPartitioned(model.init()["hidden"], names=("embed", "mlp"))
    return {**model.init(), "hidden": box}


def test_shardings_and_boxed_specs_serve_as_the_specs_of_parameters():
    mesh = mesh_of()
    boxed = boxed_model()
    specs = {**SPECS, "hidden": boxed["hidden"].replace_boxed(SPECS["hidden"])}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    expected = demo_optax.state_specs(TX, model.init(), mesh, "replica", SPECS)
    for given in (shardings, specs):
        assert demo_optax.state_specs(TX, boxed, mesh, "replica", given) == expected


def test_microbatches_and_keys_differ_between_workers():
    mesh = workers.mesh_of(8, kind=AxisType.Auto)

    def noisy(params, batch, key):
        return jnp.mean(batch["x"]) * params + jax.random.normal(key), key

    fn = jax.jit(demo_optax.worker_gradients(noisy, mesh, microbatches=2))
    found = fn(jnp.float32(1.0), model.batch(0), jax.random.key(0), opt_state=())
    keys = jax.random.key_data(found.aux).reshape(16, -1)
    assert len(np.unique(keys, axis=0)) == 16
    expected = model.batch(0)["x"].reshape(8, 2, 12).mean(axis=(1, 2))
    np.testing.assert_allclose(found.gradients, expected, rtol=1e-5)


def test_a_loss_may_name_the_axes_of_the_mesh_that_its_caller_sets():
    mesh = workers.mesh_of(4, 2, names=("replica", "fsdp"), kind=AxisType.Auto)
    finer = workers.mesh_of(4, 1, 2, names=("replica", "a", "b"), kind=AxisType.Auto)
    loss = constrained(lambda x: jax.lax.with_sharding_constraint(x, P(None, "b")))
    plain = demo_optax.worker_gradients(model.loss, mesh, "replica")
    expected = jax.jit(plain)(model.init(), model.batch(0), opt_state=())
    with jax.set_mesh(finer):
        own = jax.jit(demo_optax.worker_gradients(loss, mesh, "replica"))
        results = own(model.init(), model.batch(0), opt_state=())
    chex.assert_trees_all_close(results.gradients, expected.gradients, rtol=1e-5, atol=1e-6)
