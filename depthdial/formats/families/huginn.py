"""Huginn (arXiv 2502.05171): norm after each residual sum, final norm before coda and head.

Block: x = N2(x + attention(N1(x))), x = N4(x + MLP(N3(x))). Rotary pairs are neighbours; queries
and keys have biases, values have none.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import cos_sin_rule
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

MEAN_PER_FEWEST = 4
"""The mean loop count over this is the first percentile of the Poisson-lognormal draws: 8 of 32.
Below it, one loop was drawn about once in the 47,000 steps of the released model."""


def matches(values: dict[str, Any]) -> bool:
    """Retrofitted models use the same model_type, without the biases that Huginn has."""
    return values.get("model_type") == MODEL_TYPE and values.get("qk_bias", True) is True


def read(source: SourceConfig) -> ModelConfig:
    """The noise and the depth of `read_raven`, with Huginn's norms and rotation.

    Of the loop counts up to max_loops, those below the first percentile of the draws do not count
    as trained.
    """
    fields = read_raven(source)
    source.expect("block_class_name", "SandwichBlock", default="SandwichBlock")
    source.expect("qk_bias", True, default=True)
    # The bias tensor has one row per query head for queries and keys alike.
    if fields["num_kv_heads"] != fields["num_heads"]:
        raise ValueError(
            f"{source.called} has qk_bias with n_heads={fields['num_heads']} and "
            f"num_key_value_heads={fields['num_kv_heads']}; the format has no such biases."
        )
    config = ModelConfig.from_dict(
        {
            **fields,
            "norm": "post_sum",
            "final_norm": "coda_and_head",
            "attention_bias": "qk",
            "rotary_pairs": "interleaved",
            "rope_theta": source.number("rope_base", 50_000.0),
            "max_context": source.count("block_size"),
        }
    )
    fewest = max(1, config.num_loops // MEAN_PER_FEWEST)
    return config.with_trained(range(fewest, config.max_loops + 1))


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    found = raven_rules(config)
    for theirs, attention, mlp in block_names(config):
        norms = (
            (1, f"{attention}.norm"),
            (2, f"{attention}.post_norm"),
            (3, f"{mlp}.norm"),
            (4, f"{mlp}.post_norm"),
        )
        found += [Rename(f"{theirs}.norm_{i}.weight", f"{ours}.weight") for i, ours in norms]
    found.append(cos_sin_rule(config, "freqs_cis"))
    return found


def to_source(config: ModelConfig) -> dict[str, Any]:
    return {**write_raven(config), "qk_bias": True, "rope_base": config.rope_theta}


def limits(config: ModelConfig) -> list[str]:
    return [
        "The published config states a mean loop count only; max_loops is twice it, and a quarter "
        "of it is the fewest that counts as trained. About 93 % of the draws lie between.",
        "The noise that a loop starts from is a function of seed, position and channel here, so a "
        "cached, padded or batched run gives the same text; the released code draws it anew.",
        "Padding is masked here; the released forward has no padding mask.",
    ]


HUGINN = Family(
    name="huginn",
    summary="Huginn: prelude, looped core with a linear adapter and random initial state, coda.",
    matches=matches,
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
