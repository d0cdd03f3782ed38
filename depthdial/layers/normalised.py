"""Attention and MLP of the normalised transformer (nGPT, arXiv 2410.01131).

Vectors live on the unit sphere; learned scales are stored as trained and divided by a constant.
Letters: B batch, T query tokens, D model width, H query heads, G key/value heads,
C channels per head, F hidden width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.layers.primitives import Deltas, project, rotate, sigmoid_gate
from depthdial.layers.state import AttentionView, KVSlot

UNIT_EPS = 1e-6
"""Added to the sum of squares."""


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in x's dtype."""
    # fp32: the sum of squares of thousands of bf16 values stops growing early.
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + UNIT_EPS)).to(x.dtype)


class NormalisedAttention(nn.Module):
    """Attention with unit queries and keys, a scale per query channel, and unit output.

    Args:
        scale_std: stored scales are divided by it.
        gate_scale_init: square of the output gate's scale at the start; None for no output gate.
        interleaved: neighbouring channels rotate together.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale_std: float,
        gate_scale_init: float | None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.interleaved = interleaved
        self.query_factor = math.sqrt(head_dim) / scale_std
        query_width, key_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(d_model, query_width, bias=False)
        self.k_proj = nn.Linear(d_model, key_width, bias=False)
        self.v_proj = nn.Linear(d_model, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, d_model, bias=False)
        self.q_scale = nn.Parameter(torch.full((query_width,), scale_std))
        self.g_proj = self.gate_scale = None
        if gate_scale_init is not None:
            self.gate_factor = math.sqrt(gate_scale_init) / scale_std
            self.g_proj = nn.Linear(d_model, query_width, bias=False)
            self.gate_scale = nn.Parameter(torch.full((query_width,), scale_std))

    def forward(
        self, x_BTD: Tensor, *, slot: KVSlot, view: AttentionView, deltas: Deltas | None = None
    ) -> Tensor:
        """Returns: the branch output [B, T, D], without the residual."""
        deltas = deltas or {}
        q_BTHC = project(self.q_proj, x_BTD, deltas.get("q_proj"))
        q_BTHC = self._unit_heads(q_BTHC, self.num_heads, view)
        scale_HC = (self.q_scale * self.query_factor).square().view(self.num_heads, -1)
        q_BTHC = q_BTHC * scale_HC.to(q_BTHC.dtype)
        k_BTGC = v_BTGC = None
        if not slot.is_read_only:
            k_BTGC = project(self.k_proj, x_BTD, deltas.get("k_proj"))
            k_BTGC = self._unit_heads(k_BTGC, self.num_kv_heads, view)
            v_BTGC = project(self.v_proj, x_BTD, deltas.get("v_proj"))
            v_BTGC = v_BTGC.unflatten(-1, (self.num_kv_heads, self.head_dim))
        y_BTHC = slot.attend(q_BTHC, k_BTGC, v_BTGC, spec=view.spec, scale=self.scale)
        y_BTE = y_BTHC.flatten(2)
        if self.g_proj is not None and self.gate_scale is not None:
            scale_E = (self.gate_scale * self.gate_factor).square()
            gate_BTE = project(self.g_proj, x_BTD, deltas.get("g_proj"))
            y_BTE = y_BTE * sigmoid_gate(gate_BTE * scale_E.to(gate_BTE.dtype))
        return project(self.o_proj, unit_length(y_BTE), deltas.get("o_proj"))

    def _unit_heads(self, x_BTE: Tensor, num_heads: int, view: AttentionView) -> Tensor:
        x_BTHC = x_BTE.unflatten(-1, (num_heads, self.head_dim))
        if view.rotary is not None:
            x_BTHC = rotate(x_BTHC, view.rotary, interleaved=self.interleaved)
        return unit_length(x_BTHC)


class NormalisedSwiGLU(nn.Module):
    """down(unit(silu(gate(x) a) * up(x) b)), a and b learned scales times sqrt(D)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.factor = math.sqrt(d_model)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.gate_scale = nn.Parameter(torch.ones(d_ff))
        self.up_scale = nn.Parameter(torch.ones(d_ff))

    def forward(self, x_BTD: Tensor, *, deltas: Deltas | None = None) -> Tensor:
        deltas = deltas or {}
        gate_BTF = project(self.gate_proj, x_BTD, deltas.get("gate_proj"))
        up_BTF = project(self.up_proj, x_BTD, deltas.get("up_proj"))
        gate_BTF = gate_BTF * (self.gate_scale * self.factor).to(gate_BTF.dtype)
        up_BTF = up_BTF * (self.up_scale * self.factor).to(up_BTF.dtype)
        hidden_BTF = unit_length(F.silu(gate_BTF) * up_BTF)
        return project(self.down_proj, hidden_BTF, deltas.get("down_proj"))
