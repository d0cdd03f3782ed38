"""The words of a report follow from its intervals."""

import itertools
import re

import pytest
from report_cases import headline, make_report, make_section, parse, said, words

from depthdial.eval.stats import Interval, compare
from depthdial.report.data import Difference, read_report_data
from depthdial.report.findings import find_all
from depthdial.report.page import build_report
from depthdial.report.terms import verdict

# Words: one-loop tax


def test_a_tax_is_stated_first_and_called_higher():
    section = make_section([2.06, 1.8, 1.7])
    assert words(section)[0].startswith("One-loop tax")
    assert "+0.0600 [+0.0580, +0.0620]" in words(section)[0]
    assert "(+3.0 %" in words(section)[0] and "Higher" in words(section)[0]
    assert headline(section).startswith("One loop has a higher loss than the baseline (+3.0 %)")


def test_equal_needs_the_whole_interval_inside_the_margin():
    assert "Equal:" in said(make_section([2.001, 1.9]))
    assert "equals the non-looped baseline within the stated margin" in said(
        make_section([2.001, 1.9])
    )
    undecided = said(make_section([2.001, 1.9], half=0.02))
    assert "Undecided" in undecided and "equals" not in undecided and "Equal:" not in undecided
    assert "neither a tax nor its absence is shown" in undecided


def test_a_resolved_difference_inside_the_margin_is_equal_and_says_which_side():
    text = said(make_section([1.995, 1.9]))
    assert "Equal:" in text and "It excludes zero: lower, but by less than the margin." in text


def test_one_loop_below_the_baseline_is_called_lower():
    text = said(make_section([1.9, 1.8]))
    assert "Lower: the whole interval lies below zero." in text
    assert "(\N{MINUS SIGN}5.0 %)" in text


def test_a_difference_that_may_be_smaller_than_the_margin_says_so():
    assert "more than the margin of ±0.0100 is open" in said(make_section([2.011, 1.8]))


def test_without_baseline_or_one_loop_no_tax_is_stated():
    section = make_section([2.0, 1.9])
    section["baseline"] = None
    for depth in section["depths"]:
        depth["vs_baseline"] = None
    assert "No baseline was measured" in said(section)
    assert "keeps up" not in said(section) and "equals" not in said(section)
    section = make_section([2.0, 1.9, 1.8])
    del section["depths"][0]
    section["depths"][0]["vs_previous"] = None
    assert "One loop was not measured" in said(section)


# Words: gains


def test_a_gain_with_every_loop_is_stated_with_sizes_and_total():
    text = said(make_section([2.0, 1.8, 1.7, 1.65]))
    assert "Loss falls with every loop from k = 1 to 4" in text
    assert "k 1→2 \N{MINUS SIGN}0.2000" in text and "k 3→4 \N{MINUS SIGN}0.0500" in text
    assert "in all \N{MINUS SIGN}0.3500 (\N{MINUS SIGN}17.5 %)" in text
    assert "no practical amount" not in text and "raise" not in text


def test_no_gain_leads_the_text_even_where_it_is_resolved_from_zero():
    section = make_section([2.0, 1.996, 1.9955], half=0.001)
    assert words(section)[0].startswith("Every further loop changes the loss by no practical")
    assert "Resolved from zero, yet that small: k 1→2" in words(section)[0]
    assert headline(section).startswith("More loops change the loss by no practical amount")
    assert "falls" not in said(section)


def test_a_curve_turns_only_where_it_fell_before():
    """A rise after an undecided move used to be called a turn because of a later fall."""
    section = make_section([2.0, 2.001, 2.05, 1.9], half=0.015)
    assert words(section)[0].startswith("More loops raise the loss at k 2→3")
    assert "turns" not in said(section)


def test_more_parameters_than_the_baseline_are_said():
    cost = {"steps": 10, "tokens": 1000, "flops": 1e9, "seconds": 1.0}
    training = {"looped": {"params": 138, **cost}, "baseline": {"params": 100, **cost}}
    assert "1.38 times the parameters of the baseline" in said(
        make_section([2.0, 1.9], training=training)
    )


def test_a_rise_leads_the_text_and_names_the_turn():
    section = make_section([2.0, 1.8, 1.85])
    assert words(section)[0].startswith("More loops raise the loss at k 2→3 +0.0500")
    assert "The curve turns at k = 2." in words(section)[0]
    assert "every loop" not in said(section)
    assert "Loss falls at k 1→2" in said(section)
    assert headline(section).startswith("More loops raise the loss at k 2→3")


def test_undecided_gains_are_neither_gain_nor_equality():
    text = said(make_section([2.0, 1.99, 1.98], half=0.03))
    assert "Undecided at this number of documents: k 1→2" in text
    assert "falls" not in text and "no practical" not in text and "raise" not in text


def test_a_gain_that_ends_is_not_called_a_gain_with_every_loop():
    text = said(make_section([2.0, 1.8, 1.7995]))
    assert "Some further loops change the loss by no practical amount" in text
    assert "Loss falls at k 1→2" in text and "every loop" not in text


def test_one_trained_depth_gives_no_gain_per_loop():
    text = said(make_section([2.3, 2.1, 1.9, 1.8], untrained=(1, 2, 3)))
    assert "no gain per loop can be stated" in text and "falls" not in text
    assert "One loop lies outside training." in text


@pytest.mark.parametrize("beyond", [1.2, 1.8, 1.9])
def test_b15_depths_outside_training_enter_no_finding(beyond):
    """A depth outside training, however good or bad, changes only the sentence that lists it."""
    inside = words(make_section([2.0, 1.9, 1.8]))
    outside = words(make_section([2.0, 1.9, 1.8, beyond], untrained=(4,)))
    extra = [text for text in outside if text not in inside]
    assert len(extra) == 1 and extra[0].startswith("Outside training: k = 4.")
    assert headline(make_section([2.0, 1.9, 1.8, beyond], untrained=(4,))) == headline(
        make_section([2.0, 1.9, 1.8])
    )


# Words: pointer programs


def test_staircase_is_stated_with_its_increments():
    text = said(make_section([2.0, 1.6, 1.3, 1.1], solved=[5, 7, 9, 11]))
    assert "baseline: 5, k = 1: 5, k = 2: 7, k = 3: 9, k = 4: 11" in text
    assert "k 1→2 +2, k 2→3 +2, k 3→4 +2" in text
    assert "grows from 5 at k = 1 to 11 at k = 4" in text
    assert "No deeper chain" not in text and "cannot show a longer reach" not in text


def test_a_loop_that_solves_no_deeper_chain_is_named_first():
    section = make_section([2.0, 1.6, 1.3], solved=[5, 7, 7])
    assert words(section)[0] == "No deeper chain is solved at k 2→3."
    section = make_section([2.0, 1.6], solved=[5, 5])
    assert "more loops solve no deeper dependency chains" in headline(section).lower()


def test_one_loop_that_solves_less_than_the_baseline_is_named_first():
    section = make_section([2.0, 1.6], solved=[4, 6])
    assert words(section)[0].startswith("At one loop the looped model solves dependency depth 4")


def test_a_solved_evaluation_is_a_limit_and_not_a_missing_gain():
    text = said(make_section([2.0, 1.6, 1.5], solved=[8, 12, 12]))
    assert "this evaluation cannot show a longer reach" in text
    assert "No deeper chain" not in text


def test_a_gap_below_a_solved_depth_ends_the_reach():
    section = make_section([2.0, 1.6], solved=[5, 7])
    section["depths"][1]["accuracy_by_depth"][2].update(accuracy=0.5, low=0.4, high=0.6)
    assert "k = 2: 2" in said(section)


def test_nothing_solved_is_said_as_none():
    assert "k = 1: none" in said(make_section([2.0, 1.9], solved=[0, 2]))


# Words: one document


def one_document(**changes):
    """A section without any interval."""
    section = make_section([2.06, 1.5, 1.7], documents=1, **changes)
    for item in [section["baseline"], *section["depths"]]:
        item["low"] = item["high"] = None
        for name in ("vs_baseline", "vs_previous"):
            if item.get(name) is not None:
                item[name]["low"] = item[name]["high"] = None
        for cell in item["accuracy_by_depth"] or []:
            cell["low"] = cell["high"] = None
    return section


ONE_ROW = pytest.mark.parametrize(
    ("changes", "row"),
    [({}, "document"), ({"solved": [4, 9, 9]}, "program"),
     ({"solved": [4, 9, 9], "kind": "pointer_chain"}, "row")],
)  # fmt: skip


@ONE_ROW
def test_one_document_shows_its_numbers_and_claims_nothing(changes, row):
    section = read_report_data(make_report(one_document(**changes))).sections[0]
    assert {finding.kind for finding in find_all(section)} <= {"limit", "open"}
    assert f"One {row} was measured" in headline(one_document(**changes))
    text = said(one_document(**changes))
    assert "+0.0600" in text and f"no interval: one {row}" in text
    assert not re.search("falls|raise|Lower|Higher|grows|Only 1 ", text)


@ONE_ROW
def test_a_page_of_one_document_has_no_intervals(changes, row):
    page = build_report(make_report(one_document(**changes)))
    parse(page)
    table = page.split("Every loop count")[1].split("</table>")[0]
    assert f"No interval: one {row}" in page and "[" not in table
    assert "no interval" in table and "bootstrap" not in page


# Words: limits


def test_seed_and_document_limits_follow_the_data():
    one = said(make_section([2.0, 1.8], documents=12))
    assert "One training seed" in one and "Only 12 documents" in one
    many = said(make_section([2.0, 1.8], num_seeds=3))
    assert "3 training seeds" in many and "One training seed" not in many
    assert "Only" not in many


def test_unequal_training_is_said():
    cost = {"params": 10, "steps": 10, "tokens": 5000, "flops": 2e12, "seconds": 1.0}
    more = {"looped": cost, "baseline": cost | {"flops": 1e12}}
    assert "2.00 times the FLOPs" in said(make_section([2.0, 1.8], training=more))
    other = {"looped": cost, "baseline": cost | {"tokens": 4000}}
    assert "different amounts of data" in said(make_section([2.0, 1.8], training=other))
    same = said(make_section([2.0, 1.8], training={"looped": cost, "baseline": cost}))
    assert "equal training FLOPs" in same and "not a comparison" not in same


CASES = {
    "gain": make_section([2.0, 1.8, 1.6]),
    "tax": make_section([2.3, 2.1, 1.9]),
    "flat": make_section([2.0, 2.0, 2.0]),
    "turn": make_section([2.0, 1.8, 1.9]),
    "undecided": make_section([2.0, 1.99], half=0.1),
    "beyond": make_section([2.0, 1.8, 1.5], untrained=(3,)),
    "stairs": make_section([2.0, 1.5], solved=[5, 7]),
}


@pytest.mark.parametrize("name", CASES)
def test_no_text_recommends_a_loop_count_or_claims_more_than_was_measured(name):
    text = said(CASES[name])
    assert not re.search(r"\b(best|optimal|parity|no tax|prove[ns]?|significant)\b", text, re.I)


@pytest.mark.parametrize("name", CASES)
def test_contradicting_evidence_comes_first_and_limits_last(name):
    section = read_report_data(make_report(CASES[name])).sections[0]
    kinds = [finding.kind for finding in find_all(section)]
    assert kinds == sorted(kinds, key=["against", "open", "shown", "limit"].index)


def test_report_and_statistics_apply_the_same_rule():
    grid = [-0.03, -0.01, -0.002, 0.0, 0.002, 0.01, 0.03]
    for low, high in itertools.combinations_with_replacement(grid, 2):
        for margin in (0.0, 0.01):
            ours = verdict(Difference(estimate=low, low=low, high=high), margin)
            assert ours == compare(Interval(low, low, high, 0.95), margin=margin)
