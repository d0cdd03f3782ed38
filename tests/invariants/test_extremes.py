"""Guards in low precision (B14): extreme parameters and states give finite numbers.

ELR bounds neither beta nor the modulation, so no claim is made about chains of extremes: at 1e4
everywhere the modulation alone multiplies five matrices and leaves float32. The claims are: one
update with all its parameters extreme, one sublayer with all conditioning values extreme, and a
whole model with the update, or any one modulation tensor, extreme.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import MAX_LOOPS, VOCAB, toy_config, toy_tokens

from depthdial.config import LoopConfig
from depthdial.layers.feed_forward import SwiGLU
from depthdial.layers.primitives import LowRankPair, RMSNorm, WideLinear
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.sublayer import Sublayer, SublayerModulation
from depthdial.model.update import (
    UPDATES,
    EntryModulation,
    GateParams,
    StateUpdate,
    UpdateModulation,
    adaptive_rate,
    enter,
)

TRAINS = True
D, R = 32, 4
PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16 weights": (torch.bfloat16, False),
    "bfloat16 autocast": (torch.float32, True),
}
SIGNS = (1e4, -1e4)
INPUTS = (0.0, 1e3)


def all_finite(tensors):
    return all(bool(torch.isfinite(t).all()) for t in tensors if t is not None)


def leaf(value, dtype, shape=(1, 2, D)):
    return torch.full(shape, value, dtype=dtype, requires_grad=True)


def loop_config(name):
    return LoopConfig(update=name, gate_rank=4 if name == "decay_gate" else None)


def extreme_update(name, value, dtype):
    update = StateUpdate(D, loop_config(name)).to(dtype)
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.fill_(value)
    return update


# ---- one update


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", UPDATES)
def test_b14_one_update_and_its_gradients_are_finite(name, precision):
    dtype, autocast = PRECISIONS[precision]
    for value, size, gain, bypass in itertools.product(
        SIGNS, INPUTS, (None, 0.0, *SIGNS), (None, 0.0, 1.0)
    ):
        update = extreme_update(name, value, dtype)
        prev, candidate, injected = leaf(size, dtype), leaf(-size, dtype), leaf(size, dtype)
        exit_gain = None if gain is None else leaf(gain, dtype, (1, 1, D))
        bypass_gain = None if bypass is None else torch.tensor(bypass)
        mod = UpdateModulation(exit_gain, bypass_gain, loop_share=torch.tensor(0.5))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            following = update(prev, candidate, injected, mod)
        following.float().sum().backward()
        gradients = [t.grad for t in (prev, candidate, injected, *update.parameters())]
        assert all_finite([following, *gradients]), (value, size, gain, bypass)


def wide_linear(weight, bias):
    """A gate's linear map with these values."""
    linear = WideLinear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", INPUTS)
@pytest.mark.parametrize("value", SIGNS)
def test_b14_sigmoid_factor_saturates_at_exactly_0_and_1(dtype, size, value):
    weight, bias = torch.full((D, D), value, dtype=dtype), torch.full((D,), value, dtype=dtype)
    params = GateParams(wide_linear(weight, bias), torch.zeros(D))
    rate = adaptive_rate(torch.full((1, 2, D), size, dtype=dtype), params)
    saturated = float(value > 0)
    assert torch.equal(rate, (saturated * F.softplus(params.gamma)).expand_as(rate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b14_softplus_is_zero_below_and_linear_above(dtype):
    injected = torch.zeros(1, 1, D, dtype=dtype)
    zero = torch.zeros(D, dtype=dtype)
    for gamma, expected in ((-1e4, 0.0), (1e4, 5e3)):
        gate = wide_linear(torch.zeros(D, D, dtype=dtype), zero)
        params = GateParams(gate, torch.full((D,), gamma))
        rate = adaptive_rate(injected, params)
        assert torch.equal(rate, torch.full_like(rate, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["replace", "delta"])
def test_b14_a_rate_of_one_gives_exactly_the_candidate(name, dtype):
    prev, candidate = torch.randn(2, 1, 3, D).mul(1e3).to(dtype)
    params = GateParams(rate=torch.ones(D, dtype=dtype))
    mod = UpdateModulation(torch.ones(1, 1, D, dtype=dtype), None)
    assert torch.equal(UPDATES[name](prev, candidate, prev, params, mod), candidate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["replace", "delta", "adaptive_delta", "residual"])
def test_b14_an_exit_gain_of_zero_keeps_exactly_the_state(name, dtype):
    prev, candidate = torch.randn(2, 1, 3, D).mul(1e3).to(dtype)
    params = extreme_update(name, 1e4, dtype).params()
    mod = UpdateModulation(torch.zeros(1, 1, D, dtype=dtype), None)
    assert torch.equal(UPDATES[name](prev, candidate, prev, params, mod), prev)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["replace", "delta", "adaptive_delta", "residual"])
@pytest.mark.parametrize("gain", [None, 1e4])
def test_b14_gate_bypass_gives_exactly_the_candidate_whatever_the_gate(name, dtype, gain):
    prev, candidate = torch.randn(2, 1, 3, D).mul(1e3).to(dtype)
    params = extreme_update(name, 1e4, dtype).params()
    exit_gain = None if gain is None else torch.full((1, 1, D), gain, dtype=dtype)
    mod = UpdateModulation(exit_gain, torch.tensor(1.0))
    assert torch.equal(UPDATES[name](prev, candidate, prev, params, mod), candidate)


# ---- one modulated sublayer


@pytest.mark.parametrize("precision", PRECISIONS)
def test_b14_modulated_sublayer_is_finite_at_extreme_conditioning(precision):
    dtype, autocast = PRECISIONS[precision]
    sublayer = Sublayer(RMSNorm(D, 1e-6), SwiGLU(D, 48), letter="F").to(dtype)
    for value, size in itertools.product(SIGNS, INPUTS):
        wide = [leaf(value, dtype, (1, 1, D)) for _ in range(3)]
        low_rank_gain = leaf(value, dtype, (1, 1, R))
        down, up = (torch.randn(R, D) / D**0.5).to(dtype), (torch.randn(D, R) / R**0.5).to(dtype)
        mod = SublayerModulation(*wide, low_rank_gain, LowRankPair(down, up))
        x = leaf(size, dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = sublayer(x, mod=mod, slot=None, ctx=None)
        y.float().sum().backward()
        gradients = [t.grad for t in (x, *wide, low_rank_gain, *sublayer.parameters())]
        assert all_finite([y, *gradients]), (value, size)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_b14_loop_entry_is_finite_at_extreme_conditioning(precision):
    dtype, autocast = PRECISIONS[precision]
    for value, size in itertools.product(SIGNS, INPUTS):
        entry = EntryModulation(*(leaf(value, dtype, (1, 1, D)) for _ in range(4)))
        state, h_in = leaf(size, dtype), leaf(size, dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            z = enter(state, h_in, entry, eps=1e-6)
        z.float().sum().backward()
        gradients = [t.grad for t in (state, h_in, *entry)]
        assert all_finite([z, *gradients]), (value, size)


# ---- whole models


def model_is_finite(model, *, num_loops, autocast):
    tokens = toy_tokens(1, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1], num_loops=num_loops)
    F.cross_entropy(logits.float().reshape(-1, VOCAB), tokens[0, 1:]).backward()
    return all_finite([logits, *(p.grad for p in model.parameters())])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("value", SIGNS)
def test_b14_model_with_an_extreme_update_is_finite_at_every_depth(name, value, precision):
    dtype, autocast = PRECISIONS[precision]
    for num_loops in range(1, MAX_LOOPS + 1):
        model = LoopedLM(toy_config(modulation=None, loop=loop_config(name))).to(dtype)
        model.state_update = extreme_update(name, value, dtype)
        assert model_is_finite(model, num_loops=num_loops, autocast=autocast), num_loops


MODULATION_TENSORS = [
    f"modulation.{name}"
    for name, _ in LoopedLM(toy_config(split=(0, 1, 1))).modulation.named_parameters()
]


@pytest.mark.parametrize("name", MODULATION_TENSORS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_b14_model_with_one_extreme_modulation_tensor_is_finite(name, precision):
    dtype, autocast = PRECISIONS[precision]
    for value in SIGNS:
        model = LoopedLM(toy_config()).to(dtype)
        with torch.no_grad():
            model.get_parameter(name).fill_(value)
        assert model_is_finite(model, num_loops=MAX_LOOPS, autocast=autocast), value
