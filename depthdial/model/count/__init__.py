"""Numbers that follow from a config alone: parameters, FLOPs, cache bytes, and the plan of all."""

from depthdial.model.count.cache import cache_bytes, cache_slots
from depthdial.model.count.costs import (
    Plan,
    PlanRow,
    effective_depth,
    executed_sublayers,
    mean_training_loops,
    plan,
    training_cost_ratio,
)
from depthdial.model.count.flops import FlopsPerToken, flops_per_token
from depthdial.model.count.parameters import ParameterCount, count_parameters

__all__ = [
    "FlopsPerToken",
    "ParameterCount",
    "Plan",
    "PlanRow",
    "cache_bytes",
    "cache_slots",
    "count_parameters",
    "effective_depth",
    "executed_sublayers",
    "flops_per_token",
    "mean_training_loops",
    "plan",
    "training_cost_ratio",
]
