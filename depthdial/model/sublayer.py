"""One sublayer: norm, modulate, mixer, residual; and a stack of them from a layout string.

A sublayer is one mixer, its norms and one residual sum; effective depth counts these.
Loop index and loop count never reach this file: they arrive as plain tensors.
Letters: B batch, T query tokens, D model width, R low rank.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthdial.cache.protocol import Block
from depthdial.config import LETTERS, ModelConfig, SlotKind
from depthdial.layers.attention import ATTENTION, SLIDING_ATTENTION
from depthdial.layers.feed_forward import FEED_FORWARD
from depthdial.layers.layer_type import LayerType, Place, PlacedLayer
from depthdial.layers.normalised import unit_length
from depthdial.layers.primitives import RMSNorm, apply_matrix
from depthdial.layers.state import Slot
from depthdial.model.call import ForwardContext
from depthdial.model.conditioning import UNMODULATED, SublayerModulation

LAYERS: dict[str, LayerType] = {
    "A": ATTENTION,
    "S": SLIDING_ATTENTION,
    "F": FEED_FORWARD,
}
"""Letter of a layout -> its type of layer; the one table of them. See `register_layer`."""


def register_layer(letter: str, layer: LayerType) -> None:
    """Add a layer from outside the package; from then on a layout may name its letter.

    The process that opens a model of such a layer must have registered it before.
    Raises: ValueError for a letter that is taken, or no single letter.
    """
    if len(letter) != 1 or not letter.isalpha() or not letter.isascii():
        raise ValueError(f"letter '{letter}' must be one letter from a to z or A to Z.")
    if letter in LAYERS:
        raise ValueError(
            f"letter '{letter}' is taken: {LAYERS[letter].facts.summary}. Choose another one."
        )
    LAYERS[letter] = layer
    LETTERS[letter] = layer.facts


Placed = dict[str, tuple[PlacedLayer, ...]]
"""Block -> its layers, bottom to top."""


def placed_layers(config: ModelConfig) -> Placed:
    """All layers of a model."""
    below: Counter[SlotKind] = Counter()
    placed = {}
    for block, layout in config.layouts.items():
        own_config = config.core_config if block == "core" else config
        layers = []
        for letter in layout:
            kind = LETTERS[letter].slot
            place = Place(is_core=block == "core", num_below=below[kind])
            layers.append(PlacedLayer(LAYERS[letter], place, own_config))
            below[kind] += 1
        placed[block] = tuple(layers)
    return placed


MIXER_PARAMETER = re.compile(r"(prelude|core|coda)_stack\.(\d+)\.mixer\.(.+)")


def split_mixer_name(name: str, placed: Placed) -> tuple[PlacedLayer, str] | None:
    """The layer of a parameter and its name below the mixer; None for one outside the mixers."""
    match = MIXER_PARAMETER.fullmatch(name)
    if match is None:
        return None
    block, number, inner = match.groups()
    return placed[block][int(number)], inner


class Sublayer(nn.Module):
    """y = x + gain * mixer(x_hat), x_hat = low_rank_path(scale * norm(x) + shift).

    Without modulation y = x + mixer(norm(x)).

    Args:
        norm, mixer: modules.
        letter: of the layout; tells which slot and view of the call the mixer is given, if any.
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
        self.takes_slot = LETTERS[letter].slot != "none"
        self.norms_sum = norms_sum

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mod: SublayerModulation | None,
        slot: Slot | None,
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
        self.takes_slot = LETTERS[letter].slot != "none"

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mod: SublayerModulation | None,
        slot: Slot | None,
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
    slot: Slot | None,
    ctx: ForwardContext | None,
) -> Tensor:
    """The mixer's output; mixers with a slot get it and their view of the call."""
    # Not every mixer takes them, so they are passed only where there are some.
    extra: dict[str, Any] = {} if mod.deltas is None else {"deltas": mod.deltas}
    if mod.head_gains is not None:
        extra["head_gains"] = mod.head_gains
    if not sublayer.takes_slot:
        return sublayer.mixer(u_BTD, **extra)
    assert slot is not None and ctx is not None, "a mixer with a slot is given it and a context"
    return sublayer.mixer(u_BTD, slot=slot, view=ctx.views[sublayer.letter], **extra)


def low_rank_path(x_tilde_BTD: Tensor, mod: SublayerModulation) -> Tensor:
    """x_hat = x_tilde + A (g * B x_tilde). Source: ELR section 3.4."""
    assert mod.low_rank_gain is not None and mod.low_rank is not None
    low_rank_BTR = apply_matrix(x_tilde_BTD, mod.low_rank.down)
    low_rank_BTR = (mod.low_rank_gain * low_rank_BTR).to(low_rank_BTR.dtype)
    return x_tilde_BTD + apply_matrix(low_rank_BTR, mod.low_rank.up)


class Stack(nn.ModuleList):
    """Sublayers in order; a slice of it is a stack that shares them."""

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mods: tuple[SublayerModulation, ...] | None,
        slots: tuple[Slot, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """Apply all sublayers. slots: one per mixer that has one."""
        next_slot = iter(slots)
        for i, sublayer in enumerate(self):
            x_BTD = sublayer(
                x_BTD,
                mod=None if mods is None else mods[i],
                slot=next(next_slot) if sublayer.takes_slot else None,
                ctx=ctx,
            )
        return x_BTD


def build_stack(config: ModelConfig, block: Block) -> Stack:
    """The sublayers of a block, one per letter of its layout."""
    layers = zip(config.layouts[block], placed_layers(config)[block], strict=True)
    return Stack(_sublayer(letter, placed) for letter, placed in layers)


class Segment(NamedTuple):
    """A run of the core that loops by itself: its sublayers, and their slots."""

    sublayers: slice
    slots: slice


def core_segments(config: ModelConfig) -> tuple[Segment, ...]:
    """The segments of the core, bottom to top."""
    layout = config.core_layout
    bounds = [0, *accumulate(config.segments or (len(layout),))]
    below = [0, *accumulate(LETTERS[letter].slot != "none" for letter in layout)]
    return tuple(
        Segment(slice(a, b), slice(below[a], below[b]))
        for a, b in zip(bounds, bounds[1:], strict=False)
    )


def _sublayer(letter: str, placed: PlacedLayer) -> Sublayer | NormalisedSublayer:
    config, mixer = placed.config, placed.build()
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
