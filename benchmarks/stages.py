"""Where an optimizer step's time goes: nanoseconds per parameter of each stage, on one device.

    python benchmarks/stages.py [--topk 8] [--values int4]

Packing and unpacking a packet should cost less than choosing what goes into it.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from step_cost import transformer_params

from demo_optax import exchange
from demo_optax.compression import packet, scheme, transforms


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
    parser.add_argument("--values", nargs="+", default=["float32", "int4"])
    args = parser.parse_args()

    tensors = jax.tree.leaves(transformer_params(args.layers, args.width))
    count = sum(x.size for x in tensors)
    print(f"{count / 1e6:.1f}M parameters on {jax.devices()[0].device_kind}; ns per parameter")
    print(f"{'':14}{'transform':>10}{'select':>10}{'pack':>10}{'unpack':>10}{'add one':>10}")
    for k in args.topk:
        for values in args.values:
            compression = scheme.Compression(topk=k, values=values)
            arrangement = scheme.arrange(compression, tuple(x.shape for x in tensors))
            known = scheme.known_positions(compression, arrangement, jnp.int32(0))

            def forward(tensors, arrangement=arrangement):
                pairs = zip(tensors, arrangement.geometries, strict=True)
                return [transforms.forward(x, g, transforms.dct_basis) for x, g in pairs]

            def select(momenta, arrangement=arrangement, known=known):
                return scheme.select(arrangement, momenta, known)

            def pack(message, arrangement=arrangement):
                body = packet.encode(
                    arrangement.layout, message, [None] * len(arrangement.layout.groups)
                )
                return packet.seal(packet.Header(*jnp.ones(4)), body, jnp.array(True))

            def unpack(words, arrangement=arrangement, known=known):
                return packet.decode(arrangement.layout, packet.unseal(words)[1], known)

            def add_one(words, arrangement=arrangement, known=known):
                return exchange.exchange(words, arrangement.layout, known, None, "senders")

            momenta = jax.jit(forward)(tensors)
            message = jax.jit(select)(momenta)
            words = jax.jit(pack)(message)
            stages = [
                nanoseconds(forward, tensors),
                nanoseconds(select, momenta),
                nanoseconds(pack, message),
                nanoseconds(unpack, words),
                nanoseconds(add_one, words),
            ]
            cells = "".join(f"{stage / count:10.3f}" for stage in stages)
            print(f"k={k:<3} {values:8}{cells}", flush=True)


if __name__ == "__main__":
    main()
