"""Figure of the curve that a core is chosen by: how far each layer turns the hidden states.

The numbers come from `convert/core_choice.py`. The paper and the colours are in
`report/canvas.py`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from depthdial.report.canvas import ACCENT, INK, MUTED, PAPER, new_figure, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (7.2, 3.3)


def core_svg(
    distances: Sequence[float],
    core: tuple[int, int],
    knees: tuple[int, int],
    *,
    prefix: str,
) -> str:
    """The curve for an HTML page; see `core_png`."""
    return to_svg(SIZE, lambda axes: draw_core(axes, distances, core, knees), prefix=prefix)


def core_png(
    distances: Sequence[float],
    core: tuple[int, int],
    knees: tuple[int, int],
) -> bytes:
    """The curve with the core shaded, light colours, 150 dots per inch.

    Args: distances: per layer, in [0, 1]; core, knees: layers [a, b) that loop, and those between
        the knees of the curve.
    Raises: ImportError without matplotlib.
    """
    figure, context = new_figure(SIZE)
    with context:
        draw_core(figure.add_subplot(1, 1, 1), distances, core, knees)
        buffer = io.BytesIO()
        # Software would name the installed version: equal data must give equal bytes.
        figure.savefig(buffer, format="png", dpi=150, facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def draw_core(
    axes: Axes,
    distances: Sequence[float],
    core: tuple[int, int],
    knees: tuple[int, int],
) -> None:
    """One point per layer; the core is shaded, the knees are dotted lines."""
    layers = list(range(len(distances)))
    start, end = core
    axes.axvspan(start - 0.5, end - 0.5, color=ACCENT, alpha=0.10, lw=0)
    axes.plot(layers, distances, color=MUTED, lw=1, alpha=0.7)
    for layer, distance in enumerate(distances):
        inside = start <= layer < end
        face = ACCENT if inside else PAPER
        axes.plot(layer, distance, "o", ms=5, mfc=face, mec=ACCENT if inside else MUTED, mew=1.2)
    parts = (("prelude", 0, start), (f"core {start}:{end}", start, end), ("coda", end, len(layers)))
    for name, first, last in parts:
        if last > first:
            _above(axes, (first + last - 1) / 2, name, color=ACCENT if first == start else MUTED)
    for edge in (knees[0] - 0.5, knees[1] - 0.5):
        axes.axvline(edge, color=INK, lw=1, ls=(0, (1, 2)))
        axes.annotate(
            "knee",
            (edge, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -9),
            textcoords="offset points",
            color=MUTED,
            fontsize=8,
        )
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(length=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("turn of the hidden state, half circles")


def _above(axes: Axes, x: float, text: str, *, color: str) -> None:
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        color=color,
        fontsize=9,
    )
