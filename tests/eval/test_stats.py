"""Bootstrap intervals over documents and the verdict rule."""

import numpy as np
import pytest

from depthdial.eval import stats
from depthdial.eval.stats import (
    Interval,
    _t_over_z,
    compare,
    mean_interval,
    paired_bootstrap,
    proportion_interval,
)


def make_documents(rng, *, documents=60, shift=0.0):
    """Losses of two models that share large document difficulties; a - b has mean `shift`."""
    tokens = rng.integers(20, 400, size=documents)
    difficulty = rng.normal(3.0, 0.5, size=documents)
    loss_b = difficulty + rng.normal(0, 0.02, size=documents)
    loss_a = difficulty + shift + rng.normal(0, 0.02, size=documents)
    return loss_a * tokens, loss_b * tokens, tokens


def test_estimate_weights_documents_by_their_tokens():
    interval = mean_interval(np.array([10.0, 30.0]), np.array([10, 10]), seed=0)
    assert interval.estimate == 2.0
    uneven = mean_interval(np.array([10.0, 300.0]), np.array([10, 100]), seed=0)
    assert uneven.estimate == pytest.approx(310 / 110)


def test_identical_inputs_give_exactly_zero():
    nll, _, tokens = make_documents(np.random.default_rng(0))
    assert paired_bootstrap(nll, nll.copy(), tokens, seed=3) == Interval(0.0, 0.0, 0.0, 0.95)


def test_same_seed_gives_the_same_interval_and_another_seed_does_not():
    nll_a, nll_b, tokens = make_documents(np.random.default_rng(0))
    first = paired_bootstrap(nll_a, nll_b, tokens, seed=1)
    assert paired_bootstrap(nll_a, nll_b, tokens, seed=1) == first
    assert paired_bootstrap(nll_a, nll_b, tokens, seed=2) != first


def test_swapping_the_models_mirrors_the_interval():
    nll_a, nll_b, tokens = make_documents(np.random.default_rng(4), shift=0.01)
    forward = paired_bootstrap(nll_a, nll_b, tokens, seed=1)
    backward = paired_bootstrap(nll_b, nll_a, tokens, seed=1)
    assert backward.low == pytest.approx(-forward.high)
    assert backward.high == pytest.approx(-forward.low)


def test_pairing_resolves_a_difference_far_below_the_spread_between_documents():
    nll_a, nll_b, tokens = make_documents(np.random.default_rng(5), shift=0.03)
    paired = paired_bootstrap(nll_a, nll_b, tokens, seed=0)
    alone = mean_interval(nll_a, tokens, seed=0)
    assert paired.excludes_zero
    assert (paired.high - paired.low) < 0.1 * (alone.high - alone.low)


def test_breaking_the_pairs_widens_the_interval():
    rng = np.random.default_rng(6)
    nll_a, nll_b, tokens = make_documents(rng)
    tokens = np.full_like(tokens, 100)
    paired = paired_bootstrap(nll_a, nll_b, tokens, seed=0)
    shuffled = paired_bootstrap(nll_a, rng.permutation(nll_b), tokens, seed=0)
    assert (shuffled.high - shuffled.low) > 5 * (paired.high - paired.low)


def test_documents_are_resampled_not_tokens():
    """Copies of a document inside itself (more tokens, same loss) must not narrow the interval."""
    nll_a, _, tokens = make_documents(np.random.default_rng(7))
    short = mean_interval(nll_a, tokens, seed=0)
    long = mean_interval(nll_a * 100, tokens * 100, seed=0)
    assert (long.low, long.high) == pytest.approx((short.low, short.high))


def test_interval_covers_the_true_difference_about_as_often_as_it_says():
    rng, hits, trials = np.random.default_rng(8), 0, 300
    for trial in range(trials):
        nll_a, nll_b, tokens = make_documents(rng, documents=80, shift=0.01)
        interval = paired_bootstrap(nll_a, nll_b, tokens, seed=trial, resamples=400)
        hits += interval.low <= 0.01 <= interval.high
    assert 0.90 <= hits / trials <= 0.98


def test_lower_level_gives_a_narrower_interval():
    nll_a, nll_b, tokens = make_documents(np.random.default_rng(9))
    wide = paired_bootstrap(nll_a, nll_b, tokens, seed=0, level=0.99)
    narrow = paired_bootstrap(nll_a, nll_b, tokens, seed=0, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_drawing_in_blocks_changes_nothing(monkeypatch):
    nll_a, nll_b, tokens = make_documents(np.random.default_rng(10))
    whole = paired_bootstrap(nll_a, nll_b, tokens, seed=0, resamples=300)
    monkeypatch.setattr(stats, "_BLOCK_DRAWS", 7 * len(tokens))
    assert paired_bootstrap(nll_a, nll_b, tokens, seed=0, resamples=300) == whole


@pytest.mark.parametrize(
    ("nll", "tokens", "message"),
    [
        ([1.0], [1], "at least 2 documents"),
        ([1.0, 2.0, 3.0], [1, 2], "3 documents, the token counts 2"),
        ([1.0, float("nan")], [1, 2], r"nll\[1\] is nan"),
        ([1.0, float("inf")], [1, 2], r"nll\[1\] is inf"),
        ([1.0, 2.0], [1, 0], r"tokens\[1\] is 0"),
    ],
)
def test_bad_documents_are_refused(nll, tokens, message):
    with pytest.raises(ValueError, match=message):
        mean_interval(np.array(nll), np.array(tokens), seed=0)


def test_bad_level_and_too_few_resamples_are_refused():
    nll, tokens = np.array([1.0, 2.0]), np.array([1, 1])
    with pytest.raises(ValueError, match="level=95"):
        mean_interval(nll, tokens, seed=0, level=95)
    with pytest.raises(ValueError, match="resamples=1 "):
        mean_interval(nll, tokens, seed=0, resamples=1)


def test_proportion_ignores_documents_without_an_answer():
    correct, total = np.array([3, 0, 1, 2]), np.array([4, 0, 2, 4])
    with_empty = proportion_interval(correct, total, seed=0)
    assert with_empty.estimate == 0.6
    assert with_empty == proportion_interval(correct[[0, 2, 3]], total[[0, 2, 3]], seed=0)


def test_proportion_interval_stays_between_zero_and_one():
    rng = np.random.default_rng(11)
    total = rng.integers(1, 5, size=40)
    interval = proportion_interval(rng.binomial(total, 0.9), total, seed=0)
    assert 0 <= interval.low < interval.estimate < interval.high <= 1


def test_a_perfect_score_on_few_documents_is_not_certain():
    total = np.full(10, 3)
    perfect = proportion_interval(total, total, seed=0)
    assert (perfect.estimate, perfect.high) == (1.0, 1.0)
    assert perfect.low == pytest.approx(0.025 ** (1 / 10))
    none_right = proportion_interval(np.zeros(10, dtype=int), total, seed=0)
    assert (none_right.estimate, none_right.low) == (0.0, 0.0)
    assert none_right.high == pytest.approx(1 - perfect.low)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="correct <= total"):
        proportion_interval(np.array([2, 1]), np.array([1, 1]), seed=0)
    with pytest.raises(ValueError, match="at least 2 documents"):
        proportion_interval(np.array([1, 0]), np.array([1, 0]), seed=0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.004, 0.003, "equal"),
        (-0.01, 0.01, "equal"),
        (-0.0022, -0.0017, "equal"),
        (-0.02, 0.005, "undecided"),
        (-0.005, 0.0101, "undecided"),
        (0.0, 0.02, "undecided"),
        (0.001, 0.02, "higher"),
        (0.02, 0.03, "higher"),
        (-0.02, -0.001, "lower"),
    ],
)
def test_verdict_follows_from_where_the_whole_interval_lies(low, high, verdict):
    assert compare(Interval((low + high) / 2, low, high, 0.95), margin=0.01) == verdict


def test_equal_within_the_margin_comes_before_resolved_from_zero():
    interval = Interval(-0.002, -0.0022, -0.0017, 0.95)
    assert compare(interval, margin=0.01) == "equal" and interval.excludes_zero
    assert compare(interval, margin=0.0) == "lower"


def test_without_a_margin_containing_zero_is_not_equality():
    assert compare(Interval(0.0, -1e-9, 1e-9, 0.95), margin=0.0) == "undecided"


def test_a_negative_margin_and_missing_numbers_are_refused():
    with pytest.raises(ValueError, match="margin=-1"):
        compare(Interval(0.0, 0.0, 0.0, 0.95), margin=-1)
    with pytest.raises(ValueError, match="not a pair of numbers"):
        compare(Interval(0.0, float("nan"), 0.0, 0.95), margin=1)


@pytest.mark.parametrize("documents", [2, 3, 5, 8, 14])
def test_intervals_of_few_documents_still_cover(documents):
    """Percentile intervals of 2 documents are their minimum and maximum: half of the time wrong."""
    rng = np.random.default_rng(documents)
    wrong = 0
    for trial in range(300):
        tokens = rng.integers(100, 300, documents)
        first = rng.normal(3.0, 0.2, documents) * tokens
        second = first + rng.normal(0.0, 0.05, documents) * tokens
        interval = paired_bootstrap(first, second, tokens, seed=trial, resamples=300)
        wrong += interval.excludes_zero
    assert wrong / 300 <= 0.11


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (28, 2.048)]
)
def test_students_t_quantiles_are_those_of_the_tables(degrees, quantile):
    assert _t_over_z(0.975, degrees) * 1.959964 == pytest.approx(quantile, abs=1e-3)
