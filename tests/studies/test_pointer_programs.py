"""The claim of the project, learned in two minutes: more loops solve deeper programs."""

import pytest

from depthdial.config import Recipe
from depthdial.eval.depth_sweep import DepthSweep, sweep_questions
from depthdial.eval.stats import BOOTSTRAP_SEED, paired_bootstrap
from depthdial.recipes import recipe_file
from depthdial.studies.finished_run import FinishedRun
from depthdial.training.pretrain import train

STEPS, ROWS = 600, 512
# Two minutes of one core; a busy machine takes several times that.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> DepthSweep:
    """Loop counts 1..4 and two beyond, of a run of 600 steps at a fixed seed."""
    recipe = Recipe.from_file(recipe_file("tiny-pointer"))
    recipe = recipe.replace(**{"train.steps": STEPS, "train.val_every": STEPS})
    run = FinishedRun.open(train(recipe, root=tmp_path_factory.mktemp("runs")).path)
    return sweep_questions(
        run.model, run.unseen_rows(), loops=range(1, 7), num_rows=ROWS,
        trained_loops=run.trained_loops,
    )  # fmt: skip


def test_loss_falls_by_at_least_0_05_with_each_loop(sweep):
    losses = [sweep.mean_loss(k) for k in (1, 2, 3, 4)]
    gains = [before - after for before, after in zip(losses, losses[1:], strict=False)]
    assert all(gain >= 0.05 for gain in gains), losses


def test_every_gain_is_far_outside_its_interval(sweep):
    for k in (2, 3, 4):
        gain = paired_bootstrap(sweep.nll(k), sweep.nll(k - 1), sweep.tokens_N, seed=BOOTSTRAP_SEED)
        assert gain.high < -0.04


def test_accuracy_at_dependency_depths_6_to_10_rises_with_every_loop(sweep):
    deep = slice(5, 10)
    accuracies = [
        sweep.correct_KNP[sweep.loops.index(k), :, deep].sum() / sweep.total_NP[:, deep].sum()
        for k in (1, 2, 3, 4)
    ]
    assert all(a < b for a, b in zip(accuracies, accuracies[1:], strict=False)), accuracies


def test_b15_loop_counts_beyond_training_are_measured_and_marked(sweep):
    assert {k: sweep.is_trained(k) for k in sweep.loops} == {
        1: True, 2: True, 3: True, 4: True, 5: False, 6: False,
    }  # fmt: skip
