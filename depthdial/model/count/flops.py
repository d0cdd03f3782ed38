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

from depthdial.config import CachePolicy, ModelConfig, ModulationConfig, cache_rule
from depthdial.layers.layer_type import PlacedLayer
from depthdial.model.count.cache import require_count
from depthdial.model.count.parameters import (
    gate_matrices,
    injection_matrices,
    state_projection,
)
from depthdial.model.sublayer import placed_layers

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
    """Scores and weighted sums of all attention, and recurrences; the projections are in their
    block."""
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

    and what a layer without attention says of itself (`LayerType.flops_per_token`).
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
    blocks = placed_layers(config)
    mixing = _mixing(config, passes, context=context, position=position, policy=policy)
    per_pass = gate_matrices(config) + injection_matrices(config)
    return FlopsPerToken(
        prelude=per_weight * _weights(blocks["prelude"]),
        core=per_weight * _core_weights(config, passes),
        coda=per_weight * (_weights(blocks["coda"]) + state_projection(config)),
        attention=factor * mixing,
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
    rule = cache_rule(policy or config.loop.cache_policy, config)
    deltas, mixes = config.loop_lora, config.loop.local_window is not None
    passes = [
        CorePass(
            makes_keys=loop_idx == 0 or not rule.shares_first,
            attends_locally=loop_idx > 0 and mixes,
            has_deltas=deltas is not None and deltas.set_at(loop_idx) >= 0,
        )
        for loop_idx in range(num_loops)
    ]
    return [*passes, passes[0]] if rule.has_extra_pass and policy is not None else passes


def _weights(layers: Sequence[PlacedLayer]) -> int:
    """Weights that a token is multiplied with in the mixers of a block."""
    return sum(layer.weights_per_token() for layer in layers)


def _core_weights(config: ModelConfig, passes: Sequence[CorePass]) -> int:
    """Weights that a token is multiplied with in the core, low-rank differences included."""
    rank = 0 if config.loop_lora is None else config.loop_lora.rank
    core, total = placed_layers(config)["core"], 0
    for kind, num_passes in Counter(passes).items():
        for placed in core:
            shapes, used = placed.linear_shapes(), placed.weights_per_token()
            spared = frozenset() if kind.makes_keys else placed.layer.spared_maps
            used -= sum(shapes[name][0] * shapes[name][1] for name in spared)
            if kind.has_deltas and "loop_lora" in placed.facts.conditioned_by:
                used += rank * sum(sum(shapes[name]) for name in shapes.keys() - spared)
            total += num_passes * used
    return total


def _mixing(
    config: ModelConfig,
    passes: Sequence[CorePass],
    *,
    context: int,
    position: QueryPosition,
    policy: CachePolicy | None,
) -> float:
    """FLOPs of one forward beyond weights: every product with a key or a value, recurrences."""
    blocks, window = placed_layers(config), config.loop.local_window
    outside, core = blocks["prelude"] + blocks["coda"], blocks["core"]

    def seen(layers: Sequence[PlacedLayer], window: int | None = None) -> Counter[int]:
        """Sum of S over the layers, by their FLOPs for each token that is seen."""
        total: Counter[int] = Counter()
        for placed in layers:
            reach = placed.facts.reach(config)
            if reach is not None:
                most = min(x for x in (reach.window, window, context) if x is not None)
                # The first `most` queries see fewer tokens than that.
                mean = most - most * (most - 1) / (2 * context)
                total[placed.layer.flops_per_key(placed.config)] += (
                    most if position == "last" else mean
                )
        return total

    stored = None if policy is None else cache_rule(policy, config).stored_tokens
    # A prompt that is read in one call sees all of itself; afterwards what is stored, and itself.
    in_core = stored + 1 if stored is not None and position == "last" else None
    once, each_pass, again = seen(outside), seen(core, in_core), seen(core, window)
    num_local = sum(kind.attends_locally for kind in passes)
    total = 0.0
    for flops in once.keys() | each_pass.keys():
        num_keys = once[flops] + len(passes) * each_pass[flops] + num_local * again[flops]
        total += flops * num_keys
    for layers, uses in ((outside, 1), (core, len(passes))):
        total += uses * sum(placed.layer.flops_per_token(placed.config) for placed in layers)
    return total


def _low_rank_weights(config: ModelConfig, num_passes: int) -> int:
    """Weights of the low-rank pairs, times the loops that run them; the prelude has none."""
    if not isinstance(config.modulation, ModulationConfig):
        return 0
    _, core, coda = config.split
    return 2 * config.modulation.rank * config.d_model * (num_passes * core + coda)
