"""One sublayer: norm, modulate, mixer, residual; and a stack of them from a layout string.

A sublayer is one mixer, its norms and one residual sum; effective depth counts these.
Loop index and loop count never reach this file: they arrive as plain tensors.
Letters: B batch, T query tokens, D model width, R low rank.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import ATTENTION_LETTERS, ModelConfig
from depthdial.layers.attention import Attention, HeadGains
from depthdial.layers.normalised import NormalisedAttention, NormalisedSwiGLU, unit_length
from depthdial.layers.primitives import Deltas, PlainMLP, RMSNorm, SwiGLU
from depthdial.layers.state import KVSlot
from depthdial.model.call import ForwardContext

# Letters whose mixer moves information between tokens and so needs a slot.
TOKEN_MIXERS = ATTENTION_LETTERS


class SublayerModulation(NamedTuple):
    """Conditioning of one sublayer; None where nothing conditions it.

    scale [., 1, D] multiplies the norm's gain, shift is added after it, gain multiplies the
    branch: 1 + lambda, mu and 1 + omega of ELR section 3.4, stored whole. low_rank_gain [., 1, R]
    is g, down_RD is B and up_DR is A of its low-rank path. The first dimension is 1 or B.
    deltas, norm_gain [D], post_norm_gain [D] and head_gains are stored differences of this loop.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    gain: Tensor | None = None
    low_rank_gain: Tensor | None = None
    down_RD: Tensor | None = None
    up_DR: Tensor | None = None
    deltas: Deltas | None = None
    norm_gain: Tensor | None = None
    post_norm_gain: Tensor | None = None
    head_gains: HeadGains | None = None


UNMODULATED = SublayerModulation()


class Sublayer(nn.Module):
    """y = x + gain * mixer(x_hat), x_hat = low_rank_path(scale * norm(x) + shift).

    Without modulation y = x + mixer(norm(x)).

    Args:
        norm, mixer: modules.
        letter: of the layout; a token mixer is called with a slot and its view of the call.
        post_norm: a second norm, or None; norms_sum: it acts on the sum x + branch, and else on
            the branch.
    """

    def __init__(
        self,
        norm: nn.Module,
        mixer: nn.Module,
        *,
        letter: str,
        post_norm: nn.Module | None = None,
        norms_sum: bool = False,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.post_norm = post_norm
        self.letter = letter
        self.takes_slot = letter in TOKEN_MIXERS
        self.norms_sum = norms_sum

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mod: SublayerModulation | None,
        slot: KVSlot | None,
        ctx: ForwardContext | None,
    ) -> Tensor:
        """Returns: the next residual stream [B, T, D]."""
        mod = UNMODULATED if mod is None else mod
        # Cast once, to the dtype of the matrix products that read it: autocast would cast it again
        # for each of them, and the low-rank path would move twice the bytes.
        dtype = x_BTD.dtype if ctx is None else ctx.dtype
        u_BTD = self.norm(x_BTD, scale=mod.scale, gain=mod.norm_gain)
        if mod.shift is not None:
            u_BTD = u_BTD + mod.shift
        u_BTD = u_BTD.to(dtype)
        if mod.low_rank_gain is not None:
            u_BTD = low_rank_path(u_BTD, mod)
        branch_BTD = mix(self, u_BTD, mod=mod, slot=slot, ctx=ctx)
        if self.post_norm is not None and not self.norms_sum:
            branch_BTD = self.post_norm(branch_BTD, gain=mod.post_norm_gain)
        y_BTD = x_BTD + (branch_BTD if mod.gain is None else mod.gain * branch_BTD)
        if self.post_norm is not None and self.norms_sum:
            y_BTD = self.post_norm(y_BTD, gain=mod.post_norm_gain)
        return y_BTD


class NormalisedSublayer(nn.Module):
    """y = unit(unit(x) + a (unit(mixer(x)) - unit(x))), a = |alpha| * alpha_factor per channel.

    Source: nGPT, arXiv 2410.01131. Args: mixer: a normalised mixer; letter: of the layout.
    """

    def __init__(self, mixer: nn.Module, d_model: int, *, letter: str, alpha_factor: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.alpha = nn.Parameter(torch.ones(d_model))
        self.alpha_factor = alpha_factor
        self.letter = letter
        self.takes_slot = letter in TOKEN_MIXERS

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mod: SublayerModulation | None,
        slot: KVSlot | None,
        ctx: ForwardContext | None,
    ) -> Tensor:
        """Returns: the next residual stream [B, T, D], of unit length."""
        mod = UNMODULATED if mod is None else mod
        dtype = x_BTD.dtype if ctx is None else ctx.dtype
        branch_BTD = mix(self, x_BTD.to(dtype), mod=mod, slot=slot, ctx=ctx)
        unit_BTD = unit_length(x_BTD)
        rate_D = (self.alpha * self.alpha_factor).abs().to(unit_BTD.dtype)
        return unit_length(unit_BTD + rate_D * (unit_length(branch_BTD) - unit_BTD))


def mix(
    sublayer: Sublayer | NormalisedSublayer,
    u_BTD: Tensor,
    *,
    mod: SublayerModulation,
    slot: KVSlot | None,
    ctx: ForwardContext | None,
) -> Tensor:
    """The mixer's output, with the slot and view that a token mixer needs."""
    # Not every mixer takes them, so they are passed only where there are some.
    extra: dict[str, Any] = {} if mod.deltas is None else {"deltas": mod.deltas}
    if mod.head_gains is not None:
        extra["head_gains"] = mod.head_gains
    if not sublayer.takes_slot:
        return sublayer.mixer(u_BTD, **extra)
    assert slot is not None and ctx is not None, "a token mixer needs a slot and a context"
    return sublayer.mixer(u_BTD, slot=slot, view=ctx.view(sublayer.letter), **extra)


def low_rank_path(x_tilde_BTD: Tensor, mod: SublayerModulation) -> Tensor:
    """x_hat = x_tilde + A (g * B x_tilde). Source: ELR section 3.4."""
    assert mod.low_rank_gain is not None and mod.down_RD is not None and mod.up_DR is not None
    low_rank_BTR = F.linear(x_tilde_BTD, mod.down_RD)
    low_rank_BTR = (mod.low_rank_gain * low_rank_BTR).to(low_rank_BTR.dtype)
    return x_tilde_BTD + F.linear(low_rank_BTR, mod.up_DR)


class Stack(nn.ModuleList):
    """Sublayers in order; a slice of it is a stack that shares them."""

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mods: tuple[SublayerModulation, ...] | None,
        slots: tuple[KVSlot, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """Apply all sublayers. slots: one per token mixer."""
        next_slot = iter(slots)
        for i, sublayer in enumerate(self):
            x_BTD = sublayer(
                x_BTD,
                mod=None if mods is None else mods[i],
                slot=next(next_slot) if sublayer.takes_slot else None,
                ctx=ctx,
            )
        return x_BTD


def build_stack(
    layout: str, config: ModelConfig, *, is_core: bool = False, first_attention: int = 0
) -> Stack:
    """One sublayer per letter of the layout.

    Args:
        is_core: the stack that loops; its MLPs may have another width, its attention may mix
            loops.
        first_attention: attention layers below this stack.
    """
    attention_idx, sublayers = first_attention, []
    for letter in layout:
        has_values = letter in TOKEN_MIXERS and attention_idx in config.value_embeddings
        sublayers.append(_sublayer(letter, config, is_core=is_core, has_value_embedding=has_values))
        attention_idx += letter in TOKEN_MIXERS
    return Stack(sublayers)


def num_slots(layout: str) -> int:
    """Token mixers in a layout: the slots that one pass over it needs."""
    return sum(letter in TOKEN_MIXERS for letter in layout)


class Segment(NamedTuple):
    """A run of the core that loops by itself: its sublayers, and its token mixers."""

    sublayers: slice
    mixers: slice


def core_segments(config: ModelConfig) -> tuple[Segment, ...]:
    """The segments of the core, bottom to top."""
    layout = config.core_layout
    bounds = [0, *accumulate(config.segments or (len(layout),))]
    below = [0, *accumulate(letter in TOKEN_MIXERS for letter in layout)]
    return tuple(
        Segment(slice(a, b), slice(below[a], below[b]))
        for a, b in zip(bounds, bounds[1:], strict=False)
    )


def _sublayer(
    letter: str, config: ModelConfig, *, is_core: bool, has_value_embedding: bool
) -> Sublayer | NormalisedSublayer:
    if letter in TOKEN_MIXERS:
        mixer = _attention(config, is_core=is_core, has_value_embedding=has_value_embedding)
    else:
        mixer = _feed_forward(config, is_core=is_core)
    if config.ngpt is not None:
        factor = config.ngpt.alpha_init / config.ngpt.scale_std
        return NormalisedSublayer(mixer, config.d_model, letter=letter, alpha_factor=factor)
    has_post_norm = config.norm in ("sandwich", "post_sum")
    return Sublayer(
        _norm(config),
        mixer,
        letter=letter,
        post_norm=_norm(config) if has_post_norm else None,
        norms_sum=config.norm == "post_sum",
    )


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.d_model, config.norm_eps, has_gain=config.norm_gain)


def _attention(config: ModelConfig, *, is_core: bool, has_value_embedding: bool) -> nn.Module:
    heads = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "interleaved": config.rotary_pairs == "interleaved",
    }
    if config.ngpt is not None:
        gate_init = config.ngpt.gate_scale_init or math.sqrt(config.d_model)
        return NormalisedAttention(
            config.d_model,
            **heads,
            scale_std=config.ngpt.scale_std,
            gate_scale_init=gate_init if config.output_gate else None,
        )
    return Attention(
        config.d_model,
        **heads,
        qk_norm=config.qk_norm,
        qk_norm_eps=config.qk_norm_eps or config.norm_eps,
        bias=config.attention_bias,
        has_output_gate=config.output_gate,
        value_vocab=config.vocab_size if has_value_embedding else None,
        mixes_loops=is_core and config.loop.local_window is not None,
    )


def _feed_forward(config: ModelConfig, *, is_core: bool) -> nn.Module:
    d_ff = (config.core_d_ff if is_core else None) or config.d_ff
    if config.ngpt is not None:
        return NormalisedSwiGLU(config.d_model, d_ff)
    if config.ff == "swiglu":
        return SwiGLU(config.d_model, d_ff, bias=config.ff_bias)
    return PlainMLP(config.d_model, d_ff, activation=config.ff, bias=config.ff_bias)
