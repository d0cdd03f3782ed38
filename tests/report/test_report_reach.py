"""The reach of pointer programs: what intervals show, and the words for every shape of it."""

import pytest

from depthdial.report.chain_depth import find_reaches, possible_reach, reach, reach_in_short
from depthdial.report.data import DepthAccuracy, Section

SOLVED, WRONG, OPEN = (0.99, 0.97, 1.0), (0.3, 0.2, 0.4), (0.92, 0.88, 0.95)
LAST = 12


def cells(*states):
    """One cell per dependency depth from 1 on."""
    return [
        {"dependency_depth": depth, "accuracy": a, "low": low, "high": high, "positions": 500}
        for depth, (a, low, high) in enumerate(states, start=1)
    ]


def solved_to(depth):
    return cells(*[SOLVED if d <= depth else WRONG for d in range(1, LAST + 1)])


def section(*rows, baseline=None):
    """Pointer programs whose trained loop counts 1, 2, ... have these accuracies."""
    measured = {
        "loss": 1.0, "low": 0.9, "high": 1.1, "executed_sublayers": 8, "flops_per_token": 1e6,
    }  # fmt: skip
    difference = {"estimate": -0.1, "low": -0.11, "high": -0.09}
    return Section.model_validate(
        {
            "name": "Programs",
            "kind": "pointer_program",
            "what": "Look-ups.",
            "margin": 0.01,
            "documents": 1000,
            "tokens": 32_000,
            "num_seeds": 1,
            "hardware": "2 CPU cores",
            "baseline": baseline and measured | {"accuracy_by_depth": baseline},
            "depths": [
                measured
                | {
                    "num_loops": k,
                    "trained": True,
                    "accuracy_by_depth": row,
                    "vs_baseline": baseline and difference,
                    "vs_previous": None if k == 1 else difference,
                }
                for k, row in enumerate(rows, start=1)
            ],
        }
    )


def stairs(*reaches):
    return section(*map(solved_to, reaches))


def short(of):
    return "; ".join(finding.text for finding in reach_in_short(of))


def kinds(of):
    return {finding.kind for finding in reach_in_short(of)}


def said(of):
    return " ".join(finding.text for finding in find_reaches(of))


def accuracies(*states):
    return [DepthAccuracy.model_validate(cell) for cell in cells(*states)]


def test_only_a_whole_interval_above_90_percent_counts_as_solved():
    measured = accuracies(SOLVED, SOLVED, OPEN, SOLVED, WRONG)
    assert (reach(measured), possible_reach(measured)) == (2, 4)
    assert (reach(accuracies(WRONG, SOLVED)), possible_reach(accuracies(WRONG, SOLVED))) == (0, 0)


def test_a_cell_without_interval_is_undecided_however_right_it_is():
    measured = accuracies(SOLVED, (1.0, None, None))
    assert (reach(measured), possible_reach(measured)) == (1, 2)


def test_undecided_dependency_depths_are_named_beside_the_reach():
    of = section(cells(SOLVED, OPEN, WRONG), cells(SOLVED, OPEN, OPEN, SOLVED, WRONG))
    assert "k = 1: 1 (2 undecided), k = 2: 1 (2 to 4 undecided)" in said(of)
    assert "whole 95 % interval of the accuracy lies at 90 % or above" in said(of)


def test_a_move_over_undecided_dependency_depths_is_undecided():
    of = section(cells(SOLVED, OPEN, WRONG), cells(SOLVED, SOLVED, WRONG))
    assert kinds(of) == {"open"} and "undecided at k 1→2" in short(of)
    assert "No deeper chain" not in said(of)


def test_growth_over_all_loops_can_be_decided_where_single_moves_are_not():
    of = section(
        cells(SOLVED, OPEN, WRONG, WRONG),
        cells(SOLVED, SOLVED, OPEN, WRONG),
        cells(SOLVED, SOLVED, SOLVED, WRONG),
    )
    assert short(of) == (
        "whether deeper dependency chains are solved is undecided at k 1→2, k 2→3; the deepest "
        "solved dependency chain grows from 1 (2 undecided) at k = 1 to 3 at k = 3"
    )
    assert [f.kind for f in find_reaches(of)] == ["shown", "open"]


@pytest.mark.parametrize("reaches", [(LAST, LAST, LAST), (LAST, LAST)])
def test_a_saturated_evaluation_is_a_limit_in_the_headline_too(reaches):
    of = stairs(*reaches)
    assert kinds(of) == {"limit"}
    assert "every measured dependency depth (up to 12) is solved" in short(of)
    assert "no deeper" not in short(of).lower() and "No deeper" not in said(of)


def test_a_reach_that_grows_to_the_last_measured_depth_says_so():
    assert short(stairs(8, LAST, LAST)) == (
        "the deepest solved dependency chain grows from 8 at k = 1 to 12 at k = 3, the deepest "
        "measured"
    )
    assert short(stairs(5, 7, 9)).endswith("grows from 5 at k = 1 to 9 at k = 3")


def test_a_reach_that_falls_back_is_neither_growth_nor_no_gain():
    of = stairs(5, 9, 5)
    assert short(of) == (
        "only shorter dependency chains are solved at k 2→3 (9 to 5); "
        "deeper dependency chains are solved at k 1→2 (5 to 9)"
    )
    assert [f.kind for f in reach_in_short(of)] == ["against", "shown"]
    assert "Only shorter chains are solved at k 2→3 (9 to 5)." in said(of)
    assert "grows" not in short(of) and "no deeper" not in short(of)


def test_a_reach_that_stands_still_in_between_is_named():
    assert short(stairs(5, 7, 7)) == (
        "no deeper dependency chain is solved at k 2→3; "
        "deeper dependency chains are solved at k 1→2 (5 to 7)"
    )
    assert short(stairs(5, 5, 5)) == "more loops solve no deeper dependency chains"


def test_less_than_the_baseline_is_against_only_where_it_is_decided():
    worse = find_reaches(section(solved_to(4), solved_to(6), baseline=solved_to(5)))
    assert [f.kind for f in worse if f.text.startswith("At one loop")] == ["against"]
    unclear = section(
        cells(SOLVED, OPEN, WRONG), cells(SOLVED, SOLVED, WRONG),
        baseline=cells(SOLVED, SOLVED, WRONG),
    )  # fmt: skip
    assert [f.kind for f in find_reaches(unclear) if f.text.startswith("At one loop")] == ["open"]
