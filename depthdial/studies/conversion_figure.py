"""The figure of the conversion study: loss, or exact answers, against loop count.

What is compared is in `conversion_results.py`; the words beside it in `conversion_words.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from depthdial.report.canvas import ACCENT, INK, MUTED, PAPER, new_figure
from depthdial.studies.conversion_arms import CONTROL, EQUAL_TIME, LOOPED, LOOPS
from depthdial.studies.conversion_data import TRAINED_CORPORA, UNSEEN_CORPUS
from depthdial.studies.conversion_results import Scores, accuracies, mean_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = (
    {"color": MUTED, "marker": "s", "ls": "-"},
    {"color": ACCENT, "marker": "o", "ls": "-"},
    {"color": INK, "marker": "^", "ls": "-"},
)
"""Of the looped arms, in their order: colour and marker, so that grey prints tell them apart."""
Measure = Callable[[Sequence[Scores], str, int], float]
"""(sweeps of some seeds, side, loop count) -> what is drawn."""
DEEP = 5
"""Look-ups from which a chain is called deep."""


def _deep_answers(seeds: Sequence[Scores], side: str, num_loops: int) -> float:
    """Share of exact answers of DEEP and more look-ups; every depth is asked equally often."""
    return float(np.mean(accuracies(seeds, side, num_loops)[DEEP - 1 :]))


_PANELS: tuple[tuple[str, str, str, Measure], ...] = (
    (
        "text",
        "text, trained domains",
        "loss, nats per token",
        partial(mean_loss, prefixes=TRAINED_CORPORA),
    ),
    (
        "text",
        "text, untrained corpus",
        "loss, nats per token",
        partial(mean_loss, prefixes=(UNSEEN_CORPUS,)),
    ),
    ("chains", f"chains of {DEEP} and more look-ups", "share of exact answers", _deep_answers),
)


def figure_png(results: Mapping[str, Sequence[Scores]]) -> bytes:
    """Panels of the tasks in `results` (task -> sweeps of each seed); equal data, equal bytes."""
    panels = [panel for panel in _PANELS if panel[0] in results]
    figure, context = new_figure((3.6 * len(panels), 3.6))
    with context:
        for idx, (task, title, unit, measure) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), idx + 1)
            _draw(axes, results[task], measure)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_ylabel(unit)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5)
        buffer = io.BytesIO()
        # Software would name the installed version: equal data must give equal bytes.
        figure.savefig(buffer, format="png", dpi=150, facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Axes, seeds: Sequence[Scores], measure: Measure) -> None:
    """Means over seeds as lines, single seeds as dots; the untrained base leaves at the top."""
    heights = []
    for arm, style in zip(LOOPED, _STYLES, strict=True):
        means = [measure(seeds, arm.name, k) for k in LOOPS]
        axes.plot(LOOPS, means, lw=1.5, ms=6, label=arm.title.strip("`"), **style)
        heights += means
        for scores in seeds:
            single = [measure([scores], arm.name, k) for k in LOOPS]
            axes.plot(LOOPS, single, ".", ms=3, color=style["color"], alpha=0.6)
            heights += single
    for control, dashes in ((CONTROL, (0, (5, 2))), (EQUAL_TIME, (0, (1, 1.5)))):
        level = measure(seeds, control.name, 1)
        axes.axhline(level, color=INK, lw=1.1, ls=dashes, label=control.title)
        heights.append(level)
    base = [measure(seeds, "base", k) for k in LOOPS]
    axes.plot(LOOPS, base, "x", ls=(0, (1, 2)), color=MUTED, lw=1, label="base, looped untrained")
    heights.append(base[0])
    span = (max(heights) - min(heights)) or 1e-3
    top = max(heights) + 0.22 * span
    axes.set_ylim(min(heights) - 0.08 * span, top)
    for k, loss in zip(LOOPS, base, strict=True):
        if loss > top:
            axes.annotate(
                f"{loss:.2f}", (k, top), xytext=(0, -3), textcoords="offset points",
                ha="center", va="top", color=MUTED, fontsize=8,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
            )  # fmt: skip
    axes.set_xticks(LOOPS, [str(k) for k in LOOPS])
    axes.set_xlim(LOOPS[0] - 0.3, LOOPS[-1] + 0.3)
    axes.set_xlabel("loops k")
    axes.tick_params(length=0)
