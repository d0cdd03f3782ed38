"""Rules between the fields of a model's config; each raises ValueError with what to do.

Fields and their meaning are in `config/model.py`, which calls these: the configs arrive untyped,
because this file is below theirs.
"""

from __future__ import annotations

from typing import Any

from depthdial.config.letters import LETTERS, check_letters, is_read
from depthdial.config.limits import MAX_SUBLAYERS
from depthdial.config.policies import policy_obstacle


def check_loop(loop: Any) -> None:
    """Every option of the loop has an effect, and what it needs."""
    only_with = (
        ("delta_init", 0.05, "update", "delta"),
        ("gamma_init", 0.0, "update", "adaptive_delta"),
        ("gate_rank", None, "update", "decay_gate"),
        ("anchor", 0.5, "update", "anchored"),
        ("random_state_std", None, "initial_state", "random"),
        ("random_state_seed", 0, "initial_state", "random"),
    )
    values = dict(loop)
    for name, default, owner, value in only_with:
        if values[name] != default and values[owner] != value:
            raise ValueError(
                f"{name}={values[name]} has no effect with {owner}='{values[owner]}'. "
                f"Remove it or choose {owner}='{value}'."
            )
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
    if config.positions != "rotary":
        for name, given, default in (
            ("rotary_frac", config.rotary_frac, 1.0),
            ("rotary_pairs", config.rotary_pairs, "half_split"),
            ("rope_scaling", config.rope_scaling, None),
            ("rope_theta", config.rope_theta, 10_000.0),
            ("sliding.rope_theta", config.sliding and config.sliding.rope_theta, 10_000.0),
            ("sliding.rotary_frac", config.sliding and config.sliding.rotary_frac, 1.0),
        ):
            if given is not None and given != default:
                raise ValueError(
                    f"{name}={given!r} has no effect with positions='{config.positions}'."
                )
    if config.qk_norm == "none" and config.qk_norm_eps is not None:
        raise ValueError(f"qk_norm_eps={config.qk_norm_eps} has no effect with qk_norm='none'.")
    keyed = [LETTERS[x] for x in config.sublayers if LETTERS[x].slot == "keys"]
    able = [i for i, facts in enumerate(keyed) if "value_embeddings" in facts.reads]
    given = config.value_embeddings
    if not set(given) <= set(able) or len(set(given)) != len(given):
        raise ValueError(
            f"value_embeddings={list(given)} must name attention layers, counted from 0 at the "
            f"bottom, each once; those of this layout are {able}."
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
    if config.norm == "ngpt" and (config.modulation is not None or config.qk_norm != "none"):
        raise ValueError(
            "norm='ngpt' normalises queries and keys itself and takes no modulation of its "
            "sublayers; set qk_norm='none' and modulation=null."
        )
    if config.norm == "ngpt":
        _check_ngpt(config)
    is_plain = config.loop.update == "replace" and config.modulation is None
    if is_plain and config.loop.gate_bypass != "never":
        raise ValueError(
            f"loop.gate_bypass='{config.loop.gate_bypass}' has no effect with update='replace': "
            "there is no gate. Set it to 'never'."
        )
    if config.core_d_ff is not None and not is_read(config.core_layout, "core_d_ff"):
        raise ValueError(
            f"core_d_ff={config.core_d_ff} has no effect: the core '{config.core_layout}' has no "
            "feed-forward sublayer."
        )
    if config.final_norm == "loop" and config.split[2]:
        raise ValueError(
            f"final_norm='loop' norms the state that the head reads, but split="
            f"{list(config.split)} has a coda after the loops; choose another final_norm."
        )
    if config.loop_lora is not None and config.loop_lora.norms and not config.norm_gain:
        raise ValueError("loop_lora.norms needs norm_gain=true: there is no gain to vary.")


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


def _check_ngpt(config: Any) -> None:
    """A normalised transformer has no biases, gains, value embeddings or mix of loops."""
    deltas = config.loop_lora
    for name, given, allowed in (
        ("ff", config.ff, "swiglu"),
        ("ff_bias", config.ff_bias, False),
        ("attention_bias", config.attention_bias, "none"),
        ("value_embeddings", config.value_embeddings, ()),
        ("norm_gain", config.norm_gain, True),
        ("loop.local_window", config.loop.local_window, None),
        ("loop_lora.norms", deltas is not None and deltas.norms, False),
    ):
        if given != allowed:
            raise ValueError(
                f"{name}={given!r} has no effect with norm='ngpt', whose sublayers have unit "
                f"lengths and none of these; leave it at {allowed!r}."
            )
