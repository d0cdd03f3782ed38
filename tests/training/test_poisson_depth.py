"""The Poisson samplers, the rise of a curriculum, and the loops without gradient."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthdial.config import DepthConfig
from depthdial.training.depth_schedule import (
    DepthSchedule,
    depth_probabilities,
    loops_for_step,
    mean_loops,
    no_grad_loops_at,
    num_loops_at,
    poisson_loops,
    poisson_probabilities,
    risen_loops,
    risen_loops_at,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "parcae" / "depth_draws.json"
UNLIMITED = 400
"""Far above any draw with a mean of 32."""


def schedule(sampler: str, mean: int, *, max_loops: int = UNLIMITED, **changes) -> DepthSchedule:
    return DepthSchedule(sampler=sampler, mean_loops=mean, max_loops=max_loops, **changes)


def draws(of: DepthSchedule, steps: int, num_slices: int = 1) -> np.ndarray:
    return np.array([loops_for_step(of, step=s, num_slices=num_slices) for s in range(steps)])


def test_lognormal_draws_have_the_published_mean_and_quantiles():
    """Mean r + 1 = 33 at r = 32; quantiles 1/25/50/75/99 % = 8/21/29/41/93 of a sample."""
    shares = depth_probabilities(schedule("poisson_lognormal", 32))
    assert mean_loops(schedule("poisson_lognormal", 32)) == pytest.approx(33.0, abs=1e-4)
    cumulative = np.cumsum(shares)
    quantiles = [int(np.argmax(cumulative >= q)) + 1 for q in (0.01, 0.25, 0.5, 0.75, 0.99)]
    assert np.abs(np.array(quantiles) - [8, 21, 29, 41, 93]).max() <= 1


def test_lognormal_draws_follow_their_marginals():
    of = schedule("poisson_lognormal", 32)
    drawn = draws(of, 6000)[:, 0]
    assert drawn.mean() == pytest.approx(33.0, abs=1.0)
    for quantile, expected in ((0.25, 21), (0.5, 29), (0.75, 41)):
        assert abs(np.quantile(drawn, quantile) - expected) <= 1.5


@pytest.mark.parametrize("sampler", ["poisson_lognormal", "poisson_truncated"])
def test_marginals_are_those_of_the_draws_with_and_without_a_limit(sampler):
    for max_loops in (1, 2, 5, 60):
        of = schedule(sampler, 4, max_loops=max_loops)
        shares = np.array(depth_probabilities(of))
        assert shares.sum() == pytest.approx(1.0, abs=1e-12) and len(shares) == max_loops
        counts = np.bincount(draws(of, 500, 4).ravel(), minlength=max_loops + 1)[1:]
        assert np.abs(counts / 2000 - shares).max() < 0.04


def test_truncated_draws_differ_by_slice_and_lognormal_draws_do_not():
    truncated = draws(schedule("poisson_truncated", 8), 20, 8)
    lognormal = draws(schedule("poisson_lognormal", 8), 20, 8)
    assert all(len(set(step)) > 1 for step in truncated)
    assert all(len(set(step)) == 1 for step in lognormal)
    grouped = schedule("poisson_lognormal", 8, depth_scope="slice_group", slices_per_draw=4)
    assert all(len(set(s[:4])) == len(set(s[4:])) == 1 for s in draws(grouped, 20, 8))


def test_a_draw_depends_on_seed_step_and_slice_alone():
    of = schedule("poisson_truncated", 8)
    alone = num_loops_at(of, step=17, slice_idx=5, num_slices=8)
    assert alone == draws(of, 18, 8)[17, 5]
    other = draws(schedule("poisson_truncated", 8, seed=1), 20, 8)
    assert (other != draws(of, 20, 8)).any()


@given(
    st.sampled_from(["poisson_lognormal", "poisson_truncated"]),
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2),
    st.integers(1, 40),
    st.integers(1, 50),
)
def test_every_draw_lies_between_one_and_the_limit(sampler, bits, mean, max_loops):
    loops = poisson_loops(bits, sampler=sampler, mean_loops=mean, max_loops=max_loops)
    assert 1 <= loops <= max_loops


def test_a_limit_of_three_times_the_mean_concerns_eight_draws_in_a_thousand():
    assert sum(poisson_probabilities("poisson_lognormal", mean_loops=32, max_loops=200)[96:]) == (
        pytest.approx(0.008, abs=0.002)
    )
    assert sum(poisson_probabilities("poisson_truncated", mean_loops=32, max_loops=200)[96:]) < 1e-9


def test_n_and_k_split_the_drawn_total_as_in_the_published_draws():
    """k = min(total, b) with gradient, n = total - k without, for every recorded draw."""
    of = schedule("poisson_truncated", 8, backprop_loops=4)
    totals = []
    for line in json.loads(GOLDEN.read_text()):
        if line["scheme"] != "poisson-truncated-full" or line["curriculum_target"] != "forward":
            continue
        window = schedule(
            "poisson_truncated",
            line["mean_recurrence"],
            backprop_loops=line["mean_backprop_depth"],
        )
        for n, k in zip(line["per_sequence_n"], line["per_sequence_k"], strict=True):
            assert no_grad_loops_at(window, step=0, num_loops=n + k) == n
            if line["mean_recurrence"] == 8:
                totals.append(n + k)
    assert np.mean(totals) == pytest.approx(mean_loops(of), abs=4 * 2.9 / len(totals) ** 0.5)


@pytest.mark.parametrize(
    ("curriculum", "expected"),
    [
        ("linear", [1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8]),
        ("one_minus_sqrt", [1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 8]),
    ],
)
def test_values_of_the_rise(curriculum, expected):
    """ceil(8 f(t / 10)): by hand, f(u) = u and 1 - sqrt(1 - u)."""
    assert [risen_loops(curriculum, 8, step=t, num_steps=10) for t in range(12)] == expected


@given(st.sampled_from(["linear", "one_minus_sqrt"]), st.integers(1, 64), st.integers(1, 300))
def test_the_rise_never_falls_and_ends_at_the_full_value(curriculum, full, num_steps):
    values = [risen_loops(curriculum, full, step=t, num_steps=num_steps) for t in range(num_steps)]
    assert values[0] == 1 and values == sorted(values) and values[-1] <= full
    assert risen_loops(curriculum, full, step=num_steps, num_steps=num_steps) == full


@pytest.mark.parametrize(
    "sampler", [{"sampler": "fixed", "fixed_loops": 6}, {"sampler": "sync_uniform"}]
)
def test_a_rise_begins_at_the_switch_and_bounds_every_draw(sampler):
    config = DepthConfig(curriculum="linear", curriculum_frac=0.5, switch_frac=0.25, **sampler)
    of = DepthSchedule.from_config(config, max_loops=6, seed=0, total_steps=40)
    assert (of.switch_step, of.curriculum_steps) == (10, 20)
    drawn = draws(of, 40)[:, 0]
    assert (drawn[:14] == 1).all()
    assert all(k <= risen_loops_at(of, step=s) for s, k in enumerate(drawn) if s >= 10)
    assert drawn[30:].max() == 6


def test_the_rise_of_a_poisson_mean_bounds_the_gradient_window():
    of = schedule("poisson_lognormal", 8, backprop_loops=4, curriculum="linear", curriculum_steps=8)
    assert [no_grad_loops_at(of, step=s, num_loops=5) for s in (0, 1, 2, 4, 8)] == [4, 4, 3, 1, 1]
    assert no_grad_loops_at(of, step=20, num_loops=3) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "poisson_truncated"}, "mean_loops goes with"),
        ({"mean_loops": 4}, "mean_loops goes with"),
        (
            {
                "sampler": "poisson_truncated",
                "mean_loops": 4,
                "depth_scope": "slice_group",
                "slices_per_draw": 2,
            },
            "depth_scope='slice_group' has no effect",
        ),
        ({"sampler": "poisson_lognormal", "mean_loops": 4, "override_frac": 0.1}, "no effect"),
        ({"curriculum": "linear"}, "needs a positive fraction"),
        ({"curriculum_frac": 0.2}, "only a curriculum has one"),
        ({"curriculum": "linear", "curriculum_frac": 0.6, "switch_frac": 0.5}, "more than 1"),
    ],
)
def test_draw_options_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DepthConfig(**changes)
