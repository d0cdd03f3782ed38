"""Low-rank differences by loop: truncated SVD, and sets that start at zero."""

import pytest
import torch
from goldens import close, open_golden

from depthdial.convert.base_model import CoreRange
from depthdial.convert.convert import convert_model
from depthdial.convert.low_rank import truncated_svd
from depthdial.convert.methods import read_options


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def golden(request):
    return open_golden(request.param)


@pytest.fixture(scope="module")
def llama():
    return open_golden("llama")


def convert(golden, method, core_range=(1, 5), **options):
    return convert_model(
        golden.model().eval(),
        golden.vectors["input_ids"],
        method=method,
        core_range=CoreRange(*core_range),
        options=read_options(method, options),
    )


def shake(model, pattern, scale=0.1):
    """Random values in the parameters whose name holds `pattern`."""
    generator = torch.Generator().manual_seed(5)
    found = [p for name, p in model.named_parameters() if pattern in name]
    assert found
    for parameter in found:
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


# ---- truncated SVD


def test_the_svd_is_the_best_of_its_rank():
    """Eckart-Young: the error is the norm of the singular values that were cut off."""
    matrix = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(matrix)
    for rank in (1, 3, 7):
        down, up = truncated_svd(matrix, rank)
        assert (down.shape, up.shape) == ((rank, 7), (12, rank))
        close((matrix - up @ down).norm(), values[rank:].norm(), 1e-5)


def test_a_rank_beyond_the_matrix_is_filled_with_zeros():
    matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    down, up = truncated_svd(matrix, 5)
    close(up @ down, matrix, 1e-6)
    assert not down[3:].any() and not up[:, 3:].any()


# ---- relaxed-recursive


def test_full_rank_with_own_norms_gives_the_dense_model_back(golden):
    result = convert(golden, "relaxed-recursive", rank="full")
    assert result.converted.promises == "close"
    logits = result.model(golden.vectors["input_ids"], num_loops=2)
    close(logits, golden.vectors["logits"], 1e-4)


def test_full_rank_with_tied_norms_names_those_that_differ():
    result = convert(open_golden("qwen3"), "relaxed-recursive", rank="full", norms="tied")
    assert result.converted.promises == "none"
    assert "mixer.k_norm.weight, mixer.q_norm.weight" in result.converted.why_not


def test_a_higher_rank_is_nearer_to_the_dense_model(golden):
    errors = [
        convert(golden, "relaxed-recursive", rank=rank).comparisons[0].mean_kl
        for rank in (1, 8, 24)
    ]
    assert errors == sorted(errors, reverse=True)


def test_full_rank_beyond_the_matrices_is_refused(llama):
    with pytest.raises(ValueError, match="rank=33 exceeds 32, the full rank"):
        convert(llama, "relaxed-recursive", rank=33)


def test_bf16_weights_keep_their_exact_differences_in_float32(llama):
    """Rounded to bf16 the stored pairs would miss 1e-4."""
    base = llama.model().eval().to(torch.bfloat16)
    options = read_options("relaxed-recursive", {"rank": "full"})
    result = convert_model(
        base, llama.vectors["input_ids"], method="relaxed-recursive", core_range=CoreRange(1, 5),
        options=options,
    )  # fmt: skip
    assert result.converted.promises == "close"
    dtypes = {name: p.dtype for name, p in result.model.named_parameters()}
    assert dtypes["loop_lora.sublayers.0.q_proj.up"] == torch.float32
    assert dtypes["embedding.weight"] == torch.bfloat16


# ---- later-deltas, joint-deltas


@pytest.mark.parametrize("method", ["later-deltas", "joint-deltas"])
def test_one_loop_is_the_base_bit_for_bit(golden, method):
    result = convert(golden, method)
    x = golden.vectors["input_ids"]
    assert torch.equal(result.model(x, num_loops=1), golden.model()(x, num_loops=1))


def test_training_later_deltas_never_reaches_one_loop(golden):
    """What acts on passes 2 and later may take any value: k = 1 stays the base."""
    model, x = convert(golden, "later-deltas").model, golden.vectors["input_ids"]
    before = model(x, num_loops=2)
    for pattern in ("state_update", ".up", ".norm"):
        shake(model.loop_lora if pattern != "state_update" else model, pattern)
    assert torch.equal(model(x, num_loops=1), golden.model()(x, num_loops=1))
    assert not torch.allclose(model(x, num_loops=2), before)


def test_joint_deltas_have_a_set_of_their_own_for_the_first_pass(golden):
    model, x = convert(golden, "joint-deltas").model, golden.vectors["input_ids"]
    assert model.config.loop_lora.sets_by_loop == (0, 1)
    before = model(x, num_loops=1)
    model.loop_lora.sublayers[0].q_proj.up[1] += 0.1
    assert torch.equal(model(x, num_loops=1), before)
    model.loop_lora.sublayers[0].q_proj.up[0] += 0.1
    assert not torch.equal(model(x, num_loops=1), before)


@pytest.mark.parametrize(("method", "rate"), [("later-deltas", 0.1), ("joint-deltas", 0.35)])
def test_a_later_pass_takes_the_given_share_at_first(llama, method, rate):
    result = convert(llama, method)
    assert (result.model.state_update.rate == torch.tensor(rate)).all()
    assert (convert(llama, method, rate=0.2).model.state_update.rate == torch.tensor(0.2)).all()
    x = llama.vectors["input_ids"]
    rigid = convert(llama, "loop-window").model
    states, candidates = [], []
    result.model(x, num_loops=2, on_loop=lambda i, s, rows: states.append(s))
    rigid(x, num_loops=2, on_loop=lambda i, s, rows: candidates.append(s))
    close(states[1], states[0] + rate * (candidates[1] - states[0]), 1e-5)


def test_stored_norms_start_as_those_of_the_layers(golden):
    model = convert(golden, "joint-deltas").model
    for sublayer, stored in zip(model.core_stack, model.loop_lora.sublayers, strict=True):
        assert torch.equal(stored.norm, sublayer.norm.weight.expand(2, -1))


def test_rank_and_tied_norms_say_what_is_stored(llama):
    model = convert(llama, "later-deltas", rank=3, norms="tied").model
    assert model.loop_lora.sublayers[0].q_proj.down.shape[1] == 3
    assert model.loop_lora.sublayers[0].norm is None


def test_a_rank_above_the_full_one_is_refused(llama):
    with pytest.raises(ValueError, match="rank=500 exceeds .*, the full rank of these matrices"):
        convert(llama, "later-deltas", rank=500)
