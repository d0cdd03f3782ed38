"""The report: words that follow from intervals, and a page that needs nothing but itself."""

import copy
import errno
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from depthdial import report_figures
from depthdial.eval.stats import Interval, compare
from depthdial.report import build_report, write_report
from depthdial.report_canvas import new_figure
from depthdial.report_data import Difference, Section, read_report_data
from depthdial.report_terms import verdict
from depthdial.report_words import describe_section, find_all, summarise_section

BASELINE_LOSS = 2.0


def difference(estimate, half=0.002):
    return {"estimate": estimate, "low": estimate - half, "high": estimate + half}


def accuracy_cells(solved, *, measured=12):
    """Right up to `solved` dependency look-ups, guessing beyond."""
    return [
        {
            "dependency_depth": depth,
            "accuracy": 0.99 if depth <= solved else 0.125,
            "low": 0.98 if depth <= solved else 0.1,
            "high": 1.0 if depth <= solved else 0.15,
            "positions": 500,
        }
        for depth in range(1, measured + 1)
    ]


def make_section(losses, *, half=0.002, untrained=(), solved=None, baseline_solved=5, **changes):
    """A section whose looped model has `losses` at k = 1, 2, ...; the margin is 0.01."""
    depths = []
    for idx, loss in enumerate(losses):
        depths.append(
            {
                "num_loops": idx + 1,
                "trained": idx + 1 not in untrained,
                "loss": loss,
                "low": loss - 0.05,
                "high": loss + 0.05,
                "executed_sublayers": 8 + 4 * idx,
                "flops_per_token": 1e6 + 5e5 * idx,
                "vs_baseline": difference(loss - BASELINE_LOSS, half),
                "vs_previous": None if idx == 0 else difference(loss - losses[idx - 1], half),
                "accuracy_by_depth": None if solved is None else accuracy_cells(solved[idx]),
            }
        )
    section = {
        "name": "Held-out messages",
        "kind": "text" if solved is None else "pointer_program",
        "what": "Next-token prediction on held-out documents.",
        "margin": 0.01,
        "documents": 200,
        "tokens": 40_000,
        "num_seeds": 1,
        "baseline": {
            "loss": BASELINE_LOSS,
            "low": 1.95,
            "high": 2.05,
            "executed_sublayers": 8,
            "flops_per_token": 1e6,
            "accuracy_by_depth": None if solved is None else accuracy_cells(baseline_solved),
        },
        "depths": depths,
        "hardware": "2 CPU cores",
    }
    return section | changes


def make_report(*sections):
    return {
        "title": "Test report",
        "created": "2025-01-01",
        "sections": list(sections),
        "provenance": {
            "tiny": {"seed": 3, "versions": {"torch": "2.13.0"}},
            "tiny-baseline": {"seed": 4, "versions": {"torch": "2.13.0"}},
        },
    }


def full_section(**changes):
    """Every optional part present."""
    cost = {"params": 1000, "steps": 10, "tokens": 5000, "flops": 1.5e12, "seconds": 75.0}
    curve = [
        {"model": model, "step": step, "num_loops": k, "loss": 3.0 - 0.01 * step}
        for step in range(0, 50, 5)
        for model, k in (("baseline", 1), ("looped", 1), ("looped", 2))
    ]
    section = make_section(
        [1.9, 1.7, 1.6, 1.65],
        untrained=(4,),
        solved=[5, 7, 9, 9],
        samples=[
            {
                "prompt": "The year",
                "baseline": " was good",
                "outputs": [{"num_loops": 1, "text": " was long"}, {"num_loops": 4, "text": " x"}],
            }
        ],
        training={"looped": cost, "baseline": cost | {"flops": 1.0e12}},
        training_curve=curve,
        settings={"model": {"loop": {"update": "adaptive_delta"}}},
        chance_accuracy=0.125,
        timing_note="Forward of 16 rows.",
    )
    for depth in section["depths"]:
        depth["ms_per_token_min"], depth["ms_per_token_median"] = 0.1, 0.12
    return section | changes


def words(section):
    return describe_section(read_report_data(make_report(section)).sections[0])


def headline(section):
    return summarise_section(read_report_data(make_report(section)).sections[0])


def said(section):
    return " ".join(words(section)) + " " + headline(section)


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


# Data


def problems(**changes):
    with pytest.raises(ValueError) as caught:
        read_report_data(make_report(make_section([2.0, 1.8]) | changes))
    return str(caught.value)


def test_unknown_missing_and_wrong_fields_are_named():
    assert "sections.0.colour" in problems(colour="red")
    assert "sections.0.tokens='many'" in problems(tokens="many")
    assert "sections.0.margin" in problems(margin=-0.1)
    with pytest.raises(ValueError, match=r"sections: Field required"):
        read_report_data({"title": "x", "created": "y"})


def test_losses_that_are_not_finite_are_refused():
    section = make_section([2.0, 1.8])
    section["depths"][1]["loss"] = float("nan")
    with pytest.raises(ValueError, match=r"depths\.1\.loss"):
        read_report_data(make_report(section))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["depths"].reverse(), "ascend"),
        (lambda s: s["depths"][1].update(vs_previous=None), "needs vs_previous"),
        (lambda s: s["depths"][1].update(vs_baseline=None), "vs_baseline goes with a baseline"),
        (lambda s: s.update(kind="pointer_program"), "accuracy_by_depth goes with"),
        (lambda s: [d.update(trained=False) for d in s["depths"]], "no loop count is marked"),
        (lambda s: s["depths"][0].update(ms_per_token_min=1.0), "timing_note"),
        (lambda s: s.update(documents=1), "a single document has none"),
        (lambda s: s["depths"][0].update(low=None, high=None), "low and high go here"),
        (lambda s: s["depths"][0].update(low=None), "go together"),
    ],
)
def test_contradictory_sections_are_refused(change, message):
    section = make_section([2.0, 1.8])
    change(section)
    with pytest.raises(ValueError, match=message):
        read_report_data(make_report(section))


def test_data_survive_a_round_trip_through_json():
    data = read_report_data(json.loads(json.dumps(make_report(full_section()))))
    assert read_report_data(data.model_dump(mode="json")) == data


# Page


@pytest.fixture(scope="module")
def page():
    return build_report(make_report(full_section(), make_section([2.0, 1.996])))


class Tags(HTMLParser):
    """Collects tags and attributes, and checks that elements close in order."""

    VOID = {"meta", "link", "br"}

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_the_page_fetches_nothing_and_runs_nothing(page):
    tags = parse(page)
    assert not {"script", "iframe", "img", "object", "embed"} & set(tags.tags)
    links = [value for name, value in tags.attributes if name in ("src", "href", "xlink:href")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert "://" not in page and "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_figures_take_colours_and_font_from_the_page(page):
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    # Pointer section: loss, differences, accuracy, training. Text section: the first two.
    assert len(figures) == 6
    for figure in figures:
        assert not re.search(r"#[0-9a-fA-F]{6}\b", figure)
        assert "font-family" not in figure and "<style" not in figure
        assert "<text" in figure and "var(--ink)" in figure
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_ids_and_links_inside_the_page_fit(page):
    tags = parse(page)
    ids = [value for name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {v[1:] for name, v in tags.attributes if name == "href" and v.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]*)\)", page))
    assert targets <= set(ids)


def test_equal_data_give_equal_bytes():
    data = make_report(full_section())
    assert build_report(data) == build_report(copy.deepcopy(data))


def test_the_page_shows_every_part(page):
    for text in (
        "Test report",
        "1.5 TFLOP",
        "1 min 15 s",
        "model.loop.update",
        "versions.torch",
        "Equal everywhere",
        "Wall-clock, optimizer steps only",
        "the whole interval lies at 90\N{NO-BREAK SPACE}% or above",
        "The year",
        "Forward of 16 rows.",
        "Guessing gives 12.5",
        "2 CPU cores",
    ):
        assert text in page


def test_a_page_of_chains_speaks_of_rows_of_chains_and_of_what_naming_a_digit_scores():
    section = full_section(kind="pointer_chain", chance_accuracy=0.55, name="Pointer chains")
    section |= {"what": "Lines tell chains.", "documents": 12}
    page = build_report(make_report(section)).replace("\N{NO-BREAK SPACE}", " ")
    body = page.split("<body")[1]
    for text in (
        "40,000 answers in 12 rows evaluated",
        "bootstrap over whole rows",
        "Only 12 rows: intervals are widened for it (Student&#39;s t), and one unusual row",
        "the choice of rows, not the spread",
        "Naming the digit of any chain gives 55 %",
        "Answers at every loop count",
        "Right answers in percent by dependency depth",
    ):
        assert text in body, text
    assert not re.search("program|document|Guessing", body)


def test_provenance_of_every_run_is_shown_and_equal_facts_once(page):
    provenance = page.split('id="provenance"')[1]
    assert provenance.count("versions.torch") == 1
    assert provenance.index("Equal everywhere") < provenance.index(">tiny<")
    shown = re.findall(r"<td>(\w+)</td><td>(\d)</td>", provenance)
    assert shown == [("seed", "3"), ("seed", "4")]


def test_a_tax_at_an_untrained_loop_count_is_no_evidence_in_favour():
    section = make_section([1.9, 1.7, 1.6], untrained=(1,))
    parsed = read_report_data(make_report(section)).sections[0]
    [tax] = [f for f in find_all(parsed) if f.text.startswith("One-loop tax")]
    assert tax.kind == "limit" and "outside training" in tax.text


def test_what_is_true_of_all_moves_names_no_optimizer_steps():
    text = headline(make_section([2.0, 2.0, 2.0]))
    assert "at any further loop from k = 1 to 3" in text and "step" not in text


def test_every_statement_stands_on_the_page(page):
    plain = page.replace("\N{NO-BREAK SPACE}", " ").replace("&gt;", ">")
    for section in (full_section(), make_section([2.0, 1.996])):
        for text in words(section) + [headline(section)]:
            assert text in plain


def test_b15_depths_outside_training_are_marked_in_figure_table_and_samples(page):
    assert ">outside training</text>" in page
    assert 'class="outside"' in page
    assert "k = 4, outside training" in page
    inside = build_report(make_report(make_section([2.0, 1.8])))
    assert ">outside training</text>" not in inside and 'class="outside"' not in inside


def test_an_exploding_depth_outside_training_does_not_flatten_the_curve():
    page = build_report(make_report(make_section([2.0, 1.8, 900.0], untrained=(3,))))
    loss_figure = re.search(r"<svg.*?</svg>", page, re.DOTALL)[0]
    ticks = [float(t) for t in re.findall(r">(\d\.\d+)</text>", loss_figure)]
    assert ">900</text>" in loss_figure
    assert len([tick for tick in ticks if 1.6 < tick < 2.4]) >= 3


@pytest.mark.parametrize(
    ("ticks", "decimals"), [([0.0, 0.025, 0.05], 3), ([-0.2, -0.1, 0.0], 1), ([1.0, 2.0], 0)]
)
def test_tick_labels_have_the_decimals_that_their_values_need(ticks, decimals):
    """A step of 0.025 was once labelled +0.13, +0.15, +0.18."""
    figure, context = new_figure((3, 3))
    with context:
        axes = figure.add_subplot()
        axes.set_yticks(ticks)
        assert report_figures._decimals(axes) == decimals


def test_runs_of_blank_lines_in_samples_are_shown_as_one_and_the_page_says_so():
    section = make_section([2.0, 1.8])
    section["samples"] = [
        {"prompt": "p", "outputs": [{"num_loops": 1, "text": "a\n\n \n\n\nb\nc"}]}
    ]
    page = build_report(make_report(section))
    assert "<p>a\n\nb\nc</p>" in page and "Blank lines in a row are shown as one." in page


def test_text_from_models_and_files_is_escaped():
    hostile = '<script src="x">alert(1)</script> $\\nonsense{$ & "quotes"'
    section = full_section(name=hostile, what=hostile, unit=hostile, settings={"key": hostile})
    section["samples"][0]["outputs"][0]["text"] = hostile
    page = build_report(make_report(section))
    assert "<script" not in page and page.count("&lt;script") >= 4
    parse(page)


def test_long_training_curves_are_averaged_and_the_page_says_so():
    curve = [
        {"model": "looped", "step": step, "num_loops": 1, "loss": 3.0 + (step % 2)}
        for step in range(1000)
    ]
    long = build_report(make_report(make_section([2.0, 1.8], training_curve=curve)))
    short = build_report(make_report(make_section([2.0, 1.8], training_curve=curve[:50])))
    assert "mean over a group" in long and "mean over a group" not in short


def test_one_depth_without_baseline_still_gives_a_page():
    section = make_section([2.0], baseline=None)
    section["depths"][0]["vs_baseline"] = None
    page = build_report(make_report(section))
    parse(page)
    assert "minus baseline" not in page


def test_writing_leaves_a_page_and_a_picture_that_is_equal_for_equal_data(tmp_path):
    data = make_report(make_section([2.0, 1.8]))
    first = write_report(data, tmp_path / "new" / "folder")
    second = write_report(data, tmp_path / "other")
    assert first.html.read_text(encoding="utf-8") == build_report(data)
    assert first.curve.read_bytes().startswith(b"\x89PNG")
    assert first.curve.read_bytes() == second.curve.read_bytes()
    names = sorted(path.name for path in first.html.parent.iterdir())
    assert names == ["curve.png", "report.html", "report.json"]
    assert json.loads((tmp_path / "other" / "report.json").read_text("utf-8")) == data


@pytest.mark.parametrize("has_older", [False, True])
def test_a_full_disk_leaves_the_older_report_whole_and_says_so(tmp_path, monkeypatch, has_older):
    data = make_report(make_section([2.0, 1.8]))
    if has_older:
        write_report(data, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    write_bytes = Path.write_bytes

    def write_until_full(path, content):
        write_bytes(path, content[:9])
        if path.name.startswith("report.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    stands = "the older report there is unchanged" if has_older else "no report is left"
    with pytest.raises(OSError, match=f"could not write .*: No space left on device; {stands}"):
        write_report(make_report(make_section([2.5, 1.5])), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_bad_data_leave_an_existing_report_alone(tmp_path):
    paths = write_report(make_report(make_section([2.0, 1.8])), tmp_path)
    before = paths.html.read_bytes()
    with pytest.raises(ValueError):
        write_report(make_report(make_section([2.0, 1.8], margin=-1.0)), tmp_path)
    assert paths.html.read_bytes() == before


def test_sections_are_immutable():
    section = read_report_data(make_report(make_section([2.0, 1.8]))).sections[0]
    assert isinstance(section, Section)
    with pytest.raises(ValueError, match="frozen"):
        section.margin = 1.0
