"""Freezing and learning rates by pattern: names, groups, and weights that must not move."""

import shutil

import pytest
import torch

from depthdial.api.recipes import load_recipe
from depthdial.config import LoopConfig, LoopLoraConfig, ModelConfig, OptimConfig
from depthdial.model.checkpoint import load_model, read_config, save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.init_model import base_names, freeze
from depthdial.training.optim import Optimizers
from depthdial.training.patterns import check_patterns, lr_pattern
from depthdial.training.pretrain import train

CHAINS = {"task": "pointer_chain", "num_chains": 2, "chain_length": 3, "context": 42}
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


ADDED = {"state_update", "injection", "state_projection", "modulation", "loop_lora", "exit_gate",
         "prelude_norm"}  # fmt: skip
"""First parts of the names of what a config adds for its loops; and the gate between two loops'
keys, which stands inside the layers."""
MECHANISMS = {
    "untied head": {"tie_embeddings": False},
    "learned positions": {"positions": "learned", "rope_theta": 10_000.0},
    "no prelude, no coda": {"split": (0, 4, 0)},
    "unit lengths": {
        "norm": "ngpt", "ngpt": {"alpha_init": 0.3, "scale_std": 0.2}, "output_gate": True,
        "loop_lora": {"rank": 2, "sets_by_loop": (-1, 0)}, "loop": {"unit_norm": True},
    },
    "injections, windows": {
        "norm": "sandwich", "qk_norm": "rms", "attention_bias": "qkvo", "ff_bias": True,
        "prelude_norm": True, "value_embeddings": (0, 2), "exit_gate": "norm_linear",
        "loop": {"injection": "diagonal", "state_projection": True, "local_window": 4},
        "modulation": {"d_cond": 4, "rank": 2, "embed_dim": 4},
    },
    "concat, decay gate, time": {
        "loop": {"injection": "concat", "update": "decay_gate", "gate_rank": 2},
        "modulation": {"kind": "time_step", "embed_dim": 4}, "exit_gate": "linear",
    },
    "a core of another width": {
        "core_d_model": 24, "core_num_heads": 4, "tie_embeddings": False,
        "loop": {"injection": "diagonal", "initial_state": "zero", "state_projection": True},
        "logit_soft_cap": 9.0,
    },
    "segments": {"split": (2, 4, 2), "segments": (2, 2), "loop": {"update": "replace"}},
    "norm in the loop": {"split": (2, 4, 0), "final_norm": "loop"},
}  # fmt: skip


@pytest.mark.parametrize("changes", MECHANISMS.values(), ids=MECHANISMS)
def test_f09_the_base_is_all_but_what_a_config_adds_for_its_loops(changes):
    """A list of names forgot the untied head."""
    of = model(**changes)
    base = base_names(of.config)
    for name in names(of):
        is_added = name.partition(".")[0] in ADDED or ".mix_gate." in name
        assert (name in base) != is_added, name
    assert base <= set(names(of))


def test_f09_a_frozen_base_with_an_untied_head_keeps_every_bit():
    graft = model(tie_embeddings=False, positions="learned")
    frozen = freeze(graft, ["base"])
    assert {"lm_head.weight", "position_embedding.weight"} <= set(frozen)
    optimizers = Optimizers(graft, OptimConfig(lr=1e-2, weight_decay=0.5))
    before = {name: t.clone() for name, t in graft.state_dict().items()}
    for _ in range(2):
        assert step(graft, optimizers, num_loops=3) > 0
    for name, tensor in graft.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name in frozen), name


def test_f09_heal_text_keeps_the_base_of_a_model_with_an_untied_head(byte_base, tmp_path):
    config = read_config(byte_base).replace(
        tie_embeddings=False, loop={"update": "delta"}, split=(0, 6, 0), max_loops=4
    )
    start = shutil.copytree(byte_base, tmp_path / "start")
    save_model(LoopedLM(config, seed=1), start)
    heal = load_recipe("heal-text", {"train.init": str(start), "data": CHAINS, "train.steps": 2})
    run = train(heal, root=tmp_path).path
    trained = load_model(run / "checkpoints" / "step_2").state_dict()
    moved = {name for name, t in load_model(start).state_dict().items()
             if not torch.equal(t, trained[name])}  # fmt: skip
    assert moved == {"state_update.rate"}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_frozen_tensors_are_bit_equal_after_training_and_have_no_state(optimizer):
    """With decay: a frozen matrix must not shrink either."""
    graft = model()
    freeze(graft, BASE)
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
    freeze(graft, BASE)
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
    freeze(graft, BASE)
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
        ({"freeze": ("base", "core_*")}, r"'core_\*' has no effect: other patterns freeze all"),
        ({"freeze": ("bass",)}, "Did you mean 'base'"),
        ({"lr_by_pattern": {"base": 1e-3}}, "'base' matches none"),
    ],
)
def test_patterns_without_effect_or_in_conflict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_patterns(OptimConfig(**options), names(model()), base=base_names(model().config))


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
