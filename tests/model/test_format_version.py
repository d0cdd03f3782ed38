"""Folders of format_version 1, in which `loop_lora` had another name, open as they were."""

import json

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

import depthdial.hf
from depthdial.api.recipes import load_recipe
from depthdial.config import LoopLoraConfig, ModelConfig, Recipe
from depthdial.formats.hf_export import export_hf
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

OLD_NAME = "visit_deltas"
TOKENS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=11, d_model=8, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=4,
        d_ff=8, max_context=16, max_loops=3, num_loops=2,
        loop_lora=LoopLoraConfig(rank=2, sets_by_loop=(-1, 0, 1)),
    )  # fmt: skip
    model = LoopedLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".up"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture
def old_folder(model, tmp_path):
    """The model as version 1 wrote it."""
    folder = tmp_path / "old"
    save_model(model, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"format_version": 1}
    values[OLD_NAME] = values.pop("loop_lora")
    path.write_text(json.dumps(values))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    old = {name.replace("loop_lora.", f"{OLD_NAME}."): t for name, t in tensors.items()}
    assert old.keys() != tensors.keys()
    safetensors.torch.save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_old_folder_opens_with_a_note_and_computes_the_same(model, old_folder, tmp_path):
    with pytest.warns(UserWarning, match="format_version 1: `visit_deltas` is called `loop_lora`"):
        opened = load_model(old_folder)
    assert torch.equal(opened(TOKENS, num_loops=3), model(TOKENS, num_loops=3))
    save_model(opened, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["format_version"] == 2
    save_model(model, tmp_path / "same")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:this model was written in format_version 1")
def test_transformers_opens_an_old_folder_and_its_export(model, old_folder, tmp_path):
    depthdial.hf.register()
    wanted = model(TOKENS, num_loops=2)
    opened = AutoModelForCausalLM.from_pretrained(old_folder)
    assert torch.equal(opened(TOKENS, num_loops=2).logits, wanted)
    export_hf(old_folder, tmp_path / "exported")
    assert torch.equal(load_model(tmp_path / "exported")(TOKENS, num_loops=2), wanted)


def test_the_old_name_in_a_new_config_is_refused_with_the_new_one(model):
    values = model.config.to_dict()
    values[OLD_NAME] = values.pop("loop_lora")
    with pytest.raises(ValueError, match="is called 'loop_lora' since format_version 2"):
        ModelConfig.from_dict(values)


@pytest.mark.filterwarnings("ignore:this model was written in format_version 1")
def test_the_recipe_of_an_old_run_opens(model):
    values = load_recipe("tiny-text").to_dict()
    new = model.config.to_dict()
    old = {OLD_NAME if key == "loop_lora" else key: value for key, value in new.items()}
    old |= {"format_version": 1, "max_context": 1024}
    recipe = Recipe.from_dict(values | {"model": old})
    assert recipe.model == model.config.replace(max_context=1024)
