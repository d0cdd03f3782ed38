"""Each state update against its formula, alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from depthdial.config import LoopConfig
from depthdial.layers.primitives import WideLinear
from depthdial.model.noise import truncated_normal
from depthdial.model.update import (
    UPDATES,
    GateParams,
    Injection,
    StateUpdate,
    UpdateModulation,
    adaptive_rate,
    initial_state,
)

D = 3
QUARTER = torch.tensor(0.25)
NO_MOD = UpdateModulation(None, None, loop_share=QUARTER)
PREV = torch.tensor([[[1.0, -2.0, 0.5]]])
CANDIDATE = torch.tensor([[[3.0, 1.0, 0.5]]])
INJECTED = torch.tensor([[[0.3, 0.2, -0.1]]])


def loop_config(name):
    return LoopConfig(update=name, gate_rank=2 if name == "decay_gate" else None)


WEIGHT = torch.tensor([[0.1, 0.2, 0.3], [0.0, -1.0, 2.0], [0.5, 0.5, 0.5]])
DOWN = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.4, -0.3]])
UP = torch.tensor([[0.2, 0.1], [-0.4, 0.3], [0.6, -0.5]])
BIAS = torch.tensor([0.1, -0.2, 0.3])


def wide_linear(weight, bias):
    """A gate's linear map with these values."""
    linear = WideLinear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


def gate_params(name="adaptive_delta", dtype=torch.float32):
    """What the update of this name reads; for the others what adaptive_delta reads."""
    thin = wide_linear(UP.to(dtype), BIAS.to(dtype))
    full = wide_linear(WEIGHT.to(dtype), BIAS.to(dtype))
    return GateParams(
        (lambda z: thin(F.linear(z, DOWN.to(dtype)))) if name == "decay_gate" else full,
        gamma=torch.tensor([0.0, 1.0, -1.0], dtype=dtype),
        rate=torch.tensor([0.05, 0.5, 1.0], dtype=dtype),
        log_decay=torch.tensor([-1.0, 0.0, 0.5], dtype=dtype),
    )


def apply(name, mod=NO_MOD, *, prev=PREV, candidate=CANDIDATE, injected=INJECTED, params=None):
    return UPDATES[name](prev, candidate, injected, params or gate_params(name), mod)


def scalar_beta(channel):
    """sigmoid(W z + b) * softplus(gamma) of one channel, in Python floats."""
    params = gate_params()
    z = INJECTED[0, 0].tolist()
    row = WEIGHT[channel].tolist()
    logit = sum(w * x for w, x in zip(row, z, strict=True)) + float(BIAS[channel])
    gamma = float(params.gamma[channel])
    return math.log1p(math.exp(gamma)) / (1 + math.exp(-logit))


# ---- formulas


def test_replace_takes_the_candidate():
    assert torch.equal(apply("replace"), CANDIDATE)


def test_residual_adds_the_candidate_itself_not_a_difference():
    assert torch.equal(apply("residual"), PREV + CANDIDATE)


def test_delta_moves_by_a_learned_rate_per_channel():
    expected = torch.tensor([[[1.0 + 0.05 * 2.0, -2.0 + 0.5 * 3.0, 0.5]]])
    torch.testing.assert_close(apply("delta"), expected, rtol=0, atol=1e-7)


def test_adaptive_delta_equals_the_scalar_formula():
    expected = [
        p + scalar_beta(j) * (r - p)
        for j, (p, r) in enumerate(zip(PREV[0, 0].tolist(), CANDIDATE[0, 0].tolist(), strict=True))
    ]
    torch.testing.assert_close(
        apply("adaptive_delta")[0, 0], torch.tensor(expected), rtol=0, atol=1e-6
    )


def test_the_gate_reads_the_injected_state_and_neither_previous_nor_candidate():
    rate = adaptive_rate(INJECTED, gate_params())[0, 0]
    expected = torch.tensor([scalar_beta(j) for j in range(D)])
    torch.testing.assert_close(rate, expected, rtol=0, atol=1e-6)


def test_beta_is_not_bounded_by_one():
    params = GateParams(wide_linear(WEIGHT, torch.full((D,), 20.0)), torch.full((D,), 5.0))
    assert adaptive_rate(torch.zeros(1, 1, D), params).min() > 4.9


# ---- conditioning


@pytest.mark.parametrize("name", ["replace", "delta", "adaptive_delta"])
def test_exit_gain_multiplies_the_rate(name):
    gain = torch.tensor([[[0.5, 2.0, -1.0]]])
    expected = PREV + gain * (apply(name) - PREV)
    moved = apply(name, UpdateModulation(gain, None, QUARTER))
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)


def test_exit_gain_multiplies_what_residual_adds():
    gain = torch.tensor([[[0.5, 2.0, -1.0]]])
    moved = apply("residual", UpdateModulation(gain, None, QUARTER))
    torch.testing.assert_close(moved, PREV + gain * CANDIDATE, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", UPDATES)
def test_gate_bypass_of_zero_changes_nothing(name):
    moved = apply(name, UpdateModulation(None, torch.tensor(0.0), QUARTER))
    torch.testing.assert_close(moved, apply(name), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", UPDATES)
def test_gate_bypass_per_row_takes_the_candidate_in_its_rows_only(name):
    prev, candidate, injected = (t.expand(2, 1, D) for t in (PREV, CANDIDATE, INJECTED))
    mod = UpdateModulation(None, torch.tensor([1.0, 0.0])[:, None, None], QUARTER)
    moved = apply(name, mod, prev=prev, candidate=candidate, injected=injected)
    assert torch.equal(moved[:1], CANDIDATE)
    torch.testing.assert_close(moved[1:], apply(name), rtol=0, atol=1e-7)


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", UPDATES)
def test_the_state_keeps_its_dtype(name, dtype):
    params = gate_params(name, dtype)
    states = [t.to(dtype) for t in (PREV, CANDIDATE, INJECTED)]
    assert UPDATES[name](*states, params, NO_MOD).dtype == dtype


def test_bf16_states_move_in_fp32_and_are_rounded_once():
    """In bf16 arithmetic the difference and the product would each be rounded on the way."""
    generator = torch.Generator().manual_seed(0)
    prev, candidate = torch.randn(2, 1, 1, 2000, generator=generator).to(torch.bfloat16)
    rate = torch.rand(2000, generator=generator)
    moved = UPDATES["delta"](prev, candidate, prev, GateParams(rate=rate), NO_MOD)
    exact = prev.double() + rate.double() * (candidate.double() - prev.double())
    rounded_on_the_way = prev + rate.to(torch.bfloat16) * (candidate - prev)
    assert (moved == exact.to(torch.bfloat16)).float().mean() > 0.99
    assert (rounded_on_the_way == exact.to(torch.bfloat16)).float().mean() < 0.9


# ---- module


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("replace", {}),
        ("residual", {}),
        ("delta", {"rate": (D,)}),
        ("adaptive_delta", {"gamma": (D,), "gate.weight": (D, D), "gate.bias": (D,)}),
        (
            "decay_gate",
            {"log_decay": (D,), "down.weight": (2, D), "up.weight": (D, 2), "up.bias": (D,)},
        ),
        ("damped", {}),
        ("anchored", {}),
    ],
)
def test_each_update_has_its_own_parameters_only(name, shapes):
    update = StateUpdate(D, loop_config(name))
    assert {n: tuple(p.shape) for n, p in update.named_parameters()} == shapes


@pytest.mark.parametrize("name", UPDATES)
def test_the_module_calls_the_function_of_its_name_with_its_parameters(name):
    update = StateUpdate(D, loop_config(name))
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    expected = UPDATES[name](PREV, CANDIDATE, INJECTED, update.params(), NO_MOD)
    assert torch.equal(update(PREV, CANDIDATE, INJECTED, NO_MOD), expected)


def test_delta_starts_at_the_configured_rate():
    update = StateUpdate(D, LoopConfig(update="delta", delta_init=0.2))
    assert torch.equal(update.rate, torch.full((D,), 0.2))


def first_state(positions, **loop):
    return initial_state(PREV, positions, LoopConfig(**loop))


def test_the_first_state_is_the_prelude_output():
    assert first_state(None) is PREV


def test_a_zero_first_state_has_the_shape_of_the_prelude_output():
    state_BTD = first_state(None, initial_state="zero", injection="concat")
    assert torch.equal(state_BTD, torch.zeros_like(PREV))


RANDOM = {"initial_state": "random", "random_state_std": 0.5, "injection": "concat"}


def test_a_random_first_state_depends_on_seed_and_position_alone():
    near, far = torch.tensor([[0, 1, 2]]), torch.tensor([[2, 5, 9]])
    h_in = torch.zeros(1, 3, D)
    config = LoopConfig(**RANDOM)
    near_state = initial_state(h_in, near, config)
    assert torch.equal(near_state[:, 2], initial_state(h_in, far, config)[:, 0])
    other = LoopConfig(**RANDOM, random_state_seed=1)
    assert not torch.allclose(near_state, initial_state(h_in, near, other))


def test_a_random_first_state_is_normal_and_cut_at_three_deviations():
    noise = truncated_normal(torch.arange(2000)[None], 50, seed=3, std=0.5)
    assert abs(float(noise.mean())) < 0.005
    # Variance of a unit normal cut at 3: 1 - 2 * 3 * pdf(3) / erf(3 / sqrt 2).
    assert float(noise.var()) == pytest.approx(0.25 * 0.97334, rel=0.01)
    assert float(noise.abs().max()) <= 1.5
    assert float((noise.abs() > 1.45).float().mean()) > 0


def test_neighbouring_positions_channels_and_seeds_are_uncorrelated():
    noise = truncated_normal(torch.arange(3000)[None], 40, seed=0, std=1.0)[0]
    other = truncated_normal(torch.arange(3000)[None], 40, seed=1, std=1.0)[0]
    for pair in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, other)):
        assert abs(float((pair[0] * pair[1]).mean())) < 0.015


def test_add_injection_adds_the_prelude_output_to_the_state():
    assert torch.equal(Injection(D, LoopConfig(injection="add"))(PREV, INJECTED), PREV + INJECTED)
    assert Injection(D, LoopConfig())(PREV, INJECTED) is PREV


def test_concat_injection_is_one_matrix_on_state_and_prelude_output():
    injection = Injection(D, LoopConfig(injection="concat"))
    weight = injection.adapter.weight
    expected = PREV @ weight[:, :D].T + INJECTED @ weight[:, D:].T
    torch.testing.assert_close(injection(PREV, INJECTED), expected, rtol=0, atol=1e-6)


def test_diagonal_injection_decays_the_state_and_adds_a_step_of_the_input():
    injection = Injection(D, LoopConfig(injection="diagonal"))
    with torch.no_grad():
        for parameter in injection.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    step = torch.nn.functional.softplus(injection.step_bias)
    decay = torch.exp(-step * torch.exp(injection.log_decay))
    expected = decay * PREV + step * (INJECTED @ injection.input.weight.T)
    torch.testing.assert_close(injection(PREV, INJECTED), expected, rtol=0, atol=1e-6)


def test_decay_gate_takes_a_share_of_the_difference_that_it_reads_from_it():
    update = StateUpdate(D, LoopConfig(update="decay_gate", gate_rank=2))
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    difference = CANDIDATE - PREV
    step = torch.nn.functional.softplus(
        difference @ update.down.weight.T @ update.up.weight.T + update.up.bias
    )
    alpha = torch.exp(-step * torch.exp(update.log_decay))
    moved = update(PREV, CANDIDATE, INJECTED, NO_MOD)
    expected = alpha * CANDIDATE + (1 - alpha) * PREV
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["damped", "anchored"])
def test_damped_updates_move_by_one_loop_s_share(name):
    mod = UpdateModulation(None, None, loop_share=torch.tensor(0.25))
    moved = StateUpdate(D, LoopConfig(update=name))(PREV, CANDIDATE, INJECTED, mod)
    torch.testing.assert_close(moved, 0.75 * PREV + 0.25 * CANDIDATE, rtol=0, atol=1e-6)


def test_one_loop_of_a_damped_update_is_the_candidate_bit_for_bit():
    mod = UpdateModulation(None, None, loop_share=torch.tensor(1.0))
    update = StateUpdate(D, LoopConfig(update="damped"))
    assert torch.equal(update(PREV, CANDIDATE, INJECTED, mod), CANDIDATE)
