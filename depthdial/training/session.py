"""The live parts of a run, its checkpoints, and how a run is taken up from one.

Which files a run folder has, and which checkpoint may be trusted, is in `run_dir.py`; the loop that
trains is in `pretrain.py`.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from depthdial.config import Recipe, StrictConfig
from depthdial.config.text import parse_json
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
    check_optim_options,
    folder_facts,
    freeze,
)
from depthdial.training.optim import Optimizers
from depthdial.training.run_dir import Checkpoint, RunDir
from depthdial.training.sources import TrainData, open_data, tokenizer_sha256
from depthdial.training.teacher import Teacher, open_teacher, teacher_folder

LARGEST_WEIGHT = 1e3
"""No model that was opened here has a weight of this magnitude; diverged ones soon do."""
WORST_LOSS = 3.0
"""Training loss beyond reason, as a multiple of what guessing among all tokens costs."""
RECIPE_FILE = "recipe.json"
"""In a checkpoint: the recipe of its steps, under the checkpoint's seal."""
# What a resumed run may change; everything else decides weights, data or draws of past steps. Where
# data lie says nothing of what they are, which is compared by its hash.
RESUME_KEYS = (
    "data.path",
    "data.cache_dir",
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
    """How far a run is: what it reads, finished steps, position, and what it has cost so far.

    data: as `contents` gives it. doubt: why the weights are beyond reason; empty if they are not.
    """

    data: dict[str, str]
    step: int = 0
    next_row: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    doubt: str = ""


@dataclass
class Session:
    """The live parts of one run.

    provenance: what was collected at the run's start. teacher: None without distillation.
    companions: folder whose tokenizer and other files every checkpoint takes over; None for a run
    from new weights, which writes its own. trained_loops: loop counts that training has run, here
    and before. loss: the largest of any loop count in the last step; None before the first.
    """

    recipe: Recipe
    run: RunDir
    data: TrainData
    model: LoopedLM
    optimizers: Optimizers
    progress: Progress
    provenance: dict[str, Any]
    teacher: Teacher | None = None
    companions: Path | None = None
    trained_loops: set[int] = field(init=False)
    loss: float | None = None

    def __post_init__(self) -> None:
        self.trained_loops = set(self.model.config.trained_at)

    def count_training(self, loop_counts: set[int]) -> None:
        """Remember the loop counts of a finished step, which trains no exit gate along."""
        self.trained_loops |= loop_counts
        config = self.model.config
        if config.exit_gate != "none" and not config.exit_gate_stale:
            self.model.config = config.replace(exit_gate_stale=True)


def save_checkpoint(session: Session) -> None:
    """Model directory with its tokenizer, optimizer state and position, whole or not at all.

    Weights beyond reason are saved with a warning, and the newest checkpoint without such weights
    is kept beside them.
    """
    run, step, doubt = session.run, session.progress.step, _doubt(session)
    session.progress = replace(session.progress, doubt=doubt)
    sound = _newest_sound(run) if doubt else None

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
        (folder / RECIPE_FILE).write_text(session.recipe.to_json(), encoding="utf-8")

    saved = run.save_checkpoint(
        step,
        write,
        keep=session.recipe.train.keep_checkpoints,
        spare=None if sound is None else sound.step,
    )
    if doubt:
        warnings.warn(_doubt_text(run, step, doubt, sound), stacklevel=2)
    if session.companions is not None:
        # The folder that the run started from may go away; this one stays until the next.
        session.companions = saved.path


def _doubt(session: Session) -> str:
    """Why a session's weights are beyond reason; empty if they are not."""
    for name, parameter in session.model.named_parameters():
        low, high = (float(end) for end in torch.aminmax(parameter.detach()))
        # A comparison with NaN is false.
        if not (-LARGEST_WEIGHT < low and high < LARGEST_WEIGHT):
            return f"{name} holds values from {low:.3g} to {high:.3g}"
    guessing = math.log(session.model.config.vocab_size)
    if session.loss is not None and not session.loss < WORST_LOSS * guessing:
        return f"the training loss is {session.loss:.3g} nats, where guessing costs {guessing:.3g}"
    return ""


def _newest_sound(run: RunDir) -> Checkpoint | None:
    """The newest checkpoint whose weights were within reason."""
    for saved in run.checkpoints():
        path = saved.path / STATE_FILE
        if path.is_file() and not parse_json(path.read_text(encoding="utf-8")).get("doubt"):
            return saved
    return None


def _doubt_text(run: RunDir, step: int, doubt: str, sound: Checkpoint | None) -> str:
    text = f"{run.path}: at step {step} {doubt}, which is beyond reason; has the run diverged?"
    if sound is None:
        return f"{text} No checkpoint before is better. Start a new run with a lower optim.lr."
    return (
        f"{text} {sound.path.name} is the last checkpoint before. To go on from there: depthdial "
        f"resume {run.path} --checkpoint {sound.path.name} --optim.lr X"
    )


def taken_up(run: RunDir, overrides: dict[str, Any], *, name: str | None = None) -> Session:
    """The session of a run's newest intact checkpoint, with the run's files brought back to it.

    Args: name: of an older checkpoint, from which the run goes on instead.
    """
    checkpoint = run.latest_checkpoint() if name is None else run.checkpoint(name)
    recipe = _changed(_trained_recipe(run, checkpoint), overrides)
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
    teacher = open_teacher(recipe, data.tokenizer)
    model = in_own_memory(load_model(checkpoint.path, device=recipe.train.device))
    freeze(model, recipe.optim.freeze)
    optimizers = Optimizers(model, recipe.optim)
    optimizers.load_state_tensors(read_tensors(checkpoint.path / OPTIMIZER_FILE))
    progress = Progress(**json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8")))
    _check_contents(run, progress.data, contents(recipe, data))
    # Only once everything has opened: a refused resume leaves the run as it was.
    if progress.doubt:
        warnings.warn(
            _doubt_text(run, checkpoint.step, progress.doubt, _newest_sound(run)), stacklevel=2
        )
    run.set_aside_after(checkpoint.step)
    run.write_config(recipe)
    run.discard_metrics_after(checkpoint.step)
    companions = None if init is None else checkpoint.path
    return Session(recipe, run, data, model, optimizers, progress, provenance, teacher, companions)


def contents(recipe: Recipe, data: TrainData) -> dict[str, str]:
    """What tells everything that a run reads beside its recipe from anything else.

    Returns: fingerprint of `train` and `valid` rows, and SHA-256 of `tokenizer` and `teacher`.
    """
    found = {
        "train": data.train.fingerprint,
        "valid": data.valid.fingerprint,
        "tokenizer": tokenizer_sha256(data.tokenizer),
    }
    teacher = teacher_folder(recipe)
    return found if teacher is None else found | {"teacher": folder_facts(teacher)["sha256"]}


def _trained_recipe(run: RunDir, checkpoint: Checkpoint) -> Recipe:
    """The recipe in config.json, which may differ from the checkpoint's where a resume may.

    Raises: ValueError naming the first key that differs elsewhere.
    """
    sealed = checkpoint.path / RECIPE_FILE
    if not sealed.exists():
        raise ValueError(
            f"the run {run.path} was begun by an earlier version, whose checkpoints hold neither "
            "the recipe nor the hashes of all that its steps read, so that nobody knows whether it "
            "would go on as it was. Start a new run from its model with train.init."
        )
    try:
        recipe = Recipe.from_file(run.config_path)
    except ValueError as error:
        raise ValueError(f"{error} The run's recipe is kept in {sealed}, too.") from error
    for key, now, then in recipe.differences(Recipe.from_file(sealed)):
        if key not in RESUME_KEYS:
            raise ValueError(
                f"{run.config_path}: {key} is {_shown(now)}, but the run was trained with "
                f"{_shown(then)}, and no step so far would have been the same. Set it back (the "
                f"whole recipe is in {sealed}), or start a new run."
            )
        warnings.warn(
            f"{run.config_path}: {key} is {_shown(now)} instead of {_shown(then)}, which the steps "
            f"up to {checkpoint.step} had; the run goes on with it.",
            stacklevel=2,
        )
    return recipe


def _shown(value: Any) -> str:
    return repr(value.to_dict() if isinstance(value, StrictConfig) else value)


def _check_contents(run: RunDir, then: dict[str, str], now: dict[str, str]) -> None:
    """Everything that the run reads is what it was. Raises: ValueError naming the first change."""
    words = {
        "train": "the training data of {} are not what they were",
        "valid": "the validation data of {} are not what they were",
        "tokenizer": "the tokenizer of {} is not what it was",
        "teacher": "the teacher of {} is not what it was",
    }
    for name, text in words.items():
        if then.get(name) != now.get(name):
            raise ValueError(
                f"{text.format(run.path)} when the run began: {str(then.get(name))[:16]}... is now "
                f"{str(now.get(name))[:16]}... (SHA-256). Restore what was there (prepare the same "
                "data again), or start a new run."
            )


def _changed(recipe: Recipe, overrides: dict[str, Any]) -> Recipe:
    refused = [key for key in overrides if key not in RESUME_KEYS]
    if refused:
        raise ValueError(
            f"'{refused[0]}' cannot change when a run is resumed: the steps so far used another "
            f"value. Allowed: {', '.join(RESUME_KEYS)}. Start a new run for anything else."
        )
    return recipe.replace(**overrides)
