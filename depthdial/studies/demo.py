"""The demonstration: text and pointer programs, each with its matched non-looped baseline.

Four runs in two one-thread processes, then sweeps and one report. A run that exists is taken up
where it stands, so the demonstration can be interrupted and called again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from depthdial.config import Recipe
from depthdial.recipes import recipe_file
from depthdial.report.page import ReportPaths
from depthdial.studies.finished_run import FinishedRun
from depthdial.studies.report_run import section_of, write_sections
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import open_data

# Pairs of a looped run and its baseline. Longest first: two workers finish at about the same time.
JOBS = ("tiny-text", "tiny-text-baseline", "tiny-pointer", "tiny-pointer-baseline")
WORKERS = 2
QUICK_STEPS = 20
POLL_SECONDS = 1.0


@dataclass
class Job:
    """One training run of the demonstration."""

    recipe: Recipe
    run: RunDir
    process: subprocess.Popen[bytes] | None = None

    def is_complete(self) -> bool:
        """Whether the last step has its checkpoint."""
        last = self.run.checkpoints_path / f"step_{self.recipe.train.steps}"
        return last.is_dir()


def run_demo(folder: str | Path, *, quick: bool = False, console: Console) -> ReportPaths:
    """Train, sweep and report into `folder`.

    Args:
        quick: a few steps per run, to see that everything works; the results mean nothing.

    Raises: ValueError if the folder holds runs of other settings; RuntimeError naming the log of
        a run that failed; KeyboardInterrupt after the runs have saved.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [_job(name, folder, quick=quick) for name in JOBS]
    for job in jobs:
        _check_folder(job)
    started = time.perf_counter()
    # Once, before the workers: both text runs read the same prepared corpus.
    for job in jobs:
        open_data(job.recipe)
    with _stopped_like_ctrl_c():
        _train_all(jobs, folder, console)
    console.print("\nMeasuring every loop count ...", markup=False)
    sections = []
    for looped, baseline in zip(jobs[::2], jobs[1::2], strict=True):
        runs = FinishedRun.open(looped.run.path), FinishedRun.open(baseline.run.path)
        sections.append(section_of(*runs))
    paths = write_sections(sections, folder, title="One model, every loop count")
    minutes = (time.perf_counter() - started) / 60
    console.print(f"Done in {minutes:.1f} minutes. Open {paths.html}", soft_wrap=True, markup=False)
    return paths


def demo_recipe(name: str, folder: Path, *, quick: bool) -> Recipe:
    """A shipped recipe as the demonstration in `folder` runs it."""
    recipe = Recipe.from_file(recipe_file(name))
    changes: dict[str, object] = {}
    if recipe.data.corpus is not None:
        changes["data.cache_dir"] = str(folder / "data")
    if quick:
        changes |= {"train.steps": QUICK_STEPS, "train.val_every": QUICK_STEPS // 2}
    return recipe.replace(**changes)


def _job(name: str, folder: Path, *, quick: bool) -> Job:
    recipe = demo_recipe(name, folder, quick=quick)
    return Job(recipe, RunDir(folder / recipe.name))


def _check_folder(job: Job) -> None:
    """Refuse a folder with a run of other settings."""
    if not job.run.config_path.exists():
        return
    found = Recipe.from_file(job.run.config_path)
    # The same folder may be named in another way than at the first call.
    if found.data.corpus is not None and job.recipe.data.corpus is not None:
        found = found.replace(**{"data.cache_dir": job.recipe.data.cache_dir})
    for key, there, here in found.differences(job.recipe):
        raise ValueError(
            f"{job.run.path} holds a run with other settings than this demonstration ({key} is "
            f"{there} there, {here} here). Give another folder with --out, or delete "
            f"{job.run.path}."
        )


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """End on SIGTERM and on a closed terminal as on Ctrl-C, so that the runs are told to save.

    They have their own sessions, and would go on alone. Only the main thread may take signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if sys.platform != "win32":
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train_all(jobs: list[Job], folder: Path, console: Console) -> None:
    """Run all jobs, at most WORKERS at a time, and show how far each is."""
    waiting = deque(job for job in jobs if not job.is_complete())
    running: list[Job] = []
    try:
        with Live(_table(jobs), console=console, refresh_per_second=2) as live:
            while waiting or running:
                while waiting and len(running) < WORKERS:
                    job = waiting.popleft()
                    job.process = _start(job, folder)
                    running.append(job)
                time.sleep(POLL_SECONDS)
                live.update(_table(jobs))
                for job in list(running):
                    assert job.process is not None
                    if job.process.poll() is not None:
                        running.remove(job)
                        _check(job, folder)
    finally:
        # SIGTERM makes a run save its last step; its second Ctrl-C would not.
        processes = [job.process for job in running if job.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    """A new process that trains the job, or resumes it if it has a checkpoint.

    A run that never came to a checkpoint is `train`'s to replace: that alone holds its lock.
    """
    command = [sys.executable, "-m", "depthdial"]
    if any(job.run.checkpoints_path.glob("step_*")):
        command += ["resume", str(job.run.path)]
    else:
        recipe_path = folder / f"{job.recipe.name}.recipe.json"
        recipe_path.write_text(job.recipe.to_json(), encoding="utf-8")
        command += ["train", str(recipe_path), "--root", str(folder)]
    # One thread each: waiting OpenMP threads would take the core from the other run.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with _log_path(job, folder).open("ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which tells the runs to save.
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _check(job: Job, folder: Path) -> None:
    assert job.process is not None
    if job.process.returncode != 0 or not job.is_complete():
        log = _log_path(job, folder)
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise RuntimeError(
            f"run {job.recipe.name} ended with code {job.process.returncode}. Its log {log} ends:\n"
            + "\n".join(tail)
        )


def _log_path(job: Job, folder: Path) -> Path:
    return folder / f"{job.recipe.name}.log"


def _table(jobs: list[Job]) -> Table:
    """Progress of all runs; at most 80 columns, so that no row wraps."""
    loops = range(1, max(job.recipe.model.max_loops for job in jobs) + 1)
    table = Table(box=None, pad_edge=False, caption="k=1 ...: validation loss by loop count")
    table.add_column("run", no_wrap=True)
    for title in ("steps", "tok/s", *(f"k={k}" for k in loops)):
        table.add_column(title, justify="right", no_wrap=True)
    for job in jobs:
        records = job.run.read_metrics() if job.run.metrics_path.exists() else []
        training = [record for record in records if "train/tok_per_sec" in record]
        validations = [record for record in records if "val/loss_k1" in record]
        losses = validations[-1] if validations else {}
        shown = [losses.get(f"val/loss_k{k}") for k in loops]
        table.add_row(
            job.recipe.name,
            f"{records[-1]['step'] if records else 0}/{job.recipe.train.steps}",
            f"{training[-1]['train/tok_per_sec']:,.0f}" if training else "-",
            *("" if loss is None else f"{loss:.3f}" for loss in shown),
        )
    return table
