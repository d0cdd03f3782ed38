"""The claim of the project, learned in two minutes: more loops solve deeper programs."""

import pytest

from depthdial.config import Recipe
from depthdial.studies.demo import RECIPES
from depthdial.studies.report_run import FinishedRun, section_of
from depthdial.train.pretrain import train

STEPS = 600
# Two minutes of one core; a busy machine takes several times that.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def depths(tmp_path_factory) -> dict[int, dict]:
    """Measured depths of a run of 600 steps at a fixed seed."""
    recipe = Recipe.from_file(RECIPES / "tiny-pointer.yaml")
    recipe = recipe.replace(**{"train.steps": STEPS, "train.val_every": STEPS})
    result = train(recipe, root=tmp_path_factory.mktemp("runs"))
    section = section_of(FinishedRun.open(result.path), None)["section"]
    return {depth["num_loops"]: depth for depth in section["depths"]}


def test_loss_falls_by_at_least_0_05_with_each_loop(depths):
    losses = [depths[k]["loss"] for k in (1, 2, 3, 4)]
    gains = [before - after for before, after in zip(losses, losses[1:], strict=False)]
    assert all(gain >= 0.05 for gain in gains), losses


def test_every_gain_is_far_outside_its_interval(depths):
    for k in (2, 3, 4):
        assert depths[k]["vs_previous"]["high"] < -0.04


def test_accuracy_at_dependency_depths_6_to_10_rises_with_every_loop(depths):
    def accuracy(k: int) -> float:
        rows = [r for r in depths[k]["accuracy_by_depth"] if 6 <= r["dependency_depth"] <= 10]
        positions = sum(row["positions"] for row in rows)
        return sum(row["accuracy"] * row["positions"] for row in rows) / positions

    accuracies = [accuracy(k) for k in (1, 2, 3, 4)]
    assert all(a < b for a, b in zip(accuracies, accuracies[1:], strict=False)), accuracies


def test_depths_beyond_training_are_measured_and_marked(depths):
    assert {k: depth["trained"] for k, depth in depths.items()} == {
        1: True, 2: True, 3: True, 4: True, 5: False, 6: False,
    }  # fmt: skip
