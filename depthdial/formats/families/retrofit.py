"""Retrofitted Recurrence (arXiv 2511.07384): a dense model's layers in the format of Huginn.

Some layers are dropped, the rest become prelude, core and coda; blocks keep the norms and the
rotation (half-split, with the dense model's scaling) of a Llama, and the final norm acts once.
The format does not say which dense family was converted: blocks of OLMo norm the branch alone and
have query and key norms over all heads, which no layer here does. Their tensors are named as
unknown and stop the import.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import inverse_frequency_rule, read_rope, write_rope
from depthdial.formats.families.family import Family
from depthdial.formats.families.raven_layers import (
    MODEL_TYPE,
    block_names,
    raven_rules,
    read_raven,
    write_raven,
)
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, TensorRule

INITIAL_STATES = {"random": "random", "embed-init": "prelude", "embed_init": "prelude"}
"""Their mode -> ours."""


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
            **read_rope(source, default_theta=source.number("rope_base", 50_000.0)),
            "max_context": source.count("max_position_embeddings", source.count("block_size")),
        }
    )


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    found = raven_rules(config)
    for theirs, attention, mlp in block_names(config):
        found += [
            Rename(f"{theirs}.norm_1.weight", f"{attention}.norm.weight"),
            Rename(f"{theirs}.norm_2.weight", f"{mlp}.norm.weight"),
        ]
    if config.rope_scaling is None:
        found.append(inverse_frequency_rule(config, "rotary_emb"))
    return found


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
