"""What might close the rest of the gap to AdamW: changes of DeMo with scaled gradients, one each.

A lever is a function of the trainer's settings and its own options that gives an optimizer; the
names are those in studies.yaml.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import demo_optax
from demo_optax import Compression, DecoupledMomentumState, LocalStepsState
from demo_optax._src.compression import Plan, make_plan
from lm import recipes
from lm.recipes import Settings, muon_with

from .bases import powers, scale_by_rms, with_base
from .delay_levers import ahead_by, stale_adamw, trace_after, with_lead
from .local_levers import local
from .muon_levers import (
    muon_after,
    muon_before,
    muon_before_and_after,
    muon_stepping_by,
    published_muon,
    whitened_before,
)
from .two_phase_levers import owners
from .worker_levers import sits_out, unequal

AXIS = "data"


def maker(name: str, **options: Any) -> Callable[..., optax.GradientTransformation]:
    """What the trainer's `prepare` takes for its optimizer."""
    return lambda _name, settings, _local_steps: LEVERS[name](settings, **options)


def demo(settings: Settings, scale=None, **options) -> optax.GradientTransformation:
    """DeMo with scaled gradients, with settings that the trainer has no flag for."""
    precondition = scale or scale_by_rms(settings.b2)
    return demo_optax.demo(**settings.decoupled, precondition=precondition, **options)


def with_options(settings: Settings, **options) -> optax.GradientTransformation:
    """``subtraction_factor``, ``mean`` and what else `decoupled` takes."""
    return with_base(optax.scale_by_sign(), settings, **options)


def decay_from(settings: Settings, first: float, last: float, steps: int):
    """The momentum's decay goes from one to another, its logarithmic half-life evenly."""

    def decay(step):
        done = jnp.clip(step / steps, 0.0, 1.0)
        return 1.0 - (1.0 - first) ** (1.0 - done) * (1.0 - last) ** done

    own = settings.decoupled | {"decay": decay}
    static = ("compression", "exchange", "precondition", "mask")
    make = optax.inject_hyperparams(demo_optax.demo, static_args=static)
    return make(**own, precondition=scale_by_rms(settings.b2))


def ready_made(settings: Settings, make: str) -> optax.GradientTransformation:
    """``demo_adamw``, ``demo_sgd``, ``demo_signum`` after scaled gradients."""
    optimizer = getattr(demo_optax, make)
    return optimizer(**settings.decoupled, precondition=scale_by_rms(settings.b2))


def signs_of_blocks(settings: Settings) -> optax.GradientTransformation:
    """Signs, in each block as large as its elements are beside those of the whole tensor."""
    side = settings.compression.block_side

    def step(u):
        if u.ndim != 2:
            return jnp.sign(u)
        ones = (side, side)
        sums = functools.partial(
            jax.lax.reduce_window,
            init_value=0.0,
            computation=jax.lax.add,
            window_dimensions=ones,
            window_strides=ones,
            padding="SAME",
        )
        mean = sums(jnp.abs(u)) / sums(jnp.ones_like(u))
        mean = jnp.repeat(jnp.repeat(mean, side, 0), side, 1)
        top, left = ((-(-n // side) * side - n) // 2 for n in u.shape)  # as "SAME" pads
        mean = mean[top : top + u.shape[0], left : left + u.shape[1]]
        return jnp.sign(u) * mean / (jnp.abs(u).mean() + 1e-30)

    return with_base(optax.stateless(lambda u, _: jax.tree.map(step, u)), settings)


def powered(settings: Settings, power: float, **options) -> optax.GradientTransformation:
    """Between the sign and the aggregate: each element to a power, with a root mean square of 1."""
    return with_base(powers(power), settings, **options)


def second_moment_after(settings: Settings, b2: float, **options):
    """Each element of the aggregate, divided by the root of its mean square over time."""
    return with_base(scale_by_rms(b2), settings, **options)


def as_it_is(settings: Settings, **options) -> optax.GradientTransformation:
    """Steps by the aggregate, whose gradients weigh 1 in the momentum."""
    return with_base(optax.identity(), settings, gradient_weight=1.0, **options)


def cooled(settings: Settings, steps: int, make: str) -> optax.GradientTransformation:
    """The rate falls to zero: that of the schedule, times the part of the steps that are left."""

    def rate(step):
        return settings.learning_rate(step) * (1.0 - step / steps)

    own = settings._replace(learning_rate=rate)
    return with_options(own) if make == "demo" else recipes.make(make, own, None)


def annealed(settings: Settings, last: float, steps: int, make: str):
    """In the last fifth of the steps the rate falls linearly to a part of what it was."""

    def rate(step):
        done = jnp.clip((step / steps - 0.8) / 0.2, 0.0, 1.0)
        return settings.learning_rate(step) * (1.0 - (1.0 - last) * done)

    return recipes.make(make, settings._replace(learning_rate=rate), None)


class SharedSecondMoment(NamedTuple):
    """State of `shared_second_moment`."""

    count: jax.Array
    nu: optax.Updates


def shared_second_moment(settings: Settings, every: int):
    """The local second moments are averaged over the workers every so many steps."""

    def init(params):
        return SharedSecondMoment(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        b2 = settings.b2
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)

        def mean(nu):
            return jax.tree.map(
                lambda v: jax.lax.pcast(jax.lax.pmean(v, AXIS), AXIS, to="varying"), nu
            )

        nu = jax.lax.cond(count % every == 0, mean, lambda nu: nu, nu)
        correction = 1 - b2**count
        scaled = jax.tree.map(lambda g, v: g / (jnp.sqrt(v / correction) + 1e-8), updates, nu)
        return scaled, SharedSecondMoment(count, nu)

    return demo(settings, optax.GradientTransformation(init, update))


def scaled_coefficients(settings: Settings, of: str):
    """The second moment is that of each ``"coefficient"``, or of all of a ``"block"``."""

    def plan_of(tree):
        own = Compression(block_side=settings.compression.block_side)
        return make_plan(own, tuple(x.shape for x in jax.tree.leaves(tree)))

    def coefficients(updates):
        """For each part of the plan those of each shape of blocks."""
        plan = plan_of(updates)
        found = [
            part.forward(own, jnp.int32(0))
            for part, own in zip(plan.parts, plan.per_part(updates), strict=True)
        ]
        return plan, [[x.reshape(len(x), -1) for x in part] for part in found]

    def energy(x):
        squares = jnp.square(x)
        return squares if of == "coefficient" else squares.mean(axis=1, keepdims=True)

    def init(params):
        shapes = jax.eval_shape(lambda p: jax.tree.map(energy, coefficients(p)[1]), params)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return SharedSecondMoment(jnp.zeros((), jnp.int32), zeros)

    def update(updates, state, params=None):
        del params
        plan, found = coefficients(updates)
        count = state.count + 1
        b2 = settings.b2
        nu = jax.tree.map(lambda v, x: b2 * v + (1 - b2) * energy(x), state.nu, found)
        correction = 1 - b2**count
        scaled = jax.tree.map(lambda x, v: x / (jnp.sqrt(v / correction) + 1e-8), found, nu)
        tensors = tensors_of(plan, scaled, jnp.int32(0))
        return jax.tree.unflatten(jax.tree.structure(updates), tensors), SharedSecondMoment(
            count, nu
        )

    return demo(settings, optax.GradientTransformation(init, update))


def tensors_of(plan: Plan, coefficients, step) -> list[jax.Array]:
    """All tensors, of the coefficients of each part's blocks."""
    return [
        tensor
        for part, own in zip(plan.parts, coefficients, strict=True)
        for tensor in part.inverse(own, step)
    ]


def apart(settings: Settings, topk: int | None = None) -> optax.GradientTransformation:
    """Embedding and norms with a dense all-reduce and AdamW, or with more coefficients."""

    def label(path, x):
        name = jax.tree_util.keystr(path)
        return "apart" if "embed" in name or x.ndim < 2 else "rest"

    if topk:
        more = settings._replace(compression=dataclasses.replace(settings.compression, topk=topk))
        other = demo(more)
    else:
        dense = demo_optax.mean_over_workers(AXIS)
        other = optax.chain(
            dense, optax.adamw(settings.learning_rate, 0.9, settings.b2, weight_decay=0.0)
        )
    parts = {"apart": other, "rest": demo(settings)}
    return optax.partition(parts, lambda params: jax.tree.map_with_path(label, params))


class Difference(NamedTuple):
    """State of `error_feedback_21`: the momentum of the last step."""

    momentum: optax.Updates
    scale: optax.OptState


def error_feedback_21(settings: Settings, eta: float = 0.1) -> optax.GradientTransformation:
    """EF21 with momentum (arXiv 2305.15155): differences of momenta are sent, and summed up.

    What decoupled momentum keeps is then the difference between a worker's momentum and what the
    others believe it to be, which does not decay.
    """
    scale = scale_by_rms(settings.b2)

    def init(params):
        return Difference(jax.tree.map(jnp.zeros_like, params), scale.init(params))

    def update(updates, state, params=None):
        updates, scaled = scale.update(updates, state.scale, params)
        new = jax.tree.map(lambda m, g: m + eta * (g - m), state.momentum, updates)
        return jax.tree.map(jnp.subtract, new, state.momentum), Difference(new, scaled)

    return demo_optax.decoupled(
        optax.chain(
            optax.trace(1.0),
            optax.scale_by_sign(),
            optax.scale_by_learning_rate(settings.learning_rate),
        ),
        settings.compression,
        decay=1 - 1e-7,
        gradient_weight=1.0,
        mean="workers",
        precondition=optax.GradientTransformation(init, update),
        exchange=settings.exchange,
    )


def ahead(settings: Settings, fraction: float, sign: bool = False):
    """Gradients are taken ahead of the parameters, where the rest of the own momentum would lead.

    With ``sign`` by steps of the learning rate, as DisTrO does; otherwise by the rest itself.
    """
    tx = demo(settings)
    coordinates = settings.compression

    def displacement(state, params):
        (found,) = (
            x
            for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, DecoupledMomentumState))
            if isinstance(x, DecoupledMomentumState)
        )
        leaves, structure = jax.tree.flatten(params)
        plan = make_plan(coordinates, tuple(x.shape for x in leaves))
        momenta = [
            [jnp.concatenate(pieces) for pieces in part.unpack(own)]
            for part, own in zip(plan.parts, plan.per_part(found.momentum), strict=True)
        ]
        rate = settings.learning_rate(found.count)
        tensors = tensors_of(plan, momenta, found.count)
        ahead = [jnp.sign(x) * rate if sign else x for x in tensors]
        return structure.unflatten([-fraction * x for x in ahead])

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return LocalStepsState(
            round=jnp.zeros((), jnp.int32),
            mini_step=jnp.zeros((), jnp.int32),
            weight=jnp.zeros(()),
            displacement=zeros,
            inner=optax.EmptyState(),
            outer=tx.init(params),
        )

    def update(updates, state, params=None, **extra_args):
        updates, inside = tx.update(updates, state.outer, params, **extra_args)
        return updates, state._replace(displacement=displacement(inside, params), outer=inside)

    return optax.GradientTransformationExtraArgs(init, update)


def muon(settings: Settings) -> optax.GradientTransformation:
    """Muon after a dense all-reduce, as optax has it."""
    own = optax.contrib.muon(settings.learning_rate, weight_decay=settings.weight_decay)
    return optax.chain(demo_optax.mean_over_workers(AXIS), own)


LEVERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    function.__name__: function
    for function in (
        with_options,
        decay_from,
        ready_made,
        signs_of_blocks,
        powered,
        second_moment_after,
        as_it_is,
        cooled,
        annealed,
        shared_second_moment,
        scaled_coefficients,
        apart,
        error_feedback_21,
        ahead,
        muon,
        muon_before,
        muon_after,
        muon_with,
        muon_stepping_by,
        muon_before_and_after,
        whitened_before,
        published_muon,
        ahead_by,
        stale_adamw,
        with_lead,
        trace_after,
        owners,
        local,
        sits_out,
        unequal,
    )
}
