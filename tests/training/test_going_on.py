"""A run that diverged, or lost a file, goes on; and what only looks on does not end it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from depthdial.config import Recipe
from depthdial.studies.finished_run import FinishedRun, facts_of, hardware_text
from depthdial.studies.report_run import report_run
from depthdial.training import session
from depthdial.training.pretrain import resume, train
from depthdial.training.provenance import collect_provenance
from depthdial.training.run_dir import RunDir


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run of 4 steps with checkpoints at 2 and 4, to spoil."""
    return shutil.copytree(tiny_run, tmp_path / "tiny")


def weights(run: Path) -> torch.Tensor:
    from depthdial.model.checkpoint import load_model

    model = load_model(RunDir.open(run).latest_checkpoint().path)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# An older checkpoint


def test_f30_a_run_goes_on_from_an_older_checkpoint_by_name(run):
    before = weights(run)
    with pytest.warns(UserWarning) as caught:
        result = resume(run, checkpoint="step_2", overrides={"optim.lr": 1e-4})
    assert (result.status, result.step) == ("finished", 4)
    texts = " ".join(str(w.message) for w in caught)
    assert "goes on from step 2; its later checkpoints are kept in" in texts
    assert "step_4.discarded, for you to remove" in texts
    assert names(run / "checkpoints") == ["step_2", "step_4", "step_4.discarded"]
    assert not torch.equal(weights(run), before)
    steps = [r["step"] for r in RunDir.open(run).read_metrics() if "train/loss" in r]
    assert steps == [1, 2, 3, 4]


def test_f30_the_newest_is_the_one_gone_on_from_even_if_that_stops_before_the_old_end(run):
    class Stop:
        def record(self, record):
            raise KeyboardInterrupt

        def notice(self, text):
            return None

    with pytest.warns(UserWarning), pytest.raises(KeyboardInterrupt):
        resume(run, checkpoint="step_2", observer=Stop())
    assert RunDir.open(run).latest_checkpoint().step == 2


def test_f30_an_older_checkpoint_twice_keeps_both_ends(run):
    for _ in range(2):
        with pytest.warns(UserWarning, match="for you to remove"):
            resume(run, checkpoint="step_2", overrides={"optim.lr": 1e-4})
    kept = ["step_2", "step_4", "step_4.discarded", "step_4.discarded_"]
    assert names(run / "checkpoints") == kept


@pytest.mark.parametrize("name", ["step_3", "4", "../x", "step_4.discarded"])
def test_f30_a_checkpoint_that_is_not_there_is_told_from_those_that_are(run, name):
    with pytest.raises(ValueError, match=r"has no checkpoint '.*'; it has step_2, step_4\."):
        resume(run, checkpoint=name)
    assert names(run / "checkpoints") == ["step_2", "step_4"]


def test_f30_a_damaged_checkpoint_that_is_named_is_not_replaced_by_another(run):
    (run / "checkpoints" / "step_2" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="step_2 of .*tiny cannot be used: 'state.json' has"):
        resume(run, checkpoint="step_2")


def test_f30_the_command_takes_the_name(cli, run):
    code, out, err = cli("resume", run, "--checkpoint", "step_2", "--optim.lr", "1e-4")
    assert code == 0 and "finished after 4 of 4 steps" in out and "step_4.discarded" in err
    code, _, err = cli("resume", run, "--checkpoint", "step_9")
    assert code == 1 and "has no checkpoint 'step_9'; it has step_2, step_4." in err
    code, _, err = cli("resume", run / "checkpoints" / "step_2")
    assert code == 1 and f"Give {run} --checkpoint step_2." in err


# Weights beyond reason


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Sets one weight from a step on, right before it is saved."""

    def spoil(step: int, value: float) -> None:
        real = session._doubt

        def doubt(live: Any) -> str:
            if live.progress.step >= step:
                with torch.no_grad():
                    next(live.model.parameters()).view(-1)[0] = value
            return real(live)

        monkeypatch.setattr(session, "_doubt", doubt)

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e20])
def test_f30_weights_beyond_reason_are_saved_with_a_warning_and_the_good_ones_kept(
    tiny_run, tmp_path, diverging, value
):
    recipe = Recipe.from_file(tiny_run / "config.json")
    changes = {"train.checkpoint_every": 1, "train.keep_checkpoints": 1, "name": "x"}
    diverging(3, value)
    with pytest.warns(UserWarning, match="which is beyond reason; has the run diverged") as caught:
        try:
            train(recipe.replace(**changes), root=tmp_path)
        except FloatingPointError:
            pass
    text = str(caught[0].message)
    assert "at step 3 embedding" in text or "at step 3 " in text
    assert "step_2 is the last checkpoint before" in text
    assert "--checkpoint step_2 --optim.lr X" in text
    kept = names(tmp_path / "x" / "checkpoints")
    assert kept[0] == "step_2" and len(kept) == 2


def test_f30_a_resume_from_weights_beyond_reason_says_so_and_the_advice_works(
    tiny_run, tmp_path, diverging, monkeypatch
):
    recipe = Recipe.from_file(tiny_run / "config.json")
    with monkeypatch.context() as patch:
        diverging(4, 1e6)
        with pytest.warns(UserWarning, match="beyond reason"):
            path = train(recipe.replace(name="x"), root=tmp_path).path
        patch.undo()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="at step 4 .* beyond reason.* --checkpoint step_2"):
        resume(path)
    with pytest.warns(UserWarning) as caught:
        assert resume(path, checkpoint="step_2", overrides={"optim.lr": 1e-3}).step == 4
    assert not any("beyond reason" in str(w.message) for w in caught)
    assert weights(path).abs().max() < 1e3


def test_f30_a_loss_far_worse_than_guessing_is_beyond_reason(tiny_run, tmp_path, monkeypatch):
    from depthdial.training import pretrain

    recipe, step = Recipe.from_file(tiny_run / "config.json"), pretrain.train_step

    def bad(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        result.loss_by_loops.update({1: 40.0})
        return result

    monkeypatch.setattr(pretrain, "train_step", bad)
    with pytest.warns(UserWarning, match="loss is 40 nats, where guessing costs 5.7, which"):
        train(recipe.replace(name="x"), root=tmp_path)


def test_f30_an_ordinary_run_is_not_doubted(run):
    for saved in RunDir.open(run).checkpoints():
        assert json.loads((saved.path / "state.json").read_text())["doubt"] == ""


# Lost and damaged files


@pytest.mark.parametrize("content", [None, "[]", "{", "5", "[" * 100_000, '"text"'])
def test_f30_a_lost_provenance_is_a_message_whose_advice_works(run, content):
    """`{}` used to end in a KeyError, in a report as with a teacher."""
    path = run / "provenance.json"
    path.unlink() if content is None else path.write_text(content)
    for command in (resume, report_run):
        with pytest.raises(ValueError, match=r"missing or damaged .* or write \{\} into it"):
            command(run)
    path.write_text("{}")
    with pytest.warns(UserWarning, match="for you to remove"):
        assert resume(run, checkpoint="step_2").status == "finished"
    assert json.loads(path.read_text())["training"]["step"] == 4


def test_f30_a_report_of_a_run_without_provenance_says_that_it_is_not_recorded(run):
    (run / "provenance.json").write_text("{}")
    (run / "metrics.jsonl").unlink()
    found = FinishedRun.open(run)
    assert facts_of(found, None)["tiny"]["git"] is None and found.metrics == []
    here = collect_provenance(seed=0, device="cpu")["hardware"]
    text = hardware_text(found, None, measured_on=here)
    assert text.startswith("training of the looped model: not recorded; measurement: ")


def test_f30_a_provenance_that_is_lost_while_training_is_written_again(tiny_run, tmp_path):
    class Remover:
        def record(self, record):
            (tmp_path / "x" / "provenance.json").unlink(missing_ok=True)

        def notice(self, text):
            return None

    recipe = Recipe.from_file(tiny_run / "config.json").replace(name="x")
    assert train(recipe, root=tmp_path, observer=Remover()).status == "finished"
    facts = RunDir.open(tmp_path / "x").read_provenance()
    assert facts["training"]["step"] == 4 and facts["hardware"]


@pytest.mark.parametrize(
    "line",
    ["[]", '"text"', "5", '{"step": "2"}', '{"step": 2.0}', '{"step": null}', "{}", "[" * 100_000],
)
def test_f30_a_metrics_line_that_is_no_record_is_named_and_the_advice_works(run, line):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    for command in (resume, report_run):
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is damaged .*remove that"):
            command(run)
    path.write_text("\n".join(lines) + "\n")
    assert resume(run).status == "finished"


def test_f30_lost_metrics_are_a_warning(run):
    (run / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match="does not reach step 4"):
        assert resume(run).status == "finished"


# Those who look on


class Full:
    """An observer and a tracker whose disk is full."""

    def refuse(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = notice = log = close = refuse


def test_f30_a_full_disk_below_a_log_does_not_end_a_training(tiny_run, tmp_path, monkeypatch):
    from depthdial.training import pretrain

    recipe = Recipe.from_file(tiny_run / "config.json").replace(name="x")
    monkeypatch.setattr(pretrain, "make_tracker", lambda *_: Full())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(recipe, root=tmp_path, observer=Full())
    assert result.status == "finished"
    texts = sorted(str(w.message) for w in caught if "the training goes on" in str(w.message))
    assert [text.split(" of the run")[0] for text in texts] == ["the display", "the tracker"]
    assert len(RunDir.open(result.path).read_metrics()) == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_f30_a_full_disk_below_standard_error_does_not_end_a_training(
    tiny_run, tmp_path, monkeypatch, capsys
):
    from depthdial.cli.main import main

    recipe = Recipe.from_file(tiny_run / "config.json").replace(name="x")
    (tmp_path / "x.json").write_text(recipe.to_json())
    full = open("/dev/full", "w")
    monkeypatch.setattr("sys.stderr", full)
    code = main(["train", str(tmp_path / "x.json"), "--root", str(tmp_path)])
    with suppress(OSError):
        full.close()
    assert code == 0 and "finished after 4 of 4 steps" in capsys.readouterr().out
