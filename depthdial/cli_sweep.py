"""The `sweep` command: loss, intervals and cost of a model at every loop count.

Measuring is in `eval/depth_sweep.py`, what an interval allows one to say in `eval/stats.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonargparse

from depthdial.cli_options import Options, UsageError, loop_counts, new_parser, number
from depthdial.cli_tables import flops, remark, result_console, short_count, signed, table
from depthdial.eval.stats import BOOTSTRAP_SEED, EQUAL_MARGIN_NATS

if TYPE_CHECKING:
    from depthdial.api import Model
    from depthdial.data.synthetic import PointerPrograms
    from depthdial.eval.depth_sweep import DepthSweep, Latency
    from depthdial.eval.stats import Interval

TIMED_TOKENS = 8


@dataclass(frozen=True)
class Measurement:
    """A sweep with what its tables need.

    Fields:
        data: where the documents come from, in words.
        context: tokens that predict one another.
        baseline: the other model's sweep, and the loop count it is compared at.
        precision: of losses and of timing.
        latency: milliseconds per token; None where no time was taken.
    """

    model: Model
    sweep: DepthSweep
    data: str
    context: int
    baseline: DepthSweep | None
    baseline_loops: int
    precision: str
    latency: dict[int, Latency] | None


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
        help="loop counts, each at least 1, e.g. 1,2,4 (all trained ones and two beyond)",
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
        help="of matrix products, for losses and times (fp32)",
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
    measured = _measure(options)
    if options.save is not None:
        measured.sweep.save(options.save)
    if options.json:
        print(json.dumps(_as_json(measured, margin=margin), indent=2))
        return 0
    _print_loss(measured)
    _print_cost(measured)
    if measured.sweep.correct_KNP is not None:
        _print_accuracy(measured.sweep)
    if measured.baseline is not None:
        _print_baseline(measured, margin=margin)
    return 0


def _measure(options: Options) -> Measurement:
    from depthdial.api import load, loops_in_training, model_folder, sweep
    from depthdial.data.synthetic import PointerPrograms
    from depthdial.eval.depth_sweep import default_loops

    folder = model_folder(options.model)
    model = load(folder, device=options.device)
    loops = default_loops(model.config.max_loops)
    if options.num_loops is not None:
        loops = loop_counts(options.num_loops)
    data, described, context = _evaluation_data(options, model)
    common = {
        "context": None if isinstance(data, PointerPrograms) else context,
        "precision": options.precision,
    }
    remark(f"measuring {len(loops)} loop counts ...")
    result = sweep(model, data, loops=loops, trained_loops=loops_in_training(folder), **common)
    baseline, baseline_loops = None, 1
    if options.baseline is not None:
        other = load(options.baseline, device=options.device)
        baseline_loops = other.config.num_loops
        baseline = sweep(other, data, loops=[baseline_loops], **common)
        result.check_paired(baseline)
    latency = None if options.no_timing else _latency(options, model, result, context=context)
    return Measurement(
        model=model,
        sweep=result,
        data=described,
        context=context,
        baseline=baseline,
        baseline_loops=baseline_loops,
        precision=options.precision,
        latency=latency,
    )


def _latency(
    options: Options, model: Model, swept: DepthSweep, *, context: int
) -> dict[int, Latency]:
    """Milliseconds per token in the precision of the losses."""
    import torch

    from depthdial.eval.depth_sweep import measure_latency

    is_bf16 = options.precision == "bf16"
    device_type = torch.device(options.device).type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=is_bf16):
        return measure_latency(
            model.looped_lm,
            loops=swept.loops,
            prompt_tokens=max(1, context // 2),
            new_tokens=TIMED_TOKENS,
        )


def _evaluation_data(
    options: Options, model: Model
) -> tuple[str | list[Path] | PointerPrograms, str, int]:
    """What to measure on, in words too, and the context: the flags', or else the run's."""
    from depthdial.api import run_recipe
    from depthdial.data.shards import META_FILE
    from depthdial.data.synthetic import PointerPrograms
    from depthdial.train.sources import VALIDATION_SEED, prepared_folder

    recipe = run_recipe(options.model)
    context = number(options.context, "--context", whole=True)
    if context is None:
        context = model.config.max_context if recipe is None else recipe.data.context
    if options.data is not None:
        paths = [Path(path) for path in options.data]
        if len(paths) == 1 and (paths[0] / META_FILE).is_file():
            return str(paths[0]), f"held-out documents of {paths[0]}", context
        return paths, ", ".join(options.data), context
    if recipe is None:
        raise ValueError(
            f"{options.model} is not part of a run, so it is not known what to measure on. Give "
            "--data with a prepared folder or text files."
        )
    if recipe.data.task is not None:
        if options.context is not None:
            raise UsageError(
                f"--context has no effect on pointer programs, which are {recipe.data.context} "
                "words long."
            )
        programs = PointerPrograms(VALIDATION_SEED, context=context, split="valid")
        return programs, "unseen pointer programs", context
    folder = prepared_folder(recipe)
    return str(folder), f"held-out documents of {folder}", context


def _interval(sweep: DepthSweep, num_loops: int) -> Interval | None:
    """Interval of the mean loss; a single document has none."""
    from depthdial.eval.stats import mean_interval

    if len(sweep.names) < 2:
        return None
    return mean_interval(sweep.nll(num_loops), sweep.tokens_N, seed=BOOTSTRAP_SEED)


def _difference(a: DepthSweep, k_a: int, b: DepthSweep, k_b: int) -> Interval | None:
    """Interval of the paired difference a - b."""
    from depthdial.eval.stats import paired_bootstrap

    if len(a.names) < 2:
        return None
    return paired_bootstrap(a.nll(k_a), b.nll(k_b), a.tokens_N, seed=BOOTSTRAP_SEED)


def _bounds(interval: Interval | None, *, sign: bool = False) -> str:
    if interval is None:
        return ""
    low, high = interval.low, interval.high
    return f"[{signed(low)}, {signed(high)}]" if sign else f"[{low:.4f}, {high:.4f}]"


def _mark(sweep: DepthSweep, num_loops: int) -> str:
    return f"{num_loops}" if sweep.is_trained(num_loops) else f"{num_loops}*"


def _trained_words(sweep: DepthSweep) -> str:
    """`k = 1..4`, or `k = 1, 4` where loop counts between were never trained."""
    loops = sweep.trained_loops
    if not loops:
        return "nothing yet"
    if len(loops) > 2 and loops == tuple(range(loops[0], loops[-1] + 1)):
        return f"k = {loops[0]}..{loops[-1]}"
    return "k = " + ", ".join(map(str, loops))


def _print_loss(measured: Measurement) -> None:
    """Loss per loop count, and the change from the loop count before."""
    console, sweep = result_console(), measured.sweep
    has_text = bool(sweep.bytes_N.sum())
    rows = []
    for idx, k in enumerate(sweep.loops):
        change = _difference(sweep, k, sweep, sweep.loops[idx - 1]) if idx else None
        row = [
            _mark(sweep, k),
            f"{sweep.mean_loss(k):.4f}",
            _bounds(_interval(sweep, k)),
            signed(sweep.mean_loss(k) - sweep.mean_loss(sweep.loops[idx - 1])) if idx else "",
            _bounds(change, sign=True),
        ]
        rows.append([*row, f"{sweep.bits_per_byte(k):.3f}"] if has_text else row)
    columns = ["k", "loss", "95 % interval", "change", "95 % interval"]
    console.print(
        f"{measured.data}\n{len(sweep.names):,} documents, "
        f"{short_count(int(sweep.tokens_N.sum()))} tokens, rows of {measured.context} tokens\n",
        soft_wrap=True,
    )
    columns = [*columns, "bits/byte"] if has_text else columns
    console.print(table("Loss in nats per token", columns, rows))
    if len(sweep.names) < 2:
        console.print("no intervals: they need at least 2 documents")
    if not all(map(sweep.is_trained, sweep.loops)):
        console.print(f"* outside training, which ran {_trained_words(sweep)}")


def _print_cost(measured: Measurement) -> None:
    """What a token costs at each loop count."""
    from depthdial.model.count import executed_sublayers, flops_per_token

    config, sweep = measured.model.config, measured.sweep
    first, rows = sweep.loops[0], []
    for k in sweep.loops:
        cost = flops_per_token(config, k, context=measured.context).total
        ratio = cost / flops_per_token(config, first, context=measured.context).total
        row = [_mark(sweep, k), str(executed_sublayers(config, k)), flops(cost), f"{ratio:.2f}"]
        if measured.latency is not None:
            time, reference = measured.latency[k], measured.latency[first]
            row += [
                f"{time.min_ms:.3f}",
                f"{time.median_ms:.3f}",
                f"{time.min_ms / reference.min_ms:.2f}",
            ]
        rows.append(row)
    columns = ["k", "sublayers", "FLOPs", f"x k={first}"]
    if measured.latency is not None:
        columns += ["ms, fastest", "ms, median", f"x k={first}"]
    console = result_console()
    console.print("", table("Cost per token", columns, rows))
    if measured.latency is not None:
        console.print(
            f"ms: cached greedy decoding of one sequence in {measured.precision}; compare ratios"
        )


class DepthAccuracy(NamedTuple):
    """Answers at one dependency depth (1: a literal, one more per look-up), and the right ones."""

    dependency_depth: int
    answers: int
    correct: int


def _accuracy(sweep: DepthSweep, num_loops: int) -> list[DepthAccuracy]:
    """Right answers at one loop count by the depths that occur."""
    assert sweep.correct_KNP is not None and sweep.total_NP is not None
    totals_P = sweep.total_NP.sum(axis=0).tolist()
    correct_P = sweep.correct_KNP[sweep.loops.index(num_loops)].sum(axis=0).tolist()
    return [
        DepthAccuracy(depth_idx + 1, total, correct)
        for depth_idx, (total, correct) in enumerate(zip(totals_P, correct_P, strict=True))
        if total
    ]


def _print_accuracy(sweep: DepthSweep) -> None:
    """Right answers by dependency depth: rows are depths, columns loop counts."""
    from depthdial.data.synthetic import NUM_VALUES

    by_loops = [_accuracy(sweep, k) for k in sweep.loops]
    rows = [
        [
            f"{same_depth[0].dependency_depth}",
            *(f"{at.correct / at.answers:.1%}" for at in same_depth),
            f"{same_depth[0].answers:,}",
        ]
        for same_depth in zip(*by_loops, strict=True)
    ]
    columns = ["depth", *(f"k={_mark(sweep, k)}" for k in sweep.loops), "answers"]
    console = result_console()
    console.print("", table("Right answers by dependency depth", columns, rows))
    console.print(
        f"depth 1 is a literal, each further depth one look-up; guessing gives {1 / NUM_VALUES:.1%}"
    )


def _print_baseline(measured: Measurement, *, margin: float) -> None:
    """Difference to the baseline at every loop count, in numbers and in a word."""
    from depthdial.eval.stats import compare

    sweep, other, k_other = measured.sweep, measured.baseline, measured.baseline_loops
    assert other is not None
    rows = []
    for k in sweep.loops:
        interval = _difference(sweep, k, other, k_other)
        word = "" if interval is None else compare(interval, margin=margin)
        name = "one-loop tax" if k == 1 else ""
        difference = sweep.mean_loss(k) - other.mean_loss(k_other)
        bounds = _bounds(interval, sign=True)
        rows.append([_mark(sweep, k), signed(difference), bounds, word, name])
    columns = ["k", "difference", "95 % interval", f"equal within {margin:g}?", ""]
    title = f"Against the baseline, loss {other.mean_loss(k_other):.4f} (below 0 is lower loss)"
    result_console().print("", table(title, columns, rows, left=(3, 4)))


def _as_json(measured: Measurement, *, margin: float) -> dict[str, Any]:
    """The tables as plain JSON types; per-document losses are what --save writes."""
    sweep = measured.sweep
    return {
        "data": measured.data,
        "documents": len(sweep.names),
        "tokens": int(sweep.tokens_N.sum()),
        "context": measured.context,
        "unit": "nats per token",
        "precision": measured.precision,
        "max_loops": sweep.max_loops,
        **({} if measured.baseline is None else {"margin": margin}),
        "depths": [_depth_as_json(measured, k, margin=margin) for k in sweep.loops],
    }


def _depth_as_json(measured: Measurement, k: int, *, margin: float) -> dict[str, Any]:
    from depthdial.eval.stats import compare
    from depthdial.model.count import executed_sublayers, flops_per_token

    sweep, config = measured.sweep, measured.model.config
    interval = _interval(sweep, k)
    values: dict[str, Any] = {
        "num_loops": k,
        "is_trained": sweep.is_trained(k),
        "loss": sweep.mean_loss(k),
        "interval": None if interval is None else [interval.low, interval.high],
        "bits_per_byte": sweep.bits_per_byte(k) if sweep.bytes_N.sum() else None,
        "executed_sublayers": executed_sublayers(config, k),
        "flops_per_token": flops_per_token(config, k, context=measured.context).total,
    }
    if sweep.correct_KNP is not None:
        values["accuracy_by_depth"] = [at._asdict() for at in _accuracy(sweep, k)]
    if measured.latency is not None:
        values["ms_per_token_min"] = measured.latency[k].min_ms
        values["ms_per_token_median"] = measured.latency[k].median_ms
    if measured.baseline is not None:
        k_other = measured.baseline_loops
        against = _difference(sweep, k, measured.baseline, k_other)
        values["vs_baseline"] = {
            "difference": sweep.mean_loss(k) - measured.baseline.mean_loss(k_other),
            "interval": None if against is None else [against.low, against.high],
            "verdict": None if against is None else compare(against, margin=margin),
        }
    return values
