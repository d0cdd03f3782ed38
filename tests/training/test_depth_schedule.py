"""Depth draws: marginals of every sampler, the rotating override, purity, the late switch."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthdial.config import DepthConfig
from depthdial.training.depth_schedule import (
    DepthSchedule,
    depth_probabilities,
    executed_loop_shares,
    loops_for_step,
    mean_loops,
    num_loops_at,
    overridden_slices,
)

COST_TABLE = json.loads(
    (Path(__file__).parents[1] / "golden" / "elr" / "cost_table.json").read_text()
)
NUM_STEPS, NUM_SLICES = 10_000, 10
MAX_LOOPS, FRAC = 4, 0.10
UNIFORM = (0.25, 0.25, 0.25, 0.25)
WEIGHTED = (0.325, 0.225, 0.225, 0.225)

# Tolerances are at least four standard deviations of the estimate: a synchronised sampler has
# 10,000 independent draws (sd of a share 0.0047, of the mean 0.012), an independent one
# 100,000 (0.0015 and 0.0036). The two formulas differ by 0.075 in p_1 and 0.15 in the mean.
SYNC_TOLERANCE, INDEPENDENT_TOLERANCE = (0.02, 0.05), (0.007, 0.016)


def schedule_of(sampler, **changes):
    """Schedule with K=4 and, where the sampler takes one, f=0.10."""
    values = {"sampler": sampler, "max_loops": MAX_LOOPS, "seed": 1234}
    if sampler in ("override", "sync_weighted", "independent_weighted"):
        values["override_frac"] = FRAC
    if sampler == "fixed":
        values["fixed_loops"] = 3
    if sampler == "listed":
        values["listed_loops"] = (2, 2, 3, 4)
    return DepthSchedule(**(values | changes))


@pytest.mark.parametrize(
    ("sampler", "expected", "tolerance"),
    [
        ("fixed", (0.0, 0.0, 1.0, 0.0), (0.0, 0.0)),
        ("sync_uniform", UNIFORM, SYNC_TOLERANCE),
        ("sync_weighted", WEIGHTED, SYNC_TOLERANCE),
        ("independent_uniform", UNIFORM, INDEPENDENT_TOLERANCE),
        ("independent_weighted", WEIGHTED, INDEPENDENT_TOLERANCE),
        ("override", WEIGHTED, (0.015, 0.04)),
        ("listed", (0.0, 0.5, 0.25, 0.25), SYNC_TOLERANCE),
    ],
)
def test_b27_marginals_and_mean_of_every_sampler_follow_its_formula(sampler, expected, tolerance):
    schedule = schedule_of(sampler)
    counts = Counter()
    for step in range(NUM_STEPS):
        counts.update(loops_for_step(schedule, step=step, num_slices=NUM_SLICES))
    total = NUM_STEPS * NUM_SLICES
    shares = [counts[k] / total for k in range(1, MAX_LOOPS + 1)]
    assert sum(counts.values()) == total and set(counts) <= set(range(1, MAX_LOOPS + 1))
    assert shares == pytest.approx(expected, abs=tolerance[0])
    assert depth_probabilities(schedule) == pytest.approx(expected, abs=1e-12)
    mean = sum(k * n for k, n in counts.items()) / total
    expected_mean = sum(k * p for k, p in enumerate(expected, start=1))
    assert mean == pytest.approx(expected_mean, abs=tolerance[1])
    assert mean_loops(schedule) == pytest.approx(expected_mean, abs=1e-12)


@pytest.mark.parametrize("frac", [0.10, 0.125, 0.15, 0.3, 0.07])
def test_b27_forced_slices_take_turns_equally_often_up_to_one(frac):
    schedule = schedule_of("override", override_frac=frac)
    turns = Counter({slice_idx: 0 for slice_idx in range(NUM_SLICES)})
    for step in range(NUM_STEPS):
        turns.update(overridden_slices(schedule, step=step, num_slices=NUM_SLICES))
    assert max(turns.values()) - min(turns.values()) <= 1
    assert sum(turns.values()) == int(Fraction(str(frac)) * NUM_SLICES * NUM_STEPS)


def test_b27_draws_do_not_depend_on_micro_batches_or_on_who_computes():
    for sampler in ("independent_weighted", "override", "sync_weighted"):
        schedule = schedule_of(sampler)
        whole = [loops_for_step(schedule, step=step, num_slices=8) for step in range(40)]
        for slices_per_micro_batch in (1, 2, 4):
            starts = range(0, 8, slices_per_micro_batch)

            def compute(start, width=slices_per_micro_batch, schedule=schedule):
                return {
                    (step, slice_idx): num_loops_at(
                        schedule, step=step, slice_idx=slice_idx, num_slices=8
                    )
                    for step in reversed(range(40))
                    for slice_idx in range(start, start + width)
                }

            with ThreadPoolExecutor(max_workers=2) as ranks:
                parts = list(ranks.map(compute, starts))
            merged = {position: k for part in parts for position, k in part.items()}
            assert [tuple(merged[step, s] for s in range(8)) for step in range(40)] == whole


RECORDED = [(1, 3, 4, 2, 3, 4), (3, 4, 4, 3, 1, 2), (1, 2, 2, 3, 4, 1)]


def test_draws_are_the_recorded_ones():
    """A changed generator or key would silently change every resumed run."""
    schedule = schedule_of("independent_uniform", seed=0)
    assert [loops_for_step(schedule, step=step, num_slices=6) for step in (0, 1, 10**6)] == RECORDED


@pytest.mark.parametrize("sampler", ["sync_uniform", "sync_weighted"])
def test_synchronised_samplers_give_all_slices_one_loop_count(sampler):
    draws = [loops_for_step(schedule_of(sampler), step=step, num_slices=8) for step in range(100)]
    assert all(len(set(loops)) == 1 for loops in draws)
    assert len(set(draws)) == MAX_LOOPS


def test_independent_samplers_mix_loop_counts_within_a_step():
    schedule = schedule_of("independent_uniform")
    draws = [loops_for_step(schedule, step=step, num_slices=8) for step in range(100)]
    assert sum(len(set(loops)) > 1 for loops in draws) > 95


def test_override_step_has_one_majority_and_one_loop_for_the_forced_slices():
    schedule = schedule_of("override", override_frac=0.25)
    for step in range(200):
        loops = loops_for_step(schedule, step=step, num_slices=8)
        forced = overridden_slices(schedule, step=step, num_slices=8)
        assert len(forced) == 2
        assert all(loops[slice_idx] == 1 for slice_idx in forced)
        assert len({k for s, k in enumerate(loops) if s not in forced}) == 1


def test_slice_group_draws_once_per_group_and_groups_differ():
    schedule = schedule_of("sync_uniform", depth_scope="slice_group", slices_per_draw=4)
    draws = [loops_for_step(schedule, step=step, num_slices=8) for step in range(200)]
    assert all(len(set(loops[:4])) == 1 and len(set(loops[4:])) == 1 for loops in draws)
    assert 0.6 < sum(loops[0] != loops[4] for loops in draws) / 200 < 0.9


def test_every_step_before_the_switch_runs_one_loop():
    for sampler in ("fixed", "sync_uniform", "independent_uniform", "override"):
        schedule = schedule_of(sampler, switch_step=50)
        early = [loops_for_step(schedule, step=step, num_slices=4) for step in range(50)]
        late = [loops_for_step(schedule, step=step, num_slices=4) for step in range(50, 90)]
        assert set(early) == {(1, 1, 1, 1)}
        assert max(max(loops) for loops in late) > 1


def test_rotation_counts_from_the_switch():
    at_start = schedule_of("override", override_frac=0.15)
    late = schedule_of("override", override_frac=0.15, switch_step=37)
    assert overridden_slices(late, step=36, num_slices=10) == ()
    for since in range(30):
        assert overridden_slices(late, step=37 + since, num_slices=10) == overridden_slices(
            at_start, step=since, num_slices=10
        )


def test_fraction_is_the_decimal_number_that_was_typed():
    """0.3 as a binary double is below 3/10; its floor at the first step would be 2, not 3."""
    schedule = schedule_of("override", override_frac=0.3)
    for step in range(50):
        forced = overridden_slices(schedule, step=step, num_slices=10)
        assert forced == tuple(sorted((3 * step + j) % 10 for j in range(3)))


def test_from_config_resolves_the_switch_exactly():
    config = DepthConfig(sampler="override", override_frac=0.15, switch_frac=0.29)
    schedule = DepthSchedule.from_config(config, max_loops=5, seed=7, total_steps=100)
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert schedule.switch_step == 29
    assert (schedule.max_loops, schedule.seed, schedule.override_frac) == (5, 7, 0.15)


def test_seed_changes_the_draws():
    first, second = (schedule_of("sync_uniform", seed=seed) for seed in (0, 1))
    pairs = [
        (num_loops_at(first, step=t, slice_idx=0, num_slices=1),
         num_loops_at(second, step=t, slice_idx=0, num_slices=1))
        for t in range(400)
    ]  # fmt: skip
    assert 0.15 < sum(a == b for a, b in pairs) / 400 < 0.35


@pytest.mark.parametrize("row", COST_TABLE["models"], ids=lambda row: row["model"])
def test_published_models_have_the_tabulated_probabilities(row):
    schedule = DepthSchedule(sampler="override", max_loops=row["K"], override_frac=row["f"])
    assert depth_probabilities(schedule) == pytest.approx(row["p_k"], abs=1e-15)
    assert depth_probabilities(schedule)[0] == float(Fraction(row["p_1_fraction"]))
    assert mean_loops(schedule) == float(Fraction(row["mean_k_fraction"])) == row["mean_k"]
    assert executed_loop_shares(schedule) == pytest.approx(
        row["share_of_samples_executing_loop"], abs=1e-15
    )


@pytest.mark.parametrize("sampler", ["override", "sync_weighted", "independent_weighted"])
def test_whole_sweep_of_the_cost_table_is_reproduced(sampler):
    for row in COST_TABLE["sweep"]:
        schedule = DepthSchedule(sampler=sampler, max_loops=row["K"], override_frac=row["f"])
        assert depth_probabilities(schedule)[0] == pytest.approx(row["p_1"], abs=1e-12)
        assert mean_loops(schedule) == pytest.approx(row["mean_k"], abs=1e-12)


def test_fixed_sampler_executes_exactly_its_loops():
    schedule = schedule_of("fixed")
    assert executed_loop_shares(schedule) == (1.0, 1.0, 1.0, 0.0)
    assert mean_loops(schedule) == 3.0


@given(
    sampler=st.sampled_from(["sync_weighted", "independent_weighted", "override"]),
    max_loops=st.integers(1, 12),
    frac=st.integers(0, 100).map(lambda percent: percent / 100),
    step=st.integers(0, 2**40),
    num_slices=st.integers(1, 16),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_draw_is_in_range_and_repeatable(sampler, max_loops, frac, step, num_slices, seed):
    schedule = DepthSchedule(sampler=sampler, max_loops=max_loops, override_frac=frac, seed=seed)
    loops = loops_for_step(schedule, step=step, num_slices=num_slices)
    assert len(loops) == num_slices and set(loops) <= set(range(1, max_loops + 1))
    assert loops == loops_for_step(schedule, step=step, num_slices=num_slices)
    if frac == 1.0:
        assert set(loops) == {1}


@given(
    num_slices=st.integers(1, 24),
    frac=st.integers(0, 1000).map(lambda permille: permille / 1000),
    switch_step=st.integers(0, 30),
    num_steps=st.integers(1, 60),
)
def test_b27_override_duty_is_equal_for_any_fraction(num_slices, frac, switch_step, num_steps):
    schedule = schedule_of("override", override_frac=frac, switch_step=switch_step)
    turns = Counter({slice_idx: 0 for slice_idx in range(num_slices)})
    for step in range(switch_step, switch_step + num_steps):
        turns.update(overridden_slices(schedule, step=step, num_slices=num_slices))
    assert max(turns.values()) - min(turns.values()) <= 1
    assert sum(turns.values()) == int(num_steps * num_slices * Fraction(str(frac)))


@given(
    max_loops=st.integers(1, 16),
    frac=st.floats(0.0, 1.0, allow_nan=False),
)
def test_probabilities_add_up_and_agree_with_mean_and_shares(max_loops, frac):
    schedule = DepthSchedule(sampler="override", max_loops=max_loops, override_frac=frac)
    probabilities = depth_probabilities(schedule)
    assert sum(probabilities) == pytest.approx(1.0)
    assert sum(executed_loop_shares(schedule)) == pytest.approx(mean_loops(schedule))
    assert mean_loops(schedule) == pytest.approx(frac + (1 - frac) * (max_loops + 1) / 2)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ({"step": -1, "slice_idx": 0, "num_slices": 4}, "step=-1"),
        ({"step": 0, "slice_idx": -1, "num_slices": 4}, "slice_idx=-1"),
        ({"step": 0, "slice_idx": 4, "num_slices": 4}, r"slice_idx=4 must lie in 0\.\.3"),
    ],
)
def test_position_out_of_range_is_refused(position, message):
    with pytest.raises(ValueError, match=message):
        num_loops_at(schedule_of("override"), **position)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampler": "sync_uniform", "max_loops": 0}, "max_loops=0"),
        ({"sampler": "fixed", "max_loops": 2, "fixed_loops": 3}, "fixed_loops=3"),
        ({"sampler": "fixed", "max_loops": 2}, "fixed_loops goes with"),
        ({"sampler": "sync_uniform", "max_loops": 2, "override_frac": 0.1}, "no effect"),
        ({"sampler": "override", "max_loops": 2, "override_frac": 1.5}, "override_frac=1.5"),
        ({"sampler": "override", "max_loops": 2, "switch_step": -1}, "switch_step=-1"),
        ({"sampler": "override", "max_loops": 2, "depth_scope": "slice_group"}, "slices_per_draw"),
        (
            {
                "sampler": "independent_uniform",
                "max_loops": 2,
                "depth_scope": "slice_group",
                "slices_per_draw": 2,
            },
            "no effect",
        ),
    ],
)
def test_bad_schedule_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DepthSchedule(**values)


def test_slices_must_divide_into_draw_groups():
    schedule = schedule_of("override", depth_scope="slice_group", slices_per_draw=3)
    with pytest.raises(ValueError, match="num_slices=8 is not a multiple of slices_per_draw=3"):
        num_loops_at(schedule, step=0, slice_idx=0, num_slices=8)


def test_listed_loops_are_refused_beyond_the_largest_and_without_their_sampler():
    with pytest.raises(ValueError, match=r"listed_loops=\[2, 5\] must name loop counts in 1..max"):
        schedule_of("listed", listed_loops=(2, 5))
    with pytest.raises(ValueError, match="listed_loops goes with sampler='listed'"):
        schedule_of("sync_uniform", listed_loops=(1, 2))
    with pytest.raises(ValueError, match="listed_loops goes with sampler='listed'"):
        DepthConfig(sampler="listed")
    with pytest.raises(ValueError, match="curriculum='linear' has no effect"):
        DepthConfig(sampler="listed", listed_loops=(1, 2), curriculum="linear", curriculum_frac=0.5)
