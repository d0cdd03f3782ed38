"""The demonstration runs from nothing to a report, and goes on where it stopped."""

import io
import json
import os
import signal
import threading
import time

import pytest
from rich.console import Console

from depthdial.config import Recipe
from depthdial.eval import depth_sweep
from depthdial.recipes import recipe_file
from depthdial.studies import demo
from depthdial.studies.demo import JOBS, run_demo
from depthdial.training.pretrain import train
from depthdial.training.run_dir import RunDir

TINY = {
    "model.d_model": 16, "model.num_heads": 1, "model.num_kv_heads": 1, "model.head_dim": 16,
    "model.d_ff": 16, "train.batch_size": 8, "train.val_rows": 4, "train.precision": "fp32",
    "data.context": 8,
}  # fmt: skip
POINTER_JOBS = ("tiny-pointer", "tiny-pointer-baseline")


def text_console() -> Console:
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def tiny_demo(monkeypatch):
    """Makes the demonstration two pointer runs of a tiny model and of so many steps."""
    monkeypatch.setattr(demo, "JOBS", POINTER_JOBS)
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(depth_sweep, "POINTER_ROWS", 24)

    def of_steps(steps: int) -> None:
        def recipe(name: str, folder, *, quick: bool) -> Recipe:
            whole = Recipe.from_file(recipe_file(name))
            changes = {"train.steps": steps, "train.val_every": steps, "train.checkpoint_every": 50}
            return whole.replace(**TINY, **changes)

        monkeypatch.setattr(demo, "demo_recipe", recipe)

    return of_steps


def steps_written(folder) -> list[int]:
    lines = RunDir(folder).read_metrics()
    return [line["step"] for line in lines if "train/loss" in line]


def test_an_interrupted_demonstration_saves_and_goes_on(tiny_demo, tmp_path, monkeypatch):
    """Ctrl-C of the terminal once killed the runs before they had saved."""
    tiny_demo(60)
    looped = tmp_path / "tiny-pointer"
    table = demo._table

    def interrupt_early(jobs):
        if (looped / "metrics.jsonl").exists():
            raise KeyboardInterrupt
        return table(jobs)

    monkeypatch.setattr(demo, "_table", interrupt_early)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, console=text_console())
    monkeypatch.setattr(demo, "_table", table)
    saved = RunDir(looped).latest_checkpoint().step
    assert 0 < saved < 60 and steps_written(looped)[-1] == saved

    console = text_console()
    paths = run_demo(tmp_path, console=console)
    for name in POINTER_JOBS:
        assert steps_written(tmp_path / name) == list(range(1, 61))
    assert "One model, every loop count" in paths.html.read_text()
    assert "\nMeasuring" in console.file.getvalue()


def test_sigterm_stops_as_ctrl_c_does():
    """The runs are in sessions of their own: nobody else would stop them."""
    with pytest.raises(KeyboardInterrupt), demo._stopped_like_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert threading.current_thread() is threading.main_thread()


def test_runs_of_other_settings_are_refused_and_left_alone(tiny_demo, tmp_path):
    tiny_demo(2)
    train(demo.demo_recipe("tiny-pointer", tmp_path, quick=False), root=tmp_path)
    tiny_demo(3)
    with pytest.raises(ValueError, match=r"train.steps is 2 there, 3 here.*--out, or delete"):
        run_demo(tmp_path, console=text_console())
    assert steps_written(tmp_path / "tiny-pointer") == [1, 2]


def test_a_run_that_never_came_to_a_checkpoint_is_started_again(tiny_demo, tmp_path):
    tiny_demo(2)
    recipe = demo.demo_recipe("tiny-pointer", tmp_path, quick=False)
    with RunDir.create(tmp_path, "tiny-pointer", config=recipe, provenance={}) as run:
        pass
    job = demo.Job(recipe, run)
    demo._check_folder(job)
    assert demo._start(job, tmp_path).wait() == 0
    assert steps_written(run.path) == [1, 2]


def test_the_table_of_all_runs_fits_80_columns(tmp_path):
    jobs = []
    for name in JOBS:
        recipe = demo.demo_recipe(name, tmp_path, quick=False)
        with RunDir.create(tmp_path, recipe.name, config=recipe, provenance={}) as run:
            pass
        losses = {f"val/loss_k{k}": 2.5 for k in range(1, recipe.model.max_loops + 1)}
        run.append_metrics({"step": 1000, "train/tok_per_sec": 123_456.7, **losses})
        jobs.append(demo.Job(recipe, run))
    console = text_console()
    console.print(demo._table(jobs))
    lines = console.file.getvalue().splitlines()
    for name in JOBS:
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert "1000/1000" in line and "123,457" in line and "2.500" in line
        assert line.count("2.500") == (1 if name.endswith("baseline") else 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_demo_writes_a_report_of_both_sections_and_a_second_call_trains_nothing(tmp_path):
    console = Console(width=100)
    paths = run_demo(tmp_path, quick=True, console=console)
    data = json.loads((tmp_path / "report.json").read_text())
    assert [section["kind"] for section in data["sections"]] == ["text", "pointer_program"]
    assert all(section["baseline"] for section in data["sections"])
    assert list(data["provenance"]) == [*JOBS, "this report"]
    assert paths.html.stat().st_size > 50_000
    metrics = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in JOBS}
    run_demo(tmp_path, quick=True, console=console)
    for name in JOBS:
        assert (tmp_path / name / "metrics.jsonl").read_text() == metrics[name]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_failing_run_names_its_log(tiny_demo, tmp_path):
    tiny_demo(2)
    recipe = demo.demo_recipe("tiny-pointer", tmp_path, quick=False)
    with RunDir.create(tmp_path, "tiny-pointer", config=recipe, provenance={}) as run:
        pass
    (run.checkpoints_path / "step_1").mkdir()
    with pytest.raises(RuntimeError, match=r"tiny-pointer\.log ends"):
        run_demo(tmp_path, console=text_console())
