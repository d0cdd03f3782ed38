"""Adapters, gates and conditioning on pretrained models: where they start, and that they act."""

import math

import pytest
import torch
import torch.nn.functional as F
from goldens import close, open_golden, states_of

from depthdial.config import ModulationConfig
from depthdial.convert.base_model import CoreRange
from depthdial.convert.convert import convert_model
from depthdial.convert.grafts import published_decay_gate
from depthdial.convert.methods import read_options
from depthdial.model.looped_lm import LoopedLM

WINDOW = CoreRange(2, 5)
SMALL = {"d_cond": 8, "rank": 4}
LOOPED = ("ouro", "nanbeige", "dory", "huginn", "parcae", "iquest-loop")
"""Golden cases whose every pass replaces the state."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def golden(request):
    return open_golden(request.param)


@pytest.fixture(scope="module")
def llama():
    return open_golden("llama")


@pytest.fixture(scope="module", params=LOOPED)
def looped(request):
    return open_golden(request.param)


def convert(golden, method, core_range=WINDOW, seed=0, **options):
    return convert_model(
        golden.model().eval(),
        golden.vectors["input_ids"],
        method=method,
        core_range=core_range,
        options=read_options(method, options),
        seed=seed,
    )


def elastic(golden, **options):
    return convert(golden, "elastic-fixed", core_range=None, **options)


def shake(model, part, scale=0.1):
    generator = torch.Generator().manual_seed(5)
    for parameter in model.get_submodule(part).parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


# ---- retrofitted-recurrence


@pytest.mark.parametrize("initial_state", ["prelude", "zero", "random"])
@pytest.mark.parametrize("k", [1, 3])
def test_the_adapter_starts_by_passing_the_prelude_through(golden, initial_state, k):
    model = convert(golden, "retrofitted-recurrence", initial_state=initial_state).model
    assert model.config.loop.initial_state == initial_state
    close(model(golden.vectors["input_ids"], num_loops=k), golden.vectors["logits"], 1e-4)


def test_the_random_state_has_the_published_scale(llama):
    loop = convert(llama, "retrofitted-recurrence", initial_state="random").model.config.loop
    assert loop.random_state_std == pytest.approx(math.sqrt(2 / (5 * 32)))


def test_the_state_enters_as_soon_as_the_adapter_lets_it(llama):
    model = convert(llama, "retrofitted-recurrence").model
    model.injection.adapter.weight[:, :32] += 0.1 * torch.eye(32)
    x = llama.vectors["input_ids"]
    assert not torch.allclose(model(x, num_loops=1), model(x, num_loops=2))


def test_dropped_layers_are_dropped_from_the_middle_and_promise_nothing(llama):
    """Kept: the lowest below the core, the highest above it."""
    result = convert(llama, "retrofitted-recurrence", prelude=1, coda=0)
    base, model = llama.model(), result.model
    assert model.config.split == (2, 6, 0)
    assert torch.equal(
        model.prelude_stack[0].mixer.q_proj.weight, base.core_stack[0].mixer.q_proj.weight
    )
    assert torch.equal(
        model.core_stack[0].mixer.q_proj.weight, base.core_stack[4].mixer.q_proj.weight
    )
    assert result.converted.promises == "none"
    assert result.converted.why_not == "2 layers were dropped"
    layers = result.comparisons[0].layers
    assert [x.layer for x in layers] == [0, 2, 3, 4]
    assert layers[0].max_abs == 0 < layers[1].max_abs


def test_more_layers_than_there_are_cannot_be_kept(llama):
    with pytest.raises(ValueError, match="prelude=3, but the base has 2 layers below the core 2:5"):
        convert(llama, "retrofitted-recurrence", prelude=3)


# ---- decay-gate


def test_the_published_start_of_the_gate():
    """log_decay = log(1..D); up within rank^-1/2; steps log-uniform in [1e-3, 1e-1]."""
    gate = published_decay_gate(512, 32, seed=0)
    close(gate["state_update.log_decay"].exp(), torch.arange(1.0, 513), 1e-3)
    up = gate["state_update.up.weight"]
    assert 0.99 * 32**-0.5 < up.abs().max() <= 32**-0.5
    steps = F.softplus(gate["state_update.up.bias"])
    assert 1e-3 <= steps.min() < 2e-3 and 0.05 < steps.max() <= 0.1 + 1e-6
    # Half of a log-uniform sample lies below the geometric mean of its range.
    assert abs((steps < 1e-2).float().mean() - 0.5) < 0.1


def test_most_channels_of_the_published_start_reject_the_core():
    """extensions.md, LoopUS pitfall 1: alpha < 0.05 in 70 % of the channels at width 2048."""
    gate = published_decay_gate(2048, 128, seed=0)
    step = F.softplus(gate["state_update.up.bias"])
    alpha = torch.exp(-step * gate["state_update.log_decay"].exp())
    assert 0.6 < (alpha < 0.05).float().mean() < 0.8


def test_the_literal_gate_promises_nothing_and_its_seed_matters(llama):
    first = convert(llama, "decay-gate")
    assert (first.converted.promises, first.comparisons[0].is_close) == ("none", False)
    again, other = convert(llama, "decay-gate"), convert(llama, "decay-gate", seed=1)
    weights = [x.model.state_update.up.weight for x in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_gate_has_a_sixteenth_of_the_width_unless_told(llama):
    assert convert(llama, "decay-gate").model.state_update.down.weight.shape == (2, 32)
    model = convert(llama, "decay-gate-ungated-first", gate_rank=5).model
    assert model.state_update.down.weight.shape == (5, 32)


def test_the_ungated_first_variant_is_the_base_at_one_loop_and_nearly_open_later(golden):
    result = convert(golden, "decay-gate-ungated-first")
    x = golden.vectors["input_ids"]
    assert torch.equal(result.model(x, num_loops=1), golden.model()(x, num_loops=1))
    shake(result.model, "state_update", scale=1.0)
    assert torch.equal(result.model(x, num_loops=1), golden.model()(x, num_loops=1))
    states = states_of(convert(golden, "decay-gate-ungated-first").model, x, 2)
    rigid = states_of(convert(golden, "loop-window").model, x, 2)
    close(states[1], states[0] + 0.95 * (rigid[1] - states[0]), 1e-4)


# ---- elr-graft


@pytest.mark.parametrize("start", ["ungated_first", "beta_one"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_graft_keeps_the_base_at_every_loop_count(golden, start, k):
    model = convert(golden, "elr-graft", start=start, **SMALL).model
    close(model(golden.vectors["input_ids"], num_loops=k), golden.vectors["logits"], 1e-4)


def test_ungated_first_is_the_base_bit_for_bit_at_one_loop(golden):
    model, x = convert(golden, "elr-graft", **SMALL).model, golden.vectors["input_ids"]
    assert torch.equal(model(x, num_loops=1), golden.model()(x, num_loops=1))


def test_the_plain_start_does_not_keep_the_base(golden):
    result = convert(golden, "elr-graft", start="plain", **SMALL)
    assert (result.converted.promises, result.converted.why_not[:27]) == (
        "none",
        "the gate starts at 0.3466 i",
    )
    assert result.comparisons[0].max_abs > 0.1


def test_the_heads_of_the_graft_act_on_core_and_coda(llama):
    model, x = convert(llama, "elr-graft", **SMALL).model, llama.vectors["input_ids"]
    before = model(x, num_loops=2)
    for part in ("modulation.core.0.heads", "modulation.coda.0.heads", "modulation.exit"):
        shake(model, part)
        after = model(x, num_loops=2)
        assert not torch.allclose(after, before)
        before = after


def test_widths_of_the_conditioning_are_options(llama):
    modulation = convert(llama, "elr-graft", **SMALL).model.config.modulation
    assert (modulation.d_cond, modulation.rank, modulation.neutral) == (8, 4, "one_loop")


# ---- elastic-fixed


def test_a_looped_model_keeps_its_function_at_its_own_loop_count(looped):
    result, x = elastic(looped, **conditioning(looped)), looped.vectors["input_ids"]
    k = looped.config.num_loops
    assert result.converted.pairs[0] == (k, k)
    close(result.model(x, num_loops=k), looped.model()(x, num_loops=k), 1e-4)
    assert result.model.config.loop.update == "adaptive_delta"


def conditioning(golden):
    return {"rank": 4} if golden.config.norm == "ngpt" else SMALL


@pytest.mark.parametrize("part", ["state_update", "modulation.entry", "modulation.exit"])
def test_gate_and_conditioning_of_a_looped_model_act(part):
    golden = open_golden("ouro")
    model, x = elastic(golden, **SMALL).model, golden.vectors["input_ids"]
    before = model(x, num_loops=4)
    shake(model, part)
    assert not torch.allclose(model(x, num_loops=4), before)


def test_a_normalised_model_gets_stored_differences(looped):
    config = elastic(looped, **conditioning(looped)).model.config
    is_normalised = looped.config.norm == "ngpt"
    assert (config.modulation is None, config.loop_lora is not None) == (
        is_normalised,
        is_normalised,
    )
    if is_normalised:
        assert config.loop_lora.sets_by_loop == tuple(range(looped.config.max_loops))


def test_stored_differences_can_be_asked_for(llama):
    golden = open_golden("ouro")
    model = elastic(golden, conditioning="loop_lora", rank=3).model
    x = golden.vectors["input_ids"]
    close(model(x, num_loops=4), golden.vectors["logits_k4"], 1e-4)
    assert model.loop_lora.sublayers[0].q_proj.down.shape[:2] == (4, 3)
    assert torch.equal(model.loop_lora.sublayers[0].norm[3], model.core_stack[0].norm.weight)


def test_more_loops_than_the_base_was_trained_for_can_be_meant():
    golden = open_golden("ouro")
    config = elastic(golden, max_loops=6, **SMALL).model.config
    assert (config.num_loops, config.max_loops) == (golden.config.num_loops, 6)
    with pytest.raises(ValueError, match="max_loops=2 is below the 4 loops"):
        elastic(golden, max_loops=2, **SMALL)


def test_a_trained_budget_keeps_its_limit():
    """Its conditioning reads k / max_loops: another limit is another function at every k."""
    config = open_golden("ouro").config.replace(modulation=ModulationConfig(d_cond=8, rank=2))
    options = read_options("elastic-fixed", {"max_loops": 2 * config.max_loops})
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"was trained on k / .*would change every budget"):
        convert_model(
            LoopedLM(config), tokens, method="elastic-fixed", core_range=None, options=options
        )


def test_a_gate_of_its_own_is_kept_and_only_conditioning_is_added():
    golden = open_golden("loopus")
    model = elastic(golden, **SMALL).model
    assert model.config.loop.update == golden.config.loop.update == "decay_gate"
    assert torch.equal(model.state_update.log_decay, golden.model().state_update.log_decay)
    assert model.config.modulation.neutral == "every_loop"


def test_conditioning_of_its_own_is_kept_and_only_a_gate_is_added():
    golden = open_golden("loopformer")
    model = elastic(golden).model
    assert model.config.modulation == golden.config.modulation
    with pytest.raises(ValueError, match="conditioned on its loops already"):
        elastic(golden, rank=3)


def test_a_model_that_is_elastic_already_is_refused(llama):
    grafted = convert(llama, "elr-graft", **SMALL)
    with pytest.raises(ValueError, match="there is nothing to graft"):
        convert_model(
            grafted.model,
            llama.vectors["input_ids"],
            method="elastic-fixed",
            core_range=None,
            options=read_options("elastic-fixed", {}),
        )


def test_a_dense_model_is_refused(llama):
    with pytest.raises(ValueError, match="this base runs its layers once"):
        elastic(llama)


def test_options_of_modulation_have_no_effect_on_stored_differences():
    with pytest.raises(ValueError, match="d_cond=8 has no effect with conditioning='loop_lora'"):
        read_options("elastic-fixed", {"conditioning": "loop_lora", "d_cond": 8})
    with pytest.raises(ValueError, match="d_cond=8 has no effect: the sublayers of this base"):
        elastic(open_golden("dory"), d_cond=8)


def test_the_open_gate_stays_open_in_narrow_weights():
    """gamma rounded to bf16 gives beta = 0.9974, which three passes would show."""
    golden = open_golden("ouro")
    base, x = golden.model().eval().to(torch.bfloat16), golden.vectors["input_ids"]
    result = convert_model(
        base,
        x,
        method="elastic-fixed",
        core_range=None,
        options=read_options("elastic-fixed", SMALL),
    )
    assert result.comparisons[0].max_abs < 1e-4
    assert result.model.state_update.gamma.dtype == torch.float32
    assert torch.equal(result.model(x, num_loops=4), base(x, num_loops=4))
