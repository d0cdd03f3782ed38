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

from depthdial.config import (
    DataConfig,
    DepthConfig,
    ModelConfig,
    ModulationConfig,
    OptimConfig,
    Recipe,
    TrainConfig,
)
from depthdial.data.shards import TokenShards
from depthdial.data.text import prepare
from depthdial.disk import InUseError
from depthdial.model.checkpoint import load_model
from depthdial.model.count import flops_per_token
from depthdial.training.pretrain import resume, train
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import open_data
from depthdial.training.validation import validated_loops


def pointer_recipe(**changes) -> Recipe:
    recipe = Recipe(
        name="run",
        model=ModelConfig(
            vocab_size=32, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=2, head_dim=8,
            d_ff=16, max_context=32, num_loops=2, max_loops=3,
            modulation=ModulationConfig(d_cond=8, rank=2, embed_dim=8),
        ),
        data=DataConfig(task="pointer_program", context=16),
        depth=DepthConfig(
            sampler="override", override_frac=0.25, num_depth_slices=4, switch_frac=0.5
        ),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(
            steps=6, batch_size=8, val_every=3, val_rows=16, checkpoint_every=2, precision="fp32"
        ),
    )  # fmt: skip
    return recipe.replace(**changes) if changes else recipe


class Recorder:
    """Collects what an observer is told, and may send a signal."""

    def __init__(self, *, signal_at: int | None = None, number: int = signal.SIGINT) -> None:
        self.records, self.notices = [], []
        self.signal_at, self.number = signal_at, number

    def record(self, record) -> None:
        self.records.append(record)
        if record["step"] == self.signal_at and "train/loss" in record:
            os.kill(os.getpid(), self.number)

    def notice(self, text: str) -> None:
        self.notices.append(text)


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


class TestStopWhileValidating:
    """A stop waited for the validation of every loop count, a thousand of them."""

    @pytest.fixture
    def stopped(self, tmp_path, monkeypatch):
        """Trains, sends a signal in some forward of some validation, and counts forwards."""

        def run(*, at_step, in_forward, number=signal.SIGTERM, **changes):
            from depthdial.training import validation

            forwards = []
            loss = validation.LossModule.forward

            def forward(self, batch, plan):
                if not torch.is_grad_enabled():
                    forwards.append(plan.num_loops)
                    if observer.step == at_step and len(forwards) == in_forward:
                        os.kill(os.getpid(), number)
                return loss(self, batch, plan)

            class Counting(Recorder):
                step = 0

                def record(self, record):
                    super().record(record)
                    self.step = record["step"]
                    forwards.clear()

            observer = Counting()
            with monkeypatch.context() as patch:
                patch.setattr(validation.LossModule, "forward", forward)
                recipe = pointer_recipe(**changes)
                result = train(recipe, root=tmp_path / "stopped", observer=observer)
            return result, forwards, observer

        return run

    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")]
    )
    def test_f29_no_forward_follows_a_stop(self, stopped, number, status):
        result, forwards, observer = stopped(at_step=3, in_forward=2, number=number)
        assert (result.status, result.step) == (status, 3)
        assert len(forwards) == 2
        assert RunDir.open(result.path).latest_checkpoint().step == 3
        assert f"depthdial resume {result.path}" in observer.notices[-1]

    def test_f29_a_stop_during_a_step_takes_the_validation_after_it_away(self, tmp_path):
        observer = Recorder(signal_at=3)
        result = train(pointer_recipe(), root=tmp_path, observer=observer)
        assert (result.status, result.step) == ("interrupted", 3)
        assert not any("val/loss_k1" in r for r in RunDir.open(result.path).read_metrics())

    @pytest.mark.parametrize("at_step", [3, 6])
    def test_f29_what_a_stop_took_away_is_made_up_for(self, stopped, tmp_path, at_step):
        """The resumed run is the uninterrupted one, its metrics too."""
        whole = RunDir.open(train(pointer_recipe(), root=tmp_path / "whole").path)
        result, _, _ = stopped(at_step=at_step, in_forward=3)
        assert (result.status, result.step) == ("terminated", at_step)
        again = resume(result.path)
        assert (again.status, again.step) == ("finished", 6)
        run = RunDir.open(result.path)
        timing = "train/tok_per_sec"
        records = [[{**r, timing: 0} for r in x.read_metrics()] for x in (run, whole)]
        assert records[0] == records[1]
        weights = [x.latest_checkpoint().path / "model.safetensors" for x in (run, whole)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        before = run.metrics_path.read_text()
        assert resume(result.path).status == "finished"
        assert run.metrics_path.read_text() == before

    def test_f29_a_stop_while_it_is_made_up_for_loses_nothing(self, stopped, monkeypatch):
        from depthdial.training import pretrain

        result, _, _ = stopped(at_step=3, in_forward=1)

        def interrupted(*_):
            os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(pretrain, "validate", interrupted)
            again = resume(result.path)
        assert (again.status, again.step) == ("terminated", 3)
        assert resume(result.path).status == "finished"

    def test_f29_the_save_after_a_stop_is_never_cut_short(self, tmp_path, monkeypatch):
        from depthdial.training import pretrain

        save = pretrain.save_checkpoint

        def save_while_signals_come(session):
            if session.progress.step:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            save(session)

        monkeypatch.setattr(pretrain, "save_checkpoint", save_while_signals_come)
        result = train(pointer_recipe(), root=tmp_path, observer=Recorder(signal_at=1))
        assert (result.status, result.step) == ("interrupted", 1)
        assert RunDir.open(result.path).latest_checkpoint().step == 1


class TestValidatedLoops:
    def loops(self, max_loops, num_loops=1):
        return validated_loops(
            pointer_recipe().model.replace(max_loops=max_loops, num_loops=num_loops)
        )

    def test_f29_few_loop_counts_are_all_validated(self):
        for max_loops in (1, 3, 16):
            assert self.loops(max_loops) == list(range(1, max_loops + 1))

    def test_f29_of_a_thousand_loop_counts_a_dozen_is_validated(self):
        powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        assert self.loops(1000, num_loops=100) == sorted([*powers, 100, 1000])
        assert self.loops(17) == [1, 2, 4, 8, 16, 17]
        assert self.loops(512) == powers

    def test_f29_a_run_of_many_loop_counts_writes_those(self, tmp_path):
        model = {
            "model.max_loops": 40,
            "model.num_loops": 20,
            "train.steps": 1,
            "train.val_rows": 2,
            "depth": {"sampler": "fixed", "fixed_loops": 1},
            "model.modulation": None,
        }
        result = train(pointer_recipe(**model), root=tmp_path)
        last = RunDir.open(result.path).read_metrics()[-1]
        found = [int(key.removeprefix("val/loss_k")) for key in last if key.startswith("val/")]
        assert found == [1, 2, 4, 8, 16, 20, 32, 40]


class TestValidationRows:
    @pytest.fixture
    def recipe(self, tiny_folder):
        def make(**changes):
            data = {"data.task": None, "data.path": str(tiny_folder / "data")}
            return pointer_recipe(**data, **{"model.vocab_size": 300}, **changes)

        return make

    def test_f29_rows_beyond_the_split_are_refused_with_the_number_it_has(
        self, recipe, tiny_folder, tmp_path
    ):
        """They repeated the split, and counted some documents twice."""
        rows = TokenShards.open(tiny_folder / "data", "valid").num_tokens // 16
        message = (
            rf"train.val_rows={rows + 1}, but the validation split has {rows} rows of 16 tokens .*"
            rf"Set train.val_rows to at most {rows}"
        )
        with pytest.raises(ValueError, match=message):
            train(recipe(**{"train.val_rows": rows + 1}), root=tmp_path)
        assert not (tmp_path / "run").exists()
        assert open_data(recipe(**{"train.val_rows": rows})).valid.context == 16

    def test_f29_a_resumed_run_is_asked_the_same(self, recipe, tmp_path):
        stopped = train(recipe(), root=tmp_path, observer=Recorder(signal_at=1))
        before = (stopped.path / "config.json").read_text()
        with pytest.raises(ValueError, match="train.val_rows=99999, but the validation split has"):
            resume(stopped.path, overrides={"train.val_rows": 99999})
        assert (stopped.path / "config.json").read_text() == before

    def test_f29_rows_of_a_task_never_repeat(self):
        assert open_data(pointer_recipe(**{"train.val_rows": 99999})).valid.epoch_tokens is None
