"""A finished run, and the facts of it that a report prints beside what it measures.

Measuring is in `report_run.py`; what a run folder holds is in `training/run_dir.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthdial.config import Recipe
from depthdial.data.packing import opened_fingerprint
from depthdial.data.shards import TokenDocument, TokenShards
from depthdial.data.tokenizer import Tokenizer
from depthdial.model.checkpoint import load_model
from depthdial.model.count import count_parameters
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.init_model import STATE_FILE
from depthdial.training.provenance import collect_provenance
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import (
    TaskRows,
    held_out_documents,
    prepared_folder,
    start_id,
    task_rows,
)

REPORT_FACTS = "this report"
"""Name of the measurement among the runs; no run can have it, as it has a space."""


@dataclass(frozen=True)
class FinishedRun:
    """A run's newest checkpoint with everything that reporting needs.

    Fields:
        progress: finished steps, tokens, flops and seconds of the checkpoint.
        trained_loops: loop counts that training has run, in those steps and before.
    """

    path: Path
    recipe: Recipe
    model: LoopedLM
    tokenizer: Tokenizer
    provenance: dict[str, Any]
    progress: dict[str, Any]
    trained_loops: tuple[int, ...]
    metrics: list[dict[str, Any]]

    @classmethod
    def open(cls, path: str | Path) -> FinishedRun:
        """Open a run folder.

        Raises: FileNotFoundError or ValueError saying what is missing; ValueError for a run
            without a finished optimizer step.
        """
        run = RunDir.open(path)
        checkpoint = run.latest_checkpoint()
        if checkpoint.step == 0:
            raise ValueError(
                f"{path} has finished no optimizer step, so there is nothing to report. Continue "
                f"it with `depthdial resume {path}`."
            )
        recipe = Recipe.from_file(run.config_path)
        model = load_model(checkpoint.path, device=recipe.train.device).eval()
        return cls(
            path=Path(path),
            recipe=recipe,
            model=model,
            tokenizer=Tokenizer.from_dir(checkpoint.path),
            provenance=run.read_provenance(),
            progress=json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8")),
            trained_loops=model.config.trained_at,
            metrics=run.read_metrics(),
        )

    def start_id(self) -> int | None:
        """The token that every document is scored after; see `training/sources.py`."""
        return start_id(self.tokenizer)

    def unseen_rows(self) -> TaskRows:
        """Unseen rows of the run's synthetic task, the same for every run of its shape."""
        return task_rows(self.recipe, split="valid", tokenizer=self.tokenizer)

    def validation_documents(self) -> list[TokenDocument]:
        """Held-out documents of the run's prepared text.

        Raises: ValueError if they are not those of the run.
        """
        folder = run_folder(self.recipe, self.tokenizer)
        found = opened_fingerprint(TokenShards.open(folder, "valid"), self.tokenizer.opening_id)
        if found != self.progress["data"]["valid"]:
            raise ValueError(
                f"the held-out documents in {folder} are not those that {self.path} was validated "
                "on, so the run may have trained on them. Prepare the same data again."
            )
        return held_out_documents(folder, self.tokenizer)


def run_folder(recipe: Recipe, tokenizer: Tokenizer) -> Path:
    """The prepared text of a run. The model directory that it may have started from is not needed:
    every checkpoint has its tokenizer."""
    is_started = recipe.train.init is not None
    return prepared_folder(recipe, tokenizer=tokenizer if is_started else None)


def training_cost(run: FinishedRun) -> dict[str, Any]:
    """Size and cost of one side, as `report_data.RunCost`."""
    return {
        "params": count_parameters(run.model.config).total,
        "steps": run.progress["step"],
        "tokens": run.progress["tokens"],
        "flops": run.progress["flops"],
        "seconds": run.progress["seconds"],
    }


def validation_curve(run: FinishedRun, side: str) -> list[dict[str, Any]]:
    """Validation losses during training, every loop count."""
    return [
        {"model": side, "step": record["step"], "num_loops": k, "loss": record[f"val/loss_k{k}"]}
        for record in run.metrics
        for k in range(1, run.recipe.model.max_loops + 1)
        if record.get(f"val/loss_k{k}") is not None
    ]


def facts_of(run: FinishedRun, baseline: FinishedRun | None) -> dict[str, dict[str, Any]]:
    """Provenance of both sides by run name, and of the measurement that is going on."""
    train = run.recipe.train
    facts = {run.recipe.name: _printable(run)}
    if baseline is not None:
        name = baseline.recipe.name
        facts[f"{name} (baseline)" if name in facts else name] = _printable(baseline)
    here = collect_provenance(seed=train.seed, device=train.device)
    facts[REPORT_FACTS] = {"git": _without_patch(here["git"])} | {
        key: here[key] for key in ("versions", "hardware")
    }
    return facts


def hardware_text(
    run: FinishedRun, baseline: FinishedRun | None, *, measured_on: dict[str, Any]
) -> str:
    """Which machine did what; one description where all was done on equal ones."""
    roles = [("training of the looped model", run.provenance.get("hardware"))]
    if baseline is not None:
        roles.append(("training of the baseline", baseline.provenance.get("hardware")))
    roles.append(("measurement", measured_on))
    machines: dict[str, list[str]] = {}
    for role, hardware in roles:
        machines.setdefault(_machine(hardware), []).append(role)
    if len(machines) == 1:
        return f"{next(iter(machines))} (training and measurement)"
    return "; ".join(f"{', '.join(done)}: {text}" for text, done in machines.items())


def _machine(hardware: dict[str, Any] | None) -> str:
    """One line; of a run whose provenance was lost nothing is known."""
    if not hardware:
        return "not recorded"
    memory = hardware["memory_bytes"]
    parts = [
        hardware["device_name"] or hardware["cpu_model"] or hardware["machine"],
        f"{hardware['cores']} cores",
        f"{hardware['torch_threads']} thread(s) per process",
        *([] if memory is None else [f"{memory / 2**30:.0f} GiB"]),
        hardware["system"],
    ]
    return ", ".join(parts)


def _printable(run: FinishedRun) -> dict[str, Any]:
    """Provenance with the training cost of the checkpoint that is reported."""
    facts = run.provenance | {"training": run.progress}
    return facts | {"git": _without_patch(run.provenance.get("git"))}


def _without_patch(git: dict[str, Any] | None) -> dict[str, Any] | None:
    """The page says whether there were uncommitted changes; the patch stays in the run."""
    if git is None:
        return None
    return {key: value for key, value in git.items() if key != "dirty_patch"} | {
        "uncommitted_changes": bool(git["dirty_patch"])
    }
