"""Terms that all statements of a report share: findings, verdicts, numbers as text, moves.

A move is a pair of neighbouring loop counts that training ran both. The statements themselves are
in `report/findings.py` and `report/chain_depth.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from depthdial.report.data import Depth, Difference, Section

Kind = Literal["against", "open", "shown", "limit"]
Verdict = Literal["lower", "higher", "equal", "undecided", "no interval"]
Move = tuple[Depth, Depth]


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
    if difference.low is None or difference.high is None:
        return "no interval"
    if -margin <= difference.low and difference.high <= margin:
        return "equal"
    if difference.high < 0:
        return "lower"
    if difference.low > 0:
        return "higher"
    return "undecided"


def trained_moves(section: Section) -> list[Move]:
    """Neighbouring loop counts that training used both."""
    return [(a, b) for a, b in pairwise(section.depths) if a.trained and b.trained]


def one_loop(section: Section) -> Depth | None:
    """The measurement at one loop, if there is one."""
    return next((depth for depth in section.depths if depth.num_loops == 1), None)


def signed(value: float, decimals: int = 4) -> str:
    """`+0.0123` or `\N{MINUS SIGN}0.0123`; a value that rounds to zero has no sign."""
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0:
        return text
    return ("\N{MINUS SIGN}" if value < 0 else "+") + text


def with_interval(difference: Difference) -> str:
    """`+0.0123 [+0.0100, +0.0150]`; without an interval the value alone."""
    if difference.low is None or difference.high is None:
        return signed(difference.estimate)
    low, high = signed(difference.low), signed(difference.high)
    return f"{signed(difference.estimate)} [{low}, {high}]"


def percent(level: float) -> str:
    """`95 %`."""
    return f"{100 * level:g} %"


def numbers(depths: Sequence[Depth]) -> str:
    """`1, 2, 4`: the loop counts."""
    return ", ".join(str(depth.num_loops) for depth in depths)


def name(earlier: Depth, later: Depth) -> str:
    """`k 1→2`."""
    return f"k {earlier.num_loops}→{later.num_loops}"


def names(moves: Sequence[Move]) -> str:
    """`k 1→2, k 2→3`."""
    return ", ".join(name(*move) for move in moves)


def listed(moves: Sequence[Move]) -> str:
    """Moves with what they do to the loss."""
    return ", ".join(
        f"{name(earlier, later)} {with_interval(later.vs_previous)}"
        for earlier, later in moves
        if later.vs_previous is not None
    )


def duration(seconds: float) -> str:
    """`4 min 22 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
