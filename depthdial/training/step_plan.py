"""What every depth slice does in one optimizer step, and the same for the rows of a micro-batch.

The draws are in `depth_schedule.py` and `trajectory.py`; here they are laid out as data that the
model takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import DepthConfig
from depthdial.training.depth_schedule import (
    INDEPENDENT_SAMPLERS,
    DepthSchedule,
    draw_idx,
    loops_for_step,
    no_grad_loops_at,
)
from depthdial.training.losses import short_path, stacked_steps
from depthdial.training.objective import RowPlan, ShortRows


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


def mixes_depths(config: DepthConfig, *, max_loops: int) -> bool:
    """Whether slices of one step may run different loop counts."""
    if max_loops == 1:
        return False
    is_split_override = config.sampler == "override" and config.override_frac > 0
    is_split_draw = config.depth_scope == "slice_group"
    return config.sampler in INDEPENDENT_SAMPLERS or is_split_override or is_split_draw


def plan_rows(
    plan: StepPlan, slices: slice, *, rows_per_slice: int, is_conditioned: bool
) -> RowPlan:
    """How the rows of some neighbouring slices run.

    Args: is_conditioned: the model takes step sizes.
    """
    num_loops = per_row(plan.loops[slices], rows_per_slice, is_mixed=plan.is_mixed)
    no_grad = per_row(plan.no_grad_loops[slices], rows_per_slice, is_mixed=plan.is_mixed)
    if plan.short_paths is None:
        return RowPlan(num_loops, no_grad)
    return RowPlan(
        num_loops,
        no_grad,
        _short_rows(plan, slices, rows_per_slice=rows_per_slice, is_conditioned=is_conditioned),
    )


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
