"""What raises each error of `send`, `apply` and what stands around them."""

import functools

import jax
import numpy as np

import demo_optax

ALONE = demo_optax.demo(1e-3, demo_optax.Compression(4, 8))
OTHER = demo_optax.demo(1e-3, demo_optax.Compression(5, 8))
PARAMS = np.ones(8, np.float32)


@functools.cache
def sent():
    return jax.jit(ALONE.send)(PARAMS, ALONE.init(PARAMS), PARAMS)


def send_twice():
    ALONE.send(PARAMS, sent()[1], PARAMS)


def send_with(exchange):
    demo_optax.demo(1e-3, exchange=exchange).send(PARAMS, ALONE.init(PARAMS))


def apply(packets=None, outbox=None, params=PARAMS, state=None, **options):
    own = sent()[0]
    outbox = own if outbox is None else outbox
    packets = own.packets if packets is None else packets
    return ALONE.apply(packets, outbox, state or sent()[1], params, **options)


def apply_twice():
    outbox, state = sent()
    _, after = jax.jit(ALONE.apply)(outbox.packets, outbox, state, PARAMS)
    apply(state=after)


RAISED = [
    send_twice,
    apply_twice,
    lambda: demo_optax.join_state(sent()[1], ALONE.init(PARAMS)),
    lambda: ALONE.apply(sent()[0].packets, *sent(), None),
    lambda: apply(outbox=OTHER.empty_outbox(PARAMS)),
    *[
        (r"packets must be uint32 \(workers, 128\)", functools.partial(apply, packets))
        for packets in (
            np.zeros((2, 3), np.uint32),
            np.zeros((2, 128), np.int32),
            np.zeros(128, np.uint32),
        )
    ],
    lambda: apply(packets=np.repeat(sent()[0].packets, 2, axis=0)),
    lambda: apply(worker=3),
    (r"would leave send.* behind", lambda: ALONE._replace(update=OTHER.update)),
    ("holds 2 packets", lambda: sent()[0]._replace(packets=np.zeros((2, 4), np.uint32)).packet),
    *[
        ("has no halves", functools.partial(send_with, exchange))
        for exchange in (demo_optax.TwoPhase(), demo_optax.Delayed(demo_optax.AllGather()))
    ],
]
