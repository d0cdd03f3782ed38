"""Norm, linear, rotary positions and the SwiGLU MLP.

Nothing here knows what a loop, a cache or a document is.
Letters: B batch, T query tokens, D model width, H heads, C channels per head, F hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype (arXiv 1910.07467)."""
    # fp32 statistics: the mean square of bf16 values loses the small channels.
    x_fp32 = x if x.dtype == torch.float64 else x.float()
    inverse = torch.rsqrt(x_fp32.square().mean(dim=-1, keepdim=True) + eps)
    return (x_fp32 * inverse).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain per channel.

    Args: width: channels; eps: added to the mean square; has_gain: False for a pure normaliser.
    """

    def __init__(self, width: int, eps: float, *, has_gain: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if has_gain else None

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        """Normalise; scale multiplies the gain and broadcasts against x.

        Joined before they meet x: one product over the tokens instead of two, and one reduction
        over them in the backward pass.
        """
        normed = rms_normalise(x, self.eps)
        gain = self.weight
        if scale is not None:
            gain = scale if gain is None else scale * gain
        return normed if gain is None else normed * gain.to(x.dtype)


class RotaryTable(NamedTuple):
    """Cosines and sines of this call's positions, [1 or B, T, 1, rotating channels / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_table(
    positions_BT: Tensor, *, rotary_dim: int, theta: float, dtype: torch.dtype
) -> RotaryTable:
    """Angles position * theta^(-2 j / rotary_dim), j < rotary_dim / 2 (arXiv 2104.09864)."""
    # fp32: a bf16 angle at position 1000 is off by up to 4 radians.
    doubled = torch.arange(0, rotary_dim, 2, device=positions_BT.device, dtype=torch.float32)
    frequencies = theta ** (-doubled / rotary_dim)
    angles = positions_BT.to(torch.float32)[..., None, None] * frequencies
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x_BTHC: Tensor, table: RotaryTable) -> Tensor:
    """Rotate the first channels of each head, halves paired (channel j with j + n/2)."""
    half = table.cos.shape[-1]
    first, second, rest = x_BTHC.split([half, half, x_BTHC.shape[-1] - 2 * half], dim=-1)
    cos, sin = table.cos.to(x_BTHC.dtype), table.sin.to(x_BTHC.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases (arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
