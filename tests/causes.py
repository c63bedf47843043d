"""A cause for every ``raise`` of the library, and what the message must say besides."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import demo_optax
from demo_optax._src import matrices
from demo_optax._src.commands import quantities
from demo_optax._src.commands.main import make_parser
from tests import (
    causes_of_checkpoints,
    causes_of_extensions,
    causes_of_halves,
    causes_of_swarms,
    model,
    workers,
)
from tests.causes_in_common import DEMO, state_of, two
from tests.workers import step_of

ALONE_LOCALLY = demo_optax.local_steps(optax.sgd(0.1), optax.sgd(1.0), every=2)
ALONE = demo_optax.demo(1e-3, demo_optax.Compression(2, 4))
LOOKING_AHEAD = demo_optax.demo_scaled(1e-3, look_ahead=1.0)
DELAYED = demo_optax.demo(
    1e-3, demo_optax.Compression(4, 8), exchange=demo_optax.Delayed(demo_optax.AllGather())
)

DELAYED_WITH_ANOTHER_SEED = demo_optax.demo(
    1e-3, demo_optax.Compression(4, 8, seed=1), exchange=demo_optax.Delayed(demo_optax.AllGather())
)


def pending_packets_of_another_seed():
    state = DELAYED_WITH_ANOTHER_SEED.init(jnp.ones(3))
    jax.eval_shape(lambda gradient: DELAYED.update(gradient, state), jnp.ones(3))


def inner():
    return workers.mesh_of(2, 2)


def differing_replicas():
    sharding = jax.NamedSharding(two(), P())
    copies = [jax.device_put(np.full(3, i, np.float32), d) for i, d in enumerate(two().devices)]
    x = jax.make_array_from_single_device_arrays((3,), sharding, copies)
    demo_optax.repair_replicas({"w": x}, two())


def simulated_on_a_set_mesh():
    with jax.set_mesh(two()):
        demo_optax.init_opt_state(DEMO, np.ones(3), jax.sharding.AbstractMesh((2,), ("data",)))


def owners_of_one_all_gather():
    args = make_parser().parse_args(["bytes", "--preset", "300m", "--topk-back", "8"])
    args.run(args)


def mean_loss(microbatches):
    def loss(params, batch):
        return jax.lax.pmean(model.loss(params, batch), "data")

    step = demo_optax.make_train_step(loss, DEMO, two(), microbatches=microbatches)
    step(model.init(), state_of(2), model.batch(0, rows=16))


def same_loss():
    def gradient(params, batch):
        def loss(params, batch):
            return jax.lax.pmean(model.loss(params, batch), "data")

        return demo_optax.local_value_and_grad(loss, "data")(params, batch)[1]

    run = workers.spread(gradient, (P(), P("data")), P("data"), 2, "shard_map")
    run(model.init(), model.stacked(model.batch(0, rows=16), 2))


def summed_gradient():
    specs = demo_optax.state_specs(DEMO, model.init(), two())

    def step(params, state, batch):
        return DEMO.update(jax.grad(model.loss)(params, batch), state, params)

    run = workers.spread(step, (P(), specs, P("data")), (P(), specs), 2, "shard_map")
    run(model.init(), state_of(2), model.stacked(model.batch(0, rows=16), 2))


def stacked_state_inside():
    ALONE.update(model.init(), jax.device_get(state_of(2)), model.init())


def same_gradients():
    metrics = demo_optax.exchange_metrics(ALONE.init(jnp.ones(3)))
    demo_optax.check_metrics(metrics._replace(identical=jnp.array(True), participants=jnp.array(8)))


def workers_that_got_other_packets():
    metrics = demo_optax.exchange_metrics(ALONE.init(jnp.ones(3)))
    demo_optax.check_metrics(metrics._replace(agreed=jnp.array(False)))


def workers_that_disagree():
    metrics = demo_optax.exchange_metrics(ALONE.init(jnp.ones(3)))
    demo_optax.check_metrics(metrics._replace(participants=jnp.array([2, 1, 2])))


def batch_of_one_process():
    with mock.patch.object(jax, "process_count", lambda: 2):
        step_of(DEMO, two())(model.init(), state_of(2), model.batch(0))


def first_step(tx, mesh=None, **options):
    """Trains a model of matrices and vectors for one step."""
    mesh = mesh or two()
    specs = options.get("param_specs")
    state = demo_optax.init_opt_state(tx, model.init(), mesh, param_specs=specs)
    step_of(tx, mesh, **options)(model.init(), state, model.batch(0))


def state_unlike_any_parameter():
    def row_sums(updates, state, params=None):
        del params
        return updates, jax.tree.map(lambda g: jnp.sum(jnp.square(g), -1), updates)

    scale = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[:-1]), params), row_sums
    )
    tx = demo_optax.demo(1e-3, axis_name="data", precondition=scale)
    specs = {"hidden": P(None, "fsdp"), "out": P(), "bias": P()}
    first_step(tx, inner(), param_specs=specs)


def orthogonal_shards_without_specs():
    tx = matrices.orthogonalize(None, "data")
    run = jax.shard_map(
        lambda x: tx.update([x], ())[0],
        mesh=two_by_two_auto(),
        in_specs=P(None, "fsdp"),
        out_specs=[P(None, "fsdp")],
    )
    jax.jit(run)(jnp.ones((4, 4)))


def flattened_shards():
    specs = {"hidden": P("fsdp"), "out": P(), "bias": P()}
    tx = optax.flatten(demo_optax.demo_scaled(1e-3, axis_name="data"))
    first_step(tx, inner(), param_specs=specs)


MASK = {"hidden": True, "out": True, "bias": False}


def update_inside_of_a_shard_map():
    tx = demo_optax.stack_workers(DEMO, two())
    state, specs = state_of(2), demo_optax.state_specs(DEMO, model.init(), two())
    run = workers.spread(tx.update, (P("data"), specs, P()), (P(), specs), 2, "shard_map")
    run(jax.tree.map(lambda x: np.stack([x, x]), model.init()), state, model.init())


def two_by_two_auto():
    return workers.mesh_of(2, 2, kind=jax.sharding.AxisType.Auto)


def state_of_the_model_without_aux():
    step = demo_optax.make_train_step(
        lambda params, state, batch: (model.loss(params, batch), ({}, None)),
        DEMO,
        two(),
        stateful=True,
    )
    state = demo_optax.init_model_state({"steps": jnp.zeros(())}, two())
    step(model.init(), state_of(2), state, model.batch(0))


def local_steps(inner, outer, every=2):
    return demo_optax.local_steps(inner, outer, every, axis_name="data")


def in_fragments(outer, fragments=2, axis_name="data"):
    tx = demo_optax.local_steps(optax.sgd(0.1), outer, 4, fragments=fragments, axis_name=axis_name)
    return demo_optax.init_opt_state(tx, model.init(), two())


def fragments_of_shards():
    tx = demo_optax.local_steps(optax.sgd(0.1), DEMO, 4, fragments=4, axis_name="data")
    first_step(tx, inner(), param_specs={"hidden": P("fsdp"), "out": P(), "bias": P()})


def local_steps_of_a_part():
    tx = optax.partition({True: local_steps(optax.sgd(0.1), DEMO), False: DEMO}, MASK)
    state = demo_optax.init_opt_state(tx, model.init(), two())
    step_of(tx, two())(model.init(), state, model.batch(0))


def donated_parameters():
    step = step_of(DEMO, two())
    params = jax.device_put(model.init(), jax.NamedSharding(two(), P()))
    step(params, state_of(2), model.batch(0))
    step(params, state_of(2), model.batch(0))


def optimizer_for_another_axis():
    mesh = workers.mesh_of(2, names=("replica",))
    state = demo_optax.init_opt_state(DEMO, model.init(), mesh, "replica")
    step = demo_optax.make_train_step(model.loss, DEMO, mesh, "replica")
    step(model.init(), state, model.batch(0))


def gradient_over_another_axis():
    """Without its axis it would be summed, and the next message would speak of something else."""
    gradient = demo_optax.local_value_and_grad(model.loss, "workers")
    run = workers.spread(gradient, (P(), P("data")), P(), 2, "shard_map")
    run(model.init(), model.stacked(model.batch(0, rows=16), 2))


def exchange_in_a_while_loop():
    def update(gradient, _):
        pass_on = functools.partial(jax.lax.ppermute, axis_name="data", perm=[(0, 0)])
        return jax.lax.while_loop(lambda x: x[0] < 1, pass_on, gradient)

    tx = optax.chain(optax.stateless(update), demo_optax.mean_over_workers("data"))
    demo_optax.packet_bytes(tx, jnp.zeros(3))


def choose_by_nodes_without_sites():
    words = "--params 1M --bandwidth 1Gbit --latency 1ms --batch-tokens 1k --width 64"
    given = "--workers 2 --nodes-per-site 2 --compute-time 1s"
    args = make_parser().parse_args(["choose", *words.split(), *given.split()])
    args.run(args)


def a_place_without_a_swarm():
    args = make_parser().parse_args(["swarm", "/nowhere"])
    args.run(args)


def displacement_without_paths():
    state = nnx.to_flat_state(nnx.State({"displacement": jnp.ones(3)}))
    demo_optax.local_parameters(model.init(), state)


def numbers_of(*axes):
    matrices.dimension_numbers([matrices.DimensionNumbers(*axes)], [jnp.ones((2, 3))])


def init_on(mesh, *axes_and_specs):
    demo_optax.init_opt_state(DEMO, model.init(), mesh(), *axes_and_specs)


def step_of_two(batch=None, **options):
    batch = model.batch(0) if batch is None else batch
    step_of(DEMO, two(), **options)(model.init(), state_of(2), batch)


def step_of_others(number, others, placed):
    state = state_of(others) if placed else jax.device_get(state_of(others))
    step_of(DEMO, workers.mesh_of(number))(model.init(), state, model.batch(0))


DRIFT = r"may differ between the workers.*axis_name='data'.*mean_over_workers"

RAISED = [
    # settings
    lambda: demo_optax.Compression(topk=2.5),
    lambda: demo_optax.Compression(topk=jnp.array(3)),
    lambda: demo_optax.Delayed(demo_optax.Delayed(demo_optax.AllGather())),
    lambda: demo_optax.demo(1e-3, exchange="two-phase"),
    lambda: demo_optax.demo(1e-3, axis_name="rows", exchange=demo_optax.AllGather("data")),
    lambda: demo_optax.demo(
        1e-3,
        demo_optax.Compression(4, 8, selection="random"),
        exchange=demo_optax.TwoPhase(topk_back=8),
    ).init(model.init()),
    lambda: demo_optax.demo(lambda step: jnp.ones(3), demo_optax.Compression(2, 4)).update(
        model.init(), ALONE.init(model.init())
    ),
    lambda: demo_optax.AllGather(3),
    pending_packets_of_another_seed,
    lambda: demo_optax.demo(1e-3, 32),
    lambda: demo_optax.demo(1e-3, decay=1.5),
    lambda: demo_optax.decoupled(optax.sgd(1.0), decay=1.0),
    lambda: demo_optax.demo(1e-3, decay="0.9"),
    lambda: demo_optax.demo(1e-3, decay=jnp.bfloat16(0.999)),
    lambda: demo_optax.decoupled_momentum(momentum_dtype="int8"),
    lambda: demo_optax.decoupled_momentum(momentum_dtype=jnp.ones(())),
    # parameters, gradients and states
    lambda: ALONE.init({"name": "text"}),
    lambda: demo_optax.mean_over_workers("data").init({"w": 1j * jnp.ones(3)}),
    lambda: ALONE.init({"_overwrite_with_gradient": {"scale": jnp.ones(1)}}),
    (
        "made for other parameters or settings",
        lambda: ALONE.update([jnp.ones(3)], ALONE.init(jnp.ones(3))),
    ),
    (
        r"shapes=\(\(16, 8\),\).*shapes=\(\(24, 8\),\).*anew",
        lambda: ALONE.update(jnp.ones((24, 8)), ALONE.init(jnp.ones((16, 8)))),
    ),
    (
        "has the structure.*pass the containers",
        lambda: ALONE.update([jnp.ones(3)], ALONE.init((jnp.ones(3),))),
    ),
    (r"\(2, .*axis of workers in front.*stack_workers", stacked_state_inside),
    (
        r"block_side=4.*block_side=16.*go back to the old settings",
        lambda: demo_optax.demo(1e-3, demo_optax.Compression(4, 16)).update(
            model.init(), ALONE.init(model.init())
        ),
    ),
    lambda: matrices.dimension_numbers([matrices.DimensionNumbers()], [jnp.ones(3)]),
    *[
        (f"{said}.*give integers, and each axis once", functools.partial(numbers_of, *axes))
        for said, axes in [
            ("repeated axis", (0, -2)),
            ("repeated axis", ((0, 0), 1)),
            ("axis 2 is out of bounds", (0, 2)),
        ]
    ],
    (
        r"demo_muon\(\.\.\., axis_name='fsdp'\).*each shard would be made orthogonal by itself",
        orthogonal_shards_without_specs,
    ),
    flattened_shards,
    (
        "the parameters are",
        lambda: demo_optax.local_parameters(jnp.ones(3), LOOKING_AHEAD.init({"w": jnp.ones(3)})),
    ),
    lambda: demo_optax.local_parameters(
        jnp.ones(3), jax.tree.leaves(LOOKING_AHEAD.init(jnp.ones(3)))
    ),
    lambda: demo_optax.local_parameters(jnp.ones((2, 3)), LOOKING_AHEAD.init(jnp.ones(3))),
    # axes
    (r"axis is 'data'.*bound are \('replica',\)", optimizer_for_another_axis),
    (r"'workers', which is not bound here \(bound are \('data',", gradient_over_another_axis),
    lambda: demo_optax.init_opt_state(DEMO, model.init(), two(), ["data"]),
    *[
        (r"one or several of the mesh's axes \('data',\)", functools.partial(init_on, two, name))
        for name in ("model", ("data", "model"), None)
    ],
    *[
        (said, functools.partial(init_on, inner, "data", specs))
        for said, specs in [
            ("'data' is the workers' axis", P("data")),
            ("'data' is the workers' axis", {"hidden": P("data"), "bias": None, "out": None}),
            ("'model' is not among them", {"hidden": P("model"), "bias": P(), "out": P()}),
        ]
    ],
    lambda: step_of(DEMO, inner(), sharding="compiler"),
    # the worker axis
    *[
        (DRIFT, functools.partial(first_step, tx))
        for tx in (optax.adam(1e-3), demo_optax.demo(1e-3, demo_optax.Compression(4, 8)))
    ],
    (
        DRIFT,
        functools.partial(first_step, optax.adam(1e-3), jax.sharding.AbstractMesh((2,), ("data",))),
    ),
    lambda: demo_optax.init_opt_state(optax.apply_if_finite(DEMO, 3), model.init(), two()),
    lambda: first_step(optax.named_chain(("ema", optax.ema(0.9)), ("demo", DEMO))),
    state_unlike_any_parameter,
    lambda: step_of(DEMO, two())(model.init(), optax.adam(1.0).init(model.init()), model.batch(0)),
    *[
        ("the number of workers changed", functools.partial(step_of_others, *numbers, placed))
        for numbers, placed in [((2, 4), True), ((4, 2), True), ((2, 4), False)]
    ],
    (r"stacked.*the optimizer itself", update_inside_of_a_shard_map),
    (r"the same on all workers.*Leave out pmean", same_loss),
    # the step
    (r"gradient\['bias'\] is not local.*local_value_and_grad", summed_gradient),
    same_gradients,
    workers_that_disagree,
    (r"batch\['x'\] has shape \(11, 12\).*2 devices", lambda: step_of_two(model.batch(0, rows=11))),
    (r"batch has shape \(\).*2 devices", lambda: step_of_two(np.float32(1))),
    ("batch_specs names the axis 'rows' for batch", lambda: step_of_two(batch_specs=P("rows"))),
    (
        r"8 rows.*3 equal microbatches.*divide it x microbatches",
        lambda: step_of_two(microbatches=3),
    ),
    batch_of_one_process,
    lambda: step_of(DEMO, two())(model.init(), state_of(2), *model.batch(0).values()),
    lambda: jax.vmap(
        lambda x: demo_optax.local_value_and_grad(jnp.sum, "data")(a=x), axis_name="data"
    )(jnp.ones((2, 3))),
    (
        r"stack_workers.*pass the optimizer that was wrapped",
        lambda: demo_optax.stack_workers(demo_optax.stack_workers(DEMO, two()), two()),
    ),
    (
        "the gradients of 2 workers are expected",
        lambda: demo_optax.stack_workers(DEMO, two()).update(
            model.init(), state_of(2), model.init()
        ),
    ),
    lambda: optax.masked(demo_optax.stack_workers(DEMO, two()), MASK).update(
        model.init(), optax.MaskedState(state_of(2)), model.init()
    ),
    (
        r"has no devices.*'data', 'fsdp'.*AbstractMesh",
        lambda: demo_optax.make_train_step(
            model.loss, DEMO, jax.sharding.AbstractMesh((2, 2), ("data", "fsdp"))
        ),
    ),
    (
        r"has no devices.*'data', 'fsdp'.*AbstractMesh",
        functools.partial(init_on, lambda: jax.sharding.AbstractMesh((2, 2), ("data", "fsdp"))),
    ),
    (
        r"abstract form.*pass that mesh itself",
        lambda: demo_optax.make_train_step(model.loss, DEMO, two().abstract_mesh),
    ),
    (r"simulated.*jax\.set_mesh", simulated_on_a_set_mesh),
    *[
        (
            r"collective over the workers.*Leave out pmean",
            functools.partial(mean_loss, microbatches),
        )
        for microbatches in (1, 2)
    ],
    lambda: demo_optax.make_train_step(lambda params, batch: (0.0, 1, 2), DEMO, two())(
        model.init(), state_of(2), model.batch(0)
    ),
    (
        r"\(params, batch\[, key\]\).*1 arguments were given",
        lambda: demo_optax.worker_gradients(jnp.sum, two())(model.init()),
    ),
    lambda: demo_optax.worker_gradients(model.loss, two())(jax.random.key(0), model.batch(0)),
    lambda: step_of_two(batch_specs="data"),
    lambda: step_of(DEMO, inner(), batch_specs=P(("fsdp", "data")))(
        model.init(), state_of(2), model.batch(0)
    ),
    workers_that_got_other_packets,
    state_of_the_model_without_aux,
    # local steps
    lambda: ALONE_LOCALLY.update(model.init(), ALONE_LOCALLY.init(model.init())),
    lambda: first_step(local_steps(demo_optax.mean_over_workers("data"), DEMO)),
    lambda: local_steps(ALONE, DEMO).init(model.init()),
    ("exchanges over axis_name=None", lambda: local_steps(optax.sgd(0.1), ALONE)),
    (
        r"exchanges over the axes \['data'\].*give local_steps the axis_name='data'",
        lambda: first_step(
            demo_optax.local_steps(optax.sgd(0.1), demo_optax.mean_over_workers("data"), 2)
        ),
    ),
    lambda: demo_optax.local_steps(optax.sgd(0.1), LOOKING_AHEAD, 2).init(model.init()),
    local_steps_of_a_part,
    *[
        (
            "must exchange by AllGather.* or TwoPhase",
            functools.partial(in_fragments, outer, axis_name=axis_name),
        )
        for outer, axis_name in [
            (optax.sgd(1.0), "data"),
            (DELAYED, None),
            (demo_optax.demo(1e-3, exchange=demo_optax.TwoPhase()), None),
        ]
    ],
    lambda: in_fragments(DEMO, fragments=3),
    lambda: in_fragments(demo_optax.demo_muon(0.1, look_ahead=None, axis_name="data")),
    fragments_of_shards,
    lambda: optax.chain(optax.clip(1.0), demo_optax.stack_workers(DEMO, two())),
    donated_parameters,
    lambda: demo_optax.check_metrics({}),
    # replicas
    differing_replicas,
    lambda: demo_optax.check_replicas({"w": np.ones(3)}, two()),
    # accounting
    (
        "fragments=4 must divide local_steps=2",
        lambda: demo_optax.accounting.uplink_bytes(
            demo_optax.Compression(), np.ones(4), 2, local_steps=2, fragments=4
        ),
    ),
    ("optax transformation is needed", lambda: demo_optax.decoupled(optax.adamw)),
    lambda: demo_optax.accounting.step_times(
        model.init(),
        (demo_optax.Compression(), demo_optax.Delayed(demo_optax.AllGather())),
        2,
        1e9,
        local_steps=4,
        fragments=2,
    ),
    (
        r"got no opt_state.*demo_muon.*opt_state=opt_state",
        lambda: demo_optax.worker_gradients(model.loss, two())(model.init(), model.batch(0)),
    ),
    lambda: demo_optax.local_parameters(model.init(), {"state": object()}),
    lambda: demo_optax.local_parameters(model.init(), {"displacement": model.init()}),
    displacement_without_paths,
    lambda: demo_optax.packet_bytes(DEMO, model.init(), param_specs=P("fsdp")),
    exchange_in_a_while_loop,
    lambda: quantities.bandwidth("fast"),
    ("'1GB' counts bytes", lambda: quantities.bandwidth("1GB")),
    lambda: quantities.count("1.5"),
    choose_by_nodes_without_sites,
    lambda: demo_optax.accounting.choose(
        10**8, 16, 1e8, 0.02, 1.0, batch_tokens=4096, width=1024, upload=1e7
    ),
    a_place_without_a_swarm,
    owners_of_one_all_gather,
    *causes_of_checkpoints.RAISED,
    *causes_of_extensions.RAISED,
    *causes_of_halves.RAISED,
    lambda: demo_optax.Compression(seed=2**64),
    lambda: demo_optax.init_opt_state(
        optax.MultiSteps(demo_optax.stack_workers(DEMO, two()), 2), model.init(), two()
    ),
    *causes_of_swarms.RAISED,
]
