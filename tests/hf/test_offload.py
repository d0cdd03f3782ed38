"""Weights that are elsewhere until a module is called, and modules that somebody replaced."""

import warnings

import accelerate
import pytest
import torch
from toys import toy_model
from transformers import AutoModelForCausalLM
from wrapped import MASK, TOKENS, greedy, wrapped_toy

from depthdial.config import LoopLoraConfig, NGPTConfig, TimeModulationConfig
from depthdial.hf.cache import CACHE_FIELD
from depthdial.model.checkpoint import save_model

KINDS = {
    "conditioned": {},
    "tied": {"tie_embeddings": True},
    "decay gate": {"loop.update": "decay_gate", "loop.gate_rank": 2},
    "time steps": {"modulation": TimeModulationConfig(kind="time_step", embed_dim=16)},
    "differences by loop": {
        "loop_lora": LoopLoraConfig(rank=2, sets_by_loop=(-1, 0, 1), norms=True),
        "loop.update": "replace", "modulation": None, "loop.injection": "concat",
    },
}  # fmt: skip
EVERY_COUNT = [1, 2, 3, 4, torch.tensor([1, 4, 2])]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    """A toy that no test changes."""
    return wrapped_toy(**KINDS[request.param])


def place_on_disk(model, folder):
    save_model(model.model, folder / "model")
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map={"": "disk"}, offload_folder=folder / "offloaded"
    )


def place_in_parts(model, folder):
    """Each block on the disk or in memory, in turn."""
    save_model(model.model, folder / "model")
    names = [f"model.{name}" for name, _ in model.model.named_children()]
    places = {name: ("disk", "cpu")[i % 2] for i, name in enumerate(names)}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "offloaded"
    )


def place_in_memory(model, folder):
    copy = AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    return accelerate.cpu_offload(copy.eval(), execution_device="cpu")


@pytest.mark.parametrize("place", [place_on_disk, place_in_parts])
def test_f08_a_device_map_of_disk_and_memory_computes_where_the_input_is(tmp_path, place):
    """The model asked its embedding for the device, which was none: 'meta'."""
    model = wrapped_toy(tie_embeddings=True)
    assert_computes_as(model, place(model, tmp_path))


def test_f08_offloaded_weights_compute_where_the_input_is(model, tmp_path):
    assert_computes_as(model, place_in_memory(model, tmp_path))


def assert_computes_as(model, placed):
    """At every loop count, with a cache and without, and the weights stay where they are."""
    assert any(parameter.is_meta for parameter in placed.parameters())
    for num_loops in EVERY_COUNT:
        actual = placed(TOKENS, MASK, num_loops=num_loops).logits
        expected = model(TOKENS, MASK, num_loops=num_loops).logits
        assert torch.allclose(actual[MASK == 1], expected[MASK == 1], atol=1e-5)
    for use_cache in (True, False):
        actual = greedy(placed, mask=MASK, num_loops=3, new=4, use_cache=use_cache)
        assert torch.equal(actual, greedy(model, mask=MASK, num_loops=3, new=4))
    assert any(parameter.is_meta for parameter in placed.parameters())


def test_f08_an_offloaded_backbone_computes_where_the_input_is(model, tmp_path):
    placed = place_in_memory(model, tmp_path)
    actual = placed.base_model(TOKENS, num_loops=3, use_cache=True)
    assert actual[CACHE_FIELD].loop_cache is not None
    expected = model.base_model(TOKENS, num_loops=3).last_hidden_state
    assert torch.allclose(actual.last_hidden_state, expected, atol=1e-5)


def test_f08_weights_that_no_offloading_brings_back_are_named(tmp_path):
    scaled = wrapped_toy(
        norm="ngpt", final_norm="none", modulation=None, qk_norm="none",
        ngpt=NGPTConfig(alpha_init=0.05, scale_std=0.02), **{"loop.unit_norm": True},
    )  # fmt: skip
    with pytest.raises(ValueError, match="the scales of the scores .nGPT. are offloaded"):
        place_in_memory(scaled, tmp_path)(TOKENS, num_loops=2)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_f08_maps_without_offloading_change_nothing(tmp_path, device_map):
    save_model(toy_model(), tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert placed.device.type == "cpu"
    expected = toy_model()(TOKENS, num_loops=3)
    assert torch.allclose(placed(TOKENS, num_loops=3).logits, expected, atol=1e-5)


def test_f33_dynamic_quantisation_computes_at_every_loop_count(model):
    """Matrices were read past their modules, which a quantised module refuses."""
    with warnings.catch_warnings():
        # torch keeps it, and says that torchao will follow.
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8
        )
    names = [name for name, module in quantised.named_modules() if "quantized" in str(type(module))]
    assert any("core_stack" in name for name in names)
    assert ("model.lm_head" in names) == (model.model.lm_head is not None)
    for num_loops in EVERY_COUNT:
        actual = quantised(TOKENS, MASK, num_loops=num_loops).logits
        expected = model(TOKENS, MASK, num_loops=num_loops).logits
        error = (actual - expected)[MASK == 1].norm() / expected[MASK == 1].norm()
        assert 0 < error < 0.15
    with_cache, without = (
        greedy(quantised, mask=MASK, num_loops=3, new=4, use_cache=c) for c in (True, False)
    )
    assert with_cache.shape == without.shape == (3, 4)
