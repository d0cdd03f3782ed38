"""Cached keys, values and states as functions of the config, the loop count and the cache policy.

What a policy keeps is decided in `config/policies.py`; a row of the `plan` command is a policy
of `planned_policies`.
G key/value heads, C channels per head, k loops.
"""

from __future__ import annotations

from typing import Literal, get_args

from depthdial.config import (
    POLICIES,
    CachePolicy,
    ModelConfig,
    cache_rule,
    count_slots,
    policy_obstacle,
)
from depthdial.model.sublayer import placed_layers

CachePhase = Literal["prompt_peak", "steady"]
"""While the prompt runs, or while tokens are generated."""


def planned_policies(config: ModelConfig) -> tuple[CachePolicy, ...]:
    """The policies that any model of this kind can take, and the model's own."""
    names = [name for name in POLICIES if policy_obstacle(name, config) is None]
    return tuple(dict.fromkeys((*names, config.loop.cache_policy)))


def cache_slots(
    config: ModelConfig, num_loops: int, *, policy: CachePolicy, phase: CachePhase = "steady"
) -> int:
    """Key/value slots of the whole model in one phase: A_in + entries(k) * A_core + A_out.

    A counts attention layers; the entries that a core layer keeps of a token are k for per_loop,
    1 for the policies that keep one, and between them for those of published models.

    Raises: ValueError for an unknown policy or phase, or a policy that does not fit the core.
    """
    return sum(_slots(config, num_loops, policy=policy, phase=phase))


def _slots(
    config: ModelConfig, num_loops: int, *, policy: CachePolicy, phase: CachePhase
) -> tuple[int, int]:
    """Slots outside the core, and those of the core."""
    require_count("num_loops", num_loops)
    if phase not in get_args(CachePhase):
        raise ValueError(f"phase='{phase}' is unknown; choose 'prompt_peak' or 'steady'.")
    entries = cache_rule(policy, config).entries(num_loops, is_prompt=phase == "prompt_peak")
    outside = count_slots(config.prelude_layout + config.coda_layout, "keys")
    return outside, entries * count_slots(config.core_layout, "keys")


def cache_bytes(
    config: ModelConfig,
    num_loops: int,
    *,
    context: int,
    policy: CachePolicy,
    bytes_per_value: int,
    batch_size: int = 1,
    phase: CachePhase = "steady",
) -> int:
    """Bytes of cached keys and values, 2 * G * C per token and slot, with the core's own G; and of
    recurrent states.

    Layers with a window keep all tokens too; a rule may keep fewer of the core.

    Args:
        context: cached tokens per row.
        bytes_per_value: 2 for bfloat16, 4 for float32.
    """
    require_count("context", context)
    require_count("bytes_per_value", bytes_per_value)
    require_count("batch_size", batch_size)
    outside, core = _slots(config, num_loops, policy=policy, phase=phase)
    stored = min(context, cache_rule(policy, config).stored_tokens or context)
    outside_values = 2 * outside * config.key_width * context
    core_values = 2 * core * config.core_config.key_width * stored
    keys = (outside_values + core_values) * batch_size * bytes_per_value
    return keys + state_bytes(
        config, num_loops, bytes_per_value=bytes_per_value, batch_size=batch_size
    )


def state_bytes(
    config: ModelConfig, num_loops: int, *, bytes_per_value: int, batch_size: int = 1
) -> int:
    """Bytes of the recurrent states, one of each loop, whatever the number of tokens."""
    require_count("num_loops", num_loops)
    blocks = placed_layers(config)
    outside, core = (
        sum(placed.layer.state_size(placed.config) for placed in layers)
        for layers in (blocks["prelude"] + blocks["coda"], blocks["core"])
    )
    return (outside + num_loops * core) * batch_size * bytes_per_value


def require_count(name: str, value: int) -> None:
    """Raises: ValueError unless it is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, at least 1.")
