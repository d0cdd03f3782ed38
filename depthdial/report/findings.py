"""Sentences computed from measured intervals, evidence against a claim first.

Here lives every statement a report makes. None is fixed: each is chosen by where
an interval lies relative to zero and to the section's stated margin. Loop counts
outside training are listed apart and enter no finding.
"""

from __future__ import annotations

from itertools import pairwise

from depthdial.report.chain_depth import find_reaches, reach_in_short
from depthdial.report.data import Difference, Section
from depthdial.report.terms import (
    Finding,
    Kind,
    Move,
    Verdict,
    listed,
    name,
    names,
    numbers,
    one_loop,
    percent,
    signed,
    trained_moves,
    verdict,
    with_interval,
)

FEW_DOCUMENTS = 30
"""Below this many documents intervals are widened, and the page says so."""
_ORDER: dict[Kind, int] = {"against": 0, "open": 1, "shown": 2, "limit": 3}


def describe_section(section: Section) -> list[str]:
    """All statements about one section, contradictions first, limits last."""
    return [finding.text for finding in find_all(section)]


def find_all(section: Section) -> list[Finding]:
    """`describe_section` with the kind of each statement."""
    findings = [*_tax(section), *_gains(section), *find_reaches(section), *_limits(section)]
    return sorted(findings, key=lambda finding: _ORDER[finding.kind])


def summarise_section(section: Section) -> str:
    """One sentence for the top of the page, contradictions first."""
    if section.documents < 2:
        one = f"One {section.row_word} was measured"
        return f"{one}: without intervals nothing is said about loops."
    parts = [*_tax_in_short(section), *_gains_in_short(section), *reach_in_short(section)]
    parts.sort(key=lambda finding: _ORDER[finding.kind])
    text = "; ".join(part.text for part in parts)
    return text[:1].upper() + text[1:] + "."


def _tax(section: Section) -> list[Finding]:
    """One-loop tax: loss at one loop minus loss of the matched baseline."""
    depth, baseline = one_loop(section), section.baseline
    if baseline is None:
        return [Finding("limit", "No baseline was measured, so no one-loop tax can be stated.")]
    if depth is None:
        return [Finding("limit", "One loop was not measured, so no one-loop tax can be stated.")]
    tax, margin = depth.vs_baseline, section.margin
    assert tax is not None, "sections with a baseline are validated to have this difference"
    relative = signed(100 * tax.estimate / baseline.loss, 1)
    measured = (
        f"One-loop tax: at one loop the loss is {depth.loss:.4f}, the non-looped baseline has "
        f"{baseline.loss:.4f}; difference {with_interval(tax)} {section.unit} ({relative} %, "
        f"{_intervalname(section)})."
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
        "no interval": ("limit", "So neither a tax nor its absence is shown."),
    }[verdict(tax, margin)]
    kind = kind if depth.trained or kind != "shown" else "limit"
    return [Finding(kind, f"{measured} {words}{_beside_zero(tax, margin)}")]


def _intervalname(section: Section) -> str:
    if section.documents < 2:
        return f"no interval: one {section.row_word}"
    return f"{percent(section.level)} interval"


def _beside_zero(difference: Difference | None, margin: float) -> str:
    """What the verdict alone hides: a resolved but small, or a possibly small difference."""
    if difference is None or difference.low is None or difference.high is None:
        return ""
    word = verdict(difference, margin)
    if word == "equal" and (difference.low > 0 or difference.high < 0):
        side = "higher" if difference.low > 0 else "lower"
        return f" It excludes zero: {side}, but by less than the margin."
    if word in ("higher", "lower") and min(abs(difference.low), abs(difference.high)) <= margin:
        return f" Whether by more than the margin of ±{margin:.4f} is open."
    return ""


def _sorted_moves(section: Section) -> dict[Verdict, list[Move]]:
    """Moves between trained neighbours by verdict; absent verdicts are empty lists."""
    moves: dict[Verdict, list[Move]] = {
        "lower": [], "higher": [], "equal": [], "undecided": [], "no interval": [],
    }  # fmt: skip
    for earlier, later in trained_moves(section):
        assert later.vs_previous is not None, "all loop counts but the first have this difference"
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
                f"Training used k = {numbers(trained)}; no two neighbouring trained loop "
                "counts were measured, so no gain per loop can be stated.",
            )
        ]
    findings = []
    if moves["higher"]:
        turn = moves["higher"][0][0].num_loops
        fell_before = any(later.num_loops <= turn for _, later in moves["lower"])
        ahead = f" The curve turns at k = {turn}." if fell_before else ""
        text = f"More loops raise the loss at {listed(moves['higher'])}.{ahead}"
        findings.append(Finding("against", text))
    if moves["equal"]:
        count = "Every further loop" if moves["equal"] == all_moves else "Some further loops"
        verb = "changes" if moves["equal"] == all_moves else "change"
        resolved = [m for m in moves["equal"] if _beside_zero(m[1].vs_previous, section.margin)]
        text = (
            f"{count} {verb} the loss by no practical amount (inside the margin of "
            f"±{section.margin:.4f}): {listed(moves['equal'])}."
        )
        if resolved:
            text += f" Resolved from zero, yet that small: {names(resolved)}."
        findings.append(Finding("against", text))
    if moves["undecided"]:
        text = f"Undecided at this number of {section.row_word}s: {listed(moves['undecided'])}."
        findings.append(Finding("open", text))
    if moves["no interval"]:
        text = f"Measured on one {section.row_word}, so nothing is claimed: "
        findings.append(Finding("limit", f"{text}{listed(moves['no interval'])}."))
    if moves["lower"]:
        findings.append(Finding("shown", _falls(section, moves["lower"], all_moves)))
    return findings


def _falls(section: Section, falling: list, all_moves: list) -> str:
    """Sentence on the moves whose loss is lower, with the total if that is all of them."""
    small = [m for m in falling if _beside_zero(m[1].vs_previous, section.margin)]
    text = f"Loss falls at {listed(falling)}."
    if falling == all_moves:
        first, last = all_moves[0][0], all_moves[-1][1]
        total = last.loss - first.loss
        text = (
            f"Loss falls with every loop from k = {first.num_loops} to {last.num_loops}: "
            f"{listed(falling)}; in all {signed(total)} ({signed(100 * total / first.loss, 1)} %)."
        )
    if small:
        text += f" Whether by more than the margin of ±{section.margin:.4f} is open: "
        text += f"{names(small)}."
    return text


def _limits(section: Section) -> list[Finding]:
    """What the numbers cannot say, chosen by the data."""
    texts = []
    outside = [depth for depth in section.depths if not depth.trained]
    if outside:
        moves = [(a, b) for a, b in pairwise(section.depths) if not b.trained]
        text = f"Outside training: k = {numbers(outside)}. No finding here counts them."
        if moves:
            judged = [
                f"{name(a, b)} {with_interval(b.vs_previous)} "
                f"({verdict(b.vs_previous, section.margin)})"
                for a, b in moves
                if b.vs_previous is not None
            ]
            text += f" Measured there: {'; '.join(judged)}."
        texts.append(text)
    if section.documents < 2:
        one = f"One {section.row_word}"
        texts.append(f"{one} has no interval, so no finding here is more than its number.")
        return [Finding("limit", text) for text in [*texts, *_training_limit(section)]]
    spread = f"the choice of {section.row_word}s, not the spread between trainings"
    if section.num_seeds == 1:
        texts.append(f"One training seed: the intervals cover {spread}, which may be larger.")
    else:
        texts.append(f"{section.num_seeds} training seeds; each interval covers {spread}.")
    if section.documents < FEW_DOCUMENTS:
        texts.append(
            f"Only {section.documents} {section.row_word}s: intervals are widened for it "
            f"(Student's t), and one unusual {section.row_word} can decide them."
        )
    return [Finding("limit", text) for text in [*texts, *_training_limit(section)]]


def _training_limit(section: Section) -> list[str]:
    """Whether the two sides had the same data, and how much compute each had."""
    training = section.training
    if training is None or training.baseline is None:
        return []
    looped, baseline = training.looped, training.baseline
    ratio = looped.flops / baseline.flops if baseline.flops else float("inf")
    more_params = looped.params / baseline.params
    size = (
        f" The looped model has {more_params:.2f} times the parameters of the baseline, gate and "
        "conditioning included."
        if abs(more_params - 1) >= 0.02
        else ""
    )
    if looped.tokens == baseline.tokens:
        data = f"Both sides saw {looped.tokens:,} training tokens"
    else:
        data = (
            f"The sides saw different amounts of data ({looped.tokens:,} tokens looped, "
            f"{baseline.tokens:,} baseline), so differences mix loops with data"
        )
    if abs(ratio - 1) < 0.02:
        return [f"{data}, at equal training FLOPs.{size}"]
    return [
        f"{data}; training the looped model took {ratio:.2f} times the FLOPs of the baseline, so "
        f"this is not a comparison at equal compute.{size}"
    ]


def _tax_in_short(section: Section) -> list[Finding]:
    depth, baseline = one_loop(section), section.baseline
    if depth is None or baseline is None or depth.vs_baseline is None:
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
        kind = kind if kind != "shown" else "limit"
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
    whole = f"any further loop from k = {first.num_loops} to {last.num_loops}"
    return [
        Finding(kind, f"{words} {whole if moves[word] == all_moves else names(moves[word])}")
        for word, (kind, words) in phrases.items()
        if moves[word]
    ]
