"""Losses and gradients of published training steps, by the code that trains here.

LoopFormer's trajectory objective; Parcae's truncated backpropagation per sequence and per batch.
The READMEs of the golden cases say what the tensors mean.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from goldens import GOLDEN, Golden, close, open_golden
from torch import Tensor

from depthdial.config.recipe import ObjectiveConfig, TrajectoryConfig
from depthdial.data.packing import Batch
from depthdial.formats.families.registry import select_rules
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.losses import short_path
from depthdial.training.objective import TokenTerms, step_share, step_totals
from depthdial.training.step import LossModule, StepPlan, plan_rows

TRAINS = True
LOSS, RELATIVE = 2e-5, 1e-4
TRAJECTORY = ObjectiveConfig(trajectory=TrajectoryConfig())


def starting_from(model: LoopedLM, start_BTD: Tensor) -> LossModule:
    """Every row starts its loops from a state that the golden case gives."""
    hidden_states = model.hidden_states
    model.hidden_states = lambda call: hidden_states(replace(call, initial_state_BTD=start_BTD))
    return LossModule(model)


def run_step(
    module: LossModule, batch: Batch, plan: StepPlan, objective: ObjectiveConfig
) -> tuple[TokenTerms, float]:
    """Terms and loss of one step; gradients stay in the model."""
    rows = plan_rows(
        plan,
        slice(None),
        rows_per_slice=len(batch.tokens_BT) // len(plan.loops),
        is_conditioned=module.model.config.modulation is not None,
    )
    terms = module(batch, rows)
    loss = step_share(terms, batch, objective, step_totals(batch))
    loss.backward()
    return terms, float(loss.detach())


def gradients(case: Golden, model: LoopedLM) -> dict[str, Tensor]:
    """Gradients under the published names; the rules only move, cut and join."""
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for rule in select_rules(case.family.rules(case.config, case.values), case.source):
        if rule.our_names:
            found |= rule.to_source(ours.__getitem__)
    return found


def check_gradients(case: Golden, model: LoopedLM, prefix: str) -> None:
    """Every stored norm and every stored gradient."""
    found = gradients(case, model)
    norms = dict(stored(case, f"{prefix}grad_norm."))
    assert norms.keys() == found.keys() - {"lm_head.weight"}
    for name, expected in norms.items():
        norm = float(found[name].double().norm())
        assert norm == pytest.approx(float(expected), rel=RELATIVE, abs=1e-9), name
    for name, expected in stored(case, f"{prefix}grad."):
        scale = float(expected.abs().max())
        close(found[name].reshape(expected.shape), expected, RELATIVE * scale)


def stored(case: Golden, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in case.vectors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), value


@pytest.fixture(scope="module")
def loopformer() -> Golden:
    return open_golden("loopformer")


@pytest.fixture(scope="module")
def parcae() -> Golden:
    return open_golden("parcae")


def loopformer_step(case: Golden, *, is_mixed: bool) -> tuple[LoopedLM, TokenTerms, float]:
    """The README's step: eight equal loops, and the short path that it gives."""
    model = case.model()
    path = tuple(round(8 * float(step)) for step in case.vectors["steps_short"])
    assert sum(path) == 8
    plan = StepPlan((8, 8), (0, 0), (path, path), (0, 0), is_mixed=is_mixed)
    batch = Batch(case.vectors["input_ids"], case.vectors["targets"])
    return model, *run_step(LossModule(model), batch, plan, TRAJECTORY)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_loopformer_loss_terms(loopformer, is_mixed):
    """Once for the whole batch, once with steps and loop counts given row by row."""
    _, terms, loss = loopformer_step(loopformer, is_mixed=is_mixed)
    found = (terms.nll_BT, terms.short_nll_BT, terms.distance_BT)
    for name, value in zip(("long", "short", "consistency"), found, strict=True):
        assert float(value.mean()) == pytest.approx(
            float(loopformer.vectors[f"loss_{name}"]), abs=LOSS
        )
    assert loss == pytest.approx(float(loopformer.vectors["loss_total"]), abs=LOSS)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_loopformer_gradients(loopformer, is_mixed):
    """Without the stop-gradient on the long path they would be off by a percent."""
    model, _, _ = loopformer_step(loopformer, is_mixed=is_mixed)
    check_gradients(loopformer, model, "")


def test_loopformer_gradient_norms_of_groups(loopformer):
    model, _, _ = loopformer_step(loopformer, is_mixed=False)
    groups = {
        "adaLN": ("adaLN_modulation",),
        "attention": (".attn.",),
        "mlp": ("mlp.c_",),
        "final_norm": ("norm_f",),
        "position_embedding": ("wpe",),
        "token_embedding": ("wte",),
        "time_embedder": ("time_embedder",),
        "step_embedder": ("dt_embedder",),
    }
    found = gradients(loopformer, model)
    squares = dict.fromkeys([*groups, "all"], 0.0)
    for name, grad in found.items():
        if name == "lm_head.weight":
            continue
        [group] = [g for g, parts in groups.items() if any(part in name for part in parts)]
        square = float(grad.double().square().sum())
        squares[group] += square
        squares["all"] += square
    for group in groups:
        expected = float(loopformer.vectors[f"grad_norm_group.{group}"])
        assert squares[group] ** 0.5 == pytest.approx(expected, rel=RELATIVE), group
    total = float(loopformer.vectors["grad_norm_total"])
    assert squares["all"] ** 0.5 == pytest.approx(total, rel=RELATIVE)


def test_loopformer_short_paths_have_the_published_distribution():
    """Length U{1..7}; of paths of length 4: mean steps 3.0, 2.0, 1.5, 1.5 eighths."""
    recorded = [
        tuple(path)
        for entry in json.loads((GOLDEN / "loopformer" / "short_paths.json").read_text())
        if entry["max_loops"] == 8
        for path in entry["paths"]
    ]
    ours = [short_path(0, step=step, draw_idx=0, num_loops=8) for step in range(8000)]
    for paths in (recorded, ours):
        assert all(sum(path) == 8 and min(path) >= 1 and len(path) < 8 for path in paths)
    assert {len(path) for path in ours} == set(range(1, 8))
    for length in range(1, 8):
        share = sum(len(path) == length for path in ours) / len(ours)
        assert share == pytest.approx(1 / 7, abs=0.02)
    fours = torch.tensor([path for path in ours if len(path) == 4], dtype=torch.float64)
    close(fours.mean(dim=0), torch.tensor([3.0, 2.0, 1.5, 1.5], dtype=torch.float64), 0.1)
    # Every kind of path that the published sampler drew can be drawn here too.
    assert {path for path in recorded if len(path) <= 3} <= set(ours)


def parcae_step(case: Golden, plan: StepPlan) -> tuple[LoopedLM, float]:
    model = case.model()
    loss_module = starting_from(model, case.vectors["initial_state"])
    batch = Batch(case.vectors["input_ids"], case.vectors["labels"])
    _, loss = run_step(loss_module, batch, plan, ObjectiveConfig())
    return model, loss


def test_parcae_step_with_depths_per_sequence(parcae):
    """n loops without and k with gradient, drawn for each row."""
    n, k = parcae.vectors["train_n"], parcae.vectors["train_k"]
    plan = StepPlan(tuple((n + k).tolist()), tuple(n.tolist()))
    model, loss = parcae_step(parcae, plan)
    assert loss == pytest.approx(float(parcae.vectors["train_loss"]), abs=LOSS)
    check_gradients(parcae, model, "")


@pytest.mark.parametrize("is_mixed", [False, True])
def test_parcae_step_with_one_depth_for_the_batch(parcae, is_mixed):
    n, k = parcae.vectors["train_pair"].tolist()
    model, loss = parcae_step(parcae, StepPlan((n + k,) * 2, (n,) * 2, is_mixed=is_mixed))
    assert loss == pytest.approx(float(parcae.vectors["train_pair_loss"]), abs=LOSS)
    check_gradients(parcae, model, "pair_")


def test_parcae_gradients_tell_the_truncation_apart(parcae):
    """A full gradient, or one loop more, misses the stored norms by far."""
    n, k = parcae.vectors["train_pair"].tolist()
    for no_grad in (0, n - 1, n + 1):
        model, _ = parcae_step(parcae, StepPlan((n + k,) * 2, (no_grad,) * 2))
        with pytest.raises(AssertionError):
            check_gradients(parcae, model, "pair_")
