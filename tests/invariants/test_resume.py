"""An interrupted run equals an uninterrupted one bit for bit, on a corpus of more than 10 MB.

12 steps against 5 + 7: across the late switch (step 8), and across an epoch end.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from toys import toy_config

from depthdial.config import DataConfig, DepthConfig, OptimConfig, Recipe, TrainConfig
from depthdial.data.corpora import prepare_corpus, read_corpus
from depthdial.data.packing import DataState, take_rows
from depthdial.model.checkpoint import read_tensors
from depthdial.model.looped_lm import LoopedLM
from depthdial.training import pretrain
from depthdial.training.losses import count_targets, step_loss_share
from depthdial.training.optim import Optimizers
from depthdial.training.run_dir import RunDir
from depthdial.training.session import Progress, Session, contents
from depthdial.training.sources import open_data
from depthdial.training.step import LossModule, RowPlan, train_step

TRAINS = True
STEPS, BATCH, CONTEXT, VOCAB = 12, 8, 32, 300


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    prepare_corpus("stdlib", folder, vocab_size=VOCAB)
    return folder


def recipe(name: str, cache_dir: Path, **changes) -> Recipe:
    base = Recipe(
        name=name,
        model=toy_config(vocab_size=VOCAB, init_std=0.02),
        data=DataConfig(
            corpus="stdlib", tokenizer_vocab=VOCAB, context=CONTEXT, cache_dir=str(cache_dir)
        ),
        depth=DepthConfig(
            sampler="override", override_frac=0.25, num_depth_slices=4, switch_frac=0.67
        ),
        optim=OptimConfig(lr=5e-3),
        train=TrainConfig(
            steps=STEPS, batch_size=BATCH, micro_batch_size=4, seed=3, val_every=100, val_rows=8,
            checkpoint_every=100,
        ),
    )  # fmt: skip
    return base.replace(**changes) if changes else base


def session_of(recipe: Recipe, root: Path, *, next_row: int) -> Session:
    """A fresh run whose data position is not the start."""
    switch = pretrain.depth_schedule(recipe).switch_step
    config = recipe.model.replace(modulation=None) if switch else recipe.model
    model = LoopedLM(config, seed=recipe.train.seed)
    with RunDir.create(root, recipe.name, config=recipe, provenance={}) as run:
        pass
    data = open_data(recipe)
    progress = Progress(contents(recipe, data), next_row=next_row)
    optimizers = Optimizers(model, recipe.optim)
    return Session(recipe, run, data, model, optimizers, progress, {})


class StopAfter:
    """Sends this process SIGTERM after a number of steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, record) -> None:
        if record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def notice(self, text: str) -> None:
        return None


def final_files(path: Path) -> tuple[dict, dict, list]:
    checkpoint = RunDir.open(path).latest_checkpoint().path
    weights = read_tensors(checkpoint / "model.safetensors")
    moments = read_tensors(checkpoint / "optimizer.safetensors")
    timing = ("train/tok_per_sec",)
    metrics = [
        {k: v for k, v in record.items() if k not in timing}
        for record in RunDir.open(path).read_metrics()
    ]
    return weights, moments, metrics


def assert_same_bits(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def test_the_corpus_has_at_least_10_mb():
    assert sum(len(d.text.encode()) for d in read_corpus("stdlib")) >= 10_000_000


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_12_steps_equal_5_plus_7_bit_for_bit_across_switch_and_epoch_end(
    tmp_path, cache_dir, precision
):
    """The epoch ends 8 steps after the start, the switch falls on step 8."""
    whole = recipe("whole", cache_dir, **{"train.precision": precision})
    parts = recipe("parts", cache_dir, **{"train.precision": precision})
    epoch_rows = open_data(whole).train.epoch_tokens // CONTEXT
    start = epoch_rows - 8 * BATCH
    source = open_data(whole).train
    assert DataState(start).epoch(source) == 0
    assert DataState(start + STEPS * BATCH).epoch(source) == 1
    assert pretrain.depth_schedule(whole).switch_step == 8
    result = pretrain._run(session_of(whole, tmp_path, next_row=start), StopAfter(-1))
    assert result.status == "finished"
    stopped = pretrain._run(session_of(parts, tmp_path, next_row=start), StopAfter(5))
    assert (stopped.status, stopped.step) == ("terminated", 5)
    resumed = pretrain.resume(tmp_path / "parts")
    assert (resumed.status, resumed.step) == ("finished", STEPS)
    first, second = final_files(tmp_path / "whole"), final_files(tmp_path / "parts")
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[1], second[1])
    assert first[2] == second[2]
    assert any(name.startswith("modulation") for name in first[0])
    assert {k for r in first[2] for k in r.get("loops/per_slice", [])} > {1}


def test_stopping_exactly_at_the_switch_resumes_through_the_graft(tmp_path, cache_dir):
    whole, parts = recipe("whole", cache_dir), recipe("parts", cache_dir)
    pretrain._run(session_of(whole, tmp_path, next_row=0), StopAfter(-1))
    stopped = pretrain._run(session_of(parts, tmp_path, next_row=0), StopAfter(8))
    assert stopped.step == 8
    config = json.loads(
        (RunDir.open(stopped.path).latest_checkpoint().path / "config.json").read_text()
    )
    assert config["modulation"] is None
    pretrain.resume(stopped.path)
    assert_same_bits(final_files(tmp_path / "whole")[0], final_files(tmp_path / "parts")[0])


def test_another_seed_gives_another_run(tmp_path, cache_dir):
    """Guards the equality: it would hold for a run that ignored its inputs."""
    runs = [recipe("a", cache_dir), recipe("b", cache_dir, **{"train.seed": 4})]
    weights = [
        final_files(pretrain._run(session_of(r, tmp_path, next_row=0), StopAfter(-1)).path)[0]
        for r in runs
    ]
    assert not torch.equal(weights[0]["embedding.weight"], weights[1]["embedding.weight"])


def gradients_of_first_step(recipe: Recipe, micro: int) -> tuple[dict, float]:
    """Clipped gradients of one step at learning rate 0, and its loss."""
    data, model = open_data(recipe), LoopedLM(recipe.model, seed=3)
    optimizers = Optimizers(model, recipe.optim)
    optimizers.set_lr_scale(0.0)
    result = train_step(
        LossModule(model), data.train.rows(0, BATCH), optimizers, loops_per_slice=(4, 1, 4, 2),
        is_mixed=True, micro_batch_size=micro, precision="fp32",
    )  # fmt: skip
    return {name: p.grad for name, p in model.named_parameters()}, result.loss


@pytest.mark.parametrize("micro", [2, 4])
def test_b25_gradients_agree_across_micro_batch_sizes_and_depth_slices(cache_dir, micro):
    """2 rows per slice: micro-batches of 1, 2 and 4 slices with unequal target counts."""
    split, loss = gradients_of_first_step(recipe("a", cache_dir), micro)
    whole, whole_loss = gradients_of_first_step(recipe("a", cache_dir), BATCH)
    assert loss == pytest.approx(whole_loss, abs=1e-6)
    for name, grad in whole.items():
        assert (grad - split[name]).abs().max() <= 1e-6, name


def test_slices_computed_by_different_processes_add_up_to_the_whole_gradient(cache_dir):
    """Who computes a slice does not matter: shares of two virtual ranks sum to the gradient."""
    r = recipe("a", cache_dir)
    batch, loops = open_data(r).train.rows(0, BATCH), (4, 1, 4, 2)
    targets = count_targets(batch.targets_BT)

    def share(rank_slices: tuple[int, ...]) -> dict[str, torch.Tensor]:
        loss_module = LossModule(LoopedLM(r.model, seed=3))
        for slice_idx in rank_slices:
            part = take_rows(batch, 2 * slice_idx, 2 * slice_idx + 2, device=torch.device("cpu"))
            nll = loss_module(part, RowPlan(loops[slice_idx])).nll_BT
            step_loss_share(nll, step_weight=targets).backward()
        return {n: p.grad for n, p in loss_module.model.named_parameters()}

    first, second, whole = share((0, 2)), share((3, 1)), share((0, 1, 2, 3))
    for name, grad in whole.items():
        assert (grad - first[name] - second[name]).abs().max() <= 1e-6, name


def test_b27_draws_do_not_depend_on_the_micro_batch_size(tmp_path, cache_dir):
    draws = []
    for micro in (2, 4, 8):
        changes = {"train.micro_batch_size": micro, "train.steps": 6, "depth.switch_frac": 0.0}
        path = pretrain.train(recipe(f"m{micro}", cache_dir, **changes), root=tmp_path).path
        draws.append([r.get("loops/per_slice") for r in final_files(path)[2]])
    assert draws[0] == draws[1] == draws[2]
    assert len({tuple(d) for d in draws[0] if d}) > 1
