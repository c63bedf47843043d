"""An estimate of a step's compute, for devices on which nobody has measured it."""

PEAK_FLOPS = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "tpu-v4": 275e12,
    "tpu-v5e": 197e12,
    "tpu-v5p": 459e12,
    "tpu-v6e": 918e12,
}
"""Dense bfloat16 FLOPs per second, as the makers state them."""

UTILIZATION = 0.4


def estimate_compute_time(params: int, batch_tokens: int, flops: float) -> float:
    """Estimates the seconds of a step's gradient by 6 FLOPs for each parameter and token.

    The devices are assumed to reach 40% of their peak. What yours reach may be half of that or
    twice as much, so measure a step before you rely on it.

    Args:
      params: number of parameters.
      batch_tokens: tokens in the batch of one worker.
      flops: FLOPs per second at the peak of all devices of the worker together.

    Example:
      >>> round(estimate_compute_time(300_000_000, 65_536, flops=989e12), 3)
      0.298
    """
    return 6 * params * batch_tokens / (UTILIZATION * flops)
