"""The README says what is there and quotes only what a script wrote down."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results"


def test_the_tree_names_every_module():
    modules = {
        path.name for path in (ROOT / "depthdial").rglob("*.py") if path.name != "__init__.py"
    }
    tree = README.split("## The tree")[1].split("## Reading order")[0]
    missing = [name for name in sorted(modules) if name.removesuffix(".py") not in tree]
    assert not missing


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
