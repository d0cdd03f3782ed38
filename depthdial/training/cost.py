"""Floating-point operations of a training step: what its rows run, forward and backward.

Frozen weights are counted as if they were trained: how much of their backward is spared depends on
where they stand.
"""

from __future__ import annotations

from collections.abc import Iterable

from depthdial.config import ModelConfig
from depthdial.model.count import flops_per_token


def step_flops(
    config: ModelConfig,
    forwards: Iterable[tuple[int, int]],
    *,
    context: int,
    tokens_per_slice: int,
    teacher: tuple[ModelConfig, int] | None = None,
    num_compared: int = 0,
) -> float:
    """All slices of one step, their shorter paths and the teacher's forward included.

    Args:
        forwards: `StepPlan.forwards`.
        context: tokens per row.
        teacher: its config and loop count; num_compared: slices that are compared with it.
    """
    per_token = _trained(config, forwards, context=context)
    if teacher is not None:
        teacher_config, num_loops = teacher
        per_token += (
            num_compared * flops_per_token(teacher_config, num_loops, context=context).total
        )
    return per_token * tokens_per_slice


def _trained(config: ModelConfig, forwards: Iterable[tuple[int, int]], *, context: int) -> float:
    """Per token: the last loops forward and backward, the first `no_grad` of each forward only."""
    total = 0.0
    for loops, no_grad in forwards:
        with_grad = loops - no_grad
        total += flops_per_token(config, with_grad, context=context, training=True).total
        total += flops_per_token(config, loops, context=context).total
        total -= flops_per_token(config, with_grad, context=context).total
    return total
