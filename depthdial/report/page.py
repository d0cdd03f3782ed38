"""One self-contained HTML page and one PNG from run data alone.

Here lives the page: numbers as text, tables, and the assembly of what
`report/data.py` (the data), `report/findings.py` and `report/chain_depth.py` (the statements)
and `report/figures.py` (the drawings) provide. The page fetches nothing and runs no
script; its content policy forbids both. Equal data give equal bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdial.report import figures, findings
from depthdial.report.chain_depth import SOLVED_ACCURACY
from depthdial.report.data import Difference, RunCost, Section, WithInterval, read_report_data
from depthdial.report.terms import duration, percent, signed, verdict

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE = Path(__file__).with_name("template.html")

# Words on the page for `report_terms.Kind`.
_LABELS = {"against": "Against", "open": "Undecided", "shown": "Measured", "limit": "Limit"}


@dataclass(frozen=True)
class ReportPaths:
    """Files written by `write_report`."""

    html: Path
    curve: Path


def build_report(data: dict[str, Any]) -> str:
    """The page as text.

    Args:
        data: plain JSON data of the shape of `report_data.ReportData`.

    Raises: ValueError with one line per problem of the data; ImportError that
        names the extra if matplotlib or jinja2 is missing.
    """
    report = read_report_data(data)
    return _template().render(
        report=report,
        sections=[
            _section_view(section, prefix=f"s{idx + 1}")
            for idx, section in enumerate(report.sections)
        ],
        provenance=_provenance(report.provenance),
    )


def write_report(data: dict[str, Any], folder: str | Path) -> ReportPaths:
    """Write `report.html`, `curve.png` (the loss curves) and `report.json` (the data).

    `folder` may be new. All are written under temporary names before any takes its place.
    Raises: as `build_report`, and OSError if the disk refuses; an older report is untouched then.
    """
    folder = Path(folder)
    page = build_report(data).encode("utf-8")
    curve = figures.curve_png(read_report_data(data))
    paths = ReportPaths(html=folder / "report.html", curve=folder / "curve.png")
    text = json.dumps(data, indent=1) + "\n"
    contents = {paths.html: page, paths.curve: curve, folder / "report.json": text.encode("utf-8")}
    partial = {path: path.with_name(path.name + ".partial") for path in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            partial[path].write_bytes(content)
        for path in contents:
            os.replace(partial[path], path)
    except OSError as error:
        stands = (
            "the older report there is unchanged" if paths.html.exists() else "no report is left"
        )
        raise OSError(
            f"could not write the report into {folder}: {error.strerror}; {stands}. Make room and "
            "report again: the run itself was only read."
        ) from error
    finally:
        for path in partial.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return paths


def _section_view(section: Section, *, prefix: str) -> dict[str, Any]:
    """Everything the template prints of one section; all numbers are already text."""
    drawn: dict[str, Any] = {
        "loss": figures.loss_svg(section, prefix=prefix),
        "difference": None,
        "accuracy": None,
        "training": None,
    }
    if section.baseline is not None or len(section.depths) > 1:
        drawn["difference"] = figures.difference_svg(section, prefix=prefix)
    if section.has_depths:
        drawn["accuracy"] = figures.accuracy_svg(section, prefix=prefix)
    if section.training_curve:
        drawn["training"] = figures.training_svg(section, prefix=prefix)
    return {
        "data": section,
        "summary": _unbroken(findings.summarise_section(section)),
        "findings": [
            (f.kind, _LABELS[f.kind], _unbroken(f.text)) for f in findings.find_all(section)
        ],
        "level": _unbroken(percent(section.level)),
        "solved": _unbroken(percent(SOLVED_ACCURACY)),
        "chance": None
        if section.chance_accuracy is None
        else _unbroken(percent(section.chance_accuracy)),
        "margin": f"{section.margin:.4f}",
        "figures": drawn,
        "outside": {depth.num_loops for depth in section.depths if not depth.trained},
        "averaged": figures.is_averaged(section),
        "rows": list(_rows(section)),
        "resampled": section.documents >= 2,
        "timed": section.timing_note is not None,
        "costs": _costs(section),
        "settings": list(_flat(section.settings)),
    }


def _unbroken(text: str) -> str:
    """No line break inside `k = 1`, `k 1→2`, `95 %` and `+0.1 [+0.0, +0.2]`."""
    text = re.sub(r"(?<=\bk) (= )?(?=\d)", lambda m: m[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    return re.sub(r" (?=%|\[)|(?<=\d,) (?=[^ ]*\])|(?<=→\d) ", "\N{NO-BREAK SPACE}", text)


def _compact(text: str) -> str:
    """Generated text without leading spaces, and with runs of blank lines as one."""
    return re.sub(r"\n\s*\n", "\n\n", text.lstrip(" "))


def _rows(section: Section) -> Iterator[dict[str, Any]]:
    """Table rows: the baseline, then every loop count, none of them singled out."""
    measured = [("baseline", None, section.baseline)] if section.baseline is not None else []
    measured += [(str(depth.num_loops), depth, depth) for depth in section.depths]
    first = measured[0][2]
    for name, depth, values in measured:
        yield {
            "name": name,
            "is_baseline": depth is None,
            "trained": depth is None or depth.trained,
            "loss": f"{values.loss:.4f}",
            "loss_interval": _loss_interval(values),
            "vs_baseline": _difference(depth and depth.vs_baseline, section.margin),
            "vs_previous": _difference(depth and depth.vs_previous, section.margin),
            "sublayers": str(values.executed_sublayers),
            "mflops": f"{values.flops_per_token / 1e6:,.2f}",
            "ms_min": _milliseconds(values.ms_per_token_min),
            "ms_median": _milliseconds(values.ms_per_token_median),
            "flops_ratio": f"{values.flops_per_token / first.flops_per_token:.2f}",
            "ms_ratio": _ratio(values.ms_per_token_min, first.ms_per_token_min),
        }


def _loss_interval(values: WithInterval) -> str:
    return f"[{values.low:.4f}, {values.high:.4f}]" if values.has_interval else ""


def _difference(difference: Difference | None, margin: float) -> dict[str, str] | None:
    if difference is None:
        return None
    interval = ""
    if difference.low is not None and difference.high is not None:
        interval = f"[{signed(difference.low)}, {signed(difference.high)}]"
    return {
        "estimate": signed(difference.estimate),
        "interval": interval,
        "verdict": verdict(difference, margin),
    }


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.2f}" if value is not None and reference else ""


def _costs(section: Section) -> list[tuple[str, str, str, str]]:
    """Training cost rows: name, looped, baseline, ratio; no rows without `training`."""
    if section.training is None:
        return []
    looped, baseline = section.training.looped, section.training.baseline
    rows = []
    for name, key in (
        ("Parameters", "params"),
        ("Optimizer steps", "steps"),
        ("Training tokens", "tokens"),
        ("Training FLOPs", "flops"),
        ("Wall-clock, optimizer steps only", "seconds"),
    ):
        ours = looped.model_dump()[key]
        theirs = None if baseline is None else baseline.model_dump()[key]
        rows.append((name, _cost(looped, key), _cost(baseline, key), _ratio(ours, theirs)))
    return rows


def _cost(side: RunCost | None, key: str) -> str:
    """One training cost in words; empty without a baseline."""
    if side is None:
        return ""
    if key == "flops":
        return _flops(side.flops)
    if key == "seconds":
        return duration(side.seconds)
    return f"{side.model_dump()[key]:,}"


def _flops(value: float) -> str:
    """`13.1 TFLOP`: three significant digits."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}FLOP"
    return f"{value:.3g} FLOP"


def _provenance(runs: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of (key, value): what all runs share, then of each run what is its own."""
    flat = {name: dict(_flat(values)) for name, values in runs.items()}
    if len(flat) < 2:
        return [(name, list(rows.items())) for name, rows in flat.items()]
    first, *others = flat.values()
    shared = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }
    tables = [("Equal everywhere", list(shared.items()))] if shared else []
    for name, rows in flat.items():
        tables.append((name, [(key, value) for key, value in rows.items() if key not in shared]))
    return [(name, rows) for name, rows in tables if rows]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted key, value) pairs, in the given order."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{key}", text


def _template() -> Template:
    """The page template; every value is escaped except the drawings."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("reports need jinja2; install depthdial with the extra 'report'.") from (
            error
        )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["compact"] = _compact
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
