"""Train a looped model from a recipe, new or from a model directory, and resume bit for bit.

Linear on purpose: open, build, then one loop that draws depths, steps, writes and validates.
All randomness is a pure function of (seed, step or row), so a checkpoint holds no generator.
A step index is 0-based; metrics and checkpoints count finished steps.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from depthdial.config import ModulationConfig, Recipe
from depthdial.config.effects import slices_differ, whole_steps
from depthdial.data.packing import DataState, iterate_batches
from depthdial.model.device import check_device
from depthdial.training.cost import step_flops
from depthdial.training.depth_schedule import DepthSchedule
from depthdial.training.init_model import (
    first_model,
    folder_facts,
    freeze,
)
from depthdial.training.objective import num_compared
from depthdial.training.optim import Optimizers, lr_scale_at
from depthdial.training.parallel import compile_blocks
from depthdial.training.progress import SilentObserver, TrainObserver
from depthdial.training.provenance import collect_provenance
from depthdial.training.run_dir import RunDir
from depthdial.training.session import Progress, Session, contents, save_checkpoint, taken_up
from depthdial.training.sources import open_data
from depthdial.training.step import (
    LossModule,
    StepPlan,
    StepResult,
    plan_step,
    train_step,
)
from depthdial.training.stop_signals import StopRequested, stop_signals
from depthdial.training.teacher import open_teacher, teacher_folder
from depthdial.training.trackers import Onlookers, make_tracker
from depthdial.training.validation import validate, validated_loops

Status = Literal["finished", "interrupted", "terminated"]


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` or `resume` returns.

    status: `finished`; `interrupted` (Ctrl-C) or `terminated` (SIGTERM) after saving.
    """

    path: Path
    status: Status
    step: int


def train(
    recipe: Recipe, *, root: str | Path = "runs", observer: TrainObserver | None = None
) -> TrainResult:
    """Train from the first step into a new folder root/name.

    Raises: ValueError if that run exists, or recipe, data and the folder it starts from do not fit;
        InUseError if another process trains it.
    """
    check_device(recipe.train.device)
    init = recipe.train.init
    model = first_model(recipe, starts_late=depth_schedule(recipe).switch_step > 0)
    data = open_data(recipe)
    provenance = collect_provenance(seed=recipe.train.seed, device=recipe.train.device)
    if init is not None:
        provenance["init"] = folder_facts(init)
    if (source := teacher_folder(recipe)) is not None:
        provenance["teacher"] = folder_facts(source)
    teacher = open_teacher(recipe, data.tokenizer)
    with RunDir.create(root, recipe.name, config=recipe, provenance=provenance) as run:
        session = Session(
            recipe,
            run,
            data,
            model,
            Optimizers(model, recipe.optim),
            Progress(contents(recipe, data)),
            provenance,
            teacher,
            None if init is None else Path(init),
        )
        # Whatever stops the run from here on, there is something to resume from.
        save_checkpoint(session)
        return _run(session, observer or SilentObserver())


def _notice_short_ramps(recipe: Recipe, onlookers: Onlookers) -> None:
    """Say where a rise or fall of the learning rate that the recipe names is too short to be one.

    No refusal: a recipe must be usable for a few steps.
    """
    steps = recipe.train.steps
    for key, shortest, what in (("warmup_frac", 2, "rise"), ("decay_frac", 1, "fall")):
        value, default = getattr(recipe.optim, key), type(recipe.optim).model_fields[key].default
        if value not in (0, default) and whole_steps(value, steps) < shortest:
            onlookers.notice(
                f"optim.{key}={value:g} of {steps} steps is too short: the learning rate has no "
                f"{what}."
            )


def resume(
    path: str | Path,
    *,
    checkpoint: str | None = None,
    overrides: dict[str, Any] | None = None,
    observer: TrainObserver | None = None,
) -> TrainResult:
    """Continue a run from its newest intact checkpoint, as if it had never stopped.

    Args:
        checkpoint: name of an older one to go on from, e.g. `step_40`; later ones are renamed, and
            later lines of metrics.jsonl moved to metrics.discarded.jsonl.
        overrides: dotted recipe keys to change from here on, e.g. {"optim.lr": 1e-3}; moments and
            data position stay. Written to the run's config.json.

    Raises: ValueError for a key that would make it another run (see `RESUME_KEYS`); InUseError if
        another process trains the run.
    """
    run = RunDir.open(path)
    with run.held():
        session = taken_up(run, overrides or {}, name=checkpoint)
        return _run(session, observer or SilentObserver())


def depth_schedule(recipe: Recipe) -> DepthSchedule:
    """The loop counts of a recipe's run."""
    return DepthSchedule.from_config(
        recipe.depth,
        max_loops=recipe.model.max_loops,
        seed=recipe.train.seed,
        total_steps=recipe.train.steps,
    )


def _run(session: Session, observer: TrainObserver) -> TrainResult:
    recipe, run, optimizers = session.recipe, session.run, session.optimizers
    settings = recipe.train
    schedule = depth_schedule(recipe)
    num_slices = recipe.num_slices
    is_mixed = slices_differ(recipe.depth, recipe.model.max_loops)
    loss_module = LossModule(session.model, teacher=session.teacher)
    if settings.compile:
        compile_blocks(loss_module)
    onlookers = Onlookers(observer, make_tracker(recipe, run.path))
    if not session.progress.step:
        _notice_short_ramps(recipe, onlookers)
    position = DataState(session.progress.next_row)
    batches = iterate_batches(session.data.train, settings.batch_size, position)

    def write_validation() -> bool:
        """False where a stop came first: it takes a validation away, which is made up for."""
        try:
            with stop.ending_at_once():
                record = _validate(session, loss_module)
        except StopRequested:
            return False
        _write(record, run, onlookers)
        return True

    with stop_signals() as stop:
        is_complete = not _needs_validation(session) or write_validation()
        first_step = session.progress.step
        for step in range(first_step, settings.steps if is_complete else first_step):
            started = time.perf_counter()
            if step >= schedule.switch_step and _needs_graft(session):
                _graft(session, onlookers)
            plan = plan_step(
                schedule,
                step=step,
                num_slices=num_slices,
                is_mixed=is_mixed and step >= schedule.switch_step,
                has_short_paths=recipe.objective.trajectory is not None,
            )
            scale = lr_scale_at(recipe.optim, step=step, total_steps=settings.steps)
            optimizers.set_lr_scale(scale)
            batch, position = next(batches)
            result = train_step(
                loss_module,
                batch,
                optimizers,
                loops_per_slice=plan,
                micro_batch_size=settings.micro_batch_size or settings.batch_size,
                precision=settings.precision,
                objective=recipe.objective,
            )
            seconds = time.perf_counter() - started
            session.progress = _advance(session, plan, position, seconds)
            session.count_training(plan.loop_counts)
            session.loss = max(result.loss_by_loops.values())
            record = _train_record(session, result, plan, seconds)
            _write(record, run, onlookers)
            is_last = step == settings.steps - 1
            if session.progress.step % settings.val_every == 0 or is_last:
                is_complete = write_validation()
            # Read once: a signal that comes later waits for the next step.
            stop_status = stop.status
            if session.progress.step % settings.checkpoint_every == 0 or is_last or stop_status:
                save_checkpoint(session)
            if stop_status and not is_last:
                break
    status: Status = "finished"
    if session.progress.step < settings.steps or not is_complete:
        assert stop.status is not None, "nothing else ends a run before its last validation"
        status = stop.status
        onlookers.notice(
            f"Stopped after step {session.progress.step} and saved. Continue with: "
            f"depthdial resume {run.path}"
        )
    onlookers.close()
    # Not read again: a file that was lost meanwhile must not end what is trained and saved.
    run.write_provenance(session.provenance | {"training": asdict(session.progress)})
    return TrainResult(run.path, status, session.progress.step)


def _needs_graft(session: Session) -> bool:
    wanted = session.recipe.model.modulation is not None
    return wanted and session.model.config.modulation is None


def _graft(session: Session, onlookers: Onlookers) -> None:
    """Attach the modulation at the switch; weights, moments and schedule stay."""
    recipe = session.recipe
    assert isinstance(recipe.model.modulation, ModulationConfig), "checked before the first step"
    session.model.graft_modulation(recipe.model.modulation, seed=recipe.train.seed)
    freeze(session.model, recipe.optim.freeze)
    added = session.optimizers.add_module_parameters(session.model)
    onlookers.notice(
        f"step {session.progress.step:>6}  mixed depth starts; modulation grafted "
        f"({len(added)} new tensors)"
    )


def _advance(session: Session, plan: StepPlan, position: DataState, seconds: float) -> Progress:
    """Count one finished step and its cost."""
    recipe, before, teacher = session.recipe, session.progress, session.teacher
    tokens = recipe.train.batch_size * recipe.data.context
    flops = step_flops(
        session.model.config,
        plan.forwards,
        context=recipe.data.context,
        tokens_per_slice=tokens // len(plan.loops),
        teacher=None if teacher is None else (teacher.model.config, teacher.num_loops),
        num_compared=num_compared(recipe.objective.distill, plan.loops),
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
    session: Session, result: StepResult, plan: StepPlan, seconds: float
) -> dict[str, Any]:
    """One line of metrics.jsonl for a step."""
    tokens = session.recipe.train.batch_size * session.recipe.data.context
    by_loops = {f"train/loss_k{k}": loss for k, loss in result.loss_by_loops.items()}
    terms = {f"train/{name}": value for name, value in result.terms.items()}
    rates = {f"lr/{group}": lr for group, lr in session.optimizers.learning_rates().items()}
    return {
        "step": session.progress.step,
        "tokens": session.progress.tokens,
        "train/loss": result.loss,
        **by_loops,
        **terms,
        "loops/mean": sum(plan.loops) / len(plan.loops),
        "loops/per_slice": list(plan.loops),
        **rates,
        "grad_norm": result.grad_norm,
        "train/tok_per_sec": tokens / seconds,
    }


def _validate(session: Session, loss_module: LossModule) -> dict[str, Any]:
    """Losses on the same rows at every validation."""
    losses = validate(
        loss_module,
        session.data.valid,
        session.recipe.train,
        validated_loops(session.recipe.model),
    )
    return {"step": session.progress.step, "tokens": session.progress.tokens, **losses}


def _needs_validation(session: Session) -> bool:
    """Whether the last step has one that a stop took away, which a run makes up for."""
    step, settings = session.progress.step, session.recipe.train
    if not step or (step % settings.val_every and step < settings.steps):
        return False
    records = session.run.read_metrics()
    return not any(r["step"] == step and "val/loss_k1" in r for r in records)


def _write(record: dict[str, Any], run: RunDir, onlookers: Onlookers) -> None:
    run.append_metrics(record)
    onlookers.record(record)
