"""Dory (arXiv 2611.03998): a looped nGPT with sliding windows and two rotary profiles.

Two public formats say the same model: the export format 1 (`hybrid_layer_pattern`, one letter per
sublayer) and keys in the style of the transformers library (`layer_types`). Scales are stored as
trained, to be divided by the initial standard deviation.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import LETTERS, ModelConfig, shortest_pattern
from depthdial.formats.families.decoder_layers import sublayer_name
from depthdial.formats.families.family import Family
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, TensorRule

PATTERN_LETTERS = {"S": "S", "*": "A", "-": "F"}
"""Letter of format 1 -> ours."""
LAYER_TYPES = {"sliding_attention": "S", "full_attention": "A", "mlp": "F"}
"""Name in the other format -> ours."""
CACHE_MODES = {"per_loop": "per_loop", "last_loop": "last_step"}
TRAINED_LOOPS = 4
"""One checkpoint serves 1 to 4 loops; the config names only the default."""


def read(source: SourceConfig) -> ModelConfig:
    """Either format; the same fields for the same model."""
    source.ignore("attention_dropout")
    source.expect("quantization_config", None)
    source.expect("attention_bias", False, default=False)
    source.expect("mlp_bias", False, default=False)
    source.expect("tie_word_embeddings", False, default=False)
    is_format_1 = "hybrid_layer_pattern" in source
    if is_format_1:
        pattern = source.need("hybrid_layer_pattern")
        given = list(pattern) if isinstance(pattern, str) else pattern
        letters = _letters("hybrid_layer_pattern", given, PATTERN_LETTERS)
    else:
        letters = _letters("layer_types", source.need("layer_types"), LAYER_TYPES)
    split = _split(source, len(letters))
    special = (_read_format_1 if is_format_1 else _read_layer_types)(source, letters)
    num_heads = source.count("num_attention_heads")
    num_loops = source.loops("n_recurrent_loops")
    gate_init = source.take("attention_output_gate_logit_scale_init")
    if gate_init is not None:
        gate_init = source.number("attention_output_gate_logit_scale_init")
    policy = source.expect("recurrent_kv_cache_mode", *CACHE_MODES, default="per_loop")
    scale_std = special.pop("scale_std")
    return ModelConfig.from_dict(
        {
            "vocab_size": source.count("vocab_size"),
            "d_model": source.count("hidden_size"),
            "layout": shortest_pattern(letters),
            "split": split,
            "num_heads": num_heads,
            "num_kv_heads": source.count("num_key_value_heads", num_heads),
            "d_ff": source.count("intermediate_size"),
            "max_context": source.count("max_position_embeddings"),
            "init_std": scale_std,
            "output_gate": True,
            "norm": "ngpt",
            "final_norm": "none",
            "ngpt": {
                "alpha_init": source.number("ngpt_alpha_init"),
                "scale_std": scale_std,
                "gate_scale_init": gate_init,
            },
            "num_loops": num_loops,
            "max_loops": max(num_loops, TRAINED_LOOPS),
            "loop": {
                "update": "replace",
                "injection": "add",
                "unit_norm": True,
                "cache_policy": CACHE_MODES[policy],
            },
            **special,
        }
    )


def _read_format_1(source: SourceConfig, letters: str) -> dict[str, Any]:
    """Fields that format 1 spells in its own way."""
    source.expect("dory_format_version", 1, default=1)
    for key, allowed in {
        "attention_output_gate": True,
        "fngpt": True,
        "initial_state": "input_copy",
        "input_transform": "residual",
        "mixer_type": None,
        "mlp_hidden_act": "silu",
        "ngpt": True,
        "ngpt_enable_final_norm": False,
        "output_transform": "replace",
    }.items():
        source.expect(key, allowed, default=allowed)
    head_dim = source.count("attention_head_dim")
    # Format 1 repeats the sizes for its sliding layers; ours have one set.
    for twin, value in {
        "swa_num_attention_heads": source.count("num_attention_heads"),
        "swa_num_key_value_heads": source.count("num_key_value_heads"),
        "swa_head_dim": head_dim,
    }.items():
        source.expect(twin, None, value)
    source.expect("no_rope_layers", None, [0] * len(letters))
    profiles = {
        1: (source.number("rope_theta"), source.number("partial_rotary_factor", 1.0)),
        2: (source.number("rope_theta_2", 1e4), source.number("partial_rotary_factor_2", 1.0)),
    }
    full, sliding = _used_profiles(source.take("rope_profile_layers"), letters)
    window = _window(source, "swa_window_size", letters)
    scale_std = source.number("init_method_std")
    # The other format's name of it.
    if source.number("initializer_range", scale_std) != scale_std:
        raise ValueError(
            f"the source config has init_method_std={scale_std} and initializer_range="
            f"{source.take('initializer_range')}; scales are divided by one of them, so they must "
            "agree."
        )
    return {
        "scale_std": scale_std,
        "head_dim": head_dim,
        **_rotation(profiles[full], profiles[sliding], window),
    }


def _window(source: SourceConfig, key: str, letters: str) -> int | None:
    """Tokens that a sliding layer sees; None where the model has no such layer."""
    if any(LETTERS[letter].slides for letter in letters):
        return source.window(key)
    source.ignore(key)
    return None


def _used_profiles(layers: Any, letters: str) -> tuple[int, int]:
    """Rotary profile, 1 or 2, of full and of sliding attention.

    Raises: ValueError where layers of one kind have different profiles.
    """
    layers = [1] * len(letters) if layers is None else layers
    known = isinstance(layers, list) and all(type(x) is int and x in (1, 2) for x in layers)
    if not known or len(layers) != len(letters):
        raise ValueError(
            f"'rope_profile_layers' is {layers!r}; it must have 1 or 2 for each of the "
            f"{len(letters)} sublayers."
        )
    kinds = {"full": set(), "sliding": set()}
    for letter, profile in zip(letters, layers, strict=True):
        if LETTERS[letter].attention is not None:
            kinds["sliding" if LETTERS[letter].slides else "full"].add(profile)
    for kind, used in kinds.items():
        if len(used) > 1:
            raise ValueError(
                f"'rope_profile_layers' gives sublayers of one kind ({kind} attention) both "
                "profiles; this runtime has one rotation for full and one for sliding attention."
            )
    full, sliding = (used.pop() if used else 1 for used in kinds.values())
    return full, sliding


def _read_layer_types(source: SourceConfig, letters: str) -> dict[str, Any]:
    """Fields that the other format spells in its own way."""
    source.expect("hidden_act", "silu", default="silu")
    profiles = {}
    parameters = source.section("rope_parameters")
    if parameters is None:
        raise ValueError("the source config has no 'rope_parameters'.")
    for name in ("full_attention", "sliding_attention"):
        section = parameters.section(name)
        if section is None:
            raise ValueError(f"the source config has no 'rope_parameters.{name}'.")
        section.expect("rope_type", "default", default="default")
        profiles[name] = (
            section.number("rope_theta"),
            section.number("partial_rotary_factor", 1.0),
        )
    return {
        "scale_std": source.number("initializer_range"),
        "head_dim": source.count("head_dim"),
        **_rotation(
            profiles["full_attention"],
            profiles["sliding_attention"],
            _window(source, "sliding_window", letters),
        ),
    }


def _rotation(
    full: tuple[float, float], sliding: tuple[float, float], window: int | None
) -> dict[str, Any]:
    """Rotary fields of ours from (theta, fraction) of the two kinds of attention."""
    fields: dict[str, Any] = {"rope_theta": full[0], "rotary_frac": full[1], "sliding": None}
    if window is not None:
        fields["sliding"] = {"window": window, "rope_theta": sliding[0], "rotary_frac": sliding[1]}
    return fields


def _letters(key: str, given: Any, known: dict[str, str]) -> str:
    """Our letters of the published ones. Raises: ValueError for an unknown one."""
    if not isinstance(given, list) or not given or set(map(str, given)) - known.keys():
        raise ValueError(f"'{key}' is {given!r}; known sublayers: {', '.join(known)}.")
    return "".join(known[x] for x in given)


def _split(source: SourceConfig, num_letters: int) -> list[int]:
    """Prelude, core and coda in sublayers. Raises: ValueError where the counts do not add up."""
    parts = []
    for part in ("input", "recurrent", "output"):
        count = source.need(f"n_{part}_layers")
        if type(count) is not int or count < (part == "recurrent"):
            raise ValueError(f"'n_{part}_layers' is {count!r}, not a number of sublayers.")
        parts.append(count)
    total = source.count("num_hidden_layers")
    if not sum(parts) == total == num_letters:
        raise ValueError(
            f"n_input_layers, n_recurrent_layers and n_output_layers are {parts}, "
            f"num_hidden_layers is {total}, and the pattern has {num_letters} sublayers; they "
            "must add up."
        )
    return parts


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    found: list[TensorRule] = [
        Rename("backbone.embeddings.weight", "embedding.weight"),
        Rename("lm_head.weight", "lm_head.weight"),
        Rename("lm_head.logit_scale", "logit_scale"),
    ]
    for idx, letter in enumerate(config.sublayers):
        theirs, ours = f"backbone.layers.{idx}", sublayer_name(config, idx)
        if LETTERS[letter].attention is None:
            matrices, alpha = ("gate_proj", "up_proj", "down_proj"), "mlp_alpha"
            scales = {"suv_gate": "gate_scale", "suv_up": "up_scale"}
        else:
            matrices, alpha = tuple(f"{x}_proj" for x in "qkvgo"), "attn_alpha"
            scales = {"sqk": "q_scale", "s_gate": "gate_scale"}
        found += [
            Rename(f"{theirs}.mixer.{x}.weight", f"{ours}.mixer.{x}.weight") for x in matrices
        ]
        found += [Rename(f"{theirs}.mixer.{a}", f"{ours}.mixer.{b}") for a, b in scales.items()]
        found.append(Rename(f"{theirs}.{alpha}", f"{ours}.alpha"))
    return found


def to_source(config: ModelConfig) -> dict[str, Any]:
    """The keys in the style of transformers, which the newer runtime reads."""
    names = {letter: name for name, letter in LAYER_TYPES.items()}
    modes = {ours: theirs for theirs, ours in CACHE_MODES.items()}
    ngpt, sliding = config.ngpt, config.sliding
    if ngpt is None:
        raise ValueError(f"norm='{config.norm}', and the format is for norm='ngpt'.")
    mode = modes.get(config.loop.cache_policy)
    if mode is None:
        raise ValueError(
            f"loop.cache_policy='{config.loop.cache_policy}', and the format knows "
            f"{', '.join(modes)}."
        )
    return {
        "architectures": ["DoryForCausalLM"],
        "model_type": "dory",
        "attention_bias": False,
        "attention_output_gate_logit_scale_init": ngpt.gate_scale_init,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.d_model,
        "initializer_range": ngpt.scale_std,
        "intermediate_size": config.d_ff,
        "layer_types": [names[letter] for letter in config.sublayers],
        "max_position_embeddings": config.max_context,
        "mlp_bias": False,
        "n_input_layers": config.split[0],
        "n_recurrent_layers": config.split[1],
        "n_output_layers": config.split[2],
        "n_recurrent_loops": config.num_loops,
        "ngpt_alpha_init": ngpt.alpha_init,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": sum(config.split),
        "num_key_value_heads": config.num_kv_heads,
        "recurrent_kv_cache_mode": mode,
        "rope_parameters": {
            "full_attention": _profile(config.rope_theta, config.rotary_frac),
            "sliding_attention": _profile(
                config.rope_theta if sliding is None else sliding.rope_theta,
                config.rotary_frac if sliding is None else sliding.rotary_frac,
            ),
        },
        "sliding_window": None if sliding is None else sliding.window,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def _profile(theta: float, fraction: float) -> dict[str, Any]:
    return {"partial_rotary_factor": fraction, "rope_theta": theta, "rope_type": "default"}


def limits(config: ModelConfig) -> list[str]:
    return [
        "The published runtimes fix one loop count per process; here each request has its own.",
        "Sublayers without rotation, the state transform adaptive_slerp and quantised weights are "
        "refused.",
    ]


DORY = Family(
    name="dory",
    summary="Dory: looped nGPT with sliding windows, two rotary profiles and a coda.",
    matches=lambda values: values.get("model_type") == "dory",
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
