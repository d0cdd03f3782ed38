"""Plain decoder-only models, a core that runs once: the formats of Llama and of Qwen3.

SmolLM2 and TinyLlama are of the first. Source: config and tensor names of transformers 4.45 and
5.24; both spellings of the rotary keys are read.
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
from depthdial.formats.tensors.rules import TensorRule

NO_LOOP = {"update": "replace"}
QWEN3_DEFAULTS = Defaults(max_context=32_768, head_dim=128, num_kv_heads=32)


def read_llama(source: SourceConfig) -> ModelConfig:
    """A model without query and key norms."""
    return ModelConfig.from_dict({**read_decoder(source), "loop": NO_LOOP})


def read_qwen3(source: SourceConfig) -> ModelConfig:
    """A model with an RMS norm on each query and key head; head_dim is 128 where it is absent."""
    # Qwen3 has no biases in its MLP, and no key for them.
    source.expect("mlp_bias", False, None)
    fields = read_decoder(source, QWEN3_DEFAULTS)
    return ModelConfig.from_dict({**fields, "qk_norm": "rms", "loop": NO_LOOP})


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    return decoder_rules(config)


def write_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **write_decoder(config),
    }


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    values = write_decoder(config)
    del values["mlp_bias"]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
        **values,
    }


def limits(config: ModelConfig) -> list[str]:
    return []


LLAMA = Family(
    name="llama",
    summary="Dense model in the Llama format (Llama, SmolLM2, TinyLlama).",
    matches=lambda values: values.get("model_type") == "llama",
    read=read_llama,
    rules=rules,
    to_source=write_llama,
    limits=limits,
)

QWEN3 = Family(
    name="qwen3",
    summary="Dense model in the Qwen3 format, with query and key norms.",
    matches=lambda values: values.get("model_type") == "qwen3",
    read=read_qwen3,
    rules=rules,
    to_source=write_qwen3,
    limits=limits,
)
