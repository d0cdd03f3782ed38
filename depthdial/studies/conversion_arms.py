"""Arms of the conversion study: how each is converted, what it trains, and running one.

An arm starts from a dense base, is converted by a method of `convert`, trained from that folder,
and measured at every loop count. Text and questions are in `conversion_data.py`, comparisons in
`conversion_results.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from depthdial.config import Recipe
from depthdial.convert.convert import convert
from depthdial.data.packing import Batch
from depthdial.model.checkpoint import load_model
from depthdial.training.init_model import freeze
from depthdial.training.pretrain import resume, train
from depthdial.training.run_dir import RunDir
from depthdial.training.step import LossModule, RowPlan

LOOPS = (1, 2, 3, 4)
CORE = "10:20"
"""Middle third of the base's 30 layers."""
RANK = 16
MIXED = (1, 1, 2, 2, 3, 4)
LATER = (2, 2, 3, 4)
FROZEN = ("base",)
"""The base's own parameters: no arm trains them."""


@dataclass(frozen=True)
class Arm:
    """One way to spend the training.

    Fields:
        method, options: of `convert`.
        loops: loop counts drawn in training, one as likely as another.
        rate_lr: learning rate of the shares of the candidate; None where there are none.
    """

    name: str
    title: str
    method: str
    options: dict[str, Any]
    loops: tuple[int, ...]
    rate_lr: float | None = 2e-2

    @property
    def is_looped(self) -> bool:
        """Whether training runs more than one loop."""
        return max(self.loops) > 1


CONTROL = Arm("control", "no loop, equal data", "joint-deltas", {"rank": RANK}, (1,))
EQUAL_TIME = replace(CONTROL, name="equal-time", title="no loop, equal time")
LOOPED = (
    Arm("graft", "`later-deltas`", "later-deltas", {"rank": RANK}, LATER),
    Arm("joint", "`joint-deltas`", "joint-deltas", {"rank": RANK}, MIXED),
    Arm("elr", "`elr-graft`", "elr-graft", {"rank": RANK, "d_cond": 64}, MIXED, None),
)
STAGE_ONE = replace(CONTROL, name="stage-one", title="no loop, short chains")


@dataclass(frozen=True)
class Task:
    """What an arm trains on.

    Fields: data: the recipe's section; batch_size: rows per step; steps: optimizer steps.
    """

    name: str
    data: dict[str, Any]
    batch_size: int
    steps: int


@dataclass(frozen=True)
class TrainedArm:
    """A finished run: its folder, newest checkpoint, and how much it trained."""

    arm: Arm
    run: Path
    checkpoint: Path
    steps: int
    tokens: int


def start_folder(arm: Arm, task: Task, base: Path, root: Path, *, seed: int) -> Path:
    """The base converted for an arm, made once."""
    folder = root / "start" / f"{task.name}-{arm.name}"
    if not folder.exists():
        convert(base, folder, method=arm.method, core=CORE, options=arm.options, seed=seed)
    return folder


def run_arm(arm: Arm, task: Task, start: Path, root: Path, *, seed: int, steps: int) -> TrainedArm:
    """Train from a start folder, or go on where a run was stopped, and find the checkpoint.

    Raises: RuntimeError for a run that is stopped again.
    """
    name = f"{task.name}-{arm.name}"
    run = root / "runs" / name
    if run.exists():
        result = resume(run)
    else:
        recipe = recipe_of(arm, task, start, name=name, seed=seed, steps=steps)
        result = train(recipe, root=root / "runs")
    if result.status != "finished":
        raise RuntimeError(f"{run} was {result.status} at step {result.step}; start it again.")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    trained = [record for record in map(json.loads, lines) if "train/loss" in record]
    if len(trained) != steps:
        raise RuntimeError(f"{run} has {len(trained)} of {steps} steps; remove it.")
    checkpoint = RunDir(run).latest_checkpoint().path
    return TrainedArm(arm, run, checkpoint, steps, trained[-1]["tokens"])


def recipe_of(arm: Arm, task: Task, start: Path, *, name: str, seed: int, steps: int) -> Recipe:
    """The recipe of one arm; nothing but conversion and loop counts differs between arms."""
    return Recipe.from_dict(
        {
            "name": name,
            "data": task.data,
            "depth": {"sampler": "listed", "listed_loops": list(arm.loops)},
            "optim": {
                "optimizer": "adamw",
                "lr": 1e-3,
                "lr_by_pattern": {} if arm.rate_lr is None else {"state_update.rate": arm.rate_lr},
                "freeze": list(FROZEN),
                "weight_decay": 0.0,
                "warmup_frac": 0.06,
                "decay_frac": 0.5,
            },
            "train": {
                "init": str(start),
                "steps": steps,
                "batch_size": task.batch_size,
                "seed": seed,
                "val_every": steps,
                "val_rows": task.batch_size,
                "checkpoint_every": max(1, steps // 4),
                "keep_checkpoints": 1,
            },
        }
    )


def step_seconds(
    arms: Mapping[str, tuple[Arm, Path]], batch: Batch, *, rounds: int = 2
) -> dict[str, float]:
    """Mean processor seconds of an optimizer step's forward and backward, by arm.

    Each round runs every (arm, loop count), so that whatever else the machine does hits all
    alike; the fastest round counts. Processor time of one thread: waiting is not in it.
    """
    loss_modules = {}
    for name, (_, folder) in arms.items():
        model = load_model(folder)
        freeze(model, FROZEN)
        loss_modules[name] = LossModule(model)
    fastest: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for name, (arm, _) in arms.items():
            for num_loops in sorted(set(arm.loops)):
                seconds = _timed(loss_modules[name], batch, num_loops)
                key = name, num_loops
                fastest[key] = min(seconds, fastest.get(key, seconds))
    return {
        name: sum(fastest[name, k] for k in arm.loops) / len(arm.loops)
        for name, (arm, _) in arms.items()
    }


def _timed(loss_module: LossModule, batch: Batch, num_loops: int) -> float:
    started = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_module(batch, RowPlan(num_loops)).nll_BT.mean()
    loss.backward()
    return time.process_time() - started
