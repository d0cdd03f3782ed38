"""What is in the way of an import is named as a whole; what changes nothing is not in the way."""

import json
import time

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN, open_golden, published
from published import WEIGHTS, add_tokenizer, copy_golden, edit_json, edit_tensors
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from depthdial.formats.families.registry import detect, map_config
from depthdial.formats.import_export import import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.formats.reasons import MOST_KEPT, MOST_SHOWN, Reasons, Refused
from depthdial.formats.source_config import EMPTY_DEFAULTS, LIBRARY_DEFAULTS
from depthdial.formats.source_folder import read_family

CASES = sorted(path.name for path in GOLDEN.iterdir() if (path / "model.safetensors").is_file())
DUMPED = {
    **PretrainedConfig().to_dict(),
    # What transformers 4 dumps besides.
    **dict.fromkeys(LIBRARY_DEFAULTS),
    "pruned_heads": {},
    "_attn_implementation": "sdpa",
    "_commit_hash": "1f0a",
    "gradient_checkpointing": False,
    "trust_remote_code": False,
    "max_sequence_length": 2048,
}
"""Keys of a full dump that say nothing of a decoder."""
LLAMA_1 = {
    "architectures": ["LLaMAForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_sequence_length": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": -1,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 96,
}
"""The keys of the first Llama's config.json."""


@pytest.fixture
def source(tmp_path):
    return copy_golden("ouro", tmp_path / "source")


def refused(source):
    """What an import says, which is what inspect says."""
    with pytest.raises(ValueError) as caught:
        import_checkpoint(source, source.parent / "model")
    assert not (source.parent / "model").exists()
    reasons = caught.value.reasons if isinstance(caught.value, Refused) else (str(caught.value),)
    assert inspect_source(source).problems == reasons
    assert all(reason in str(caught.value) for reason in reasons[:MOST_SHOWN])
    return reasons


# ---- keys without effect, keys left out


@pytest.mark.parametrize("name", CASES)
def test_f05_a_config_that_was_dumped_whole_means_the_same_model(name):
    values = published(name)
    dumped = {key: value for key, value in DUMPED.items() if key not in values}
    # A published key of that name is read by its family.
    dumped.pop("tie_word_embeddings", None)
    assert map_config(values | dumped)[1] == open_golden(name).config


def test_f05_a_dump_inside_another_config_is_read_alike():
    values = published("loopus")
    base = values["base_config_dict"]
    dumped = {key: value for key, value in DUMPED.items() if key not in base}
    changed = values | {"base_config_dict": dumped | base}
    assert map_config(changed)[1] == open_golden("loopus").config


@pytest.mark.parametrize("key", EMPTY_DEFAULTS)
@pytest.mark.parametrize("section", [None, "base_config_dict"])
def test_f05_heads_that_were_pruned_are_no_default(key, section):
    values = published("loopus")
    (values if section is None else values[section])[key] = {"0": [1]}
    with pytest.raises(ValueError, match=f"without a known meaning.*{key}"):
        map_config(values)


def test_f05_the_first_llamas_config_is_read():
    config = map_config(LLAMA_1)[1]
    assert config.max_context == LlamaConfig().max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("name", "defaults", "keys"),
    [
        ("llama", LlamaConfig(), ("max_position_embeddings", "rms_norm_eps", "rope_theta")),
        (
            "qwen3",
            Qwen3Config(),
            ("max_position_embeddings", "rms_norm_eps", "head_dim", "num_key_value_heads"),
        ),
    ],
)
def test_f05_a_key_that_is_left_out_means_the_librarys_default(name, defaults, keys):
    values = published(name) | {"num_attention_heads": 64}
    stated = defaults.to_dict() | {"rope_theta": 10_000.0}
    for key in keys:
        values.pop(key, None)
        values.pop("rope_parameters", None)
        config = map_config(values)[1]
        assert config == map_config(values | {key: stated[key]})[1]
        assert config != map_config(values | {key: type(stated[key])(2 * stated[key])})[1]


@pytest.mark.parametrize(
    ("name", "context", "eps"),
    [("ouro", 32_768, 1e-6), ("nanbeige", 2048, 1e-6), ("iquest-loop", 8192, 1e-5)],
)
def test_f05_families_of_their_own_code_have_defaults_of_their_own(name, context, eps):
    values = published(name)
    for key in ("max_position_embeddings", "rms_norm_eps"):
        del values[key]
    config = map_config(values)[1]
    assert (config.max_context, config.norm_eps) == (context, eps)


# ---- every reason


def test_f05_an_import_names_everything_in_its_way(source):
    edit_json(
        source / "config.json",
        hidden_act="gelu",
        use_sliding_window=True,
        mystery=1,
        tie_word_embeddings="yes",
    )
    edit_tensors(source, model__norm__weight=None, model__norms__weight=torch.ones(32))
    add_tokenizer(source, eos_token="<none>")
    reasons = refused(source)
    assert len(reasons) == 7
    for part, reason in zip(
        (
            "'hidden_act' = 'gelu'",
            "'use_sliding_window' = True",
            "'tie_word_embeddings' is 'yes'",
            "'mystery'",
            "missing tensor 'model.norm.weight'",
            "unknown tensor 'model.norms.weight'",
            "eos_token: token '<none>'",
        ),
        reasons,
        strict=True,
    ):
        assert part in reason


def test_f05_a_config_that_cannot_be_read_hides_neither_files_nor_text(source):
    values = published("ouro")
    del values["hidden_size"]
    (source / "config.json").write_text(json.dumps(values | {"hidden_act": "gelu"}))
    (source / WEIGHTS).write_bytes(b"no")
    (source / "tokenizer.json").write_text("{")
    act, size, weights, tokenizer = refused(source)
    assert "'hidden_act'" in act and "has no 'hidden_size'" in size
    assert "damaged or cut short" in weights and "tokenizer.json is not a tokenizer" in tokenizer


def test_f05_a_group_of_keys_that_is_refused_is_listed_with_the_rest():
    values = published("llama") | {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta": 1},
        "partial_rotary_factor": 0.5,
        "hidden_act": "gelu",
    }
    reasons = Reasons()
    read_family(values, detect(values), reasons)
    with pytest.raises(Refused) as caught:
        reasons.raise_if_any()
    text = "\n".join(caught.value.reasons)
    for part in ("'hidden_act'", "'partial_rotary_factor'", "'rope_scaling.rope_type' = 'yarn'",
                 "'rope_scaling.beta'"):  # fmt: skip
        assert part in text


def test_f05_one_reason_is_its_own_message(source):
    edit_json(source / "config.json", hidden_act="gelu")
    with pytest.raises(ValueError, match=r"^the source config has 'hidden_act' = 'gelu'"):
        import_checkpoint(source, source.parent / "model")


def test_f05_a_file_of_another_family_is_no_page_of_names(source):
    names = {f"other.{i}.weight": torch.ones(1) for i in range(60)}
    safetensors.torch.save_file(names, source / WEIGHTS)
    edit_json(source / "config.json", vocab_size=2, hidden_size=4, intermediate_size=1,
              num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
              layer_types=None, head_dim=4)  # fmt: skip
    with pytest.raises(Refused) as caught:
        import_checkpoint(source, source.parent / "model")
    assert len(caught.value.reasons) > 60
    assert str(caught.value).count("\n") == MOST_SHOWN + 1


# ---- a common prefix


def renamed(source, rename, **more):
    tensors = safetensors.torch.load_file(source / WEIGHTS)
    changed = {rename(name): tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(changed | more, source / WEIGHTS)


@pytest.mark.parametrize(
    ("prefix", "match"),
    [
        ("_orig_mod.", "torch.compile"),
        ("module.", "DistributedDataParallel"),
        ("base_model.model.", "merge_and_unload"),
        ("my.own.wrapper.", "save the model without what wraps it"),
    ],
)
@pytest.mark.parametrize("name", ["ouro", "llama", "huginn", "loopus", "dory"])
def test_f05_a_common_prefix_of_all_names_is_named_as_such(tmp_path, name, prefix, match):
    source = copy_golden(name, tmp_path / "source")
    renamed(source, lambda tensor: f"{prefix}{tensor}")
    [reason] = refused(source)
    assert f"have '{prefix}' before the names of this family" in reason and match in reason


def test_f05_behind_a_prefix_the_rest_is_named_too(source):
    edit_tensors(source, model__norm__weight=None)
    renamed(source, lambda tensor: f"module.{tensor}")
    prefix, missing = refused(source)
    assert "'module.'" in prefix and missing == "missing tensor 'model.norm.weight'."


def test_f05_a_model_saved_without_its_head_is_named_as_such(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    renamed(source, lambda tensor: tensor.removeprefix("model."))
    [reason] = refused(source)
    assert "lack 'model.' before the names" in reason and "without its head" in reason


def test_f05_one_other_name_is_no_common_prefix(source):
    """Some tensors under their own names: each of the others is named."""
    norm = torch.ones(32)
    edit_tensors(source, model__norm__weight=None, module__model__norm__weight=norm)
    missing, unknown = refused(source)
    assert "missing tensor 'model.norm.weight'" in missing and "'module.model.norm" in unknown


# ---- files with reasons without end


def test_f31_thousands_of_unknown_names_cost_no_time(source):
    """Each was compared with every known name before twenty of them were shown."""
    tensors = safetensors.torch.load_file(source / WEIGHTS)
    odd = {f"model.layers.{i}.mlp.up_proj.weigh": torch.ones(0) for i in range(20_000)}
    safetensors.torch.save_file(tensors | odd, source / WEIGHTS)
    started = time.process_time()
    with pytest.raises(Refused) as caught:
        import_checkpoint(source, source.parent / "model")
    assert time.process_time() - started < 10
    assert len(caught.value.reasons) == MOST_KEPT + 1
    assert caught.value.reasons[-1] == "... and 19,900 more."


def test_f31_thousands_of_unknown_keys_are_counted(source):
    edit_json(source / "config.json", **{f"key_{i}": 1 for i in range(20_000)})
    with pytest.raises(ValueError, match="keys without a known meaning.*And 19,980 more") as caught:
        import_checkpoint(source, source.parent / "model")
    assert len(str(caught.value)) < 1000


def test_f31_thousands_of_contradicting_ids_are_counted(source):
    add_tokenizer(source)
    (source / "added_tokens.json").write_text(json.dumps({f"t{i}": i for i in range(5000)}))
    warnings = import_checkpoint(source, source.parent / "model").warnings
    assert len(warnings) < 30 and "4,980 more such ids contradict." in warnings
