"""What Huginn and the models retrofitted into its format share: config keys and tensor names.

The format calls its architecture Raven: prelude, a core that reads [state; prelude output] through
a linear adapter, coda. Tensors of one block: Wqkv and fc each hold several matrices.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import head_rules, sublayer_name
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, Split, TensorRule

MODEL_TYPE = "huginn_raven"
LOOPS_PER_MEAN = 2
"""Largest trained loop count, as a multiple of the mean.

Training draws the count from a distribution without an end. Twice the mean is its 97th percentile
for Huginn's Poisson-lognormal (mean 33, 99th 93) and the 99th for a Poisson of mean 8; quality is
reported as flat beyond it.
"""
ONLY_IN_TRAINING = (
    "activation_checkpoint_impl",
    "effective_expected_depth",
    "init_orthogonal",
    "init_strategy",
    "mean_backprop_depth",
    "padding_multiple",
    "sampling_scheme",
)


def read_raven(source: SourceConfig) -> dict[str, Any]:
    """Fields of ours that both families read in the same way; rotary and norms are not among them.

    A loop starts from truncated normal noise, scaled like the embeddings.
    """
    source.ignore("architecture_class_name", *ONLY_IN_TRAINING)
    source.expect("bias", False, default=False)
    source.expect("norm_class_name", "RMSNorm_llama", "RMSNorm", default="RMSNorm_llama")
    source.expect("mlp_class_name", "GatedMLP", default="GatedMLP")
    source.expect("nonlin_name", "SiLU", default="SiLU")
    source.expect("injection_type", "linear")
    source.expect("state_init", "like-init", default="like-init")
    # Noise inside the loop at inference; its kind is of no effect when there is none.
    source.expect("test_time_noise", 0, 0.0, default=0)
    source.ignore("test_time_noise_type")
    init_values = source.section("init_values")
    if init_values is None:
        raise ValueError(
            "the source config has no 'init_values'; the embedding scale stands there."
        )
    init_values.ignore("out_proj", "embedding")
    embed_scale, state_std = init_values.number("embed_scale"), init_values.number("std")
    d_model, num_heads = source.count("n_embd"), source.count("n_heads")
    source.expect("hidden_size", None, d_model)
    source.expect("num_attention_heads", None, num_heads)
    parts = [source.layers(f"n_layers_in_{part}") for part in PARTS]
    for key in ("n_layers", "num_hidden_layers"):
        source.expect(key, None, sum(parts))
    return {
        # Rows of the stored embedding; the tokenizer may use fewer.
        "vocab_size": source.count("padded_vocab_size", source.count("vocab_size")),
        "d_model": d_model,
        "layout": "AF",
        "split": [2 * layers for layers in parts],
        "num_heads": num_heads,
        "num_kv_heads": source.count("num_key_value_heads", num_heads),
        "head_dim": source.count("head_dim", d_model // num_heads),
        "d_ff": source.count("intermediate_size"),
        "norm_eps": source.number("norm_eps", 1e-6),
        "tie_embeddings": _is_tied(source),
        "embed_scale": embed_scale,
        "init_std": state_std,
        **read_mean_loops(source),
        "loop": {
            "update": "replace",
            "injection": "concat",
            "initial_state": "random",
            "random_state_std": state_std * embed_scale,
        },
    }


PARTS = ("prelude", "recurrent_block", "coda")


def read_mean_loops(source: SourceConfig) -> dict[str, int]:
    """num_loops and max_loops of a model that knows only its mean; see LOOPS_PER_MEAN."""
    mean = source.loops("mean_recurrence")
    return {"num_loops": mean, "max_loops": LOOPS_PER_MEAN * mean}


def _is_tied(source: SourceConfig) -> bool:
    """The format writes the same switch under two names."""
    is_tied = source.flag("tie_embeddings", default=True)
    source.expect("tie_word_embeddings", None, is_tied)
    return is_tied


def raven_rules(config: ModelConfig) -> list[TensorRule]:
    """Rules of all tensors but the norms that only one of the families has."""
    found: list[TensorRule] = [
        Rename("transformer.wte.weight", "embedding.weight"),
        Rename("transformer.adapter.weight", "injection.adapter.weight"),
        Rename("transformer.ln_f.weight", "final_norm.weight"),
        # The released code stores the tied head a second time.
        *head_rules(config, "transformer.wte.weight", is_exported=True),
    ]
    for theirs, attention, mlp in block_names(config):
        found += _block_rules(config, theirs, attention, mlp)
    return found


def block_names(config: ModelConfig) -> list[tuple[str, str, str]]:
    """(their block, our attention sublayer, our MLP sublayer) from the bottom up."""
    names, block = [], 0
    for part, sublayers in zip(("prelude", "core_block", "coda"), config.split, strict=True):
        for layer in range(sublayers // 2):
            ours = sublayer_name(config, 2 * block), sublayer_name(config, 2 * block + 1)
            names.append((f"transformer.{part}.{layer}", *ours))
            block += 1
    return names


def _block_rules(config: ModelConfig, theirs: str, attention: str, mlp: str) -> list[TensorRule]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: list[TensorRule] = [
        Split(
            f"{theirs}.attn.Wqkv.weight",
            tuple(f"{attention}.mixer.{x}_proj.weight" for x in "qkv"),
            (query, key, key),
        ),
        Rename(f"{theirs}.attn.proj.weight", f"{attention}.mixer.o_proj.weight"),
        Split(
            f"{theirs}.mlp.fc.weight",
            (f"{mlp}.mixer.gate_proj.weight", f"{mlp}.mixer.up_proj.weight"),
            (config.d_ff, config.d_ff),
        ),
        Rename(f"{theirs}.mlp.proj.weight", f"{mlp}.mixer.down_proj.weight"),
    ]
    if config.attention_bias == "qk":
        biases = (f"{attention}.mixer.q_proj.bias", f"{attention}.mixer.k_proj.bias")
        shape = (2, 1, config.num_heads, config.head_dim)
        found.append(Split(f"{theirs}.attn.qk_bias", biases, (query, key), shape))
    return found


def layers_of_parts(config: ModelConfig) -> list[int]:
    """Layers of prelude, core and coda. Raises: ValueError for none, or half of one."""
    if any(sublayers % 2 or not sublayers for sublayers in config.split):
        raise ValueError(
            f"split={list(config.split)}, and the format has whole layers of two sublayers, at "
            "least one each in prelude, core and coda."
        )
    return [sublayers // 2 for sublayers in config.split]


def write_raven(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_raven` reads. Raises: ValueError for a part without layers."""
    layers = layers_of_parts(config)
    mean = config.num_loops
    noise_std = config.loop.random_state_std
    std = config.init_std if noise_std is None else noise_std / config.embed_scale
    depth = layers[0] + layers[1] * mean + layers[2]
    return {
        "architectures": ["RavenForCausalLM"],
        "model_type": MODEL_TYPE,
        "architecture_class_name": "RecurrentGPT",
        "bias": False,
        "block_class_name": "SandwichBlock",
        "block_size": config.max_context,
        "effective_expected_depth": depth,
        "head_dim": config.head_dim,
        "init_values": {
            "std": std,
            "out_proj": std / (2 * depth) ** 0.5,
            "embedding": std,
            "embed_scale": config.embed_scale,
        },
        "injection_type": "linear",
        "intermediate_size": config.d_ff,
        "mean_recurrence": mean,
        "mlp_class_name": "GatedMLP",
        "n_embd": config.d_model,
        "n_heads": config.num_heads,
        "n_layers": sum(layers),
        **{f"n_layers_in_{part}": n for part, n in zip(PARTS, layers, strict=True)},
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "norm_eps": config.norm_eps,
        "num_key_value_heads": config.num_kv_heads,
        "padded_vocab_size": config.vocab_size,
        "state_init": "like-init",
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        "tie_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }
