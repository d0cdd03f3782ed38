"""Grouped-query attention over a key/value slot; it knows neither loops nor caches.

Letters: B batch, T query tokens, D model width, H query heads, G key/value heads,
C channels per head.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthdial.layers.primitives import RMSNorm, RotaryTable, rotate
from depthdial.layers.state import AttentionMask, KVSlot


class Attention(nn.Module):
    """Rotary grouped-query attention (arXiv 2305.13245), no biases.

    Args:
        d_model: D; num_heads: H; num_kv_heads: G, divides H; head_dim: C, free of D / H.
        qk_norm: RMS-normalise each query and key head before rotation (arXiv 2010.04245).
        norm_eps: of those norms.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: bool,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=False)
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None

    def forward(
        self, x_BTD: Tensor, *, slot: KVSlot, mask: AttentionMask, rotary: RotaryTable
    ) -> Tensor:
        """Returns: the branch output [B, T, D], without the residual."""
        q_BTHC = self.q_proj(x_BTD).unflatten(-1, (self.num_heads, self.head_dim))
        k_BTGC = self.k_proj(x_BTD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v_BTGC = self.v_proj(x_BTD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTGC = self.q_norm(q_BTHC), self.k_norm(k_BTGC)
        q_BTHC, k_BTGC = rotate(q_BTHC, rotary), rotate(k_BTGC, rotary)
        y_BTHC = slot.attend(q_BTHC, k_BTGC, v_BTGC, mask=mask, scale=self.scale)
        return self.o_proj(y_BTHC.flatten(2))
