"""The first pass of a model with stored differences, merged into a dense model."""

import pytest
import torch

from depthdial.config import LoopConfig, LoopLoraConfig, ModelConfig, ModulationConfig
from depthdial.convert.convert import convert_model
from depthdial.convert.methods import MergeOptions
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

TOKENS = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))


def elastic(*, sets=(0, 1), norms=True, norm="pre", **changes):
    """Random weights and differences everywhere."""
    config = ModelConfig(
        vocab_size=31, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=24, max_context=16, max_loops=3, num_loops=2, init_std=0.3, norm=norm,
        loop=LoopConfig(update="delta", gate_bypass="first_only"),
        loop_lora=LoopLoraConfig(rank=3, sets_by_loop=sets, norms=norms),
    ).replace(**changes)  # fmt: skip
    model = LoopedLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def merged(model):
    options = MergeOptions()
    result = convert_model(
        model, TOKENS, method="merge-first-pass", core_range=None, options=options
    )
    return result.model


@pytest.mark.parametrize("sets", [(0, 1), (1, 0), (-1, 0), (0,)])
@pytest.mark.parametrize(("norm", "norms"), [("pre", True), ("pre", False), ("sandwich", True)])
def test_the_dense_model_is_the_first_pass(sets, norm, norms):
    model = elastic(sets=sets, norm=norm, norms=norms, qk_norm="rms")
    dense = merged(model)
    assert dense.config.loop_lora is None and dense.config.max_loops == 1
    assert dense.config.loop.update == "replace"
    with torch.no_grad():
        difference = dense(TOKENS, num_loops=1) - model(TOKENS, num_loops=1)
    assert float(difference.abs().max()) < 1e-4


@pytest.mark.parametrize(("family", "qk_norm"), [("llama", "none"), ("qwen3", "rms")])
def test_the_dense_model_goes_to_a_dense_format(tmp_path, family, qk_norm):
    """Its split in three parts, without effect at one loop, was refused by every format."""
    dense = merged(elastic(qk_norm=qk_norm))
    save_model(dense, tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "x", family=family)
    import_checkpoint(tmp_path / "x", tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert (dense.config.split, again.config.split) == ((2, 2, 2), (0, 6, 0))
    with torch.no_grad():
        assert torch.equal(again(TOKENS, num_loops=1), dense(TOKENS, num_loops=1))


def test_the_differences_of_later_passes_are_left_behind():
    model = elastic(sets=(-1, 0))
    assert torch.equal(
        merged(model).core_stack[0].mixer.q_proj.weight, model.core_stack[0].mixer.q_proj.weight
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop_lora": None}, "has no loop_lora"),
        ({"loop.gate_bypass": "never"}, "goes through its gate"),
        ({"loop.injection": "add"}, "loop.injection='add' instead of 'none'"),
    ],
)
def test_a_first_pass_that_is_no_dense_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        merged(elastic(**changes))


@pytest.mark.parametrize("are_pairs_wide", [True, False])
def test_a_sum_that_bf16_cannot_hold_is_kept_in_float32(tmp_path, are_pairs_wide):
    """Rounded, it would not be the first pass. Pairs found by SVD are float32 themselves."""
    model = elastic()
    for name, parameter in model.named_parameters():
        if not (are_pairs_wide and "loop_lora" in name):
            parameter.data = parameter.data.to(torch.bfloat16)
    save_model(model, tmp_path / "model")
    model = load_model(tmp_path / "model").eval()
    dense = merged(model)
    assert {p.dtype for p in dense.parameters()} == {torch.float32}
    with torch.no_grad():
        expected = model.float()(TOKENS, num_loops=1)
        assert float((dense(TOKENS, num_loops=1) - expected).abs().max()) < 1e-4


def test_differences_that_were_never_trained_leave_the_format_as_it_is():
    model = elastic().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".up"):
                parameter.zero_()
    assert {p.dtype for p in merged(model).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"modulation": ModulationConfig(d_cond=8, rank=2)}, "modulation"),
     ({"segments": (1, 1), "loop": LoopConfig(update="replace")}, "segments")],
)  # fmt: skip
def test_a_first_pass_that_is_no_dense_model_is_refused_by_name(changes, what):
    with pytest.raises(ValueError, match=f"the first pass of this base has {what}"):
        merged(elastic(**changes))
