"""Floating-point operations per token, as a function of config, loop count and context.

What a plan makes of them is in `count.py`. Nothing here builds a model.

D model width, H query heads, G key/value heads, C channels per head, V vocabulary, R low rank,
S tokens that a query attends to, k loops.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from depthdial.cache.policies import cache_rule
from depthdial.config import (
    ATTENTION_LETTERS,
    SLIDING,
    CachePolicy,
    ModelConfig,
    ModulationConfig,
)
from depthdial.model.count.cache import require_count
from depthdial.model.count.parameters import (
    block_matrices,
    gate_matrices,
    injection_matrices,
    linear_shapes,
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
    """Scores and weighted sums of all attention; the projections are in their block."""
    gate: int
    """Injection and state update: their matrices, once per loop."""
    modulation: int
    """Low-rank path of every executed core and coda sublayer."""
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


def flops_per_token(
    config: ModelConfig,
    num_loops: int,
    *,
    context: int,
    training: bool = False,
    position: QueryPosition = "mean",
    policy: CachePolicy | None = None,
) -> FlopsPerToken:
    """Floating-point operations per token of a forward, or of forward and backward.

        2 * (weights of each matrix, times its uses) + 4 * H * C * (sum of S over all attention)

    S is the number of tokens a query attends to: at most the window, where a layer has one. Loops
    that share the first one's keys make none; loops that mix them with their own attend twice. The
    gate is counted in every loop, also where `gate_bypass` discards its result.
    Left out: the embedding look-up, everything elementwise (norms, rotation, softmax,
    activations, residuals, scale and shift, the state's interpolation), gates of one number per
    head, the heads of the modulation (one table per loop count, not per token), document masks
    (which only lower S), the optimizer, and recomputation.

    Args:
        context: tokens in the sequence.
        training: count the backward too, through every loop: three times the forward.
        position: `mean`, over the tokens of one causal sequence; `last`, the newest token of a
            decoding step.
        policy: of the cache, which may spare keys or add a pass; None without a cache.

    Raises: ValueError for a number out of range, or a policy that does not go with the model.
    """
    require_count("num_loops", num_loops)
    require_count("context", context)
    if position not in ("mean", "last"):
        raise ValueError(f"position='{position}' is unknown; choose 'mean' or 'last'.")
    if training and policy is not None:
        raise ValueError(f"policy='{policy}' has no effect on training, which has no cache.")
    passes = _passes(config, num_loops, policy)
    factor = TRAINING_FACTOR if training else 1
    per_weight = FLOPS_PER_WEIGHT * factor
    per_key = 2 * per_weight * config.num_heads * config.head_dim
    per_pass = gate_matrices(config) + injection_matrices(config)
    return FlopsPerToken(
        prelude=per_weight * block_matrices(config, config.prelude_layout),
        core=per_weight * _core_weights(config, passes),
        coda=per_weight * (block_matrices(config, config.coda_layout) + state_projection(config)),
        attention=per_key * _attended(config, passes, context=context, position=position),
        gate=per_weight * len(passes) * per_pass,
        modulation=per_weight * _low_rank_weights(config, len(passes)),
        head=per_weight * config.vocab_size * config.d_model,
    )


class CorePass(NamedTuple):
    """What a pass of the core computes.

    makes_keys: keys and values of its own. attends_locally: a second time, to its own keys in the
    local window. has_deltas: stored differences.
    """

    makes_keys: bool
    attends_locally: bool
    has_deltas: bool


def _passes(config: ModelConfig, num_loops: int, policy: CachePolicy | None) -> list[CorePass]:
    """All passes of one forward; the extra one of a cache is like the first."""
    kept = cache_rule(policy or config.loop.cache_policy, config).kept
    deltas, mixes = config.loop_lora, config.loop.local_window is not None
    passes = [
        CorePass(
            makes_keys=loop_idx == 0 or kept != "shared",
            attends_locally=loop_idx > 0 and mixes,
            has_deltas=deltas is not None and deltas.set_at(loop_idx) >= 0,
        )
        for loop_idx in range(num_loops)
    ]
    return [*passes, passes[0]] if kept == "stash" and policy is not None else passes


def _core_weights(config: ModelConfig, passes: Sequence[CorePass]) -> int:
    """Weights of the core's matrices times their uses, low-rank differences included."""
    rank = 0 if config.loop_lora is None else config.loop_lora.rank
    shapes = [
        (name, inputs, outputs)
        for letter in config.core_layout
        for name, (inputs, outputs) in linear_shapes(config, letter, is_core=True).items()
    ]
    total = 0
    for kind, num_passes in Counter(passes).items():
        for name, inputs, outputs in shapes:
            if kind.makes_keys or name not in ("k_proj", "v_proj"):
                total += num_passes * inputs * outputs
                total += num_passes * rank * (inputs + outputs) if kind.has_deltas else 0
    return total


def _attended(
    config: ModelConfig, passes: Sequence[CorePass], *, context: int, position: QueryPosition
) -> float:
    """Sum of S over all attention that one forward runs."""

    def reach(layout: str, local_window: int | None = None) -> float:
        total = 0.0
        for letter in layout:
            if letter in ATTENTION_LETTERS:
                window = config.sliding.window if letter == SLIDING and config.sliding else context
                seen = min(window, context, local_window or context)
                # The first `seen` queries see fewer tokens than that.
                mean = seen - seen * (seen - 1) / (2 * context)
                total += seen if position == "last" else mean
        return total

    core = config.core_layout
    own = sum(kind.attends_locally for kind in passes) * reach(core, config.loop.local_window)
    return reach(config.prelude_layout + config.coda_layout) + len(passes) * reach(core) + own


def _low_rank_weights(config: ModelConfig, num_passes: int) -> int:
    """Weights of the low-rank pairs, times the loops that run them; the prelude has none."""
    if not isinstance(config.modulation, ModulationConfig):
        return 0
    _, core, coda = config.split
    return 2 * config.modulation.rank * config.d_model * (num_passes * core + coda)
