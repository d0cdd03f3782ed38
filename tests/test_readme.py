"""The README says what is there and quotes only what a script wrote down."""

import json
import re
from pathlib import Path
from runpy import run_path

import pytest

from depthdial.cli.main import COMMANDS
from depthdial.convert.methods import METHODS
from depthdial.formats.families.registry import FAMILIES
from depthdial.model.stopping_rules import STOPPING_RULES
from depthdial.studies.conversion_arms import CONTROL, EQUAL_TIME, LOOPS
from depthdial.studies.conversion_data import TRAINED_CORPORA
from depthdial.studies.conversion_results import accuracy_difference, difference, mean_loss
from depthdial.studies.conversion_words import DEEP, scores_of, write_results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def test_the_tree_names_every_package_in_import_order_and_about_twenty_files():
    tree = README.split("## The tree")[1].split("## Reading order")[0]
    package = tree.split("depthdial/\n")[1].split("benchmarks/")[0]
    named = re.findall(r"^  (\w+)/ ", package, re.M)
    folders = {path.parent.name for path in (ROOT / "depthdial").glob("*/__init__.py")}
    assert set(named) == folders
    order = run_path(str(ROOT / "tests" / "test_import_order.py"))["ORDER"]
    assert named == sorted(named, key=order.index)
    files = re.findall(r"(?<![\w/])\w+\.py", package)
    assert 15 <= len(files) <= 25
    modules = {path.name for path in (ROOT / "depthdial").rglob("*.py")}
    assert set(files) <= modules


def test_the_tour_is_six_files_that_can_be_read_in_one_sitting():
    tour = README.split("## Reading order")[1].split("## What is measured")[0]
    files = re.findall(r"^\d\. `([\w/]+\.py)`", tour, re.M)
    assert len(files) == 6
    lines = [(ROOT / "depthdial" / name).read_text().count("\n") for name in files]
    assert sum(lines) <= 2100, dict(zip(files, lines, strict=True))


@pytest.mark.parametrize("shape", ["d256", "d128"])
def test_quoted_speed_ratios_are_the_measured_ones(shape):
    record = json.loads((RESULTS / "train_speed.json").read_text())
    rows = {row["what"]: row["measured"] for row in record["results"][shape]["checks"]}
    quoted = next(line for line in README.splitlines() if line.startswith(f"| {shape}"))
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", quoted)]
    expected = [
        rows["tokens/s over transformers compiled"],
        rows["tokens/s over transformers eager"],
        rows["eager: tokens/s over transformers eager"],
        100 * rows["gate: extra time at k=1"],
        100 * rows["modulation: extra time at k=1"],
        *(rows[f"k={k}: time over the executed-sublayer ratio"] for k in (2, 3, 4)),
    ]
    assert numbers == [float(f"{value:.2f}") if i < 3 or i > 4 else float(f"{value:.1f}")
                       for i, value in enumerate(expected)]  # fmt: skip


def test_every_result_named_in_the_readme_exists():
    named = re.findall(r"`(docs/results/[\w./-]+|benchmarks/[\w./-]+)`", README)
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXTS[page.name])
    assert all((page.parent / link).exists() for link in links)


def shown_commands(text):
    """(command, its flags) of every `depthdial` line in a code block, continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for line in lines:
        words = line.partition("#")[0].split()
        if words and words[0] == "depthdial":
            yield words[1], [word for word in words if word.startswith("--")]


@pytest.mark.parametrize("name", [n for n in TEXTS if any(shown_commands(TEXTS[n]))])
def test_every_flag_shown_exists(name):
    for command, flags in shown_commands(TEXTS[name]):
        make_parser, _ = COMMANDS[command].functions()
        known = set(re.findall(r"--[\w.-]+", make_parser().format_help()))
        assert set(flags) <= known, (command, set(flags) - known)


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Open any"), ("importing.md", "## Families")]
)
def test_the_table_of_families_is_complete(page, heading):
    section = TEXTS[page].split(heading)[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(named) == sorted(family.name for family in FAMILIES)


def test_methods_and_exit_rules_are_counted_and_named():
    assert len(METHODS) == 13 and "Thirteen methods" in README
    rules = re.findall(r"^\| `(\w+)` \|", TEXTS["exits.md"], flags=re.MULTILINE)
    assert sorted(rules) == sorted(STOPPING_RULES)
    for name in rules:
        row = next(x for x in TEXTS["exits.md"].splitlines() if x.startswith(f"| `{name}` |"))
        default = STOPPING_RULES[name].default_threshold
        shown = row.replace("\\|", "").split("|")[3].strip()
        assert default is None if shown == "none" else float(shown) == default


def test_every_kind_of_fault_listed_has_a_test():
    ids = re.findall(r"^\| (B\d\d) \|", TEXTS["faults.md"], flags=re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    names = re.findall(r"def test_((?:b\d\d_)+)", "\n".join(sources))
    tested = {fault for name in names for fault in name.upper().split("_")}
    assert ids and set(ids) <= tested


def test_quoted_cost_of_opening_is_the_measured_one():
    record = json.loads((RESULTS / "open_checkpoint.json").read_text())
    quoted = re.search(
        r"a ([\d.]+) GB checkpoint .* takes ([\d.]+) times .* of (\d+) % of its size", README
    )
    assert quoted
    assert list(quoted.groups()) == [
        f"{record['checkpoint_bytes'] / 1e9:.1f}",
        f"{record['time_ratio_median']:.2f}",
        f"{100 * record['memory_ratio']:.0f}",
    ]


def test_opening_a_checkpoint_stays_within_its_limits():
    """Time over that of a plain safetensors load, memory over the size of the file."""
    record = json.loads((RESULTS / "open_checkpoint.json").read_text())
    assert record["time_ratio_median"] <= 1.3
    assert record["time_ratio_min"] <= 1.3
    assert record["memory_ratio"] <= 1.1


def test_pictures_exist():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_pointer_results_hold_three_seeds_and_the_claim():
    """Each loop solves at least one deeper chain at 90 % in every seed."""
    results = json.loads((RESULTS / "pointer_programs.json").read_text())
    assert [result["seed"] for result in results] == [0, 1, 2]
    for result in results:
        reaches = []
        for depth in result["depths"][:4]:
            reach = 0
            for row in depth["accuracy_by_depth"]:
                if row["accuracy"] < 0.9:
                    break
                reach = row["dependency_depth"]
            reaches.append(reach)
        assert all(a < b for a, b in zip(reaches, reaches[1:], strict=False)), reaches


def test_quoted_one_loop_taxes_are_the_measured_ones():
    results = json.loads((RESULTS / "pointer_programs.json").read_text())
    taxes = [
        100 * r["depths"][0]["vs_baseline"]["estimate"] / r["baseline"]["loss"] for r in results
    ]
    quoted = re.search(r"one-loop tax is ([\d.]+) %, ([\d.]+) % and ([\d.]+) %", README)
    assert quoted
    assert [f"{tax:.1f}" for tax in taxes] == list(quoted.groups())


def test_quoted_demo_numbers_are_those_of_the_report():
    report = json.loads((RESULTS / "demo" / "report.json").read_text())
    text, pointer = report["sections"]
    tax = text["depths"][0]["vs_baseline"]
    assert f"{tax['estimate']:.4f} [{tax['low']:.4f}, {tax['high']:.4f}]" in README
    losses = {depth["num_loops"]: depth["loss"] for depth in pointer["depths"]}
    assert f"{100 * (losses[1] - losses[4]) / losses[1]:.1f} %" in README
    assert f"{100 * (losses[1] / pointer['baseline']['loss'] - 1):+.1f} %" in README


def test_quoted_gains_of_a_converted_model_are_the_measured_ones():
    record = json.loads((RESULTS / "conversion_study.json").read_text())
    text, chains = scores_of(record["text"]), scores_of(record["chains"])
    data, time = (CONTROL.name, 1), (EQUAL_TIME.name, 1)

    def loss(side, k):
        return mean_loss(text, side, k, prefixes=TRAINED_CORPORA)

    def gain(other):
        found = difference(text, ("joint", 2), other, prefixes=TRAINED_CORPORA)
        return f"{found.interval.estimate:+.3f}"

    def points(other):
        found = accuracy_difference(chains, ("joint", 4), other, min_depth=DEEP)
        return f"{100 * found.interval.estimate:+.1f}"

    losses = [loss("joint", k) for k in LOOPS]
    expected = [
        gain(data),
        gain(time),
        f"{max(losses) - min(losses):.3f}",
        *(f"{loss('base', k) - loss('base', 1):.2f}" for k in LOOPS[1:]),
        *map(points, (("joint", 1), data, time)),
    ]
    paragraph = next(x for x in README.splitlines() if x.startswith("Measured on SmolLM2-135M"))
    assert re.findall(r"[+-]?\d+\.\d+", paragraph) == expected
    assert record["seeds"] == [0, 1, 2] and len(record["text"]) == len(record["chains"]) == 3


def test_the_report_on_converted_models_follows_from_its_scores(tmp_path):
    record = json.loads((RESULTS / "conversion_study.json").read_text())
    written = (RESULTS / "conversion_study.md").read_text()
    base = written.splitlines()[2].partition("; layers")[0]
    tasks = {name: record[name] for name in ("text", "chains")}
    write_results(tasks, seeds=record["seeds"], base=base, folder=tmp_path)
    assert (tmp_path / "conversion_study.md").read_text() == written
