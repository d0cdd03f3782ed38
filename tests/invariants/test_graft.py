"""The late switch: new modulation changes nothing at first, and then everything trains."""

import copy

import pytest
import torch
import torch.nn.functional as F
from toys import MAX_LOOPS, VOCAB, toy_config, toy_tokens

from depthdial.config import ModulationConfig, OptimConfig
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.update import adaptive_rate
from depthdial.training.optim import Optimizers

TRAINS = True
HALF_LN2 = 0.34657359
MODULATION = ModulationConfig(d_cond=16, rank=4, embed_dim=16)
UPDATES = ("replace", "residual", "delta", "adaptive_delta")


def one_loop_model(*, seed: int = 0, **changes) -> LoopedLM:
    """A model as it is before the switch: no modulation, a gate that has moved from zero."""
    model = LoopedLM(toy_config(modulation=None, **changes), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.state_update.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def grafted_model(*, seed: int = 0, **changes) -> LoopedLM:
    model = one_loop_model(**changes)
    model.graft_modulation(MODULATION, seed=seed)
    return model


def loss_of(model, *, num_loops, seed=3):
    tokens = toy_tokens(3, 9, seed=seed)
    logits = model(tokens[:, :-1], num_loops=num_loops)
    return F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def backward(model, *, num_loops=MAX_LOOPS):
    model.zero_grad(set_to_none=True)
    loss_of(model, num_loops=num_loops).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sgd_step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def project_step(model):
    optimizers = Optimizers(model, OptimConfig(lr=1e-3, adamw_lr=1e-3))
    optimizers.clip_gradients()
    optimizers.step()


def is_closed_at_first(name):
    """Low-rank factors, the condition MLP and loop entry: behind a zero head or a zero rate."""
    return name.startswith("modulation.") and (
        name.endswith((".down", ".up")) or name.split(".")[1] in ("entry", "mlp_in", "mlp_out")
    )


# ---- initial gate


def test_beta_is_half_ln_2_everywhere_at_zero_init():
    model = LoopedLM(toy_config())
    rate = adaptive_rate(torch.randn(2, 5, 32) * 10, model.state_update.params())
    assert rate.shape == (2, 5, 32)
    assert (rate - HALF_LN2).abs().max() <= 1e-7


# ---- the graft changes no function and no old parameter


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("num_loops", range(1, MAX_LOOPS + 1))
def test_b13_grafted_logits_equal_the_one_loop_model_at_every_depth(update, num_loops):
    model = one_loop_model(**{"loop.update": update})
    tokens = toy_tokens(2, 8)
    with torch.no_grad():
        one_loop = model(tokens, num_loops=1)
        model.graft_modulation(MODULATION)
        assert (model(tokens, num_loops=num_loops) - one_loop).abs().max() <= 1e-6


def test_before_the_graft_a_second_loop_changes_the_logits():
    """Without this, the equality above could hold for a model whose loops do nothing."""
    model = one_loop_model()
    tokens = toy_tokens(2, 8)
    with torch.no_grad():
        difference = model(tokens, num_loops=2) - model(tokens, num_loops=1)
    assert difference.abs().max() > 1e-2


def test_graft_leaves_every_earlier_parameter_bit_equal_and_the_same_object():
    model = one_loop_model()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    model.graft_modulation(MODULATION)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], values[name]) for name in before)


def test_graft_is_a_pure_function_of_the_seed():
    first, again, other = (grafted_model(seed=s).modulation.state_dict() for s in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["core.0.down"], other["core.0.down"])
    assert not torch.equal(first["mlp_in.weight"], other["mlp_in.weight"])


def test_graft_does_not_read_the_global_random_state():
    torch.manual_seed(1)
    first = grafted_model().modulation.state_dict()
    torch.manual_seed(2)
    second = grafted_model().modulation.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_graft_equals_modulation_built_in_from_the_start():
    grafted = LoopedLM(toy_config(modulation=None), seed=4)
    grafted.graft_modulation(MODULATION, seed=4)
    built_in = LoopedLM(toy_config(modulation=MODULATION), seed=4)
    assert grafted.config == built_in.config
    expected = built_in.state_dict()
    assert grafted.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in grafted.state_dict().items())


def test_graft_takes_the_dtype_of_the_model():
    model = one_loop_model().to(torch.bfloat16)
    model.graft_modulation(MODULATION)
    assert {p.dtype for p in model.modulation.parameters()} == {torch.bfloat16}


def test_grafting_twice_is_refused():
    model = grafted_model()
    with pytest.raises(ValueError, match="grafted once"):
        model.graft_modulation(MODULATION)


def test_refused_graft_changes_nothing():
    model = grafted_model()
    modulation, config = model.modulation, model.config
    with pytest.raises(ValueError):
        model.graft_modulation(ModulationConfig(d_cond=8, rank=2, embed_dim=8))
    assert model.modulation is modulation
    assert model.config == config


# ---- gradients at the graft and one update later


def test_b13_factors_and_entry_have_exactly_zero_gradient_in_the_first_backward():
    gradients = backward(grafted_model())
    closed = [name for name in gradients if is_closed_at_first(name)]
    # 4 core and 4 coda sublayers with two factors, entry weight and bias, two MLP layers.
    assert len(closed) == 2 * (4 + 4) + 2 + 4
    assert all(gradients[name].count_nonzero() == 0 for name in closed)


def test_b13_heads_and_exit_have_a_gradient_in_the_first_backward():
    gradients = backward(grafted_model())
    open_names = [
        name for name in gradients if name.startswith("modulation") and not is_closed_at_first(name)
    ]
    assert len(open_names) == 2 * (4 + 4) + 2
    assert all(gradients[name].count_nonzero() > 0 for name in open_names)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("optimizer_step", [sgd_step, project_step])
def test_b13_every_new_tensor_has_a_gradient_after_one_update_at_full_depth(update, optimizer_step):
    model = grafted_model(**{"loop.update": update})
    backward(model)
    optimizer_step(model)
    gradients = backward(model)
    new = [name for name, _ in model.named_parameters() if name.startswith("modulation.")]
    still = [name for name in new if gradients[name].count_nonzero() == 0]
    assert not still


@pytest.mark.parametrize("optimizer_step", [sgd_step, project_step])
def test_b13_one_update_makes_full_depth_differ_from_one_loop(optimizer_step):
    model = grafted_model()
    backward(model)
    optimizer_step(model)
    tokens = toy_tokens(2, 8)
    with torch.no_grad():
        difference = model(tokens, num_loops=MAX_LOOPS) - model(tokens, num_loops=1)
    assert difference.abs().max() > 1e-4


def test_b13_two_updates_move_every_new_tensor():
    model = grafted_model()
    before = copy.deepcopy(model.modulation.state_dict())
    optimizers = Optimizers(model, OptimConfig(lr=1e-3, adamw_lr=1e-3, weight_decay=0.0))
    for _ in range(2):
        backward(model)
        optimizers.step()
    after = model.modulation.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_old_weights_get_no_gradient_from_later_loops_at_the_graft():
    model = grafted_model()
    full, one = backward(model), backward(model, num_loops=1)
    old = [name for name in full if not name.startswith("modulation.")]
    assert any(name.startswith("core_stack") for name in old)
    for name in old:
        assert torch.equal(full[name], one[name]), name


def test_core_weights_get_a_gradient_from_later_loops_after_one_update():
    model = grafted_model()
    backward(model)
    sgd_step(model)
    full, one = backward(model), backward(model, num_loops=1)
    name = "core_stack.0.mixer.q_proj.weight"
    assert not torch.equal(full[name], one[name])


def test_first_backward_at_one_loop_leaves_the_entry_without_gradient():
    """Entry conditions loops 2.. only: a run that never goes deeper never trains it."""
    model = grafted_model()
    backward(model, num_loops=1)
    sgd_step(model)
    gradients = backward(model, num_loops=1)
    assert gradients["modulation.entry.weight"].count_nonzero() == 0
    assert gradients["modulation.core.0.up"].count_nonzero() > 0
