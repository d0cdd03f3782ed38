"""Sentences computed from measured intervals, evidence against a claim first.

Here lives every statement a report makes. None is fixed: each is chosen by where
an interval lies relative to zero and to the section's stated margin. Depths
outside training are listed apart and enter no finding (faults.md B15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from depthdial.report_data import Depth, DepthAccuracy, Difference, Measured, Section

SOLVED_ACCURACY = 0.9
"""A dependency depth counts as solved from this accuracy on."""

FEW_DOCUMENTS = 30
"""Below this many documents percentile bootstrap intervals are visibly too narrow."""

Kind = Literal["against", "open", "shown", "limit"]
_ORDER: dict[Kind, int] = {"against": 0, "open": 1, "shown": 2, "limit": 3}

Verdict = Literal["lower", "higher", "equal", "undecided"]


@dataclass(frozen=True)
class Finding:
    """One statement and what it does to the claims of looped models.

    against: contradicts "one loop costs nothing" or "more loops help";
    open: the data do not decide; shown: measured in favour; limit: what the
    numbers cannot say.
    """

    kind: Kind
    text: str


def verdict(difference: Difference, margin: float) -> Verdict:
    """The rule of `eval/stats.py: compare`: equality within the margin comes first."""
    if -margin <= difference.low and difference.high <= margin:
        return "equal"
    if difference.high < 0:
        return "lower"
    if difference.low > 0:
        return "higher"
    return "undecided"


def describe_section(section: Section) -> list[str]:
    """All statements about one section, contradictions first, limits last."""
    return [finding.text for finding in find_all(section)]


def find_all(section: Section) -> list[Finding]:
    """`describe_section` with the kind of each statement."""
    findings = [*_tax(section), *_gains(section), *_reaches(section), *_limits(section)]
    return sorted(findings, key=lambda finding: _ORDER[finding.kind])


def summarise_section(section: Section) -> str:
    """One sentence for the top of the page, contradictions first."""
    parts = [*_tax_in_short(section), *_gains_in_short(section), *_reach_in_short(section)]
    parts.sort(key=lambda finding: _ORDER[finding.kind])
    text = "; ".join(part.text for part in parts)
    return text[:1].upper() + text[1:] + "."


def trained_moves(section: Section) -> list[tuple[Depth, Depth]]:
    """Neighbouring loop counts that training used both."""
    return [(a, b) for a, b in pairwise(section.depths) if a.trained and b.trained]


def reach(accuracies: Sequence[DepthAccuracy]) -> int:
    """Deepest dependency depth solved together with all shallower ones.

    One less than the shallowest measured depth if not even that one is solved.
    """
    deepest = accuracies[0].dependency_depth - 1
    for cell in accuracies:
        if cell.accuracy < SOLVED_ACCURACY:
            break
        deepest = cell.dependency_depth
    return deepest


def signed(value: float, decimals: int = 4) -> str:
    """`+0.0123` or `\N{MINUS SIGN}0.0123`; a value that rounds to zero has no sign."""
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0:
        return text
    return ("\N{MINUS SIGN}" if value < 0 else "+") + text


def with_interval(difference: Difference) -> str:
    """`+0.0123 [+0.0100, +0.0150]`."""
    low, high = signed(difference.low), signed(difference.high)
    return f"{signed(difference.estimate)} [{low}, {high}]"


def percent(level: float) -> str:
    """`95 %`."""
    return f"{100 * level:g} %"


def one_loop(section: Section) -> Depth | None:
    """The depth of one loop, if it was measured."""
    return next((depth for depth in section.depths if depth.num_loops == 1), None)


def _tax(section: Section) -> list[Finding]:
    """One-loop tax: loss at one loop minus loss of the matched baseline."""
    depth, baseline = one_loop(section), section.baseline
    if baseline is None:
        return [Finding("limit", "No baseline was measured, so no one-loop tax can be stated.")]
    if depth is None:
        return [Finding("limit", "One loop was not measured, so no one-loop tax can be stated.")]
    tax, margin = depth.vs_baseline, section.margin
    relative = signed(100 * tax.estimate / baseline.loss, 1)
    measured = (
        f"One-loop tax: at one loop the loss is {depth.loss:.4f}, the non-looped baseline has "
        f"{baseline.loss:.4f}; difference {with_interval(tax)} {section.unit} ({relative} %, "
        f"{percent(section.level)} interval)."
    )
    if not depth.trained:
        measured += " One loop lies outside training."
    kind, words = {
        "equal": ("shown", f"Equal: the whole interval lies inside the margin of ±{margin:.4f}."),
        "higher": ("against", "Higher: the whole interval lies above zero."),
        "lower": ("shown", "Lower: the whole interval lies below zero."),
        "undecided": (
            "open",
            f"Undecided: the interval contains zero and reaches beyond the margin of "
            f"±{margin:.4f}, so neither a tax nor its absence is shown.",
        ),
    }[verdict(tax, margin)]
    return [Finding(kind, f"{measured} {words}{_beside_zero(tax, margin)}")]


def _beside_zero(difference: Difference, margin: float) -> str:
    """What the verdict alone hides: a resolved but small, or a possibly small difference."""
    word = verdict(difference, margin)
    if word == "equal" and (difference.low > 0 or difference.high < 0):
        side = "higher" if difference.low > 0 else "lower"
        return f" It excludes zero: {side}, but by less than the margin."
    if word in ("higher", "lower") and min(abs(difference.low), abs(difference.high)) <= margin:
        return f" Whether by more than the margin of ±{margin:.4f} is open."
    return ""


def _sorted_moves(section: Section) -> dict[Verdict, list[tuple[Depth, Depth]]]:
    """Moves between trained neighbours by verdict; absent verdicts are empty lists."""
    moves = {"lower": [], "higher": [], "equal": [], "undecided": []}
    for earlier, later in trained_moves(section):
        moves[verdict(later.vs_previous, section.margin)].append((earlier, later))
    return moves


def _gains(section: Section) -> list[Finding]:
    """What each further loop inside training does to the loss."""
    trained = [depth for depth in section.depths if depth.trained]
    moves, all_moves = _sorted_moves(section), trained_moves(section)
    if not all_moves:
        return [
            Finding(
                "limit",
                f"Training used k = {_numbers(trained)}; no two neighbouring trained loop "
                "counts were measured, so no gain per loop can be stated.",
            )
        ]
    findings = []
    if moves["higher"]:
        turn = moves["higher"][0][0].num_loops
        ahead = "" if turn == 1 or not moves["lower"] else f" The curve turns at k = {turn}."
        text = f"More loops raise the loss at {_listed(moves['higher'])}.{ahead}"
        findings.append(Finding("against", text))
    if moves["equal"]:
        count = "Every further loop" if moves["equal"] == all_moves else "Some further loops"
        verb = "changes" if moves["equal"] == all_moves else "change"
        resolved = [m for m in moves["equal"] if _beside_zero(m[1].vs_previous, section.margin)]
        text = (
            f"{count} {verb} the loss by no practical amount (inside the margin of "
            f"±{section.margin:.4f}): {_listed(moves['equal'])}."
        )
        if resolved:
            text += f" Resolved from zero, yet that small: {_names(resolved)}."
        findings.append(Finding("against", text))
    if moves["undecided"]:
        text = f"Undecided at this number of documents: {_listed(moves['undecided'])}."
        findings.append(Finding("open", text))
    if moves["lower"]:
        findings.append(Finding("shown", _falls(section, moves["lower"], all_moves)))
    return findings


def _falls(section: Section, falling: list, all_moves: list) -> str:
    """Sentence on the moves whose loss is lower, with the total if that is all of them."""
    small = [m for m in falling if _beside_zero(m[1].vs_previous, section.margin)]
    text = f"Loss falls at {_listed(falling)}."
    if falling == all_moves:
        first, last = all_moves[0][0], all_moves[-1][1]
        total = last.loss - first.loss
        text = (
            f"Loss falls with every loop from k = {first.num_loops} to {last.num_loops}: "
            f"{_listed(falling)}; in all {signed(total)} ({signed(100 * total / first.loss, 1)} %)."
        )
    if small:
        text += f" Whether by more than the margin of ±{section.margin:.4f} is open: "
        text += f"{_names(small)}."
    return text


def _reaches(section: Section) -> list[Finding]:
    """How deep the solved dependency chains are at each trained loop count."""
    if section.kind != "pointer_program":
        return []
    trained = [depth for depth in section.depths if depth.trained]
    listed = ", ".join(f"k = {d.num_loops}: {_reach_text(d)}" for d in trained)
    if section.baseline is not None and section.baseline.accuracy_by_depth is not None:
        listed = f"baseline: {_reach_text(section.baseline)}, {listed}"
    text = (
        f"Deepest dependency depth answered at {percent(SOLVED_ACCURACY)} or better, all "
        f"shallower ones included: {listed}."
    )
    added = [(a, b, _reach(b) - _reach(a)) for a, b in trained_moves(section)]
    if added:
        steps = ", ".join(f"{_name(a, b)} {signed(more, 0)}" for a, b, more in added)
        text += f" Added per move: {steps}."
    findings = [Finding("shown" if any(more > 0 for *_, more in added) else "open", text)]
    idle = [(a, b) for a, b, more in added if more <= 0 and _reach(a) < _last_depth(a)]
    if idle:
        findings.append(Finding("against", f"No deeper chain is solved at {_names(idle)}."))
    full = [depth for depth in trained if _reach(depth) == _last_depth(depth)]
    if full:
        words = f"solve every measured dependency depth, up to {_last_depth(full[0])}"
        text = f"k = {_numbers(full)} {words}; this evaluation cannot show a longer reach."
        findings.append(Finding("limit", text))
    return findings + _reach_against_baseline(section)


def _reach_against_baseline(section: Section) -> list[Finding]:
    depth, baseline = one_loop(section), section.baseline
    if depth is None or baseline is None or baseline.accuracy_by_depth is None:
        return []
    if _reach(depth) >= _reach(baseline):
        return []
    text = (
        f"At one loop the looped model solves dependency depth {_reach_text(depth)}, the "
        f"baseline {_reach_text(baseline)}."
    )
    return [Finding("against", text)]


def _limits(section: Section) -> list[Finding]:
    """What the numbers cannot say, chosen by the data."""
    texts = []
    outside = [depth for depth in section.depths if not depth.trained]
    if outside:
        moves = [(a, b) for a, b in pairwise(section.depths) if not b.trained]
        text = f"Outside training: k = {_numbers(outside)}. No finding here counts them."
        if moves:
            judged = [
                f"{_name(a, b)} {with_interval(b.vs_previous)} "
                f"({verdict(b.vs_previous, section.margin)})"
                for a, b in moves
            ]
            text += f" Measured there: {'; '.join(judged)}."
        texts.append(text)
    spread = "the choice of documents, not the spread between trainings"
    if section.num_seeds == 1:
        texts.append(f"One training seed: the intervals cover {spread}, which may be larger.")
    else:
        texts.append(f"{section.num_seeds} training seeds; each interval covers {spread}.")
    if section.documents < FEW_DOCUMENTS:
        texts.append(
            f"Only {section.documents} documents: bootstrap intervals over so few come out too "
            "narrow."
        )
    return [Finding("limit", text) for text in [*texts, *_training_limit(section)]]


def _training_limit(section: Section) -> list[str]:
    """Whether the two sides had the same data, and how much compute each had."""
    training = section.training
    if training is None or training.baseline is None:
        return []
    looped, baseline = training.looped, training.baseline
    ratio = looped.flops / baseline.flops if baseline.flops else float("inf")
    if looped.tokens == baseline.tokens:
        data = f"Both sides saw {looped.tokens:,} training tokens"
    else:
        data = (
            f"The sides saw different amounts of data ({looped.tokens:,} tokens looped, "
            f"{baseline.tokens:,} baseline), so differences mix depth with data"
        )
    if abs(ratio - 1) < 0.02:
        return [f"{data}, at equal training FLOPs."]
    return [
        f"{data}; training the looped model took {ratio:.2f} times the FLOPs of the baseline, so "
        "this is not a comparison at equal compute."
    ]


def _tax_in_short(section: Section) -> list[Finding]:
    depth, baseline = one_loop(section), section.baseline
    if depth is None or baseline is None:
        return []
    relative = f"{signed(100 * depth.vs_baseline.estimate / baseline.loss, 1)} %"
    kind, words = {
        "equal": ("shown", "one loop equals the non-looped baseline within the stated margin"),
        "higher": ("against", f"one loop has a higher loss than the baseline ({relative})"),
        "lower": ("shown", f"one loop has a lower loss than the baseline ({relative})"),
        "undecided": ("open", "whether one loop keeps up with the baseline is undecided"),
    }[verdict(depth.vs_baseline, section.margin)]
    if not depth.trained:
        words += " (one loop lies outside training)"
    return [Finding(kind, words)]


def _gains_in_short(section: Section) -> list[Finding]:
    moves, all_moves = _sorted_moves(section), trained_moves(section)
    if not all_moves:
        return [Finding("limit", "no gain per loop was measured")]
    first, last = all_moves[0][0], all_moves[-1][1]
    if moves["lower"] == all_moves:
        total = signed(100 * (last.loss - first.loss) / first.loss, 1)
        words = f"loss falls with every loop from k = {first.num_loops} to {last.num_loops}"
        return [Finding("shown", f"{words} ({total} %)")]
    phrases = {
        "higher": ("against", "more loops raise the loss at"),
        "equal": ("against", "more loops change the loss by no practical amount at"),
        "undecided": ("open", "the effect of more loops is undecided at"),
        "lower": ("shown", "loss falls at"),
    }
    whole = f"any step from k = {first.num_loops} to {last.num_loops}"
    return [
        Finding(kind, f"{words} {whole if moves[word] == all_moves else _names(moves[word])}")
        for word, (kind, words) in phrases.items()
        if moves[word]
    ]


def _reach_in_short(section: Section) -> list[Finding]:
    if section.kind != "pointer_program" or not trained_moves(section):
        return []
    first, last = trained_moves(section)[0][0], trained_moves(section)[-1][1]
    if _reach(last) <= _reach(first):
        return [Finding("against", "more loops solve no deeper dependency chains")]
    words = (
        f"the deepest solved dependency chain grows from {_reach_text(first)} at "
        f"k = {first.num_loops} to {_reach_text(last)} at k = {last.num_loops}"
    )
    return [Finding("shown", words)]


def _reach(measured: Measured) -> int:
    assert measured.accuracy_by_depth, "sections of pointer programs are validated to have cells"
    return reach(measured.accuracy_by_depth)


def _reach_text(measured: Measured) -> str:
    deepest = _reach(measured)
    return "none" if deepest < measured.accuracy_by_depth[0].dependency_depth else str(deepest)


def _last_depth(measured: Measured) -> int:
    return measured.accuracy_by_depth[-1].dependency_depth


def _numbers(depths: Sequence[Depth]) -> str:
    return ", ".join(str(depth.num_loops) for depth in depths)


def _name(earlier: Depth, later: Depth) -> str:
    return f"k {earlier.num_loops}→{later.num_loops}"


def _names(moves: Sequence[tuple[Depth, Depth]]) -> str:
    return ", ".join(_name(*move) for move in moves)


def _listed(moves: Sequence[tuple[Depth, Depth]]) -> str:
    return ", ".join(f"{_name(a, b)} {with_interval(b.vs_previous)}" for a, b in moves)
