"""The demonstration: text and pointer programs, each with its matched non-looped baseline.

Four runs in two one-thread processes, then sweeps and one report. A run that exists is taken up
where it stands, so the demonstration can be interrupted and called again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from depthdial.config import Recipe
from depthdial.report import ReportPaths
from depthdial.studies.report_run import FinishedRun, section_of, write_sections
from depthdial.train.run_dir import RunDir
from depthdial.train.sources import open_data

RECIPES = Path(__file__).parents[1] / "recipes"
# Longest first: two workers finish at about the same time.
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

    Raises: RuntimeError naming the log of a run that failed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [_job(name, folder, quick=quick) for name in JOBS]
    started = time.perf_counter()
    # Once, before the workers: both text runs read the same prepared corpus.
    for job in jobs:
        open_data(job.recipe)
    _train_all(jobs, folder, console)
    console.print("Measuring every loop count ...")
    sections = []
    for looped, baseline in ((jobs[0], jobs[1]), (jobs[2], jobs[3])):
        runs = FinishedRun.open(looped.run.path), FinishedRun.open(baseline.run.path)
        sections.append(section_of(*runs))
    paths = write_sections(sections, folder, title="One model, every depth")
    minutes = (time.perf_counter() - started) / 60
    console.print(f"Done in {minutes:.1f} minutes. Open {paths.html}")
    return paths


def _job(name: str, folder: Path, *, quick: bool) -> Job:
    recipe = Recipe.from_file(RECIPES / f"{name}.yaml")
    changes: dict[str, object] = {"data.cache_dir": str(folder / "data")}
    if quick:
        changes |= {"train.steps": QUICK_STEPS, "train.val_every": QUICK_STEPS // 2}
    recipe = recipe.replace(**changes)
    return Job(recipe, RunDir(folder / recipe.name))


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
        for job in running:
            assert job.process is not None
            job.process.terminate()
            job.process.wait()


def _start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    """A new process that trains the job, or resumes it if it has a checkpoint."""
    command = [sys.executable, "-m", "depthdial.cli"]
    if job.run.config_path.exists():
        command += ["resume", str(job.run.path)]
    else:
        recipe_path = folder / f"{job.recipe.name}.recipe.json"
        recipe_path.write_text(job.recipe.to_json(), encoding="utf-8")
        command += ["train", str(recipe_path), "--root", str(folder)]
    # One thread each: two one-thread processes are faster than one with two threads, and waiting
    # OpenMP threads would take the core from the other run.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with _log_path(job, folder).open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


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
    table = Table(box=None, pad_edge=False)
    for title in ("run", "steps", "tok/s", "loss by loops"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for job in jobs:
        records = job.run.read_metrics() if job.run.metrics_path.exists() else []
        speeds = [r["train/tok_per_sec"] for r in records if "train/tok_per_sec" in r]
        losses: dict[str, float] = {}
        for record in records[-30:]:
            for name, value in record.items():
                if name.startswith("train/loss_k"):
                    losses[name.removeprefix("train/loss_")] = value
        shown = "  ".join(f"{k} {loss:.3f}" for k, loss in sorted(losses.items()))
        speed = f"{speeds[-1]:,.0f}" if speeds else "-"
        steps = f"{records[-1]['step'] if records else 0}/{job.recipe.train.steps}"
        table.add_row(job.recipe.name, steps, speed, shown or "waiting")
    return table
