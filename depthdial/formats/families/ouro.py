"""Ouro (LoopLM, arXiv 2510.25741): the whole stack loops, the final norm ends every loop.

Layer: x += N2(attention(N1(x))), x += N4(MLP(N3(x))); an exit gate reads the normed state.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import (
    Defaults,
    decoder_rules,
    read_decoder,
    write_decoder,
)
from depthdial.formats.families.family import Family
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, TensorRule

NORMS = ("input_layernorm", "post_attention_layernorm")
DEFAULTS = Defaults(max_context=32_768)
POST_NORMS = ("input_layernorm_2", "post_attention_layernorm_2")


def read(source: SourceConfig) -> ModelConfig:
    """All loops are supervised in training, so num_loops is max_loops."""
    num_loops = source.loops("total_ut_steps")
    # The released classes have neither biases nor a key for them.
    for key in ("attention_bias", "mlp_bias"):
        source.expect(key, False, None)
    # Stopping by threshold is a choice of each request here, not of the model. A fixed exit loop
    # is the same as asking for fewer loops.
    source.number("early_exit_threshold", 1.0)
    source.expect("early_exit_step", None)
    return ModelConfig.from_dict(
        {
            **read_decoder(source, DEFAULTS),
            "norm": "sandwich",
            "final_norm": "loop",
            "exit_gate": "linear",
            "num_loops": num_loops,
            "max_loops": num_loops,
            "loop": {"update": "replace"},
        }
    )


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    return [
        *decoder_rules(config, norms=NORMS, post_norms=POST_NORMS),
        Rename("model.early_exit_gate.weight", "exit_gate.linear.weight"),
        Rename("model.early_exit_gate.bias", "exit_gate.linear.bias"),
    ]


def to_source(config: ModelConfig) -> dict[str, Any]:
    values = write_decoder(config)
    del values["attention_bias"], values["mlp_bias"]
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        **values,
        "layer_types": ["full_attention"] * (sum(config.split) // 2),
        "sliding_window": None,
        "use_sliding_window": False,
        "total_ut_steps": config.num_loops,
        "early_exit_threshold": 1.0,
    }


def limits(config: ModelConfig) -> list[str]:
    return [
        "The released forward with labels returns the loss of logits mixed by the exit "
        "distribution; here a loss is always of one loop count."
    ]


def choices(values: dict[str, Any]) -> list[str]:
    quantile = values.get("early_exit_threshold") or 1.0
    if quantile >= 1:
        return []
    return [
        f"The published config stops at the quantile early_exit_threshold={quantile:g} of the exit "
        "gate; here every request runs all its loops unless it says --exit-rule q_exit "
        f"--exit-threshold {quantile:g}."
    ]


OURO = Family(
    name="ouro",
    summary="Ouro (LoopLM): the whole stack loops, with exit gate and norms on both sides.",
    matches=lambda values: values.get("model_type") == "ouro",
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
    choices=choices,
)
