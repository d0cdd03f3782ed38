"""Our config.json through transformers: wrapped, overridden, written back, and nothing added."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
from toys import toy_config
from transformers import AutoConfig, AutoModelForCausalLM

import depthdial.hf
from depthdial.config import ModelConfig, RopeScaling
from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import DepthdialForCausalLM


@pytest.fixture
def folder(tmp_path):
    """A folder with the config of a toy whose field names clash with transformers' own."""
    config = toy_config(
        rope_scaling=RopeScaling(kind="linear", factor=2.0), tie_embeddings=True, rope_theta=500.0,
        trained_loops=(1, 3),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(config.to_json())
    return tmp_path


def test_the_wrapped_config_is_the_file(folder):
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is DepthdialConfig
    assert config.looped == ModelConfig.from_file(folder / "config.json")


def test_b36_writing_the_config_gives_the_same_bytes(folder, tmp_path):
    text = (folder / "config.json").read_text()
    for name in ("first", "second", "third"):
        AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / name)
        folder = tmp_path / name
        assert (folder / "config.json").read_text() == text


def test_b36_fields_of_transformers_are_read_and_not_written(folder, tmp_path):
    values = json.loads((folder / "config.json").read_text())
    extra = {"dtype": "bfloat16", "transformers_version": "5.0.0", "_name_or_path": "elsewhere"}
    (folder / "config.json").write_text(json.dumps(values | extra))
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == values


def test_an_unknown_key_is_refused_with_the_nearest(folder):
    values = json.loads((folder / "config.json").read_text()) | {"d_modell": 3}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="unknown key 'd_modell'. Did you mean 'd_model'"):
        AutoConfig.from_pretrained(folder)


def test_transformers_names_give_our_fields(folder):
    config = AutoConfig.from_pretrained(folder)
    ours = config.looped
    assert (config.hidden_size, config.intermediate_size) == (ours.d_model, ours.d_ff)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.head_dim, config.vocab_size) == (ours.head_dim, ours.vocab_size)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (12, 128)
    assert config.tie_word_embeddings
    assert config.max_loops == ours.max_loops


def test_the_default_loop_count_can_be_set_and_is_written(folder, tmp_path):
    config = AutoConfig.from_pretrained(folder)
    config.num_loops = 4
    config.save_pretrained(tmp_path / "deeper")
    assert ModelConfig.from_file(tmp_path / "deeper" / "config.json") == config.looped
    assert AutoConfig.from_pretrained(tmp_path / "deeper").num_loops == 4


def test_a_loop_count_that_is_none_cannot_be_set(folder):
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match="num_loops=0"):
        config.num_loops = 0


def test_fields_that_the_running_model_would_not_follow_cannot_be_set(folder):
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(AttributeError):
        config.hidden_size = 3


def test_from_pretrained_takes_changes_and_keeps_the_rest_of_a_group(folder):
    config = AutoConfig.from_pretrained(folder, num_loops=3, loop={"cache_policy": "collapse_last"})
    assert config.looped == ModelConfig.from_file(folder / "config.json").replace(
        **{"num_loops": 3, "loop.cache_policy": "collapse_last"}
    )


def test_a_config_survives_copy_and_pickle(folder):
    config = AutoConfig.from_pretrained(folder)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)).looped == config.looped


def test_f08_trainers_can_ask_any_config_for_code_that_came_with_it(folder):
    """TRL does, where an architecture is not transformers' own."""
    assert AutoConfig.from_pretrained(folder).auto_map == {}


def test_registering_twice_is_harmless():
    depthdial.hf.register()
    depthdial.hf.register()
    config = DepthdialConfig(**toy_config().to_dict())
    assert type(AutoModelForCausalLM.from_config(config)) is DepthdialForCausalLM


def test_only_the_face_registers():
    """Every other part of the package can be imported without an effect."""
    code = (
        "from transformers import CONFIG_MAPPING\n"
        "import depthdial.api, depthdial.formats.hf_export, depthdial.training.pretrain\n"
        "assert 'depthdial' not in CONFIG_MAPPING\n"
        "import depthdial.hf\n"
        "assert 'depthdial' in CONFIG_MAPPING\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
