"""DiLoCo and SparseLoCo as the tests train with them."""

import functools

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


def layer():
    """The first layer of the model, for tests to which one matrix shows as much as the whole."""
    return {"hidden": model.init()["hidden"]}


def loss_of_layer(params, batch):
    return model.loss({**model.init(), **params}, batch)


MESH = workers.mesh_of(4)
train = functools.partial(workers.train, mesh=MESH)
