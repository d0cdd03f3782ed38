"""What is minimised: cross entropy at the drawn depth, and the optional terms beside it.

Distillation (`teacher.py`) and the shorter path (`trajectory.py`) are put together here, row by
row; their draws come in as data.
Letters: B rows, T tokens, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthdial.cache.loop_counts import NumLoops
from depthdial.config.recipe import ObjectiveConfig
from depthdial.data.packing import Batch
from depthdial.training.loss_module import LossModule
from depthdial.training.losses import step_loss_share
from depthdial.training.teacher import Teacher


class ShortRows(NamedTuple):
    """The shorter path of a micro-batch.

    rows: those that have one, ascending; None for all. step_sizes: [loops] or [rows, most loops];
    None for a model that nothing tells them to.
    """

    rows: Tensor | None
    num_loops: NumLoops
    step_sizes: Tensor | None
    no_grad_loops: NumLoops


class RowPlan(NamedTuple):
    """How the rows of a micro-batch run; short: None without a shorter path."""

    num_loops: NumLoops
    no_grad_loops: NumLoops = 0
    short: ShortRows | None = None


class TokenTerms(NamedTuple):
    """The terms of the loss at every position, [B, T] fp32, 0 where they do not apply; None for a
    term that no row has."""

    nll_BT: Tensor
    divergence_BT: Tensor | None = None
    short_nll_BT: Tensor | None = None
    distance_BT: Tensor | None = None


class Objective(nn.Module):
    """Rows and their plan in, terms out: what a data-parallel wrapper wraps.

    Args: teacher: None without distillation, which `config.distill` then must not ask for.
    """

    def __init__(
        self, loss_module: LossModule, config: ObjectiveConfig, *, teacher: Teacher | None = None
    ) -> None:
        super().__init__()
        assert (config.distill is None) == (teacher is None), "a teacher goes with distillation"
        self.loss_module = loss_module
        self.config = config
        self.teacher = teacher

    def forward(self, batch: Batch, plan: RowPlan) -> TokenTerms:
        """Every term of the objective on these rows."""
        compared = self._compared_rows(plan)
        if plan.short is None and compared is None:
            return TokenTerms(self.loss_module(batch, plan.num_loops, plan.no_grad_loops))
        x_BTD = self.loss_module.hidden_states(batch, plan.num_loops, plan.no_grad_loops)
        if compared is None or self.teacher is None:
            terms = TokenTerms(self.loss_module.read_out(x_BTD, batch.targets_BT))
        else:
            teacher_NTV = self.teacher.logits(pick_rows(batch, compared))
            rows_N = None if isinstance(compared, slice) else _on(compared, x_BTD)
            nll_BT, values_NT = self.loss_module.read_out_compared(
                x_BTD, batch.targets_BT, teacher_NTV, rows_N
            )
            terms = TokenTerms(nll_BT, _spread(values_NT, compared, batch))
        if plan.short is not None:
            terms = self._with_short_path(terms, x_BTD, batch, plan.short)
        return terms

    def share(self, terms: TokenTerms, *, step_targets: int, step_positions: int) -> Tensor:
        """What a micro-batch adds to the loss of its optimizer step.

        Args: step_targets, step_positions: scored and real positions of the whole global batch.
        """
        total = step_loss_share(terms.nll_BT, step_targets=step_targets)
        distill, path = self.config.distill, self.config.trajectory
        if terms.divergence_BT is not None and distill is not None:
            total = total + distill.weight * terms.divergence_BT.sum() / step_targets
        if terms.short_nll_BT is not None and terms.distance_BT is not None and path is not None:
            total = total + path.short_weight * terms.short_nll_BT.sum() / step_targets
            total = total + path.consistency_weight * terms.distance_BT.sum() / step_positions
        return total

    def _compared_rows(self, plan: RowPlan) -> Tensor | slice | None:
        """Rows that are compared with the teacher; None for no row."""
        if self.config.distill is None:
            return None
        if self.config.distill.rows == "all":
            return slice(None)
        if isinstance(plan.num_loops, int):
            return slice(None) if plan.num_loops == 1 else None
        rows = torch.nonzero(plan.num_loops == 1).flatten()
        return rows if len(rows) else None

    def _with_short_path(
        self, terms: TokenTerms, long_BTD: Tensor, batch: Batch, short: ShortRows
    ) -> TokenTerms:
        """Terms of the shorter path added."""
        rows = slice(None) if short.rows is None else short.rows
        part = pick_rows(batch, rows)
        short_BTD = self.loss_module.hidden_states(
            part, short.num_loops, short.no_grad_loops, step_sizes=short.step_sizes
        )
        nll_BT = self.loss_module.read_out(short_BTD, part.targets_BT)
        distance_BT = self.loss_module.distance(long_BTD[rows], short_BTD)
        if part.padding_mask_BT is not None:
            distance_BT = distance_BT * part.padding_mask_BT
        return terms._replace(
            short_nll_BT=_spread(nll_BT, rows, batch),
            distance_BT=_spread(distance_BT, rows, batch),
        )


def count_positions(batch: Batch) -> int:
    """Positions that are no padding."""
    if batch.padding_mask_BT is None:
        return batch.tokens_BT.numel()
    return int(batch.padding_mask_BT.sum())


def pick_rows(batch: Batch, rows: Tensor | slice) -> Batch:
    """Some rows of a batch."""
    return Batch(*(None if t is None else t[_on(rows, t)] for t in batch))


def _spread(values_NT: Tensor, rows: Tensor | slice, batch: Batch) -> Tensor:
    """Values of some rows as [B, T], zero in the others."""
    if isinstance(rows, slice):
        return values_NT
    zeros_BT = torch.zeros_like(batch.targets_BT, dtype=values_NT.dtype)
    return zeros_BT.index_copy(0, _on(rows, zeros_BT), values_NT)


def _on(rows: Tensor | slice, like: Tensor) -> Tensor | slice:
    return rows if isinstance(rows, slice) else rows.to(like.device)
