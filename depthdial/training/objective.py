"""How the terms of the loss are weighed: cross entropy, distillation, the shorter path.

The terms come from `step.py: LossModule`; nothing here runs a model.
Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthdial.cache.loop_counts import NumLoops
from depthdial.config.recipe import DistillConfig, ObjectiveConfig
from depthdial.data.packing import Batch
from depthdial.training.losses import count_targets, step_loss_share, total_weight, weighted


class TokenTerms(NamedTuple):
    """The terms of the loss at every position, [B, T], before any weight; at least fp32.

    0 where a term does not apply; None for a term that no row has.
    """

    nll_BT: Tensor
    divergence_BT: Tensor | None = None
    short_nll_BT: Tensor | None = None
    distance_BT: Tensor | None = None


class StepTotals(NamedTuple):
    """What the sums over a whole global batch are divided by.

    weight: of its targets; `num_targets` where the batch has no token weights. positions: that are
    no padding.
    """

    num_targets: int
    weight: float
    positions: int


def step_totals(batch: Batch) -> StepTotals:
    """The totals of a global batch."""
    return StepTotals(count_targets(batch.targets_BT), total_weight(batch), count_positions(batch))


def step_share(
    terms: TokenTerms, batch: Batch, objective: ObjectiveConfig, totals: StepTotals
) -> Tensor:
    """What a micro-batch adds to the loss of its optimizer step.

    Args: batch: the micro-batch; totals: of the whole global batch, over all ranks.
    Raises: ValueError if the step has no target.
    """
    total = step_loss_share(weighted(terms.nll_BT, batch), step_weight=totals.weight)
    distill, path = objective.distill, objective.trajectory
    if terms.divergence_BT is not None and distill is not None:
        divergence_BT = weighted(terms.divergence_BT, batch)
        total = total + distill.weight * divergence_BT.sum() / totals.weight
    if terms.short_nll_BT is not None and terms.distance_BT is not None and path is not None:
        short_nll_BT = weighted(terms.short_nll_BT, batch)
        total = total + path.short_weight * short_nll_BT.sum() / totals.weight
        total = total + path.consistency_weight * terms.distance_BT.sum() / totals.positions
    return total


class TermSums:
    """Running sums of the terms beside cross entropy over the micro-batches of a step."""

    def __init__(self, totals: StepTotals) -> None:
        self._counts = {
            "distill": totals.weight,
            "short_loss": totals.weight,
            "consistency": totals.positions,
        }
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, terms: TokenTerms, batch: Batch) -> None:
        values = {
            "distill": terms.divergence_BT,
            "short_loss": terms.short_nll_BT,
            "consistency": terms.distance_BT,
        }
        for name, value_BT in values.items():
            if value_BT is not None:
                weighed_BT = value_BT if name == "consistency" else weighted(value_BT, batch)
                self._sums.setdefault(name, []).append(weighed_BT.detach().sum())

    def means(self) -> dict[str, float]:
        """Means over the step's targets or positions, rows without the term counted as zero."""
        return {
            name: sum(float(part) for part in parts) / self._counts[name]
            for name, parts in self._sums.items()
        }


def compared_rows(distill: DistillConfig | None, num_loops: NumLoops) -> Tensor | slice | None:
    """Rows that are compared with the teacher, a slice for all of them; None for no row."""
    if distill is None:
        return None
    if distill.rows == "all":
        return slice(None)
    if isinstance(num_loops, int):
        return slice(None) if num_loops == 1 else None
    rows = torch.nonzero(num_loops == 1).flatten()
    return rows if len(rows) else None


def num_compared(distill: DistillConfig | None, loops_per_slice: Sequence[int]) -> int:
    """Slices that are compared with the teacher."""
    if distill is None:
        return 0
    return sum(distill.rows == "all" or loops == 1 for loops in loops_per_slice)


def count_positions(batch: Batch) -> int:
    """Positions that are no padding."""
    if batch.padding_mask_BT is None:
        return batch.tokens_BT.numel()
    return int(batch.padding_mask_BT.sum())
