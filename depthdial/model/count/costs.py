"""Depth, training cost, and the plan of parameters, FLOPs and cache, as functions of the config.

Parameters are in `parameters.py`, FLOPs in `flops.py`, cache bytes in `cache.py`.
Nothing here builds a model. What the numbers mean for a device or how they are printed is decided
elsewhere (the `plan` command renders `Plan`).
k loops, K max_loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from depthdial.cache.loop_counts import check_num_loops
from depthdial.config import CachePolicy, ModelConfig
from depthdial.model.count.cache import cache_bytes, require_count
from depthdial.model.count.flops import flops_per_token
from depthdial.model.count.parameters import ParameterCount, count_parameters


@dataclass(frozen=True)
class PlanRow:
    """Costs of one loop count."""

    num_loops: int
    executed_sublayers: int
    depth_ratio: float
    """Executed sublayers over those of one loop."""
    prompt_flops_per_token: float
    """Forward, mean over the tokens of a prompt of `context` tokens."""
    decode_flops_per_token: float
    """Forward, for the last token of the context."""
    cache_peak_bytes: int
    """While the prompt runs."""
    cache_steady_bytes: int
    """While tokens are generated."""
    memory_peak_bytes: int
    """Weights and peak cache; activations are not in it."""
    is_beyond_max_loops: bool
    """More loops than the model is made for."""


@dataclass(frozen=True)
class Plan:
    """What a model costs at several loop counts."""

    parameters: ParameterCount
    weight_bytes: int
    context: int
    batch_size: int
    cache_policy: CachePolicy
    is_beyond_max_context: bool
    mean_training_loops: float
    training_cost_ratio: float
    """Training FLOPs over those of training the same tokens at one loop."""
    rows: tuple[PlanRow, ...]


def executed_sublayers(config: ModelConfig, num_loops: int) -> int:
    """Sublayers that one forward runs: L_in + k * L_core + L_out."""
    require_count("num_loops", num_loops)
    prelude, core, coda = config.split
    return prelude + num_loops * core + coda


def effective_depth(config: ModelConfig, mean_loops: float) -> float:
    """Executed sublayers at a loop count that may be a mean: D_eff of ELR Eq. 5."""
    if mean_loops < 1:
        raise ValueError(f"mean_loops={mean_loops}, but every forward runs at least one loop.")
    prelude, core, coda = config.split
    return prelude + mean_loops * core + coda


def mean_training_loops(max_loops: int, override_frac: float) -> float:
    """Mean loops of a sample: uniform over 1..K, a fraction f overridden to one loop.

        mean k = f + (1 - f) * (K + 1) / 2

    Source: ELR section 4.
    """
    require_count("max_loops", max_loops)
    _require_frac("override_frac", override_frac)
    return override_frac + (1 - override_frac) * (max_loops + 1) / 2


def training_cost_ratio(config: ModelConfig, mean_loops: float, *, mixed_frac: float) -> float:
    """Training FLOPs relative to one-loop training on the same tokens.

        C / C_base = (1 - rho) + rho * D_eff(mean k) / D_eff(1)

    The wall-clock ratio of synchronised ranks is this at the mean of the majority draw,
    (K + 1) / 2, because ranks overridden to one loop wait for the others.

    Args:
        mean_loops: mean loop count of a sample while depths are mixed.
        mixed_frac: rho, fraction of the tokens trained at mixed depth.

    Source: ELR Eq. 5; it counts executed sublayers, so neither head nor gate.
    """
    _require_frac("mixed_frac", mixed_frac)
    relative = effective_depth(config, mean_loops) / effective_depth(config, 1)
    return (1 - mixed_frac) + mixed_frac * relative


def plan(
    config: ModelConfig,
    *,
    num_loops: Sequence[int],
    context: int,
    batch_size: int = 1,
    bytes_per_value: int = 2,
    policy: CachePolicy | None = None,
    mean_loops: float | None = None,
    mixed_frac: float = 1.0,
) -> Plan:
    """Memory, FLOPs and cache at several loop counts, and the cost of training.

    Loop counts above `max_loops` and contexts above `max_context` are computed and marked.

    Args:
        num_loops: loop counts, one row each.
        context: tokens per sequence.
        batch_size: sequences held at the same time.
        bytes_per_value: of a weight and of a cached value; 2 for bfloat16.
        policy: cache policy; None for the one in `config`.
        mean_loops: mean loop count of a training sample while depths are mixed, which the
            sampler of a recipe decides (`training/depth_schedule.py: mean_loops`); None for uniform
            draws from 1..max_loops.
        mixed_frac: fraction of the training tokens at mixed depth; the rest runs one loop.

    Raises: ValueError for a number out of range.
    """
    if not num_loops:
        raise ValueError("num_loops is empty; give at least one loop count, e.g. [1, 2, 4].")
    for k in num_loops:
        check_num_loops(k)
    policy = policy or config.loop.cache_policy
    if mean_loops is None:
        mean_loops = mean_training_loops(config.max_loops, override_frac=0.0)
    parameters = count_parameters(config)
    weight_bytes = parameters.total * bytes_per_value
    row = partial(
        _plan_row,
        config,
        context=context,
        batch_size=batch_size,
        bytes_per_value=bytes_per_value,
        policy=policy,
        weight_bytes=weight_bytes,
    )
    return Plan(
        parameters=parameters,
        weight_bytes=weight_bytes,
        context=context,
        batch_size=batch_size,
        cache_policy=policy,
        is_beyond_max_context=context > config.max_context,
        mean_training_loops=mean_loops,
        training_cost_ratio=training_cost_ratio(config, mean_loops, mixed_frac=mixed_frac),
        rows=tuple(map(row, num_loops)),
    )


def _plan_row(
    config: ModelConfig,
    num_loops: int,
    *,
    context: int,
    batch_size: int,
    bytes_per_value: int,
    policy: CachePolicy,
    weight_bytes: int,
) -> PlanRow:
    executed = executed_sublayers(config, num_loops)
    flops = partial(flops_per_token, config, num_loops, context=context, policy=policy)
    cache = partial(
        cache_bytes,
        config,
        num_loops,
        context=context,
        policy=policy,
        bytes_per_value=bytes_per_value,
        batch_size=batch_size,
    )
    peak = cache(phase="prompt_peak")
    return PlanRow(
        num_loops=num_loops,
        executed_sublayers=executed,
        depth_ratio=executed / executed_sublayers(config, 1),
        prompt_flops_per_token=flops(position="mean").total,
        decode_flops_per_token=flops(position="last").total,
        cache_peak_bytes=peak,
        cache_steady_bytes=cache(phase="steady"),
        memory_peak_bytes=weight_bytes + peak,
        is_beyond_max_loops=num_loops > config.max_loops,
    )


def _require_frac(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: give a fraction from 0 to 1.")
