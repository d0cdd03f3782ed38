"""Optimizer state as tensors: saved, resumed, grafted."""

import copy

import pytest
import torch
from optim_models import (
    CONFIG,
    D_MODEL,
    MUON,
    VOCAB,
    Modulation,
    Norm,
    assert_equal_weights,
    build,
    train,
)
from safetensors.torch import load_file, save_file
from torch import nn

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig, OptimConfig
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.optim import Optimizers, group_parameters


def test_state_from_the_start_changes_nothing_against_torch_alone():
    """Zero moments made up front must be what torch would have made at the first step."""
    model, optimizers = build()
    twin = copy.deepcopy(model)
    members = group_parameters(twin)
    plain = [
        torch.optim.Muon(
            members["matrices"].values(), lr=1e-2, weight_decay=0.2, momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": list(members["decayed"].values()), "weight_decay": 0.2},
                {"params": list(members["undecayed"].values()), "weight_decay": 0.0},
            ],
            lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True,
        ),
    ]  # fmt: skip
    for step in range(3):
        model.loss(seed=step).backward()
        twin.loss(seed=step).backward()
        for optimizer in (optimizers, *plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(model, twin)
    plain_state = {id(p): state for optimizer in plain for p, state in optimizer.state.items()}
    own = optimizers.state_tensors()
    for rule, group in (("muon", "matrices"), ("adamw", "decayed"), ("adamw", "undecayed")):
        for name, parameter in members[group].items():
            for key, tensor in plain_state[id(parameter)].items():
                assert torch.equal(own.pop(f"{rule}.{name}.{key}"), tensor)
    assert not own


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_state_survives_safetensors_and_training_continues_bit_for_bit(tmp_path, tied, optimizer):
    config = MUON.replace(optimizer=optimizer)
    model, optimizers = build(config=config, tied=tied)
    train(model, optimizers, range(3))
    save_file(optimizers.state_tensors(), tmp_path / "optimizer.safetensors")
    resumed_model = copy.deepcopy(model)
    resumed = Optimizers(resumed_model, config)
    resumed.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    train(model, optimizers, range(3, 6))
    train(resumed_model, resumed, range(3, 6))
    assert_equal_weights(model, resumed_model)


def test_state_names_are_rule_parameter_and_state():
    _, optimizers = build(tied=True)
    tensors = optimizers.state_tensors()
    assert "muon.core_stack.0.mixer.q_proj.weight.momentum_buffer" in tensors
    assert tensors["adamw.embedding.weight.step"].shape == ()
    assert tensors["adamw.state_update.gamma.exp_avg_sq"].shape == (D_MODEL,)


def test_parameter_without_gradient_still_has_its_state_saved_and_loaded():
    model, optimizers = build(modulation=True)
    (model.final_norm.weight.sum()).backward()
    optimizers.step()
    tensors = {name: t.clone() for name, t in optimizers.state_tensors().items()}
    assert float(tensors["adamw.modulation.down.step"]) == 0.0
    assert float(tensors["adamw.final_norm.weight.step"]) == 1.0
    _, fresh = build(modulation=True)
    fresh.load_state_tensors(tensors)
    assert float(fresh.state_tensors()["adamw.final_norm.weight.step"]) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("adamw.embedding.weight.exp_avg"), r"1 tensors missing \['adamw\.embed"),
        (lambda t: t.update({"adamw.x.weight.step": torch.zeros(())}), r"1 unknown \['adamw\.x"),
        (
            lambda t: t.update({"adamw.final_norm.weight.exp_avg": torch.zeros(3)}),
            r"'adamw\.final_norm\.weight\.exp_avg' is torch\.float32 \(3,\)",
        ),
        (
            lambda t: t.update(
                {"adamw.final_norm.weight.exp_avg": torch.zeros(D_MODEL, dtype=torch.bfloat16)}
            ),
            "bfloat16",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_copied(change, message):
    model, optimizers = build()
    train(model, optimizers, range(1))
    tensors = {name: t.clone() for name, t in optimizers.state_tensors().items()}
    change(tensors)
    _, fresh = build()
    with pytest.raises(ValueError, match=message):
        fresh.load_state_tensors(tensors)
    assert not any(t.any() for t in fresh.state_tensors().values())


def test_state_of_the_other_optimizer_is_refused():
    _, muon = build()
    _, adamw = build(config=MUON.replace(optimizer="adamw"))
    with pytest.raises(ValueError, match="optim.optimizer"):
        adamw.load_state_tensors(muon.state_tensors())


def test_b39_resume_takes_settings_from_the_new_config_and_moments_from_the_checkpoint():
    model, optimizers = build()
    train(model, optimizers, range(3))
    new_config = MUON.replace(
        lr=5e-3, adamw_lr=7e-4, weight_decay=0.01, betas=[0.8, 0.9], momentum=0.9, eps=1e-6
    )
    resumed = Optimizers(model, new_config)
    resumed.load_state_tensors(optimizers.state_tensors())
    assert resumed.learning_rates() == {"matrices": 5e-3, "decayed": 7e-4, "undecayed": 7e-4}
    adamw, muon = resumed._optimizers["adamw"], resumed._optimizers["muon"]
    assert [g["betas"] for g in adamw.param_groups] == [(0.8, 0.9)] * 2
    assert [g["eps"] for g in adamw.param_groups] == [1e-6] * 2
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.01, 0.0]
    assert muon.param_groups[0]["momentum"] == 0.9
    for name, tensor in resumed.state_tensors().items():
        assert torch.equal(tensor, optimizers.state_tensors()[name])


def test_b39_new_learning_rate_acts_on_the_next_step():
    model, optimizers = build(config=OptimConfig(optimizer="adamw", lr=1e-2, weight_decay=0.0))
    train(model, optimizers, range(2))
    moves = []
    for lr in (1e-2, 1e-3):
        twin = copy.deepcopy(model)
        resumed = Optimizers(twin, optimizers.config.replace(lr=lr))
        resumed.load_state_tensors(optimizers.state_tensors())
        train(twin, resumed, [2])
        moves.append(twin.lm_head.weight - model.lm_head.weight)
    assert torch.allclose(moves[0], 10 * moves[1], rtol=1e-3, atol=1e-6)


def test_grafted_parameters_join_with_fresh_moments_and_old_moments_stay():
    model, optimizers = build()
    train(model, optimizers, range(3))
    optimizers.set_lr_scale(0.25)
    old = {name: t.clone() for name, t in optimizers.state_tensors().items()}
    model.modulation = Modulation()
    added = optimizers.add_module_parameters(model)
    names = {"modulation.heads.weight", "modulation.heads.bias", "modulation.down", "modulation.up"}
    assert set(added) == names
    tensors = optimizers.state_tensors()
    assert all(torch.equal(tensors[name], old[name]) for name in old)
    assert all(not tensors[name].any() for name in tensors if name not in old)
    assert names - {"modulation.heads.bias"} <= set(optimizers.group_names()["decayed"])
    assert "modulation.heads.bias" in optimizers.group_names()["undecayed"]
    assert optimizers.learning_rates()["decayed"] == 0.25 * 3e-3
    train(model, optimizers, [3])
    steps = optimizers.state_tensors()
    assert float(steps["adamw.embedding.weight.step"]) == 4.0
    assert float(steps["adamw.modulation.up.step"]) == 1.0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("update", ["replace", "residual", "delta", "adaptive_delta"])
def test_b33_real_model_is_grouped_completely_before_and_after_its_graft(update, tied):
    config = ModelConfig(
        vocab_size=32, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=24, max_context=16, qk_norm="rms", tie_embeddings=tied, max_loops=3,
        loop=LoopConfig(update=update),
    )  # fmt: skip
    model = LoopedLM(config)
    optimizers = Optimizers(model, MUON)
    assert len(optimizers.group_names()["matrices"]) == 3 * (4 + 3)
    model.graft_modulation(ModulationConfig(d_cond=8, rank=4, embed_dim=4))
    added = optimizers.add_module_parameters(model)
    assert len(added) > 10 and all(name.startswith("modulation.") for name in added)
    names = [name for group in optimizers.group_names().values() for name in group]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_group_that_appears_with_a_graft_starts_at_the_present_learning_rate():
    model = nn.Module()
    model.config = CONFIG
    model.embedding = nn.Embedding(VOCAB, D_MODEL)
    optimizers = Optimizers(model, MUON)
    optimizers.set_lr_scale(0.25)
    model.final_norm = Norm(D_MODEL)
    optimizers.add_module_parameters(model)
    assert optimizers.learning_rates() == {"decayed": 0.25 * 3e-3, "undecayed": 0.25 * 3e-3}
    optimizers.set_lr_scale(1.0)
    assert optimizers.learning_rates() == {"decayed": 3e-3, "undecayed": 3e-3}


def test_resume_after_a_graft_continues_bit_for_bit():
    model, optimizers = build()
    train(model, optimizers, range(2))
    torch.manual_seed(5)
    model.modulation = Modulation()
    optimizers.add_module_parameters(model)
    train(model, optimizers, range(2, 4))
    twin = copy.deepcopy(model)
    resumed = Optimizers(twin, MUON)
    resumed.load_state_tensors({n: t.clone() for n, t in optimizers.state_tensors().items()})
    train(model, optimizers, range(4, 7))
    train(twin, resumed, range(4, 7))
    assert_equal_weights(model, twin)


def test_adding_twice_adds_nothing():
    model, optimizers = build(tied=True, modulation=True)
    assert optimizers.add_module_parameters(model) == ()


def test_replaced_parameter_is_refused():
    model, optimizers = build()
    model.final_norm = Norm(D_MODEL)
    with pytest.raises(ValueError, match=r"gone from the model, first 'final_norm\.weight'"):
        optimizers.add_module_parameters(model)
