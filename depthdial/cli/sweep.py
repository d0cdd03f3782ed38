"""The `sweep` command: loss, intervals and cost of a model at every loop count.

Measuring is in `eval/depth_sweep.py`, the tables in `cli/sweep_tables.py`, what an interval allows
one to say in `eval/stats.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jsonargparse

from depthdial.cli.console import remark, write
from depthdial.cli.options import Options, UsageError, loop_counts, new_parser, number
from depthdial.cli.sweep_tables import Measurement, as_json, print_tables
from depthdial.eval.stats import EQUAL_MARGIN_NATS

if TYPE_CHECKING:
    from depthdial.api.model import Model
    from depthdial.eval.depth_sweep import DepthSweep
    from depthdial.eval.latency import Latency
    from depthdial.training.sources import TaskRows

TIMED_TOKENS = 8


class EvaluationData(NamedTuple):
    """What a model is measured on: text (a prepared folder, or files) or the rows of a task.

    described: in words; context: tokens that predict one another.
    """

    text: str | list[Path] | None
    task: TaskRows | None
    described: str
    context: int


def sweep_parser() -> jsonargparse.ArgumentParser:
    """Flags of `sweep`."""
    parser = new_parser(
        "sweep",
        usage="MODEL [--data PATH ...] [--num-loops LIST] [...]",
        description="Loss at every loop count with 95 % intervals over documents, and what each\n"
        "costs.\n\n"
        "  depthdial sweep runs/tiny-text --baseline runs/tiny-text-baseline\n"
        "  depthdial sweep runs/tiny-text --data letters.txt --num-loops 1,4",
    )
    parser.add_argument("model", help="run, checkpoint, model directory, or hub id org/name")
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="a prepared folder, of which held-out documents are taken, or text files (the "
        "held-out data of the run)",
    )
    parser.add_argument(
        "--num-loops",
        metavar="LIST",
        help="loop counts, each at least 1, e.g. 1,2,4 (all that it is made for, and two beyond)",
    )
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        help="compare with this model, at its own default loop count, on the same data",
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        help="differences from the baseline inside it count as equal, nats per token, at least 0 "
        f"({EQUAL_MARGIN_NATS:g})",
    )
    parser.add_argument(
        "--context", metavar="N", help="tokens per row of text (the run's, or the model's)"
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of matrix products, for losses and times (fp32); in bf16 a token's loss moves by "
        "up to 1.6e-2 with the batch, more where logits are large",
    )
    parser.add_argument("--no-timing", action="store_true", help="do not measure milliseconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--save", metavar="FILE", help="write the loss of every document as JSON")
    parser.add_argument("--device", default="cpu", help="torch device, e.g. cpu, cuda, mps (cpu)")
    return parser


def run_sweep(options: Options) -> int:
    """Measure and print."""
    if options.margin is not None and options.baseline is None:
        raise UsageError("--margin goes with --baseline; without it nothing is compared.")
    margin = number(options.margin, "--margin", whole=False)
    margin = EQUAL_MARGIN_NATS if margin is None else margin
    if not margin >= 0:
        raise ValueError(f"--margin {margin:g}: give nats per token, at least 0.")
    if options.save is not None:
        _check_target(Path(options.save))
    measured = _measure(options)
    problem = None
    if options.save is not None:
        # Before the tables, whose reader may leave; a full disk must not take them away either.
        try:
            measured.sweep.save(options.save)
        except OSError as error:
            problem = error
    if options.json:
        write(json.dumps(as_json(measured, margin=margin), indent=2))
    else:
        print_tables(measured, margin=margin)
    if problem is not None:
        raise problem
    return 0


def _check_target(path: Path) -> None:
    """Refuse before the measurement what cannot be written after it.

    Raises: ValueError or FileNotFoundError.
    """
    from depthdial.eval.depth_sweep import check_save_place

    check_save_place(path)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"--save {path}: there is no folder {path.parent}. Make it first.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--save {path}: no permission to write into {path.parent}.")


def _measure(options: Options) -> Measurement:
    from depthdial.api.model import load, sweep
    from depthdial.api.paths import model_folder
    from depthdial.eval.depth_sweep import default_loops

    loops = None if options.num_loops is None else loop_counts(options.num_loops)
    folder = model_folder(options.model)
    model = load(folder, device=options.device)
    if loops is None:
        loops = default_loops(model.config.max_loops)
    other = None if options.baseline is None else load(options.baseline, device=options.device)
    data = _evaluation_data(options, model)
    _check_fits(options.model, model, data)
    if other is not None:
        _check_fits(options.baseline, other, data)
        if other.tokenizer.to_json() != model.tokenizer.to_json():
            raise ValueError(
                f"{options.model} and {options.baseline} have different tokenizers, so their "
                "losses per token cannot be compared. Give a baseline with the same tokenizer."
            )
    measured_on = data.text if data.task is None else data.task
    common = {
        "context": data.context if data.task is None else None,
        "precision": options.precision,
    }
    remark(f"measuring {len(loops)} loop counts ...")
    result = sweep(model, measured_on, loops=loops, **common)
    baseline, baseline_loops = None, 1
    if other is not None:
        baseline_loops = other.config.num_loops
        baseline = sweep(other, measured_on, loops=[baseline_loops], **common)
        result.check_paired(baseline)
    latency = None if options.no_timing else _latency(options, model, result, data.context)
    return Measurement(
        config=model.config,
        sweep=result,
        data=data.described,
        task=data.task,
        context=data.context,
        baseline=baseline,
        baseline_loops=baseline_loops,
        precision=options.precision,
        latency=latency,
    )


def _check_fits(name: str, model: Model, data: EvaluationData) -> None:
    """Raises: ValueError for rows that the model was not made for."""
    limit = model.config.max_context
    if not 1 <= data.context <= limit:
        what_to_do = (
            f"Give --context from 1 to {limit}."
            if data.task is None
            else "Give a model of at least that context."
        )
        raise ValueError(
            f"rows of {data.context} tokens do not fit {name}, whose context is {limit}. "
            f"{what_to_do}"
        )


def _latency(options: Options, model: Model, swept: DepthSweep, context: int) -> dict[int, Latency]:
    """Milliseconds per token in the precision of the losses."""
    import torch

    from depthdial.eval.latency import measure_latency

    is_bf16 = options.precision == "bf16"
    device_type = torch.device(options.device).type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=is_bf16):
        return measure_latency(
            model.looped_lm,
            loops=swept.loops,
            prompt_tokens=max(1, context // 2),
            new_tokens=TIMED_TOKENS,
        )


def _evaluation_data(options: Options, model: Model) -> EvaluationData:
    """What the flags name, or else the held-out data of the run.

    Raises: UsageError, ValueError.
    """
    from depthdial.api.paths import run_recipe
    from depthdial.data.shards import META_FILE
    from depthdial.studies.finished_run import run_folder
    from depthdial.training.sources import task_rows

    recipe = run_recipe(options.model)
    context = number(options.context, "--context", whole=True)
    if context is None:
        context = model.config.max_context if recipe is None else recipe.data.context
    if options.data is not None:
        paths = [Path(path) for path in options.data]
        if len(paths) == 1 and (paths[0] / META_FILE).is_file():
            described = f"held-out documents of {paths[0]}"
            return EvaluationData(str(paths[0]), None, described, context)
        return EvaluationData(paths, None, ", ".join(options.data), context)
    if recipe is None:
        raise ValueError(
            f"{options.model} is not part of a run, so it is not known what to measure on. Give "
            "--data with a prepared folder or text files."
        )
    if recipe.data.task is not None:
        task = task_rows(recipe, split="valid", tokenizer=model.tokenizer)
        if options.context is not None:
            raise UsageError(
                f"--context has no effect on {task.title}: a row is {task.row_words}. Leave it out."
            )
        return EvaluationData(None, task, f"unseen {task.title}, {task.row_words} each", context)
    folder = run_folder(recipe, model.tokenizer)
    return EvaluationData(str(folder), None, f"held-out documents of {folder}", context)
