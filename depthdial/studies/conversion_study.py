"""One job of the conversion study: all arms of a task at one seed, trained, timed and scored.

Arms are in `conversion_arms.py`, text in `conversion_data.py`, comparisons in
`conversion_results.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthdial.convert.convert import convert
from depthdial.data.packing import Batch, PackedText
from depthdial.data.pointer_chains import PointerChains
from depthdial.data.shards import TokenShards
from depthdial.data.tokenizer import Tokenizer
from depthdial.eval.depth_sweep import DepthSweep, sweep_documents, sweep_questions
from depthdial.model.checkpoint import load_model
from depthdial.studies.conversion_arms import (
    CONTROL,
    CORE,
    EQUAL_TIME,
    LOOPED,
    LOOPS,
    STAGE_ONE,
    Arm,
    Task,
    TrainedArm,
    run_arm,
    start_folder,
    step_seconds,
)
from depthdial.studies.conversion_data import (
    CONTEXT,
    TRAINED_CORPORA,
    UNSEEN_CORPUS,
    evaluation_rows,
    prepare_mixture,
)
from depthdial.training.sources import VALIDATION_SEED

PRECISION = "bf16"
ROWS_PER_FORWARD = 6
ROWS_PER_CORPUS = 30
QUESTION_ROWS = 100
SHORT_CHAINS = {"num_chains": 3, "chain_length": 4}
LONG_CHAINS = {"num_chains": 2, "chain_length": 7}
TASKS = ("text", "chains")

Score = Callable[[Path], DepthSweep]


@dataclass(frozen=True)
class Job:
    """What the arms of a task have in common.

    Fields: base: dense folder that every arm starts from. rows: some rows to time steps on.
    score: sweep of a model folder.
    """

    task: Task
    base: Path
    rows: Batch
    score: Score


def run_job(name: str, base: Path, folder: Path, *, seed: int) -> dict[str, Any]:
    """Train and score every arm of a task; as plain JSON types.

    Args: folder: of this job; an arm that was scored there is not run again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_dir(base)
    if name == "text":
        job = text_job(base, folder, tokenizer, seed=seed)
    else:
        job = chain_job(base, folder, tokenizer, seed=seed)
    starts = {
        arm.name: (arm, start_folder(arm, job.task, job.base, folder, seed=seed))
        for arm in (CONTROL, *LOOPED)
    }
    plain = {"base": job.base} | ({"untaught": base} if job.base != base else {})
    scored = {
        side: _once(folder / f"{side}.json", lambda path=path: score_plain(path, job, folder))
        for side, path in plain.items()
    }
    seconds = _once(folder / "seconds.json", lambda: step_seconds(starts, job.rows))
    slowest = max(seconds[arm.name] for arm in LOOPED)
    equal_steps = round(job.task.steps * slowest / seconds[CONTROL.name])
    starts[EQUAL_TIME.name] = EQUAL_TIME, starts[CONTROL.name][1]
    for side, (arm, start) in starts.items():
        steps = equal_steps if arm is EQUAL_TIME else job.task.steps

        def train_and_score(arm: Arm = arm, start: Path = start, steps: int = steps) -> Any:
            return score_arm(
                run_arm(arm, job.task, start, folder, seed=seed, steps=steps), job.score
            )

        scored[side] = _once(folder / f"{side}.json", train_and_score)
    return {"seed": seed, "step_seconds": seconds, "sides": scored}


def score_arm(trained: TrainedArm, score: Score) -> dict[str, Any]:
    """Sweep of a trained arm, and how much it trained; its run is removed."""
    result = {
        "steps": trained.steps,
        "tokens": trained.tokens,
        "rate": mean_rate(trained.checkpoint),
        "sweep": score(trained.checkpoint).to_dict(),
    }
    # Half a gigabyte, of which the sweep is all that is compared.
    shutil.rmtree(trained.run)
    return result


def score_plain(base: Path, job: Job, folder: Path) -> dict[str, Any]:
    """Sweep of an untrained base whose window is looped as it is; one loop is the base itself."""
    looped = folder / "naive"
    convert(base, looped, method="loop-window", core=CORE, overwrite=True)
    sweep = job.score(looped)
    shutil.rmtree(looped)
    return {"steps": 0, "tokens": 0, "rate": None, "sweep": sweep.to_dict()}


def _once(path: Path, compute: Callable[[], Any]) -> Any:
    """A JSON value computed once and kept in a file."""
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(compute()), encoding="utf-8")
        temporary.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


def text_job(base: Path, folder: Path, tokenizer: Tokenizer, *, seed: int) -> Job:
    """A mixture of three corpora; scored on their held-out blocks and on an untrained corpus."""
    mixture = folder / "mixture"
    if not mixture.exists():
        prepare_mixture(mixture, tokenizer)
    corpora = (*TRAINED_CORPORA, UNSEEN_CORPUS)
    rows = evaluation_rows(corpora, tokenizer, per_corpus=ROWS_PER_CORPUS)

    def score(model_folder: Path) -> DepthSweep:
        return sweep_documents(
            load_model(model_folder),
            rows,
            loops=LOOPS,
            context=CONTEXT,
            start_id=None,
            rows_per_forward=ROWS_PER_FORWARD,
            precision=PRECISION,
        )

    task = Task("text", {"path": str(mixture), "context": CONTEXT}, batch_size=4, steps=160)
    shards = TokenShards.open(mixture, "train")
    rows = PackedText(shards, context=CONTEXT, seed=seed, opening_id=shards.eos_id)
    return Job(task, base, rows.rows(0, task.batch_size), score)


def chain_job(base: Path, folder: Path, tokenizer: Tokenizer, *, seed: int) -> Job:
    """Long chains, from a model that learnt short ones with one loop; scored on unseen chains."""
    stage = Task("stage", _chain_data(tokenizer, **SHORT_CHAINS), batch_size=12, steps=100)
    taught = folder / "taught"
    if not taught.exists():
        start = start_folder(STAGE_ONE, stage, base, folder, seed=seed)
        short = run_arm(STAGE_ONE, stage, start, folder, seed=seed, steps=stage.steps)
        convert(short.checkpoint, taught, method="merge-first-pass")
    unseen = PointerChains(tokenizer, VALIDATION_SEED, split="valid", **LONG_CHAINS)

    def score(model_folder: Path) -> DepthSweep:
        return sweep_questions(
            load_model(model_folder),
            unseen,
            loops=LOOPS,
            num_rows=QUESTION_ROWS,
            max_depth=LONG_CHAINS["chain_length"],
            rows_per_forward=ROWS_PER_FORWARD,
            precision=PRECISION,
        )

    task = Task("chains", _chain_data(tokenizer, **LONG_CHAINS), batch_size=12, steps=60)
    rows = PointerChains(tokenizer, seed, **LONG_CHAINS).rows(0, task.batch_size)
    return Job(task, taught, rows, score)


def mean_rate(folder: Path) -> float | None:
    """Mean share of the candidate that later passes take; None where it is not one number."""
    rate = load_model(folder).state_update.rate
    return None if rate is None else float(rate.detach().mean())


def _chain_data(tokenizer: Tokenizer, *, num_chains: int, chain_length: int) -> dict[str, Any]:
    rows = PointerChains(tokenizer, 0, num_chains=num_chains, chain_length=chain_length)
    return {
        "task": "pointer_chain",
        "num_chains": num_chains,
        "chain_length": chain_length,
        "context": rows.context,
    }
