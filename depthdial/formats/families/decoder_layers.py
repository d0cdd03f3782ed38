"""What most published families share: config keys and tensor names of a decoder-only model.

Each family's own file says what it adds. One block of theirs is two sublayers of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from depthdial.config import ModelConfig
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Buffer, Copy, Rename, TensorRule
from depthdial.layers.primitives import rotary_frequencies

ROPE_DEFAULT = "default"


def sublayer_name(config: ModelConfig, idx: int) -> str:
    """Our module of the physical sublayer number `idx`, counted from the bottom."""
    prelude, core, _ = config.split
    if idx < prelude:
        return f"prelude_stack.{idx}"
    if idx < prelude + core:
        return f"core_stack.{idx - prelude}"
    return f"coda_stack.{idx - prelude - core}"


def read_rope(source: SourceConfig, *, default_theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary fields of ours, from either spelling: `rope_theta` with `rope_scaling`, or
    `rope_parameters`. Some writers keep the older keys beside the newer ones.

    Raises: ValueError for a rotation that this runtime cannot do, or two that differ.
    """
    places = {"": source}
    for key in ("rope_parameters", "rope_scaling"):
        section = source.section(key)
        if section is not None and not section.is_empty:
            places[f"{key}."] = section
    for where, place in places.items():
        fraction = place.number("partial_rotary_factor", 1.0)
        if fraction != 1:
            source.refuse(
                f"'{where}partial_rotary_factor' is {fraction} in the source config, but the "
                "published code of this family turns whole heads. Remove it, or set it to 1.0."
            )
    thetas = {
        f"{where}rope_theta": place.number("rope_theta")
        for where, place in places.items()
        if place.take("rope_theta") is not None
    }
    scalings = {where[:-1]: _read_scaling(place) for where, place in places.items() if where}
    _check_agree(source, thetas)
    _check_agree(source, scalings)
    return {
        "rope_theta": next(iter(thetas.values()), default_theta),
        "rope_scaling": next(iter(scalings.values()), None),
    }


def _check_agree(source: SourceConfig, given: dict[str, Any]) -> None:
    """Refuse two places that say one thing in two ways. Raises: ValueError with both."""
    for (first, value), (second, other) in pairwise(given.items()):
        if other != value:
            source.refuse(
                f"the source config has {first}={value} and {second}={other}; they must agree."
            )


def _read_scaling(section: SourceConfig) -> dict[str, Any] | None:
    """Scaling fields of ours. The kind is called `type` in old files, `rope_type` in newer ones."""
    kinds = {key: section.take(key) for key in ("rope_type", "type")}
    _check_agree(section, {key: kind for key, kind in kinds.items() if kind is not None})
    old = kinds["type"] or ROPE_DEFAULT
    kind = section.expect("rope_type", ROPE_DEFAULT, "linear", "llama3", default=old)
    if kind == ROPE_DEFAULT:
        return None
    scaling = {"kind": kind, "factor": section.number("factor")}
    if kind == "llama3":
        scaling["low_freq_factor"] = section.number("low_freq_factor")
        scaling["high_freq_factor"] = section.number("high_freq_factor")
        scaling["original_context"] = section.count("original_max_position_embeddings")
    return scaling


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the spelling that every version of transformers reads."""
    scaling = config.rope_scaling
    written: dict[str, Any] | None = None
    if scaling is not None:
        written = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return {"rope_theta": config.rope_theta, "rope_scaling": written}


@dataclass(frozen=True)
class Defaults:
    """What the library takes where a config leaves a key out: those of a family's config class.

    Fields: max_context, rope_theta, norm_eps: as ours; head_dim, num_kv_heads: None for what
        follows from width and heads.
    """

    max_context: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    head_dim: int | None = None
    num_kv_heads: int | None = None


LLAMA_DEFAULTS = Defaults()


def read_decoder(source: SourceConfig, defaults: Defaults = LLAMA_DEFAULTS) -> dict[str, Any]:
    """Fields of ours from the keys that a decoder-only config has, apart from the loops.

    The split puts all layers into the core: a plain model is a core that runs once.
    """
    # Dropout acts in training only.
    source.ignore("attention_dropout", "hidden_dropout", "resid_pdrop")
    source.expect("hidden_act", "silu", default="silu")
    source.expect("quantization_config", None)
    num_layers = source.layers("num_hidden_layers")
    _check_full_attention(source, num_layers)
    d_model, num_heads = source.count("hidden_size"), source.count("num_attention_heads")
    return {
        "vocab_size": source.count("vocab_size"),
        "d_model": d_model,
        "layout": "AF",
        "split": [0, 2 * num_layers, 0],
        "num_heads": num_heads,
        "num_kv_heads": _kv_heads(source, num_heads, defaults),
        "head_dim": source.count("head_dim", defaults.head_dim or d_model // num_heads),
        "d_ff": source.count("intermediate_size"),
        "ff_bias": source.flag("mlp_bias"),
        "max_context": source.count("max_position_embeddings", defaults.max_context),
        "norm_eps": source.number("rms_norm_eps", defaults.norm_eps),
        "init_std": source.number("initializer_range", 0.02),
        "attention_bias": "qkvo" if source.flag("attention_bias") else "none",
        "tie_embeddings": source.flag("tie_word_embeddings"),
        **read_rope(source, default_theta=defaults.rope_theta),
    }


def _kv_heads(source: SourceConfig, num_heads: int, defaults: Defaults) -> int:
    """Key and value heads; null means as many as query heads, also where the default differs."""
    if "num_key_value_heads" in source or defaults.num_kv_heads is None:
        return source.count("num_key_value_heads", num_heads)
    return defaults.num_kv_heads


def _check_full_attention(source: SourceConfig, num_layers: int) -> None:
    """Every layer sees all earlier tokens; the window's size has no effect then."""
    source.expect("use_sliding_window", False, None)
    source.ignore("max_window_layers")
    if "use_sliding_window" in source:
        source.ignore("sliding_window")
    else:
        source.expect("sliding_window", None)
    source.expect("layer_types", None, ["full_attention"] * num_layers)
    source.expect("rope_interleaved", False, None)


def write_decoder(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_decoder` reads."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": sum(config.split) // 2,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_bias": config.attention_bias == "qkvo",
        "mlp_bias": config.ff_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        **write_rope(config),
    }


PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Their names of the norms before attention and before the MLP."""


def block_rules(
    config: ModelConfig,
    block: int,
    theirs: str,
    *,
    norms: Sequence[str] = PRE_NORMS,
    post_norms: Sequence[str] = (),
) -> list[TensorRule]:
    """Rules of one transformer block with the tensor names of the transformers library.

    Args: block: number from the bottom; theirs: its name, without a dot at the end; norms,
        post_norms: their names of the attention's and the MLP's norm before and after.
    """
    attention, mlp = sublayer_name(config, 2 * block), sublayer_name(config, 2 * block + 1)
    pairs = [
        (f"{theirs}.{norms[0]}", f"{attention}.norm"),
        (f"{theirs}.{norms[1]}", f"{mlp}.norm"),
    ]
    if post_norms:
        pairs.append((f"{theirs}.{post_norms[0]}", f"{attention}.post_norm"))
        pairs.append((f"{theirs}.{post_norms[1]}", f"{mlp}.post_norm"))
    if config.qk_norm == "rms":
        pairs += [(f"{theirs}.self_attn.{x}", f"{attention}.mixer.{x}") for x in QK_NORMS]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        pairs.append((f"{theirs}.self_attn.{name}", f"{attention}.mixer.{name}"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        pairs.append((f"{theirs}.mlp.{name}", f"{mlp}.mixer.{name}"))
    rules: list[TensorRule] = [Rename(f"{a}.weight", f"{b}.weight") for a, b in pairs]
    for name in config.attention_bias.replace("none", ""):
        source, ours = f"{theirs}.self_attn.{name}_proj.bias", f"{attention}.mixer.{name}_proj.bias"
        rules.append(Rename(source, ours))
    if config.ff_bias:
        rules += [
            Rename(f"{theirs}.mlp.{name}.bias", f"{mlp}.mixer.{name}.bias")
            for name in ("gate_proj", "up_proj", "down_proj")
        ]
    # Old files carry the rotary frequencies in each layer.
    rules.append(inverse_frequency_rule(config, f"{theirs}.self_attn.rotary_emb"))
    return rules


QK_NORMS = ("q_norm", "k_norm")


def decoder_rules(
    config: ModelConfig,
    *,
    norms: Sequence[str] = PRE_NORMS,
    post_norms: Sequence[str] = (),
) -> list[TensorRule]:
    """Rules of embedding, blocks, final norm and head, named as in the transformers library."""
    rules: list[TensorRule] = [
        Rename("model.embed_tokens.weight", "embedding.weight"),
        Rename("model.norm.weight", "final_norm.weight"),
        *head_rules(config, "model.embed_tokens.weight"),
        inverse_frequency_rule(config, "model.rotary_emb"),
    ]
    for block in range(sum(config.split) // 2):
        theirs = f"model.layers.{block}"
        rules += block_rules(config, block, theirs, norms=norms, post_norms=post_norms)
    return rules


def head_rules(
    config: ModelConfig, embedding: str, *, is_exported: bool = False
) -> list[TensorRule]:
    """The head: a tensor of its own, or a copy of the embedding that many files leave out.

    Args: embedding: source name; is_exported: the published format stores the copy.
    """
    if not config.tie_embeddings:
        return [Rename("lm_head.weight", "lm_head.weight")]
    return [Copy("lm_head.weight", embedding, "embedding.weight", is_exported=is_exported)]


def num_rotating(config: ModelConfig) -> int:
    """Channels of a head that rotate."""
    return round(config.head_dim * config.rotary_frac)


def inverse_frequency_rule(config: ModelConfig, owner: str) -> Buffer:
    """Frequencies that old files carry and newer ones leave out.

    Where the config scales them, some versions of the library store them before scaling and some
    after it; both are accepted.

    Args: owner: name of the module that they belong to.
    """
    rotating = num_rotating(config)
    plain = partial(inverse_frequencies, rotating, config.rope_theta)
    scaled = partial(rotary_frequencies, rotating, config.rope_theta, scaling=config.rope_scaling)
    return Buffer(
        f"{owner}.inv_freq",
        plain,
        (rotating // 2,),
        is_exported=False,
        also=() if config.rope_scaling is None else (scaled,),
    )


def inverse_frequencies(rotating: int, theta: float) -> Tensor:
    """theta^(-2 j / n) for the n rotating channels of a head, [n / 2], bit for bit as transformers
    computes them."""
    exponents = torch.arange(0, rotating, 2, dtype=torch.int64).float() / rotating
    return 1.0 / (theta**exponents)


TABLE_TOLERANCE = 2e-3
"""Angles up to a context of 2^17 carry a float32 rounding of this size."""


def cos_sin_rule(
    config: ModelConfig,
    source: str,
    *,
    theta: float | None = None,
    num_positions: int | None = None,
    is_exported: bool = True,
) -> Buffer:
    """A stored table of cosines and sines of all positions, [1, num_positions, 1, n / 2, 2].

    Args: source: its name; theta, num_positions: None for those of the model; is_exported: the
        published loader asks for it.
    """
    rotating = num_rotating(config)
    num_positions = config.max_context if num_positions is None else num_positions
    make = partial(
        cos_sin_table,
        rotating,
        config.rope_theta if theta is None else theta,
        num_positions,
        config.rope_scaling.factor if config.rope_scaling is not None else 1.0,
    )
    shape = (1, num_positions, 1, rotating // 2, 2)
    return Buffer(source, make, shape, TABLE_TOLERANCE, is_exported)


def cos_sin_table(rotating: int, theta: float, num_positions: int, factor: float) -> Tensor:
    """That table in float32; positions are divided by the factor."""
    positions = torch.arange(num_positions, dtype=torch.float32) / factor
    angles = torch.outer(positions, inverse_frequencies(rotating, theta))
    return torch.stack([angles.cos(), angles.sin()], dim=-1)[None, :, None]
