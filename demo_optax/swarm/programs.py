"""The programs of a swarm's step, compiled once: gradient, seal, open; or gradient and update.

Nothing in them waits for the network. Each worker opens the packets of a step by the same program,
whether it takes part or replays the step later, so that the parameters are equal to the last bit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from demo_optax import checks
from demo_optax._momentum import MESSAGE_WEIGHT
from demo_optax._rounds import LocalStepsState, local_parameters
from demo_optax.arrays import IntScalar, unboxed
from demo_optax.axes import AxisName
from demo_optax.compression.transforms import is_redrawn
from demo_optax.exchange import Delayed, Exchange, Opened, Received, Sealed
from demo_optax.exchange.wrapper import PendingState
from demo_optax.metrics import ExchangeMetrics, exchange_metrics
from demo_optax.parallel import shards, worker_axis
from demo_optax.parallel.gradients import WorkerGradients, stacked_gradients
from demo_optax.parallel.layout import StateLayout, find_layout
from demo_optax.participation import PARTICIPATES
from demo_optax.specs import sharded_axes
from demo_optax.swarm import records
from demo_optax.swarm.lead import to_devices

MakeOptimizer = Callable[[Exchange], optax.GradientTransformation]


class Arrived(NamedTuple):
    """What arrived over the host.

    Attributes:
      packets: uint32 ``(shards, slots, words)``, zeros for slots whose packet does not count.
      slot: int32 scalar, this worker's; -1 where its packet does not count.
    """

    packets: UInt32[Array, "shards slots words"] | np.ndarray | jax.ShapeDtypeStruct
    slot: IntScalar | np.ndarray | jax.ShapeDtypeStruct


class Own(NamedTuple):
    """What a worker brings to a step.

    Attributes:
      gradients: stacked, ``(1, *shape)``.
      participates: bool ``(1,)``.
      weight: float32 ``(1,)``, of its message in the mean.
    """

    gradients: Any
    participates: Any
    weight: Any


class Stepped(NamedTuple):
    """Parameters, optimizer state, and what the exchange told."""

    params: Any
    opt_state: Any
    exchange: ExchangeMetrics


class Fingerprint(NamedTuple):
    """Which program opens the packets.

    Attributes:
      device: the kind of device, JAX's version and the mesh: what may differ in a swarm, and
        changes the program's text.
      program: SHA-256 of its text.
    """

    device: str
    program: str


class Programs(NamedTuple):
    """Compiled programs, and what they need.

    Attributes:
      template: an optimizer whose ``init`` makes the state.
      layout: of parameters and state.
      shape: of `Arrived.packets`.
      gradients: of parameters, state and batch.
      seal: the first half of an update: state, with packets under way, of what is `Own`, state and
        parameters. None with a delay.
      apply: the second half: of parameters, state and what arrived. With a delay the whole update:
        of what is `Own`, parameters, state and what arrived.
      nothing: makes what a worker brings that has no gradient, where there is a delay.
      fingerprint: of ``apply``.
      batch: shapes and dtypes.
    """

    template: optax.GradientTransformation
    layout: StateLayout
    shape: tuple[int, int, int]
    gradients: Callable[..., WorkerGradients]
    seal: Callable[..., Any] | None
    apply: Callable[..., Stepped]
    nothing: Callable[[], Own]
    fingerprint: Fingerprint
    batch: Any


def compile_programs(
    loss_fn: Callable,
    make_optimizer: MakeOptimizer,
    mesh: Mesh,
    axis_name: AxisName,
    params,
    batch,
    *,
    slots: int,
    delay: bool,
    norm_limit: float | None,
    param_specs,
    batch_specs,
    **options,
) -> Programs:
    """Compiles everything for parameters and a batch, or for their shapes."""
    params = checks.shapes_of("parameter", params)  # what is compiled keeps no array
    around = Delayed if delay else Opened
    template = make_optimizer(around(Received(axis_name, norm_limit=norm_limit)))
    layout = find_layout(template, params, mesh, axis_name, param_specs)
    sharded = sharded_axes(unboxed(layout.params))
    shard_axes = tuple(name for name in mesh.axis_names if name in sharded)  # the state's order
    number = int(np.prod([mesh.shape[name] for name in shard_axes], dtype=int))
    state = jax.eval_shape(functools.partial(worker_axis.init_stacked, template, layout), params)
    shape = number, slots, pending_state(state).pending.shape[-1]
    gradients_of = stacked_gradients(
        loss_fn,
        mesh,
        axis_name,
        manual=True,
        stateful=False,
        param_specs=param_specs,
        batch_specs=batch_specs,
        **options,
    )

    def given(packets, slot) -> optax.GradientTransformation:
        return make_optimizer(around(Received(axis_name, packets, slot, shard_axes, norm_limit)))

    def with_arrived(updates, state, params=None, **extra_args) -> Any:
        arrived = extra_args.pop("arrived")
        return given(*arrived).update(updates, state, params, **extra_args)

    opening = optax.GradientTransformationExtraArgs(template.init, with_arrived)
    sealing = make_optimizer(Sealed(Received(axis_name, norm_limit=norm_limit)))

    def gradients(params, opt_state, batch):
        params = shards.copies(params, mesh, axis_name, layout.params)
        local = local_parameters(params, opt_state)
        return gradients_of(local, (), batch, params_are_replicated=False)

    def update(tx, own: Own, opt_state, params, extra_args):
        alone = {PARTICIPATES: own.participates, MESSAGE_WEIGHT: own.weight}
        return worker_axis.update_stacked(
            tx, layout, own.gradients, opt_state, params, extra_args, alone
        )

    def seal(own, opt_state, params):
        _, new = update(sealing, own, opt_state, params, {})
        return jax.tree.map(
            lambda x, y, own: x if own else y, new, opt_state, layout.varies_over_workers
        )

    def apply(own, params, opt_state, arrived):
        extra = {"arrived": jax.tree.map(jnp.asarray, arrived)}
        updates, opt_state = update(opening, own, opt_state, params, extra)
        params = shards.constrain_sharding(
            optax.apply_updates(params, updates), mesh, layout.params
        )
        metrics = exchange_metrics(opt_state)
        assert metrics is not None
        return Stepped(params, opt_state, metrics)

    def nothing() -> Own:
        zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), params)
        zeros = shards.constrain_sharding(
            zeros, mesh, shards.stacked_specs(layout.params, axis_name)
        )
        return Own(zeros, jnp.zeros(1, bool), jnp.ones(1))

    def open_packets(params, opt_state, arrived):
        return apply(nothing(), params, opt_state, arrived)

    of_batch = shards.batch_leaf_specs(batch, batch_specs, mesh, axis_name)
    arrived = Arrived(jax.ShapeDtypeStruct(shape, jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32))

    def lowered(fn, args, specs, donated):
        shapes = jax.eval_shape(lambda *x: x, *args)
        placed = shards.shardings(mesh, jax.tree.broadcast(tuple(specs), shapes))
        shapes = jax.tree.map(lambda x, y: x.update(sharding=y), shapes, placed)
        return jax.jit(fn, donate_argnums=donated).lower(*shapes), placed

    def compiled(program, placed):
        program = program.compile()
        return lambda *args: program(*to_devices(args, placed))

    shared, of_shared = (params, state, arrived), (layout.params, layout.state, P())
    stacked = jax.eval_shape(gradients, params, state, batch).gradients
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    own = Own(stacked, jax.ShapeDtypeStruct((1,), bool), one)
    of_own = Own(shards.stacked_specs(layout.params, axis_name), P(axis_name), P(axis_name))
    if delay:
        applying = lowered(apply, (own, *shared), (of_own, *of_shared), (1, 2))
        sealed = None
    else:
        applying = lowered(open_packets, shared, of_shared, (0, 1))
        specs = of_own, layout.state, layout.params
        sealed = compiled(*lowered(seal, (own, state, params), specs, (1,)))
    with_state = (layout.params, layout.state, of_batch)
    found = compiled(*lowered(gradients, (params, state, batch), with_state, ()))
    applied = compiled(*applying)
    fingerprint = Fingerprint(_device(mesh), records.sha256(applying[0].as_text().encode()))
    return Programs(
        template,
        layout,
        shape,
        found,
        sealed,
        applied,
        jax.jit(nothing),
        fingerprint,
        shapes_of(batch),
    )


def shapes_of(tree) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def pending_state(opt_state) -> PendingState:
    """What is under way, in the state of the one decoupled momentum.

    Raises:
      ValueError: the optimizer has none, or several; it exchanges on some calls only; or its
        momentum has another basis in each step, so that a worker that jumps to a snapshot could not
        go on with its own.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=shards.is_momentum)
    found = [x for x in nodes if shards.is_momentum(x)]
    if len(found) != 1 or not isinstance(found[0].exchange, PendingState):
        raise ValueError(
            f"a swarm needs an optimizer with one decoupled momentum, but this one has "
            f"{len(found)}, of another exchange. Make it with the exchange that it is given, as in "
            "lambda exchange: demo_optax.demo_scaled(3e-3, exchange=exchange)."
        )
    wrapped = [x for x in jax.tree.leaves(opt_state, is_leaf=_accumulates) if _accumulates(x)]
    if wrapped:
        raise ValueError(
            f"the optimizer has a {type(wrapped[0]).__name__}, but a swarm's step is one exchange: "
            "use microbatches=..., or make each worker's batch larger."
        )
    if is_redrawn(found[0].momentum_format.transform):
        raise ValueError(
            f"transform={found[0].momentum_format.transform!r} gives the momentum another basis in "
            'each step, but a worker that was away skips steps: use "dct" or "randomized-dct".'
        )
    return found[0].exchange


def _accumulates(state) -> bool:
    return isinstance(state, optax.MultiStepsState | LocalStepsState)


def _device(mesh: Mesh) -> str:
    return f"{mesh.devices.flat[0].platform}, jax {jax.__version__}, mesh {dict(mesh.shape)}"
