"""One optimizer step: its plan, the one wrapped loss, one gradient, one update.

`StepPlan` says what every depth slice does, `RowPlan` the same for the rows of a micro-batch.
`LossModule` is what training, validation, the teacher's comparison and shorter paths run, so that
whatever wraps it (DDP, FSDP2, compilation) sees every use of the model. How terms are weighed is in
`objective.py`; the draws are in `depth_schedule.py` and `losses.py`, the loop over steps in
`pretrain.py`.
Letters: B rows, T tokens, D model width, V vocabulary, N some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import TimeModulationConfig
from depthdial.config.recipe import DistillConfig, ObjectiveConfig
from depthdial.data.packing import Batch, beside, pick_rows, take_rows
from depthdial.model.call import Blocks, Call
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.depth_schedule import (
    DepthSchedule,
    draw_idx,
    loops_for_step,
    no_grad_loops_at,
)
from depthdial.training.losses import (
    DepthLosses,
    short_path,
    squared_distance,
    stacked_steps,
    token_divergences,
    token_losses,
)
from depthdial.training.objective import (
    TermSums,
    TokenTerms,
    compared_rows,
    step_share,
    step_totals,
)
from depthdial.training.optim import Optimizers

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class StepPlan:
    """One entry per depth slice.

    Fields:
        loops: loop count. no_grad_loops: of these, the first ones without gradient.
        short_paths: steps of the shorter path in units of 1 / loops, empty for a slice without
            one; None if the objective has no shorter paths.
        short_no_grad_loops: first loops of the shorter path without gradient.
        is_mixed: pass one entry per row even where all agree, so that compiled blocks see one
            kind of input.
    """

    loops: tuple[int, ...]
    no_grad_loops: tuple[int, ...]
    short_paths: tuple[tuple[int, ...], ...] | None = None
    short_no_grad_loops: tuple[int, ...] = ()
    is_mixed: bool = True

    @classmethod
    def of_loops(cls, loops: Sequence[int], *, is_mixed: bool = True) -> StepPlan:
        """Full gradients and nothing beside the drawn depth."""
        return cls(tuple(loops), (0,) * len(loops), is_mixed=is_mixed)

    @property
    def forwards(self) -> list[tuple[int, int]]:
        """(loops, first loops without gradient) of every forward, shorter paths included."""
        found = list(zip(self.loops, self.no_grad_loops, strict=True))
        if self.short_paths is not None:
            lengths = map(len, self.short_paths)
            found += [x for x in zip(lengths, self.short_no_grad_loops, strict=True) if x[0]]
        return found

    @property
    def loop_counts(self) -> set[int]:
        """Loop counts that the step runs, those of shorter paths included."""
        return {*self.loops, *(len(path) for path in self.short_paths or () if path)}


def plan_step(
    schedule: DepthSchedule,
    *,
    step: int,
    num_slices: int,
    is_mixed: bool,
    has_short_paths: bool,
) -> StepPlan:
    """Draw everything of one step; a pure function of its arguments."""

    def without_grad(counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(no_grad_loops_at(schedule, step=step, num_loops=k) for k in counts)

    loops = loops_for_step(schedule, step=step, num_slices=num_slices)
    if not has_short_paths:
        return StepPlan(loops, without_grad(loops), is_mixed=is_mixed)
    paths = tuple(
        short_path(
            schedule.seed, step=step, draw_idx=draw_idx(schedule, slice_idx), num_loops=num_loops
        )
        for slice_idx, num_loops in enumerate(loops)
    )
    lengths = [len(path) for path in paths]
    return StepPlan(loops, without_grad(loops), paths, without_grad(lengths), is_mixed)


class ShortRows(NamedTuple):
    """The shorter path of a micro-batch.

    rows: those that have one, ascending; None for all. step_sizes: [loops] or [rows, most loops];
    None if the model is not conditioned on step sizes.
    """

    rows: Tensor | None
    num_loops: NumLoops
    step_sizes: Tensor | None
    no_grad_loops: NumLoops


class RowPlan(NamedTuple):
    """How the rows of a micro-batch run.

    short: None without a shorter path. compared: rows that are compared with the teacher, a slice
    for all of them; None for no row.
    """

    num_loops: NumLoops
    no_grad_loops: NumLoops = 0
    short: ShortRows | None = None
    compared: Tensor | slice | None = None


def plan_rows(
    plan: StepPlan,
    slices: slice,
    *,
    rows_per_slice: int,
    is_conditioned: bool,
    distill: DistillConfig | None = None,
) -> RowPlan:
    """How the rows of some neighbouring slices run.

    Args: is_conditioned: the model takes step sizes. distill: None without a teacher.
    """
    num_loops = per_row(plan.loops[slices], rows_per_slice, is_mixed=plan.is_mixed)
    no_grad = per_row(plan.no_grad_loops[slices], rows_per_slice, is_mixed=plan.is_mixed)
    short = None
    if plan.short_paths is not None:
        short = _short_rows(
            plan, slices, rows_per_slice=rows_per_slice, is_conditioned=is_conditioned
        )
    return RowPlan(num_loops, no_grad, short, compared_rows(distill, num_loops))


def per_row(values: Sequence[int], rows_per_slice: int, *, is_mixed: bool) -> NumLoops:
    """One int for equal slices, else one entry per row."""
    if not is_mixed and len(set(values)) == 1:
        return values[0]
    return torch.tensor(values).repeat_interleave(rows_per_slice)


def _short_rows(
    plan: StepPlan, slices: slice, *, rows_per_slice: int, is_conditioned: bool
) -> ShortRows | None:
    """The shorter paths of some slices; None if none of them has one."""
    assert plan.short_paths is not None, "asked for only where the objective has shorter paths"
    paths, totals = plan.short_paths[slices], plan.loops[slices]
    having = [i for i, path in enumerate(paths) if path]
    if not having:
        return None
    lengths = [len(paths[i]) for i in having]
    no_grad = [plan.short_no_grad_loops[slices][i] for i in having]
    steps = None
    if is_conditioned:
        steps = stacked_steps([paths[i] for i in having], [totals[i] for i in having])
        steps = steps.repeat_interleave(rows_per_slice, dim=0) if plan.is_mixed else steps[0]
    rows = None
    if len(having) < len(paths):
        offsets = torch.arange(rows_per_slice)
        rows = torch.cat([i * rows_per_slice + offsets for i in having])
    return ShortRows(
        rows=rows,
        num_loops=per_row(lengths, rows_per_slice, is_mixed=plan.is_mixed),
        step_sizes=steps,
        no_grad_loops=per_row(no_grad, rows_per_slice, is_mixed=plan.is_mixed),
    )


class Readouts(NamedTuple):
    """What reads the model's output; each is one graph when compiled."""

    nll: Callable[[Tensor, Tensor], Tensor]
    nll_and_divergence: Callable[..., tuple[Tensor, Tensor]]
    distance: Callable[[Tensor, Tensor], Tensor]


class LossModule(nn.Module):
    """Rows and their plan in, token terms out: the one thing that parallel wrappers wrap.

    Args: teacher: rows to logits, as `teacher.Teacher`; None without distillation.

    Fields:
        compiled: blocks and readouts that take the place of the eager ones where gradients are
            computed; set by `parallel.compile_blocks`. None: everything is eager.
        touch: gives every parameter a gradient; set by `parallel.share_gradients`. None: only
            those that a row used have one.
    """

    def __init__(self, model: LoopedLM, *, teacher: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher
        self.compiled: tuple[Blocks, Readouts] | None = None
        self.touch: Callable[[Tensor, nn.Module], Tensor] | None = None

    def forward(self, batch: Batch, plan: RowPlan) -> TokenTerms:
        """Every term of the loss that the plan asks for, at every position of these rows."""
        blocks, readouts = None, self.eager_readouts()
        if self.compiled is not None and torch.is_grad_enabled():
            blocks, readouts = self.compiled
        x_BTD = self._hidden_states(batch, plan.num_loops, plan.no_grad_loops, None, blocks)
        if self.touch is not None:
            x_BTD = self.touch(x_BTD, self.model)
        divergence_BT = None
        if plan.compared is None:
            nll_BT = readouts.nll(x_BTD, batch.targets_BT)
        else:
            assert self.teacher is not None, "rows are compared only where there is a teacher"
            teacher_NTV = self.teacher(pick_rows(batch, plan.compared))
            rows_N = None if isinstance(plan.compared, slice) else beside(plan.compared, x_BTD)
            nll_BT, values_NT = readouts.nll_and_divergence(
                x_BTD, batch.targets_BT, teacher_NTV, rows_N
            )
            divergence_BT = _spread(values_NT, plan.compared, batch)
        if plan.short is None:
            return TokenTerms(nll_BT, divergence_BT)
        rows = slice(None) if plan.short.rows is None else plan.short.rows
        part, short = pick_rows(batch, rows), plan.short
        short_BTD = self._hidden_states(
            part, short.num_loops, short.no_grad_loops, short.step_sizes, blocks
        )
        short_nll_BT = readouts.nll(short_BTD, part.targets_BT)
        distance_BT = readouts.distance(x_BTD[rows], short_BTD)
        if part.padding_mask_BT is not None:
            distance_BT = distance_BT * part.padding_mask_BT
        return TokenTerms(
            nll_BT,
            divergence_BT,
            _spread(short_nll_BT, rows, batch),
            _spread(distance_BT, rows, batch),
        )

    def eager_readouts(self) -> Readouts:
        """The readouts as they are written."""
        return Readouts(self._nll, self._nll_and_divergence, self._distance)

    def _hidden_states(
        self,
        batch: Batch,
        num_loops: NumLoops,
        no_grad_loops: NumLoops,
        step_sizes: Tensor | None,
        blocks: Blocks | None,
    ) -> Tensor:
        """The model without its head, [B, T, D]."""
        call = Call(
            batch.tokens_BT,
            num_loops=num_loops,
            padding_mask_BT=batch.padding_mask_BT,
            document_ids_BT=batch.document_ids_BT,
            step_sizes=step_sizes,
            no_grad_loops=no_grad_loops,
            blocks=blocks,
        )
        return self.model.hidden_states(call)

    def _nll(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Head and cross entropy together, [B, T] fp32."""
        return token_losses(self.model.head(x_BTD), targets_BT)

    def _nll_and_divergence(
        self, x_BTD: Tensor, targets_BT: Tensor, teacher_NTV: Tensor, rows_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`_nll`, and the divergences of some rows from a teacher, [N, T] fp32.

        Args: rows_N: those that are compared; None for all.
        """
        logits_BTV = self.model.head(x_BTD)
        nll_BT = token_losses(logits_BTV, targets_BT)
        if rows_N is not None:
            logits_BTV, targets_BT = logits_BTV[rows_N], targets_BT[rows_N]
        return nll_BT, token_divergences(logits_BTV, teacher_NTV, targets_BT)

    def _distance(self, long_BTD: Tensor, short_BTD: Tensor) -> Tensor:
        """How far what the head's matrix reads is from the longer path's, [B, T] fp32."""
        return squared_distance(self._normed(long_BTD), self._normed(short_BTD))

    def _normed(self, x_BTD: Tensor) -> Tensor:
        """The output after the final norm, where one acts there."""
        model = self.model
        if model.final_norm is None or model.config.final_norm == "loop":
            return x_BTD
        return model.final_norm(x_BTD)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Fields: loss: cross entropy, token mean over all slices, nats; loss_by_loops: the same per loop
    count; terms: the other terms of the objective before their weights, by name; num_targets:
    tokens that carried loss; grad_norm: before clipping.
    """

    loss: float
    loss_by_loops: dict[int, float]
    terms: dict[str, float]
    num_targets: int
    grad_norm: float


def train_step(
    loss_module: LossModule,
    batch: Batch,
    optimizers: Optimizers,
    *,
    loops_per_slice: Sequence[int] | StepPlan,
    micro_batch_size: int,
    precision: Precision,
    is_mixed: bool = True,
    objective: ObjectiveConfig | None = None,
) -> StepResult:
    """Accumulate the gradient of the objective over the global batch, clip, update.

    Args:
        batch: the global batch; its rows are cut into as many equal slices as the plan has.
        loops_per_slice: a plan, or loop counts alone, which `is_mixed` then goes with.
        micro_batch_size: rows per forward, whole slices; changes memory, not the result.
        objective: weights of the terms beside cross entropy; None for none.
    """
    plan = loops_per_slice
    if not isinstance(plan, StepPlan):
        plan = StepPlan.of_loops(plan, is_mixed=is_mixed)
    objective = objective or ObjectiveConfig()
    model = loss_module.model
    device = model.embedding.weight.device
    totals = step_totals(batch)
    rows_per_slice = len(batch.tokens_BT) // len(plan.loops)
    losses, terms_sum = DepthLosses(), TermSums(totals)
    optimizers.zero_grad()
    for start in range(0, len(batch.tokens_BT), micro_batch_size):
        part = take_rows(batch, start, start + micro_batch_size, device=device)
        slices = slice(start // rows_per_slice, (start + micro_batch_size) // rows_per_slice)
        rows = plan_rows(
            plan,
            slices,
            rows_per_slice=rows_per_slice,
            is_conditioned=isinstance(model.config.modulation, TimeModulationConfig),
            distill=objective.distill,
        )
        with autocast(device, precision):
            terms = loss_module(part, rows)
        share = step_share(terms, part, objective, totals)
        # All that is trained may act on later loops only; then a step of one loop has no gradient.
        if share.requires_grad:
            share.backward()
        losses.add(terms.nll_BT, part, loops_per_slice=plan.loops[slices])
        terms_sum.add(terms, part)
    grad_norm = optimizers.clip_gradients()
    optimizers.step()
    return StepResult(
        losses.mean(), losses.mean_by_loops(), terms_sum.means(), totals.num_targets, grad_norm
    )


def _spread(values_NT: Tensor, rows: Tensor | slice, batch: Batch) -> Tensor:
    """Values of some rows as [B, T], zero in the others."""
    if isinstance(rows, slice):
        return values_NT
    zeros_BT = torch.zeros_like(batch.targets_BT, dtype=values_NT.dtype)
    return zeros_BT.index_copy(0, beside(rows, zeros_BT), values_NT)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """bf16 matrix products over fp32 weights and state, or plain fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
