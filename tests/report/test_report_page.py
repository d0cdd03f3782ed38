"""The data of a report are checked, and its page needs nothing but itself."""

import copy
import errno
import json
import re
from pathlib import Path

import pytest
from report_cases import (
    full_section,
    headline,
    make_report,
    make_section,
    parse,
    words,
)

from depthdial.report import figures
from depthdial.report.canvas import new_figure
from depthdial.report.data import Section, read_report_data
from depthdial.report.findings import find_all
from depthdial.report.page import build_report, write_report

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
        assert figures._decimals(axes) == decimals


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
