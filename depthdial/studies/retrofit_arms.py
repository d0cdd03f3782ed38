"""Arms of the retrofit study: how each is converted, what it trains, and running one.

An arm starts from a dense base, is converted by a method of `convert`, trained from that folder,
and measured at every loop count. Text and questions are in `retrofit_data.py`, comparisons in
`retrofit_results.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthdial.config import Recipe
from depthdial.convert.retrofit import convert
from depthdial.train.pretrain import train
from depthdial.train.run_dir import RunDir

LOOPS = (1, 2, 3, 4)
CORE = "10:20"
"""Middle third of the base's 30 layers."""
RANK = 16
MIXED = (1, 1, 2, 2, 3, 4)
LATER = (2, 2, 3, 4)
FROZEN = ("embedding.*", "prelude_stack.*", "core_stack.*", "coda_stack.*", "final_norm.*")
"""The base's own parameters: no arm trains them."""


@dataclass(frozen=True)
class Arm:
    """One way to spend the training.

    Fields:
        method, options: of `convert`.
        loops: loop counts drawn in training, one as likely as another.
        is_looped: trains more than one loop.
    """

    name: str
    title: str
    method: str
    options: dict[str, Any]
    loops: tuple[int, ...]

    @property
    def is_looped(self) -> bool:
        """Whether training runs more than one loop."""
        return max(self.loops) > 1


CONTROL = Arm("control", "differences, 1 loop", "joint-deltas", {"rank": RANK}, (1,))
EQUAL_TIME = replace(CONTROL, name="equal-time", title="differences, 1 loop, equal time")
LOOPED = (
    Arm("graft", "differences on passes >= 2", "later-deltas", {"rank": RANK}, LATER),
    Arm("joint", "differences on all passes", "joint-deltas", {"rank": RANK}, MIXED),
    Arm("elr", "ELR gate and modulation", "elr-graft", {"rank": RANK, "d_cond": 64}, MIXED),
)
STAGE_ONE = replace(CONTROL, name="stage-one", title="differences, 1 loop, short chains")


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
    """A finished run: its newest checkpoint, and the seconds that its steps took."""

    arm: Arm
    folder: Path
    steps: int
    tokens: int
    seconds: float


def run_arm(
    arm: Arm, task: Task, base: Path, root: Path, *, seed: int, steps: int | None = None
) -> TrainedArm:
    """Convert the base, train, and find the checkpoint; a finished arm is only looked up.

    Args: base: dense model directory; root: folder of this seed's conversions and runs.
    Raises: RuntimeError for a run that was stopped.
    """
    name = f"{task.name}-{arm.name}"
    run = root / "runs" / name
    if not run.exists():
        start = root / "start" / name
        convert(base, start, method=arm.method, core=CORE, options=arm.options, seed=seed)
        recipe = recipe_of(arm, task, start, name=name, seed=seed, steps=steps or task.steps)
        result = train(recipe, root=root / "runs")
        if result.status != "finished":
            raise RuntimeError(f"{run} was {result.status} at step {result.step}; remove it.")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "train/tok_per_sec" in record]
    tokens_before = [0, *(record["tokens"] for record in trained[:-1])]
    return TrainedArm(
        arm=arm,
        folder=RunDir(run).latest_checkpoint().path,
        steps=len(trained),
        tokens=trained[-1]["tokens"],
        seconds=sum(
            (record["tokens"] - before) / record["train/tok_per_sec"]
            for record, before in zip(trained, tokens_before, strict=True)
        ),
    )


def recipe_of(arm: Arm, task: Task, start: Path, *, name: str, seed: int, steps: int) -> Recipe:
    """The recipe of one arm; nothing but conversion and loop counts differs between arms."""
    return Recipe.from_dict(
        {
            "name": name,
            "data": task.data,
            "depth": {"sampler": "listed", "listed_loops": arm.loops, "num_depth_slices": 1},
            "optim": {
                "optimizer": "adamw",
                "lr": 1e-3,
                "lr_by_pattern": {"state_update.*": 2e-2},
                "freeze": FROZEN,
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
                "checkpoint_every": steps,
                "keep_checkpoints": 1,
            },
        }
    )


def equal_time_steps(control: TrainedArm, looped: Sequence[TrainedArm]) -> int:
    """Steps that the control runs in the time of the slowest looped arm."""
    slowest = max(arm.seconds for arm in looped)
    return max(control.steps, round(slowest * control.steps / control.seconds))
