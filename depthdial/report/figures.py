"""Figures of a report: what is drawn. The paper and the colours are in `report/canvas.py`.

Equal data give equal bytes: no dates, no random ids. `prefix` keeps ids apart when
several figures stand in one page.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from depthdial.report.canvas import ACCENT, INK, MUTED, PAPER, new_figure, to_svg
from depthdial.report.chain_depth import reach
from depthdial.report.data import CurvePoint, Depth, Measured, ReportData, Section
from depthdial.report.terms import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CURVE_POINTS = 200
"""Longer training curves are averaged over equal groups of steps down to this many points."""


class Point(NamedTuple):
    """A value at one loop count with its interval; without one, low and high are the value."""

    depth: Depth
    value: float
    low: float
    high: float


def loss_svg(section: Section, *, prefix: str) -> str:
    """Loss against loop count with intervals; the baseline is a band."""
    return to_svg((4.9, 3.5), lambda axes: draw_loss(axes, section), prefix=f"{prefix}-loss")


def difference_svg(section: Section, *, prefix: str) -> str:
    """Paired difference to the baseline (or, without one, to the previous loop count)."""
    return to_svg((4.9, 3.5), lambda axes: _draw_difference(axes, section), prefix=f"{prefix}-diff")


def accuracy_svg(section: Section, *, prefix: str) -> str:
    """Accuracy by dependency depth (columns) and loop count (rows)."""
    rows = len(section.depths) + 1
    size = (10.0, 0.9 + 0.38 * rows)
    return to_svg(size, lambda axes: _draw_accuracy(axes, section), prefix=f"{prefix}-acc")


def training_svg(section: Section, *, prefix: str) -> str:
    """Validation loss during training, one line per model and loop count."""
    return to_svg((10.0, 3.0), lambda axes: _draw_training(axes, section), prefix=f"{prefix}-train")


def curve_png(data: ReportData) -> bytes:
    """Loss curves of all sections side by side, light colours, 150 dots per inch."""
    count = len(data.sections)
    figure, context = new_figure((5.2 * count, 3.9))
    with context:
        for idx, section in enumerate(data.sections):
            axes = figure.add_subplot(1, count, idx + 1)
            draw_loss(axes, section)
            axes.set_title(section.name, loc="left", fontsize=11)
        buffer = io.BytesIO()
        # Software would name the installed version: equal data must give equal bytes.
        figure.savefig(buffer, format="png", dpi=150, facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def draw_loss(axes: Axes, section: Section) -> None:
    """The main curve: trained loop counts filled and joined, others hollow on a shaded ground."""
    baseline = section.baseline
    points = [_point(d, d.loss, d.low, d.high) for d in section.depths]
    ranges = [(p.low, p.high) for p in points if p.depth.trained]
    if baseline is not None:
        if baseline.low is not None and baseline.high is not None:
            ranges.append((baseline.low, baseline.high))
            axes.axhspan(baseline.low, baseline.high, color=MUTED, alpha=0.15, lw=0)
        ranges.append((baseline.loss, baseline.loss))
        axes.axhline(baseline.loss, color=MUTED, lw=1.2, ls=(0, (5, 2)))
        _beside(axes, baseline.loss, "baseline")
    _draw_points(axes, points, ranges)
    axes.set_ylabel(f"loss, {section.unit}")
    _label_depths(axes, section.depths)


def _draw_difference(axes: Axes, section: Section) -> None:
    against_baseline = section.baseline is not None
    pairs = [(d, d.vs_baseline if against_baseline else d.vs_previous) for d in section.depths]
    points = [_point(d, x.estimate, x.low, x.high) for d, x in pairs if x is not None]
    ranges = [(p.low, p.high) for p in points if p.depth.trained] + [(0.0, 0.0)]
    if section.documents >= 2:
        ranges.append((-section.margin, section.margin))
        axes.axhspan(-section.margin, section.margin, color=MUTED, alpha=0.15, lw=0)
    axes.axhline(0, color=MUTED, lw=1.2, ls=(0, (5, 2)))
    _beside(axes, 0.0, "baseline" if against_baseline else "previous k")
    _draw_points(axes, points, ranges)
    axes.yaxis.set_major_formatter(lambda value, _: signed(value, _decimals(axes)))
    other = "baseline" if against_baseline else "previous k"
    axes.set_ylabel(f"loss minus {other}, {section.unit}")
    _label_depths(axes, section.depths)


def _draw_points(
    axes: Axes,
    points: Sequence[Point],
    ranges: Sequence[tuple[float, float]],
) -> None:
    """Values with intervals; far values outside training go to the edge with a number.

    `ranges` is what must fit: an exploding loop count outside training would otherwise
    flatten everything that was trained.
    """
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    span = (high - low) or 1e-3
    shown = [p for p in points if low - span <= p.low and p.high <= high + span]
    bottom = min([low] + [p.low for p in shown]) - 0.08 * span
    top = max([high] + [p.high for p in shown]) + 0.12 * span
    axes.set_ylim(bottom, top)
    trained = [p for p in shown if p.depth.trained]
    axes.plot(*_xy(shown), color=ACCENT, lw=1, ls=(0, (1, 2)), alpha=0.8)
    axes.plot(*_xy(trained), color=ACCENT, lw=1.6)
    for depth, value, point_low, point_high in shown:
        if point_low < point_high:
            axes.plot([depth.num_loops] * 2, [point_low, point_high], color=ACCENT, lw=1.4)
            for end in (point_low, point_high):
                axes.plot(depth.num_loops, end, color=ACCENT, marker="_", ms=7, mew=1.4)
        face = ACCENT if depth.trained else PAPER
        axes.plot(depth.num_loops, value, "o", ms=6, mfc=face, mec=ACCENT, mew=1.4)
    for depth, value, *_ in points:
        if any(depth is p.depth for p in shown):
            continue
        above = value > high
        edge, marker = (top, "^") if above else (bottom, "v")
        axes.plot(
            depth.num_loops, edge, marker, ms=7, mfc=PAPER, mec=ACCENT, mew=1.4, clip_on=False
        )
        axes.annotate(
            f"{value:.4g}",
            (depth.num_loops, edge),
            xytext=(0, -14 if above else 8),
            textcoords="offset points",
            ha="center",
            color=ACCENT,
            fontsize=8,
        )


def _point(depth: Depth, value: float, low: float | None, high: float | None) -> Point:
    return Point(depth, value, value if low is None else low, value if high is None else high)


def _xy(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [p.depth.num_loops for p in points], [p.value for p in points]


def _label_depths(axes: Axes, depths: Sequence[Depth]) -> None:
    """Loop counts with their executed sublayers and FLOPs; shade what was not trained."""
    numbers = [depth.num_loops for depth in depths]
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.tick_params(axis="both", length=0)
    axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
    rows = [
        ("loops k", None),
        ("sublayers", [str(d.executed_sublayers) for d in depths]),
        ("MFLOPs", [f"{d.flops_per_token / 1e6:.3g}" for d in depths]),
    ]
    # One text each: matplotlib centres single lines in SVG whatever font the page has.
    for idx, (name, texts) in enumerate(rows):
        _below(axes, 0, idx, name, coords="axes fraction", ha="right", dx=-5)
        for number, text in zip(numbers, texts or [], strict=False):
            _below(axes, number, idx, text, coords=("data", "axes fraction"), ha="center", dx=0)
    outside = [depth.num_loops for depth in depths if not depth.trained]
    for number in outside:
        axes.axvspan(number - 0.5, number + 0.5, color=MUTED, alpha=0.08, lw=0)
    if outside:
        axes.annotate(
            "outside training",
            (float(np.mean(_last_run(outside))), 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=MUTED,
            fontsize=8,
        )


def _beside(axes: Axes, value: float, text: str) -> None:
    """A muted label at the right edge, outside the axes, where no point can hide it."""
    axes.annotate(
        text,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=MUTED,
        fontsize=8,
    )


def _below(
    axes: Axes,
    x: float,
    row: int,
    text: str,
    *,
    coords: str | tuple[str, str],
    ha: str,
    dx: float,
) -> None:
    """One line of muted text in row `row` under the axes."""
    axes.annotate(
        text,
        (x, 0),
        xycoords=coords,
        xytext=(dx, -3.5 - 12.5 * row),
        textcoords="offset points",
        ha=ha,
        va="top",
        color=MUTED,
        fontsize=8.5 if row else 9,
    )


def _last_run(numbers: Sequence[int]) -> list[int]:
    """The last group of consecutive numbers: [1, 5, 6] gives [5, 6]."""
    run = [numbers[-1]]
    for number in reversed(numbers[:-1]):
        if number != run[0] - 1:
            break
        run.insert(0, number)
    return run


def _draw_accuracy(axes: Axes, section: Section) -> None:
    rows: list[tuple[str, Measured]] = [
        (f"k = {d.num_loops}" + ("" if d.trained else ", outside training"), d)
        for d in section.depths
    ]
    if section.baseline is not None and section.baseline.accuracy_by_depth is not None:
        rows.insert(0, ("baseline", section.baseline))
    columns = sorted({c.dependency_depth for _, m in rows for c in m.accuracy_by_depth})
    left = {depth: idx for idx, depth in enumerate(columns)}
    for row, (_, measured) in enumerate(rows):
        for cell in measured.accuracy_by_depth:
            x = left[cell.dependency_depth]
            axes.bar(
                x + 0.5, 0.94, width=0.97, bottom=row + 0.03, color=ACCENT, alpha=cell.accuracy
            )
            axes.text(
                x + 0.5,
                row + 0.5,
                f"{100 * cell.accuracy:.0f}",
                ha="center",
                va="center_baseline",
                color=PAPER if cell.accuracy > 0.55 else INK,
                fontsize=9,
            )
    _draw_staircase(axes, rows, left)
    axes.set_xlim(-0.05, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks(np.arange(len(columns)) + 0.5, [str(depth) for depth in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.5, [name for name, _ in rows])
    axes.set_xlabel("dependency depth: look-ups in a row that the answer needs")
    axes.tick_params(length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_staircase(axes: Axes, rows: Sequence[tuple[str, Measured]], left: dict[int, int]) -> None:
    """Line to the right of the deepest solved cell of each row, broken outside training."""
    previous = None
    for row, (_, measured) in enumerate(rows):
        deepest = reach(measured.accuracy_by_depth)
        edge = left[deepest] + 1 if deepest in left else 0
        xs, ys = [edge, edge], [row, row + 1]
        if previous is not None:
            xs, ys = [previous, *xs], [row, *ys]
        outside = isinstance(measured, Depth) and not measured.trained
        style = (0, (2, 1.5)) if outside else "-"
        axes.plot(xs, ys, color=INK, lw=2, ls=style, solid_capstyle="projecting", clip_on=False)
        previous = edge


def _draw_training(axes: Axes, section: Section) -> None:
    """Baseline dashed grey; loop counts in one hue, darker for more loops, each with its marker."""
    lines: dict[tuple[str, int], list[CurvePoint]] = {}
    for point in section.training_curve:
        lines.setdefault((point.model, point.num_loops), []).append(point)
    counts = sorted(number for model, number in lines if model == "looped")
    for (model, number), points in sorted(lines.items()):
        steps, losses = _averaged(points)
        if model == "baseline":
            style = {"color": MUTED, "ls": (0, (5, 2)), "lw": 1.6, "label": "baseline"}
        else:
            rank = counts.index(number)
            style = {
                "color": ACCENT,
                "alpha": 0.35 + 0.65 * (rank + 1) / len(counts),
                "lw": 1.4,
                "marker": "osD^vP"[rank % 6],
                "ms": 4.5,
                "markevery": (len(steps) // 12 * rank // len(counts), max(1, len(steps) // 6)),
                "label": f"k = {number}",
            }
        axes.plot(steps, losses, **style)
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(f"loss, {section.unit}")
    axes.tick_params(length=0)
    axes.margins(x=0.01)
    axes.set_ylim(top=_top_after_start(section.training_curve))
    axes.legend(loc="upper right", ncols=len(lines), fontsize=9)


def _top_after_start(points: Sequence[CurvePoint]) -> float:
    """Upper edge that leaves out the steep first tenth, beside which later lines look flat."""
    start = 0.1 * max(point.step for point in points)
    losses = [point.loss for point in points if point.step >= start]
    return max(losses) + 0.1 * (max(losses) - min(point.loss for point in points)) + 1e-3


def is_averaged(section: Section) -> bool:
    """Whether some line of the training figure has more points than are drawn."""
    counts: dict[tuple[str, int], int] = {}
    for point in section.training_curve:
        key = (point.model, point.num_loops)
        counts[key] = counts.get(key, 0) + 1
    return max(counts.values(), default=0) > MAX_CURVE_POINTS


def _averaged(points: Sequence[CurvePoint]) -> tuple[np.ndarray, np.ndarray]:
    """Steps in order and losses, averaged over equal groups above MAX_CURVE_POINTS."""
    ordered = sorted(points, key=lambda point: point.step)
    groups = np.array_split(np.arange(len(ordered)), min(len(ordered), MAX_CURVE_POINTS))
    steps = np.array([ordered[group[-1]].step for group in groups])
    return steps, np.array([np.mean([ordered[i].loss for i in group]) for group in groups])


def _decimals(axes: Axes) -> int:
    """Decimals that print every tick label exactly."""
    ticks = axes.get_yticks()
    exact = [d for d in range(6) if np.allclose(ticks, np.round(ticks, d), rtol=0, atol=1e-9)]
    return exact[0] if exact else 6
