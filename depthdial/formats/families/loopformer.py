"""LoopFormer (arXiv 2602.11451): all blocks loop, conditioned on time and step size.

Loop m moves by its own step; all steps sum to 1. Positions are learned, block norms have no gain.
"""

from __future__ import annotations

from typing import Any

import torch

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import head_rules, sublayer_name
from depthdial.formats.families.family import Family
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Regroup, Rename, Split, TensorRule

EMBED_DIM = 256
"""Width of the sinusoidal embeddings, fixed in the released code."""
RELEASED_LOOPS = 8
"""Longest path of the released training script."""
GATE_ATTENTION, GATE_MLP, SCALE_ATTENTION, SCALE_MLP = range(4)
"""Order of the row blocks of one block's modulation."""


def read(source: SourceConfig) -> ModelConfig:
    """The longest path is trained at every step, shorter ones at random."""
    # Dropout acts in training only.
    source.ignore("dropout")
    d_model, num_heads = source.count("n_embd"), source.count("n_head")
    has_bias = source.flag("bias")
    num_loops = source.loops("max_model_loops", RELEASED_LOOPS)
    # The released norms name no epsilon, which means the machine epsilon of their dtype.
    norm_eps = torch.finfo(torch.float32).eps
    return ModelConfig.from_dict(
        {
            "vocab_size": source.count("vocab_size"),
            "d_model": d_model,
            "layout": "AF",
            "split": [0, 2 * source.layers("n_layer"), 0],
            "num_heads": num_heads,
            "num_kv_heads": num_heads,
            "head_dim": d_model // num_heads,
            "d_ff": source.count("intermediate_dim"),
            "ff": "gelu",
            "ff_bias": has_bias,
            "attention_bias": "qkvo" if has_bias else "none",
            "max_context": source.count("block_size"),
            "positions": "learned",
            "norm_gain": False,
            "norm_eps": norm_eps,
            "tie_embeddings": True,
            "num_loops": num_loops,
            "max_loops": num_loops,
            "loop": {"update": "replace"},
            "modulation": {"kind": "time_step", "embed_dim": EMBED_DIM},
        }
    )


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    found: list[TensorRule] = [
        Rename("transformer.wte.weight", "embedding.weight"),
        Rename("transformer.wpe.weight", "position_embedding.weight"),
        Rename("transformer.norm_f.weight", "final_norm.weight"),
        # The released loader is strict and asks for both copies.
        *head_rules(config, "transformer.wte.weight", is_exported=True),
    ]
    parts = ("weight", "bias")
    for theirs, ours in (("time_embedder", "time"), ("dt_embedder", "step")):
        for idx, place in ((0, "in"), (2, "out")):
            found += [
                Rename(f"{theirs}.mlp.{idx}.{part}", f"modulation.{ours}_{place}.{part}")
                for part in parts
            ]
    for block in range(config.split[1] // 2):
        found += _block_rules(config, block, f"transformer.h.blocks.{block}")
    return found


def _block_rules(config: ModelConfig, block: int, theirs: str) -> list[TensorRule]:
    attention, mlp = sublayer_name(config, 2 * block), sublayer_name(config, 2 * block + 1)
    found: list[TensorRule] = []
    for part in ("weight", "bias"):
        if part == "weight" or config.ff_bias:
            qkv = tuple(f"{attention}.mixer.{x}_proj.{part}" for x in "qkv")
            found += [
                Split(f"{theirs}.attn.c_attn.{part}", qkv, (config.d_model,) * 3),
                Rename(f"{theirs}.attn.c_proj.{part}", f"{attention}.mixer.o_proj.{part}"),
                Rename(f"{theirs}.mlp.c_fc.{part}", f"{mlp}.mixer.up_proj.{part}"),
                Rename(f"{theirs}.mlp.c_proj.{part}", f"{mlp}.mixer.down_proj.{part}"),
            ]
        heads = {
            f"modulation.core.{2 * block}.heads.{part}": (SCALE_ATTENTION, GATE_ATTENTION),
            f"modulation.core.{2 * block + 1}.heads.{part}": (SCALE_MLP, GATE_MLP),
        }
        found.append(Regroup(f"{theirs}.adaLN_modulation.1.{part}", config.d_model, heads))
    return found


def to_source(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT"],
        "model_type": "loopformer",
        "block_size": config.max_context,
        "vocab_size": config.vocab_size,
        "n_layer": sum(config.split) // 2,
        "n_head": config.num_heads,
        "n_embd": config.d_model,
        "dropout": 0.0,
        "bias": config.ff_bias,
        "intermediate_dim": config.d_ff,
        "max_model_loops": config.num_loops,
    }


def limits(config: ModelConfig) -> list[str]:
    return [
        "The released generation ignores the requested path and has no cache; here both work, so "
        "its texts differ from those of the released code."
    ]


LOOPFORMER = Family(
    name="loopformer",
    summary="LoopFormer: all blocks loop, conditioned on time and on the size of each step.",
    matches=lambda values: values.get("model_type") == "loopformer",
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
