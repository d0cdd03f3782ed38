"""Train a looped model from a recipe, and resume such a run bit for bit.

Linear on purpose: open, build, then one loop that draws depths, steps, writes and validates.
All randomness is a pure function of (seed, step or row), so a checkpoint holds no generator.
A step index is 0-based; metrics and checkpoints count finished steps.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from depthdial.config import Recipe
from depthdial.data.packing import DataState, iterate_batches
from depthdial.model.checkpoint import load_model, read_tensors, save_model, write_tensors
from depthdial.model.count import flops_per_token
from depthdial.model.device import check_device
from depthdial.model.looped_lm import LoopedLM
from depthdial.train.depth_schedule import DepthSchedule, loops_for_step
from depthdial.train.optim import Optimizers, lr_scale_at
from depthdial.train.progress import SilentObserver, TrainObserver
from depthdial.train.provenance import collect_provenance
from depthdial.train.run_dir import RunDir
from depthdial.train.sources import TrainData, open_data
from depthdial.train.step import (
    LossModule,
    StepResult,
    make_compiler,
    mean_loss,
    train_step,
)
from depthdial.train.trackers import Tracker, make_tracker

# What a resumed run may change; everything else decides weights, data or draws of past steps.
RESUME_KEYS = (
    "optim.lr",
    "optim.adamw_lr",
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
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
Status = Literal["finished", "interrupted", "terminated"]


@dataclass(frozen=True)
class Progress:
    """How far a run is: finished steps, data and position in it, and what it has cost so far."""

    data: str = ""
    step: int = 0
    next_row: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` or `resume` returns.

    status: `finished`; `interrupted` (Ctrl-C) or `terminated` (SIGTERM) after saving.
    """

    path: Path
    status: Status
    step: int


@dataclass
class _Session:
    """The live parts of one run."""

    recipe: Recipe
    run: RunDir
    data: TrainData
    model: LoopedLM
    optimizers: Optimizers
    progress: Progress


def train(
    recipe: Recipe, *, root: str | Path = "runs", observer: TrainObserver | None = None
) -> TrainResult:
    """Train from the first step into a new folder root/name.

    Raises: ValueError if that run exists, or recipe and data do not fit.
    """
    check_device(recipe.train.device)
    data = open_data(recipe)
    schedule = depth_schedule(recipe)
    # Before the switch the model has no modulation at all: it is grafted at the switch.
    late = schedule.switch_step > 0 and recipe.model.modulation is not None
    config = recipe.model.replace(modulation=None) if late else recipe.model
    model = LoopedLM(config, seed=recipe.train.seed).to(recipe.train.device)
    provenance = collect_provenance(seed=recipe.train.seed, device=recipe.train.device)
    run = RunDir.create(root, recipe.name, config=recipe, provenance=provenance)
    progress = Progress(data=data.train.fingerprint)
    session = _Session(recipe, run, data, model, Optimizers(model, recipe.optim), progress)
    # Whatever stops the run from here on, there is something to resume from.
    try:
        save_checkpoint(session)
    except (OSError, RuntimeError):
        # Nothing was trained yet: leave the name free rather than a folder that nothing opens.
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return _run(session, observer or SilentObserver())


def resume(
    path: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    observer: TrainObserver | None = None,
) -> TrainResult:
    """Continue a run from its newest intact checkpoint, as if it had never stopped.

    Args:
        overrides: dotted recipe keys to change from here on, e.g. {"optim.lr": 1e-3}; moments and
            data position stay. Written to the run's config.json.

    Raises: ValueError for a key that would make it another run (see `RESUME_KEYS`).
    """
    run = RunDir.open(path)
    recipe = Recipe.from_file(run.config_path)
    checkpoint = run.latest_checkpoint()
    recipe = _changed(recipe, overrides or {})
    check_device(recipe.train.device)
    run.read_provenance()
    data = open_data(recipe)
    model = load_model(checkpoint.path, device=recipe.train.device)
    optimizers = Optimizers(model, recipe.optim)
    optimizers.load_state_tensors(read_tensors(checkpoint.path / OPTIMIZER_FILE))
    progress = Progress(**json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8")))
    if progress.data != data.train.fingerprint:
        raise ValueError(
            f"the training data of {run.path} are not what they were: the run read "
            f"{progress.data[:16]}..., {data.folder} now holds {data.train.fingerprint[:16]}.... "
            "Prepare the same data again, or start a new run."
        )
    # Only once everything has opened: a refused resume leaves the run as it was.
    run.write_config(recipe)
    run.discard_metrics_after(checkpoint.step)
    session = _Session(recipe, run, data, model, optimizers, progress)
    return _run(session, observer or SilentObserver())


def _changed(recipe: Recipe, overrides: dict[str, Any]) -> Recipe:
    refused = [key for key in overrides if key not in RESUME_KEYS]
    if refused:
        raise ValueError(
            f"'{refused[0]}' cannot change when a run is resumed: the steps so far used another "
            f"value. Allowed: {', '.join(RESUME_KEYS)}. Start a new run for anything else."
        )
    return recipe.replace(**overrides)


def depth_schedule(recipe: Recipe) -> DepthSchedule:
    """The loop counts of a recipe's run."""
    return DepthSchedule.from_config(
        recipe.depth,
        max_loops=recipe.model.max_loops,
        seed=recipe.train.seed,
        total_steps=recipe.train.steps,
    )


def _run(session: _Session, observer: TrainObserver) -> TrainResult:
    recipe, run, optimizers = session.recipe, session.run, session.optimizers
    settings = recipe.train
    schedule = depth_schedule(recipe)
    num_slices = recipe.depth.num_depth_slices
    loss_module = LossModule(session.model)
    compiler = make_compiler(loss_module, wanted=settings.compile)
    tracker = make_tracker(recipe, run.path)
    position = DataState(session.progress.next_row)
    batches = iterate_batches(session.data.train, settings.batch_size, position)
    status: Status = "finished"
    with _stop_signals() as stop:
        for step in range(session.progress.step, settings.steps):
            started = time.perf_counter()
            if step >= schedule.switch_step and _needs_graft(session):
                _graft(session, observer)
            loops = loops_for_step(schedule, step=step, num_slices=num_slices)
            scale = lr_scale_at(recipe.optim, step=step, total_steps=settings.steps)
            optimizers.set_lr_scale(scale)
            batch, position = next(batches)
            with compiler.active() if compiler else nullcontext():
                result = train_step(
                    loss_module,
                    batch,
                    optimizers,
                    loops_per_slice=loops,
                    is_mixed=_mixes_depths(recipe) and step >= schedule.switch_step,
                    micro_batch_size=settings.micro_batch_size or settings.batch_size,
                    precision=settings.precision,
                )
            seconds = time.perf_counter() - started
            session.progress = _advance(session, loops, position, seconds)
            record = _train_record(session, result, loops, seconds)
            _write(record, run, tracker, observer)
            is_last = step == settings.steps - 1
            # Read once: a signal that comes later waits for the next step.
            stop_status = stop[0] if stop else None
            if session.progress.step % settings.val_every == 0 or is_last:
                _write(_validate(session, loss_module), run, tracker, observer)
            if session.progress.step % settings.checkpoint_every == 0 or is_last or stop_status:
                save_checkpoint(session)
            if stop_status and not is_last:
                status = stop_status
                observer.notice(
                    f"Stopped after step {session.progress.step} and saved. Continue with: "
                    f"depthdial resume {run.path}"
                )
                break
    tracker.close()
    provenance = run.read_provenance() | {"training": asdict(session.progress)}
    run.write_provenance(provenance)
    return TrainResult(run.path, status, session.progress.step)


def save_checkpoint(session: _Session) -> None:
    """Model directory, tokenizer, optimizer state and position, whole or not at all."""

    def write(folder: Path) -> None:
        save_model(session.model, folder)
        session.data.tokenizer.save(folder)
        tensors = session.optimizers.state_tensors()
        write_tensors({name: t.cpu() for name, t in tensors.items()}, folder / OPTIMIZER_FILE)
        state = json.dumps(asdict(session.progress), indent=2) + "\n"
        (folder / STATE_FILE).write_text(state, encoding="utf-8")

    session.run.save_checkpoint(
        session.progress.step, write, keep=session.recipe.train.keep_checkpoints
    )


def _needs_graft(session: _Session) -> bool:
    wanted = session.recipe.model.modulation is not None
    return wanted and session.model.config.modulation is None


def _graft(session: _Session, observer: TrainObserver) -> None:
    """Attach the modulation at the switch; weights, moments and schedule stay."""
    modulation = session.recipe.model.modulation
    assert modulation is not None
    session.model.graft_modulation(modulation, seed=session.recipe.train.seed)
    added = session.optimizers.add_module_parameters(session.model)
    observer.notice(
        f"step {session.progress.step:>6}  mixed depth starts; modulation grafted "
        f"({len(added)} new tensors)"
    )


def _mixes_depths(recipe: Recipe) -> bool:
    """Whether slices of one step may run different loop counts."""
    depth = recipe.depth
    if recipe.model.max_loops == 1:
        return False
    is_split_override = depth.sampler == "override" and depth.override_frac > 0
    is_split_draw = depth.depth_scope == "slice_group"
    return depth.sampler.startswith("independent") or is_split_override or is_split_draw


def _advance(
    session: _Session, loops: tuple[int, ...], position: DataState, seconds: float
) -> Progress:
    """Count one finished step and its cost."""
    recipe, before = session.recipe, session.progress
    tokens = recipe.train.batch_size * recipe.data.context
    per_slice = tokens / len(loops)
    flops = sum(
        flops_per_token(session.model.config, k, context=recipe.data.context, training=True).total
        * per_slice
        for k in loops
    )
    return replace(
        before,
        step=before.step + 1,
        next_row=position.next_row,
        tokens=before.tokens + tokens,
        flops=before.flops + flops,
        seconds=before.seconds + seconds,
    )


def _train_record(
    session: _Session, result: StepResult, loops: tuple[int, ...], seconds: float
) -> dict[str, Any]:
    """One line of metrics.jsonl for a step."""
    tokens = session.recipe.train.batch_size * session.recipe.data.context
    by_loops = {f"train/loss_k{k}": loss for k, loss in result.loss_by_loops.items()}
    rates = {f"lr/{group}": lr for group, lr in session.optimizers.learning_rates().items()}
    return {
        "step": session.progress.step,
        "tokens": session.progress.tokens,
        "train/loss": result.loss,
        **by_loops,
        "loops/mean": sum(loops) / len(loops),
        "loops/per_slice": list(loops),
        **rates,
        "grad_norm": result.grad_norm,
        "train/tok_per_sec": tokens / seconds,
    }


def _validate(session: _Session, loss_module: LossModule) -> dict[str, Any]:
    """Loss at every loop count on the same rows."""
    recipe = session.recipe
    batch = session.data.valid.rows(0, recipe.train.val_rows)
    losses = {
        f"val/loss_k{k}": mean_loss(
            loss_module,
            batch,
            num_loops=k,
            rows_per_forward=recipe.train.micro_batch_size or recipe.train.batch_size,
            precision=recipe.train.precision,
        )
        for k in range(1, recipe.model.max_loops + 1)
    }
    return {"step": session.progress.step, "tokens": session.progress.tokens, **losses}


def _write(record: dict[str, Any], run: RunDir, tracker: Tracker, observer: TrainObserver) -> None:
    run.append_metrics(record)
    tracker.log(record)
    observer.record(record)


@contextmanager
def _stop_signals() -> Iterator[list[Status]]:
    """A list that Ctrl-C or SIGTERM fills; the running step is finished first.

    A second Ctrl-C acts as usual; SIGTERM after Ctrl-C does not, so that a parent that stops its
    children does not cut their save short. Only the main thread may take signals.
    """
    stop: list[Status] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(number: int, frame: object) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.append("interrupted" if number == signal.SIGINT else "terminated")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_interrupt) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
