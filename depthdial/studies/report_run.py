"""From finished runs to the data of a report: sweeps, intervals, costs, samples.

Words and page are the business of `report/`; the statistics of `eval/stats.py`; facts that need
no measuring of `finished_run.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from depthdial.data.pointer_chains import PointerChains
from depthdial.eval.depth_sweep import (
    DepthSweep,
    default_loops,
    sweep_documents,
    sweep_questions,
)
from depthdial.eval.latency import Latency, measure_latencies
from depthdial.eval.stats import (
    BOOTSTRAP_SEED,
    EQUAL_MARGIN_NATS,
    mean_interval,
    paired_bootstrap,
    proportion_interval,
)
from depthdial.model.count import executed_sublayers, flops_per_token
from depthdial.model.looped_lm import LoopedLM
from depthdial.report.page import ReportPaths, write_report
from depthdial.studies.finished_run import (
    REPORT_FACTS,
    FinishedRun,
    facts_of,
    hardware_text,
    training_cost,
    validation_curve,
)
from depthdial.studies.samples import question_samples, text_samples
from depthdial.training.sources import TaskRows

SWEEP_FILE, BASELINE_SWEEP_FILE = "sweep.json", "baseline_sweep.json"
TIMED_TOKENS = 8
TIMING_NOTE = (
    "Cached greedy decoding at batch 1 on one CPU thread, all rows of this table in turn in one "
    "process; other processes may have been running. Compare ratios, not milliseconds."
)


def report_run(run_path: str | Path, *, baseline: str | Path | None = None) -> ReportPaths:
    """Sweep a run at every loop count and write its report into its folder.

    Writes report.html, report.json, curve.png, sweep.json and, with a baseline,
    baseline_sweep.json; the baseline's own folder is only read.

    Raises: FileNotFoundError or ValueError for a folder that holds no trained run; ValueError for
        a baseline with loops, or with other data.
    """
    run = FinishedRun.open(run_path)
    other = None if baseline is None else FinishedRun.open(baseline)
    section = section_of(run, other)
    return write_sections([section], Path(run_path), title=f"Depthdial run {run.recipe.name}")


def write_sections(sections: list[dict[str, Any]], folder: Path, *, title: str) -> ReportPaths:
    """One page from what `section_of` returns, with the data beside it."""
    facts = {name: values for part in sections for name, values in part["provenance"].items()}
    # The measurement stands last, after the runs of all sections.
    facts[REPORT_FACTS] = facts.pop(REPORT_FACTS)
    data = {
        "title": title,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sections": [part["section"] for part in sections],
        "provenance": facts,
    }
    return write_report(data, folder)


def section_of(run: FinishedRun, baseline: FinishedRun | None) -> dict[str, Any]:
    """Everything measured about one run (and its baseline): `section`, and `provenance` by run.

    The sweeps are written into the run's folder. Raises ValueError as `report_run`.
    """
    loops = default_loops(run.model.config.max_loops)
    base_sweep = None
    if baseline is not None:
        _check_baseline(run, baseline)
        base_sweep = sweep_run(baseline, [1])
    sweep = sweep_run(run, loops)
    if base_sweep is not None:
        sweep.check_paired(base_sweep)
        base_sweep.save(run.path / BASELINE_SWEEP_FILE)
    sweep.save(run.path / SWEEP_FILE)
    times = _latencies(run, baseline, loops)
    facts = facts_of(run, baseline)
    task = None if run.recipe.data.task is None else run.unseen_rows()
    section: dict[str, Any] = {
        "name": "Text" if task is None else task.title.capitalize(),
        "kind": run.recipe.data.task or "text",
        "what": _what(run, task, sweep),
        "margin": EQUAL_MARGIN_NATS,
        "documents": len(sweep.names),
        "tokens": int(sweep.tokens_N.sum()),
        "num_seeds": 1,
        "depths": [_depth(run, sweep, k, base_sweep, times[k]) for k in sweep.loops],
        "training": {"looped": training_cost(run)},
        "training_curve": validation_curve(run, "looped"),
        "timing_note": TIMING_NOTE,
        "settings": run.recipe.to_dict(),
        "hardware": hardware_text(run, baseline, measured_on=facts[REPORT_FACTS]["hardware"]),
        "chance_accuracy": None if task is None else task.chance_accuracy,
        "samples": (text_samples if task is None else question_samples)(run, baseline),
    }
    if baseline is not None and base_sweep is not None:
        section["baseline"] = _measured(baseline, base_sweep, 1, times["baseline"])
        section["training"]["baseline"] = training_cost(baseline)
        section["training_curve"] += validation_curve(baseline, "baseline")
    return {"section": section, "provenance": facts}


def sweep_run(run: FinishedRun, loops: Sequence[int]) -> DepthSweep:
    """Loss of the run's held-out data at some loop counts, marked by what training ran."""
    if run.recipe.data.task is not None:
        return sweep_questions(
            run.model,
            run.unseen_rows(),
            loops=loops,
            trained_loops=run.trained_loops,
        )
    start_id = run.start_id()
    return sweep_documents(
        run.model,
        run.validation_documents(),
        loops=loops,
        context=run.recipe.data.context,
        start_id=start_id,
        trained_loops=run.trained_loops,
    )


def _check_baseline(run: FinishedRun, baseline: FinishedRun) -> None:
    """Raises ValueError for a baseline with loops, or one that reads its data otherwise."""
    max_loops = baseline.model.config.max_loops
    if max_loops > 1:
        raise ValueError(
            f"the baseline {baseline.path} has max_loops={max_loops}; a report compares with a "
            "matched model without loops (max_loops=1), as the recipe tiny-text-baseline. To "
            "compare two looped models use `depthdial sweep MODEL --baseline MODEL`."
        )
    ours, theirs = run.recipe.data.to_dict(), baseline.recipe.data.to_dict()
    for key in ("task", "context", "num_chains", "chain_length"):
        if ours[key] != theirs[key]:
            raise ValueError(
                f"{run.path} has data.{key}={ours[key]}, the baseline {baseline.path} has "
                f"{theirs[key]}. They must be equal to be compared."
            )
    if run.tokenizer.to_json() != baseline.tokenizer.to_json():
        raise ValueError(
            f"{run.path} and the baseline {baseline.path} have different tokenizers, so their "
            "losses per token cannot be compared. Give a baseline with the same tokenizer."
        )


def _what(run: FinishedRun, task: TaskRows | None, sweep: DepthSweep) -> str:
    """One neutral sentence or two on the task and the evaluation set."""
    data = run.recipe.data
    if isinstance(task, PointerChains):
        return (
            f"Shuffled lines tell {task.row_words}: each letter points at the next one, the last "
            "at a digit. The model names the digit behind every letter. "
            f"{len(sweep.names)} unseen rows."
        )
    if task is not None:
        return (
            f"Each of {data.context} words is a value or a table look-up of an earlier word's "
            f"value; the model names the value of every word. {len(sweep.names)} unseen programs."
        )
    source = f"corpus {data.corpus}" if data.corpus else "the prepared text"
    return (
        f"Next-token prediction on {len(sweep.names)} held-out documents of {source}, rows of "
        f"{data.context} tokens, every token scored once."
    )


def _measured(run: FinishedRun, sweep: DepthSweep, k: int, latency: Latency) -> dict[str, Any]:
    """Loss with interval, cost, and accuracy by dependency depth."""
    config = run.model.config
    values: dict[str, Any] = {
        "loss": sweep.mean_loss(k),
        "low": None,
        "high": None,
        "executed_sublayers": executed_sublayers(config, k),
        "flops_per_token": flops_per_token(config, k, context=run.recipe.data.context).total,
        "ms_per_token_min": latency.min_ms,
        "ms_per_token_median": latency.median_ms,
    }
    if len(sweep.names) >= 2:
        interval = mean_interval(sweep.nll(k), sweep.tokens_N, seed=BOOTSTRAP_SEED)
        values |= {"low": interval.low, "high": interval.high}
    if sweep.correct_KNP is not None:
        values["accuracy_by_depth"] = _accuracies(sweep, k)
    return values


def _depth(
    run: FinishedRun, sweep: DepthSweep, k: int, baseline: DepthSweep | None, latency: Latency
) -> dict[str, Any]:
    """The looped model at one loop count, compared with the baseline and the loop count before."""
    position = sweep.loops.index(k)
    previous = sweep.loops[position - 1] if position else None
    return {
        "num_loops": k,
        "trained": sweep.is_trained(k),
        **_measured(run, sweep, k, latency),
        "vs_baseline": None if baseline is None else _difference(sweep, k, baseline, 1),
        "vs_previous": None if previous is None else _difference(sweep, k, sweep, previous),
    }


def _difference(a: DepthSweep, k_a: int, b: DepthSweep, k_b: int) -> dict[str, float | None]:
    """Paired difference a - b; a single document has no interval."""
    if len(a.names) < 2:
        return {"estimate": a.mean_loss(k_a) - b.mean_loss(k_b), "low": None, "high": None}
    interval = paired_bootstrap(a.nll(k_a), b.nll(k_b), a.tokens_N, seed=BOOTSTRAP_SEED)
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def _accuracies(sweep: DepthSweep, k: int) -> list[dict[str, Any]]:
    """Accuracy at every dependency depth that some program has."""
    assert sweep.correct_KNP is not None and sweep.total_NP is not None
    correct_NP = sweep.correct_KNP[sweep.loops.index(k)]
    rows = []
    for depth_idx in range(sweep.total_NP.shape[1]):
        correct_N, total_N = correct_NP[:, depth_idx], sweep.total_NP[:, depth_idx]
        if not total_N.any():
            continue
        row = {
            "dependency_depth": depth_idx + 1,
            "accuracy": float(correct_N.sum() / total_N.sum()),
            "low": None,
            "high": None,
            "positions": int(total_N.sum()),
        }
        if (total_N > 0).sum() >= 2:
            interval = proportion_interval(correct_N, total_N, seed=BOOTSTRAP_SEED)
            row |= {"low": interval.low, "high": interval.high}
        rows.append(row)
    return rows


def _latencies(
    run: FinishedRun, baseline: FinishedRun | None, loops: Sequence[int]
) -> dict[int | str, Latency]:
    """Decode times by loop count, and of the `baseline`, all in turn.

    On one thread, as the note says, whatever the process is set to.
    """
    sides: dict[int | str, tuple[LoopedLM, int]] = {k: (run.model, k) for k in loops}
    if baseline is not None:
        sides["baseline"] = (baseline.model, 1)
    half = max(1, run.recipe.data.context // 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = measure_latencies(
            list(sides.values()), prompt_tokens=half, new_tokens=min(TIMED_TOKENS, half)
        )
    finally:
        torch.set_num_threads(threads)
    return dict(zip(sides, times, strict=True))
