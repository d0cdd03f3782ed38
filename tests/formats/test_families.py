"""What each family's config may say, in every spelling, and what is refused with its name."""

import re

import pytest
import torch
from goldens import GOLDEN, open_golden, published

from depthdial.formats.families.parcae import value_layers
from depthdial.formats.families.registry import (
    FAMILIES,
    family_named,
    map_config,
    rules_to_export,
    select_rules,
)
from depthdial.model.looped_lm import LoopedLM

CASES = sorted({path.name for path in GOLDEN.iterdir()} & {family.name for family in FAMILIES})


def without(case, *keys):
    return {key: value for key, value in published(case).items() if key not in keys}


# ---- values that this runtime cannot do


@pytest.mark.parametrize(
    ("case_name", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "'hidden_act' = 'gelu'.*can do 'silu'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type' = 'yarn'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ("llama", {"rms_norm_eps": 0}, "'rms_norm_eps' is 0"),
        ("qwen3", {"use_sliding_window": True}, "'use_sliding_window' = True"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("ouro", {"total_ut_steps": True}, "'total_ut_steps' is True"),
        ("ouro", {"total_ut_steps": 4.0}, "'total_ut_steps' is 4.0"),
        ("ouro", {"early_exit_step": 2}, "early_exit_step"),
        ("ouro", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("huginn", {"injection_type": "add"}, "'injection_type' = 'add'"),
        ("huginn", {"test_time_noise": 0.1}, "test_time_noise"),
        ("huginn", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ("huginn", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("huginn", {"bias": True}, "'bias' = True"),
        ("dory", {"n_recurrent_loops": True}, "'n_recurrent_loops' is True"),
        ("dory", {"n_recurrent_loops": 2.0}, "'n_recurrent_loops' is 2.0"),
        ("dory", {"n_input_layers": 4}, "must add up"),
        ("dory", {"layer_types": ["mamba"] * 12}, "known sublayers: sliding_attention"),
        ("dory", {"attention_bias": True}, "attention_bias"),
        ("dory", {"recurrent_kv_cache_mode": "mean_loop"}, "'per_loop' or 'last_loop'"),
        ("nanbeige", {"enable_mhc": True}, "'enable_mhc' = True"),
        ("nanbeige", {"enable_hyper_connection": True}, "enable_hyper_connection"),
        ("nanbeige", {"enable_depth_attention": True}, "enable_depth_attention"),
        ("nanbeige", {"ngram_vocab_size_ratio": 0.5}, "ngram_vocab_size_ratio"),
        ("nanbeige", {"insert_ngram_layer_idx": [1]}, "insert_ngram_layer_idx"),
        ("nanbeige", {"qk_layernorm": True}, "qk_layernorm"),
        ("nanbeige", {"loop_share_kv": True}, "loop_share_kv"),
        (
            "nanbeige",
            {"enable_double_loop_split": True, "loop_middle_layers": 3},
            "does not divide num_hidden_layers=4",
        ),
        ("iquest-loop", {"loop_num": False}, "'loop_num' is False"),
        ("iquest-loop", {"loop_window_size": 10**30}, "at most 16777216 tokens"),
        ("dory", {"sliding_window": 2**25}, "'sliding_window' is 33554432.*at most 16777216"),
        ("dory", {"sliding_window": -1}, "'sliding_window' is -1"),
        ("qwen3", {"mlp_bias": True}, "'mlp_bias' = True"),
        ("ouro", {"mlp_bias": True}, "'mlp_bias' = True"),
        ("ouro", {"attention_bias": True}, "'attention_bias' = True"),
        ("parcae", {"nonlin_name": "GELU"}, "'nonlin_name' = 'GELU'"),
        ("parcae", {"logit_softcap": -30.0}, "'logit_softcap' is -30.0"),
        ("parcae", {"recurrent_embedding_dimension": 64}, "recurrent_embedding_dimension=64 with"),
        ("loopus", {"lma_window": 64}, "lma_window"),
        ("loopus", {"decoder_layer_indices": [3, 4]}, "each of the 5 layers"),
        ("loopus", {"base_config_dict": None}, "no 'base_config_dict'"),
        ("loopus", {"encoder_layer_indices": ["a"]}, "list of numbers"),
        ("loopus", {"encoder_layer_indices": [-1]}, "each of the 5 layers"),
        ("nanbeige", {"loop_loss_weights": 3}, "'loop_loss_weights' is 3.*not a list"),
        ("llama", {"num_hidden_layers": 10**9}, "at most 10,000 layers"),
        ("huginn", {"n_layers_in_coda": 10**9}, "at most 10,000 layers"),
        ("parcae", {"n_layers_in_prelude": 10**9}, "at most 10,000 layers"),
        ("loopformer", {"n_layer": 10**9}, "at most 10,000 layers"),
    ],
)
def test_refusals_name_the_key_and_what_can_be_done(case_name, changes, message):
    with pytest.raises(ValueError, match=message):
        map_config(published(case_name, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_transform": "adaptive_slerp"}, "adaptive_slerp.*can do 'replace'"),
        ({"no_rope_layers": [1] + [0] * 11}, "no_rope_layers"),
        ({"hybrid_layer_pattern": "S-S-S-M-S-*-"}, "known sublayers: S, [*], -"),
        ({"hybrid_layer_pattern": "S-S-S-*-S-"}, "must add up"),
        ({"swa_num_attention_heads": 2}, "swa_num_attention_heads"),
        ({"rope_profile_layers": [1, 1, 2] + [1] * 9}, "both profiles"),
        ({"rope_profile_layers": [3] * 12}, "must have 1 or 2"),
        ({"attention_output_gate": False}, "attention_output_gate"),
        ({"ngpt_enable_final_norm": True}, "ngpt_enable_final_norm"),
        ({"input_transform": "concat"}, "input_transform"),
        ({"dory_format_version": 2}, "dory_format_version"),
        ({"swa_window_size": 2**25}, "'swa_window_size' is 33554432.*at most 16777216 tokens"),
        ({"swa_window_size": None}, "'swa_window_size' is None"),
        ({"initializer_range": 0.5}, "init_method_std=0.02 and initializer_range=0.5"),
    ],
)
def test_refusals_of_the_older_dory_format(changes, message):
    with pytest.raises(ValueError, match=message):
        map_config(published("dory", "config_format1.json", **changes))


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="no 'hidden_size'"):
        map_config(without("llama", "hidden_size"))


# ---- spellings


def test_old_and_new_rotary_and_dtype_keys_mean_the_same():
    old = published("llama")
    new = without("llama", "rope_theta", "rope_scaling", "torch_dtype") | {
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "dtype": "float32",
    }
    assert map_config(old)[1] == map_config(new)[1]


def test_rotary_keys_that_contradict_each_other_are_refused():
    both = published("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    with pytest.raises(ValueError, match="rope_theta=500000.0.*10000.0; they must agree"):
        map_config(both)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # The second place was once not looked at.
        (
            {
                "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_parameters=None and rope_scaling={'kind': 'linear', 'factor': 2.0}; they must",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "'factor': 4.0} and rope_scaling=.*'factor': 2.0}",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_theta=500000.0 and rope_scaling.rope_theta=10000.0",
        ),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2.0}}, "type=llama3"),
        # transformers reads the fraction with scaling only, and fails then.
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5.*turns whole heads"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "'rope_parameters.partial_rotary"),
    ],
)
@pytest.mark.parametrize("case_name", ["llama", "qwen3"])
def test_rotations_that_no_published_code_runs_are_refused(case_name, changes, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        map_config(published(case_name, rope_theta=5e5, **changes))


def test_rotary_keys_may_say_the_same_twice():
    scaling = {"rope_type": "linear", "factor": 2.0}
    once = published("llama", rope_theta=5e5, rope_scaling=scaling)
    twice = once | {
        "rope_parameters": {**scaling, "rope_theta": 5e5, "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1.0,
    }
    assert map_config(once)[1] == map_config(twice)[1]
    assert map_config(once | {"rope_scaling": {}})[1].rope_scaling is None


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_linear_scaling_in_either_spelling(kind_key):
    config = map_config(published("llama", rope_scaling={kind_key: "linear", "factor": 2}))[1]
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 2.0)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_scaling_of_llama_3_in_either_place(place):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    values = published("llama", **{place: scaling | {"rope_theta": 500000.0}})
    if place == "rope_scaling":
        del values["rope_scaling"]["rope_theta"]
    family, config = map_config(values)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling.to_dict() == {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 64,
    }
    assert map_config(family.write(config, None))[1] == config


def test_biases_of_attention_and_mlp_have_their_tensors():
    values = published("llama", attention_bias=True, mlp_bias=True)
    family, config = map_config(values)
    expected = set(LoopedLM(config).state_dict())
    filled = {name for rule in family.rules(config, values) for name in rule.our_names}
    assert filled == expected
    assert "core_stack.0.mixer.o_proj.bias" in expected
    assert "core_stack.1.mixer.gate_proj.bias" in expected


def test_an_untied_head_is_a_tensor_of_its_own():
    values = published("qwen3", tie_word_embeddings=False)
    family, config = map_config(values)
    filled = {name for rule in family.rules(config, values) for name in rule.our_names}
    assert "lm_head.weight" in filled and not config.tie_embeddings


def test_qwen3_without_head_dim_has_heads_of_128():
    values = without("qwen3", "head_dim")
    assert map_config(values)[1].head_dim == 128


def test_a_tied_head_that_is_stored_must_equal_the_embedding():
    opened = open_golden("llama")
    rules = opened.family.rules(opened.config, opened.values)
    source = opened.source | {"lm_head.weight": opened.source["model.embed_tokens.weight"]}
    for rule in select_rules(rules, source):
        rule.to_ours(source.__getitem__)
    source["lm_head.weight"] = source["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="'lm_head.weight' differs from 'model.embed_tokens"):
        for rule in select_rules(rules, source):
            rule.to_ours(source.__getitem__)


def test_gates_of_iquest_in_the_spelling_of_its_code():
    opened = open_golden("iquest-loop")
    rules = opened.family.rules(opened.config, opened.values)
    renamed = {
        re.sub(r"gate_projections\.(\d)", r"layers.\1.gate_projection", name): tensor
        for name, tensor in opened.source.items()
    }
    assert renamed.keys() != opened.source.keys()
    found, back = {}, {}
    for rule in select_rules(rules, renamed):
        found |= rule.to_ours(renamed.__getitem__)
    for rule in rules_to_export(rules, renamed):
        back |= rule.to_source(found.__getitem__)
    assert back.keys() == renamed.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in opened.tensors.items())
    with pytest.raises(ValueError, match="are the same tensor; remove one"):
        select_rules(rules, [*opened.source, *renamed])


def test_loops_of_nanbeige_follow_its_loss_weights():
    assert map_config(published("nanbeige", loop_loss_weights=[0.5, 0.3]))[1].num_loops == 3


def test_loop_split_of_nanbeige_takes_half_of_the_layers_by_default():
    config = map_config(published("nanbeige", enable_double_loop_split=True))[1]
    assert config.split == (2, 4, 2) and config.num_loops == 3


def test_the_last_loop_cache_of_dory_is_our_last_step():
    values = published("dory", recurrent_kv_cache_mode="last_loop")
    assert map_config(values)[1].loop.cache_policy == "last_step"


def test_a_published_default_of_two_loops_does_not_lower_the_trained_depth_of_dory():
    config = map_config(published("dory", n_recurrent_loops=2))[1]
    assert (config.num_loops, config.max_loops) == (2, 4)


def test_biases_of_loopformer_have_their_tensors():
    values = published("loopformer", bias=True)
    family, config = map_config(values)
    filled = {name for rule in family.rules(config, values) for name in rule.our_names}
    assert filled == set(LoopedLM(config).state_dict())


def test_a_llama_base_of_loopus_has_no_query_norms():
    base = published("llama", tie_word_embeddings=True)
    values = published(
        "loopus",
        base_config_dict=base,
        hidden_size=32,
        vocab_size=96,
        decoder_layer_indices=[4, 5],
    )
    family, config = map_config(values)
    filled = {name for rule in family.rules(config, values) for name in rule.our_names}
    assert filled == set(LoopedLM(config).state_dict())
    assert config.split == (2, 6, 4) and not config.tie_embeddings


def test_a_condense_ratio_of_parcae_is_linear_scaling():
    rope = {"use_rope": True, "rope_condense_ratio": 4, "rope_base": 50000}
    config = map_config(published("parcae", rope_settings=rope))[1]
    assert config.rope_scaling.to_dict()["factor"] == 4.0


@pytest.mark.parametrize("parts", [(2, 2, 2), (4, 4, 4), (8, 8, 8), (1, 2, 2)])
def test_value_embeddings_of_parcae_are_every_other_layer_up_to_the_last(parts):
    layers = value_layers(list(parts), 8)
    assert layers == [i for i in range(sum(parts)) if (sum(parts) - 1 - i) % 2 == 0]


def test_value_tables_and_gates_of_parcae_that_do_not_meet_are_refused():
    """With three core layers the last loop ends on the other parity than the first."""
    with pytest.raises(ValueError, match="value tables belong to layers"):
        value_layers([2, 3, 2], 8)


# ---- models that a format cannot say


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"loop.update": "adaptive_delta"}, "loop.update='adaptive_delta'"),
        ("ouro", {}, "exit_gate='none'"),
        ("llama", {"qk_norm": "rms"}, "qk_norm='rms' would be read as 'none'"),
        ("qwen3", {}, "qk_norm='none' would be read as 'rms'"),
        ("dory", {}, "norm='pre', and the format is for norm='ngpt'"),
        ("parcae", {}, r"split=\[0, 12, 0\], and the format has whole layers"),
        ("retrofit", {}, r"split=\[0, 12, 0\], and the format has whole layers"),
        ("retrofit", {"split": [4, 4, 4], "max_loops": 2}, "loop.injection='none' would be read"),
        ("huginn", {"split": [4, 4, 4]}, "the format has no such biases"),
        ("nanbeige", {"split": [2, 8, 2], "max_loops": 2}, r"split=\[2, 8, 2\] with num_loops=1"),
        ("llama", {"loop.cache_policy": "stash_last"}, "cache_policy='stash_last' would be read"),
    ],
)
def test_a_format_that_cannot_say_the_model_is_refused(family, changes, message):
    config = open_golden("llama").config.replace(**changes)
    with pytest.raises(ValueError, match=f"cannot be written as '{family}': .*{message}"):
        family_named(family).write(config, None)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
@pytest.mark.parametrize("case_name", CASES)
def test_every_family_says_a_model_or_why_it_cannot(case_name, family):
    """Parcae's own complaint about a config that nobody had seen was once all that was printed."""
    config = open_golden(case_name).config
    try:
        values = family_named(family).write(config, None)
    except ValueError as error:
        start = f"this model cannot be written as '{family}': "
        assert re.match(f"{start}.*[a-z_]=.*Export it as", str(error))
    else:
        assert case_name == family or (case_name, family) == ("llama", "nanbeige")
        assert map_config(values)[0].name == family


@pytest.mark.parametrize(
    "changes",
    [
        {"split": [4, 4, 4]},
        {"split": [0, 2, 10], "loop.cache_policy": "share_first"},
        {"final_norm": "loop"},
        {"split": [4, 8, 0], "core_d_ff": 80},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "nanbeige"])
def test_a_dense_model_is_written_wherever_it_is_split(family, changes):
    """merge-first-pass leaves a split of three parts, which no dense format has."""
    base = open_golden("qwen3" if family == "qwen3" else "llama").config
    values = family_named(family).write(base.replace(**{**changes, "d_ff": 80}), None)
    assert map_config(values)[1].replace(d_ff=base.d_ff) == base


def test_a_dense_model_of_two_widths_is_refused():
    config = open_golden("llama").config.replace(split=[4, 4, 4], core_d_ff=9)
    with pytest.raises(ValueError, match="core_d_ff=9 would be read as None"):
        family_named("llama").write(config, None)


def test_an_origin_of_another_family_gives_no_keys():
    opened = open_golden("llama")
    origin = published("ouro") | {"bos_token_id": 77}
    values = family_named("llama").write(opened.config, origin)
    assert "bos_token_id" not in values and "total_ut_steps" not in values
