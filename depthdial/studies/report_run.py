"""From finished runs to the data of a report: sweeps, intervals, costs, samples.

Words and page are the business of `report.py`; the statistics of `eval/stats.py`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthdial.config import Recipe
from depthdial.data.shards import TokenDocument, TokenShards
from depthdial.data.synthetic import NUM_VALUES, PointerPrograms
from depthdial.data.tokenizer import Tokenizer
from depthdial.engine.generate import generate
from depthdial.engine.sampling import Sampling
from depthdial.eval.depth_sweep import (
    DepthSweep,
    Latency,
    default_loops,
    measure_latency,
    sweep_documents,
    sweep_pointer_programs,
)
from depthdial.eval.stats import (
    BOOTSTRAP_SEED,
    EQUAL_MARGIN_NATS,
    Interval,
    mean_interval,
    paired_bootstrap,
    proportion_interval,
)
from depthdial.model.checkpoint import load_model
from depthdial.model.count import count_parameters, executed_sublayers, flops_per_token
from depthdial.model.looped_lm import LoopedLM
from depthdial.report import ReportPaths, write_report
from depthdial.train.run_dir import RunDir
from depthdial.train.sources import VALIDATION_SEED, prepared_folder

POINTER_ROWS = 1024
POINTER_MAX_DEPTH = 16
SAMPLE_PROMPTS, SAMPLE_PROMPT_TOKENS, SAMPLE_NEW_TOKENS = 2, 24, 48
TIMING_NOTE = (
    "Cached greedy decoding at batch 1, one thread, all depths interleaved in one process; other "
    "programs may have been running. Compare ratios, not milliseconds."
)


@dataclass(frozen=True)
class FinishedRun:
    """A run's newest checkpoint with everything that reporting needs."""

    path: Path
    recipe: Recipe
    model: LoopedLM
    tokenizer: Tokenizer
    provenance: dict[str, Any]
    metrics: list[dict[str, Any]]

    @classmethod
    def open(cls, path: str | Path) -> FinishedRun:
        """Open a run folder. Raises FileNotFoundError or ValueError saying what is missing."""
        run = RunDir.open(path)
        checkpoint = run.latest_checkpoint()
        recipe = Recipe.from_file(run.config_path)
        model = load_model(checkpoint.path, device=recipe.train.device).eval()
        provenance = run.read_provenance()
        if "training" not in provenance:
            state = json.loads((checkpoint.path / "state.json").read_text(encoding="utf-8"))
            provenance = provenance | {"training": state}
        tokenizer = Tokenizer.from_dir(checkpoint.path)
        return cls(Path(path), recipe, model, tokenizer, provenance, run.read_metrics())


def report_run(run_path: str | Path, *, baseline: str | Path | None = None) -> ReportPaths:
    """Sweep a run at every depth and write report.html, curve.png and sweep.json into it."""
    run = FinishedRun.open(run_path)
    other = None if baseline is None else FinishedRun.open(baseline)
    section = section_of(run, other)
    return write_sections([section], Path(run_path), title=f"Depthdial run {run.recipe.name}")


def write_sections(sections: list[dict[str, Any]], folder: Path, *, title: str) -> ReportPaths:
    """One page from sections, with the data beside it."""
    data = {
        "title": title,
        "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sections": [section["section"] for section in sections],
        "provenance": sections[0]["provenance"],
    }
    paths = write_report(data, folder)
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return paths


def section_of(run: FinishedRun, baseline: FinishedRun | None) -> dict[str, Any]:
    """Everything measured about one run (and its baseline): section and provenance."""
    is_text = run.recipe.data.task is None
    loops = default_loops(run.model.config.max_loops)
    sweep = _sweep(run, loops)
    sweep.save(run.path / "sweep.json")
    latency = _latency(run, loops)
    section: dict[str, Any] = {
        "name": "Text" if is_text else "Pointer programs",
        "kind": "text" if is_text else "pointer_program",
        "what": _what(run, sweep),
        "margin": EQUAL_MARGIN_NATS,
        "documents": len(sweep.names),
        "tokens": int(sweep.tokens_N.sum()),
        "num_seeds": 1,
        "training": {"looped": _cost(run)},
        "training_curve": _curve(run, "looped"),
        "timing_note": TIMING_NOTE,
        "settings": run.recipe.to_dict(),
        "hardware": _hardware(run),
        "chance_accuracy": None if is_text else 1 / NUM_VALUES,
    }
    base_sweep = None
    if baseline is not None:
        base_sweep = _sweep(baseline, [1])
        base_sweep.save(baseline.path / "sweep.json")
        base_latency = _latency(baseline, [1])
        section["baseline"] = _measured(baseline, base_sweep, 1, base_latency)
        section["training"]["baseline"] = _cost(baseline)
        section["training_curve"] += _curve(baseline, "baseline")
    section["depths"] = [_depth(run, sweep, k, base_sweep, latency) for k in sweep.loops]
    make_samples = _text_samples if is_text else _pointer_samples
    section["samples"] = make_samples(run, baseline)
    provenance = {k: v for k, v in run.provenance.items() if k not in ("training", "hardware")}
    return {"section": section, "provenance": _without_patch(provenance)}


def _sweep(run: FinishedRun, loops: Sequence[int]) -> DepthSweep:
    if run.recipe.data.task is not None:
        return sweep_pointer_programs(
            run.model,
            _validation_programs(run),
            loops=loops,
            num_rows=POINTER_ROWS,
            max_depth=POINTER_MAX_DEPTH,
        )
    return sweep_documents(
        run.model,
        _validation_documents(run),
        loops=loops,
        context=run.recipe.data.context,
        start_id=run.tokenizer.eos_id or 0,
    )


def _validation_programs(run: FinishedRun) -> PointerPrograms:
    return PointerPrograms(VALIDATION_SEED, context=run.recipe.data.context, split="valid")


def _validation_documents(run: FinishedRun) -> list[TokenDocument]:
    return list(TokenShards.open(prepared_folder(run.recipe), "valid").documents())


def _what(run: FinishedRun, sweep: DepthSweep) -> str:
    data = run.recipe.data
    if data.task is not None:
        return (
            f"Each of {data.context} words is a value or a table look-up of an earlier word's "
            f"value; the model names the value of every word. {len(sweep.names)} unseen programs."
        )
    source = f"corpus {data.corpus}" if data.corpus else "the prepared text"
    return (
        f"Next-token prediction on {len(sweep.names)} held-out documents of {source}, rows of "
        f"{data.context} tokens, every token scored once."
    )


def _measured(
    run: FinishedRun, sweep: DepthSweep, k: int, latency: dict[int, Latency]
) -> dict[str, Any]:
    """Loss with interval, cost, and accuracy by dependency depth."""
    interval = mean_interval(sweep.nll(k), sweep.tokens_N, seed=BOOTSTRAP_SEED)
    config = run.model.config
    values: dict[str, Any] = {
        "loss": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "executed_sublayers": executed_sublayers(config, k),
        "flops_per_token": flops_per_token(config, k, context=run.recipe.data.context).total,
        "ms_per_token_min": latency[k].min_ms,
        "ms_per_token_median": latency[k].median_ms,
    }
    if sweep.correct_KNP is not None:
        values["accuracy_by_depth"] = _accuracies(sweep, k)
    return values


def _depth(
    run: FinishedRun,
    sweep: DepthSweep,
    k: int,
    baseline: DepthSweep | None,
    latency: dict[int, Latency],
) -> dict[str, Any]:
    def difference(nll_N: np.ndarray) -> dict[str, float]:
        interval = paired_bootstrap(sweep.nll(k), nll_N, sweep.tokens_N, seed=BOOTSTRAP_SEED)
        return _bounds(interval)

    position = sweep.loops.index(k)
    previous = sweep.loops[position - 1] if position else None
    return {
        "num_loops": k,
        "trained": sweep.is_trained(k),
        **_measured(run, sweep, k, latency),
        "vs_baseline": None if baseline is None else difference(baseline.nll(1)),
        "vs_previous": None if previous is None else difference(sweep.nll(previous)),
    }


def _bounds(interval: Interval) -> dict[str, float]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def _accuracies(sweep: DepthSweep, k: int) -> list[dict[str, Any]]:
    assert sweep.correct_KNP is not None and sweep.total_NP is not None
    correct_NP = sweep.correct_KNP[sweep.loops.index(k)]
    rows = []
    for depth_idx in range(sweep.total_NP.shape[1]):
        correct_N, total_N = correct_NP[:, depth_idx], sweep.total_NP[:, depth_idx]
        if (total_N > 0).sum() < 2:
            continue
        interval = proportion_interval(correct_N, total_N, seed=BOOTSTRAP_SEED)
        rows.append(
            {
                "dependency_depth": depth_idx + 1,
                "accuracy": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "positions": int(total_N.sum()),
            }
        )
    return rows


def _latency(run: FinishedRun, loops: Sequence[int]) -> dict[int, Latency]:
    """Decode times on one thread, as the note says, whatever the process is set to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        half = max(1, run.recipe.data.context // 2)
        return measure_latency(run.model, loops=loops, prompt_tokens=half, new_tokens=min(8, half))
    finally:
        torch.set_num_threads(threads)


def _cost(run: FinishedRun) -> dict[str, Any]:
    training = run.provenance["training"]
    return {
        "params": count_parameters(run.model.config).total,
        "steps": training["step"],
        "tokens": training["tokens"],
        "flops": training["flops"],
        "seconds": training["seconds"],
    }


def _curve(run: FinishedRun, side: str) -> list[dict[str, Any]]:
    """Validation losses during training, every loop count."""
    return [
        {"model": side, "step": record["step"], "num_loops": k, "loss": record[f"val/loss_k{k}"]}
        for record in run.metrics
        for k in range(1, run.recipe.model.max_loops + 1)
        if record.get(f"val/loss_k{k}") is not None
    ]


def _hardware(run: FinishedRun) -> str:
    found = run.provenance["hardware"]
    parts = [
        found.get("device_name") or found.get("cpu_model") or found["machine"],
        f"{found['cores']} cores",
        f"{found['torch_threads']} thread(s) per process",
        f"{found['memory_bytes'] / 2**30:.0f} GiB",
        found["system"],
    ]
    return ", ".join(parts)


def _without_patch(provenance: dict[str, Any]) -> dict[str, Any]:
    """The page says whether there were uncommitted changes; the patch stays in the run."""
    git = provenance.get("git")
    if isinstance(git, dict) and "dirty_patch" in git:
        git = {k: v for k, v in git.items() if k != "dirty_patch"} | {
            "uncommitted_changes": bool(git["dirty_patch"])
        }
        return provenance | {"git": git}
    return provenance


def _text_samples(run: FinishedRun, baseline: FinishedRun | None) -> list[dict[str, Any]]:
    """Continuations of held-out openings at every trained loop count."""
    sampling = Sampling(temperature=0.7, top_p=0.95, seed=0)
    samples = []
    for document in _validation_documents(run)[:SAMPLE_PROMPTS]:
        ids = [int(token) for token in document.tokens_T[:SAMPLE_PROMPT_TOKENS]]

        def continuation(side: FinishedRun, k: int, ids: list[int] = ids) -> str:
            room = side.model.config.max_context - len(ids)
            [row] = generate(
                side.model, [ids], num_loops=k, max_new_tokens=min(SAMPLE_NEW_TOKENS, room),
                sampling=sampling,
            )  # fmt: skip
            return side.tokenizer.decode(row.token_ids)

        samples.append(
            {
                "prompt": run.tokenizer.decode(ids),
                "baseline": None if baseline is None else continuation(baseline, 1),
                "outputs": [
                    {"num_loops": k, "text": continuation(run, k)}
                    for k in range(1, run.model.config.max_loops + 1)
                ],
            }
        )
    return samples


@torch.no_grad()
def _pointer_samples(run: FinishedRun, baseline: FinishedRun | None) -> list[dict[str, Any]]:
    """One unseen program answered at every trained loop count, wrong answers in brackets."""
    batch = _validation_programs(run).rows(POINTER_ROWS, 1)
    wanted_T = batch.targets_BT[0]

    def answers(side: FinishedRun, k: int) -> str:
        given_T = side.model(batch.tokens_BT, num_loops=k)[0].argmax(dim=-1)
        pairs = zip(given_T.tolist(), wanted_T.tolist(), strict=True)
        return " ".join(str(g) if g == w else f"[{g}]" for g, w in pairs)

    program = run.tokenizer.decode(batch.tokens_BT[0].tolist())
    right = " ".join(str(value) for value in wanted_T.tolist())
    return [
        {
            "prompt": f"{program}\nright answers: {right} (wrong ones stand in brackets)",
            "baseline": None if baseline is None else answers(baseline, 1),
            "outputs": [
                {"num_loops": k, "text": answers(run, k)}
                for k in range(1, run.model.config.max_loops + 1)
            ],
        }
    ]
