"""Validation: which rows and loop counts, and a stop that takes it away."""

import os
import signal

import pytest
import torch
from pointer_runs import Recorder, pointer_recipe

from depthdial.data.shards import TokenShards
from depthdial.training.pretrain import resume, train
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import open_data
from depthdial.training.validation import validated_loops


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
