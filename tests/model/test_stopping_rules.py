"""Stopping rules: what each measures, when it stops, what its threshold may be."""

import math

import pytest
import torch

from depthdial.model.stopping_rules import STOPPING_RULES, ExitPoint, stopping_rule

V = 8
LOGIT_RULES = ("kl", "minp_kl", "entropy_diff", "argmax_stability")
GATE_RULES = ("threshold", "cdf", "q_exit")


def point(*, state=None, logits=None, gate=None, real=None, last=None):
    """One row unless `state` has more; a zero state of one token by default."""
    state_NTD = torch.zeros(1, 1, 2) if state is None else torch.tensor(state)
    num_rows, num_tokens = state_NTD.shape[:2]
    return ExitPoint(
        state_NTD=state_NTD,
        is_token_NT=torch.ones(num_rows, num_tokens).bool() if real is None else torch.tensor(real),
        last_N=torch.full((num_rows,), num_tokens - 1) if last is None else torch.tensor(last),
        logits_NV=None if logits is None else torch.tensor([logits]),
        gate_logit_N=None if gate is None else torch.tensor([gate]),
        vocab_size=V,
    )


def values(rule, points, *, start=None):
    """The measured value after every pass."""
    memory, found = rule.begin(point() if start is None else start), []
    for seen in points:
        value_N, memory = rule.measure(seen, memory)
        found.append(float(value_N))
    return found


def with_probabilities(*p):
    return point(logits=[math.log(x) for x in p])


P = (0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05)
Q = (0.6, 0.1, 0.1, 0.1, 0.025, 0.025, 0.025, 0.025)


def test_kl_is_of_the_previous_readout_to_this_one_from_the_uniform_on():
    first, second = values(stopping_rule("kl"), [with_probabilities(*P), with_probabilities(*Q)])
    assert first == pytest.approx(sum(math.log(1 / V / p) / V for p in P), abs=1e-6)
    assert second == pytest.approx(
        sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True)), abs=1e-6
    )


def test_minp_kl_levels_unlikely_tokens_to_the_uniform_and_renormalises():
    """Below a tenth of 0.6 everything counts 1 / V."""
    q = (0.6, 0.1, 0.1, 0.1, 1 / V, 1 / V, 1 / V, 1 / V)
    q = [x / sum(q) for x in q]
    [value] = values(stopping_rule("minp_kl"), [with_probabilities(*Q)])
    assert value == pytest.approx(sum(math.log(1 / V / x) / V for x in q), abs=1e-6)


def test_entropy_diff_is_from_a_hundred_nats_and_then_from_the_previous_one():
    def entropy(p):
        return -sum(x * math.log(x) for x in p)

    found = values(stopping_rule("entropy_diff"), [with_probabilities(*P), with_probabilities(*Q)])
    assert found == pytest.approx([100 - entropy(P), entropy(P) - entropy(Q)], abs=1e-4)


def test_argmax_stability_counts_from_the_first_repetition_and_restarts():
    def best(token):
        return point(logits=[float(i == token) for i in range(V)])

    rule = stopping_rule("argmax_stability", 2)
    found = values(rule, [best(token) for token in (0, 0, 0, 5, 5)])
    assert found == [0, 1, 2, 0, 1]
    assert [bool(rule.stops(torch.tensor(x))) for x in found] == [False, False, True, False, False]


def test_latent_diff_is_relative_to_the_new_state():
    start, after = point(state=[[[3.0, 0.0]]]), point(state=[[[3.0, 4.0]]])
    assert values(stopping_rule("latent_diff"), [after], start=start) == pytest.approx([4 / 5])


def test_cosine_compares_directions():
    start, after = point(state=[[[3.0, 0.0]]]), point(state=[[[3.0, 4.0]]])
    assert values(stopping_rule("cosine"), [after], start=start) == pytest.approx([1 - 3 / 5])


def test_a_cosine_with_a_zero_state_is_no_number_and_never_stops():
    rule = stopping_rule("cosine", 1e9)
    [value] = values(rule, [point(state=[[[3.0, 4.0]]])])
    assert math.isnan(value)
    assert not bool(rule.stops(torch.tensor(value)))


@pytest.mark.parametrize("name", ["latent_diff", "cosine"])
def test_published_rules_on_states_average_over_the_real_tokens_of_the_call(name):
    """Padding is zero, its change of direction is no number, and it must not count."""
    rule, real = stopping_rule(name), [[False, True, True]]
    start = point(state=[[[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]]], real=real)
    after = point(state=[[[0.0, 0.0], [1.0, 1.0], [3.0, 4.0]]], real=real)
    [together] = values(rule, [after], start=start)
    alone = [
        values(rule, [point(state=[[new]])], start=point(state=[[old]]))[0]
        for old, new in (([1.0, 0.0], [1.0, 1.0]), ([3.0, 0.0], [3.0, 4.0]))
    ]
    assert together == pytest.approx(sum(alone) / 2)


def test_convergence_is_the_distance_at_the_last_real_token():
    start = point(state=[[[9.0, 9.0], [1.0, 1.0], [7.0, 7.0]]], last=[1])
    after = point(state=[[[0.0, 0.0], [4.0, 5.0], [0.0, 0.0]]], last=[1])
    assert values(stopping_rule("convergence"), [after], start=start) == pytest.approx([5.0])


def test_confidence_is_of_this_pass_and_cdf_of_all_passes():
    gates = [point(gate=0.0), point(gate=math.log(3))]
    assert values(stopping_rule("threshold"), gates) == pytest.approx([0.5, 0.75])
    assert values(stopping_rule("cdf"), gates) == pytest.approx([0.5, 1 - 0.5 * 0.25])


@pytest.mark.parametrize("name", ["threshold", "cdf"])
def test_confidences_stop_above_the_threshold_not_at_it(name):
    rule = stopping_rule(name, 0.5)
    assert rule.stops(torch.tensor([0.5, 0.5001])).tolist() == [False, True]


def test_q_exit_stops_at_its_threshold_and_from_one_on_never():
    assert stopping_rule("q_exit", 0.5).stops(torch.tensor([0.4999, 0.5])).tolist() == [False, True]
    assert not bool(stopping_rule("q_exit", 1.0).stops(torch.tensor(1.0)))


def test_certain_gates_of_a_long_run_are_still_told_apart():
    """A product of 1 - sigmoid(20) in fp32 is exactly 0 from the first pass on."""
    rule = stopping_rule("cdf")
    _, memory = rule.measure(point(gate=20.0), rule.begin(point()))
    assert -20.1 < float(memory) < -19.9


@pytest.mark.parametrize("name", STOPPING_RULES)
def test_what_a_rule_remembers_has_a_row_per_row(name):
    rule = stopping_rule(name, 0.5 if name == "q_exit" else None)
    seen = ExitPoint(
        state_NTD=torch.randn(3, 2, 4),
        is_token_NT=torch.ones(3, 2).bool(),
        last_N=torch.tensor([1, 1, 1]),
        logits_NV=torch.randn(3, V) if rule.needs_logits else None,
        gate_logit_N=torch.randn(3) if rule.needs_gate else None,
        vocab_size=V,
    )
    start = seen._replace(logits_NV=None, gate_logit_N=None)
    value_N, memory = rule.measure(seen, rule.begin(start))
    few = seen._replace(
        state_NTD=seen.state_NTD[1:2],
        is_token_NT=seen.is_token_NT[1:2],
        last_N=seen.last_N[1:2],
        logits_NV=None if seen.logits_NV is None else seen.logits_NV[1:2],
        gate_logit_N=None if seen.gate_logit_N is None else seen.gate_logit_N[1:2],
    )
    alone_N, alone = rule.measure(few, rule.begin(start)[1:2])
    torch.testing.assert_close(alone_N, value_N[1:2], equal_nan=True)
    torch.testing.assert_close(alone, memory[1:2])


@pytest.mark.parametrize("name", STOPPING_RULES)
def test_a_rule_says_which_readout_it_needs(name):
    rule = STOPPING_RULES[name]
    assert (rule.needs_logits, rule.needs_gate) == (name in LOGIT_RULES, name in GATE_RULES)


def test_checks_start_at_min_loops_and_repeat():
    rule = stopping_rule("kl", min_loops=3, check_every=2)
    assert [loop_idx + 1 for loop_idx in range(9) if rule.is_due(loop_idx)] == [3, 5, 7, 9]


def test_published_thresholds_are_the_defaults():
    published = {
        "kl": 1e-3, "latent_diff": 0.03, "entropy_diff": 1e-3, "minp_kl": 1e-5,
        "argmax_stability": 5, "cosine": 1e-3, "threshold": 0.6, "cdf": 0.6, "convergence": 1e-2,
    }  # fmt: skip
    assert {name: stopping_rule(name).threshold for name in published} == published


def test_q_exit_has_no_default_threshold():
    with pytest.raises(ValueError, match="q_exit needs a threshold"):
        stopping_rule("q_exit")


def test_an_unknown_rule_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'latent-dif'.*latent_diff"):
        stopping_rule("latent-dif")


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("kl", 0.0), ("kl", -1.0), ("cosine", math.nan), ("latent_diff", math.inf),
        ("argmax_stability", 1.5), ("argmax_stability", 0), ("threshold", 1.0), ("cdf", -0.1),
        ("q_exit", -0.1), ("q_exit", math.nan),
    ],
)  # fmt: skip
def test_thresholds_that_mean_nothing_are_refused(name, threshold):
    with pytest.raises(ValueError, match="exit threshold"):
        stopping_rule(name, threshold)


@pytest.mark.parametrize("setting", [{"min_loops": 0}, {"check_every": 0}, {"min_loops": 1.5}])
def test_counts_of_passes_are_whole_and_positive(setting):
    with pytest.raises(ValueError, match="whole number"):
        stopping_rule("kl", **setting)
