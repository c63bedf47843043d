"""Exchanges the progress of local steps in fragments, while the next steps are taken.

The blocks of one shape, over all tensors, are a section of the plan. Every ``count``-th block of
each section belongs to one fragment, and zeros fill up a section whose blocks cannot be divided
evenly, so that all fragments have the same shapes and one program handles each of them.

    tensors ── sections ──► (blocks, *sides) ── every count-th ──► a fragment (rows, *sides)

The outer optimizer sees no tensors of the model, but a stack of blocks for each section. It has a
state for each fragment, all of them stacked along an axis in front. The metrics are those of the
last exchange, and stand there once.

A packet's header names the round and the worker, but not the fragment. All workers of a job are at
the same fragment nevertheless, because its number follows from `LocalStepsState.round`, which is
equal on all of them and changes in the one program that they share. Where a fault makes it differ,
`demo_optax.check_replicas` finds it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from demo_optax._src import axes, checks
from demo_optax._src.arrays import IntScalar, in_dtype_of, widest, zero_unless
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression, Plan, make_plan
from demo_optax._src.compression.blocks import BlockGeometry
from demo_optax._src.compression.plan import Shape
from demo_optax._src.exchange import AllGather, Outbox, TwoPhase
from demo_optax._src.exchange.protocol import IN_ROUND, MESSAGE, Pending
from demo_optax._src.local_state import LocalStepsState, nodes
from demo_optax._src.matrices import WholeMatricesState
from demo_optax._src.metrics import ExchangeMetrics
from demo_optax._src.participation import choose

Fragment = tuple[Float[Array, "_rows *_sides"], ...]
"""The blocks of each section that belong to a fragment."""


@dataclasses.dataclass(frozen=True)
class Cutter:
    """Cuts tensors into ``count`` fragments, by the blocks of a compression."""

    compression: Compression
    count: int

    def cut(self, tree, number: IntScalar) -> Fragment:
        """Returns one fragment of a tree of tensors."""
        sections = self.sections(tree)
        return tuple(jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False) for x in sections)

    def put(self, fragment: Fragment, tree, number: IntScalar) -> Any:
        """Returns a tree of tensors in which one fragment is replaced."""
        tensors, structure = jax.tree.flatten(tree)
        members = self._members(tensors)
        for own, old, new in zip(members, self.sections(tree), fragment, strict=True):
            each = jnp.arange(self.count, dtype=jnp.int32).reshape(1, -1, *[1] * (new.ndim - 1))
            # A select, unlike an update of a slice, becomes a part of what uses the result.
            blocks = jnp.where(each == number, new[:, None], old).reshape(-1, *new.shape[1:])
            ends = itertools.accumulate(geometry.num_blocks for _, geometry in own)
            # After the last piece comes what fills the section up.
            for (i, geometry), piece in zip(own, jnp.split(blocks, list(ends)), strict=False):
                tensors[i] = in_dtype_of(geometry.join(piece), tensors[i])
        return structure.unflatten(tensors)

    def sections(self, tree) -> Any:
        """Returns the blocks of each section, ``(rows, count, *sides)``, filled up with zeros.

        A tree without arrays stays as it is, such as the placeholder of ``optax.tree.map_params``.
        """
        tensors = jax.tree.leaves(tree)
        if not tensors:
            return tree
        dtype, filled = widest(*[x.dtype for x in tensors]), []
        for own in self._members(tensors):
            blocks = jnp.concatenate([each.cut(tensors[i].astype(dtype)) for i, each in own])
            sides = blocks.shape[1:]
            blocks = jnp.pad(blocks, [(0, -len(blocks) % self.count), *[(0, 0) for _ in sides]])
            filled.append(blocks.reshape(-1, self.count, *sides))
        return tuple(filled)

    def _members(self, tensors) -> list[list[tuple[int, BlockGeometry]]]:
        """Returns the tensors of each section, by their numbers, and how they are cut."""
        sections: dict[Shape, list] = {}
        for number, x in enumerate(tensors):
            geometry = self.compression.momentum_format.geometry(x.shape)
            if geometry.num_blocks:
                sections.setdefault(geometry.block_shape, []).append((number, geometry))
        return list(sections.values())


@dataclasses.dataclass(frozen=True)
class Fragments:
    """An outer optimizer of fragments, and how tensors are cut into them."""

    outer: Any
    cutter: Cutter

    @classmethod
    def of(cls, outer: Any, count: int, every: int, axis_name: AxisName) -> "Fragments":
        require_divides(count, every, "every")
        exchange = getattr(outer, "exchange", None)
        kinds = (AllGather, TwoPhase) if axis_name is not None else (AllGather,)
        if exchange is None or type(exchange) not in kinds:
            given = f"its exchange is {exchange}" if exchange else "it has no send and apply"
            raise TypeError(
                "with fragments, which come late anyway, the outer optimizer must exchange by "
                f"AllGather({axis_name!r}) or TwoPhase({axis_name!r}), but {given}: give "
                f"demo_optax.decoupled(base, compression, exchange=AllGather({axis_name!r})). "
                "Compression(topk=4096, transform='identity') with decay=1.0, gradient_weight=1.0 "
                "and mean='workers' sends every element."
            )
        algorithm = outer.algorithm.with_compression(_of_stacks(outer.compression))
        return cls(algorithm, Cutter(outer.compression, count))

    def init(self, params) -> tuple[Any, Pending]:
        """Returns the states of the outer optimizer, and an outbox from before the first send."""
        if nodes(jax.eval_shape(self.outer.init, params), WholeMatricesState):
            raise TypeError(
                "demo_muon makes whole matrices orthogonal, but with fragments the outer optimizer "
                "of local_steps sees stacks of blocks: give another outer optimizer, such as "
                "demo_optax.decoupled(optax.sgd(0.7), ...), or leave out fragments."
            )
        sections = self.cutter.sections(params)
        states = jax.vmap(self.outer.init, in_axes=1, axis_size=self.cutter.count)(sections)
        first = jax.tree.map(lambda x: x[0], states)
        states = _with_state_of(states, first, jnp.int32(0))  # with the metrics of one
        progress = jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), sections)
        outbox = Outbox.empty(self._plan(progress), self.outer.exchange, progress)
        return states, self._kept(outbox._replace(status=jnp.int32(IN_ROUND)))

    def deliver(
        self, state: LocalStepsState, like, params, extra_args, moved: Callable
    ) -> tuple[Any, LocalStepsState]:
        """Exchanges the packets of the fragment under way and applies them.

        ``moved(displacement, progress, update)`` is the new displacement of an array. Returns the
        updates, a tree like ``like`` that is zero outside of the fragment, and the new state.
        """
        if sharded := axes.sharded_axes(extra_args.get(axes.PARAM_SPECS, ())):
            raise ValueError(
                f"the parameters are sharded inside a worker, over {sharded}, but fragments are "
                "cut from whole parameters: leave out param_specs, or leave out fragments."
            )
        number = state.round % self.cutter.count
        own, shared = _state_of(state.outer, number), self.cutter.cut(params, number)
        outbox = state.pending.restored(self._plan(shared), self.cutter.compression)
        carried = outbox.packets if self.outer.exchange.axis_name is None else None
        updates, new = self.outer.apply(carried, outbox, own, shared, **extra_args)
        old = self.cutter.cut(state.displacement, number)
        displacement = jax.tree.map(moved, old, outbox.progress, updates)
        displacement = choose(outbox.factor > 0, displacement, old)
        was_sent = outbox.status == MESSAGE
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # equal on all workers
        return self.cutter.put(updates, zeros, number), state._replace(
            round=state.round + was_sent.astype(jnp.int32),
            displacement=self.cutter.put(displacement, state.displacement, number),
            outer=_with_state_of(state.outer, new, number),
        )

    def send(self, gradient, state: LocalStepsState, params, extra_args) -> LocalStepsState:
        """Moves the next fragment of the gradient into the outbox."""
        number = state.round % self.cutter.count
        own, progress = _state_of(state.outer, number), self.cutter.cut(gradient, number)
        outbox, new = self.outer.send(progress, own, self.cutter.cut(params, number), **extra_args)
        # A worker that the outer optimizer excludes keeps its progress.
        progress = zero_unless(outbox.factor > 0, progress)
        return state._replace(
            outer=_with_state_of(state.outer, new, number),
            pending=self._kept(outbox._replace(progress=progress)),
        )

    def _kept(self, outbox: Outbox) -> Pending:
        return Pending.of(outbox, self.cutter.compression, self.outer.exchange.axis_name)

    def _plan(self, fragment) -> Plan:
        shapes = tuple(x.shape for x in jax.tree.leaves(fragment))
        return make_plan(self.outer.compression, shapes)


def _is_metrics(x) -> bool:
    return isinstance(x, ExchangeMetrics)


def _is_shared(x) -> bool:
    """Recognizes what fragments share: the metrics, and what has no axis, such as a set rate."""
    return _is_metrics(x) or jnp.ndim(x) == 0


def _state_of(states, number: IntScalar) -> Any:
    """Returns a fragment's own state, with what all of them share."""
    take = functools.partial(jax.lax.dynamic_index_in_dim, index=number, axis=0, keepdims=False)
    return jax.tree.map(lambda x: x if _is_shared(x) else take(x), states, is_leaf=_is_metrics)


def _with_state_of(states, own, number: IntScalar) -> Any:
    """Returns the states with a fragment's own in its place."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
    return jax.tree.map(
        lambda x, new: new if _is_shared(x) else put(x, new), states, own, is_leaf=_is_metrics
    )


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
    pairs = zip(whole.sections, whole.sides, strict=True)
    stacks = tuple((-(-section.num_blocks // count), *sides) for section, sides in pairs)
    return make_plan(_of_stacks(compression), stacks)


def _of_stacks(compression: Compression) -> Compression:
    if callable(compression.topk):
        raise TypeError(
            f"topk={compression.topk!r} depends on a tensor's shape, but a fragment has blocks of "
            "many tensors in one stack: give an integer, or leave out fragments."
        )
    return dataclasses.replace(compression, block_rule="stack")
