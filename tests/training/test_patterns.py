"""Freezing and learning rates by pattern: names, groups, and weights that must not move."""

import pytest
import torch

from depthdial.config import LoopConfig, LoopLoraConfig, ModelConfig, OptimConfig
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.optim import Optimizers
from depthdial.training.patterns import check_patterns, freeze_parameters, lr_pattern

TOKENS = torch.arange(24).reshape(2, 12) % 32


def model(**changes) -> LoopedLM:
    config = ModelConfig(
        vocab_size=32, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=24, max_context=16, max_loops=3, tie_embeddings=True,
        loop=LoopConfig(gate_bypass="first_only"),
        loop_lora=LoopLoraConfig(rank=2, sets_by_loop=(-1, 0), norms=True),
    )  # fmt: skip
    return LoopedLM(config.replace(**changes))


def names(of: LoopedLM) -> list[str]:
    return [name for name, _ in of.named_parameters()]


BASE = ("embedding.*", "*_stack.*", "final_norm.*")


def step(of: LoopedLM, optimizers: Optimizers, *, num_loops: int) -> float:
    """One update on fixed tokens; its gradient norm."""
    optimizers.zero_grad()
    loss = of(TOKENS, num_loops=num_loops).logsumexp(dim=-1).mean()
    if loss.requires_grad:
        loss.backward()
    norm = optimizers.clip_gradients()
    optimizers.step()
    return norm


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_frozen_tensors_are_bit_equal_after_training_and_have_no_state(optimizer):
    """With decay: a frozen matrix must not shrink either."""
    graft = model()
    freeze_parameters(graft, BASE)
    optimizers = Optimizers(graft, OptimConfig(optimizer=optimizer, lr=1e-2, weight_decay=0.5))
    before = {name: t.clone() for name, t in graft.state_dict().items()}
    for _ in range(3):
        assert step(graft, optimizers, num_loops=3) > 0
    trained = {name for name, p in graft.named_parameters() if p.requires_grad}
    assert trained and all(n.startswith(("loop_lora", "state_update")) for n in trained)
    for name, tensor in graft.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in trained), name
    assert {n.split(".", 1)[1].rsplit(".", 1)[0] for n in optimizers.state_tensors()} == trained


def test_b33_a_step_leaves_what_no_pass_of_it_touches_as_it_was():
    """Everything trainable acts from the second pass on: no gradient, no decay, no moment."""
    graft = model(loop=LoopConfig(update="replace"))
    freeze_parameters(graft, BASE)
    optimizers = Optimizers(graft, OptimConfig(lr=1e-2, weight_decay=0.5))
    step(graft, optimizers, num_loops=2)
    before = {name: t.clone() for name, t in graft.state_dict().items()}
    state = {name: t.clone() for name, t in optimizers.state_tensors().items()}
    assert step(graft, optimizers, num_loops=1) == 0.0
    assert all(torch.equal(t, before[name]) for name, t in graft.state_dict().items())
    assert all(torch.equal(t, state[name]) for name, t in optimizers.state_tensors().items())


def test_b33_a_bypassed_rate_takes_a_step_of_gradient_zero():
    """It is in the graph of one loop, with no effect: AdamW's moments decay and carry it on."""
    graft = model(loop=LoopConfig(update="delta", gate_bypass="first_only"))
    freeze_parameters(graft, BASE)
    optimizers = Optimizers(graft, OptimConfig(lr=1e-2, weight_decay=0.0))
    step(graft, optimizers, num_loops=2)
    before = graft.state_update.rate.detach().clone()
    moment = next(t for n, t in optimizers.state_tensors().items() if n.endswith("rate.exp_avg"))
    first = moment.clone()
    assert step(graft, optimizers, num_loops=1) == 0.0
    assert not graft.state_update.rate.grad.any()
    assert not torch.equal(graft.state_update.rate, before)
    torch.testing.assert_close(moment, first * OptimConfig().betas[0])


def test_b33_a_pattern_rate_holds_for_exactly_the_parameters_it_matches():
    config = OptimConfig(
        lr=1e-2, adamw_lr=3e-3, lr_by_pattern={"loop_lora.*": 2e-2, "core_stack.*": 5e-3}
    )
    optimizers = Optimizers(model(), config)
    optimizers.set_lr_scale(0.5)
    by_name = {
        name: optimizers.learning_rates()[group]
        for group, members in optimizers.group_names().items()
        for name in members
    }
    assert sorted(by_name) == sorted(names(model()))
    for name, rate in by_name.items():
        pattern = lr_pattern(name, config)
        is_matrix = name.startswith(("prelude", "coda")) and name.endswith("_proj.weight")
        expected = config.lr_by_pattern[pattern] if pattern else (1e-2 if is_matrix else 3e-3)
        assert rate == 0.5 * expected, name


def test_b33_decay_of_a_pattern_group_is_that_of_its_own_group():
    optimizers = Optimizers(model(), OptimConfig(weight_decay=0.2, lr_by_pattern={"core_*": 1e-3}))
    decay = {name: group["weight_decay"] for name, group in optimizers._groups.items()}
    assert decay["undecayed:core_*"] == 0.0 and decay["matrices:core_*"] == 0.2


def test_b39_a_resumed_run_takes_new_pattern_rates_and_keeps_moments():
    first = Optimizers(model(), OptimConfig(lr_by_pattern={"core_*": 1e-3}))
    second = Optimizers(model(), OptimConfig(lr_by_pattern={"core_*": 7e-4, "coda_*": 1e-4}))
    for tensor in first.state_tensors().values():
        tensor.add_(1.0)
    second.load_state_tensors(first.state_tensors())
    assert second.learning_rates()["matrices:core_*"] == 7e-4
    assert all((t == 1.0).all() for t in second.state_tensors().values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ("core_stak.*",)}, r"'core_stak.\*' matches none of the \d+ .*core_stack"),
        ({"lr_by_pattern": {"head.*": 1e-3}}, "matches none"),
        (
            {"lr_by_pattern": {"core_*": 1e-3, "*.mixer.*": 1e-4}},
            r"matches both 'core_\*' and '\*\.mixer",
        ),
        ({"freeze": ("core_*",), "lr_by_pattern": {"core_*.norm.*": 1e-3}}, "frozen parameters"),
        ({"freeze": ("*",)}, "leaves nothing to train"),
    ],
)
def test_patterns_without_effect_or_in_conflict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_patterns(OptimConfig(**options), names(model()))


def test_patterns_with_effect_are_accepted():
    options = OptimConfig(freeze=("embedding.*", "prelude_stack.*"), lr_by_pattern={"core_*": 1e-3})
    check_patterns(options, names(model()))


EVERYTHING = (
    {"norm": "sandwich", "attention_bias": "qkvo", "ff_bias": True, "output_gate": True},
    {"norm": "post_sum", "loop": LoopConfig(injection="concat"), "exit_gate": "norm_linear"},
    {
        "loop": LoopConfig(injection="diagonal", state_projection=True, local_window=4),
        "value_embeddings": (0, 1, 2),
        "prelude_norm": True,
        "positions": "learned",
        "exit_gate": "linear",
    },
    {"loop": LoopConfig(update="decay_gate", gate_rank=2), "tie_embeddings": False},
)


@pytest.mark.parametrize("changes", EVERYTHING)
def test_b33_every_parameter_of_every_option_has_a_group(changes):
    of = model(**changes)
    optimizers = Optimizers(of, OptimConfig())
    held = [name for group in optimizers.group_names().values() for name in group]
    assert sorted(held) == sorted(names(of))
    assert all(n.endswith("_proj.weight") for n in optimizers.group_names()["matrices"])
