"""The paper that figures of a report are drawn on: SVG to be inlined in the page.

Every colour is one of the constants below, and in SVG becomes a CSS variable of the
page, so that one file reads well on light and dark paper. matplotlib is an optional
dependency, imported in `new_figure` alone. What is drawn is in `report/figures.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, ACCENT, PAPER = "#1d232a", "#5b6570", "#d5dae0", "#1c5d99", "#ffffff"
CSS_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    ACCENT: "var(--accent)",
    PAPER: "var(--paper)",
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "depthdial",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def new_figure(size: tuple[float, float]) -> tuple[Figure, AbstractContextManager[None]]:
    """A figure of `size` inches without global state, and the style to draw it under."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib; install depthdial with the extra 'report'."
        ) from error

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, matplotlib.rc_context(_STYLE)


def to_svg(size: tuple[float, float], draw: Callable[[Axes], None], *, prefix: str) -> str:
    """An `<svg>` element for HTML whose colours and font come from the page."""
    figure, context = new_figure(size)
    with context:
        draw(figure.add_subplot(1, 1, 1))
        buffer = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    # The style element would apply to the whole page; names of schemas are no use in HTML.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| version="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in CSS_VARIABLES.items():
        text = text.replace(colour, variable)
    return text
