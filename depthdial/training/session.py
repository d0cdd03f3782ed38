"""The live parts of a run, its checkpoints, and how a run is taken up from one.

Which files a run folder has, and which checkpoint may be trusted, is in `run_dir.py`; the loop that
trains is in `pretrain.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from depthdial.config import Recipe
from depthdial.data.tokenizer import Tokenizer
from depthdial.model.checkpoint import (
    in_own_memory,
    load_model,
    read_tensors,
    save_model,
    write_tensors,
)
from depthdial.model.device import check_device
from depthdial.model.folder import copy_companions
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.init_model import (
    OPTIMIZER_FILE,
    STATE_FILE,
    check_facts,
    check_optim_options,
)
from depthdial.training.optim import Optimizers
from depthdial.training.patterns import freeze_parameters
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import TrainData, open_data
from depthdial.training.teacher import Teacher, open_teacher, teacher_folder

# What a resumed run may change; everything else decides weights, data or draws of past steps.
RESUME_KEYS = (
    "optim.lr",
    "optim.adamw_lr",
    "optim.lr_by_pattern",
    "optim.betas",
    "optim.eps",
    "optim.momentum",
    "optim.weight_decay",
    "optim.warmup_frac",
    "optim.decay_frac",
    "optim.min_lr_frac",
    "optim.grad_clip",
    "train.micro_batch_size",
    "train.precision",
    "train.compile",
    "train.device",
    "train.val_every",
    "train.val_rows",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.tracker",
)


@dataclass(frozen=True)
class Progress:
    """How far a run is: finished steps, data and position in it, and what it has cost so far."""

    data: str = ""
    step: int = 0
    next_row: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Session:
    """The live parts of one run.

    teacher: None without distillation. companions: folder whose tokenizer and other files every
    checkpoint takes over; None for a run from new weights, which writes its own. trained_loops:
    loop counts that training has run, here and before.
    """

    recipe: Recipe
    run: RunDir
    data: TrainData
    model: LoopedLM
    optimizers: Optimizers
    progress: Progress
    teacher: Teacher | None = None
    companions: Path | None = None
    trained_loops: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.trained_loops = set(self.model.config.trained_at)


def save_checkpoint(session: Session) -> None:
    """Model directory with its tokenizer, optimizer state and position, whole or not at all."""

    def write(folder: Path) -> None:
        save_model(session.model, folder, trained_loops=session.trained_loops)
        if session.companions is None:
            session.data.tokenizer.save(folder)
        else:
            copy_companions(session.companions, folder)
        tensors = session.optimizers.state_tensors()
        write_tensors({name: t.cpu() for name, t in tensors.items()}, folder / OPTIMIZER_FILE)
        state = json.dumps(asdict(session.progress), indent=2) + "\n"
        (folder / STATE_FILE).write_text(state, encoding="utf-8")

    saved = session.run.save_checkpoint(
        session.progress.step, write, keep=session.recipe.train.keep_checkpoints
    )
    if session.companions is not None:
        # The folder that the run started from may go away; this one stays until the next.
        session.companions = saved.path


def taken_up(run: RunDir, overrides: dict[str, Any]) -> Session:
    """The session of a run's newest intact checkpoint, with the run's files brought back to it."""
    recipe = Recipe.from_file(run.config_path)
    checkpoint = run.latest_checkpoint()
    recipe = _changed(recipe, overrides)
    if overrides and checkpoint.step >= recipe.train.steps:
        raise ValueError(
            f"the run {run.path} has finished its {recipe.train.steps} steps, so "
            f"'{next(iter(overrides))}' would change nothing. Start a new run from its model with "
            "train.init."
        )
    check_optim_options(recipe)
    check_device(recipe.train.device)
    provenance = run.read_provenance()
    init = recipe.train.init
    tokenizer = None if init is None else Tokenizer.from_dir(checkpoint.path)
    data = open_data(recipe, tokenizer=tokenizer)
    if (source := teacher_folder(recipe)) is not None:
        check_facts(source, provenance["teacher"], role="the teacher")
    teacher = open_teacher(recipe, data.tokenizer)
    model = in_own_memory(load_model(checkpoint.path, device=recipe.train.device))
    freeze_parameters(model, recipe.optim.freeze)
    optimizers = Optimizers(model, recipe.optim)
    optimizers.load_state_tensors(read_tensors(checkpoint.path / OPTIMIZER_FILE))
    progress = Progress(**json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8")))
    if progress.data == data.file_fingerprint != data.train.fingerprint:
        raise ValueError(
            f"the run {run.path} was begun by an earlier version, whose rows opened every document "
            "with end-of-text; its model opens them with another token, or none, and rows do so "
            "too. Start a new run from its model with train.init."
        )
    if progress.data != data.train.fingerprint:
        raise ValueError(
            f"the training data of {run.path} are not what they were: the run read "
            f"{progress.data[:16]}..., {data.folder} now holds {data.train.fingerprint[:16]}.... "
            "Prepare the same data again, or start a new run."
        )
    # Only once everything has opened: a refused resume leaves the run as it was.
    run.write_config(recipe)
    run.discard_metrics_after(checkpoint.step)
    companions = None if init is None else checkpoint.path
    return Session(recipe, run, data, model, optimizers, progress, teacher, companions)


def _changed(recipe: Recipe, overrides: dict[str, Any]) -> Recipe:
    refused = [key for key in overrides if key not in RESUME_KEYS]
    if refused:
        raise ValueError(
            f"'{refused[0]}' cannot change when a run is resumed: the steps so far used another "
            f"value. Allowed: {', '.join(RESUME_KEYS)}. Start a new run for anything else."
        )
    return recipe.replace(**overrides)
