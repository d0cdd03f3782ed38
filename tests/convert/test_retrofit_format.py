"""Retrofitted models: Huginn's format around the layers of a Llama.

No public outputs exist for it: the tensors are arranged as its converter does, and with an adapter
that passes the prelude on, the model must be the dense one.
"""

import pytest
import torch
from goldens import close, open_golden, published

from depthdial.convert.hf_maps import map_config, select_rules
from depthdial.model.looped_lm import LoopedLM

RETROFIT = {
    "block_class_name": "SandwichBlock",
    "qk_bias": False,
    "tie_embeddings": False,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "init_values": {"std": 0.1, "out_proj": 0.01, "embedding": 0.1, "embed_scale": 1.0},
    "n_embd": 32,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 80,
    "n_layers": 6,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 3,
    "n_layers_in_coda": 2,
}


def retrofitted(source):
    """The public converter's tensors for all six layers of the dense case, adapter [0 | I]."""
    found = {
        "transformer.wte.weight": source["model.embed_tokens.weight"],
        "lm_head.weight": source["model.embed_tokens.weight"],
        "transformer.ln_f.weight": source["model.norm.weight"],
        "transformer.adapter.weight": torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1),
    }
    targets = ["prelude.0", "core_block.0", "core_block.1", "core_block.2", "coda.0", "coda.1"]
    for layer, target in enumerate(targets):
        theirs, ours = f"model.layers.{layer}", f"transformer.{target}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        found |= {
            f"{ours}.attn.Wqkv.weight": torch.cat(
                [source[f"{attention}.{x}_proj.weight"] for x in "qkv"]
            ),
            f"{ours}.attn.proj.weight": source[f"{attention}.o_proj.weight"],
            f"{ours}.mlp.fc.weight": torch.cat(
                [source[f"{mlp}.{x}_proj.weight"] for x in ("gate", "up")]
            ),
            f"{ours}.mlp.proj.weight": source[f"{mlp}.down_proj.weight"],
            f"{ours}.norm_1.weight": source[f"{theirs}.input_layernorm.weight"],
            f"{ours}.norm_2.weight": source[f"{theirs}.post_attention_layernorm.weight"],
        }
    return found


def test_a_retrofitted_model_with_a_passing_adapter_is_its_dense_model_at_any_depth():
    dense = open_golden("llama")
    values, source = published("huginn", **RETROFIT), retrofitted(dense.source)
    family, config = map_config(values)
    assert family.name == "retrofit"
    tensors = {}
    for rule in select_rules(family.rules(config, values), source):
        tensors |= rule.to_ours(source.__getitem__)
    model = LoopedLM(config)
    model.load_state_dict(tensors)
    for k in (1, 3):
        logits = model(dense.vectors["input_ids"], num_loops=k)
        close(logits, dense.vectors["logits"], 1e-4)


def test_a_retrofitted_model_knows_its_mean_depth_and_its_noise():
    family, config = map_config(published("huginn", **RETROFIT))
    assert (config.num_loops, config.max_loops) == (8, 16)
    assert config.loop.random_state_std == pytest.approx(0.1)
    assert map_config(family.write(config, None))[1] == config


def test_embed_init_starts_the_loop_from_the_prelude():
    family, config = map_config(published("huginn", **RETROFIT, initial_state_mode="embed-init"))
    assert config.loop.initial_state == "prelude"
    assert map_config(family.write(config, None))[1] == config


def test_an_unknown_initial_state_is_refused():
    with pytest.raises(ValueError, match=r"'skip-adapter'.*can do 'random' or 'embed-init'"):
        map_config(published("huginn", **RETROFIT, initial_state_mode="skip-adapter"))


def test_blocks_of_olmo_in_that_format_are_refused_by_their_norms():
    values = published("huginn", **RETROFIT)
    family, config = map_config(values)
    source = [
        *retrofitted(open_golden("llama").source),
        "transformer.coda.0.attn.q_norm.weight",
    ]
    with pytest.raises(ValueError, match="unknown tensor 'transformer.coda.0.attn.q_norm.weight'"):
        select_rules(family.rules(config, values), source)
