"""One sublayer: norm, modulate, mixer, residual; and a stack of them from a layout string.

A sublayer is one norm, one mixer and one residual sum; effective depth counts these.
Loop index and loop count never reach this file: they arrive as plain tensors.
Letters: B batch, T query tokens, D model width, R low rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import ATTENTION, SWIGLU, ModelConfig
from depthdial.layers.attention import Attention
from depthdial.layers.primitives import RMSNorm, SwiGLU
from depthdial.layers.state import KVSlot
from depthdial.model.context import ForwardContext

# Letters whose mixer moves information between tokens and so needs a slot.
TOKEN_MIXERS = frozenset({ATTENTION})


class SublayerModulation(NamedTuple):
    """Conditioning of one sublayer, [1 or B, 1, D] and [1 or B, 1, R]; ELR section 3.4.

    scale is 1 + lambda, gain is 1 + omega, stored whole; shift is mu; low_rank_gain is g.
    down_RD is B and up_DR is A of the low-rank path.
    """

    scale: Tensor
    shift: Tensor
    gain: Tensor
    low_rank_gain: Tensor
    down_RD: Tensor
    up_DR: Tensor


class Sublayer(nn.Module):
    """y = x + gain * mixer(x_hat), x_hat = low_rank_path(scale * norm(x) + shift); pre-norm.

    Without modulation y = x + mixer(norm(x)).

    Args: norm, mixer: modules; takes_slot: the mixer is called with slot, mask and rotary table.
    """

    def __init__(self, norm: nn.Module, mixer: nn.Module, *, takes_slot: bool) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.takes_slot = takes_slot

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mod: SublayerModulation | None,
        slot: KVSlot | None,
        ctx: ForwardContext | None,
    ) -> Tensor:
        """Returns: the next residual stream [B, T, D]."""
        # Cast once, to the dtype of the matrix products that read it: autocast would cast it again
        # for each of them, and the low-rank path would move twice the bytes.
        dtype = x_BTD.dtype if ctx is None else ctx.dtype
        if mod is None:
            u_BTD = self.norm(x_BTD).to(dtype)
        else:
            shifted_BTD = self.norm(x_BTD, scale=mod.scale) + mod.shift
            u_BTD = low_rank_path(shifted_BTD.to(dtype), mod)
        if self.takes_slot:
            assert slot is not None and ctx is not None, "a token mixer needs a slot and a context"
            branch_BTD = self.mixer(u_BTD, slot=slot, mask=ctx.mask, rotary=ctx.rotary)
        else:
            branch_BTD = self.mixer(u_BTD)
        return x_BTD + (branch_BTD if mod is None else mod.gain * branch_BTD)


def low_rank_path(x_tilde_BTD: Tensor, mod: SublayerModulation) -> Tensor:
    """x_hat = x_tilde + A (g * B x_tilde). Source: ELR section 3.4."""
    low_rank_BTR = F.linear(x_tilde_BTD, mod.down_RD)
    low_rank_BTR = (mod.low_rank_gain * low_rank_BTR).to(low_rank_BTR.dtype)
    return x_tilde_BTD + F.linear(low_rank_BTR, mod.up_DR)


class Stack(nn.ModuleList):
    """Sublayers in order, one per letter of the layout."""

    def __init__(self, layout: str, config: ModelConfig) -> None:
        super().__init__(_sublayer(letter, config) for letter in layout)
        self.layout = layout

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mods: tuple[SublayerModulation, ...] | None,
        slots: tuple[KVSlot, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """Apply every sublayer. slots: one per token mixer, in order."""
        next_slot = iter(slots)
        for i, sublayer in enumerate(self):
            x_BTD = sublayer(
                x_BTD,
                mod=None if mods is None else mods[i],
                slot=next(next_slot) if sublayer.takes_slot else None,
                ctx=ctx,
            )
        return x_BTD


def num_slots(layout: str) -> int:
    """Token mixers in a layout: the slots that one pass over it needs."""
    return sum(letter in TOKEN_MIXERS for letter in layout)


def _sublayer(letter: str, config: ModelConfig) -> Sublayer:
    mixers = {ATTENTION: _attention, SWIGLU: _swiglu}
    norm = RMSNorm(config.d_model, config.norm_eps)
    return Sublayer(norm, mixers[letter](config), takes_slot=letter in TOKEN_MIXERS)


def _attention(config: ModelConfig) -> nn.Module:
    return Attention(
        config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
    )


def _swiglu(config: ModelConfig) -> nn.Module:
    return SwiGLU(config.d_model, config.d_ff)
