"""Floating-point operations of a training step: what its rows run, forward and backward.

Frozen weights are counted as if they were trained: how much of their backward is spared depends on
where they stand.
"""

from __future__ import annotations

from collections.abc import Iterable

from depthdial.config import ModelConfig
from depthdial.config.recipe import ObjectiveConfig
from depthdial.model.count import flops_per_token
from depthdial.training.step import StepPlan
from depthdial.training.teacher import Teacher


def step_flops(
    config: ModelConfig,
    plan: StepPlan,
    *,
    context: int,
    tokens_per_slice: int,
    objective: ObjectiveConfig,
    teacher: Teacher | None,
) -> float:
    """All rows of one step, their shorter paths and the teacher's forward included.

    Args: context: tokens per row.
    """
    passes = list(zip(plan.loops, plan.no_grad_loops, strict=True))
    if plan.short_paths is not None:
        lengths = map(len, plan.short_paths)
        passes += [pair for pair in zip(lengths, plan.short_no_grad_loops, strict=True) if pair[0]]
    per_token = _trained(config, passes, context=context)
    if teacher is not None and objective.distill is not None:
        compares_all = objective.distill.rows == "all"
        num_compared = sum(compares_all or loops == 1 for loops in plan.loops)
        forward = flops_per_token(teacher.model.config, teacher.num_loops, context=context).total
        per_token += num_compared * forward
    return per_token * tokens_per_slice


def _trained(config: ModelConfig, passes: Iterable[tuple[int, int]], *, context: int) -> float:
    """Per token: the last loops forward and backward, the first `no_grad` of each forward only."""
    total = 0.0
    for loops, no_grad in passes:
        with_grad = loops - no_grad
        total += flops_per_token(config, with_grad, context=context, training=True).total
        total += flops_per_token(config, loops, context=context).total
        total -= flops_per_token(config, with_grad, context=context).total
    return total
