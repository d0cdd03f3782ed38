"""Normal noise as a pure function of (seed, position, channel), without generator state.

Letters: B batch, T tokens, D channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CUT = 3.0
"""Values beyond this many standard deviations do not occur."""


def truncated_normal(positions_BT: Tensor, width: int, *, seed: int, std: float) -> Tensor:
    """N(0, std^2) cut at three standard deviations, [B, T, D] float32.

    Equal (seed, position, channel) give equal values in any batch, chunk or cache.
    """
    if positions_BT.device.type == "mps":
        # That device has no float64, which the last bits need.
        values_BTD = truncated_normal(positions_BT.cpu(), width, seed=seed, std=std)
        return values_BTD.to(positions_BT.device)
    channels_D = torch.arange(width, device=positions_BT.device, dtype=torch.int64)
    counter = (positions_BT.to(torch.int64)[..., None] << 32) + channels_D
    bits = _mix(_mix(counter) + _mix(torch.tensor(seed + 1, device=counter.device)))
    # 53 bits of the upper end, shifted by half a step so that neither 0 nor 1 occurs.
    uniform = (((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) + 0.5) * 2.0**-53
    inside = math.erf(CUT / math.sqrt(2))
    normal = torch.erfinv((2 * uniform - 1) * inside) * math.sqrt(2)
    return (normal * std).to(torch.float32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose output bits look independent (splitmix64)."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros enter from the left, also for negative numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
