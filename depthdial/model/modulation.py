"""(loop_idx, num_loops, max_loops) -> plain tensors that condition core and coda.

Every value depends on the loop index, the loop count and the step sizes alone, so it can be
tabulated. Nothing here sees tokens or states; what the values mean is in `conditioning.py`.
Letters: D model width, R low rank, U distinct (loop, budget) or rows, B rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import ModelConfig, ModulationConfig, TimeModulationConfig
from depthdial.layers.primitives import LowRankPair
from depthdial.model.conditioning import (
    ConditioningTable,
    EntryModulation,
    LoopModulation,
    SublayerModulation,
    UpdateModulation,
    distinct,
    pick_rows,
    row_points,
)

Points = Sequence[tuple[int, int]]
"""(loop index, loop count) of each row of a table."""


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
        # The parameters themselves, not views of them: autocast keeps its copy of a parameter for
        # all passes.
        low_rank = LowRankPair(self.down, self.up)
        return SublayerModulation(1 + lam, mu, 1 + omega, low_rank_gain, low_rank)


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

    def for_loop(
        self,
        loop_idx: int | Tensor,
        num_loops: NumLoops,
        step_sizes: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> LoopModulation:
        """Conditioning of one pass.

        Args:
            loop_idx, num_loops: of all rows, or one per row, int64 [B] on the CPU.
            step_sizes: [1 or B, loops]; None for equal steps. Only conditioning on time reads it.
            device: of the result; None for that of the weights, where there are any, or the CPU.
                Weights may be elsewhere until their module is called.

        Returns: rows [1, 1, ...] where loop and count are ints, else [B, 1, ...].
        """
        if isinstance(loop_idx, int) and isinstance(num_loops, int):
            return self.loops_at([(loop_idx, num_loops)], device=device)
        points, row_point_B = distinct(row_points(loop_idx, num_loops))
        return pick_rows(self.loops_at(points, device=device), row_point_B)

    def for_coda(
        self, num_loops: NumLoops, *, device: torch.device | None = None
    ) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of the coda; rows and device as in `for_loop`."""
        if isinstance(num_loops, int):
            return self.codas_at([num_loops], device=device)
        budgets, row_budget_B = distinct(num_loops.tolist())
        return pick_rows(self.codas_at(budgets, device=device), row_budget_B)

    @torch.no_grad()
    def table(
        self, num_loops: NumLoops, *, device: torch.device | None = None
    ) -> ConditioningTable:
        """Everything that calls of these loop counts read, computed once."""
        budgets = sorted(set(torch.as_tensor(num_loops).reshape(-1).tolist()))
        # One by one, as in a call of one loop count: values do not depend on their neighbours.
        return ConditioningTable(
            {(i, k): self.loops_at(((i, k),), device=device) for k in budgets for i in range(k)},
            {k: self.codas_at((k,), device=device) for k in budgets},
        )

    def loops_at(self, points: Points, *, device: torch.device | None = None) -> LoopModulation:
        """One row per point, [U, 1, ...]; device as in `for_loop`."""
        return LoopModulation(None, None, self.update_at(points, device))

    def codas_at(
        self, budgets: Sequence[int], *, device: torch.device | None = None
    ) -> tuple[SublayerModulation, ...] | None:
        """One row per loop count, [U, 1, ...]; device as in `for_loop`."""
        return None

    def _dtype(self) -> torch.dtype:
        """Number format of the linear maps, asked of none: a quantised one takes float32."""
        return next((p.dtype for p in self.parameters()), torch.float32)

    def _device(self) -> torch.device:
        """Where the parameters are; the CPU where there are none."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def update_at(
        self, points: Points, device: torch.device | None, exit_gain: Tensor | None = None
    ) -> UpdateModulation:
        """What the config and the loop count fix about the update."""
        bypass = share = anchor = is_first = None
        if self.bypass_first:
            bypass = _column([float(i == 0) for i, _ in points], device)
        if self.has_share:
            share = _column([1 / k for _, k in points], device)
        if self.anchor is not None:
            anchor = _column([self.anchor * (i == k - 1) for i, k in points], device)
            is_first = _column([i == 0 for i, _ in points], device)
        return UpdateModulation(exit_gain, bypass, share, anchor, is_first)


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
        self.ladder = SinusoidalEmbedding(cond.embed_dim, cond.embed_scale)
        self.mlp_in = nn.Linear(2 * cond.embed_dim, cond.d_cond)
        self.mlp_out = nn.Linear(cond.d_cond, cond.d_cond)
        self.core = nn.ModuleList(ModulatedSublayer(d_model, cond) for _ in config.core_layout)
        self.coda = nn.ModuleList(ModulatedSublayer(d_model, cond) for _ in config.coda_layout)
        self.entry = nn.Linear(cond.d_cond, 3 * d_model)
        self.exit = nn.Linear(cond.d_cond, d_model)

    def condition(self, progress_U: Tensor, budget_U: Tensor) -> Tensor:
        """c = MLP([phi(progress); phi(budget)]), [U, d_cond]."""
        both = torch.cat([self.ladder(progress_U), self.ladder(budget_U)], dim=-1)
        return self.mlp_out(F.silu(self.mlp_in(both.to(self._dtype()))))

    def loops_at(self, points: Points, *, device: torch.device | None = None) -> LoopModulation:
        device = self._device() if device is None else device
        # fp32 under autocast: a handful of vectors, and progress must not be rounded to 8 bits.
        with torch.autocast(device.type, enabled=False):
            loop_U, k_U = torch.tensor(points, dtype=torch.float32, device=device).unbind(dim=1)
            # (i + 1) times 1 / k, not (i + 1) / k, which rounds otherwise: models are trained so.
            condition_UC = self.condition((loop_U + 1) * k_U.reciprocal(), k_U / self.max_loops)
            return self.loops_from_condition(condition_UC, points)

    def codas_at(
        self, budgets: Sequence[int], *, device: torch.device | None = None
    ) -> tuple[SublayerModulation, ...]:
        device = self._device() if device is None else device
        with torch.autocast(device.type, enabled=False):
            k_U = torch.tensor(budgets, dtype=torch.float32, device=device)
            condition_UC = self.condition(torch.ones_like(k_U), k_U / self.max_loops)
            return self.codas_from_condition(condition_UC)

    def loops_from_condition(self, condition_UC: Tensor, points: Points) -> LoopModulation:
        """Heads applied to condition vectors of passes, one row each."""
        lam, mu, eta = self.entry(condition_UC)[:, None].chunk(3, dim=-1)
        # A first loop's exceptions are values, not branches: entry unchanged, pi_1 = 1.
        later = _column([float(i > 0) for i, _ in points], lam.device).to(lam.dtype)
        normed = later * float(self.keeps_one_loop)
        entry = EntryModulation(
            raw_gain=1 - normed, norm_gain=normed + later * lam, shift=later * mu, eta=later * eta
        )
        exit_gain = (1 - normed) + self.exit(condition_UC)[:, None]
        sublayers = tuple(sublayer(condition_UC) for sublayer in self.core)
        update = self.update_at(points, condition_UC.device, exit_gain)
        return LoopModulation(sublayers, entry, update)

    def codas_from_condition(self, condition_UC: Tensor) -> tuple[SublayerModulation, ...]:
        """Heads of the coda's sublayers applied to condition vectors, one row each."""
        return tuple(sublayer(condition_UC) for sublayer in self.coda)


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
        d_model = config.core_config.d_model
        self.ladder = SinusoidalEmbedding(cond.embed_dim, 1.0)
        self.time_in = nn.Linear(cond.embed_dim, d_model)
        self.time_out = nn.Linear(d_model, d_model)
        self.step_in = nn.Linear(cond.embed_dim, d_model)
        self.step_out = nn.Linear(d_model, d_model)
        self.core = nn.ModuleList(TimeSublayer(d_model) for _ in config.core_layout)

    def condition(self, time_U: Tensor, step_U: Tensor) -> Tensor:
        """c = E_t(t) + E_s(step), [U, D]."""
        dtype = self._dtype()
        time_UE, step_UE = self.ladder(time_U).to(dtype), self.ladder(step_U).to(dtype)
        time_UD = self.time_out(F.silu(self.time_in(time_UE)))
        return time_UD + self.step_out(F.silu(self.step_in(step_UE)))

    def for_loop(
        self,
        loop_idx: int | Tensor,
        num_loops: NumLoops,
        step_sizes: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> LoopModulation:
        if step_sizes is None:
            return super().for_loop(loop_idx, num_loops, device=device)
        rows = row_points(loop_idx, num_loops, num_rows=len(step_sizes))
        steps = step_sizes.to(torch.float64).expand(len(rows), -1)
        loop_B1 = torch.tensor([i for i, _ in rows])[:, None]
        # Summed in float64: a sum of many float32 steps of 1/L misses the grid that was trained.
        is_before = torch.arange(steps.shape[1]) < loop_B1
        time_B = torch.where(is_before, steps, 0.0).sum(dim=1)
        return self._at(time_B, steps.gather(1, loop_B1)[:, 0], rows, device)

    def loops_at(self, points: Points, *, device: torch.device | None = None) -> LoopModulation:
        loop_U, k_U = torch.tensor(points, dtype=torch.float64).unbind(dim=1)
        share_U = k_U.reciprocal()
        return self._at(loop_U * share_U, share_U, points, device)

    def _at(
        self, time_U: Tensor, step_U: Tensor, points: Points, device: torch.device | None
    ) -> LoopModulation:
        device = self._device() if device is None else device
        # fp32 under autocast: a handful of vectors, and times must not be rounded to 8 bits.
        with torch.autocast(device.type, enabled=False):
            condition_UD = self.condition(time_U.float().to(device), step_U.float().to(device))
            sublayers = tuple(sublayer(condition_UD) for sublayer in self.core)
        return LoopModulation(sublayers, None, self.update_at(points, device))


def _column(values: Sequence[float | bool], device: torch.device | None) -> Tensor:
    """[U, 1, 1]; a single value is written on the device, without a copy from the CPU."""
    if len(values) == 1:
        return torch.full((1, 1, 1), values[0], device=device)
    return torch.tensor(values, device=device)[:, None, None]


def make_conditioning(config: ModelConfig) -> LoopConditioning:
    """The conditioning that the config asks for."""
    if config.modulation is None:
        return LoopConditioning(config)
    if isinstance(config.modulation, TimeModulationConfig):
        return TimeModulation(config, config.modulation)
    return ELRModulation(config, config.modulation)
