"""No objective trains an exit gate: it is refused in new models, and stale in trained ones."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from depthdial.config import Recipe
from depthdial.engine.generate import generate
from depthdial.formats.hf_export import export_hf
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_model_folder
from depthdial.model.checkpoint import load_model, read_config, save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.stopping_rules import STOPPING_RULES, stopping_rule
from depthdial.training.pretrain import resume, train

GOLDEN = Path(__file__).parents[1] / "golden"
CHAINS = {"task": "pointer_chain", "num_chains": 2, "chain_length": 3, "context": 42}


@pytest.fixture(scope="module")
def gated(byte_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a trained gate."""
    folder = shutil.copytree(byte_base, tmp_path_factory.mktemp("gated") / "model")
    config = read_config(folder).replace(exit_gate="norm_linear", **{"loop.update": "replace"})
    save_model(LoopedLM(config, seed=0), folder, trained_loops=(1, 2, 3))
    return folder


def recipe(gated: Path, **changes) -> Recipe:
    values = {
        "name": "run",
        "data": CHAINS,
        "depth": {"sampler": "listed", "listed_loops": [1, 2]},
        "train": {"init": str(gated), "steps": 2, "batch_size": 4, "val_rows": 2,
                  "checkpoint_every": 1, "keep_checkpoints": 9, "precision": "fp32"},
    }  # fmt: skip
    return Recipe.from_dict(values).replace(**changes)


@pytest.fixture(scope="module")
def trained(gated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its run of two steps."""
    return train(recipe(gated), root=tmp_path_factory.mktemp("runs")).path


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step_{number}"


@pytest.mark.parametrize("gate", ["linear", "norm_linear"])
def test_f14_training_from_new_weights_refuses_a_gate_that_nothing_trains(gate):
    """q_exit stopped at random numbers."""
    values = {
        "name": "run",
        "model": {"vocab_size": 32, "d_model": 8, "split": [2, 2, 2], "num_heads": 2,
                  "num_kv_heads": 1, "head_dim": 4, "d_ff": 8, "max_context": 48,
                  "max_loops": 3, "exit_gate": gate},
        "data": {"task": "pointer_program", "context": 16},
        "train": {"steps": 2, "batch_size": 8},
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"model.exit_gate='{gate}' has no effect in training fro"):
        Recipe.from_dict(values)


def test_f14_a_kept_gate_is_stale_from_the_first_step_on(gated, trained):
    assert not read_config(step(trained, 0)).exit_gate_stale
    assert [read_config(step(trained, n)).exit_gate_stale for n in (1, 2)] == [True, True]
    before, after = load_model(gated).state_dict(), load_model(step(trained, 2)).state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith("exit_gate."), name


def test_f14_a_stale_gate_stays_stale_through_resume_and_later_runs(gated, trained, tmp_path):
    resumed = resume(train(recipe(gated, name="a"), root=tmp_path).path)
    assert read_config(step(resumed.path, 2)).exit_gate_stale
    later = train(recipe(step(trained, 2), name="b"), root=tmp_path).path
    assert read_config(step(later, 0)).exit_gate_stale


def test_f14_a_recipe_does_not_say_that_a_gate_is_stale(gated):
    with pytest.raises(ValueError, match="model.exit_gate_stale=True is written by training"):
        recipe(gated, **{"model.exit_gate_stale": True})
    with pytest.raises(ValueError, match="exit_gate_stale=true has no effect without an exit gate"):
        read_config(gated).replace(exit_gate="none", exit_gate_stale=True)


def test_f14_inspect_names_a_stale_gate(gated, trained, cli):
    assert inspect_model_folder(gated).warnings == ()
    [warning] = inspect_model_folder(step(trained, 2)).warnings
    assert warning.startswith("The exit gate is stale")
    shown = cli("inspect", step(trained, 2)).out
    assert "norm_linear, stale" in shown and "The exit gate is stale" in shown


def test_f14_exports_name_a_stale_gate_in_report_and_card(trained, tmp_path):
    report = export_hf(step(trained, 2), tmp_path / "hf")
    assert any("exit gate is stale" in text for text in report.warnings)
    assert "exit gate is stale" in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    import_checkpoint(GOLDEN / "ouro", tmp_path / "ours")
    assert export_checkpoint(tmp_path / "ours", tmp_path / "x", family="ouro").warnings == ()
    path = tmp_path / "ours" / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"exit_gate_stale": True}), encoding="utf-8")
    [warning] = export_checkpoint(tmp_path / "ours", tmp_path / "y", family="ouro").warnings
    assert warning.startswith("The exit gate is stale")


@pytest.mark.parametrize("name", STOPPING_RULES)
def test_f14_rules_that_read_a_stale_gate_say_so(name, gated, trained):
    rule = stopping_rule(name, 0.5 if name != "argmax_stability" else 1)
    for folder, is_stale in ((gated, False), (step(trained, 2), True)):
        model = load_model(folder).float().eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generate(model, [[1, 2]], num_loops=3, max_new_tokens=2, stop_rule=rule)
        said = any("exit gate is stale" in str(warning.message) for warning in caught)
        assert said == (is_stale and rule.needs_gate)
