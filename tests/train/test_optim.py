"""Optimizer groups, state as tensors, grafts, resume, the learning-rate schedule."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig, OptimConfig
from depthdial.model.looped_lm import LoopedLM
from depthdial.train.optim import Optimizers, group_parameters, lr_scale_at, parameter_group

D_MODEL, VOCAB, RANK = 8, 16, 4
MUON = OptimConfig(lr=1e-2, adamw_lr=3e-3, weight_decay=0.2)


class Norm(nn.Module):
    """One gain vector."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Sublayer(nn.Module):
    """Norm and a mixer with the named matrices."""

    def __init__(self, matrices, *, qk_norm):
        super().__init__()
        self.norm = Norm(D_MODEL)
        self.mixer = nn.Module()
        for name in matrices:
            self.mixer.add_module(name, nn.Linear(D_MODEL, D_MODEL, bias=False))
        if qk_norm:
            self.mixer.q_norm, self.mixer.k_norm = Norm(4), Norm(4)


class Modulation(nn.Module):
    """A biased head and two low-rank factors."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(6, D_MODEL)
        self.down = nn.Parameter(torch.randn(RANK, D_MODEL))
        self.up = nn.Parameter(torch.randn(D_MODEL, RANK))


class StandIn(nn.Module):
    """Parameter names of a looped model; every parameter enters `loss`."""

    def __init__(self, *, tied=False, modulation=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        for stack in ("prelude_stack", "core_stack", "coda_stack"):
            attention = Sublayer(("q_proj", "k_proj", "v_proj", "o_proj"), qk_norm=True)
            mlp = Sublayer(("gate_proj", "up_proj", "down_proj"), qk_norm=False)
            self.add_module(stack, nn.ModuleList([attention, mlp]))
        self.state_update = nn.Module()
        self.state_update.gate = nn.Linear(D_MODEL, D_MODEL)
        self.state_update.gamma = nn.Parameter(torch.zeros(D_MODEL))
        self.final_norm = Norm(D_MODEL)
        self.lm_head = nn.Linear(D_MODEL, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight
        if modulation:
            self.modulation = Modulation()

    def loss(self, *, seed, num_loops=1):
        """Random linear and quadratic terms; a looped core enters once per loop."""
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            weight = torch.randn(parameter.shape, generator=generator)
            visits = num_loops if name.startswith("core_stack") else 1
            total = total + visits * ((parameter * weight).sum() + 0.1 * parameter.square().sum())
        return total


def build(*, config=MUON, seed=0, **kind):
    """Model and its optimizers."""
    torch.manual_seed(seed)
    model = StandIn(**kind)
    return model, Optimizers(model, config)


def train(model, optimizers, steps, *, num_loops=1):
    """Run steps with step-numbered losses."""
    for step in steps:
        model.loss(seed=step, num_loops=num_loops).backward()
        optimizers.clip_gradients()
        optimizers.step()
        optimizers.zero_grad()


def assert_equal_weights(first, second):
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


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
        ("visit_deltas.sublayers.0.q_proj.down", (2, 4, 8), "decayed"),
        ("visit_deltas.sublayers.0.q_proj.up", (2, 8, 4), "decayed"),
        ("visit_deltas.sublayers.0.norm", (2, 8), "undecayed"),
        ("visit_deltas.sublayers.0.post_norm", (2, 8), "undecayed"),
    ],
)
def test_b33_group_of_each_kind_of_parameter(name, shape, group):
    assert parameter_group(name, torch.empty(shape)) == group


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("adapter.weight", (8, 8)),
        ("core_stack.0.norm.weight", (8, 8)),
        ("core_stack.0.mixer.experts.weight", (4, 8, 8)),
        ("old_core_stack.0.mixer.q_proj.weight", (8, 8)),
        ("core_stack.0.mixer.router.weight", (4, 8)),
        ("visit_deltas.sublayers.0.scale", (2, 8)),
        ("final_norm.bias", (8,)),
    ],
)
def test_b33_unknown_parameter_is_refused_not_grouped(name, shape):
    with pytest.raises(ValueError, match="belongs to no optimizer group"):
        parameter_group(name, torch.empty(shape))


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
