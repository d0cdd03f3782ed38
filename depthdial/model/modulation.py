"""(loop_idx, num_loops, max_loops) -> plain tensors that condition core and coda.

ELR section 3.4: every value depends on progress i/k and budget k/K alone, so it can be tabulated.
Nothing here sees tokens or states.
Letters: D model width, R low rank, U distinct loop counts, B rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.model.schedule import NumLoops
from depthdial.model.sublayer import SublayerModulation
from depthdial.model.update import UpdateModulation


class EntryModulation(NamedTuple):
    """z = raw_gain * s + norm_gain * RMSNorm(s) + shift + eta * h_in, each [1 or B, 1, D].

    The first loop has raw_gain 1 and zeros elsewhere, so it enters unchanged.
    """

    raw_gain: Tensor
    norm_gain: Tensor
    shift: Tensor
    eta: Tensor


class LoopModulation(NamedTuple):
    """Everything that one pass of the core is conditioned on; None where nothing conditions it."""

    sublayers: tuple[SublayerModulation, ...] | None
    entry: EntryModulation | None
    update: UpdateModulation


class SinusoidalEmbedding(nn.Module):
    """[cos(scale v w_j), sin(scale v w_j)], w_j = 10000^(-j / half), of a value in (0, 1]."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.half = width // 2
        self.scale = scale

    def forward(self, values_U: Tensor) -> Tensor:
        exponents = torch.arange(self.half, device=values_U.device) / self.half
        frequencies = torch.exp(-math.log(10_000.0) * exponents)
        angles = self.scale * values_U[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ModulatedSublayer(nn.Module):
    """Heads and low-rank factors of one sublayer.

    The heads start at zero and both factors at random: the function is unchanged, yet every
    gradient path opens after one step. A zero factor, as in LoRA, would close it for good.
    """

    def __init__(self, d_model: int, config: ModulationConfig) -> None:
        super().__init__()
        self.widths = [d_model, d_model, d_model, config.rank]
        self.heads = nn.Linear(config.d_cond, sum(self.widths))
        self.down = nn.Parameter(torch.empty(config.rank, d_model))
        self.up = nn.Parameter(torch.empty(d_model, config.rank))

    def forward(self, condition_UC: Tensor) -> SublayerModulation:
        heads = self.heads(condition_UC)[:, None]
        lam, mu, omega, low_rank_gain = heads.split(self.widths, dim=-1)
        return SublayerModulation(1 + lam, mu, 1 + omega, low_rank_gain, self.down, self.up)


class LoopConditioning(nn.Module):
    """No learned conditioning: only what the config fixes about the first loop."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__()
        self.bypass_first = config.gate_bypass == "first_only"

    def for_loop(self, loop_idx: int, num_loops: NumLoops) -> LoopModulation:
        """Conditioning of pass `loop_idx` for rows that run `num_loops` loops."""
        return LoopModulation(None, None, UpdateModulation(None, self._bypass(loop_idx)))

    def for_coda(self, num_loops: NumLoops) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of the coda."""
        return None

    @contextmanager
    def tabulated(self) -> Iterator[None]:
        """Compute each (loop, budget) once, without gradient, while the block runs; weights must
        not change.
        """
        yield

    def _bypass(self, loop_idx: int) -> Tensor | None:
        return torch.tensor(float(loop_idx == 0)) if self.bypass_first else None


class ELRModulation(LoopConditioning):
    """ELR loop-conditioned modulation (section 3.4, arXiv 2610.12582).

    c = MLP([phi(i/k); phi(k/K)]) conditions every core sublayer, the loop entry and the update;
    the coda reads (1, k/K). Loop i of the paper is loop_idx + 1.

    Args: config: of the model; its `modulation` must be set.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.loop)
        assert config.modulation is not None, "a modulated model has a modulation config"
        cond, d_model = config.modulation, config.d_model
        self.max_loops = config.max_loops
        self.embedding = SinusoidalEmbedding(cond.embed_dim, cond.embed_scale)
        self.mlp_in = nn.Linear(2 * cond.embed_dim, cond.d_cond)
        self.mlp_out = nn.Linear(cond.d_cond, cond.d_cond)
        self.core = nn.ModuleList(ModulatedSublayer(d_model, cond) for _ in config.core_layout)
        self.coda = nn.ModuleList(ModulatedSublayer(d_model, cond) for _ in config.coda_layout)
        self.entry = nn.Linear(cond.d_cond, 3 * d_model)
        self.exit = nn.Linear(cond.d_cond, d_model)
        self._table: dict[tuple[int | None, int], LoopModulation] | None = None

    def for_loop(self, loop_idx: int, num_loops: NumLoops) -> LoopModulation:
        return self._for_rows(loop_idx, num_loops)

    def for_coda(self, num_loops: NumLoops) -> tuple[SublayerModulation, ...] | None:
        return self._for_rows(None, num_loops).sublayers

    @contextmanager
    def tabulated(self) -> Iterator[None]:
        outer = self._table
        self._table = {} if outer is None else outer
        try:
            yield
        finally:
            self._table = outer

    def condition(self, progress_U: Tensor, budget_U: Tensor) -> Tensor:
        """c = MLP([phi(progress); phi(budget)]), [U, d_cond]."""
        both = torch.cat([self.embedding(progress_U), self.embedding(budget_U)], dim=-1)
        return self.mlp_out(F.silu(self.mlp_in(both.to(self.mlp_in.weight.dtype))))

    def loop_from_condition(self, condition_UC: Tensor, loop_idx: int) -> LoopModulation:
        """Heads applied to condition vectors of one pass, one row each."""
        lam, mu, eta = self.entry(condition_UC)[:, None].chunk(3, dim=-1)
        # The first loop's exceptions are values, not branches: entry unchanged, pi_1 = 1.
        later = float(loop_idx > 0)
        entry = EntryModulation(
            raw_gain=torch.full_like(lam, 1 - later),
            norm_gain=later * (1 + lam),
            shift=later * mu,
            eta=later * eta,
        )
        exit_gain = (1 - later) + self.exit(condition_UC)[:, None]
        sublayers = tuple(sublayer(condition_UC) for sublayer in self.core)
        return LoopModulation(sublayers, entry, UpdateModulation(exit_gain, self._bypass(loop_idx)))

    def coda_from_condition(self, condition_UC: Tensor) -> tuple[SublayerModulation, ...]:
        """Heads of the coda's sublayers applied to condition vectors, one row each."""
        return tuple(sublayer(condition_UC) for sublayer in self.coda)

    def _for_rows(self, loop_idx: int | None, num_loops: NumLoops) -> LoopModulation:
        """loop_idx None: the coda. One entry per distinct loop count, spread over the rows."""
        if isinstance(num_loops, int):
            return self._entries(loop_idx, (num_loops,))
        distinct, row_entry = torch.unique(num_loops, return_inverse=True)
        entries = self._entries(loop_idx, tuple(distinct.tolist()))
        return spread_rows(entries, row_entry.to(self.mlp_in.weight.device))

    def _entries(self, loop_idx: int | None, budgets: tuple[int, ...]) -> LoopModulation:
        if self._table is None:
            return self._compute(loop_idx, budgets)
        missing = tuple(k for k in budgets if (loop_idx, k) not in self._table)
        with torch.no_grad():
            for k in missing:
                self._table[loop_idx, k] = self._compute(loop_idx, (k,))
        if len(budgets) == 1:
            return self._table[loop_idx, budgets[0]]
        rows = [self._table[loop_idx, k] for k in budgets]
        return tree_map(_concatenate, rows[0], *rows[1:])

    def _compute(self, loop_idx: int | None, budgets: tuple[int, ...]) -> LoopModulation:
        device = self.mlp_in.weight.device
        # fp32 under autocast: a handful of vectors, and progress must not be rounded to 8 bits.
        with torch.autocast(device.type, enabled=False):
            k = torch.tensor(budgets, dtype=torch.float32, device=device)
            if loop_idx is None:
                condition_UC = self.condition(torch.ones_like(k), k / self.max_loops)
                sublayers = self.coda_from_condition(condition_UC)
                return LoopModulation(sublayers, None, UpdateModulation(None, None))
            condition_UC = self.condition((loop_idx + 1) / k, k / self.max_loops)
            return self.loop_from_condition(condition_UC, loop_idx)


def spread_rows(modulation: LoopModulation, row_entry_B: Tensor) -> LoopModulation:
    """Give each row its entry: [U, 1, .] -> [B, 1, .]; factors shared by all rows stay."""
    return tree_map(
        lambda t: t.index_select(0, row_entry_B) if _is_per_budget(t) else t, modulation
    )


def _is_per_budget(leaf: Tensor | None) -> bool:
    """[U, 1, .] values differ by budget; factors [R, D] and absent values do not."""
    return leaf is not None and leaf.ndim == 3


def _concatenate(*leaves: Tensor | None) -> Tensor | None:
    return torch.cat(leaves) if _is_per_budget(leaves[0]) else leaves[0]


def make_conditioning(config: ModelConfig) -> LoopConditioning:
    """The conditioning that the config asks for."""
    if config.modulation is None:
        return LoopConditioning(config.loop)
    return ELRModulation(config)
