"""What a link makes of the bytes: seconds per step, and where they go."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from demo_optax import checks
from demo_optax.accounting.traffic import dense_bytes, packet_bytes, received_bytes
from demo_optax.compression import Compression


class StepTime(NamedTuple):
    """One step of all workers over one kind of link; with local steps the mean over a round.

    Attributes:
      packet: bytes that each worker contributes to an exchange.
      wire: bytes that cross each worker's link, in each direction.
      transfer: seconds that they take at the link's bandwidth.
      waiting: seconds of latency.
      step: seconds of the whole step: compute, transfer and waiting one after the other, or side by
        side where the exchange is delayed.
      hiding_bandwidth: bits per second above which transfer and waiting take no longer than the
        compute, so that an exchange that overlaps with it would cost nothing; infinite where
        the latency alone takes longer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
      >>> time = plan(params, Compression(topk=8), workers=2, bandwidth=1e8)["DeMo"]
      >>> time.packet == time.wire, f"{time.transfer:.4f} s"
      (True, '0.0035 s')
    """

    packet: int
    wire: int
    transfer: float
    waiting: float
    step: float
    hiding_bandwidth: float


def plan(
    params,
    compression: Compression | Mapping[str, Compression],
    workers: int,
    bandwidth: float,
    latency: float = 0.0,
    compute_time: float = 0.0,
    local_steps: int = 1,
) -> dict[str, StepTime]:
    """Seconds per step of ordinary data parallelism and of DeMo, over the same link.

    All collectives are taken as rings. An all-reduce of ``B`` bytes sends ``2 B (N-1)/N`` over
    each link in ``2 (N-1)`` rounds; an all-gather of packets of ``B`` bytes sends ``B (N-1)`` in
    ``N-1`` rounds, so that DeMo's traffic grows with the number of workers, the dense one's hardly.
    In two phases it does not grow either: each of them sends ``B (N-1)/N`` of its packet of ``B``
    bytes, in ``N-1`` rounds. A delayed exchange runs beside the compute
    of the next step, but one at the end of a round of local steps waits for it all the same.

    Args:
      params: arrays or shapes of the parameters.
      compression: one setting, or several by name.
      workers: ``N``.
      bandwidth: of each worker's link, bits per second.
      latency: seconds per round.
      compute_time: seconds of a step without any exchange.
      local_steps: steps of a round, at whose end one exchange is (`demo_optax.local_steps`).

    Returns:
      A `StepTime` for ``"AdamW, float32"`` and ``"AdamW, bfloat16"`` (a dense all-reduce of the
      gradient in these dtypes, on every step), for the same with local steps, ``"DiLoCo, ..."``, if
      there are any, and for each setting.

    Raises:
      ValueError: a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
      >>> times = plan(params, Compression(topk=8, value_coding="int4"), 16, 1e9, compute_time=0.1)
      >>> {name: round(time.step, 3) for name, time in times.items()}
      {'AdamW, float32': 0.352, 'AdamW, bfloat16': 0.226, 'DeMo': 0.102}
    """
    if workers < 1 or bandwidth <= 0 or latency < 0 or compute_time < 0:
        raise ValueError(
            "Give plan workers >= 1, bandwidth > 0 (bits per second), latency >= 0 and "
            f"compute_time >= 0 (seconds), not {workers}, {bandwidth}, {latency}, {compute_time}."
        )
    checks.static_integer("local_steps", local_steps, at_least=1)
    named = {"DeMo": compression} if isinstance(compression, Compression) else compression
    others = workers - 1

    def time(packet: int, wire: float, rounds: int, steps: int, beside: bool = False) -> StepTime:
        wire /= steps
        transfer, waiting = 8 * wire / bandwidth, rounds * latency / steps
        spare = compute_time - waiting
        hiding = 8 * wire / spare if spare > 0 else math.inf
        exchange = transfer + waiting
        step = max(compute_time, exchange) if beside else compute_time + exchange
        return StepTime(packet, round(wire), transfer, waiting, step, hiding)

    times = {}
    for method, steps in {"AdamW": 1, "DiLoCo": local_steps}.items():
        for name, size in (("float32", 4), ("bfloat16", 2)):
            if method == "AdamW" or steps > 1:
                dense = dense_bytes(params, size)
                wire, rounds = 2 * dense * others / workers, 2 * others
                times[f"{method}, {name}"] = time(dense, wire, rounds, steps)
    for name, setting in named.items():
        phases = 2 if setting.exchange == "two-phase" else 1
        times[name] = time(
            packet_bytes(setting, params, workers=workers),
            received_bytes(setting, params, workers),
            phases * others,
            local_steps,
            bool(setting.delay) and local_steps == 1,
        )
    return times
