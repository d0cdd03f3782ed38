"""Comparisons of the conversion study: pairing, seeds, depths, and the words that follow."""

import json

import numpy as np
import pytest

from depthdial.data.documents import Document
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.studies.conversion_arms import CONTROL, EQUAL_TIME, LOOPED
from depthdial.studies.conversion_data import TRAINED_CORPORA, UNSEEN_CORPUS, blocks
from depthdial.studies.conversion_results import accuracies, accuracy_difference, difference
from depthdial.studies.conversion_words import write_results

LOOPS = (1, 2, 3, 4)
NAMES = tuple(f"{c}: {i}" for c in (*TRAINED_CORPORA, UNSEEN_CORPUS) for i in range(8))


def sweep(losses, *, seed=0, depths=None):
    """Documents of 10 tokens whose mean loss at loop count k is losses[k - 1]."""
    noise_N = np.random.default_rng(seed).normal(0, 0.3, len(NAMES))
    answers = {}
    if depths is not None:
        total_NP = np.full((len(NAMES), 7), 2)
        correct_KNP = np.stack([np.minimum(2, (np.arange(7) < d) * total_NP) for d in depths])
        answers = {"correct_KNP": correct_KNP, "total_NP": total_NP}
    return DepthSweep(
        loops=LOOPS, max_loops=4, trained_loops=LOOPS, names=NAMES,
        tokens_N=np.full(len(NAMES), 10), bytes_N=np.full(len(NAMES), 40),
        nll_KN=np.stack([(loss + noise_N) * 10 for loss in losses]), **answers,
    )  # fmt: skip


def test_a_difference_is_of_the_chosen_documents_and_names_every_seed():
    seeds = [{"a": sweep((3.0,) * 4), "b": sweep((2.0 + s,) * 4)} for s in (0.0, 0.5)]
    found = difference(seeds, ("a", 1), ("b", 2), prefixes=(UNSEEN_CORPUS,))
    assert found.by_seed == pytest.approx((1.0, 0.5))
    assert found.interval.estimate == pytest.approx(0.75)
    assert found.is_resolved


def test_seeds_that_disagree_resolve_nothing():
    seeds = [{"a": sweep((3.0,) * 4), "b": sweep((loss,) * 4)} for loss in (2.0, 3.1)]
    found = difference(seeds, ("a", 1), ("b", 1))
    assert found.interval.excludes_zero and not found.is_resolved


def test_accuracy_counts_the_depths_asked_for():
    seeds = [{"a": sweep((1.0,) * 4, depths=(2, 3, 4, 6)), "b": sweep((1.0,) * 4, depths=(1,) * 4)}]
    assert accuracies(seeds, "a", 4) == [1.0] * 6 + [0.0]
    deep = accuracy_difference(seeds, ("a", 4), ("b", 1), min_depth=5)
    assert deep.interval.estimate == pytest.approx(2 / 3)
    assert accuracy_difference(seeds, ("a", 2), ("b", 1), min_depth=5).interval.estimate == 0.0


def job(seed, *, chains, **by_arm):
    """Scores of a study; arms that are not named are the base."""
    depths = (2, 3, 4, 6) if chains else None
    sides = ["base", *(["untaught"] if chains else []), CONTROL.name]
    sides += [arm.name for arm in LOOPED] + [EQUAL_TIME.name]
    losses = {side: (3.0, 3.2, 3.9, 4.8) for side in sides}
    losses |= {"joint": (2.9, 2.9, 2.9, 2.91)} | by_arm
    return {
        "seed": seed,
        "step_seconds": {"control": 1.0, "graft": 1.4, "joint": 1.3, "elr": 1.5},
        "sides": {
            side: {
                "steps": 160, "tokens": 81920, "rate": None,
                "sweep": sweep(losses[side], seed=seed, depths=depths).to_dict(),
            }
            for side in sides
        },
    }  # fmt: skip


def report(tmp_path, *, text=(), chains=()):
    """The Markdown of a study with these jobs, and its folder."""
    results = {name: jobs for name, jobs in (("text", text), ("chains", chains)) if jobs}
    write_results(results, seeds=(0, 1), base="A checkpoint", folder=tmp_path)
    return (tmp_path / "conversion_study.md").read_text()


def test_the_report_holds_findings_tables_a_figure_and_every_seed(tmp_path):
    text = report(
        tmp_path,
        text=[job(s, chains=False) for s in (0, 1)],
        chains=[job(s, chains=True) for s in (0, 1)],
    )
    assert "k=1 to 4 lie within 1.800 (`later-deltas`), 0.010 (`joint-deltas`)" in text
    assert "costs 0.20, 0.90, 1.80 at k=2, 3, 4" in text
    assert "the loss at k=1 is the base's on every document, bit for bit" in text
    assert text.index("- On trained domains") < text.index("Depth stability")
    assert "right 0.55 of the time" in text
    assert "| seed 0 | seed 1 |" in text
    assert "nan" not in text
    assert json.loads((tmp_path / "conversion_study.json").read_text())["seeds"] == [0, 1]
    assert (tmp_path / "conversion_study.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_better_than_both_controls_is_named_and_no_other(tmp_path):
    jobs = [job(s, chains=False) for s in (0, 1)]
    even = report(tmp_path, text=[job(s, chains=False, joint=(3.0, 3.0, 3.0, 3.0)) for s in (0, 1)])
    assert "On trained domains no looped arm is better than both controls" in even
    better = report(tmp_path, text=jobs)
    first = next(x for x in better.splitlines() if x.startswith("- On trained domains better"))
    assert "`joint-deltas` at k=4" in first and "later" not in first and "elr" not in first


def test_a_gain_over_itself_that_stays_behind_the_control_is_called_adaptation(tmp_path):
    losses = {"graft": (3.5, 3.2, 3.2, 3.2)}
    text = report(tmp_path, text=[job(s, chains=False, **losses) for s in (0, 1)])
    judged = next(x for x in text.splitlines() if x.startswith("- `later-deltas` at k=2"))
    assert "+0.200 [+0.200, +0.200]*" in judged and "not a gain of looping" in judged
    assert text.count("not a gain of looping") == 1
    assert "the loss at k=1 DIFFERS from the base's" in text


def test_blocks_are_whole_lines_and_lose_nothing():
    text = "".join(f"line {i} of some length\n" for i in range(400))
    parts = list(blocks(Document("d", text)))
    assert "".join(part.text for part in parts) == text
    assert len(parts) > 1 and all(part.text.endswith("\n") for part in parts)
    assert [part.name for part in parts] == [f"d #{i}" for i in range(len(parts))]
