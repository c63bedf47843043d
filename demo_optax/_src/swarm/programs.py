"""The programs of a swarm's step, compiled once: the gradient, `send` and `apply`.

Between the last two the host moves bytes; nothing in the programs waits for the network. Every
worker applies the packets of a step by the same program, whether it takes part or replays the step
later, so that the parameters are equal to the last bit.
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

from demo_optax._src import checks
from demo_optax._src.arrays import boxed_inside, unboxed
from demo_optax._src.axes import PARAM_SPECS, AxisName, sharded_axes
from demo_optax._src.compression.transforms import is_redrawn
from demo_optax._src.exchange import Delayed, Outbox
from demo_optax._src.halves import SplitTransformation, require_halves
from demo_optax._src.metrics import ExchangeMetrics, exchange_metrics
from demo_optax._src.momentum import EMPTY, MESSAGE_WEIGHT
from demo_optax._src.parallel import shards, worker_axis
from demo_optax._src.parallel.gradients import stacked_gradients
from demo_optax._src.parallel.layout import StateLayout, find_layout
from demo_optax._src.parallel.worker_gradient import WorkerGradients
from demo_optax._src.participation import PARTICIPATES
from demo_optax._src.rounds import LocalStepsState, local_parameters
from demo_optax._src.swarm import records
from demo_optax._src.swarm.lead import to_devices


class Contribution(NamedTuple):
    """What a worker brings to a step.

    Attributes:
      gradients: stacked, ``(1, *shape)``.
      gradient_norm: float32 ``(1,)``; the worker takes part if it is finite.
      weight: float32 ``(1,)``, the weight of its message in the mean.
      slot: int32 scalar, the row of its packet.
    """

    gradients: Any
    gradient_norm: Any
    weight: Any
    slot: Any


class Stepped(NamedTuple):
    """Parameters, optimizer state, and the metrics of the exchange."""

    params: Any
    opt_state: Any
    exchange: ExchangeMetrics


class Fingerprint(NamedTuple):
    """Identifies the programs that build and apply the packets.

    Attributes:
      device: the kind of device, JAX's version and the mesh: what may differ in a swarm, and
        changes the programs' text.
      program: SHA-256 of their text.
    """

    device: str
    program: str


class Programs(NamedTuple):
    """The compiled programs, and what they need.

    Attributes:
      layout: of parameters and state. The worker is the only one on its mesh, so that its state has
        no axis of workers.
      shape: ``(shards, slots, words)`` of the uint32 packets that `apply` gets, with zeros for a
        packet that does not count.
      gradients: ``gradients(params, opt_state, batch) -> WorkerGradients``.
      send: ``send(contribution, opt_state, params) -> (outbox, opt_state)``.
      apply: ``apply(params, opt_state, outbox, packets, slot) -> Stepped``.
      empty_outbox: the outbox of a worker that sent nothing.
      fingerprint: of ``send`` and ``apply``.
      batch: shapes and dtypes of a batch.
    """

    layout: StateLayout
    shape: tuple[int, int, int]
    gradients: Callable[..., WorkerGradients]
    send: Callable[..., tuple[Outbox, Any]]
    apply: Callable[..., Stepped]
    empty_outbox: Outbox
    fingerprint: Fingerprint
    batch: Any


def compile_programs(
    loss_fn: Callable,
    tx: SplitTransformation,
    mesh: Mesh,
    axis_name: AxisName,
    params,
    batch,
    *,
    slots: int,
    param_specs,
    batch_specs,
    **options,
) -> Programs:
    """Compiles everything for parameters and a batch, or for their shapes."""
    params = checks.shapes_of("parameter", params)  # what is compiled keeps no array
    layout = find_layout(tx, params, mesh, (), param_specs)
    state = jax.eval_shape(functools.partial(worker_axis.init_stacked, tx, layout), params)
    if isinstance(state, LocalStepsState):
        raise ValueError(
            "local_steps(...) exchanges on some steps only, but a step of a swarm is one exchange: "
            "pass its outer optimizer alone, and use microbatches=... or a larger batch."
        )
    sharded = sharded_axes(unboxed(layout.params))
    shard_axes = tuple(name for name in mesh.axis_names if name in sharded)
    over_shards = P(shard_axes or None)
    outbox_specs: Any = Outbox._make((over_shards, over_shards, P(), P()))
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

    def gradients(params, opt_state, batch):
        local = shards.copies(local_parameters(params, opt_state), mesh, axis_name, layout.params)
        return gradients_of(local, (), batch, params_are_replicated=False)

    def send(contribution: Contribution, opt_state, params):
        gradient = _first(contribution.gradients)
        options = {
            "worker": contribution.slot,
            PARTICIPATES: jnp.isfinite(contribution.gradient_norm[0]),
            MESSAGE_WEIGHT: contribution.weight[0],
        }

        def on_device(gradient, opt_state, params, options):
            outbox, new = _on_device(tx, tx.send, layout, gradient, opt_state, params, **options)
            packets, message = jax.tree.map(lambda x: x[None], (outbox.packets, outbox.message))
            return outbox._replace(packets=packets, message=message), new

        specs = layout.params, layout.state, layout.params, P()
        return jax.shard_map(
            on_device, mesh=mesh, in_specs=specs, out_specs=(outbox_specs, layout.state)
        )(gradient, opt_state, params, options)

    def apply(params, opt_state, outbox, packets, slot):
        def on_device(params, opt_state, outbox, packets, slot):
            own, message = _first((outbox.packets, outbox.message))
            outbox = outbox._replace(packets=own, message=message)

            def half(like, state, params, **options):
                del like
                return tx.apply(packets[0], outbox, state, params, worker=slot, **options)

            updates, new = _on_device(tx, half, layout, params, opt_state, params)
            updates = jax.tree.map(shards.from_first, updates, layout.update_replicated_axes)
            structure: Any = jax.tree.structure(params)
            updates = structure.unflatten(jax.tree.leaves(updates))
            return updates, shards.merge_shard_metrics(new, opt_state, sharded)

        updates, opt_state = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(layout.params, layout.state, outbox_specs, over_shards, P()),
            out_specs=(layout.params, layout.state),
        )(params, opt_state, outbox, packets, slot)
        params = optax.apply_updates(params, updates)
        metrics = exchange_metrics(opt_state)
        assert metrics is not None
        params = shards.constrain_sharding(params, mesh, layout.params)
        return Stepped(params, opt_state, metrics)

    def lowered(fn, args, specs, donated):
        shapes = jax.eval_shape(lambda *x: x, *args)
        placed = shards.shardings(mesh, jax.tree.broadcast(tuple(specs), shapes))
        shapes = jax.tree.map(lambda x, y: x.update(sharding=y), shapes, placed)
        return jax.jit(fn, donate_argnums=donated).lower(*shapes), placed

    def compiled(program, placed):
        program = program.compile()
        return lambda *args: program(*to_devices(args, placed))

    own, slot = jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    found = jax.eval_shape(gradients, params, state, batch)
    contribution = Contribution(found.gradients, own, own, slot)
    stacked = shards.stacked_specs(layout.params, axis_name)
    contribution_specs = Contribution(stacked, P(axis_name), P(axis_name), P())
    outbox, _ = jax.eval_shape(send, contribution, state, params)
    shape = len(outbox.packets), slots, outbox.packets.shape[-1]
    packets = jax.ShapeDtypeStruct(shape, jnp.uint32)
    batch_leaf_specs = shards.batch_leaf_specs(batch, batch_specs, mesh, axis_name)
    shared, shared_specs = (params, state), (layout.params, layout.state)
    applying = lowered(
        apply,
        (*shared, outbox, packets, slot),
        (*shared_specs, outbox_specs, over_shards, P()),
        (0, 1),
    )
    sending = lowered(
        send, (contribution, *shared[::-1]), (contribution_specs, *shared_specs[::-1]), (1,)
    )
    computing = lowered(gradients, (*shared, batch), (*shared_specs, batch_leaf_specs), ())
    empty: Any = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), outbox)
    text = sending[0].as_text() + applying[0].as_text()
    return Programs(
        layout,
        shape,
        compiled(*computing),
        compiled(*sending),
        compiled(*applying),
        empty._replace(step=np.array(EMPTY, np.int32)),
        Fingerprint(_device(mesh), records.sha256(text.encode())),
        shapes_of(batch),
    )


def _on_device(
    tx, half: Callable, layout: StateLayout, gradient, state, params, **options
) -> tuple[Any, Any]:
    """A half of an update on one device, whose parameters may be in Flax's boxes."""
    specs = unboxed(layout.params)
    inside = boxed_inside(optax.GradientTransformationExtraArgs(tx.init, half), layout.params)
    gradient, params = unboxed((gradient, params))
    result: Any
    result, new = inside.update(gradient, state, params, **options, **{PARAM_SPECS: specs})
    return result, jax.tree.map(shards.from_first, new, layout.state_replicated_axes)


def _first(stacked) -> Any:
    return jax.tree.map(lambda x: x[0], stacked)


def shapes_of(tree) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def require_optimizer(tx) -> None:
    """Refuses optimizers that cannot train in a swarm.

    Raises:
      ValueError: ``tx`` has no `send` and `apply`; it exchanges over an axis, or with a delay of
        its own; or its momentum has another basis in each step, so that a worker that jumps to a
        snapshot could not go on with its own.
    """
    if not isinstance(tx, SplitTransformation):
        is_wrapper = isinstance(tx, optax.GradientTransformation)
        given = "optax.chain or another wrapper" if is_wrapper else repr(tx)
        raise ValueError(
            f"a swarm needs an optimizer with send and apply, but {given} was given: pass one of "
            "this library itself, as in SwarmWorker(loss_fn, demo_optax.demo_scaled(3e-3), mesh, "
            "member), and no function that makes it. Links in front of the exchange go into "
            "precondition=, those behind it into decoupled(base, ...), where base is any optax "
            "chain."
        )
    if isinstance(tx.exchange, Delayed):
        raise ValueError(
            f"the optimizer has the exchange {tx.exchange}, but a swarm delays by itself: give "
            "SwarmWorker(..., delay=1), and leave Delayed out."
        )
    require_halves(tx.exchange)
    if tx.exchange.axis_name is not None:
        raise ValueError(
            f"the optimizer exchanges over {tx.exchange.axis_name!r}, but the packets of a "
            "swarm travel over the host: leave the axis out, as in AllGather(norm_limit=10)."
        )
    if is_redrawn(tx.compression.transform):
        raise ValueError(
            f"transform={tx.compression.transform!r} gives the momentum another basis in each "
            'step, but a worker that was away skips steps: use "dct" or "randomized-dct".'
        )


def _device(mesh: Mesh) -> str:
    return f"{mesh.devices.flat[0].platform}, jax {jax.__version__}, mesh {dict(mesh.shape)}"
