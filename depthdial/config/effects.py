"""Which keys change nothing, where, and why: one table for each config, and one check of all.

A key that changes nothing must stand at its default, so that no option is accepted without effect.
What needs the parameters of a built model is in `training/patterns.py`. Keys that are accepted
although they change no number are listed in `docs/options.md`, with the reason.
Configs arrive untyped, because this file is below theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from depthdial.config.letters import LETTERS, count_slots, is_read, reads_outer_width
from depthdial.config.policies import named_rule

POISSON_SAMPLERS = ("poisson_lognormal", "poisson_truncated")
"""Samplers whose draws have a mean instead of a largest value."""
INDEPENDENT_SAMPLERS = ("independent_uniform", "independent_weighted", "poisson_truncated")
"""Samplers with one draw for each slice."""
SHARED_DRAW_SAMPLERS = (
    "sync_uniform",
    "sync_weighted",
    "override",
    "poisson_lognormal",
    "listed",
)
"""Samplers with one draw for several slices."""
FRACTION_SAMPLERS = ("sync_weighted", "independent_weighted", "override")
"""Samplers that use override_frac."""


class Idle(NamedTuple):
    """Keys that change nothing while a condition holds.

    Fields:
        keys: dotted, below the config that is checked.
        holds: the condition.
        because: the reason, as the end of "... has no effect"; `{c}` is the config.
    """

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    because: str


def check_effects(config: Any, table: Sequence[Idle], *, prefix: str = "") -> None:
    """Every key of the table that changes nothing in this config stands at its default.

    Args: prefix: put before the keys in an error, e.g. `optim.`.
    Raises: ValueError naming the first key that does not, the reason and the default.
    """
    for rule in table:
        if not rule.holds(config):
            continue
        for key in rule.keys:
            value, default = _value_and_default(config, key)
            if value != default:
                raise ValueError(
                    f"{prefix}{key}={_shown(value)} has no effect {rule.because.format(c=config)}. "
                    f"Leave it at {_shown(default)}."
                )


def whole_steps(fraction: float, steps: int) -> int:
    """A fraction of the steps of a run, rounded down.

    The fraction is read as the decimal number that was typed: in binary, 0.29 of 100 falls short
    of 29.
    """
    return int(Fraction(str(float(fraction))) * steps)


def possible_draws(depth: Any, max_loops: int) -> set[int]:
    """Loop counts that rows may run after the switch and the rise of a curriculum."""
    if depth.sampler == "fixed":
        return {depth.fixed_loops}
    if depth.sampler == "listed":
        return set(depth.listed_loops)
    return set(range(1, max_loops + 1))


def slices_differ(depth: Any, max_loops: int) -> bool:
    """Whether two slices of one step may run different loop counts."""
    is_overridden = depth.sampler == "override" and depth.override_frac > 0
    is_split = depth.sampler in INDEPENDENT_SAMPLERS or depth.depth_scope == "slice_group"
    return (is_overridden or is_split) and len(possible_draws(depth, max_loops)) > 1


def _value_and_default(config: Any, key: str) -> tuple[Any, Any]:
    """Both are None if a group on the way to the key is absent."""
    *groups, name = key.split(".")
    for group in groups:
        config = getattr(config, group)
        if config is None:
            return None, None
    return getattr(config, name), type(config).model_fields[name].get_default()


def _shown(value: Any) -> str:
    """A value as a person would type it."""
    plain = value.to_dict() if hasattr(value, "to_dict") else value
    return repr(plain) if isinstance(plain, str) else json.dumps(plain)


def _nothing_reads(key: str) -> Idle:
    """A key of layers that the layout does not have."""
    return Idle(
        (key,),
        lambda c: not is_read(c.layout, key),
        "because no layer of the layout '{c.layout}' reads it",
    )


def _stores_as_per_loop(policy: str) -> bool:
    """Whether a model that runs one loop cannot be told from one under per_loop.

    Sweeps run more loops, and then loops that share the first one's entries compute differently.
    """
    rule = named_rule(policy)
    return rule.same_at_one_loop and not rule.shares_first


def _turning(config: Any, theta_key: str | None = None) -> set[int]:
    """Numbers of channels of a head that turn, over all layers with attention.

    Args: theta_key: the base of the rotary frequencies of the layers that count; None for any.
    """
    if config.positions != "rotary" or config.head_dim is None:
        return set()
    layers = (LETTERS[letter] for letter in config.layout)
    return {
        round(config.head_dim * facts.reach(config).rotary_frac)
        for facts in layers
        if facts.attention is not None and theta_key in (None, facts.attention.rope_theta)
    }


LOOP_EFFECTS = (
    Idle(("delta_init",), lambda c: c.update != "delta", "with update='{c.update}'"),
    Idle(("gamma_init",), lambda c: c.update != "adaptive_delta", "with update='{c.update}'"),
    Idle(("gate_rank",), lambda c: c.update != "decay_gate", "with update='{c.update}'"),
    Idle(("anchor",), lambda c: c.update != "anchored", "with update='{c.update}'"),
    Idle(
        ("random_state_std", "random_state_seed"),
        lambda c: c.initial_state != "random",
        "with initial_state='{c.initial_state}'",
    ),
)
"""Keys of `LoopConfig`."""

MODEL_EFFECTS = (
    Idle(
        (
            "ff",
            "ff_bias",
            "attention_bias",
            "qk_norm",
            "value_embeddings",
            "norm_gain",
            "modulation",
            "loop.local_window",
            "loop_lora.norms",
        ),
        lambda c: c.norm == "ngpt",
        "with norm='ngpt', whose sublayers have unit lengths and none of these",
    ),
    *map(_nothing_reads, sorted(frozenset().union(*(x.reads for x in LETTERS.values())))),
    Idle(
        ("d_ff",),
        lambda c: not reads_outer_width(c),
        "because every feed-forward layer stands in the core, which has core_d_ff={c.core_d_ff}",
    ),
    Idle(
        ("core_d_ff",),
        lambda c: not is_read(c.core_layout, "core_d_ff"),
        "because the core '{c.core_layout}' has no feed-forward layer",
    ),
    Idle(
        ("core_num_heads", "core_num_kv_heads"),
        lambda c: not is_read(c.core_layout, "core_num_heads"),
        "because the core '{c.core_layout}' has no attention layer",
    ),
    Idle(
        (
            "rope_theta",
            "rotary_frac",
            "rotary_pairs",
            "rope_scaling",
            "sliding.rope_theta",
            "sliding.rotary_frac",
        ),
        lambda c: c.positions != "rotary",
        "with positions='{c.positions}'",
    ),
    Idle(
        ("positions",),
        lambda c: c.positions == "none" and not is_read(c.layout, "rotary_pairs"),
        "because no layer of the layout '{c.layout}' turns queries and keys",
    ),
    Idle(
        ("rope_theta",),
        lambda c: _turning(c, "rope_theta") == {2},
        "where two channels of a head turn: by one radian per position, whatever the base",
    ),
    Idle(
        ("sliding.rope_theta",),
        lambda c: _turning(c, "sliding.rope_theta") == {2},
        "where two channels of a head turn: by one radian per position, whatever the base",
    ),
    Idle(
        ("rotary_pairs",),
        lambda c: _turning(c) == {2},
        "where two channels of a head turn: they are one pair",
    ),
    Idle(("qk_norm_eps",), lambda c: c.qk_norm == "none", "with qk_norm='none'"),
    Idle(
        ("norm_eps",),
        lambda c: c.norm == "ngpt" and c.final_norm == "none" and not c.prelude_norm,
        "with norm='ngpt', final_norm='none' and prelude_norm=false: there is no RMSNorm",
    ),
    Idle(("exit_gate_stale",), lambda c: c.exit_gate == "none", "without an exit gate"),
    Idle(("ngpt.gate_scale_init",), lambda c: not c.output_gate, "without output_gate"),
    Idle(
        ("loop.gate_bypass",),
        lambda c: (
            c.loop.update == "replace" and (c.modulation is None or c.modulation.kind != "elr")
        ),
        "with update='replace' and no modulation of kind 'elr': there is no gate",
    ),
    Idle(
        ("loop.local_window",),
        lambda c: not count_slots(c.core_layout, "keys"),
        "because no layer of the core '{c.core_layout}' attends",
    ),
    Idle(
        ("loop.cache_policy",),
        lambda c: not count_slots(c.core_layout, "keys"),
        "because no layer of the core '{c.core_layout}' attends; recurrent ones keep a state of "
        "each loop under every policy",
    ),
    Idle(
        ("loop.cache_policy",),
        lambda c: (
            c.max_loops == 1
            and c.loop.beyond_max_loops == "refuse"
            and _stores_as_per_loop(c.loop.cache_policy)
        ),
        "with max_loops=1: of one loop every policy stores the same",
    ),
)
"""Keys of `ModelConfig`."""

DATA_EFFECTS = (
    Idle(
        ("cache_dir",),
        lambda c: c.corpus is None,
        "without data.corpus: only a built-in corpus is prepared there",
    ),
    Idle(("isolate_documents",), lambda c: c.task is not None, "with task='{c.task}'"),
)
"""Keys of `DataConfig`."""

DEPTH_EFFECTS = (
    Idle(
        ("override_frac",),
        lambda c: c.sampler not in FRACTION_SAMPLERS,
        "with sampler='{c.sampler}'; it goes with sync_weighted, independent_weighted and override",
    ),
    Idle(
        ("curriculum", "curriculum_frac"),
        lambda c: c.sampler == "listed",
        "with sampler='listed', whose counts do not rise",
    ),
    Idle(
        ("curriculum", "curriculum_frac"),
        lambda c: 1 in (c.fixed_loops, c.mean_loops),
        "with fixed_loops or mean_loops of 1, which is where a rise begins",
    ),
    Idle(
        ("depth_scope", "slices_per_draw"),
        lambda c: c.sampler not in SHARED_DRAW_SAMPLERS,
        "with sampler='{c.sampler}', which makes no draw that slices share",
    ),
    Idle(
        ("depth_scope", "slices_per_draw"),
        lambda c: c.slices_per_draw == c.slices,
        "where all {c.slices} slices share one draw",
    ),
)
"""Keys of `DepthConfig`."""

OPTIM_EFFECTS = (
    Idle(("min_lr_frac",), lambda c: c.decay_frac == 0, "with decay_frac=0"),
    Idle(("momentum",), lambda c: c.optimizer == "adamw", "with optimizer='adamw'"),
)
"""Keys of `OptimConfig`."""


def _draws(recipe: Any) -> set[int]:
    return possible_draws(recipe.depth, recipe.model.max_loops)


def _is_no_step(fraction: float, recipe: Any) -> bool:
    return fraction > 0 and not whole_steps(fraction, recipe.train.steps)


RECIPE_EFFECTS = (
    Idle(
        ("model.exit_gate",),
        lambda c: c.train.init is None,
        "in training from new weights: no objective trains it, and rules that read it would stop "
        "at random numbers",
    ),
    Idle(
        ("depth.sampler",),
        lambda c: c.model.max_loops == 1 and c.depth.sampler != "fixed",
        "with model.max_loops=1: every row runs one loop",
    ),
    Idle(
        ("depth.num_depth_slices", "depth.override_frac"),
        lambda c: c.model.max_loops == 1,
        "with model.max_loops=1: every row runs one loop",
    ),
    Idle(
        (
            "depth.curriculum",
            "depth.curriculum_frac",
            "objective.trajectory",
            "objective.distill.rows",
        ),
        lambda c: _draws(c) == {1},
        "because every row runs one loop",
    ),
    Idle(
        ("depth.switch_frac",),
        lambda c: _draws(c) == {1} and c.model.modulation is None,
        "because every row runs one loop from the start, and no modulation is added later",
    ),
    Idle(
        ("depth.backprop_loops",),
        lambda c: (c.depth.backprop_loops or 0) >= max(_draws(c)),
        "because no row runs more loops",
    ),
    Idle(
        ("objective.distill.rows",),
        lambda c: 1 not in _draws(c),
        "because no row runs one loop: draw one loop too",
    ),
    Idle(
        ("depth.depth_scope", "depth.slices_per_draw"),
        lambda c: len(_draws(c)) == 1,
        "because every row runs as many loops as any other",
    ),
    Idle(
        ("depth.switch_frac",),
        lambda c: _is_no_step(c.depth.switch_frac, c),
        "with train.steps={c.train.steps}: it is less than one step",
    ),
    Idle(
        ("depth.curriculum_frac", "depth.curriculum"),
        lambda c: _is_no_step(c.depth.curriculum_frac, c),
        "with train.steps={c.train.steps}: the rise is shorter than one step",
    ),
    Idle(
        ("optim.min_lr_frac",),
        lambda c: not whole_steps(c.optim.decay_frac, c.train.steps),
        "with train.steps={c.train.steps} and optim.decay_frac={c.optim.decay_frac}: the fall is "
        "shorter than one step",
    ),
)
"""Keys of `Recipe`: what one part makes idle in another."""
