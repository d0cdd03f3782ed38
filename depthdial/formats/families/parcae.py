"""Parcae (arXiv 2604.12946): a stable loop by diagonal injection, with value embeddings.

Every loop starts with h <- exp(-dt A) h + dt (B e), per channel; a matrix C stands between the last
state and the coda. Blocks are pre-norm, with norms without gain after the rotation of queries and
keys, and an MLP of relu(x)^2 / 2. The core may have another width and number of heads than the
layers around it: B maps into its width and C out of it; its heads have the channels of the others,
since all turn by one table, and as many keys as queries.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import cos_sin_rule, head_rules
from depthdial.formats.families.family import Family
from depthdial.formats.families.raven_layers import (
    PARTS,
    block_names,
    layers_of_parts,
    read_mean_loops,
)
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, TensorRule

CLASS_NAME = "ParcaeConfig"
ONLY_IN_TRAINING = (
    "activation_checkpoint_impl",
    "curriculum_target",
    "init_orthogonal",
    "init_strategy",
    "lockstep_k",
    "lockstep_n",
    "mean_backprop_depth",
    "padding_multiple",
    "recurrent_iteration_method",
    "sampling_scheme",
    "simple_ops",
    "skip_initialization",
    "strategy",
    "use_fused_head",
)
MUST_BE = {
    "bias": (False,),
    "block_class_name": ("TransformerPreNormBlock",),
    "center_attention": (False,),
    "clip_qkv": (None,),
    "debias_attention": (False,),
    "injection_type": ("diagonal",),
    "mlp_class_name": ("BaseMLP",),
    "mup_model_scaling_factor": (1, 1.0),
    "nonlin_name": ("ReLU2",),
    "norm_class_name": ("RMSNorm",),
    "qk_bias": (False,),
    "qk_norm": (True,),
    "randomize_positions_from": (None,),
    "state_init": ("like-init",),
    "use_abacus": (False,),
}
"""Keys that choose another architecture, and what this runtime can do."""


def read(source: SourceConfig) -> ModelConfig:
    """The noise that a loop starts from is that of Huginn, without its embedding scale."""
    source.ignore("_class_name", "model_class_name", "name", "hf_config", "attn_impl")
    source.ignore(*ONLY_IN_TRAINING)
    for key, allowed in MUST_BE.items():
        source.expect(key, *allowed, default=allowed[0])
    d_model, num_heads = source.count("n_embd"), source.count("num_attention_heads")
    d_ff = source.count("intermediate_size")
    core_d_ff = source.count("recurrent_intermediation_embedding_dimension", d_ff)
    parts = [source.layers(f"n_layers_in_{part}") for part in PARTS]
    loops = read_mean_loops(source)
    return ModelConfig.from_dict(
        {
            "vocab_size": source.count("padded_vocab_size", source.count("vocab_size")),
            "d_model": d_model,
            "layout": "AF",
            "split": [2 * layers for layers in parts],
            "num_heads": num_heads,
            "num_kv_heads": source.count("num_key_value_heads", num_heads),
            "head_dim": d_model // num_heads,
            **_read_core(source, d_model, num_heads),
            "d_ff": d_ff,
            "core_d_ff": None if core_d_ff == d_ff else core_d_ff,
            "ff": "half_relu_squared",
            "max_context": source.count("block_size"),
            **_read_rope(source),
            "qk_norm": "rms_after_rotary",
            # The released norm names no epsilon, which means the machine epsilon of its dtype.
            "qk_norm_eps": torch.finfo(torch.float32).eps,
            "value_embeddings": value_layers(parts, loops["num_loops"]),
            "tie_embeddings": source.flag("tie_embeddings", default=True),
            "logit_soft_cap": _read_soft_cap(source),
            "norm_eps": source.number("norm_eps", 1e-5),
            "prelude_norm": source.flag("prelude_norm"),
            **loops,
            "loop": {
                "update": "replace",
                "injection": "diagonal",
                "initial_state": "random",
                "random_state_std": math.sqrt(2 / (5 * d_model)),
                "state_projection": True,
            },
        }
    )


def _read_core(source: SourceConfig, d_model: int, num_heads: int) -> dict[str, int | None]:
    """Width and heads of the core, null where they are those of the other layers."""
    width = source.count("recurrent_embedding_dimension", d_model)
    heads = source.count("recurrent_num_attention_heads", num_heads)
    if width * num_heads != heads * d_model:
        source.refuse(
            f"recurrent_embedding_dimension={width} with {heads} heads in the core "
            "(recurrent_num_attention_heads) gives them another number of channels than the "
            f"{num_heads} heads of n_embd={d_model}; all heads turn by one rotary table, so the "
            "numbers must be equal."
        )
    num_kv_heads = source.count("num_key_value_heads", num_heads)
    return {
        "core_d_model": None if width == d_model else width,
        "core_num_heads": None if heads == num_heads else heads,
        "core_num_kv_heads": None if heads == num_kv_heads else heads,
    }


def _read_soft_cap(source: SourceConfig) -> float | None:
    is_capped = source.take("logit_softcap") is not None
    return source.number("logit_softcap", 1.0) if is_capped else None


def _read_rope(source: SourceConfig) -> dict[str, Any]:
    """Rotary fields; the condense ratio divides positions, which is linear scaling."""
    section = source.section("rope_settings")
    if section is None:
        raise ValueError("the source config has no 'rope_settings'.")
    section.expect("use_rope", True)
    ratio = section.number("rope_condense_ratio", 1.0)
    return {
        "rotary_pairs": "interleaved",
        "rope_theta": section.number("rope_base", 50_000.0),
        "rope_scaling": None if ratio == 1 else {"kind": "linear", "factor": ratio},
    }


def value_layers(parts: list[int], mean_loops: int) -> list[int]:
    """Attention layers with a value embedding: every other one, such that the last has one.

    A layer needs a table and a gate. Tables go by the number of the stored layer, gates by its
    number in the network unrolled to the mean loop count, where the core counts once for its
    first pass; both counts end at the last layer.

    Raises: ValueError where the two rules differ, since tensors without effect would be left over.
    """
    prelude, core, coda = parts
    stored, unrolled = sum(parts), prelude + core * mean_loops + coda
    numbers = [*range(prelude + core), *range(prelude + core * mean_loops, unrolled)]
    tables = {i for i in range(stored) if i % 2 == (stored - 1) % 2}
    gates = {i for i, number in enumerate(numbers) if number % 2 == (unrolled - 1) % 2}
    if tables != gates:
        raise ValueError(
            f"with {prelude}, {core} and {coda} layers and mean_recurrence={mean_loops} the value "
            f"tables belong to layers {sorted(tables)} and their gates to {sorted(gates)}; this "
            "runtime can do equal ones."
        )
    return sorted(tables)


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    found: list[TensorRule] = [
        Rename("transformer.wte.weight", "embedding.weight"),
        Rename("transformer.ln_f.weight", "final_norm.weight"),
        Rename("transformer.C.weight", "state_projection.weight"),
        Rename("transformer.adapter.A_log", "injection.log_decay"),
        Rename("transformer.adapter.dt_bias", "injection.step_bias"),
        Rename("transformer.adapter.B", "injection.input.weight"),
        # The released loader is strict and asks for both copies and for the table.
        *head_rules(config, "transformer.wte.weight", is_exported=True),
        cos_sin_rule(config, "freqs_cis"),
    ]
    if config.prelude_norm:
        found.append(Rename("transformer.ln_prelude.weight", "prelude_norm.weight"))
    for layer, (theirs, attention, mlp) in enumerate(block_names(config)):
        pairs = [
            ("norm_1", f"{attention}.norm"),
            ("norm_2", f"{mlp}.norm"),
            ("attn.c_proj", f"{attention}.mixer.o_proj"),
            ("mlp.fc", f"{mlp}.mixer.up_proj"),
            ("mlp.proj", f"{mlp}.mixer.down_proj"),
            *((f"attn.c_{x}", f"{attention}.mixer.{x}_proj") for x in "qkv"),
        ]
        if layer in config.value_embeddings:
            pairs.append(("attn.ve_gate", f"{attention}.mixer.value_gate"))
            table = f"{attention}.mixer.value_embedding.weight"
            found.append(Rename(f"value_embeds.{layer}.weight", table))
        found += [Rename(f"{theirs}.{a}.weight", f"{b}.weight") for a, b in pairs]
    return found


def to_source(config: ModelConfig) -> dict[str, Any]:
    scaling, layers = config.rope_scaling, layers_of_parts(config)
    core = config.core_config
    return {
        **{key: allowed[0] for key, allowed in MUST_BE.items()},
        "name": "depthdial-export",
        "block_size": config.max_context,
        "n_embd": config.d_model,
        "intermediate_size": config.d_ff,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "rope_settings": {
            "use_rope": True,
            "rope_condense_ratio": 1 if scaling is None else scaling.factor,
            "rope_base": config.rope_theta,
        },
        "norm_eps": config.norm_eps,
        **{f"n_layers_in_{part}": n for part, n in zip(PARTS, layers, strict=True)},
        "recurrent_embedding_dimension": core.d_model,
        "recurrent_intermediation_embedding_dimension": config.core_d_ff or config.d_ff,
        "recurrent_num_attention_heads": config.core_num_heads,
        "logit_softcap": config.logit_soft_cap,
        "prelude_norm": config.prelude_norm,
        "mean_recurrence": config.num_loops,
        "tie_embeddings": config.tie_embeddings,
        "model_class_name": "Parcae",
        "_class_name": CLASS_NAME,
    }


def limits(config: ModelConfig) -> list[str]:
    prelude, core, _ = layers_of_parts(config)
    has_tables = any(prelude <= layer < prelude + core for layer in config.value_embeddings)
    own_keys = config.core_config.num_kv_heads != config.num_kv_heads
    runs_here_only = [
        "Value embeddings inside the core have the width of the core's values; the released code "
        "gives them the width of the other layers' and cannot run this model."
    ]
    return [
        *(runs_here_only if has_tables and own_keys else []),
        "The published config states a mean loop count only; max_loops is twice it.",
        "The released evaluation draws a depth for each sequence unless one is given; here the "
        "depth is always that of the request.",
        "Padding is masked here; the released attention ignores its mask.",
    ]


PARCAE = Family(
    name="parcae",
    summary="Parcae: prelude, core behind a stable diagonal injection, coda; value embeddings.",
    matches=lambda values: CLASS_NAME == values.get("_class_name"),
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
