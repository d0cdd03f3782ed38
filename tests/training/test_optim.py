"""Optimizer groups, clipping, the learning-rate schedule; states in `test_optim_state.py`."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_models import (
    CONFIG,
    D_MODEL,
    MUON,
    StandIn,
    build,
    train,
)

from depthdial.config import OptimConfig
from depthdial.model.sublayer import placed_layers
from depthdial.training.optim import Optimizers, group_parameters, lr_scale_at, parameter_group


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_b33_every_unique_parameter_is_in_exactly_one_group(tied, optimizer):
    model, optimizers = build(config=OptimConfig(optimizer=optimizer), tied=tied, modulation=True)
    held = [
        parameter
        for torch_optimizer in optimizers._optimizers.values()
        for settings in torch_optimizer.param_groups
        for parameter in settings["params"]
    ]
    unique = list(model.parameters())
    assert len(held) == len({id(p) for p in held}) == len(unique)
    assert {id(p) for p in held} == {id(p) for p in unique}
    names = [name for group in optimizers.group_names().values() for name in group]
    assert ("lm_head.weight" in names) == (not tied)


def test_b33_only_block_matrices_are_in_muon():
    model, optimizers = build(modulation=True)
    muon = {
        name.removeprefix("muon.").removesuffix(".momentum_buffer")
        for name in optimizers.state_tensors()
        if name.startswith("muon.")
    }
    expected = {
        f"{stack}_stack.{sublayer}.mixer.{matrix}.weight"
        for stack in ("prelude", "core", "coda")
        for sublayer, matrices in enumerate(
            [("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")]
        )
        for matrix in matrices
    }
    assert muon == expected


@pytest.mark.parametrize(
    ("name", "shape", "group"),
    [
        ("embedding.weight", (16, 8), "decayed"),
        ("lm_head.weight", (16, 8), "decayed"),
        ("core_stack.12.mixer.q_proj.weight", (8, 8), "matrices"),
        ("core_stack.12.mixer.q_norm.weight", (4,), "undecayed"),
        ("core_stack.12.mixer.q_proj.bias", (8,), "undecayed"),
        ("coda_stack.0.norm.weight", (8,), "undecayed"),
        ("state_update.gate.weight", (8, 8), "undecayed"),
        ("state_update.gate.bias", (8,), "undecayed"),
        ("state_update.rate", (8,), "undecayed"),
        ("final_norm.weight", (8,), "undecayed"),
        ("modulation.heads.weight", (8, 6), "decayed"),
        ("modulation.heads.bias", (8,), "undecayed"),
        ("modulation.down", (4, 8), "decayed"),
        ("modulation.stacked_heads", (3, 8, 6), "decayed"),
        ("modulation.stacked_bias", (3, 8), "undecayed"),
        ("modulation.time_in.weight", (8, 16), "decayed"),
        ("modulation.core.0.heads.bias", (16,), "undecayed"),
        ("position_embedding.weight", (16, 8), "decayed"),
        ("prelude_norm.weight", (8,), "undecayed"),
        ("logit_scale", (16,), "undecayed"),
        ("core_stack.0.alpha", (8,), "undecayed"),
        ("core_stack.0.post_norm.weight", (8,), "undecayed"),
        ("core_stack.0.mixer.g_proj.weight", (8, 8), "matrices"),
        ("core_stack.0.mixer.q_scale", (8,), "undecayed"),
        ("core_stack.1.mixer.up_scale", (16,), "undecayed"),
        ("core_stack.0.mixer.value_embedding.weight", (16, 8), "decayed"),
        ("core_stack.0.mixer.value_gate.weight", (2, 8), "undecayed"),
        ("core_stack.0.mixer.mix_gate.weight", (2, 4), "undecayed"),
        ("core_stack.0.mixer.mix_gate.bias", (2,), "undecayed"),
        ("state_update.down.weight", (2, 8), "undecayed"),
        ("state_update.log_decay", (8,), "undecayed"),
        ("injection.adapter.weight", (8, 16), "undecayed"),
        ("injection.input.weight", (8, 8), "undecayed"),
        ("injection.log_decay", (8,), "undecayed"),
        ("injection.step_bias", (8,), "undecayed"),
        ("state_projection.weight", (8, 8), "undecayed"),
        ("exit_gate.norm.weight", (8,), "undecayed"),
        ("exit_gate.linear.weight", (1, 8), "undecayed"),
        ("loop_lora.sublayers.0.q_proj.down", (2, 4, 8), "decayed"),
        ("loop_lora.sublayers.0.q_proj.up", (2, 8, 4), "decayed"),
        ("loop_lora.sublayers.0.norm", (2, 8), "undecayed"),
        ("loop_lora.sublayers.0.post_norm", (2, 8), "undecayed"),
    ],
)
def test_b33_group_of_each_kind_of_parameter(name, shape, group):
    config = CONFIG.replace(split=[2, 14, 2], output_gate=True)
    assert parameter_group(name, torch.empty(shape), placed_layers(config)) == group


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("adapter.weight", (8, 8)),
        ("core_stack.0.norm.weight", (8, 8)),
        ("core_stack.0.mixer.experts.weight", (4, 8, 8)),
        ("old_core_stack.0.mixer.q_proj.weight", (8, 8)),
        ("core_stack.0.mixer.router.weight", (4, 8)),
        ("loop_lora.sublayers.0.scale", (2, 8)),
        ("final_norm.bias", (8,)),
    ],
)
def test_b33_unknown_parameter_is_refused_not_grouped(name, shape):
    with pytest.raises(ValueError, match="belongs to no optimizer group"):
        parameter_group(name, torch.empty(shape), placed_layers(CONFIG))


def test_b33_one_parameter_under_names_of_two_groups_is_refused():
    model = StandIn()
    model.core_stack[0].mixer.q_proj.weight = model.state_update.gate.weight
    with pytest.raises(ValueError, match="one parameter in two optimizer groups"):
        group_parameters(model)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_b33_given_rates_and_decay_survive_in_their_groups(optimizer):
    _, optimizers = build(config=MUON.replace(optimizer=optimizer), modulation=True)
    optimizers.set_lr_scale(0.5)
    assert optimizers.learning_rates() == {
        "matrices": 0.5e-2, "decayed": 1.5e-3, "undecayed": 1.5e-3
    }  # fmt: skip
    decay = {group: optimizers._groups[group]["weight_decay"] for group in optimizers._groups}
    assert decay == {"matrices": 0.2, "decayed": 0.2, "undecayed": 0.0}


def test_one_learning_rate_serves_all_groups_unless_adamw_has_its_own():
    _, optimizers = build(config=OptimConfig(lr=2e-3))
    assert set(optimizers.learning_rates().values()) == {2e-3}


@pytest.mark.parametrize("tied", [False, True])
def test_b33_states_equal_unique_parameters_for_any_loop_count(tied):
    sizes = set()
    for num_loops in (1, 4):
        model, optimizers = build(tied=tied)
        train(model, optimizers, range(2), num_loops=num_loops)
        owners = {name.rsplit(".", 1)[0] for name in optimizers.state_tensors()}
        assert len(owners) == len(list(model.parameters()))
        sizes.add(sum(t.numel() for t in optimizers.state_tensors().values()))
    assert len(sizes) == 1


def test_undecayed_parameters_shrink_only_by_gradient():
    model, optimizers = build(config=OptimConfig(lr=0.1, weight_decay=0.5))
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    after = model.state_dict()
    for name in ("final_norm.weight", "state_update.gate.weight", "core_stack.0.norm.weight"):
        assert torch.equal(after[name], before[name])
    for name in ("embedding.weight", "lm_head.weight", "core_stack.0.mixer.q_proj.weight"):
        assert torch.allclose(after[name], 0.95 * before[name])


def test_frozen_parameters_are_not_trained():
    torch.manual_seed(0)
    model = StandIn()
    model.embedding.weight.requires_grad_(False)
    optimizers = Optimizers(model, MUON)
    assert "embedding.weight" not in optimizers.group_names()["decayed"]


def test_gradients_are_clipped_to_the_configured_norm_over_all_groups():
    model, optimizers = build(config=MUON.replace(grad_clip=0.5))
    model.loss(seed=0).backward()
    expected = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    assert optimizers.clip_gradients() == pytest.approx(expected, rel=1e-5)
    clipped = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    assert clipped == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradient_stops_before_the_step(value):
    model, optimizers = build()
    model.loss(seed=0).backward()
    model.final_norm.weight.grad[0] = value
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        optimizers.clip_gradients()
    assert torch.equal(model.final_norm.weight, torch.ones(D_MODEL))


def test_learning_rate_rises_stays_and_falls():
    config = OptimConfig(warmup_frac=0.1, decay_frac=0.2, min_lr_frac=0.1)
    scales = [lr_scale_at(config, step=step, total_steps=100) for step in range(100)]
    assert scales[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(scales[10:80]) == {1.0}
    assert scales[80] == pytest.approx(0.1 + 0.9 * 19 / 20)
    assert scales[98] == pytest.approx(0.1 + 0.9 / 20)
    assert scales[99] == pytest.approx(0.1)


def test_schedule_lengths_are_the_decimals_that_were_typed():
    config = OptimConfig(warmup_frac=0.29, decay_frac=0.0)
    scales = [lr_scale_at(config, step=step, total_steps=100) for step in range(100)]
    assert scales[27] == pytest.approx(28 / 29) and set(scales[28:]) == {1.0}


@given(
    warmup=st.integers(0, 100), decay=st.integers(0, 100), floor=st.floats(0, 1),
    total_steps=st.integers(1, 60),
)  # fmt: skip
def test_learning_rate_scale_rises_then_falls_within_its_bounds(warmup, decay, floor, total_steps):
    decay = min(decay, 100 - warmup)
    config = OptimConfig(
        warmup_frac=warmup / 100, decay_frac=decay / 100, min_lr_frac=floor if decay else 0.0
    )
    scales = [lr_scale_at(config, step=s, total_steps=total_steps) for s in range(total_steps)]
    assert all(0.0 <= scale <= 1.0 + 1e-9 for scale in scales)
    top = scales.index(max(scales))
    assert scales[: top + 1] == sorted(scales[: top + 1])
    assert scales[top:] == sorted(scales[top:], reverse=True)


@pytest.mark.parametrize("step", [-1, 10])
def test_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match=f"step={step} must lie in 0..9"):
        lr_scale_at(OptimConfig(), step=step, total_steps=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_frac": 0.6, "decay_frac": 0.5}, "add up to more than 1"),
        ({"min_lr_frac": 0.1, "decay_frac": 0.0}, "no effect with decay_frac=0"),
        ({"optimizer": "adamw", "momentum": 0.9}, "no effect with optimizer='adamw'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**settings)
