"""(loop_idx, num_loops, max_loops) -> plain tensors that condition core and coda.

Every value depends on the loop index, the loop count and the step sizes alone, so it can be
tabulated. Nothing here sees tokens or states.
Letters: D model width, R low rank, U distinct loop counts or rows, B rows.
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

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import ModelConfig, ModulationConfig, TimeModulationConfig
from depthdial.model.sublayer import SublayerModulation
from depthdial.model.update import EntryModulation, UpdateModulation


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
    """No learned conditioning: only what the config and the loop count fix.

    That is the exact first loop of `gate_bypass`, the share 1 / k of the damped updates, and the
    anchor after the last loop.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bypass_first = config.loop.gate_bypass == "first_only"
        self.has_share = config.loop.update in ("damped", "anchored")
        self.anchor = config.loop.anchor if config.loop.update == "anchored" else None
        self._table: dict[tuple[int | None, int], LoopModulation] | None = None

    def for_loop(
        self,
        loop_idx: int,
        num_loops: NumLoops,
        step_sizes: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> LoopModulation:
        """Conditioning of pass `loop_idx` for rows that run `num_loops` loops.

        Args:
            step_sizes: [1 or B, loops]; None for equal steps. Only conditioning on time reads it.
            device: of the result where no weights tell it; None for the CPU.
        """
        return self._for_rows(loop_idx, num_loops, step_sizes, device)

    def for_coda(self, num_loops: NumLoops) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of the coda."""
        return self._for_rows(None, num_loops, None, None).sublayers

    @contextmanager
    def tabulated(self) -> Iterator[None]:
        """Compute each (loop, budget) once, without gradient, while the block runs; weights must
        not change.
        """
        outer = self._table
        self._table = {} if outer is None else outer
        try:
            yield
        finally:
            self._table = outer

    def _for_rows(
        self,
        loop_idx: int | None,
        num_loops: NumLoops,
        step_sizes: Tensor | None,
        device: torch.device | None,
    ) -> LoopModulation:
        """loop_idx None: the coda. One entry per distinct loop count, spread over the rows."""
        if isinstance(num_loops, int):
            return self._entries(loop_idx, (num_loops,), device)
        distinct, row_entry = torch.unique(num_loops, return_inverse=True)
        entries = self._entries(loop_idx, tuple(distinct.tolist()), device)
        return spread_rows(entries, row_entry)

    def _entries(
        self, loop_idx: int | None, budgets: tuple[int, ...], device: torch.device | None
    ) -> LoopModulation:
        if self._table is None:
            return self._compute(loop_idx, budgets, device)
        missing = tuple(k for k in budgets if (loop_idx, k) not in self._table)
        if missing:
            with torch.no_grad():
                for k in missing:
                    self._table[loop_idx, k] = self._compute(loop_idx, (k,), device)
        if len(budgets) == 1:
            return self._table[loop_idx, budgets[0]]
        rows = [self._table[loop_idx, k] for k in budgets]
        return tree_map(_concatenate, rows[0], *rows[1:])

    def _compute(
        self, loop_idx: int | None, budgets: tuple[int, ...], device: torch.device | None
    ) -> LoopModulation:
        """One row per budget, [U, 1, .]; device: of the result where no weights tell it."""
        if loop_idx is None:
            return LoopModulation(None, None, UpdateModulation(None, None))
        return LoopModulation(None, None, self._fixed(loop_idx, budgets, device))

    def _fixed(
        self,
        loop_idx: int,
        budgets: tuple[int, ...],
        device: torch.device | None,
        exit_gain: Tensor | None = None,
    ) -> UpdateModulation:
        """What the config and the loop count fix about the update."""
        bypass = share = anchor = None
        if self.bypass_first:
            bypass = torch.full((), float(loop_idx == 0), device=device)
        if self.has_share:
            share = _column([1 / k for k in budgets], device)
        if self.anchor is not None:
            anchor = _column([self.anchor * (loop_idx == k - 1) for k in budgets], device)
        return UpdateModulation(exit_gain, bypass, share, anchor)


class ELRModulation(LoopConditioning):
    """ELR loop-conditioned modulation (section 3.4, arXiv 2610.12582).

    c = MLP([phi(i/k); phi(k/K)]) conditions every core sublayer, the loop entry and the update;
    the coda reads (1, k/K). Loop i of the paper is loop_idx + 1. With neutral="every_loop" the
    entry of later loops is unchanged too, and pi_i = 1 at every loop.

    Args: config: of the model; cond: its `modulation`.
    """

    def __init__(self, config: ModelConfig, cond: ModulationConfig) -> None:
        super().__init__(config)
        d_model = config.d_model
        self.max_loops = config.max_loops
        self.keeps_one_loop = cond.neutral == "one_loop"
        self.embedding = SinusoidalEmbedding(cond.embed_dim, cond.embed_scale)
        self.mlp_in = nn.Linear(2 * cond.embed_dim, cond.d_cond)
        self.mlp_out = nn.Linear(cond.d_cond, cond.d_cond)
        self.core = nn.ModuleList(ModulatedSublayer(d_model, cond) for _ in config.core_layout)
        self.coda = nn.ModuleList(ModulatedSublayer(d_model, cond) for _ in config.coda_layout)
        self.entry = nn.Linear(cond.d_cond, 3 * d_model)
        self.exit = nn.Linear(cond.d_cond, d_model)

    def condition(self, progress_U: Tensor, budget_U: Tensor) -> Tensor:
        """c = MLP([phi(progress); phi(budget)]), [U, d_cond]."""
        both = torch.cat([self.embedding(progress_U), self.embedding(budget_U)], dim=-1)
        return self.mlp_out(F.silu(self.mlp_in(both.to(self.mlp_in.weight.dtype))))

    def loop_from_condition(
        self, condition_UC: Tensor, loop_idx: int, budgets: tuple[int, ...]
    ) -> LoopModulation:
        """Heads applied to condition vectors of one pass, one row each."""
        lam, mu, eta = self.entry(condition_UC)[:, None].chunk(3, dim=-1)
        # The first loop's exceptions are values, not branches: entry unchanged, pi_1 = 1.
        later = float(loop_idx > 0)
        normed = later if self.keeps_one_loop else 0.0
        entry = EntryModulation(
            raw_gain=torch.full_like(lam, 1 - normed),
            norm_gain=normed + later * lam,
            shift=later * mu,
            eta=later * eta,
        )
        exit_gain = (1 - normed) + self.exit(condition_UC)[:, None]
        sublayers = tuple(sublayer(condition_UC) for sublayer in self.core)
        update = self._fixed(loop_idx, budgets, condition_UC.device, exit_gain)
        return LoopModulation(sublayers, entry, update)

    def coda_from_condition(self, condition_UC: Tensor) -> tuple[SublayerModulation, ...]:
        """Heads of the coda's sublayers applied to condition vectors, one row each."""
        return tuple(sublayer(condition_UC) for sublayer in self.coda)

    def _compute(
        self, loop_idx: int | None, budgets: tuple[int, ...], device: torch.device | None
    ) -> LoopModulation:
        device = self.mlp_in.weight.device
        # fp32 under autocast: a handful of vectors, and progress must not be rounded to 8 bits.
        with torch.autocast(device.type, enabled=False):
            k = torch.tensor(budgets, dtype=torch.float32, device=device)
            if loop_idx is None:
                condition_UC = self.condition(torch.ones_like(k), k / self.max_loops)
                sublayers = self.coda_from_condition(condition_UC)
                return LoopModulation(sublayers, None, UpdateModulation(None, None))
            condition_UC = self.condition((loop_idx + 1) / k, k / self.max_loops)
            return self.loop_from_condition(condition_UC, loop_idx, budgets)


class TimeSublayer(nn.Module):
    """scale and gate of one sublayer from SiLU(c); zero at the start, so the branch is closed."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.heads = nn.Linear(d_model, 2 * d_model)

    def forward(self, condition_UD: Tensor) -> SublayerModulation:
        scale, gate = self.heads(F.silu(condition_UD))[:, None].chunk(2, dim=-1)
        return SublayerModulation(scale=1 + scale, gain=gate)


class TimeModulation(LoopConditioning):
    """Conditioning on the time t at which a loop starts and on its step size (arXiv 2602.11451).

    c = E_t(t) + E_s(step), each E a sine ladder and a two-layer MLP; steps add up to 1, so t is
    the sum of the earlier ones. Without given steps each is 1 / k.

    Args: config: of the model; cond: its `modulation`.
    """

    def __init__(self, config: ModelConfig, cond: TimeModulationConfig) -> None:
        super().__init__(config)
        d_model = config.d_model
        self.embedding = SinusoidalEmbedding(cond.embed_dim, 1.0)
        self.time_in = nn.Linear(cond.embed_dim, d_model)
        self.time_out = nn.Linear(d_model, d_model)
        self.step_in = nn.Linear(cond.embed_dim, d_model)
        self.step_out = nn.Linear(d_model, d_model)
        self.core = nn.ModuleList(TimeSublayer(d_model) for _ in config.core_layout)

    def condition(self, time_U: Tensor, step_U: Tensor) -> Tensor:
        """c = E_t(t) + E_s(step), [U, D]."""
        dtype = self.time_in.weight.dtype
        time_UE, step_UE = self.embedding(time_U).to(dtype), self.embedding(step_U).to(dtype)
        time_UD = self.time_out(F.silu(self.time_in(time_UE)))
        return time_UD + self.step_out(F.silu(self.step_in(step_UE)))

    def _for_rows(
        self,
        loop_idx: int | None,
        num_loops: NumLoops,
        step_sizes: Tensor | None,
        device: torch.device | None,
    ) -> LoopModulation:
        if loop_idx is None or step_sizes is None:
            return super()._for_rows(loop_idx, num_loops, None, device)
        rows = len(step_sizes)
        budgets = (num_loops,) * rows if isinstance(num_loops, int) else tuple(num_loops.tolist())
        # Summed in float64: a sum of many float32 steps of 1/L misses the grid that was trained.
        steps = step_sizes.to(torch.float64)
        start_U = steps[:, :loop_idx].sum(dim=1)
        return self._at(start_U, steps[:, loop_idx], loop_idx, budgets)

    def _compute(
        self, loop_idx: int | None, budgets: tuple[int, ...], device: torch.device | None
    ) -> LoopModulation:
        if loop_idx is None:
            return super()._compute(loop_idx, budgets, device)
        k = torch.tensor(budgets, dtype=torch.float64)
        return self._at(loop_idx / k, 1 / k, loop_idx, budgets)

    def _at(
        self, time_U: Tensor, step_U: Tensor, loop_idx: int, budgets: tuple[int, ...]
    ) -> LoopModulation:
        device = self.time_in.weight.device
        # fp32 under autocast: a handful of vectors, and times must not be rounded to 8 bits.
        with torch.autocast(device.type, enabled=False):
            condition_UD = self.condition(time_U.float().to(device), step_U.float().to(device))
            sublayers = tuple(sublayer(condition_UD) for sublayer in self.core)
        return LoopModulation(sublayers, None, self._fixed(loop_idx, budgets, device))


def _column(values: list[float], device: torch.device | None) -> Tensor:
    """[U, 1, 1]; a single value is written on the device, without a copy from the CPU."""
    if len(values) == 1:
        return torch.full((1, 1, 1), values[0], device=device)
    return torch.tensor(values, device=device)[:, None, None]


def spread_rows(modulation: LoopModulation, row_entry_B: Tensor) -> LoopModulation:
    """Give each row its entry: [U, 1, .] -> [B, 1, .]; factors shared by all rows stay."""
    return tree_map(
        lambda t: t.index_select(0, row_entry_B.to(t.device)) if _is_per_budget(t) else t,
        modulation,
    )


def _is_per_budget(leaf: Tensor | None) -> bool:
    """[U, 1, .] values differ by budget; factors [R, D] and absent values do not."""
    return leaf is not None and leaf.ndim == 3


def _concatenate(*leaves: Tensor | None) -> Tensor | None:
    return torch.cat(leaves) if _is_per_budget(leaves[0]) else leaves[0]


def make_conditioning(config: ModelConfig) -> LoopConditioning:
    """The conditioning that the config asks for."""
    if config.modulation is None:
        return LoopConditioning(config)
    if isinstance(config.modulation, TimeModulationConfig):
        return TimeModulation(config, config.modulation)
    return ELRModulation(config, config.modulation)
