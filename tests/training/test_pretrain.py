"""A run leaves what it promises behind, and stops when it is told to."""

import json
import os
import shutil
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from pointer_runs import Recorder, pointer_recipe

from depthdial.config import (
    DataConfig,
    Recipe,
)
from depthdial.data.text import prepare
from depthdial.locks import InUseError
from depthdial.model.checkpoint import load_model
from depthdial.model.count import flops_per_token
from depthdial.training.pretrain import resume, train
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import open_data


def test_a_run_leaves_config_provenance_metrics_and_the_newest_checkpoints(tmp_path):
    result = train(pointer_recipe(), root=tmp_path)
    assert (result.status, result.step) == ("finished", 6)
    run = RunDir.open(result.path)
    assert Recipe.from_file(run.config_path) == pointer_recipe()
    assert sorted(p.name for p in run.checkpoints_path.iterdir()) == ["step_4", "step_6"]
    files = {p.name for p in run.latest_checkpoint().path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors",
            "state.json", "manifest.json"} <= files  # fmt: skip
    assert load_model(run.latest_checkpoint().path).config.modulation is not None


def test_metrics_hold_loss_per_executed_depth_draws_and_validation_at_every_k(tmp_path):
    path = train(pointer_recipe(), root=tmp_path).path
    records = RunDir.open(path).read_metrics()
    steps = [r for r in records if "train/loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 7))
    for record in steps:
        assert {int(k[12:]) for k in record if k.startswith("train/loss_k")} == set(
            record["loops/per_slice"]
        )
        assert {"grad_norm", "tokens", "train/tok_per_sec", "lr/matrices"} <= record.keys()
    assert [r["loops/per_slice"] for r in steps[:3]] == [[1, 1, 1, 1]] * 3
    validations = [r for r in records if "val/loss_k1" in r]
    assert [r["step"] for r in validations] == [3, 6]
    assert all({f"val/loss_k{k}" for k in (1, 2, 3)} <= r.keys() for r in validations)


def test_provenance_counts_training_flops_of_the_depths_that_ran(tmp_path):
    path = train(pointer_recipe(), root=tmp_path).path
    run = RunDir.open(path)
    recipe = pointer_recipe()
    expected = 0.0
    for record in run.read_metrics():
        for k in record.get("loops/per_slice", []):
            grafted = record["step"] > 3
            config = recipe.model if grafted else recipe.model.replace(modulation=None)
            cost = flops_per_token(config, k, context=16, training=True).total
            expected += cost * 2 * 16
    training = run.read_provenance()["training"]
    assert training["flops"] == pytest.approx(expected)
    assert training["tokens"] == 6 * 8 * 16
    assert training["seconds"] > 0


def test_the_switch_grafts_once_and_keeps_weights_moments_and_schedule(tmp_path):
    """Up to the switch the run is the one-loop run; the graft itself moves nothing."""
    observer = Recorder()
    late = train(pointer_recipe(), root=tmp_path / "late", observer=observer)
    plain = train(
        pointer_recipe(**{"model.modulation": None, "depth.switch_frac": 0.9}),
        root=tmp_path / "plain",
    )
    grafts = [n for n in observer.notices if "grafted" in n]
    assert len(grafts) == 1 and "step      3" in grafts[0]
    first = [r for r in RunDir.open(late.path).read_metrics() if "train/loss" in r]
    second = [r for r in RunDir.open(plain.path).read_metrics() if "train/loss" in r]
    for late_record, plain_record in zip(first[:3], second[:3], strict=True):
        assert late_record["train/loss"] == plain_record["train/loss"]
    assert first[3]["train/loss"] == pytest.approx(second[3]["train/loss"], abs=1e-6)
    assert [r["lr/matrices"] for r in first] == [r["lr/matrices"] for r in second]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_saves_and_says_how_to_resume(tmp_path, number, status):
    observer = Recorder(signal_at=3, number=number)
    before = signal.getsignal(number)
    result = train(
        pointer_recipe(**{"train.checkpoint_every": 100}), root=tmp_path, observer=observer
    )
    assert (result.status, result.step) == (status, 3)
    assert f"depthdial resume {result.path}" in observer.notices[-1]
    assert RunDir.open(result.path).latest_checkpoint().step == 3
    assert signal.getsignal(number) is before
    assert resume(result.path).status == "finished"


def test_a_second_ctrl_c_acts_at_once(tmp_path):
    class Impatient(Recorder):
        def record(self, record) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(pointer_recipe(), root=tmp_path, observer=Impatient())


def test_resuming_a_finished_run_does_nothing(tmp_path):
    path = train(pointer_recipe(), root=tmp_path).path
    before = (path / "metrics.jsonl").read_text()
    assert resume(path).step == 6
    assert (path / "metrics.jsonl").read_text() == before


def test_resume_uses_the_previous_checkpoint_when_the_newest_is_cut_short(tmp_path):
    path = train(pointer_recipe(), root=tmp_path).path
    weights = path / "checkpoints" / "step_6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"step_6 is skipped.*Using step_4"):
        result = resume(path)
    assert result.step == 6
    load_model(RunDir.open(path).latest_checkpoint().path)


def test_full_disk_while_saving_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    from depthdial.training import session

    real, calls = session.write_tensors, []

    def fails_the_third_time(tensors, path):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(session, "write_tensors", fails_the_third_time)
    with pytest.raises(OSError, match="step_2 is still good"):
        train(pointer_recipe(), root=tmp_path)
    monkeypatch.setattr(session, "write_tensors", real)
    assert resume(tmp_path / "run").status == "finished"


def test_a_run_that_fails_before_its_first_step_can_be_resumed(tmp_path, monkeypatch):
    """It used to leave a folder that neither train nor resume would take."""
    from depthdial.training import pretrain

    def fails(*_, **__):
        raise MemoryError("no memory for the first step")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(pretrain, "train_step", fails)
        train(pointer_recipe(), root=tmp_path)
    assert RunDir.open(tmp_path / "run").latest_checkpoint().step == 0
    assert resume(tmp_path / "run").status == "finished"


def test_sigterm_after_ctrl_c_does_not_cut_the_save_short(tmp_path):
    """A terminal signals parent and child, and the parent then terminates the child."""

    class Both(Recorder):
        def record(self, record) -> None:
            if record["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)

    result = train(
        pointer_recipe(**{"train.checkpoint_every": 100}), root=tmp_path, observer=Both()
    )
    assert (result.status, result.step) == ("interrupted", 2)
    assert RunDir.open(result.path).latest_checkpoint().step == 2


def test_b39_resume_takes_new_rates_keeps_moments_and_refuses_another_run(tmp_path):
    stopped = train(pointer_recipe(), root=tmp_path, observer=Recorder(signal_at=3))
    with pytest.raises(ValueError, match="'model.d_model' cannot change"):
        resume(stopped.path, overrides={"model.d_model": 32})
    resume(stopped.path, overrides={"optim.lr": 5e-3})
    steps = [r for r in RunDir.open(stopped.path).read_metrics() if "train/loss" in r]
    assert steps[2]["lr/matrices"] == pytest.approx(1e-2)
    assert steps[3]["lr/matrices"] == pytest.approx(5e-3)
    assert Recipe.from_file(stopped.path / "config.json").optim.lr == 5e-3


def test_rates_without_effect_are_refused_when_a_run_goes_on(tmp_path):
    stopped = train(pointer_recipe(), root=tmp_path, observer=Recorder(signal_at=3))
    config = stopped.path / "config.json"
    before = config.read_bytes()
    with pytest.raises(ValueError, match="'nonsense.*' matches none"):
        resume(stopped.path, overrides={"optim.lr_by_pattern": {"nonsense.*": 1.0}})
    assert resume(stopped.path).status == "finished"
    with pytest.raises(ValueError, match="finished its 6 steps, so 'optim.lr' would change not"):
        resume(stopped.path, overrides={"optim.lr": 5e-3})
    assert config.read_bytes() == before


def test_a_gradient_that_is_not_finite_stops_the_run_with_a_way_on(tmp_path, monkeypatch):
    from depthdial.training import objective

    real = objective.step_loss_share
    monkeypatch.setattr(
        objective, "step_loss_share", lambda nll, **k: real(nll, **k) * float("nan")
    )
    with pytest.raises(FloatingPointError, match="depthdial resume RUN --optim.lr"):
        train(pointer_recipe(), root=tmp_path)
    monkeypatch.setattr(objective, "step_loss_share", real)
    assert resume(tmp_path / "run", overrides={"optim.lr": 1e-3}).status == "finished"


def test_wandb_gets_the_numbers(tmp_path, monkeypatch):
    logged, finished = [], []

    class FakeRun:
        def log(self, numbers, *, step):
            logged.append((step, numbers))

        def finish(self):
            finished.append(True)

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(pointer_recipe(**{"train.tracker": "wandb"}), root=tmp_path)
    assert finished and {step for step, _ in logged} == set(range(1, 7))
    assert all("train/loss" in numbers or "val/loss_k1" in numbers for _, numbers in logged)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_run_crosses_the_switch_and_equals_the_eager_one(tmp_path):
    """Switch, graft, mixed rows and eager validation under compiled blocks."""
    losses = []
    for compiled in (False, True):
        changes = {"name": f"c{compiled}", "train.compile": compiled}
        path = train(pointer_recipe(**changes), root=tmp_path).path
        records = RunDir.open(path).read_metrics()
        losses.append([r.get("train/loss", r.get("val/loss_k3")) for r in records])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_damaged_provenance_is_named_before_anything_is_trained(tmp_path):
    stopped = train(pointer_recipe(), root=tmp_path, observer=Recorder(signal_at=3))
    (stopped.path / "provenance.json").write_bytes(b'{"git": \xff')
    with pytest.raises(ValueError, match=r"provenance\.json is missing or damaged"):
        resume(stopped.path)
    assert RunDir.open(stopped.path).latest_checkpoint().step == 3


@pytest.mark.parametrize("file", ["config.json", "provenance.json", "optimizer.safetensors"])
def test_f24_a_full_disk_before_the_first_checkpoint_leaves_the_name_free(
    tmp_path, monkeypatch, file
):
    """The advice was to resume a folder that was gone, or that had no config.json."""
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        replace = os.replace

        def full(source, target, **kwargs):
            if Path(target).name == file:
                raise OSError(28, "No space left on device")
            return replace(source, target, **kwargs)

        patch.setattr(os, "replace", full)
        train(pointer_recipe(), root=tmp_path)
    assert "No space left on device" in str(caught.value)
    assert "nothing is kept. Free disk space, then start the run again" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert train(pointer_recipe(), root=tmp_path).status == "finished"


def test_f21_a_run_that_is_trained_is_neither_trained_nor_resumed_by_a_second_process(tmp_path):
    """Both once trained, and left two final losses in one folder."""
    refused = []

    class Second(Recorder):
        def record(self, record) -> None:
            super().record(record)
            path = tmp_path / "run"
            for start in (lambda: train(pointer_recipe(), root=tmp_path), lambda: resume(path)):
                with pytest.raises(InUseError, match="the run .*run is in use by this process"):
                    start()
                refused.append(record["step"])

    train(pointer_recipe(**{"train.checkpoint_every": 100}), root=tmp_path, observer=Second())
    assert refused
    records = RunDir.open(tmp_path / "run").read_metrics()
    assert [r["step"] for r in records if "train/loss" in r] == list(range(1, 7))
    refused.clear()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_6")
    with pytest.warns(UserWarning, match="were moved"):
        resume(tmp_path / "link", observer=Second())
    assert refused


def test_a_run_killed_before_its_first_checkpoint_does_not_block_its_name(tmp_path):
    train(pointer_recipe(), root=tmp_path)
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        shutil.rmtree(folder)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert train(pointer_recipe(), root=tmp_path).status == "finished"


def test_lost_metrics_are_noticed(tmp_path):
    stopped = train(pointer_recipe(), root=tmp_path, observer=Recorder(signal_at=3))
    (stopped.path / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match="does not reach step 3"):
        resume(stopped.path)


def test_a_device_that_is_not_there_is_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match="device 'meta' cannot be used here"):
        train(pointer_recipe(**{"train.device": "meta"}), root=tmp_path)
    assert not (tmp_path / "run").exists()


def test_existing_run_is_refused_with_advice(tmp_path):
    train(pointer_recipe(), root=tmp_path)
    with pytest.raises(ValueError, match="depthdial resume"):
        train(pointer_recipe(), root=tmp_path)


def test_tensorboard_gets_the_numbers(tmp_path):
    path = train(pointer_recipe(**{"train.tracker": "tensorboard"}), root=tmp_path).path
    assert any(p.stat().st_size > 500 for p in (path / "tensorboard").iterdir())


def test_vocabulary_mismatch_names_both_sizes():
    with pytest.raises(ValueError, match="tokenizer has 32 tokens, model.vocab_size is 33"):
        open_data(pointer_recipe(**{"model.vocab_size": 33}))


def test_own_text_trains_and_b23_empty_documents_do_not_stop_it(tmp_path):
    source = tmp_path / "texts"
    source.mkdir()
    for i in range(8):
        (source / f"{i}.txt").write_text(f"The loop runs {i} times. " * 40)
    (source / "empty.txt").write_text("")
    (source / "short.txt").write_text("x")
    report = prepare([source], tmp_path / "prepared", vocab_size=270)
    assert report.empty_documents == 1
    recipe = pointer_recipe(
        **{"data": DataConfig(path=str(tmp_path / "prepared"), context=16), "model.vocab_size": 270}
    )
    records = RunDir.open(train(recipe, root=tmp_path).path).read_metrics()
    assert np.isfinite([r["train/loss"] for r in records if "train/loss" in r]).all()


def test_text_shorter_than_the_context_says_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_text("just a few words here")
    prepare([tmp_path / "a.txt"], tmp_path / "prepared", vocab_size=257)
    recipe = pointer_recipe(
        **{
            "data": DataConfig(path=str(tmp_path / "prepared"), context=512),
            "model.vocab_size": 257,
            "model.max_context": 512,
        }
    )
    with pytest.raises(ValueError, match="one row of context 512 needs 513"):
        open_data(recipe)


def test_same_seed_gives_the_same_weights_and_other_seeds_do_not(tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        recipe = pointer_recipe(**{"name": name, "train.seed": seed})
        checkpoint = RunDir.open(train(recipe, root=tmp_path).path).latest_checkpoint()
        weights.append(load_model(checkpoint.path).state_dict())
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert any(not torch.equal(weights[0][n], weights[2][n]) for n in weights[0])


def test_the_state_file_is_plain_json(tmp_path):
    path = train(pointer_recipe(), root=tmp_path).path
    state = json.loads((RunDir.open(path).latest_checkpoint().path / "state.json").read_text())
    assert state["step"] == 6 and state["next_row"] == 48
