"""Norms, linear maps with a low-rank delta, rotary positions.

Nothing here knows what a loop, a cache or a document is.
Letters: B batch, T query tokens, D model width, H heads, C channels per head,
I inputs, O outputs, R low rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import RopeScaling


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

    def forward(
        self, x: Tensor, *, scale: Tensor | None = None, gain: Tensor | None = None
    ) -> Tensor:
        """Normalise; gain replaces the learned one; scale multiplies it and broadcasts against x.

        Joined before they meet x: one product over the tokens instead of two, and one reduction
        over them in the backward pass.
        """
        normed = rms_normalise(x, self.eps)
        gain = self.weight if gain is None else gain
        if scale is not None:
            gain = scale if gain is None else scale * gain
        return normed if gain is None else normed * gain.to(x.dtype)


def sigmoid_gate(logits: Tensor) -> Tensor:
    """sigmoid in at least fp32, returned in the logits' dtype.

    A bf16 sigmoid near 0 or 1 moves in steps of half a percent.
    """
    return torch.sigmoid(logits.to(wide_dtype(logits.dtype))).to(logits.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """At least fp32: small probabilities, and differences of close bf16 states, round away."""
    return x.to(wide_dtype(x.dtype))


class WideLinear(nn.Linear):
    """W x + b with the sum in at least fp32: near saturation a sigmoid of bf16 logits moves in
    steps of half a percent. The product runs in the dtype of the other matrix products.
    """

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        logits = logits.to(wide_dtype(logits.dtype))
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, and the products of states with all of them: the head that is tied to it.

    The matrix is read inside this module alone, so that whatever replaces, moves or shards a
    module's parameters around its call sees every use. `bias` is what heads of other kinds have.
    """

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        """Vectors [..., D] of token ids [...], or scores [..., V] of states [..., D]."""
        if input.is_floating_point():
            return F.linear(input, self.weight)
        return super().forward(input)


class LowRankPair(NamedTuple):
    """Two thin matrices: down [R, I] and up [O, R] for all rows of the batch, or down [B, R, I]
    and up [B, O, R] with a pair for each row."""

    down: Tensor
    up: Tensor


Deltas = Mapping[str, LowRankPair]
"""Name of a linear map inside a mixer -> the difference up @ down of its matrix."""


def apply_matrix(x_BTI: Tensor, matrix: Tensor) -> Tensor:
    """M x, [B, T, O], with one matrix [O, I] for all rows or one [B, O, I] for each."""
    if matrix.ndim == 2:
        return F.linear(x_BTI, matrix)
    return torch.bmm(x_BTI, matrix.transpose(1, 2))


def project(linear: nn.Linear, x_BTI: Tensor, delta: LowRankPair | None) -> Tensor:
    """(W + up down) x + b, the difference applied as two thin products."""
    y_BTO = linear(x_BTI)
    if delta is None:
        return y_BTO
    dtype = x_BTI.dtype
    return y_BTO + apply_matrix(apply_matrix(x_BTI, delta.down.to(dtype)), delta.up.to(dtype))


class RotaryTable(NamedTuple):
    """Cosines and sines of this call's positions, [1 or B, T, 1, rotating channels / 2]."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(
    rotary_dim: int,
    theta: float,
    *,
    scaling: RopeScaling | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """theta^(-2 j / rotary_dim), j < rotary_dim / 2, slowed down by `scaling`; float32.

    llama3 divides the waves longer than original_context / low_freq_factor by the factor, keeps
    those shorter than original_context / high_freq_factor, and blends between.
    """
    doubled = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    frequencies = theta ** (-doubled / rotary_dim)
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None and scaling.original_context is not None
    waves_per_context = scaling.original_context * frequencies / (2 * math.pi)
    kept_share = ((waves_per_context - low) / (high - low)).clamp(0, 1)
    return slowed + kept_share * (frequencies - slowed)


def rotary_table(
    positions_BT: Tensor,
    *,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> RotaryTable:
    """Angles position * frequency (arXiv 2104.09864)."""
    # fp32: a bf16 angle at position 1000 is off by up to 4 radians.
    frequencies = rotary_frequencies(rotary_dim, theta, scaling=scaling, device=positions_BT.device)
    angles = positions_BT.to(torch.float32)[..., None, None] * frequencies
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x_BTHC: Tensor, table: RotaryTable, *, interleaved: bool = False) -> Tensor:
    """Rotate the first n channels of each head.

    Channel j turns with j + n/2, or 2j with 2j + 1 if interleaved.
    """
    half = table.cos.shape[-1]
    cos, sin = table.cos.to(x_BTHC.dtype), table.sin.to(x_BTHC.dtype)
    if interleaved:
        turning, rest = x_BTHC.split([2 * half, x_BTHC.shape[-1] - 2 * half], dim=-1)
        first, second = turning[..., 0::2], turning[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)
    first, second, rest = x_BTHC.split([half, half, x_BTHC.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
