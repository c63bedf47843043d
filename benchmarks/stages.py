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
from demo_optax import messages, metrics, wire
from demo_optax._exchange import exchange as exchange_packets
from demo_optax.compression import compress, make_plan

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
    shapes = tuple(x.shape for x in tensors)
    zero = jnp.int32(0)
    print(f"{count / 1e6:.1f}M parameters on {jax.devices()[0].device_kind}; ns per parameter")
    names = "blocks", "transform", "compress", "exchange", "inverse", "one more"
    print(" " * 14 + "".join(f"{name:>10}" for name in names))
    for k in args.topk:
        for values in args.value_coding:
            compression = demo_optax.Compression(k, value_coding=values, selection=args.selection)
            plan = make_plan(compression, shapes)

            def transform(blocks, plan=plan):
                return [x.reshape(len(x), -1) for x in plan.transform(blocks, zero)[0]]

            def exchange(compressed, packets=1, plan=plan):
                def gather(packet, _):
                    return jnp.broadcast_to(packet, (packets, packet.size))

                report = metrics.Report(*jnp.ones(len(metrics.Report._fields)))
                sent = messages.outgoing(plan, compressed, report, jnp.array(True), zero, None)
                last = metrics.before_the_first()
                with mock.patch.object(wire, "gather", gather):
                    return exchange_packets(plan, sent, (), last, zero, None, "senders")

            blocks = jax.jit(plan.blocks)(tensors)
            coefficients = jax.jit(transform)(blocks)
            message = jax.jit(lambda x, plan=plan: compress(plan, x, zero, zero))(coefficients)
            stages = [
                nanoseconds(plan.blocks, tensors),
                nanoseconds(transform, blocks),
                nanoseconds(lambda x, plan=plan: compress(plan, x, zero, zero), coefficients),
                nanoseconds(exchange, message),
                nanoseconds(lambda x, plan=plan: plan.tensors(plan.inverse(x, zero)), coefficients),
            ]
            few, many = [
                nanoseconds(functools.partial(exchange, packets=n), message) for n in PACKETS
            ]
            stages.append((many - few) / (PACKETS[1] - PACKETS[0]))
            print(
                f"k={k:<3} {values:8}" + "".join(f"{s / count:10.3f}" for s in stages), flush=True
            )


if __name__ == "__main__":
    main()
