"""LoopUS (arXiv 2605.11011): a dense model cut into encoder, looped reasoning block and decoder.

A decay gate decides per channel how much of the block's output enters the state; a small head
reads when to stop. The base model's own config stands inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import block_rules
from depthdial.formats.families.dense import LLAMA, QWEN3
from depthdial.formats.families.family import Family
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, TensorRule

BASES: dict[str, Callable[[SourceConfig], ModelConfig]] = {
    "llama": LLAMA.read,
    "qwen3": QWEN3.read,
}
PARTS = ("encoder", "reasoning", "decoder")
HALTING = {
    "threshold": ("q_threshold", 0.9),
    "cdf": ("q_threshold", 0.9),
    "convergence": ("convergence_epsilon", 0.01),
}
"""Published strategy -> the key of its threshold, and that key's default; named alike here."""
CHANNELS_PER_RANK = 16
"""The gate's low rank is the width divided by this, rounded up."""


def read(source: SourceConfig) -> ModelConfig:
    """Supervised steps are drawn from all N, so N is the largest loop count.

    A supervised step applies the block twice before its loss, so that no loss is of one loop.
    """
    source.ignore("base_model_name_or_path")
    # When to stop is a choice of each request here.
    source.ignore("halting_strategy", "q_threshold", "q_eval_interval", "convergence_epsilon")
    source.expect("lma_window", 0, None)
    source.ignore("lma_heads")
    # The base's head is copied when the model is cut, so it is never tied.
    source.expect("tie_word_embeddings", False, None)
    base = source.section("base_config_dict")
    if base is None:
        raise ValueError(
            "the source config has no 'base_config_dict', the config of the dense model."
        )
    base_type = base.expect("model_type", *BASES)
    fields = BASES[base_type](base).to_dict()
    source.expect("hidden_size", None, fields["d_model"])
    source.expect("vocab_size", None, fields["vocab_size"])
    num_loops = source.loops("N")
    config = ModelConfig.from_dict(
        {
            **fields,
            "split": _split(source, fields["split"][1] // 2),
            "tie_embeddings": False,
            "num_loops": num_loops,
            "max_loops": num_loops,
            "loop": {
                "update": "decay_gate",
                "gate_rank": math.ceil(fields["d_model"] / CHANNELS_PER_RANK),
            },
            "exit_gate": "norm_linear",
        }
    )
    return config.with_trained(range(2, num_loops + 1))


def _split(source: SourceConfig, num_layers: int) -> list[int]:
    """Sublayers of the three parts. Raises: ValueError unless they hold each layer once."""
    parts = [source.need(f"{part}_layer_indices") for part in PARTS]
    are_lists = all(isinstance(layers, list) for layers in parts)
    if not are_lists or not parts[1] or any(type(layer) is not int for layer in sum(parts, [])):
        raise ValueError(
            f"the source config has layer lists {parts}; each of {PARTS} needs a list of "
            "numbers, and the reasoning block at least one layer."
        )
    if sorted(sum(parts, [])) != list(range(num_layers)):
        raise ValueError(
            f"the layer lists {parts} of {PARTS} must hold each of the {num_layers} layers of "
            "base_config_dict once."
        )
    return [2 * len(layers) for layers in parts]


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    found: list[TensorRule] = [
        Rename("encoder.embed_tokens.weight", "embedding.weight"),
        Rename("decoder.norm.weight", "final_norm.weight"),
        Rename("decoder.lm_head.weight", "lm_head.weight"),
        Rename("reasoning.gate.A_log", "state_update.log_decay"),
        Rename("reasoning.gate.dt_input_proj.weight", "state_update.down.weight"),
        Rename("reasoning.gate.delta_proj.weight", "state_update.up.weight"),
        Rename("reasoning.gate.delta_proj.bias", "state_update.up.bias"),
    ]
    for theirs, ours in (("q_head.0", "exit_gate.norm"), ("q_head.1", "exit_gate.linear")):
        found += [Rename(f"{theirs}.{part}", f"{ours}.{part}") for part in ("weight", "bias")]
    block = 0
    for part, sublayers in zip(PARTS, config.split, strict=True):
        for layer in range(sublayers // 2):
            found += block_rules(config, block, f"{part}.layers.{layer}")
            block += 1
    return found


def to_source(config: ModelConfig) -> dict[str, Any]:
    base = QWEN3 if config.qk_norm == "rms" else LLAMA
    layers = list(range(sum(config.split) // 2))
    encoder, reasoning = config.split[0] // 2, config.split[1] // 2
    return {
        "architectures": ["LDSForCausalLM"],
        "model_type": "lds",
        "hidden_size": config.d_model,
        "vocab_size": config.vocab_size,
        "base_config_dict": base.to_source(config),
        "encoder_layer_indices": layers[:encoder],
        "reasoning_layer_indices": layers[encoder : encoder + reasoning],
        "decoder_layer_indices": layers[encoder + reasoning :],
        "N": config.num_loops,
        "halting_strategy": "threshold",
        "q_threshold": 0.9,
        "q_eval_interval": 1,
        "convergence_epsilon": 0.01,
    }


def limits(config: ModelConfig) -> list[str]:
    return [
        "The released code applies the block twice at every supervised training step: losses are "
        "of 2 loops and more, up to more than its counted N.",
        "The stopping head was trained on the change of the state before the gate, and is read "
        "from the state after it, as the released generation does.",
    ]


def choices(values: dict[str, Any]) -> list[str]:
    strategy = str(values.get("halting_strategy", "threshold"))
    if strategy not in HALTING:
        return [
            f"The published config stops by halting_strategy='{strategy}', which has no equal here."
        ]
    key, default = HALTING[strategy]
    threshold = values.get(key, default)
    return [
        f"The published config stops by halting_strategy='{strategy}' with {key}={threshold}; here "
        f"every request runs all its loops unless it says --exit-rule {strategy} --exit-threshold "
        f"{threshold}."
    ]


LOOPUS = Family(
    name="loopus",
    summary="LoopUS: a dense model whose middle layers loop behind a decay gate.",
    matches=lambda values: values.get("model_type") == "lds",
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
    choices=choices,
)
