"""The programs of a swarm's step, compiled once: the gradient, `send` and `apply`.

Between the last two the host moves bytes. Every worker applies the packets of a step with the same
program, in time or when it catches up, so that the parameters are equal to the last bit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from demo_optax._src import (
    arrays,
    axes,
    checks,
    metrics,
    momentum,
    participation,
    rounds,
    transport,
)
from demo_optax._src.axes import PARAM_SPECS, sharded_axes
from demo_optax._src.compression.transforms import is_redrawn
from demo_optax._src.exchange import Delayed, Outbox
from demo_optax._src.exchange.protocol import EMPTY
from demo_optax._src.parallel import shards, worker_axis
from demo_optax._src.parallel.gradients import WorkerGradients, stacked_gradients
from demo_optax._src.parallel.worker_axis import find_layout
from demo_optax._src.swarm import records
from demo_optax._src.swarm.replicated_state import to_devices


class Programs(NamedTuple):
    """The compiled programs of a worker, which is the only one on its mesh.

    ``gradients(params, opt_state, batch)`` returns the gradients, stacked as one worker's.
    ``send(params, opt_state, gradients, gradient_norm, weight, slot)`` returns an outbox and a new
    state. ``step_alone`` with the same arguments returns the state after a step inside a round.
    ``apply(params, opt_state, outbox, packets, slot)`` returns new parameters, a new state and the
    metrics of the exchange. In its packets zeros stand for those that do not count.
    """

    gradients: Callable[..., WorkerGradients]
    step_alone: Any  # None without rounds
    send: Callable[..., tuple[Outbox, Any]]
    apply: Callable[..., tuple[Any, Any, Any]]
    init: Callable[[Any], Any]  # returns the state for parameters
    shardings: tuple[Any, Any]  # of parameters and state, which have no axis of workers
    shape: tuple[int, int, int]  # (shards, slots, words) of the packets
    empty_outbox: Outbox  # of a worker that sent nothing
    fingerprint: dict[str, str]  # the kind of device, and the SHA-256 of the optimizer's text
    division: str  # of the parameters into shards

    @property
    def packet_bytes(self) -> int:
        """The bytes of a worker's packet, in which are those of all its shards."""
        return 4 * self.shape[0] * self.shape[-1]


def compile_programs(
    loss_fn, tx, mesh: Mesh, axis_name: axes.AxisName, params, batch, slots: int, options: dict
) -> Programs:
    """Compiles the programs for parameters and a batch, or for their shapes."""
    params = checks.shapes_of("parameter", params)  # so that the programs keep no array
    device = mesh.local_devices[0]
    text = text_of(tx, params, slots, device, mesh.axis_names)
    layout = find_layout(tx, params, mesh, (), options["param_specs"])
    init = functools.partial(worker_axis.init_stacked, tx, layout)
    state = jax.eval_shape(init, params)
    sharded = sharded_axes(arrays.unboxed(layout.params))
    shard_axes = tuple(name for name in mesh.axis_names if name in sharded)
    over_shards = P(shard_axes or None)
    progress = arrays.unboxed(layout.params) if tx.steps_per_round else ()
    outbox_specs: Any = Outbox._make((over_shards, over_shards, P(), P(), P(), progress))
    made_equal = functools.partial(
        shards.made_equal, specs=arrays.unboxed(layout.params), may_have_copies=True, axis_name=()
    )
    gradients_of = stacked_gradients(
        loss_fn, mesh, axis_name, manual=True, stateful=False, **options
    )

    def gradients(params, opt_state, batch):
        return gradients_of(rounds.local_parameters(params, opt_state), (), (), batch)

    def send(params, opt_state, gradients, gradient_norm, weight, slot, **ends_round):
        extra = {"worker": slot, momentum.MESSAGE_WEIGHT: weight[0]}
        extra[participation.PARTICIPATES] = jnp.isfinite(gradient_norm[0])

        def on_device(gradient, opt_state, params, extra):
            extra |= ends_round
            outbox, new = _on_device(tx, tx.send, layout, gradient, opt_state, params, **extra)
            packets, message = jax.tree.map(lambda x: x[None], (outbox.packets, outbox.message))
            if tx.steps_per_round:
                outbox = outbox._replace(progress=made_equal(outbox.progress))
            return outbox._replace(packets=packets, message=message), new

        specs = layout.params, layout.state, layout.params, P()
        return jax.shard_map(
            on_device, mesh=mesh, in_specs=specs, out_specs=(outbox_specs, layout.state)
        )(_first(gradients), opt_state, params, extra)

    def step_alone(*args):
        return send(*args, ends_round=False)[1]

    def end_round(*args):
        return send(*args, ends_round=True) if tx.steps_per_round else send(*args)

    def apply(params, opt_state, outbox, packets, slot):
        def on_device(params, opt_state, outbox, packets, slot):
            own, message = _first((outbox.packets, outbox.message))
            outbox = outbox._replace(packets=own, message=message)

            def half(like, state, params, **options):
                del like
                return tx.apply(packets[0], outbox, state, params, worker=slot, **options)

            updates, new = _on_device(tx, half, layout, params, opt_state, params)
            leaves = jax.tree.leaves(made_equal(updates))
            updates = jax.tree.unflatten(jax.tree.structure(params), leaves)
            return updates, new

        specs = layout.params, layout.state, outbox_specs, over_shards, P()
        updates, opt_state = jax.shard_map(
            on_device, mesh=mesh, in_specs=specs, out_specs=(layout.params, layout.state)
        )(params, opt_state, outbox, packets, slot)
        params = optax.apply_updates(params, updates)
        params = shards.constrain_sharding(params, mesh, layout.params)
        return params, opt_state, metrics.exchange_metrics(opt_state)

    def compiled(fn, args, specs, donated) -> tuple[Callable, Any]:
        """Compiles a function of parameters, state and other arguments.

        The shapes of its results are returned, too.
        """
        shapes = jax.eval_shape(lambda *x: x, params, state, *args)
        specs = jax.tree.broadcast((layout.params, layout.state, *specs), shapes)
        placed = shards.shardings(mesh, specs)
        shapes = jax.tree.map(lambda x, y: x.update(sharding=y), shapes, placed)
        traced = jax.jit(fn, donate_argnums=donated).trace(*shapes)
        program = traced.lower().compile()
        results = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)
        return lambda *args: program(*to_devices(args, placed)), results

    worker, slot = jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    batch_leaf_specs = shards.batch_leaf_specs(batch, options["batch_specs"], mesh, axis_name)
    computing, result = compiled(gradients, (batch,), (batch_leaf_specs,), ())
    sent = result.gradients, worker, worker, slot
    stacked = shards.stacked_specs(layout.params, axis_name)
    sending: Any = sent, (stacked, P(axis_name), P(axis_name), P()), (1,)
    alone = compiled(step_alone, *sending)[0] if tx.steps_per_round else None
    sending, (outbox, _) = compiled(end_round, *sending)
    shape = len(outbox.packets), slots, outbox.packets.shape[-1]
    packets = jax.ShapeDtypeStruct(shape, jnp.uint32)
    applying, _ = compiled(apply, (outbox, packets, slot), (outbox_specs, over_shards, P()), (0, 1))
    empty: Any = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), outbox)
    empty = empty._replace(status=np.array(EMPTY, np.int32))
    kind = f"{device.platform}, jax {jax.__version__}"
    fingerprint = {"device": kind, "optimizer": records.sha256(text.encode())}
    division = division_of(mesh, params, layout.params)
    placed = shards.shardings(mesh, (layout.params, layout.state))
    programs = computing, alone, sending, applying, init
    return Programs(*programs, placed, shape, empty, fingerprint, division)


def text_of(tx, params, slots: int, device, axis_names: tuple[str, ...]) -> str:
    """Returns the text of `send` and `apply` for one device, whatever mesh a worker has.

    The axes have the size 1 here, so that a link may name them. The text is that of the device's
    platform, which need not be JAX's default.

    Raises:
      ValueError: the optimizer needs an argument that the workers of a swarm do not have.
    """
    params = arrays.unboxed(params)

    def step(params, state, slot, weight, participates, ends_round):
        extra: dict = {momentum.MESSAGE_WEIGHT: weight, participation.PARTICIPATES: participates}
        extra |= {"ends_round": ends_round} if tx.steps_per_round else {}
        outbox, state = tx.send(params, state, params, worker=slot, **extra)
        packets = jnp.broadcast_to(outbox.packet, (slots, *outbox.packet.shape))
        return tx.apply(packets, outbox, state, params, worker=slot)

    for name in axis_names:
        step = jax.vmap(step, None, None, axis_name=name, axis_size=1)
    scalars = [jax.ShapeDtypeStruct((), x) for x in (jnp.int32, jnp.float32, bool, bool)]
    try:
        state = jax.eval_shape(tx.init, params)
        with jax.set_mesh(Mesh(np.array([device]), ("one device",))):
            traced = jax.jit(step).trace(params, state, *scalars)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"a link of the optimizer needs an argument that a swarm cannot give: {error}. Each "
            "worker has a loss of its own, and all must make the same update: leave out links such "
            "as optax.contrib.reduce_on_plateau, and lower the rate by a schedule."
        ) from error
    return traced.lower(lowering_platforms=(device.platform,)).as_text()


def division_of(mesh: Mesh, params, specs) -> str:
    """Describes which part of each parameter is in which shard, without naming axes or devices."""
    names = sharded_axes(arrays.unboxed(specs))
    first = tuple(slice(None if name in names else 1) for name in mesh.axis_names)
    devices = mesh.devices[first].flatten()
    if (number := len(devices)) == 1:
        return "1"
    leaves = zip(*map(jax.tree.leaves, arrays.unboxed((params, specs))), strict=True)
    of = [NamedSharding(mesh, spec).devices_indices_map(x.shape) for x, spec in leaves]
    parts = [[part[device] for device in devices] for part in of]
    return f"{number} (divided as {records.sha256(str(parts).encode())[:8]})"


def _on_device(tx, half: Callable, layout, gradient, state, params, **options) -> tuple[Any, Any]:
    """Runs half an update on one device, whose parameters may be in Flax's boxes."""
    half_tx = optax.GradientTransformationExtraArgs(tx.init, half)
    inside = arrays.boxed_inside(half_tx, layout.params)
    options[PARAM_SPECS], gradient, params = arrays.unboxed((layout.params, gradient, params))
    result, new = inside.update(gradient, state, params, **options)
    new = shards.merge_shard_metrics(new, state, sharded_axes(options[PARAM_SPECS]))
    return result, shards.made_equal(new, layout.state, layout.may_have_copies, ())


def _first(stacked) -> Any:
    return jax.tree.map(lambda x: x[0], stacked)


def require_optimizer(tx) -> None:
    """Refuses optimizers that cannot train in a swarm.

    Raises:
      ValueError: ``tx`` has no `send` and `apply`, exchanges over an axis or with a delay of its
        own, or draws a new basis for its momentum in each step, so that a worker that jumps to a
        snapshot could not go on with its own momentum.
    """
    if not isinstance(tx, transport.SplitTransformation):
        is_wrapper = isinstance(tx, optax.GradientTransformation)
        kind = "optax.chain or another wrapper" if is_wrapper else repr(tx)
        raise ValueError(
            f"a swarm needs an optimizer with send and apply, but {kind} was given: pass one of "
            "this library itself, as in SwarmWorker(loss_fn, demo_optax.demo_scaled(3e-3), mesh, "
            "member), and no function that makes it. Links in front of the exchange go into "
            "precondition=, those behind it into decoupled(base, ...), where base is any optax "
            "chain."
        )
    is_delayed = isinstance(tx.exchange, Delayed)
    if not is_delayed:
        transport.require_carried(tx.exchange)
    if is_delayed or tx.exchange.axis_name is not None:
        raise ValueError(
            f"the optimizer has the exchange {tx.exchange}, but the packets of a swarm travel over "
            "the host: leave the axis out, as in AllGather(norm_limit=10), and give a delay to "
            "SwarmWorker(..., delay=1)."
        )
    if is_redrawn(tx.compression.transform):
        raise ValueError(
            f"transform={tx.compression.transform!r} gives the momentum another basis in each "
            'step, but a worker that was away skips steps: use "dct" or "randomized-dct".'
        )
