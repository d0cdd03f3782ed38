"""FLOPs, and the plan of parameters, FLOPs and cache, as functions of config and loop count.

Parameters are in `count_parameters.py`, cache bytes in `count_cache.py`. Nothing here builds a
model. What the numbers mean for a device or how they are
printed is decided elsewhere (the `plan` command renders `Plan`).

D model width, H query heads, G key/value heads, C channels per head, F feed-forward
width, V vocabulary, R low rank, k loops, K max_loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from depthdial.config import CachePolicy, ModelConfig, ModulationConfig
from depthdial.model.count_cache import cache_bytes, require_count
from depthdial.model.count_parameters import (
    ParameterCount,
    block_matrices,
    count_parameters,
    gate_matrices,
    injection_matrices,
    low_rank_set,
    num_attention,
    state_projection,
)

FLOPS_PER_WEIGHT = 2
"""One multiplication and one addition per weight and token."""
TRAINING_FACTOR = 3
"""Backward through a matrix product costs two products: one per operand."""

QueryPosition = Literal["mean", "last"]


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations per token by part."""

    prelude: int
    core: int
    coda: int
    attention: float
    """Scores and weighted sums of all attention visits; the projections are in their block."""
    gate: int
    """Injection and state update: their matrices, once per loop."""
    modulation: int
    """Low-rank path of every visited core and coda sublayer."""
    head: int

    @property
    def total(self) -> float:
        """All parts."""
        return sum(dataclasses.astuple(self))

    def share(self, part: str) -> float:
        """Fraction of the total spent in one part, e.g. `share("gate")`."""
        parts = dataclasses.asdict(self)
        if part not in parts:
            raise ValueError(f"no part '{part}' in a FLOP count; parts: {', '.join(parts)}.")
        return parts[part] / self.total


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


def flops_per_token(
    config: ModelConfig,
    num_loops: int,
    *,
    context: int,
    training: bool = False,
    position: QueryPosition = "mean",
) -> FlopsPerToken:
    """Floating-point operations per token of a forward, or of forward and backward.

        2 * (weights of each matrix, times its visits) + 4 * H * C * S * (attention visits)

    S is the number of tokens a query attends to. The gate is counted in every loop, also
    where `gate_bypass` discards its result.
    Left out: the embedding look-up, everything elementwise (norms, rotation, softmax,
    activations, residuals, scale and shift, the state's interpolation), the heads of the
    modulation (one table per loop count, not per token), document masks (which only lower
    S), the optimizer, and recomputation.

    Args:
        context: tokens in the sequence.
        training: count the backward too, through every loop: three times the forward.
        position: `mean`, over the tokens of one causal sequence, S = (context + 1) / 2;
            `last`, the newest token of a decoding step, S = context.
    """
    require_count("num_loops", num_loops)
    require_count("context", context)
    if position not in ("mean", "last"):
        raise ValueError(f"position='{position}' is unknown; choose 'mean' or 'last'.")
    attended = context if position == "last" else (context + 1) / 2
    score_flops = 2 * FLOPS_PER_WEIGHT * config.num_heads * config.head_dim * attended
    factor = TRAINING_FACTOR if training else 1
    per_weight = FLOPS_PER_WEIGHT * factor
    return FlopsPerToken(
        prelude=per_weight * block_matrices(config, config.prelude_layout),
        core=per_weight * _core_weights(config, num_loops),
        coda=per_weight * (block_matrices(config, config.coda_layout) + state_projection(config)),
        attention=factor * score_flops * attention_visits(config, num_loops),
        gate=per_weight * num_loops * (gate_matrices(config) + injection_matrices(config)),
        modulation=per_weight * _low_rank_visits(config, num_loops),
        head=per_weight * config.vocab_size * config.d_model,
    )


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
            sampler of a recipe decides (`train/depth_schedule.py: mean_loops`); None for uniform
            draws from 1..max_loops.
        mixed_frac: fraction of the training tokens at mixed depth; the rest runs one loop.

    Raises: ValueError for a number out of range.
    """
    if not num_loops:
        raise ValueError("num_loops is empty; give at least one loop count, e.g. [1, 2, 4].")
    policy = policy or config.loop.cache_policy
    if mean_loops is None:
        mean_loops = mean_training_loops(config.max_loops, override_frac=0.0)
    cache = partial(
        cache_bytes,
        config,
        context=context,
        policy=policy,
        bytes_per_value=bytes_per_value,
        batch_size=batch_size,
    )
    parameters = count_parameters(config)
    weight_bytes = parameters.total * bytes_per_value
    return Plan(
        parameters=parameters,
        weight_bytes=weight_bytes,
        context=context,
        batch_size=batch_size,
        cache_policy=policy,
        is_beyond_max_context=context > config.max_context,
        mean_training_loops=mean_loops,
        training_cost_ratio=training_cost_ratio(config, mean_loops, mixed_frac=mixed_frac),
        rows=tuple(
            _plan_row(
                config,
                loops,
                context=context,
                peak=cache(num_loops=loops, phase="prompt_peak"),
                steady=cache(num_loops=loops, phase="steady"),
                weight_bytes=weight_bytes,
            )
            for loops in num_loops
        ),
    )


def _plan_row(
    config: ModelConfig, num_loops: int, *, context: int, peak: int, steady: int, weight_bytes: int
) -> PlanRow:
    executed = executed_sublayers(config, num_loops)
    flops = partial(flops_per_token, config, num_loops, context=context)
    return PlanRow(
        num_loops=num_loops,
        executed_sublayers=executed,
        depth_ratio=executed / executed_sublayers(config, 1),
        prompt_flops_per_token=flops(position="mean").total,
        decode_flops_per_token=flops(position="last").total,
        cache_peak_bytes=peak,
        cache_steady_bytes=steady,
        memory_peak_bytes=weight_bytes + peak,
        is_beyond_max_loops=num_loops > config.max_loops,
    )


def _low_rank_visits(config: ModelConfig, num_loops: int) -> int:
    """Weights of the low-rank pairs, times their visits; the prelude has none."""
    if not isinstance(config.modulation, ModulationConfig):
        return 0
    _, core, coda = config.split
    return 2 * config.modulation.rank * config.d_model * (num_loops * core + coda)


def attention_visits(config: ModelConfig, num_loops: int) -> int:
    """Attention sublayers that one forward runs."""
    outside = num_attention(config.prelude_layout + config.coda_layout)
    return outside + num_loops * num_attention(config.core_layout)


def _core_weights(config: ModelConfig, num_loops: int) -> int:
    """Weights of the core's matrices times their visits, low-rank differences included."""
    weights = num_loops * block_matrices(config, config.core_layout, is_core=True)
    if config.visit_deltas is None or not config.visit_deltas.rank:
        return weights
    with_delta = sum(config.visit_deltas.set_at(loop_idx) >= 0 for loop_idx in range(num_loops))
    return weights + with_delta * low_rank_set(config)


def _require_frac(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: give a fraction from 0 to 1.")
