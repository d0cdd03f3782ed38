"""What `sweep` prints: tables of loss, cost, right answers and baseline, or the same as JSON.

Nothing here measures; the command is in `cli/sweep.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from depthdial.cli.console import result_console
from depthdial.cli.tables import flops, loop_range, short_count, signed, table
from depthdial.eval.stats import BOOTSTRAP_SEED, FEW_DOCUMENTS

if TYPE_CHECKING:
    from depthdial.config import ModelConfig
    from depthdial.eval.depth_sweep import DepthSweep
    from depthdial.eval.latency import Latency
    from depthdial.eval.stats import Interval
    from depthdial.training.sources import TaskRows


@dataclass(frozen=True)
class Measurement:
    """A sweep with what its tables need.

    Fields:
        data: where the documents come from, in words.
        task: rows that were solved; None for text.
        context: tokens that predict one another.
        baseline: the other model's sweep, and the loop count it is compared at.
        precision: of losses and of timing.
        latency: milliseconds per token; None where no time was taken.
    """

    config: ModelConfig
    sweep: DepthSweep
    data: str
    task: TaskRows | None
    context: int
    baseline: DepthSweep | None
    baseline_loops: int
    precision: str
    latency: dict[int, Latency] | None


class DepthAccuracy(NamedTuple):
    """Answers at one dependency depth, and the right ones."""

    dependency_depth: int
    answers: int
    correct: int


def print_tables(measured: Measurement, *, margin: float) -> None:
    """Loss and cost; right answers of a task; the difference from a baseline."""
    _print_loss(measured)
    _print_cost(measured)
    if measured.task is not None:
        _print_accuracy(measured.sweep, measured.task)
    if measured.baseline is not None:
        _print_baseline(measured, margin=margin)


def as_json(measured: Measurement, *, margin: float) -> dict[str, Any]:
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
        **({} if measured.task is None else {"chance_accuracy": measured.task.chance_accuracy}),
        **({} if measured.baseline is None else {"margin": margin}),
        "depths": [_depth_as_json(measured, k, margin=margin) for k in sweep.loops],
    }


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
    rows_word, scored_word = (
        ("documents", "tokens") if measured.task is None else ("rows", "answers")
    )
    console.print(
        f"{measured.data}\n{len(sweep.names):,} {rows_word}, "
        f"{short_count(int(sweep.tokens_N.sum()))} {scored_word}, rows of {measured.context} "
        "tokens\n",
        soft_wrap=True,
    )
    columns = [*columns, "bits/byte"] if has_text else columns
    console.print(table("Loss in nats per token", columns, rows))
    if len(sweep.names) < 2:
        console.print(f"no intervals: they need at least 2 {rows_word}")
    elif len(sweep.names) < FEW_DOCUMENTS:
        console.print(
            f"only {len(sweep.names)} {rows_word}: wide intervals, and one of them can decide",
            soft_wrap=True,
        )
    if not all(map(sweep.is_trained, sweep.loops)):
        console.print(f"* outside training, which ran {loop_range(sweep.trained_loops)}")


def _print_cost(measured: Measurement) -> None:
    """What a token costs at each loop count."""
    from depthdial.model.count import executed_sublayers, flops_per_token

    config, sweep = measured.config, measured.sweep
    first, rows = sweep.loops[0], []
    for k in sweep.loops:
        cost = flops_per_token(config, k, context=measured.context).total
        ratio = cost / flops_per_token(config, first, context=measured.context).total
        row = [_mark(sweep, k), str(executed_sublayers(config, k)), flops(cost), f"{ratio:.2f}"]
        if measured.latency is not None:
            time, reference = measured.latency[k], measured.latency[first]
            row += [
                f"{time.min_ms:.3f}",
                f"{time.min_ms / reference.min_ms:.2f}",
                f"{time.median_ms:.3f}",
            ]
        rows.append(row)
    columns = ["k", "sublayers", "FLOPs", f"x k={first}"]
    if measured.latency is not None:
        columns += ["ms, fastest", f"x k={first}", "ms, median"]
    console = result_console()
    console.print("", table("Cost per token", columns, rows))
    if measured.latency is not None:
        console.print(
            f"ms: cached greedy decoding of one sequence in {measured.precision}; compare ratios"
        )


def _print_accuracy(sweep: DepthSweep, task: TaskRows) -> None:
    """Right answers by dependency depth: rows are depths, columns loop counts."""
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
        f"{task.depth_words}; {task.guess_words} gives {task.chance_accuracy:.1%}", soft_wrap=True
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


def _depth_as_json(measured: Measurement, k: int, *, margin: float) -> dict[str, Any]:
    from depthdial.eval.stats import compare
    from depthdial.model.count import executed_sublayers, flops_per_token

    sweep, config = measured.sweep, measured.config
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
