"""Nothing is lost: what leaves the momentum is what the others decode, rounding included."""

import numpy as np
from hypothesis import strategies as st

import demo_optax
from demo_optax._src.compression.values import VALUE_CODINGS
from tests import draws, extensions, oracles
from tests.sweeps import sweep

INVERSES = {
    "dct": oracles.inverse_dct,
    "randomized-dct": oracles.inverse_randomized_dct,
    "identity": lambda block: block,
    extensions.Hartley(): extensions.inverse_hartley,
}


CODINGS = {
    **{coding: demo_optax.Compression(5, 16, coding) for coding in VALUE_CODINGS},
    **{
        selection: demo_optax.Compression(7, 8, "sign", "randomized-dct", selection=selection)
        for selection in ("bins", "random", "random-slicing", "striding", "slicing")
    },
    **extensions.COMPRESSIONS,
}
KNOWN = ("int2", "bins", "random", "k by tensor", "threshold", "ternary", "transform")
SHAPES = [(16, 11), (5,)]


def by_oracle(momenta, shapes, compression):
    """Each worker's momentum as tensors."""
    inverse, rule = INVERSES[compression.transform], compression.block_rule
    return [
        np.stack([oracles.to_tensor(m, shape, sides, inverse) for m in np.asarray(stored)])
        for stored, shape in zip(momenta, shapes, strict=True)
        for sides in [oracles.block_sides(shape, compression.block_side, rule)]
    ]


@draws.cases(
    {
        **{name: dict(case, alpha=0.5, seed=0, workers=3) for name, case in draws.CASES.items()},
        **{
            name: dict(shapes=SHAPES, compression=CODINGS[name], alpha=1.0, seed=0, workers=8)
            for name in KNOWN
        },
    },
    number=20,
    shapes=draws.trees,
    compression=st.one_of(draws.compressions, st.sampled_from([*CODINGS.values()])),
    alpha=st.sampled_from([1.0, 0.5, 0.2]),
    seed=draws.seeds,
    workers=st.sampled_from([1, 3]),
)
def test_momentum_before_is_momentum_after_and_what_was_sent(
    shapes, compression, alpha, seed, workers
):
    """Summed over the workers: before = after + alpha * workers * aggregate."""
    tx = demo_optax.decoupled_momentum(
        0.9,
        compression,
        gradient_weight=0.3,
        mean="workers",
        subtraction_factor=alpha,
        axis_name="data",
    )
    update, state = draws.start(tx, shapes, workers)
    for step in range(2):
        before = by_oracle(state.momentum, shapes, compression)
        gradients = draws.gradients(seed + step, shapes, workers)
        aggregate, state = update(gradients, state)
        after = by_oracle(state.momentum, shapes, compression)
        for m, g, kept, mean in zip(before, gradients, after, aggregate, strict=True):
            total = np.sum(0.9 * m + 0.3 * g, axis=0)
            sent = workers * np.asarray(mean, np.float64)[0]
            scale = max(np.abs(total).max(), 1.0)
            np.testing.assert_allclose(
                np.sum(kept, axis=0) + alpha * sent, total, rtol=0, atol=3e-6 * scale
            )


GATHER = demo_optax.AllGather()
OWNERS = demo_optax.TwoPhase("data", topk_back=16, residual_decay=1.0)
ARRIVING = {
    "redrawn": (GATHER, dict(transform="random", value_coding="bfloat16")),
    "striding": (GATHER, dict(selection="striding")),
    "random-slicing": (GATHER, dict(selection="random-slicing")),
    "random": (GATHER, dict(selection="random")),
    "slicing": (GATHER, dict(selection="slicing")),
    "owners": (OWNERS, {}),
    "owners late": (demo_optax.Delayed(OWNERS), dict(transform="random")),
}


@sweep("redrawn", "striding", "random-slicing", "owners late", name=ARRIVING)
def test_a_gradient_that_is_seen_once_arrives_whole(name):
    """In many messages, of other positions or in another basis each, by way of owners too."""
    exchange, settings = ARRIVING[name]
    tx = demo_optax.decoupled_momentum(
        1 - 1e-7,
        demo_optax.Compression(16, 8, **settings),
        gradient_weight=1.0,
        mean="workers",
        exchange=exchange,
    )
    update, state = draws.start(tx, [(11, 8)], 4)
    [gradient] = draws.gradients(0, [(11, 8)], 4)
    wanted = gradient if exchange is GATHER else gradient.mean(axis=0, keepdims=True)
    arrived = 0.0
    for step in range(60):
        [updates], state = update([gradient * (step == 0)], state)
        arrived += np.asarray(updates)
    np.testing.assert_allclose(arrived, np.broadcast_to(wanted, arrived.shape), rtol=0, atol=1e-4)
