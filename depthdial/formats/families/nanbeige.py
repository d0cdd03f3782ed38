"""Nanbeige4.2 (arXiv 2608.13987): the whole stack loops twice, the final norm ends every pass.

Its LoopSplit switch loops m middle layers (L + m) / m times instead, which for L layers in all
executes 2 L layers.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig, named_rule
from depthdial.formats.families.decoder_layers import decoder_rules, read_decoder, write_decoder
from depthdial.formats.families.family import Family, simplest
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import TensorRule

MUST_BE_OFF = (
    "enable_depth_attention",
    "enable_h_res_identity",
    "enable_hyper_connection",
    "enable_mhc",
    "mhc_diff_for_loop",
    "mhc_identity_nohresparam",
    "ngram_compressed_tokenizer",
    "ngram_insert_all_layers",
    "ngram_mod_force_prime",
    "qk_layernorm",
    "skip_ngram_for_input",
)
"""Switches of other architectures: hyper-connections, attention over depth, n-gram embeddings."""
MUST_BE_NULL = (
    "emb_neighbor_num",
    "emb_split_num",
    "emb_tp_num",
    "mhc_double_stream_position_for_loop",
    "ngram_embedding_hidden_size",
    "ngram_layer_downproject_size",
    "ngram_vocab_size_ratio",
)
DETAILS_OF_SWITCHES = (
    "depth_attention_recent_window",
    "depth_attention_static_anchor_once",
    "depth_attention_stride",
    "mhc_init_gating_factor",
    "mhc_sinkhorn_iterations",
    "ngram_fused_mode",
    "num_residual_streams",
)
"""Numbers that act only with a switch that is off."""


def read(source: SourceConfig) -> ModelConfig:
    """The released model is trained at its own loop count only; a loss at each loop trains all."""
    fields = read_decoder(source)
    for key in MUST_BE_OFF:
        source.expect(key, False, None)
    for key in MUST_BE_NULL:
        source.expect(key, None)
    source.expect("insert_ngram_layer_idx", None, [])
    source.ignore(*DETAILS_OF_SWITCHES)
    # Another name of head_dim in this family's training code.
    source.expect("kv_channels", None, fields["head_dim"])
    num_loops, final_norm = source.loops("num_loops", 1), "loop"
    loss_weights = source.take("loop_loss_weights")
    if not isinstance(loss_weights, list | None):
        raise ValueError(
            f"'loop_loss_weights' is {loss_weights!r} in the source config, not a list."
        )
    is_every_loop_trained = False
    if loss_weights:
        num_loops = len(loss_weights) + 1
        is_every_loop_trained = all(isinstance(x, int | float) and x > 0 for x in loss_weights)
    if source.flag("skip_loop_final_norm"):
        final_norm = "head"
    if source.flag("enable_double_loop_split"):
        num_loops, fields["split"] = _loop_split(source, fields["split"][1] // 2)
        final_norm, is_every_loop_trained = "head", False
        is_shared = source.flag("loop_share_kv")
    else:
        is_shared = source.expect("loop_share_kv", False, None) is True
        # Only the split reads it.
        source.ignore("loop_middle_layers")
    policy = "share_first" if is_shared else "per_loop"
    config = ModelConfig.from_dict(
        {
            **fields,
            "final_norm": final_norm,
            "num_loops": num_loops,
            "max_loops": num_loops,
            "loop": {"update": "replace", "cache_policy": policy},
        }
    )
    return config if is_every_loop_trained else config.with_trained([num_loops])


def _loop_split(source: SourceConfig, num_layers: int) -> tuple[int, list[int]]:
    """(loops, split) of the switch; the edges are equally long, the upper one longer by the rest.

    Raises: ValueError where the middle does not divide the layers.
    """
    if source.take("loop_middle_layers") is None and num_layers % 2 == 0:
        middle = num_layers // 2
    else:
        middle = source.count("loop_middle_layers")
    if num_layers % middle:
        raise ValueError(
            f"'loop_middle_layers' is {middle}, which does not divide num_hidden_layers="
            f"{num_layers} in {source.called}."
        )
    below = (num_layers - middle) // 2
    split = [2 * below, 2 * middle, 2 * (num_layers - middle - below)]
    return (num_layers + middle) // middle, split


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    return decoder_rules(config)


def to_source(config: ModelConfig) -> dict[str, Any]:
    # A dense model needs no split, wherever it has one.
    config = simplest(config)
    is_split = config.split[0] > 0 or config.split[2] > 0
    if is_split and sum(config.split) != (config.num_loops - 1) * config.split[1]:
        raise ValueError(
            f"split={list(config.split)} with num_loops={config.num_loops}, and the format loops m "
            "of L layers (L + m) / m times."
        )
    return {
        "architectures": ["NanbeigeForCausalLM"],
        "model_type": "nanbeige",
        **write_decoder(config),
        "kv_channels": config.head_dim,
        "num_loops": config.num_loops,
        "loop_loss_weights": [],
        "skip_loop_final_norm": config.final_norm == "head" and not is_split,
        "enable_double_loop_split": is_split,
        "loop_middle_layers": config.split[1] // 2 if is_split else None,
        "loop_share_kv": named_rule(config.loop.cache_policy).shares_first,
    }


def limits(config: ModelConfig) -> list[str]:
    return [
        "The published model is trained at one loop count; other counts are extrapolation.",
        "Hyper-connections, depth attention and n-gram embeddings are refused.",
    ]


NANBEIGE = Family(
    name="nanbeige",
    summary="Nanbeige4.2: the whole stack, or its middle, loops a fixed number of times.",
    matches=lambda values: values.get("model_type") == "nanbeige",
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
