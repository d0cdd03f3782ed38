"""Differences of the core between loops: stored low-rank pairs and norm gains, chosen by loop.

Source: Relaxed Recursive Transformers, arXiv 2410.20672; scale 1, no dropout.
Letters: B rows, N stored sets, R low rank, I inputs, O outputs, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from depthdial.config import LoopLoraConfig
from depthdial.layers.attention import HeadGains
from depthdial.layers.layer_type import PlacedLayer
from depthdial.layers.primitives import LowRankPair
from depthdial.model.conditioning import UNMODULATED, SublayerModulation
from depthdial.model.sublayer import NormalisedSublayer, Stack, Sublayer


class LowRankSets(nn.Module):
    """N low-rank differences of one linear map: down [N, R, I], up [N, O, R]."""

    def __init__(self, num_sets: int, rank: int, linear: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(num_sets, rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(num_sets, linear.out_features, rank))

    def forward(self, sets: int | Tensor) -> LowRankPair:
        """One pair of all rows, or one for each; a row of set -1 has none."""
        return LowRankPair(_rows(self.down, sets), _rows(self.up, sets, without=0.0))


class SublayerDeltas(nn.Module):
    """The stored sets of one core sublayer, as far as its layer type takes them."""

    def __init__(
        self,
        sublayer: Sublayer | NormalisedSublayer,
        config: LoopLoraConfig,
        *,
        layer: PlacedLayer,
    ) -> None:
        super().__init__()
        takes = layer.facts.conditioned_by
        maps = layer.linear_shapes() if config.rank and "loop_lora" in takes else {}
        self.linears = []
        for name, linear in sublayer.mixer.named_children():
            if name in maps:
                assert isinstance(linear, nn.Linear)
                self.add_module(name, LowRankSets(config.num_sets, config.rank, linear))
                self.linears.append(name)
        self.norm = self.post_norm = self.q_norm = self.k_norm = None
        if config.norms and isinstance(sublayer, Sublayer):
            self.norm = _gains(sublayer.norm, config.num_sets)
            if sublayer.post_norm is not None:
                self.post_norm = _gains(sublayer.post_norm, config.num_sets)
            norms = dict(sublayer.mixer.named_children())
            if "head_gains" in takes and "q_norm" in norms:
                self.q_norm = _gains(norms["q_norm"], config.num_sets)
                self.k_norm = _gains(norms["k_norm"], config.num_sets)

    def forward(
        self, sets: int | Tensor, own_gains: Mapping[str, Tensor] | None = None
    ) -> SublayerModulation:
        """One set of all rows, or one for each, as the sublayer takes it.

        Args:
            sets: int64 [B] on the CPU, -1 for rows without differences.
            own_gains: of the sublayer's norms, which rows without differences have; None where
                there is no such row.
        """
        deltas = {name: self.get_submodule(name)(sets) for name in self.linears}
        mod = UNMODULATED._replace(deltas=deltas or None)
        if self.norm is None:
            return mod
        own = own_gains or {}
        query, key = (
            _gain_rows(stored, sets, own.get(name))
            for stored, name in ((self.q_norm, "mixer.q_norm"), (self.k_norm, "mixer.k_norm"))
        )
        has_head_gains = query is not None and key is not None
        return mod._replace(
            norm_gain=_gain_rows(self.norm, sets, own.get("norm")),
            post_norm_gain=_gain_rows(self.post_norm, sets, own.get("post_norm")),
            head_gains=HeadGains(query[:, None], key[:, None]) if has_head_gains else None,
        )

    def own_gains(self, sublayer: nn.Module) -> dict[str, Tensor]:
        """The gains of the sublayer's norms that have stored ones, by the norm's name.

        Raises: ValueError for a gain that is kept elsewhere until its norm is called.
        """
        stored = {
            "norm": self.norm,
            "post_norm": self.post_norm,
            "mixer.q_norm": self.q_norm,
            "mixer.k_norm": self.k_norm,
        }
        gains = {
            name: sublayer.get_parameter(f"{name}.weight")
            for name, stored_ND in stored.items()
            if stored_ND is not None
        }
        if any(gain.is_meta for gain in gains.values()):
            raise ValueError(
                "rows with and without stored norm gains stand in one call, but the weights are "
                "offloaded and the norms' own gains are not at hand. Run rows of one loop at a "
                "time, or load the model whole."
            )
        return gains


class LoopLora(nn.Module):
    """Differences of every core sublayer; which set a loop uses is in the config."""

    def __init__(
        self, core: Stack, config: LoopLoraConfig, *, layers: Sequence[PlacedLayer]
    ) -> None:
        super().__init__()
        self.config = config
        self.sublayers = nn.ModuleList(
            SublayerDeltas(sublayer, config, layer=layer)
            for sublayer, layer in zip(core, layers, strict=True)
        )

    def for_loop(
        self,
        loop_idx: int | Tensor,
        mods: tuple[SublayerModulation, ...] | None,
        *,
        core: Stack,
    ) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of one pass with its loop's differences added.

        Args: loop_idx: of all rows, or one per row; core: the sublayers, whose own gains are those
            of a row without differences.
        """
        rows = [loop_idx] if isinstance(loop_idx, int) else loop_idx.tolist()
        set_of_rows = [self.config.set_at(i) for i in rows]
        is_one = len(set(set_of_rows)) == 1
        if is_one and set_of_rows[0] < 0:
            return mods
        sets = set_of_rows[0] if is_one else torch.tensor(set_of_rows)
        stored = []
        for lora, sublayer in zip(self.sublayers, core, strict=True):
            assert isinstance(lora, SublayerDeltas)
            # Only then: a gain is a parameter of another module.
            own = lora.own_gains(sublayer) if not is_one and min(set_of_rows) < 0 else None
            stored.append(lora(sets, own))
        if mods is None:
            return tuple(stored)
        return tuple(
            mod._replace(
                deltas=own.deltas,
                norm_gain=own.norm_gain,
                post_norm_gain=own.post_norm_gain,
                head_gains=own.head_gains,
            )
            for mod, own in zip(mods, stored, strict=True)
        )


def _gain_rows(stored_ND: Tensor | None, sets: int | Tensor, own_D: Tensor | None) -> Tensor | None:
    """Gains [1 or B, 1, D] of one norm; a row without differences has the norm's own."""
    if stored_ND is None:
        return None
    gains = _rows(stored_ND, sets, without=own_D)
    return gains.view(-1, 1, gains.shape[-1])


def _rows(stored_N: Tensor, sets: int | Tensor, *, without: Tensor | float | None = None) -> Tensor:
    """One stored entry for all rows, or [B, ...] with one for each.

    Args: without: in place of the entry in rows whose set is -1; None to take any entry there.
    """
    if isinstance(sets, int):
        # A copy: without gradients, torch's counters of modules take a view of a parameter that a
        # module returns for one with a history.
        return stored_N[sets].clone()
    picked = stored_N.index_select(0, sets.clamp(min=0).to(stored_N.device))
    has_set = sets >= 0
    if without is None or bool(has_set.all()):
        return picked
    has_set = has_set.to(stored_N.device).view(-1, *(1,) * (stored_N.ndim - 1))
    return torch.where(has_set, picked, without)


def _gains(norm: nn.Module, num_sets: int) -> nn.Parameter:
    weight = norm.get_parameter("weight")
    return nn.Parameter(weight.detach().expand(num_sets, -1).clone())
