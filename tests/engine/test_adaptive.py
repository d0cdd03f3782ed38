"""Running until a rule says stop: depths, work, rows of a batch, refusals."""

import pytest
import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.engine.adaptive import run_until
from depthdial.engine.generate import generate
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.stopping_rules import STOPPING_RULES, stopping_rule

VOCAB, K = 31, 6
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8, 2, 8, 1, 8], [6, 6]]
MIDDLE = {
    "kl": 0.03, "latent_diff": 0.215, "entropy_diff": 0.06, "minp_kl": 0.02, "cosine": 0.0025,
    "argmax_stability": 2, "threshold": 0.55, "cdf": 0.55, "convergence": 26.4, "q_exit": 0.55,
}  # fmt: skip
"""Thresholds at which the rows of the toy stop after different numbers of loops."""


def make_model(**changes):
    config = ModelConfig(
        vocab_size=VOCAB, d_model=24, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=32, max_context=48, num_loops=2, max_loops=K, init_std=0.5, exit_gate="linear",
        loop=LoopConfig(update="replace", injection="add"),
    )  # fmt: skip
    return LoopedLM(config.replace(**changes) if changes else config, seed=0)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def tokens_BT():
    return torch.randint(0, VOCAB, (5, 7), generator=torch.Generator().manual_seed(3))


def rule_named(name, **settings):
    return stopping_rule(name, MIDDLE[name], **settings)


def count_rows(model, monkeypatch, stack):
    """Rows of every call of one stack, in the order of the calls."""
    counts, module = [], getattr(model, stack)
    forward = module.forward

    def counting(x_BTD, **arguments):
        counts.append(len(x_BTD))
        return forward(x_BTD, **arguments)

    monkeypatch.setattr(module, "forward", counting)
    return counts


# ---- depths and what is computed


@pytest.mark.parametrize("name", STOPPING_RULES)
def test_every_row_gets_the_logits_of_its_own_loop_count(model, tokens_BT, name):
    run = run_until(model, Call(tokens_BT, num_loops=K), rule=rule_named(name))
    assert 1 < len(run.loops_B.unique()), "the threshold tells the rows of the toy apart"
    with torch.no_grad():
        expected = model(tokens_BT, num_loops=run.loops_B)
    torch.testing.assert_close(run.logits_BTV, expected)


@pytest.mark.parametrize("name", STOPPING_RULES)
def test_a_row_stops_at_the_first_value_that_the_rule_takes(model, tokens_BT, name):
    rule = rule_named(name)
    run = run_until(model, Call(tokens_BT, num_loops=K), rule=rule)
    for values_L, loops in zip(run.values_BL, run.loops_B.tolist(), strict=True):
        stops = rule.stops(values_L[:loops]).tolist()
        assert not any(stops[:-1]) and (stops[-1] or loops == K)
        assert bool(values_L[loops:].isnan().all())


@pytest.mark.parametrize("name", STOPPING_RULES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_a_batch_equal_solo_rows(model, name, side):
    rule, longest = rule_named(name), max(map(len, PROMPTS))
    tokens = torch.zeros(len(PROMPTS), longest, dtype=torch.int64)
    real = torch.zeros_like(tokens).bool()
    for row, prompt in enumerate(PROMPTS):
        place = slice(longest - len(prompt), None) if side == "left" else slice(len(prompt))
        tokens[row, place], real[row, place] = torch.tensor(prompt), True
    run = run_until(model, Call(tokens, num_loops=K, padding_mask_BT=real.long()), rule=rule)
    for row, prompt in enumerate(PROMPTS):
        alone = run_until(model, Call(torch.tensor([prompt]), num_loops=K), rule=rule)
        assert alone.loops_B[0] == run.loops_B[row]
        torch.testing.assert_close(run.logits_BTV[row, real[row]], alone.logits_BTV[0])
        torch.testing.assert_close(run.values_BL[row], alone.values_BL[0], equal_nan=True)


def test_a_row_that_stopped_is_not_computed_any_more(model, tokens_BT, monkeypatch):
    rows = count_rows(model, monkeypatch, "core_stack")
    run = run_until(model, Call(tokens_BT, num_loops=K), rule=rule_named("latent_diff"))
    assert rows == [int((run.loops_B > i).sum()) for i in range(int(run.loops_B.max()))]
    assert sum(rows) == int(run.loops_B.sum()) < 5 * K


def test_rules_on_states_run_the_coda_once(model, tokens_BT, monkeypatch):
    rows = count_rows(model, monkeypatch, "coda_stack")
    run_until(model, Call(tokens_BT, num_loops=K), rule=rule_named("latent_diff"))
    assert rows == [5]


def test_rules_on_readouts_run_the_coda_at_their_checks_only(model, tokens_BT, monkeypatch):
    rows = count_rows(model, monkeypatch, "coda_stack")
    rule = stopping_rule("kl", 1e-30, min_loops=2, check_every=3)
    run_until(model, Call(tokens_BT, num_loops=K), rule=rule)
    assert rows == [5, 5, 5]


def test_no_value_is_measured_between_checks(model, tokens_BT):
    rule = stopping_rule("latent_diff", 1e-30, min_loops=2, check_every=3)
    run = run_until(model, Call(tokens_BT, num_loops=K), rule=rule)
    assert run.values_BL.isnan()[0].tolist() == [True, False, True, True, False, True]


def test_rows_stop_only_at_checks(model, tokens_BT):
    rule = stopping_rule("latent_diff", 1e9, min_loops=3)
    assert run_until(model, Call(tokens_BT, num_loops=K), rule=rule).loops_B.tolist() == [3] * 5
    assert run_until(model, Call(tokens_BT, num_loops=2), rule=rule).loops_B.tolist() == [2] * 5


def test_q_exit_counts_the_gates_of_passes_it_does_not_check(model, tokens_BT):
    every = run_until(model, Call(tokens_BT, num_loops=K), rule=stopping_rule("q_exit", 1.0))
    rule = stopping_rule("q_exit", 1.0, min_loops=2, check_every=2)
    torch.testing.assert_close(
        run_until(model, Call(tokens_BT, num_loops=K), rule=rule).values_BL, every.values_BL
    )


def test_every_row_has_its_own_limit(model, tokens_BT):
    limits = torch.tensor([2, 6, 1, 4, 3])
    never = run_until(model, Call(tokens_BT, num_loops=limits), rule=stopping_rule("kl", 1e-30))
    assert torch.equal(never.loops_B, limits)
    limited = run_until(model, Call(tokens_BT, num_loops=limits), rule=rule_named("kl"))
    free = run_until(model, Call(tokens_BT, num_loops=K), rule=rule_named("kl"))
    assert torch.equal(limited.loops_B, torch.minimum(free.loops_B, limits))
    with torch.no_grad():
        expected = model(tokens_BT, num_loops=limited.loops_B)
    torch.testing.assert_close(limited.logits_BTV, expected)


def test_a_given_initial_state_is_where_the_first_comparison_starts(model, tokens_BT):
    start_BTD = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(1))
    run = run_until(
        model,
        Call(tokens_BT, num_loops=1, initial_state_BTD=start_BTD),
        rule=stopping_rule("convergence", 1e-30),
    )
    states = []
    with torch.no_grad():
        model(
            tokens_BT,
            num_loops=1,
            initial_state_BTD=start_BTD,
            on_loop=lambda loop_idx, state_BTD, rows: states.append(state_BTD),
        )
    moved_B = (states[0] - start_BTD)[:, -1].norm(dim=-1)
    torch.testing.assert_close(run.values_BL[:, 0], moved_B)


def test_a_row_of_padding_runs_once_and_reports_nothing(model, tokens_BT, monkeypatch):
    rows = count_rows(model, monkeypatch, "core_stack")
    mask = torch.ones(5, 7)
    mask[1] = 0
    rule = stopping_rule("kl", 1e-30)
    run = run_until(model, Call(tokens_BT, num_loops=3, padding_mask_BT=mask), rule=rule)
    assert rows == [5, 4, 4]
    assert run.loops_B.tolist() == [3, 0, 3, 3, 3]
    assert bool(run.values_BL[1].isnan().all())


def test_only_calls_of_one_token_are_causal(model, tokens_BT):
    for count, is_causal in ((1, True), (2, False)):
        run = run_until(model, Call(tokens_BT[:, :count], num_loops=K), rule=rule_named("kl"))
        assert run.is_causal is is_causal


def test_half_precision_models_measure_in_fp32(tokens_BT):
    model = make_model().bfloat16()
    for name in STOPPING_RULES:
        run = run_until(model, Call(tokens_BT, num_loops=3), rule=rule_named(name))
        assert run.values_BL.dtype == torch.float32
        assert bool(run.values_BL[:, 0].isfinite().all())


# ---- generation


@pytest.mark.parametrize("name", STOPPING_RULES)
def test_rows_generate_as_alone(model, name):
    settings = {"num_loops": K, "max_new_tokens": 8, "stop_rule": rule_named(name)}
    together = generate(model, PROMPTS, **settings)
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], **settings) == together[row : row + 1]
    assert any(1 < result.mean_loops < K for result in together)


def test_a_rule_that_never_stops_changes_no_token(model):
    settings = {"num_loops": [6, 2, 3, 1], "max_new_tokens": 8}
    plain = generate(model, PROMPTS, **settings)
    ruled = generate(model, PROMPTS, **settings, stop_rule=stopping_rule("q_exit", 1.0))
    assert [r.token_ids for r in ruled] == [r.token_ids for r in plain]
    assert [r.mean_loops for r in ruled] == [6, 2, 3, 1]
    assert [r.mean_loops for r in plain] == [None] * 4


def test_mean_loops_counts_the_token_of_the_prompt_and_the_stop_token(model):
    """All loops for the prompt, one for each token after it."""
    rule = stopping_rule("q_exit", 0.0)
    [free] = generate(model, PROMPTS[:1], num_loops=K, max_new_tokens=8, stop_rule=rule)
    assert free.mean_loops == pytest.approx((K + 7) / 8)
    place = next(i for i in range(1, 8) if free.token_ids[i] not in free.token_ids[:i])
    [stopped] = generate(
        model,
        PROMPTS[:1],
        num_loops=K,
        max_new_tokens=8,
        stop_rule=rule,
        stop_ids=free.token_ids[place : place + 1],
    )
    assert stopped.token_ids == free.token_ids[:place]
    assert stopped.mean_loops == pytest.approx((K + place) / (place + 1))


def test_finished_rows_cost_one_pass_per_token(model, monkeypatch):
    settings = {"num_loops": 3, "max_new_tokens": 6}
    rule = stopping_rule("q_exit", 1.0)
    [_, other] = generate(model, PROMPTS[2:], **settings)
    stop_ids = other.token_ids[:1]
    rows = count_rows(model, monkeypatch, "core_stack")
    [first, second] = generate(model, PROMPTS[2:], **settings, stop_rule=rule, stop_ids=stop_ids)
    assert second.token_ids == [] and len(first.token_ids) == 6
    assert rows == [2] * 3 + [2, 1, 1] * 5


# ---- refusals


@pytest.mark.parametrize("name", ["threshold", "cdf", "q_exit"])
def test_rules_on_a_gate_need_one(tokens_BT, name):
    with pytest.raises(ValueError, match=f"{name} reads an exit gate, and this model has none"):
        run_until(make_model(exit_gate="none"), Call(tokens_BT, num_loops=2), rule=rule_named(name))


def test_an_update_that_completes_in_the_last_loop_is_refused(tokens_BT):
    loop = LoopConfig(update="anchored")
    with pytest.raises(ValueError, match="anchored.*cannot stop"):
        run_until(make_model(loop=loop), Call(tokens_BT, num_loops=2), rule=rule_named("kl"))


def test_a_core_in_segments_is_refused_before_anything_is_stored(tokens_BT):
    loop = LoopConfig(update="replace")
    parts = make_model(split=(2, 4, 0), segments=(2, 2), loop=loop, exit_gate="none")
    cache = ContiguousCache(parts.config, batch_size=5, capacity=9)
    with pytest.raises(ValueError, match=r"segments=\[2, 2\].*cannot stop between"):
        run_until(parts, Call(tokens_BT, num_loops=2, cache=cache), rule=rule_named("kl"))
    assert cache.num_slots() == 0


def test_a_policy_that_counts_from_the_last_loop_is_refused(model, tokens_BT):
    cache = ContiguousCache(model.config, batch_size=5, capacity=9, policy="parcae:compress-last1")
    with pytest.raises(ValueError, match="compress-last1.*not known before a row stops"):
        run_until(model, Call(tokens_BT, num_loops=2, cache=cache), rule=rule_named("kl"))
    with pytest.raises(ValueError, match="compress-last1"):
        generate(
            model,
            PROMPTS,
            num_loops=2,
            max_new_tokens=2,
            cache_policy="parcae:compress-last1",
            stop_rule=rule_named("kl"),
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"modulation": ModulationConfig(d_cond=8, rank=2, embed_dim=8)},
        {"loop": LoopConfig(update="damped")},
    ],
)
def test_models_whose_loops_depend_on_their_number_are_warned_about(changes):
    settings = {"num_loops": 2, "max_new_tokens": 2}
    with pytest.warns(UserWarning, match="stopping early is not the same"):
        generate(make_model(**changes), PROMPTS, stop_rule=rule_named("kl"), **settings)


def test_a_loop_limit_beyond_training_is_refused(model):
    with pytest.raises(ValueError, match="num_loops=7 exceeds max_loops=6"):
        generate(model, PROMPTS, num_loops=7, max_new_tokens=2, stop_rule=rule_named("kl"))
