"""DiLoCo and SparseLoCo as the tests train with them."""

import jax
import numpy as np
import optax

import demo_optax
from tests import model, workers

RATE = optax.linear_schedule(3e-2, 3e-3, 15)  # of inner steps
OUTER_RATE = optax.linear_schedule(1.0, 0.5, 5)  # of rounds


def dense():
    """DiLoCo's outer optimizer."""
    mean = demo_optax.mean_over_workers("data")
    return optax.chain(mean, optax.sgd(0.7, momentum=0.9, nesterov=True))


def sparse(values="int2", topk=4):
    """SparseLoCo's."""
    return demo_optax.decoupled(
        optax.sgd(OUTER_RATE),
        demo_optax.Compression(topk, 8, values, transform="identity"),
        decay=0.95,
        gradient_weight=1.0,
        mean="workers",
        axis_name="data",
    )


def local(outer, every=3, inner=None, **options):
    inner = inner or optax.adamw(RATE, b2=0.95, weight_decay=0.1)
    return demo_optax.local_steps(inner, outer, every, axis_name="data", **options)


OUTER = {"diloco": dense(), "sparseloco": sparse()}
BOTH = {name: local(outer) for name, outer in OUTER.items()}


def train(tx, steps, mesh=None, start=None, loss=model.loss, batch=model.batch, **options):
    """Steps ``range(*steps)``; parameters, state, metrics of all steps."""
    mesh = mesh or workers.mesh_of(4)
    specs = options.get("param_specs")
    params = model.init()
    start = start or (params, demo_optax.init_opt_state(tx, params, mesh, param_specs=specs))
    (params, state), seen = start, []
    step = demo_optax.make_train_step(loss, tx, mesh, **options)
    for i in range(*steps):
        params, state, metrics = jax.block_until_ready(step(params, state, batch(i)))
        seen.append(metrics)
    return params, state, seen


def assert_same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*map(np.asarray, (a, b))), ours, theirs)
