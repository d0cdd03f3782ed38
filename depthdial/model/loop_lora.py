"""Differences of the core between loops: stored low-rank pairs and norm gains, chosen by loop.

Source: Relaxed Recursive Transformers, arXiv 2410.20672; scale 1, no dropout.
Letters: N stored sets, R low rank, I inputs, O outputs, D model width.
"""

from __future__ import annotations

import torch
from torch import nn

from depthdial.config import LoopLoraConfig
from depthdial.layers.attention import Attention, HeadGains
from depthdial.layers.primitives import LowRankDelta
from depthdial.model.sublayer import (
    UNMODULATED,
    NormalisedSublayer,
    Stack,
    Sublayer,
    SublayerModulation,
)


class LowRankSets(nn.Module):
    """N low-rank differences of one linear map: down [N, R, I], up [N, O, R]."""

    def __init__(self, num_sets: int, rank: int, linear: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(num_sets, rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(num_sets, linear.out_features, rank))


class SublayerDeltas(nn.Module):
    """The stored sets of one core sublayer."""

    def __init__(self, sublayer: Sublayer | NormalisedSublayer, config: LoopLoraConfig) -> None:
        super().__init__()
        self.linears = []
        for name, linear in sublayer.mixer.named_children():
            # The gate of a value embedding reads a slice of the input; it stays shared.
            if config.rank and name.endswith("_proj"):
                assert isinstance(linear, nn.Linear)
                self.add_module(name, LowRankSets(config.num_sets, config.rank, linear))
                self.linears.append(name)
        self.norm = self.post_norm = self.q_norm = self.k_norm = None
        if config.norms and isinstance(sublayer, Sublayer):
            self.norm = _gains(sublayer.norm, config.num_sets)
            if sublayer.post_norm is not None:
                self.post_norm = _gains(sublayer.post_norm, config.num_sets)
            mixer = sublayer.mixer
            if isinstance(mixer, Attention) and mixer.q_norm is not None:
                assert mixer.k_norm is not None, "query and key norms come together"
                self.q_norm = _gains(mixer.q_norm, config.num_sets)
                self.k_norm = _gains(mixer.k_norm, config.num_sets)

    def set_at(self, set_idx: int) -> SublayerModulation:
        """One set as the sublayer takes it."""
        pairs = {name: self.get_submodule(name) for name in self.linears}
        return UNMODULATED._replace(
            deltas={
                name: LowRankDelta(pair.down[set_idx], pair.up[set_idx])
                for name, pair in pairs.items()
                if isinstance(pair, LowRankSets)
            }
            or None,
            norm_gain=None if self.norm is None else self.norm[set_idx],
            post_norm_gain=None if self.post_norm is None else self.post_norm[set_idx],
            head_gains=self._head_gains(set_idx),
        )

    def _head_gains(self, set_idx: int) -> HeadGains | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadGains(self.q_norm[set_idx], self.k_norm[set_idx])


class LoopLora(nn.Module):
    """Differences of every core sublayer; which set a loop uses is in the config."""

    def __init__(self, core: Stack, config: LoopLoraConfig) -> None:
        super().__init__()
        self.config = config
        self.sublayers = nn.ModuleList(SublayerDeltas(sublayer, config) for sublayer in core)

    def for_loop(
        self, loop_idx: int, mods: tuple[SublayerModulation, ...] | None
    ) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of one pass with this loop's differences added."""
        set_idx = self.config.set_at(loop_idx)
        if set_idx < 0:
            return mods
        deltas = tuple(sublayer.set_at(set_idx) for sublayer in self.sublayers)
        if mods is None:
            return deltas
        return tuple(
            mod._replace(
                deltas=delta.deltas,
                norm_gain=delta.norm_gain,
                post_norm_gain=delta.post_norm_gain,
                head_gains=delta.head_gains,
            )
            for mod, delta in zip(mods, deltas, strict=True)
        )


def _gains(norm: nn.Module, num_sets: int) -> nn.Parameter:
    weight = norm.get_parameter("weight")
    return nn.Parameter(weight.detach().expand(num_sets, -1).clone())
