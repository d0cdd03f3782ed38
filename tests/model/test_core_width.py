"""A core of another width and with other heads, and capped logits, whatever the family.

Its formulas are checked in tests/formats/test_parcae_core.py, its caches in tests/invariants, its
counts in test_count_measured.py.
"""

import pytest
import torch

from depthdial.config import ModelConfig
from depthdial.engine.generate import generate
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.sublayer import placed_layers
from depthdial.training.init_model import base_names
from depthdial.training.optim import parameter_group

BASE = {
    "vocab_size": 29, "d_model": 16, "split": [2, 4, 2], "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 6, "d_ff": 20, "max_context": 32, "num_loops": 2, "max_loops": 4, "init_std": 0.2,
}  # fmt: skip
DIAGONAL = {"injection": "diagonal", "initial_state": "zero", "state_projection": True}
CONCAT = DIAGONAL | {"injection": "concat"}
OWN_CORES = {
    "narrower": {"core_d_model": 10, "core_num_heads": 2, "loop": DIAGONAL},
    "wider": {"core_d_model": 24, "core_num_kv_heads": 4, "loop": CONCAT},
    "wider, time": {
        "core_d_model": 24,
        "modulation": {"kind": "time_step", "embed_dim": 4},
        "exit_gate": "linear",
        "loop": CONCAT,
    },
    "heads alone": {"core_num_heads": 6, "core_num_kv_heads": 3},
    "capped": {"logit_soft_cap": 1.5},
}
TOKENS = torch.arange(18).reshape(3, 6) * 7 % 29


def model_of(**changes):
    return LoopedLM(ModelConfig.from_dict(BASE | changes)).double()


@pytest.mark.parametrize("changes", OWN_CORES.values(), ids=OWN_CORES)
def test_f02_rows_of_several_loop_counts_equal_their_solo_passes(changes):
    model, counts = model_of(**changes), torch.tensor([1, 3, 2])
    with torch.no_grad():
        logits = model(TOKENS, num_loops=counts)
        for row, count in enumerate(counts.tolist()):
            alone = model(TOKENS[row : row + 1], num_loops=count)
            torch.testing.assert_close(logits[row : row + 1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", OWN_CORES.values(), ids=OWN_CORES)
def test_f02_every_parameter_learns_and_has_a_group(changes):
    model = model_of(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("modulation", "state_update")):
                parameter.add_(0.1)
    model(TOKENS, num_loops=3).logsumexp(-1).sum().backward()
    placed = placed_layers(model.config)
    # The exit gate is read by exit rules alone.
    learns = {n: p for n, p in model.named_parameters() if not n.startswith("exit_gate")}
    for name, parameter in learns.items():
        assert parameter.grad is not None and parameter.grad.any(), name
    for name, parameter in model.named_parameters():
        group = parameter_group(name, parameter, placed)
        if name.startswith(("injection", "state_projection", "exit_gate")):
            assert group == "undecayed"


def test_f02_the_base_of_a_model_with_a_core_of_its_own_width_is_named_without_it():
    """A recipe asks for it before the first step; the plain config had kept the core's width."""
    config = ModelConfig.from_dict(BASE | OWN_CORES["narrower"])
    added = {name for name, _ in LoopedLM(config).named_parameters()} - base_names(config)
    assert {name.partition(".")[0] for name in added} == {
        "injection",
        "state_projection",
        "state_update",
    }


@pytest.mark.parametrize("changes", OWN_CORES.values(), ids=OWN_CORES)
def test_f02_cached_generation_equals_the_whole_pass(changes):
    model = model_of(**changes).eval()
    prompt = TOKENS[0].tolist()
    [done] = generate(model, [prompt], num_loops=3, max_new_tokens=4)
    ids = prompt[:]
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids]), num_loops=3)[0, -1].argmax()))
    assert done.token_ids == ids[len(prompt) :]


@pytest.mark.parametrize("width", [10, 24])
def test_f02_maps_between_two_widths_start_orthogonal(width):
    """A rectangular identity would cut channels off, or leave some without input."""
    model = LoopedLM(ModelConfig.from_dict(BASE | {"core_d_model": width, "loop": DIAGONAL}))
    for weight in (model.injection.input.weight, model.state_projection.weight):
        small = weight if weight.shape[0] < weight.shape[1] else weight.T
        identity = torch.eye(small.shape[0])
        torch.testing.assert_close(small @ small.T, identity, rtol=0, atol=1e-5)
        assert not torch.equal(small[:, : small.shape[0]], identity)
    again = LoopedLM(model.config)
    assert torch.equal(again.injection.input.weight, model.injection.input.weight)


def test_f02_maps_of_one_width_start_as_the_identity():
    model = LoopedLM(ModelConfig.from_dict(BASE | {"core_d_model": 16, "loop": DIAGONAL}))
    for weight in (model.injection.input.weight, model.state_projection.weight):
        assert torch.equal(weight, torch.eye(16))


def test_f02_a_core_that_spells_out_the_model_s_sizes_is_the_same_model():
    spelled = {"core_d_model": 16, "core_num_heads": 4, "core_num_kv_heads": 2}
    with torch.no_grad():
        plain, same = (model_of(**x)(TOKENS, num_loops=3) for x in ({}, spelled))
    assert torch.equal(plain, same)


def test_f02_capped_logits_are_c_tanh_of_the_others():
    with torch.no_grad():
        plain, capped = (model_of(**x)(TOKENS, num_loops=2) for x in ({}, {"logit_soft_cap": 0.25}))
    assert plain.abs().max() > 0.25 > capped.abs().max()
    torch.testing.assert_close(capped, 0.25 * torch.tanh(plain / 0.25), rtol=0, atol=1e-12)


def test_f02_capped_logits_of_half_precision_are_float32():
    """Near the cap, half precision would give neighbours one value."""
    model = LoopedLM(ModelConfig.from_dict(BASE | {"logit_soft_cap": 1.5})).bfloat16()
    with torch.no_grad():
        assert model(TOKENS, num_loops=2).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop": {}}, "loop.injection='none' needs states as wide as the prelude output"),
        ({"loop": DIAGONAL | {"injection": "add"}}, "loop.injection='add' .* 'concat' or 'diag"),
        (
            {"loop": DIAGONAL | {"initial_state": "prelude"}},
            "loop.initial_state='prelude' .* 'zero' or 'random', or core_d_model=null",
        ),
        ({"loop": DIAGONAL | {"state_projection": False}}, "loop.state_projection=False"),
        ({"loop": DIAGONAL, "final_norm": "coda_and_head"}, "final_norm='coda_and_head'"),
        ({"loop": DIAGONAL, "modulation": {}}, "modulation.kind='elr'"),
    ],
)
def test_f02_what_needs_one_width_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"core_d_model=24 is not d_model=16, and {message}"):
        ModelConfig.from_dict(BASE | {"core_d_model": 24} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"core_num_heads": 3}, "the core has 3 query heads, no multiple of its 2"),
        ({"core_num_kv_heads": 3}, "the core has 4 query heads, no multiple of its 3"),
        ({"split": [3, 1, 2], "core_num_heads": 6}, "core_num_heads=6 has no effect .* core 'F'"),
        ({"split": [3, 1, 2], "core_num_kv_heads": 1}, "core_num_kv_heads=1 has no effect"),
        ({"split": [0, 4, 0], "core_num_heads": 8}, "every attention layer .*: set num_heads,"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap"),
        ({"core_d_model": 0}, "core_d_model"),
    ],
)
def test_f02_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(BASE | changes)


def test_f02_a_first_state_of_the_model_s_width_is_refused():
    model = model_of(**OWN_CORES["narrower"])
    with pytest.raises(ValueError, match=r"has shape \(3, 6, 16\), but the states .* \(3, 6, 10\)"):
        model(TOKENS, num_loops=1, initial_state_BTD=torch.zeros(3, 6, 16))
