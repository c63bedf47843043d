"""Exchanges the progress of local steps in fragments, while the next steps are taken.

The blocks of one shape, over all tensors, are a section. Every ``count``-th block of each section
belongs to one fragment, and zeros fill up a section whose blocks cannot be divided evenly, so that
all fragments have the same shapes and one program handles each of them.

    tensors ── blocks of a section ──► (rows, count, *sides) ── number ──► a fragment (rows, *sides)

The outer optimizer sees no tensors of the model, but a stack of blocks for each section. Its state
is that of all fragments, one behind the other. For an exchange it gets those rows that belong to
the fragment; numbers without rows, such as the counts of schedules, are the same for all fragments
of a round.

A packet's header names the round and the worker, but not the fragment. All workers of a job are at
the same fragment nevertheless, because its number follows from `LocalStepsState.round`, which is
equal on all of them and changes in the one program that they share. Where a fault makes it differ,
`demo_optax.check_replicas` finds it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array, Float

from demo_optax._src import axes, checks
from demo_optax._src.arrays import IntScalar, in_dtype_of, zero_unless
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression, Plan, make_plan, transforms
from demo_optax._src.compression.plan import Shape
from demo_optax._src.exchange import AllGather, Outbox, TwoPhase
from demo_optax._src.exchange.protocol import IN_ROUND, MESSAGE, Pending
from demo_optax._src.local_state import LocalStepsState, nodes
from demo_optax._src.matrices import WholeMatricesState
from demo_optax._src.momentum import DecoupledMomentumState

Fragment = dict[str, Float[Array, "_rows *_sides"]]
"""The blocks of each section that belong to a fragment, by their sides."""


@dataclasses.dataclass(frozen=True)
class Fragments:
    """An outer optimizer of fragments, their number, and the compression of whole tensors."""

    outer: Any
    count: int
    compression: Compression

    @classmethod
    def of(cls, outer: Any, count: int, every: int, axis_name: AxisName) -> "Fragments":
        require_divides(count, every, "every")
        exchange = getattr(outer, "exchange", None)
        kinds = (AllGather, TwoPhase) if axis_name is not None else (AllGather,)
        if exchange is None or type(exchange) not in kinds:
            given = f"its exchange is {exchange}" if exchange else "this one has no halves"
            raise TypeError(
                "with fragments, which come late anyway, the outer optimizer must exchange by "
                f"AllGather({axis_name!r}) or TwoPhase({axis_name!r}), but {given}: give "
                f"demo_optax.decoupled(..., exchange=AllGather({axis_name!r})). A dense exchange "
                "is decoupled(base, "
                "Compression(topk=4096, transform='identity'), decay=1.0, gradient_weight=1.0, "
                "mean='workers')."
            )
        stacked = dataclasses.replace(outer.compression, block_rule="stack")
        return cls(outer.algorithm.with_compression(stacked), count, outer.compression)

    def init(self, params) -> tuple[Any, Pending]:
        """Returns the state of the outer optimizer, and an outbox from before the first send."""
        if nodes(jax.eval_shape(self.outer.init, params), WholeMatricesState):
            raise TypeError(
                "demo_muon makes whole matrices orthogonal, but with fragments the outer optimizer "
                "of local_steps sees stacks of blocks: give another outer optimizer, such as "
                "demo_optax.decoupled(optax.sgd(0.7), ...), or leave out fragments."
            )
        sections = self._sections(params)
        ordered = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), sections)
        fragment = jax.tree.map(lambda x: x[:, 0], sections)
        state = self._with_exchange(self.outer.init(ordered), fragment)
        _require_rows(state, jax.eval_shape(self.outer.init, fragment), self.count)
        progress = jax.tree.map(jnp.zeros_like, fragment)
        outbox = Outbox.empty(self._plan_of_packets(fragment), self.outer.exchange, progress)
        return state, self._kept(outbox._replace(status=jnp.int32(IN_ROUND)))

    def deliver(
        self, state: LocalStepsState, like, params, extra_args, moved: Callable
    ) -> tuple[Any, LocalStepsState]:
        """Exchanges the packets of the fragment under way and applies them.

        ``moved(displacement, progress, update)`` is the new displacement of an array. Returns the
        updates, a tree like ``like`` that is zero outside of the fragment, and the new state.
        """
        if sharded := axes.sharded_axes_in(extra_args):
            raise ValueError(
                f"the parameters are sharded inside a worker, over {sharded}, but fragments are "
                "cut from whole parameters: leave out param_specs, or leave out fragments."
            )
        number = state.round % self.count
        own, cut = self._state_of(state.outer, params, number), self._cut(params, number)
        outbox = state.pending.restored(self._plan_of_packets(cut))
        carried = outbox.packets if self.outer.exchange.axis_name is None else None
        updates, new = self.outer.apply(carried, outbox, own, cut, **extra_args)
        was_sent, was_taken = outbox.status == MESSAGE, outbox.factor > 0
        is_moved = jax.tree.map(lambda u: jnp.where(was_taken, jnp.ones_like(u), 0), updates)
        displacement = jax.tree.map(
            lambda d, g, u, is_moved: jnp.where(is_moved > 0, moved(d, g, u), d),
            state.displacement,
            *[
                spread(self.compression, self.count, x, state.displacement, number)
                for x in (outbox.progress, updates, is_moved)
            ],
        )
        return spread(self.compression, self.count, updates, like, number), state._replace(
            round=state.round + was_sent.astype(jnp.int32),
            displacement=displacement,
            outer=self._with_state_of(state.outer, new, number),
        )

    def send(self, gradient, state: LocalStepsState, params, extra_args) -> LocalStepsState:
        """Moves the next fragment of the gradient into the outbox."""
        number = self.next_number(state)
        own, progress = self._state_of(state.outer, params, number), self._cut(gradient, number)
        outbox, new = self.outer.send(progress, own, self._cut(params, number), **extra_args)
        # A worker that the outer optimizer excludes keeps its progress.
        progress = zero_unless(outbox.factor > 0, progress)
        return state._replace(
            outer=self._with_state_of(state.outer, new, number),
            pending=self._kept(outbox._replace(progress=progress)),
        )

    def next_number(self, state: LocalStepsState) -> IntScalar:
        """Returns the number of the fragment to send, once the one under way was delivered."""
        return state.round % self.count

    def _kept(self, outbox: Outbox) -> Pending:
        return Pending.of(outbox, self.compression, self.outer.exchange.axis_name)

    def _plan_of_packets(self, fragment) -> Plan:
        shapes = tuple(x.shape for x in jax.tree.leaves(fragment))
        return make_plan(self.outer.compression, shapes)

    # --- tensors, sections of their blocks, and one fragment of these

    def _sections(self, tree) -> Any:
        """Returns the blocks of each section, ``(rows, count, *sides)``, by their sides.

        A tree without arrays stays as it is, such as the placeholder of ``optax.tree.map_params``.
        """
        tensors = jax.tree.leaves(tree)
        if not tensors:
            return tree
        plan = make_plan(_blocks(self.compression), tuple(x.shape for x in tensors))
        blocks: list[list[Any]] = [[] for _ in plan.sections]
        for part in plan.parts:
            coefficients = part.forward(tensors[slice(*part.tensors)], jnp.int32(0))
            for group, x in zip(part.groups, coefficients, strict=True):
                x = transforms.inverse(x.reshape(len(x), -1), group.sides, None)
                blocks[group.section].append(x)
        return {
            _name(sides): self._filled(jnp.concatenate(own))
            for sides, own in zip(plan.sides, blocks, strict=True)
        }

    def _filled(self, blocks):
        """Adds blocks of zeros, and makes an axis of fragments."""
        sides = blocks.shape[1:]
        blocks = jnp.pad(blocks, [(0, -len(blocks) % self.count), *[(0, 0) for _ in sides]])
        return blocks.reshape(-1, self.count, *sides)

    def _cut(self, tree, number: IntScalar) -> Any:
        def own(x):
            return jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False)

        return jax.tree.map(own, self._sections(tree))

    # --- the state of the outer optimizer, and that of one fragment

    def _with_exchange(self, state, fragment):
        """Gives an initial state the state of the exchange of each fragment, one behind the other.

        Owners divide the blocks of each fragment, so that it is not that of all blocks together.
        """
        exchange = self.outer.exchange.init(self._plan_of_packets(fragment))
        rows = jax.tree.map(lambda x: jnp.concatenate([x] * self.count), exchange)

        def node(x):
            return x._replace(exchange=rows) if _is_momentum(x) else x

        return jax.tree.map(node, state, is_leaf=_is_momentum)

    def _state_of(self, state, params, number: IntScalar):
        def own(x, like):
            if x.shape == like.shape:
                return x
            return jax.lax.dynamic_slice_in_dim(x, number * like.shape[0], like.shape[0])

        like = jax.eval_shape(lambda x: self.outer.init(self._cut(x, jnp.int32(0))), params)
        leaves, structure = jax.tree.flatten(like)
        return structure.unflatten(map(own, jax.tree.leaves(state), leaves))

    def _with_state_of(self, state, own, number: IntScalar):
        """Returns the state with a fragment's own part in its place.

        Numbers without rows change with the last fragment of a round, so that they count rounds,
        except for those that tell of the exchange itself.
        """
        is_last = number == self.count - 1

        def leaf(x, new):
            if x.shape == new.shape:
                return in_dtype_of(jnp.where(is_last, new, x), x)
            return jax.lax.dynamic_update_slice_in_dim(x, new, number * len(new), 0)

        def node(x, new):
            if not _is_momentum(x):
                return leaf(x, new)
            structure: Any = jax.tree.structure(x)
            leaves = map(leaf, jax.tree.leaves(x), jax.tree.leaves(new))
            return structure.unflatten(leaves)._replace(metrics=new.metrics, sent=new.sent)

        return jax.tree.map(node, state, own, is_leaf=_is_momentum)


def spread(compression: Compression, count: int, fragment: Fragment, like, number: IntScalar):
    """Returns a tree like ``like`` that is zero outside of one of ``count`` fragments."""
    leaves, structure = jax.tree.flatten(like)
    plan, rows = make_plan(_blocks(compression), tuple(x.shape for x in leaves)), []
    for sides, section in zip(plan.sides, plan.sections, strict=True):
        each = jnp.arange(count, dtype=jnp.int32)
        is_own = each.reshape(1, -1, *[1] * len(sides)) == number
        # A select, unlike an update of a slice, becomes a part of what uses the result.
        own = jnp.where(is_own, fragment[_name(sides)][:, None], 0)
        own = own.reshape(-1, *sides)[: section.num_blocks]
        rows.append(transforms.forward(own, sides, None).reshape(len(own), -1))
    tensors: list[Any] = []
    for part, own in zip(plan.parts, plan.split_rows(rows), strict=True):
        tensors += part.inverse(own, jnp.int32(0))
    return structure.unflatten(map(in_dtype_of, tensors, leaves))


def require_divides(fragments: Any, steps: int, name: str) -> None:
    checks.static_integer("fragments", fragments, at_least=1)
    if steps % fragments:
        raise ValueError(
            f"fragments={fragments} must divide {name}={steps}, since one fragment is exchanged "
            f"after each {name} / fragments steps: change one of them."
        )


def plan_of_fragment(compression: Compression, shapes: tuple[Shape, ...], count: int) -> Plan:
    """Returns the plan of the packets of one of ``count`` fragments of tensors."""
    whole = make_plan(compression, shapes)
    sections = zip(whole.sections, whole.sides, strict=True)
    rows = {_name(sides): (-(-s.num_blocks // count), *sides) for s, sides in sections}
    stacked = dataclasses.replace(compression, block_rule="stack")
    return make_plan(stacked, tuple(rows[name] for name in sorted(rows)))


def _blocks(compression: Compression) -> Compression:
    """Returns a compression that leaves the elements of blocks as they are."""
    return dataclasses.replace(compression, transform="identity")


def _is_momentum(x) -> bool:
    return isinstance(x, DecoupledMomentumState)


def _name(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))


def _require_rows(state, own, count: int) -> None:
    """Refuses a state that cannot be divided into those of fragments."""
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(own), strict=True)
    for (path, x), one in pairs:
        is_number = x.shape == one.shape and (count == 1 or x.ndim == 0)
        rows = tuple(count * n for n in one.shape[:1])
        if not is_number and x.shape != rows + one.shape[1:]:
            raise ValueError(
                f"the state of outer has the shape {x.shape} in {keystr(path)}, of which a "
                f"fragment would have {one.shape}: with {count} fragments each array must have a "
                "row for each block. Give an outer optimizer whose state has numbers and arrays "
                "of the parameters' shapes only, such as optax.sgd, or leave out fragments."
            )
