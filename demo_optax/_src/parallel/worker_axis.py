"""The state of all workers: which of it differs between them, where it lies, and its update.

A momentum that differs between workers must not be typed as replicated, since a checkpoint would
then mix the parts of several workers. Outside the step such leaves have a leading axis with one
entry per worker, sharded over the workers.

The types of states say which leaves these are, without any update being traced. A state of ours
names its local fields, and a state that exchanges is marked by ``exchanges``. In the tuples of
``optax.chain``, all that stands before an exchange is local, since it sees local gradients; what
follows it is shared. JAX's types refuse any leaf for which this is wrong, since it would drift
apart unseen.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, keystr
from jax.typing import ArrayLike

from demo_optax._src import axes, checks, participation
from demo_optax._src.arrays import IntScalar, boxed_inside, unboxed, zero_unless
from demo_optax._src.axes import PARAM_SPECS, AxisName, sharded_axes
from demo_optax._src.compression.settings import KNOWN, require_words
from demo_optax._src.exchange.collectives import declare_equal
from demo_optax._src.local_state import LocalStepsState, nodes
from demo_optax._src.mean_over_workers import MeanOverWorkersState
from demo_optax._src.momentum import DecoupledMomentumState
from demo_optax._src.parallel import shards
from demo_optax._src.participation import PARTICIPATES


@dataclasses.dataclass(frozen=True, eq=False)
class StateLayout:
    """Holds the sharding of parameters and optimizer state on a mesh.

    Attributes:
      params, state: PartitionSpecs of the parameters and of the state.
      param_shapes, state_shapes: shapes of the parameters, and of the state of all workers.
      varies_over_workers: bools, whether each leaf of the state differs between workers.
      may_have_copies: bools, whether several devices of a worker may hold copies of each leaf.
      settings: the settings that the words in the state stand for, by the paths of these leaves.
    """

    mesh: Mesh | AbstractMesh
    axis_name: AxisName
    params: Any
    param_shapes: Any
    state: Any
    state_shapes: Any
    varies_over_workers: Any
    may_have_copies: Any
    settings: dict[str, Any]


def state_specs(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """Returns PartitionSpecs of the state that `init_opt_state` makes, for any optax chain.

    Args:
      tx: any optax transformation that exchanges over ``axis_name``.
      params: arrays or shapes of the parameters.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker, a tree or a
        prefix of one.

    Returns:
      A tree like the state. A leaf that differs between workers has a leading worker axis, so
      its spec is ``P(axis_name, ...)``. If its path ends with the path of a parameter, the rest of
      the spec is that of the parameter, without the dimensions that the leaf has reduced to 1.

    Raises:
      ValueError: the mesh has no such axis; ``param_specs`` do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo_adamw(1e-3, axis_name="data")
      >>> momentum, (rms, *_) = state_specs(tx, {"w": jnp.ones((4, 4))}, mesh)
      >>> momentum.momentum, rms.nu
      ({'w': P('data',)}, {'w': P()})
    """
    return find_layout(tx, params, mesh, axis_name, param_specs).state


def state_shardings(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """Returns NamedShardings of the state that `init_opt_state` makes.

    Arguments and errors are those of `state_specs`.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> state_shardings(tx, {"w": jnp.ones((4, 4))}, mesh)[0].momentum["w"].spec
      P('data',)
    """
    return shards.shardings(mesh, state_specs(tx, params, mesh, axis_name, param_specs))


def find_layout(tx, params, mesh, axis_name: AxisName, param_specs) -> StateLayout:
    """Returns the layout for arrays or shapes of the whole parameters."""
    checks.require_unwrapped(tx)
    checks.real_leaves("parameter", params)
    shards.num_workers(mesh, axis_name)
    params = checks.shapes_of("parameter", params)
    specs = shards.leaf_specs(params, param_specs, mesh, axis_name)
    inner, init = unboxed(specs), boxed_inside(tx, specs).init
    parts = jax.tree.map(
        lambda x, spec: x.update(shape=NamedSharding(mesh, spec).shard_shape(x.shape)),
        unboxed(params),
        inner,
    )
    trace = jax.make_jaxpr(init, return_shape=True)
    traced = []
    # The shares of owners depend on the size of an axis.
    init_worker = jax.shard_map(
        lambda: traced.append(trace(jax.tree.map(jnp.zeros_like, parts))),
        mesh=mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh,
        in_specs=(),
        out_specs=P(),
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in context
        jax.eval_shape(init_worker)
    program, made = traced[-1]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
    # Alone, a worker has no axis along which its state could differ.
    alone = jax.tree.map(lambda _: False, shapes)
    is_local = local_leaves(shapes) if axes.names(axis_name) else alone

    def of_all_workers(x, spec, is_local):
        shape = (1,) * is_local + x.shape
        pairs = zip(shape, shards.counts(shape, spec, mesh), strict=True)
        return x.update(shape=tuple(map(math.prod, pairs)))

    state, may_have_copies = _state_specs(shapes, is_local, parts, inner, axis_name)
    return StateLayout(
        mesh=mesh,
        axis_name=axis_name,
        params=specs,
        param_shapes=params,
        state=state,
        state_shapes=jax.tree.map(of_all_workers, shapes, state, is_local),
        varies_over_workers=is_local,
        may_have_copies=may_have_copies,
        settings=_settings_in(program, shapes),
    )


def _settings_in(program, shapes) -> dict[str, Any]:
    """Returns the settings of the words in a state, which are constants of its traced ``init``."""
    paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
    wanted = [path[-1:] == (GetAttrKey("format"),) for path in paths]
    kept, _ = partial_eval.dce_jaxpr(program.jaxpr, wanted)
    with jax.ensure_compile_time_eval():
        words = core.jaxpr_as_fun(core.ClosedJaxpr(kept, program.consts))()
    of_words = [KNOWN[int(np.ravel(word)[0])] for word in words]
    return dict(zip(map(keystr, itertools.compress(paths, wanted)), of_words, strict=True))


_DECIDE_ALONE = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)


def local_leaves(state, fields: tuple[str, ...] = ("local_fields",)) -> Any:
    """Tells which leaves of a worker's state differ between workers.

    ``fields`` are the attributes by which a state's type names local fields.
    """

    def mark(node):
        if type(node) in _DECIDE_ALONE and _exchanges(node):
            raise ValueError(
                f"{type(node).__name__} is a state of optax.MultiSteps, apply_if_finite, "
                "conditionally_transform or conditionally_mask, which let each worker decide alone "
                "whether it takes part in a step: accumulate with "
                "make_train_step(microbatches=...) or demo_optax.multi_steps instead, and leave "
                "conditions on the gradient out. Workers whose gradient is not finite are left out "
                "already."
            )
        local = {name for key in fields for name in getattr(type(node), key, ())}
        if local:
            marks = [
                jax.tree.broadcast(True, x) if name in local else local_leaves(x, fields)
                for name, x in zip(node._fields, node, strict=True)
            ]
            return node._make(marks)
        if type(node) is tuple:
            exchanging = [i for i, part in enumerate(node) if _exchanges(part)]
            in_front = {*range(max(exchanging, default=0))} - {*exchanging}
            return tuple(
                jax.tree.broadcast(True, part) if i in in_front else local_leaves(part, fields)
                for i, part in enumerate(node)
            )
        return jax.tree.broadcast(False, node)

    return jax.tree.map(
        mark,
        state,
        is_leaf=lambda node: (
            any(hasattr(type(node), key) for key in fields) or type(node) in (tuple, *_DECIDE_ALONE)
        ),
    )


def _exchanges(state) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(type(node), "exchanges"))
    return any(hasattr(type(node), "exchanges") for node in nodes)


def _state_specs(shapes, is_local, params, param_specs, axis_name: AxisName):
    """Returns the spec of each leaf of a state, and whether a worker's devices may hold copies.

    ``shapes`` and ``params`` are those of one device's shards.
    """
    sharded, leaf_specs = sharded_axes(param_specs), jax.tree.leaves(param_specs)
    of_path = {
        path: (x.shape, spec)
        for (path, x), spec in zip(jax.tree.leaves_with_path(params), leaf_specs, strict=True)
    }
    of_devices = {  # what belongs to a device and not to a parameter
        (*path, GetAttrKey(name))
        for path, node in jax.tree.leaves_with_path(shapes, is_leaf=shards.is_momentum)
        if shards.is_momentum(node)
        for name in ("exchange", "pending")
    }

    def find(path, leaf, is_local) -> tuple[P, bool]:
        front = (axis_name,) * is_local
        if any(path[:end] in of_devices for end in range(len(path) + 1)):
            return P(*front, *[sharded] * bool(leaf.ndim and sharded)), True
        for start in range(len(path) + 1):
            shape, spec = of_path.get(path[start:], ((), None))
            if spec is not None and len(spec) <= leaf.ndim:
                was_whole = shape if len(shape) == leaf.ndim else leaf.shape
                sizes = zip(spec, leaf.shape, was_whole, strict=False)
                entries = [None if n == 1 < whole else entry for entry, n, whole in sizes]
                # Without trailing Nones, as in results, ``jax.jit`` finds the same sharding again.
                while entries and entries[-1] is None:
                    entries.pop()
                return P(*front, *entries), True
        return P(*front), leaf.ndim == 0 and not jnp.issubdtype(leaf.dtype, jnp.inexact)

    found = jax.tree.map_with_path(find, shapes, is_local)
    return tuple(jax.tree.map(lambda _, pair, i=i: pair[i], shapes, found) for i in (0, 1))


class Stacked(optax.GradientTransformationExtraArgs):
    """Marks a transformation that `stack_workers` made."""

    @property
    def state_shardings(self) -> Callable:
        return self.update.state_shardings  # type: ignore[attr-defined]  # in copies, too

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __iter__(self):
        raise TypeError(_INSIDE.format("another optax transformation, such as optax.chain"))


_INSIDE = (
    "demo_optax.stack_workers(...) stands inside {}, which would see stacked gradients (workers, "
    "*shape): leave it outermost, and chain, mask, partition and clip inside of it, as in "
    "stack_workers(optax.chain(...), mesh)."
)


def stack_workers(
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    param_specs=None,
) -> optax.GradientTransformationExtraArgs:
    """Gives ``tx`` a state whose worker-local leaves carry a leading worker axis.

    The result must be the outermost transformation. ``init`` places the state on the mesh.
    ``update``, in any ``jax.jit``, takes *stacked* gradients ``(workers, *shape)`` from
    `worker_gradients`. It runs the optimizer inside a ``jax.shard_map``, where each device has its
    own shards.

    Any holder of an optax transformation works unchanged, such as a Flax ``TrainState`` or an
    ``nnx.Optimizer``; the state has none of Flax's boxes. A worker whose gradient is not finite
    keeps its entries. The arguments are those of `state_specs`. The result has a method
    ``state_shardings(params)``, which gives the NamedShardings of its state.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = stack_workers(demo_optax.demo(1e-3, axis_name="data"), mesh)
      >>> tx.init({"w": jnp.ones((128, 64))})[0].momentum["w"].shape
      (1, 2, 1, 4096)
      >>> tx.state_shardings({"w": jnp.ones((128, 64))})[0].momentum["w"].spec
      P('data',)
    """
    checks.require_unwrapped(tx)
    workers, where = shards.num_workers(mesh, axis_name), (mesh, axis_name, param_specs)

    def update_fn(updates, state, params=None, **extra_args):
        if axes.manual_names(axis_name):
            raise ValueError(
                "update of demo_optax.stack_workers(...) is called inside of a jax.shard_map over "
                f"the workers' axis {axis_name!r}: return the gradients from there, stacked "
                "(workers, *shape), and call it outside. Or call the update of the optimizer "
                "itself there, with one worker's entries of the state."
            )
        if nodes(updates, optax.MaskedNode):
            raise ValueError(_INSIDE.format("optax.masked or optax.partition"))
        require_stacked(updates, workers, "gradients", _MAKE_GRADIENTS, params)
        one = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), updates)
        layout = find_layout(tx, one, *where)
        require_state(state, layout)
        return update_stacked(tx, layout, updates, state, params, extra_args)[:2]

    vars(update_fn)["state_shardings"] = lambda params: state_shardings(tx, params, *where)
    return Stacked(lambda params: init_opt_state(tx, params, *where), update_fn)


def update_stacked(
    tx, layout: StateLayout, gradients, state, params, extra_args, spread=shards.map_workers
):
    """Runs the optimizer on stacked gradients, on each device of the workers.

    All workers get the same ``extra_args``. The third result is the number of bytes that a device
    hands to collectives between the workers, None if it is not known.
    """
    mesh, axis_name, sent = layout.mesh, layout.axis_name, []
    given = layout.params, layout.state, P() if params is None else layout.params
    in_specs = shards.stacked_specs(layout.params, axis_name), *given[1:], P()
    inner, specs = boxed_inside(tx, layout.params), unboxed(layout.params)

    def on_device(boxed_gradient, old, params, extra_args):
        gradient, params = unboxed(boxed_gradient), unboxed(params)
        participates = participation.decide(gradient, axis_name, extra_args)

        @jax.jit
        def update(gradient, old, params, participates):
            extra = {**extra_args, PARTICIPATES: participates, PARAM_SPECS: specs}
            updates, new = inner.update(gradient, old, params, **extra)
            return updates, shards.merge_shard_metrics(new, old, sharded_axes(specs))

        args = gradient, old, params, participates
        program = update.trace(*args).jaxpr
        sent.append(axes.bytes_handed_over(program, axis_name))
        updates, new = update(*args)
        updates = _typed_as_equal(program, updates, args, axis_name)
        updates = shards.made_equal(updates, specs, True, axis_name)
        new = shards.made_equal(new, layout.state, layout.may_have_copies, axis_name)
        new = participation.keep_local_state(new, old, layout.varies_over_workers, participates)
        nothing = jax.tree.map(lambda _: False, updates)
        _require_shared("the optimizer's updates", updates, nothing, axis_name)
        _require_shared("the optimizer's state", new, layout.varies_over_workers, axis_name)
        updates = jax.tree.leaves(_zero_updates_of_nobody(updates, new))
        return jax.tree.unflatten(jax.tree.structure(boxed_gradient), updates), new

    args = shards.constrain_sharding((gradients, state, params), mesh, in_specs[:3])
    on_workers = spread(on_device, mesh, axis_name, in_specs, given[:2])
    try:
        return *on_workers(*args, extra_args), sent[-1]
    except ValueError as error:
        if "vmap has mapped output" in str(error):  # simulated workers have no types
            what = "the optimizer's updates, or what all workers share of its state,"
            raise ValueError(_DRIFTS.format(what, axis_name)) from error
        raise


_DRIFTS = (
    "{0} may differ between the workers of axis_name={1!r}, so that their parameters would drift "
    "apart unseen. The optimizer must exchange over that axis: give demo_optax.decoupled_momentum "
    "(or demo_optax.demo, ...) axis_name={1!r}, or put demo_optax.mean_over_workers({1!r}) in "
    "front of an ordinary optimizer. What stands in front of the exchange must stand there in an "
    "optax.chain; an optimizer of your own that exchanges names its local_fields. To freeze "
    "parameters, leave optax.partition with optax.set_to_zero outermost."
)


def _require_shared(what: str, tree, varies_over_workers, axis_name: AxisName) -> None:
    """Refuses leaves that all workers share, but whose types say that they differ."""
    for (path, x), may_differ in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(varies_over_workers), strict=True
    ):
        if not may_differ and axes.varying(x).intersection(axes.names(axis_name)):
            raise ValueError(_DRIFTS.format(f"leaf{keystr(path)} of {what}", axis_name))


def bytes_handed_over(tx, layout: StateLayout) -> int | None:
    """Returns the third result of `update_stacked`, without computing anything."""
    names, axis_name = layout.mesh.axis_names, layout.axis_name
    # On Explicit axes shapes would need shardings.
    automatic = (AxisType.Auto,) * len(names)
    mesh = AbstractMesh(layout.mesh.axis_sizes, names, axis_types=automatic)
    layout = dataclasses.replace(layout, mesh=mesh)
    front = (shards.num_workers(mesh, axis_name),) if axes.names(axis_name) else ()
    stacked = jax.tree.map(lambda x: x.update(shape=(*front, *x.shape)), layout.param_shapes)
    sent, shapes = [], (stacked, layout.state_shapes, layout.param_shapes)
    extra_args = {"value": np.float32(0)}  # of optax.contrib.reduce_on_plateau

    def update():
        gradients, state, params = jax.tree.map(jnp.zeros_like, shapes)
        args = tx, layout, gradients, state, params, extra_args
        sent.append(update_stacked(*args, spread=shards.map_devices)[2])

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in context
        jax.eval_shape(update)
    return sent[-1]


_TELLS_WORKERS_APART = "axis_index", "ppermute", "reduce_scatter", "all_to_all", "callback"


def _typed_as_equal(program, updates, args, axis_name: AxisName):
    """Types updates as equal that are so, although their type says that they differ.

    Those of ``optax.set_to_zero`` or ``jnp.ones_like(gradient)`` depend on no parameter, on no
    argument that differs between workers, and on nothing that tells workers apart.
    """
    gradient, old, *others = args
    over = axes.names(axis_name)
    may_move = [bool(axes.varying(x).intersection(over)) for x in jax.tree.leaves((gradient, old))]
    may_move += [True] * len(jax.tree.leaves(others))
    # Extra arguments come first.
    may_move = [True] * (len(program.jaxpr.invars) - len(may_move)) + may_move

    def moves(number: int) -> bool:
        wanted = [i == number for i in range(len(program.jaxpr.outvars))]
        kept, used = partial_eval.dce_jaxpr(program.jaxpr, wanted)
        depends = any(a and b for a, b in zip(used, may_move, strict=True))
        return depends or any(word in str(kept) for word in _TELLS_WORKERS_APART)

    leaves, structure = jax.tree.flatten(updates)
    return structure.unflatten(
        declare_equal(x, axis_name)
        if axes.varying(x).intersection(over) and not moves(number)
        else x
        for number, x in enumerate(leaves)
    )


def _zero_updates_of_nobody(updates, state):
    """Sets to zero the updates of parameters whose exchange had no participants.

    Otherwise a link that follows the exchange, such as a weight decay, would still move them.
    """
    exchanges = _participants(state)

    def zeroed(path, update):
        own = [n for paths, n in exchanges if path in paths or () in paths]
        counts = own or [n for paths, n in exchanges if not paths]
        # Without counts the exchange is not one of ours.
        return zero_unless(jnp.max(jnp.stack(counts)) > 0, update) if counts else update

    return jax.tree.map_with_path(zeroed, updates)


def _participants(state) -> list[tuple[list, IntScalar]]:
    """Returns, for each exchange, the paths of its parameters and its participants on this step.

    A dense mean names no paths, and a step inside a round has no participants.
    """
    found: list[tuple[list, IntScalar]] = []
    for node in nodes(state, (LocalStepsState, DecoupledMomentumState, MeanOverWorkersState)):
        if isinstance(node, LocalStepsState):
            ended = node.mini_step == 0
            found += [(paths, jnp.where(ended, n, 0)) for paths, n in _participants(node.outer)]
        elif isinstance(node, DecoupledMomentumState):
            paths = [path for path, _ in jax.tree.leaves_with_path(node.momentum)]
            found.append((paths, node.metrics.participants))
        else:
            found.append(([], node.participants))
    return found


def init_opt_state(
    tx: optax.GradientTransformation,
    params,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName = "data",
    param_specs=None,
):
    """Makes the state of ``tx`` for all workers of a mesh, and places it there.

    The arguments are those of `state_specs`, but with the arrays of the parameters.

    Returns:
      ``tx.init(params)``, where each leaf that differs between workers has a leading axis with
      an entry for each of them, sharded as `state_specs` says. Into random keys among them, such as
      that of ``optax.add_noise``, the worker's number is folded. Momenta are those of each device's
      shard of its parameter. The state of simulated workers lies where their parameters do.

    Raises:
      ValueError: the mesh has no such axis; a parameter cannot be divided as ``param_specs`` says.
        Whether ``tx`` exchanges over ``axis_name`` is seen by the first update.

    Example:
      >>> import jax.numpy as jnp, demo_optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = demo_optax.demo(1e-3, axis_name="data")
      >>> state = init_opt_state(tx, {"w": jnp.ones((64, 64))}, mesh)
      >>> state[0].momentum["w"].shape  # the number of workers comes first
      (1, 1, 1, 4096)
    """
    if axes.manual_names(axis_name):
        raise TypeError(
            "demo_optax.stack_workers(...) stands inside another optimizer, such as "
            "optax.MultiSteps or optax.apply_if_finite, or its init is called inside of "
            "jax.shard_map: leave it outermost, and wrap inside of it, as in "
            "stack_workers(demo_optax.multi_steps(tx, every, axis_name=...), mesh)."
        )
    return init_stacked(tx, find_layout(tx, params, mesh, axis_name, param_specs), params)


def init_stacked(tx, layout: StateLayout, params):
    mesh, specs = layout.mesh, unboxed(layout.params)
    given, made = shards.shardings(mesh, (specs, layout.state))
    if isinstance(mesh, AbstractMesh):
        # The state is as little bound to a device as the parameters are, so that a jitted loop
        # returns both as it was given them, and compiles once.
        given = made = None
    tx = boxed_inside(tx, layout.params)

    def init(params):
        of_worker = functools.partial(with_own_keys, axes.index(layout.axis_name))
        own = jax.tree.map(of_worker, tx.init(params), layout.varies_over_workers)
        return shards.made_equal(own, layout.state, True, layout.axis_name)

    on_workers = shards.map_workers(init, mesh, layout.axis_name, (specs,), layout.state)
    # All parameters are kept, so that a state of zeros is bound to a device if they are.
    made_on_workers = jax.jit(on_workers, out_shardings=made, keep_unused=True)
    return made_on_workers(jax.device_put(unboxed(params), given))


def with_own_keys(number: IntScalar, x: ArrayLike, is_own: bool = True) -> jax.Array:
    """Folds a worker's number into random keys of its own, and leaves other arrays as they are."""
    x = jnp.asarray(x)
    if not (is_own and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
        return x
    return jnp.vectorize(jax.random.fold_in, excluded={1})(x, number)


def init_model_state(state, mesh: Mesh | AbstractMesh, axis_name: AxisName = "data"):
    """Makes a model's state for all workers, each leaf ``(workers, *shape)`` on the mesh.

    All workers begin with equal arrays but different random keys (``jax.random.key``), into which
    the worker's number is folded, so that no two workers drop the same units. Legacy keys of dtype
    uint32 are treated as plain numbers: give ``jax.random.wrap_key_data(key)`` instead. The devices
    of one worker share its keys. For evaluation, average the floats over their first axis, or take
    those of one worker.

    Args:
      state: arrays and random keys, of any shape, such as ``nnx.state(model, nnx.BatchStat)``.
      mesh: the workers' mesh.
      axis_name: the workers' axis, or axes.

    Raises:
      TypeError: a leaf is neither an array nor a number.

    Example:
      >>> import jax.numpy as jnp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> init_model_state({"mean": jnp.zeros(3)}, mesh)["mean"].shape
      (1, 3)
    """
    workers = shards.num_workers(mesh, axis_name)

    def stack(x):
        stacked = jnp.broadcast_to(jnp.asarray(x), (workers, *jnp.shape(x)))
        return jax.vmap(with_own_keys)(jnp.arange(workers), stacked)

    checks.shapes_of("state", state)
    stacked = jax.tree.map(stack, state)
    placed = shards.shardings(mesh, P(axis_name))
    return stacked if isinstance(mesh, AbstractMesh) else jax.device_put(stacked, placed)


_MAKE_GRADIENTS = (
    "worker_gradients. optax.MultiSteps and other wrappers around stack_workers hand on arrays of "
    "their own: put them inside, as in stack_workers(demo_optax.multi_steps(tx, every, axis_name="
    "...), mesh)"
)


def require_stacked(tree, workers: int, what: str, maker: str, one_worker: Any = None) -> None:
    """Refuses leaves of any other shape than ``(workers, *shape)``.

    If ``one_worker`` is given, its leaves have these shapes.
    """
    leaves = jax.tree.leaves_with_path(tree)
    of_one = map(np.shape, jax.tree.leaves(one_worker))
    wanted = [np.shape(x)[1:] for _, x in leaves] if one_worker is None else of_one
    for (path, x), shape in zip(leaves, wanted, strict=False):
        if np.shape(x) != (workers, *shape):
            raise ValueError(
                f"the {what} of {workers} workers are expected, stacked in front, but leaf"
                f"{keystr(path)} has shape {np.shape(x)}: make them with "
                f"demo_optax.{maker}."
            )


def require_state(opt_state, layout: StateLayout) -> None:
    """Refuses a state of another model, other settings or other workers."""
    what, remedy = (
        f"the optimizer state on the mesh {dict(layout.mesh.shape)}",
        "Make it with demo_optax.init_opt_state on the mesh that it is used on, and pass it with "
        "the specs of demo_optax.state_specs; or carry it over with demo_optax.checkpoint, which "
        "puts pending messages back into the momentum.",
    )
    checks.state_fits(what, opt_state, layout.state_shapes, remedy)
    words = {keystr(path): x for path, x in jax.tree.leaves_with_path(opt_state)}
    require_words(what, words, layout.settings, remedy)


def join_state(own_state, shared_state):
    """Returns the state of a worker that joins a run: its own half, and the half that all share.

    It is for workers that step by ``send`` and ``apply`` of a `demo_optax.SplitTransformation`,
    also with `demo_optax.local_steps`. The worker takes the parameters of the others as well. From
    the next ``apply`` on its parameters equal theirs to the last bit.

    Args:
      own_state: the state of this worker, new from ``tx.init(params)`` or from an old run of its
        own. The momentum, the preconditioner, a displacement and a round under way stay.
      shared_state: the state of any other worker between two ``apply``, as arrays of JAX or NumPy.
        Counts, metrics, rounds and the state of the base optimizer are taken from it.

    Raises:
      ValueError: the two states were not made by the same optimizer for the same parameters; or
        ``own_state`` has sent a message that still waits for ``apply``.

    Example:
      >>> import jax, jax.numpy as jnp, demo_optax
      >>> tx, params = demo_optax.demo(0.1), jnp.ones((8, 8))
      >>> outbox, theirs = tx.send(jnp.eye(8), tx.init(params), params, worker=0)
      >>> updates, theirs = tx.apply(outbox.packets, outbox, theirs, params, worker=0)
      >>> joined = join_state(tx.init(params), theirs)
      >>> int(joined[0].count), float(jnp.abs(joined[0].momentum).max())
      (1, 0.0)
    """
    remedy = "Make both by tx.init of the same optimizer, for the same parameters."
    checks.state_fits("the shared state", shared_state, own_state, remedy)
    for momentum in nodes(own_state, DecoupledMomentumState):
        checks.require_unsent(momentum)
    return jax.tree.map(
        lambda own, theirs, is_own: own if is_own else jnp.asarray(theirs),
        own_state,
        shared_state,
        local_leaves(own_state, ("local_fields", "own_fields")),
    )
