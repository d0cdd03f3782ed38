"""Rules between the fields of a model's config; each raises ValueError with what to do.

Fields and their meaning are in `config/model.py`, which calls these: the configs arrive untyped,
because this file is below theirs.
"""

from __future__ import annotations

from typing import Any

from depthdial.config.letters import LETTERS, check_letters, is_read, reads_outer_width
from depthdial.config.limits import MAX_SUBLAYERS
from depthdial.config.policies import policy_obstacle


def check_loop(loop: Any) -> None:
    """The loop has what its options need."""
    values = dict(loop)
    for name, owner, value in (
        ("gate_rank", "update", "decay_gate"),
        ("random_state_std", "initial_state", "random"),
    ):
        if values[owner] == value and values[name] is None:
            raise ValueError(f"{owner}='{value}' needs {name}; give a positive number.")
    if loop.initial_state != "prelude" and loop.injection == "none":
        raise ValueError(
            f"initial_state='{loop.initial_state}' with injection='none' cuts the loops off from "
            "the tokens. Choose an injection, or initial_state='prelude'."
        )


def check_sublayers(config: Any) -> None:
    """Known letters, and a split that they fill."""
    check_letters(config)
    total, period = sum(config.split), len(config.layout)
    if total > MAX_SUBLAYERS:
        raise ValueError(
            f"split {list(config.split)} adds up to {total:,} sublayers; at most "
            f"{MAX_SUBLAYERS:,} are built."
        )
    if total % period:
        raise ValueError(
            f"split {list(config.split)} adds up to {total} sublayers, but layout "
            f"'{config.layout}' has {period}. Choose a split whose sum is a multiple of "
            f"{period}, or change `layout`."
        )
    needed = ("num_heads", "num_kv_heads", "head_dim")
    needed = [key for key in needed if is_read(config.layout, key)]
    if reads_outer_width(config):
        needed.append("d_ff")
    for key in needed:
        if getattr(config, key) is None:
            raise ValueError(
                f"missing key '{key}', which layers of the layout '{config.layout}' need."
            )


def check_segments(config: Any) -> None:
    """Segments fill the core, and nothing acts between the loops of the whole core."""
    if not config.segments:
        return
    if len(config.segments) < 2 or sum(config.segments) != config.split[1]:
        raise ValueError(
            f"segments={list(config.segments)} must be at least two counts of sublayers that add "
            f"up to the core's {config.split[1]}; leave it empty where the core loops as a whole."
        )
    for name, given, allowed in (
        ("loop.update", config.loop.update, "replace"),
        ("loop.injection", config.loop.injection, "none"),
        ("exit_gate", config.exit_gate, "none"),
        ("modulation", config.modulation, None),
    ):
        if given != allowed:
            raise ValueError(
                f"{name}={given!r} acts after each loop of the core, and with segments the core "
                f"never loops as a whole; set it to {allowed!r}, or leave segments empty."
            )
    if config.final_norm == "loop":
        raise ValueError("final_norm='loop' goes with a core that loops as a whole, not segments.")


def check_attention(config: Any) -> None:
    """Heads, rotation and value embeddings fit each other."""
    if None in (config.num_heads, config.num_kv_heads, config.head_dim):
        return
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.num_kv_heads}."
        )
    for letter in config.layout:
        facts = LETTERS[letter]
        if facts.attention is None:
            continue
        name, fraction = facts.attention.rotary_frac, facts.reach(config).rotary_frac
        rotating = round(config.head_dim * fraction)
        if rotating % 2 or rotating < 2:
            raise ValueError(
                f"{name}={fraction} of head_dim={config.head_dim} gives {rotating} rotating "
                "channels; choose a fraction that gives an even number of at least 2."
            )
    keyed = [LETTERS[x] for x in config.sublayers if LETTERS[x].slot == "keys"]
    able = [i for i, facts in enumerate(keyed) if "value_embeddings" in facts.reads]
    given = config.value_embeddings
    if not set(given) <= set(able) or len(set(given)) != len(given):
        raise ValueError(
            f"value_embeddings={list(given)} must name attention layers, counted from 0 at the "
            f"bottom, each once; those of this layout are {able}."
        )


def check_core(config: Any) -> None:
    """The core's own width and heads fit what meets them."""
    core = config.core_config
    for name in ("core_num_heads", "core_num_kv_heads"):
        value, outer = getattr(config, name), config.prelude_layout + config.coda_layout
        if value is not None and not is_read(outer, name):
            raise ValueError(
                f"{name}={value}, and every attention layer stands in the core "
                f"'{config.core_layout}': set {name.removeprefix('core_')}, which says their heads."
            )
    if core.num_heads is not None and core.num_heads % core.num_kv_heads:
        raise ValueError(
            f"the core has {core.num_heads} query heads, no multiple of its {core.num_kv_heads} "
            "key and value heads; set core_num_heads and core_num_kv_heads, null for the model's."
        )
    if core.d_model == config.d_model:
        return
    modulation = None if config.modulation is None else config.modulation.kind
    for name, given, allowed in (
        ("loop.injection", config.loop.injection, ("concat", "diagonal")),
        ("loop.initial_state", config.loop.initial_state, ("zero", "random")),
        ("loop.state_projection", config.loop.state_projection, (True,)),
        ("final_norm", config.final_norm, ("head", "loop", "none")),
        ("modulation.kind", modulation, (None, "time_step")),
    ):
        if given not in allowed:
            raise ValueError(
                f"core_d_model={core.d_model} is not d_model={config.d_model}, and {name}="
                f"{given!r} needs states as wide as the prelude output; choose "
                f"{' or '.join(map(repr, allowed))}, or core_d_model=null."
            )


def check_model_options(config: Any) -> None:
    """Options that need or exclude each other."""
    if config.num_loops > config.max_loops:
        raise ValueError(
            f"num_loops={config.num_loops} exceeds max_loops={config.max_loops}; the default must "
            "be a depth that the model is made for."
        )
    obstacle = policy_obstacle(config.loop.cache_policy, config)
    if obstacle is not None:
        raise ValueError(obstacle)
    if (config.norm == "ngpt") != (config.ngpt is not None):
        raise ValueError("norm='ngpt' goes with `ngpt`, and needs it.")
    if config.final_norm == "loop" and config.split[2]:
        raise ValueError(
            f"final_norm='loop' norms the state that the head reads, but split="
            f"{list(config.split)} has a coda after the loops; choose another final_norm."
        )
    if config.loop_lora is not None and config.loop_lora.norms and not config.norm_gain:
        raise ValueError("loop_lora.norms needs norm_gain=true: there is no gain to vary.")
    takes_pairs = ["loop_lora" in LETTERS[x].conditioned_by for x in config.core_layout]
    if config.loop_lora is not None and config.loop_lora.rank and not any(takes_pairs):
        raise ValueError(
            f"loop_lora.rank={config.loop_lora.rank} has no effect: no layer of the core "
            f"'{config.core_layout}' takes low-rank differences. Set it to 0."
        )
    sets = () if config.loop_lora is None else config.loop_lora.sets_by_loop
    if len(sets) > config.max_loops:
        raise ValueError(
            f"loop_lora.sets_by_loop={list(sets)} names the sets of {len(sets)} loops, but the "
            f"model is made for max_loops={config.max_loops}; the others would have no effect. "
            "Leave them out, or raise max_loops."
        )


def check_trained_loops(config: Any) -> None:
    """Ascending loop counts within what the model is made for."""
    loops = config.trained_loops
    if loops is None:
        return
    if list(loops) != sorted(set(loops)) or any(k > config.max_loops for k in loops):
        raise ValueError(
            f"trained_loops={list(loops)} must be loop counts from 1 to max_loops="
            f"{config.max_loops}, ascending and each once; null stands for all of them, [] for "
            "none."
        )
