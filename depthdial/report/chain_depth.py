"""How long a chain of look-ups is solved at each loop count, and the words for it.

A dependency depth counts as solved if the whole interval of its accuracy lies at
`SOLVED_ACCURACY` or above, as not solved if it lies below, and is undecided otherwise. The reach
is the deepest depth solved together with all shallower ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from depthdial.report.data import DepthAccuracy, Measured, Section
from depthdial.report.terms import (
    Finding,
    Move,
    name,
    names,
    numbers,
    one_loop,
    percent,
    signed,
    trained_moves,
)

SOLVED_ACCURACY = 0.9
"""A dependency depth counts as solved from this accuracy on."""

Change = Literal["deeper", "shorter", "same", "undecided", "ceiling"]


def unbroken_reach(is_solved: Iterable[tuple[int, bool]], *, none: int = 0) -> int:
    """Last dependency depth before the first that is not solved.

    Args:
        is_solved: (dependency depth, whether it is solved), shallowest first.
        none: what to return if not even the shallowest is solved.
    """
    deepest = none
    for depth, solved in is_solved:
        if not solved:
            break
        deepest = depth
    return deepest


def reach(accuracies: Sequence[DepthAccuracy]) -> int:
    """Deepest dependency depth shown to be solved together with all shallower ones.

    One less than the shallowest measured depth if not even that one is solved.
    """
    return unbroken_reach(
        (
            (cell.dependency_depth, cell.low is not None and cell.low >= SOLVED_ACCURACY)
            for cell in accuracies
        ),
        none=accuracies[0].dependency_depth - 1,
    )


def possible_reach(accuracies: Sequence[DepthAccuracy]) -> int:
    """The same if every undecided dependency depth were solved."""
    return unbroken_reach(
        (
            (cell.dependency_depth, cell.high is None or cell.high >= SOLVED_ACCURACY)
            for cell in accuracies
        ),
        none=accuracies[0].dependency_depth - 1,
    )


def find_reaches(section: Section) -> list[Finding]:
    """How deep the solved dependency chains are at each trained loop count."""
    if not section.has_depths:
        return []
    trained = [depth for depth in section.depths if depth.trained]
    listed = ", ".join(f"k = {d.num_loops}: {_text(d)}" for d in trained)
    if section.baseline is not None and section.baseline.accuracy_by_depth is not None:
        listed = f"baseline: {_text(section.baseline)}, {listed}"
    text = (
        "Deepest dependency depth solved together with all shallower ones (solved: the whole "
        f"{percent(section.level)} interval of the accuracy lies at {percent(SOLVED_ACCURACY)} or "
        f"above): {listed}."
    )
    changes = _changes(section)
    if trained_moves(section):
        added = ", ".join(
            f"{name(a, b)} {signed(_reach(b) - _reach(a), 0)}" for a, b in trained_moves(section)
        )
        text += f" Added per move: {added}."
    findings = [Finding("shown" if changes["deeper"] or _grows(section) else "open", text)]
    if changes["shorter"]:
        findings.append(
            Finding("against", f"Only shorter chains are solved at {_listed(changes['shorter'])}.")
        )
    if changes["same"]:
        findings.append(
            Finding("against", f"No deeper chain is solved at {names(changes['same'])}.")
        )
    if changes["undecided"]:
        text = f"Undecided at this number of {section.row_word}s: the reach at "
        findings.append(Finding("open", f"{text}{names(changes['undecided'])}."))
    full = [depth for depth in trained if _reach(depth) == _last(depth)]
    if full:
        words = f"solve every measured dependency depth, up to {_last(full[0])}"
        text = f"k = {numbers(full)} {words}; this evaluation cannot show a longer reach."
        findings.append(Finding("limit", text))
    return findings + _against_baseline(section)


def reach_in_short(section: Section) -> list[Finding]:
    """The part of the page's first sentence that is about reaches."""
    moves = trained_moves(section)
    if not section.has_depths or not moves:
        return []
    changes = _changes(section)
    first, last = moves[0][0], moves[-1][1]
    if len(changes["ceiling"]) == len(moves):
        text = f"every measured dependency depth (up to {_last(first)}) is solved at "
        text += f"k = {first.num_loops} to {last.num_loops}, so a longer reach cannot be shown"
        return [Finding("limit", text)]
    if len(changes["same"]) == len(moves):
        return [Finding("against", "more loops solve no deeper dependency chains")]
    gain = f"deeper dependency chains are solved at {_listed(changes['deeper'])}"
    if _grows(section):
        gain = f"the deepest solved dependency chain grows from {_text(first)} at "
        gain += f"k = {first.num_loops} to {_text(last)} at k = {last.num_loops}"
        if _reach(last) == _last(last):
            gain += ", the deepest measured"
    fallen = f"only shorter dependency chains are solved at {_listed(changes['shorter'])}"
    idle = f"no deeper dependency chain is solved at {names(changes['same'])}"
    unclear = "whether deeper dependency chains are solved is undecided at "
    unclear += names(changes["undecided"])
    parts = [
        (bool(changes["shorter"]), Finding("against", fallen)),
        (bool(changes["same"]), Finding("against", idle)),
        (bool(changes["undecided"]), Finding("open", unclear)),
        (bool(changes["deeper"]) or _grows(section), Finding("shown", gain)),
    ]
    return [finding for applies, finding in parts if applies]


def _grows(section: Section) -> bool:
    """Whether the reach grows over the trained loop counts and nowhere stands still or falls.

    The whole can be decided where single moves are not.
    """
    moves, changes = trained_moves(section), _changes(section)
    if not moves or changes["shorter"] or changes["same"]:
        return False
    return _reach(moves[-1][1]) > _possible(moves[0][0])


def _changes(section: Section) -> dict[Change, list[Move]]:
    """Moves between trained neighbours by what they do to the reach."""
    changes: dict[Change, list[Move]] = {
        "deeper": [], "shorter": [], "same": [], "undecided": [], "ceiling": [],
    }  # fmt: skip
    for move in trained_moves(section):
        changes[_change(*move)].append(move)
    return changes


def _change(earlier: Measured, later: Measured) -> Change:
    """An undecided dependency depth can make a move undecided, never deeper or shorter."""
    if _reach(later) > _possible(earlier):
        return "deeper"
    if _possible(later) < _reach(earlier):
        return "shorter"
    if _reach(earlier) == _reach(later) == _last(earlier):
        return "ceiling"
    if _reach(earlier) == _possible(earlier) == _reach(later) == _possible(later):
        return "same"
    return "undecided"


def _against_baseline(section: Section) -> list[Finding]:
    depth, baseline = one_loop(section), section.baseline
    if depth is None or baseline is None or baseline.accuracy_by_depth is None:
        return []
    if _reach(depth) >= _reach(baseline):
        return []
    text = (
        f"At one loop the looped model solves dependency depth {_text(depth)}, the baseline "
        f"{_text(baseline)}."
    )
    return [Finding("against" if _possible(depth) < _reach(baseline) else "open", text)]


def _reach(measured: Measured) -> int:
    assert measured.accuracy_by_depth, "sections with dependency depths are validated to have cells"
    return reach(measured.accuracy_by_depth)


def _possible(measured: Measured) -> int:
    assert measured.accuracy_by_depth, "sections with dependency depths are validated to have cells"
    return possible_reach(measured.accuracy_by_depth)


def _last(measured: Measured) -> int:
    assert measured.accuracy_by_depth, "sections with dependency depths are validated to have cells"
    return measured.accuracy_by_depth[-1].dependency_depth


def _text(measured: Measured) -> str:
    """`5`, `none`, or `5 (6 to 7 undecided)`."""
    assert measured.accuracy_by_depth, "sections with dependency depths are validated to have cells"
    shown, possible = _reach(measured), _possible(measured)
    first = measured.accuracy_by_depth[0].dependency_depth
    text = "none" if shown < first else str(shown)
    if possible == shown:
        return text
    open_depths = str(possible) if possible == shown + 1 else f"{shown + 1} to {possible}"
    return f"{text} ({open_depths} undecided)"


def _listed(moves: Sequence[Move]) -> str:
    """`k 1→2 (5 to 9)`."""
    return ", ".join(f"{name(a, b)} ({_text(a)} to {_text(b)})" for a, b in moves)
