"""Retrofitted Recurrence (arXiv 2511.07384): a dense model's layers in the format of Huginn.

Some layers are dropped, the rest become prelude, core and coda; blocks keep the norms and the
rotation (half-split, with the dense model's scaling) of a Llama, and the final norm acts once.
The format does not say which dense family was converted: blocks of OLMo norm the branch alone and
have query and key norms over all heads, which no layer here does. Their tensors are named as
unknown and stop the import.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import (
    cos_sin_rule,
    inverse_frequency_rule,
    read_rope,
    write_rope,
)
from depthdial.formats.families.family import Family
from depthdial.formats.families.raven_layers import (
    MODEL_TYPE,
    block_names,
    raven_rules,
    read_raven,
    write_raven,
)
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Buffer, Rename, TensorRule

INITIAL_STATES = {"random": "random", "embed-init": "prelude", "embed_init": "prelude"}
"""Their mode -> ours."""
DEFAULT_ROPE_BASE = 50_000.0
"""Of the format, where the config names none."""


def matches(values: dict[str, Any]) -> bool:
    """Huginn's model_type; no dense base has its query and key biases."""
    return values.get("model_type") == MODEL_TYPE and values.get("qk_bias", True) is False


def read(source: SourceConfig) -> ModelConfig:
    """`rope_base` is a leftover of the format where `rope_theta` is given: the code reads the
    latter."""
    fields = read_raven(source)
    source.expect(
        "block_class_name", "SandwichBlock", "TransformerPreNormBlock", default="SandwichBlock"
    )
    source.expect("qk_bias", False)
    mode = source.expect("initial_state_mode", *INITIAL_STATES, default="random")
    if INITIAL_STATES[mode] == "prelude":
        fields["loop"] |= {"initial_state": "prelude", "random_state_std": None}
    return ModelConfig.from_dict(
        {
            **fields,
            **read_rope(source, default_theta=source.number("rope_base", DEFAULT_ROPE_BASE)),
            "max_context": source.count("max_position_embeddings", source.count("block_size")),
        }
    )


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    """The public converter saves a model of Huginn's class, so its files also hold two more norms
    of each block and a rotary table, which the code that opens them never reads."""
    found = raven_rules(config)
    for theirs, attention, mlp in block_names(config):
        found += [
            Rename(f"{theirs}.norm_1.weight", f"{attention}.norm.weight"),
            Rename(f"{theirs}.norm_2.weight", f"{mlp}.norm.weight"),
            *(_unread_norm(config, f"{theirs}.norm_{i}.weight") for i in (3, 4)),
        ]
    found.append(inverse_frequency_rule(config, "rotary_emb"))
    found.append(
        # Made before the rotation was set: of the format's own theta and context, unscaled.
        cos_sin_rule(
            config.replace(rope_scaling=None),
            "freqs_cis",
            theta=source.get("rope_base") or DEFAULT_ROPE_BASE,
            num_positions=source.get("block_size"),
            is_exported=False,
        )
    )
    return found


def _unread_norm(config: ModelConfig, source: str) -> Buffer:
    """A gain of ones that the converter leaves in the file."""
    return Buffer(
        source,
        partial(torch.ones, config.d_model),
        (config.d_model,),
        tolerance=0,
        is_exported=False,
        otherwise="only ones are without effect there, so this is another model than the config "
        "says (its blocks have four norms)",
    )


def to_source(config: ModelConfig) -> dict[str, Any]:
    values = {
        **write_raven(config),
        **write_rope(config),
        "qk_bias": False,
        "rope_base": config.rope_theta,
        "max_position_embeddings": config.max_context,
    }
    if config.loop.initial_state == "prelude":
        values["initial_state_mode"] = "embed-init"
    return values


def limits(config: ModelConfig) -> list[str]:
    return [
        "The published config states a mean loop count only; max_loops is twice it.",
        "Where layers were dropped, no loop count gives the dense model's function back.",
    ]


RETROFIT = Family(
    name="retrofit",
    summary="Retrofitted Recurrence: layers of a Llama in Huginn's format, some dropped.",
    matches=matches,
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
