"""What raises each error of `send`, `apply` and what stands around them."""

import jax.numpy as jnp

import demo_optax
from tests import model

ALONE = demo_optax.demo(1e-3, demo_optax.Compression(4, 8))
OTHER = demo_optax.demo(1e-3, demo_optax.Compression(5, 8))


def sent(tx=ALONE):
    return tx.send(model.init(), tx.init(model.init()), model.init())


def send_twice():
    _, state = sent()
    ALONE.send(model.init(), state, model.init())


def apply(packets=None, outbox=None, params=model.init, **options):
    own, state = sent()
    outbox = own if outbox is None else outbox
    packets = own.packets if packets is None else packets
    return ALONE.apply(packets, outbox, state, params(), **options)


def apply_twice():
    outbox, _ = sent()
    ALONE.apply(outbox.packets, outbox, apply()[1], model.init())


RAISED = [
    send_twice,
    apply_twice,
    lambda: apply(params=lambda: None),
    lambda: apply(outbox=sent(OTHER)[0]),
    lambda: apply(packets=jnp.zeros((2, 3), jnp.uint32)),
    lambda: apply(packets=jnp.repeat(sent()[0].packets, 2, axis=0)),
    lambda: apply(worker=3),
    lambda: sent(demo_optax.demo(1e-3, exchange=demo_optax.TwoPhase())),
]
