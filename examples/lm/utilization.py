"""Model FLOP/s utilization: the share of a device's peak that goes into the model itself."""

import jax
import numpy as np

from .model import Preset

# Dense bfloat16 FLOP/s as the makers state them, by JAX's name of the device.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def flops_per_token(params, preset: Preset, length: int) -> float:
    """FLOPs of forward and backward pass: 6 a parameter, and attention (Chowdhery et al., 2022).

    What is computed again (remat) does not count, nor that half of the attention is masked.
    """
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    return 6 * parameters + 12 * preset.layers * preset.width * length


def utilization(flops_per_second: float, devices: np.ndarray) -> float | None:
    """None where the devices' peak is not known."""
    peak = PEAK_FLOPS.get(devices.flat[0].device_kind)
    return flops_per_second / (peak * devices.size) if peak else None
