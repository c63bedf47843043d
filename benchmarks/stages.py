"""Where an optimizer step's time goes: nanoseconds per parameter of each stage, on one device.

    python benchmarks/stages.py [--topk 8] [--value-coding int4] [--selection bins]

The last column is what one more worker's packet costs everyone.
"""

import argparse
import functools
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
from step_cost import transformer_params

import demo_optax
from demo_optax._src import metrics
from demo_optax._src.compression import make_plan, packet
from demo_optax._src.compression.plan import shared_positions
from demo_optax._src.exchange import Outbox, collectives

PACKETS = 64, 96  # of which the difference tells what one more costs


def nanoseconds(fn, *args, rounds: int = 9) -> float:
    """Median time of a compiled function, warm-up left out."""
    compiled = jax.jit(fn).lower(*args).compile()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return 1e9 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--topk", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--value-coding", nargs="+", default=["float32", "int4"])
    parser.add_argument("--selection", default="topk")
    args = parser.parse_args()

    tensors = jax.tree.leaves(transformer_params(args.layers, args.width))
    count = sum(x.size for x in tensors)
    print(f"{count / 1e6:.1f}M parameters on {jax.devices()[0].device_kind}; ns per parameter")
    names = "transform", "compress", "exchange", "inverse", "one more"
    print(" " * 14 + "".join(f"{name:>10}" for name in names))
    for k in args.topk:
        for values in args.value_coding:
            compression = demo_optax.Compression(k, value_coding=values, selection=args.selection)
            times = stages(compression, tensors)
            print(f"k={k:<3} {values:8}" + "".join(f"{t / count:10.3f}" for t in times), flush=True)


def stages(compression: demo_optax.Compression, tensors: list[jax.Array]) -> list[float]:
    """Nanoseconds of each stage, in the order of the table."""
    plan = make_plan(compression, tuple(x.shape for x in tensors), jax.default_backend())
    zero, own = jnp.int32(0), jnp.zeros(1, jnp.int32)
    shared = plan.split_rows(shared_positions(plan.sections, zero))

    def by_part(fn, *arguments):
        return [fn(part, *own) for part, *own in zip(plan.parts, *arguments, strict=True)]

    def transform(tensors):
        found = by_part(lambda part, own: part.forward(own, zero), plan.per_part(tensors))
        return [[x.reshape(len(x), -1) for x in part] for part in found]

    def compress(coefficients):
        def select(part, own, at):
            return part.select(part.split(own), at)[1]

        selected = plan.join(by_part(select, coefficients, shared))
        return packet.encode(plan.sections, selected)

    def exchange(encoded, packets=1):
        coded, message = encoded
        by_all_gather = demo_optax.AllGather()

        def gather(packet, _):
            return jnp.broadcast_to(packet, (packets, packet.size))

        header = packet.Header(*[jnp.uint32(0)] * 3, *[jnp.float32(0)] * 4, jnp.float32(1))
        origin = packet.Origin(zero, own)
        layout = by_all_gather.layout(plan)
        built = packet.build(layout, header, coded, message, jnp.array(True), origin)
        outbox = Outbox(built, message, jnp.float32(1), zero)
        with mock.patch.object(collectives, "gather", gather):
            found = by_all_gather.exchange(plan, outbox, (), metrics.init_metrics(), "senders")
        return found._replace(mean=[x.dense() for x in found.mean])

    def inverse(coefficients):
        return by_part(lambda part, own: part.inverse(own, zero), coefficients)

    coefficients = jax.jit(transform)(tensors)
    encoded = jax.jit(compress)(coefficients)
    few, many = [nanoseconds(functools.partial(exchange, packets=n), encoded) for n in PACKETS]
    return [
        nanoseconds(transform, tensors),
        nanoseconds(compress, coefficients),
        nanoseconds(exchange, encoded),
        nanoseconds(inverse, coefficients),
        (many - few) / (PACKETS[1] - PACKETS[0]),
    ]


if __name__ == "__main__":
    main()
