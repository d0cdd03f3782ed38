"""Distributions after temperature, top-k, top-p and min-p, and seeded draws from them."""

import math

import pytest
import torch

from depthdial.engine.sampling import MIN_TEMPERATURE, Sampling, probabilities, sample

FOUR = (0.5, 0.3, 0.15, 0.05)


def logits(*probs):
    return torch.tensor([probs]).log()


def distribution(probs=FOUR, **settings):
    return probabilities(logits(*probs), Sampling(**({"temperature": 1.0} | settings)))[0]


def draws(sampling, count, *, probs=FOUR):
    """`count` tokens of one stream."""
    generators = sampling.generators(1)
    row = logits(*probs)
    return [int(sample(row, sampling, generators)) for _ in range(count)]


def assert_distribution(actual, *expected):
    torch.testing.assert_close(actual, torch.tensor(expected).float(), rtol=0, atol=1e-6)


# ---- what is drawn from


def test_temperature_one_is_the_softmax():
    assert_distribution(distribution(), *FOUR)


def test_temperature_half_squares_the_odds():
    total = sum(p * p for p in FOUR)
    assert_distribution(distribution(temperature=0.5), *(p * p / total for p in FOUR))


def test_temperature_two_takes_the_root_of_the_odds():
    total = sum(math.sqrt(p) for p in FOUR)
    assert_distribution(distribution(temperature=2.0), *(math.sqrt(p) / total for p in FOUR))


def test_temperature_zero_is_a_point_mass_on_the_best():
    assert_distribution(distribution((0.2, 0.5, 0.3), temperature=0.0), 0, 1, 0)


def test_top_p_075_keeps_the_first_two_at_five_to_three():
    assert_distribution(distribution(top_p=0.75), 5 / 8, 3 / 8, 0, 0)


def test_top_p_keeps_the_token_that_reaches_the_limit():
    assert_distribution(distribution(top_p=0.81), 0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0)


def test_a_tiny_top_p_keeps_the_most_likely_token():
    assert_distribution(distribution(top_p=1e-6), 1, 0, 0, 0)


def test_top_k_keeps_the_most_likely_whatever_their_place():
    assert_distribution(distribution((0.15, 0.5, 0.05, 0.3), top_k=2), 0, 5 / 8, 0, 3 / 8)


def test_top_k_of_the_whole_vocabulary_or_more_changes_nothing():
    for top_k in (4, 100):
        assert_distribution(distribution(top_k=top_k), *FOUR)


def test_top_k_keeps_exactly_k_of_equal_tokens():
    assert int(distribution((0.25,) * 4, top_k=2).count_nonzero()) == 2


def test_min_p_drops_tokens_below_a_fraction_of_the_best():
    # 0.2 * 0.5 = 0.1: the last token is below.
    assert_distribution(distribution(min_p=0.2), 0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0)


def test_min_p_one_keeps_the_best_only():
    assert_distribution(distribution(min_p=1.0), 1, 0, 0, 0)


def test_top_p_reads_what_top_k_left():
    """After top-k 2 the first token holds 0.625 and reaches 0.6 alone; before, it held 0.5."""
    assert_distribution(distribution(top_k=2, top_p=0.6), 1, 0, 0, 0)
    assert_distribution(distribution(top_p=0.6), 5 / 8, 3 / 8, 0, 0)


def test_filters_read_the_distribution_after_temperature():
    """At temperature 0.5 the first token holds 0.685 and reaches 0.6 alone."""
    assert_distribution(distribution(temperature=0.5, top_p=0.6), 1, 0, 0, 0)


def test_rows_are_filtered_apart():
    both = torch.cat([logits(*FOUR), logits(*reversed(FOUR))])
    filtered = probabilities(both, Sampling(temperature=1.0, top_p=0.75))
    assert_distribution(filtered[0], 5 / 8, 3 / 8, 0, 0)
    assert_distribution(filtered[1], 0, 0, 3 / 8, 5 / 8)


def test_bf16_logits_give_an_fp32_distribution():
    assert probabilities(logits(*FOUR).bfloat16(), Sampling(temperature=1.0)).dtype == torch.float32


# ---- draws


def test_greedy_takes_the_best():
    assert draws(Sampling(), 3, probs=(0.2, 0.5, 0.3)) == [1, 1, 1]


def test_top_k_one_equals_greedy():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 20, generator=generator)
    sampling = Sampling(temperature=1.0, top_k=1)
    assert torch.equal(sample(rows, sampling, sampling.generators(64)), rows.argmax(dim=-1))


def test_draws_follow_five_to_three_within_three_sigma():
    count = 4000
    drawn = draws(Sampling(temperature=1.0, top_p=0.75, seed=11), count)
    assert set(drawn) == {0, 1}
    sigma = math.sqrt(count * 5 / 8 * 3 / 8)
    assert abs(drawn.count(0) - count * 5 / 8) < 3 * sigma


def test_the_same_seed_draws_the_same_tokens():
    sampling = Sampling(temperature=1.0, seed=5)
    assert draws(sampling, 50) == draws(sampling, 50)


# torch's CPU generator reads 32 bits of a seed: large seeds must not fold onto small ones.
@pytest.mark.parametrize("other", [6, 5 + 2**32, 2**63 - 1])
def test_different_seeds_draw_different_tokens(other):
    first = Sampling(temperature=1.0, seed=5)
    assert draws(first, 50) != draws(Sampling(temperature=1.0, seed=other), 50)


def test_rows_of_one_seed_draw_from_different_streams():
    sampling = Sampling(temperature=1.0, seed=5)
    generators = sampling.generators(2)
    rows = torch.stack(
        [sample(logits(*FOUR).repeat(2, 1), sampling, generators) for _ in range(50)]
    )
    assert not torch.equal(rows[:, 0], rows[:, 1])


def test_a_row_draws_the_same_whatever_the_batch():
    sampling = Sampling(temperature=1.0, seed=5)
    wide, narrow = sampling.generators(3), sampling.generators(1)
    for _ in range(20):
        together = sample(logits(*FOUR).repeat(3, 1), sampling, wide)
        assert together[0] == sample(logits(*FOUR), sampling, narrow)[0]


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"temperature": -0.1}, "temperature 0 or 1e-06 <= temperature < inf"),
        ({"temperature": float("nan")}, "temperature 0 or 1e-06 <= temperature < inf"),
        ({"temperature": float("inf")}, "temperature 0 or 1e-06 <= temperature < inf"),
        ({"temperature": 1e-40}, "temperature 0 or 1e-06 <= temperature < inf"),
        ({"top_k": -1}, "a whole top_k >= 0"),
        ({"top_k": 2.0}, "a whole top_k >= 0"),
        ({"seed": 1.5}, "a whole seed"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"top_p": 1.1}, "0 < top_p <= 1"),
        ({"min_p": -0.1}, "0 <= min_p <= 1"),
        ({"min_p": 1.1}, "0 <= min_p <= 1"),
        ({"seed": -1}, "0 <= seed < 2^63"),
        ({"seed": 2**63}, "0 <= seed < 2^63"),
    ],
)
def test_settings_out_of_range_are_refused_with_value_and_rule(settings, rule):
    with pytest.raises(ValueError) as error:
        Sampling(**settings)
    assert rule in str(error.value)
    name, value = next(iter(settings.items()))
    assert f"{name}={value}" in str(error.value)


def test_every_broken_rule_is_named():
    with pytest.raises(ValueError, match="temperature < inf, a whole top_k >= 0"):
        Sampling(temperature=-1.0, top_k=-1)


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_filter_without_effect_at_temperature_zero_is_refused(settings):
    [name] = settings
    with pytest.raises(ValueError, match=f"{name}: no effect at temperature=0"):
        Sampling(**settings)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_smallest_temperature_takes_the_best(scale):
    [best] = probabilities(scale * logits(*FOUR), Sampling(temperature=MIN_TEMPERATURE))
    assert_distribution(best, 1.0, 0.0, 0.0, 0.0)
