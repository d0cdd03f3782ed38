"""Each state update against its formula, alone."""

import math

import pytest
import torch

from depthdial.config import LoopConfig
from depthdial.model.update import (
    UPDATES,
    GateParams,
    StateUpdate,
    UpdateModulation,
    adaptive_rate,
    initial_state,
    inject,
)

D = 3
NO_MOD = UpdateModulation(None, None)
PREV = torch.tensor([[[1.0, -2.0, 0.5]]])
CANDIDATE = torch.tensor([[[3.0, 1.0, 0.5]]])
INJECTED = torch.tensor([[[0.3, 0.2, -0.1]]])


def gate_params():
    return GateParams(
        weight=torch.tensor([[0.1, 0.2, 0.3], [0.0, -1.0, 2.0], [0.5, 0.5, 0.5]]),
        bias=torch.tensor([0.1, -0.2, 0.3]),
        gamma=torch.tensor([0.0, 1.0, -1.0]),
        rate=torch.tensor([0.05, 0.5, 1.0]),
    )


def apply(name, mod=NO_MOD, *, prev=PREV, candidate=CANDIDATE, injected=INJECTED, params=None):
    return UPDATES[name](prev, candidate, injected, params or gate_params(), mod)


def scalar_beta(channel):
    """sigmoid(W z + b) * softplus(gamma) of one channel, in Python floats."""
    params = gate_params()
    z = INJECTED[0, 0].tolist()
    row = params.weight[channel].tolist()
    logit = sum(w * x for w, x in zip(row, z, strict=True)) + float(params.bias[channel])
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
    params = gate_params()._replace(gamma=torch.full((D,), 5.0), bias=torch.full((D,), 20.0))
    assert adaptive_rate(torch.zeros(1, 1, D), params).min() > 4.9


# ---- conditioning


@pytest.mark.parametrize("name", ["replace", "delta", "adaptive_delta"])
def test_exit_gain_multiplies_the_rate(name):
    gain = torch.tensor([[[0.5, 2.0, -1.0]]])
    expected = PREV + gain * (apply(name) - PREV)
    moved = apply(name, UpdateModulation(gain, None))
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)


def test_exit_gain_multiplies_what_residual_adds():
    gain = torch.tensor([[[0.5, 2.0, -1.0]]])
    moved = apply("residual", UpdateModulation(gain, None))
    torch.testing.assert_close(moved, PREV + gain * CANDIDATE, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", UPDATES)
def test_gate_bypass_of_zero_changes_nothing(name):
    moved = apply(name, UpdateModulation(None, torch.tensor(0.0)))
    torch.testing.assert_close(moved, apply(name), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", UPDATES)
def test_gate_bypass_per_row_takes_the_candidate_in_its_rows_only(name):
    prev, candidate, injected = (t.expand(2, 1, D) for t in (PREV, CANDIDATE, INJECTED))
    mod = UpdateModulation(None, torch.tensor([1.0, 0.0])[:, None, None])
    moved = apply(name, mod, prev=prev, candidate=candidate, injected=injected)
    assert torch.equal(moved[:1], CANDIDATE)
    torch.testing.assert_close(moved[1:], apply(name), rtol=0, atol=1e-7)


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", UPDATES)
def test_the_state_keeps_its_dtype(name, dtype):
    params = GateParams(*(t.to(dtype) for t in gate_params()))
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
    ],
)
def test_each_update_has_its_own_parameters_only(name, shapes):
    update = StateUpdate(D, LoopConfig(update=name))
    assert {n: tuple(p.shape) for n, p in update.named_parameters()} == shapes


@pytest.mark.parametrize("name", UPDATES)
def test_the_module_calls_the_function_of_its_name_with_its_parameters(name):
    update = StateUpdate(D, LoopConfig(update=name))
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    expected = UPDATES[name](PREV, CANDIDATE, INJECTED, update.params(), NO_MOD)
    assert torch.equal(update(PREV, CANDIDATE, INJECTED, NO_MOD), expected)


def test_delta_starts_at_the_configured_rate():
    update = StateUpdate(D, LoopConfig(update="delta", delta_init=0.2))
    assert torch.equal(update.rate, torch.full((D,), 0.2))


def test_the_first_state_is_the_prelude_output():
    assert initial_state(PREV) is PREV


def test_reinjection_adds_the_prelude_output_to_the_state():
    assert torch.equal(inject(PREV, INJECTED, reinject=True), PREV + INJECTED)
    assert inject(PREV, INJECTED, reinject=False) is PREV
