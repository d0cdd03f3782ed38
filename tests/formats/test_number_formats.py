"""Checkpoints that mix number formats: opened without changing a value, in every family."""

import json

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN
from published import WEIGHTS, copy_golden, edit_json

from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.model.checkpoint import load_model, save_model

CASES = ("dory", "huginn", "iquest-loop", "llama", "loopformer", "loopus", "nanbeige", "ouro",
         "parcae", "qwen3", "retrofit", "rrt-lora")  # fmt: skip
TABLES = ("freqs_cis", "inv_freq")
"""Buffers, which are checked against the config to a precision of their own."""


def rewrite(folder, format_of):
    """Give every weight the number format of its place in the file."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    changed = {
        name: tensor if name.endswith(TABLES) else tensor.bfloat16().to(format_of(place))
        for place, (name, tensor) in enumerate(sorted(tensors.items()))
    }
    safetensors.torch.save_file(changed, folder / WEIGHTS)
    return changed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turn", [0, 1])
def test_every_other_tensor_in_another_format_gives_the_same_logits(tmp_path, name, turn):
    """Values of bf16 in float32 are the same values."""
    plain, mixed = (copy_golden(name, tmp_path / kind) for kind in ("plain", "mixed"))
    rewrite(plain, lambda place: torch.float32)
    stored = rewrite(mixed, lambda place: (torch.bfloat16, torch.float32)[(place + turn) % 2])
    for kind in ("plain", "mixed"):
        report = import_checkpoint(tmp_path / kind, tmp_path / f"model-{kind}")
    assert any("computed in float32, which holds them all" in note for note in report.notes)
    loops = json.loads((tmp_path / "model-mixed" / "config.json").read_text())["num_loops"]
    tokens = torch.arange(1, 9)[None]
    expected, found = (
        load_model(tmp_path / f"model-{kind}")(tokens, num_loops=loops)
        for kind in ("plain", "mixed")
    )
    # Mapped weights and copied ones lie at other addresses, which moves the last bit of a product.
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    export_checkpoint(tmp_path / "model-mixed", tmp_path / "x", family=report.family)
    again = safetensors.torch.load_file(tmp_path / "x" / WEIGHTS)
    assert {n: t.dtype for n, t in again.items()} == {n: t.dtype for n, t in stored.items()}
    assert all(torch.equal(tensor, stored[n]) for n, tensor in again.items())


def test_one_format_is_no_note(tmp_path):
    report = import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    assert not any("number formats" in note for note in report.notes)


def test_an_export_states_the_format_that_trained_weights_have(tmp_path):
    """transformers rounds weights to what the config states."""
    source = copy_golden("llama", tmp_path / "source")
    rewrite(source, lambda place: torch.bfloat16)
    edit_json(source / "config.json", torch_dtype="bfloat16")
    import_checkpoint(source, tmp_path / "model")
    report = export_checkpoint(tmp_path / "model", tmp_path / "same", family="llama")
    stated = json.loads((tmp_path / "same" / "config.json").read_text())["torch_dtype"]
    assert (stated, report.warnings) == ("bfloat16", ())
    save_model(load_model(tmp_path / "model").float(), tmp_path / "model")
    report = export_checkpoint(tmp_path / "model", tmp_path / "trained", family="llama")
    values = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert values["torch_dtype"] == "float32"
    assert "torch_dtype of the config is float32 now" in report.warnings[0]


def test_a_format_that_was_never_true_comes_back_as_it_was(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    edit_json(source / "config.json", torch_dtype="float16")
    import_checkpoint(source, tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "x", family="llama")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["torch_dtype"] == "float16"
