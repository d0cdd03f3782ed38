"""Generation: batches equal solo rows, stops, depths, refusals."""

import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import ModelConfig, ModulationConfig
from depthdial.engine.generate import Generation, generate
from depthdial.engine.sampling import Sampling
from depthdial.model.looped_lm import LoopedLM

VOCAB, K, CONTEXT = 29, 4, 48
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [6, 6]]
DEPTHS = [2, 4, 1, 3]
POLICIES = ("per_loop", "collapse_last", "last_step")
SAMPLED = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        vocab_size=VOCAB, d_model=24, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=32, max_context=CONTEXT, num_loops=2, max_loops=K, init_std=0.3,
        modulation=ModulationConfig(d_cond=8, rank=2, embed_dim=8),
    )  # fmt: skip
    model = LoopedLM(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("state_update", "modulation")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def ids(generations):
    return [generation.token_ids for generation in generations]


def by_full_forwards(model, prompt, *, num_loops, count):
    """Greedy without a cache: the whole sequence again for every token."""
    row = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            row.append(int(model(torch.tensor([row]), num_loops=num_loops)[0, -1].argmax()))
    return row[len(prompt) :]


# ---- against slow references


@pytest.mark.parametrize("num_loops", range(1, K + 1))
def test_greedy_tokens_equal_full_forwards(model, num_loops):
    result = generate(model, PROMPTS, num_loops=num_loops, max_new_tokens=12)
    assert ids(result) == [
        by_full_forwards(model, prompt, num_loops=num_loops, count=12) for prompt in PROMPTS
    ]


def test_loop_counts_lead_to_different_tokens(model):
    """Without this, the equalities of this file could hold for a model that ignores depth."""
    results = [
        ids(generate(model, PROMPTS, num_loops=k, max_new_tokens=12)) for k in range(1, K + 1)
    ]
    assert all(results[i] != results[j] for i in range(K) for j in range(i))


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_mixed_lengths_and_depths_equal_solo_rows(model, policy):
    settings = {"max_new_tokens": 8, "cache_policy": policy}
    together = generate(model, PROMPTS, num_loops=DEPTHS, **settings)
    for row, (prompt, depth) in enumerate(zip(PROMPTS, DEPTHS, strict=True)):
        assert generate(model, [prompt], num_loops=depth, **settings) == together[row : row + 1]


def test_collapse_last_collapses_at_the_end_of_the_prompt(model):
    """Driven by hand: the prompt, then `end_prompt`, then token by token."""
    for prompt in PROMPTS:
        cache = ContiguousCache(model.config, batch_size=1, capacity=20, policy="collapse_last")
        expected, call = [], prompt
        with torch.no_grad():
            while len(expected) < 10:
                logits = model(torch.tensor([call]), num_loops=4, cache=cache)
                cache.end_prompt()
                expected.append(int(logits[0, -1].argmax()))
                call = expected[-1:]
        settings = {"num_loops": 4, "max_new_tokens": 10}
        result = generate(model, [prompt], cache_policy="collapse_last", **settings)
        assert ids(result) == [expected]


def test_collapse_last_differs_from_per_loop(model):
    collapsed, exact = (
        ids(generate(model, PROMPTS, num_loops=4, max_new_tokens=12, cache_policy=policy))
        for policy in ("collapse_last", "per_loop")
    )
    assert collapsed != exact
    assert [row[0] for row in collapsed] == [row[0] for row in exact]


@pytest.mark.parametrize("policy", ["per_loop", "collapse_last"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_prefill_in_chunks_equals_one_prefill(model, policy, chunk):
    whole = generate(model, PROMPTS, num_loops=DEPTHS, max_new_tokens=8, cache_policy=policy)
    chunked = generate(
        model,
        PROMPTS,
        num_loops=DEPTHS,
        max_new_tokens=8,
        cache_policy=policy,
        prefill_chunk=chunk,
    )
    assert chunked == whole


def test_the_policy_of_the_config_is_the_default(model):
    config = model.config.replace(**{"loop.cache_policy": "last_step"})
    other = LoopedLM(config)
    other.load_state_dict(model.state_dict())
    default = generate(other, PROMPTS, num_loops=4, max_new_tokens=12)
    named = generate(model, PROMPTS, num_loops=4, max_new_tokens=12, cache_policy="last_step")
    exact = generate(model, PROMPTS, num_loops=4, max_new_tokens=12)
    assert ids(default) == ids(named) != ids(exact)


# ---- seeds


def test_the_same_seed_gives_the_same_tokens(model):
    first, again = (
        generate(model, PROMPTS, num_loops=2, max_new_tokens=12, sampling=SAMPLED) for _ in range(2)
    )
    assert first == again


def test_different_seeds_give_different_tokens(model):
    other = Sampling(temperature=1.0, seed=4)
    first, second = (
        ids(generate(model, PROMPTS, num_loops=2, max_new_tokens=12, sampling=sampling))
        for sampling in (SAMPLED, other)
    )
    assert first != second


def test_the_global_random_state_is_neither_read_nor_moved(model):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = generate(model, PROMPTS, num_loops=2, max_new_tokens=6, sampling=SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert generate(model, PROMPTS, num_loops=2, max_new_tokens=6, sampling=SAMPLED) == first


def test_changing_a_neighbour_changes_no_token_of_a_row(model):
    settings = {"num_loops": 2, "max_new_tokens": 12, "sampling": SAMPLED}
    first = generate(model, [PROMPTS[0], PROMPTS[1]], **settings)
    second = generate(model, [PROMPTS[0], PROMPTS[2]], **settings)
    assert first[0] == second[0]
    assert first[1] != second[1]


# ---- results


def test_each_row_reports_its_own_depth_and_prompt_length(model):
    result = generate(model, PROMPTS, num_loops=DEPTHS, max_new_tokens=2)
    assert [generation.num_loops for generation in result] == DEPTHS
    assert [generation.prompt_tokens for generation in result] == [6, 1, 10, 2]


def test_one_new_token_is_the_best_after_the_prompt(model):
    result = generate(model, [PROMPTS[0]], num_loops=3, max_new_tokens=1)
    expected = by_full_forwards(model, PROMPTS[0], num_loops=3, count=1)
    assert result == [Generation(expected, 3, 6, "length")]


def test_one_token_prompts_work(model):
    result = generate(model, [[5], [6]], num_loops=2, max_new_tokens=5)
    assert ids(result) == [by_full_forwards(model, [t], num_loops=2, count=5) for t in (5, 6)]


def test_a_prompt_may_fill_the_context_up_to_the_limit(model):
    prompt = [t % VOCAB for t in range(CONTEXT - 1)]
    assert len(generate(model, [prompt], num_loops=2, max_new_tokens=1)[0].token_ids) == 1


# ---- stops


def first_occurrence(tokens):
    """A token that appears first in the middle, and its place."""
    return next((t, i) for i, t in enumerate(tokens) if i > 1 and t not in tokens[:i])


def test_a_stop_token_ends_its_row_and_is_not_returned(model):
    free = generate(model, [PROMPTS[0]], num_loops=4, max_new_tokens=16, sampling=SAMPLED)[0]
    stop, place = first_occurrence(free.token_ids)
    result = generate(
        model, [PROMPTS[0]], num_loops=4, max_new_tokens=16, sampling=SAMPLED, stop_ids=[stop]
    )[0]
    assert result == Generation(free.token_ids[:place], 4, 6, "stop")


def test_other_rows_go_on_unchanged_after_one_stopped(model):
    free = generate(model, PROMPTS, num_loops=DEPTHS, max_new_tokens=16, sampling=SAMPLED)
    stop, _ = first_occurrence(free[0].token_ids)
    result = generate(
        model, PROMPTS, num_loops=DEPTHS, max_new_tokens=16, sampling=SAMPLED, stop_ids=[stop]
    )
    for stopped, unstopped in zip(result, free, strict=True):
        if stop in unstopped.token_ids:
            place = unstopped.token_ids.index(stop)
            assert (stopped.token_ids, stopped.finish_reason) == (
                unstopped.token_ids[:place],
                "stop",
            )
        else:
            assert (stopped.token_ids, stopped.finish_reason) == (unstopped.token_ids, "length")
    assert {generation.finish_reason for generation in result} == {"stop", "length"}


def test_a_row_that_stops_at_once_returns_nothing(model):
    first = by_full_forwards(model, PROMPTS[0], num_loops=2, count=1)
    result = generate(model, [PROMPTS[0]], num_loops=2, max_new_tokens=5, stop_ids=first)
    assert result == [Generation([], 2, 6, "stop")]


def test_a_stop_at_the_last_allowed_token_counts_as_a_stop(model):
    free = generate(model, [PROMPTS[0]], num_loops=4, max_new_tokens=16, sampling=SAMPLED)[0]
    stop, place = first_occurrence(free.token_ids)
    settings = {"num_loops": 4, "sampling": SAMPLED, "stop_ids": [stop]}
    result = generate(model, [PROMPTS[0]], max_new_tokens=place + 1, **settings)[0]
    assert (len(result.token_ids), result.finish_reason) == (place, "stop")
    result = generate(model, [PROMPTS[0]], max_new_tokens=place, **settings)[0]
    assert (len(result.token_ids), result.finish_reason) == (place, "length")


def test_a_complete_row_ends_with_its_last_token_and_the_others_go_on(model):
    free = generate(model, PROMPTS[:2], num_loops=4, max_new_tokens=8, sampling=SAMPLED)
    wanted = free[0].token_ids[:3]
    result = generate(
        model,
        PROMPTS[:2],
        num_loops=4,
        max_new_tokens=8,
        sampling=SAMPLED,
        is_complete=lambda new_ids: list(new_ids) == wanted,
    )
    assert result == [Generation(wanted, 4, 6, "stop"), free[1]]


def test_no_forward_is_spent_after_the_last_row_stopped(model):
    first = by_full_forwards(model, PROMPTS[0], num_loops=2, count=1)
    calls = []
    handle = model.embedding.register_forward_hook(lambda *_: calls.append(1))
    try:
        generate(model, [PROMPTS[0]], num_loops=2, max_new_tokens=9, stop_ids=first)
        assert len(calls) == 1
        generate(model, [PROMPTS[0]], num_loops=2, max_new_tokens=9)
        assert len(calls) == 1 + 9
    finally:
        handle.remove()


# ---- depths beyond training


def test_more_loops_than_trained_are_refused_by_default(model):
    with pytest.raises(ValueError, match="num_loops=5 exceeds max_loops=4"):
        generate(model, PROMPTS, num_loops=5, max_new_tokens=2)
    with pytest.raises(ValueError, match="num_loops=7 exceeds max_loops=4"):
        generate(model, PROMPTS, num_loops=[1, 2, 7, 4], max_new_tokens=2)


def test_more_loops_than_trained_run_when_the_model_says_extrapolate(model):
    config = model.config.replace(**{"loop.beyond_max_loops": "extrapolate"})
    other = LoopedLM(config)
    other.load_state_dict(model.state_dict())
    result = generate(other, [PROMPTS[0]], num_loops=6, max_new_tokens=5)
    assert result[0].token_ids == by_full_forwards(other, PROMPTS[0], num_loops=6, count=5)


# ---- refusals


@pytest.mark.parametrize(
    "num_loops",
    [0, -1, 2.0, "4", None, True, [1, 2, 3, 0], [1, 2, 3, 2.5], [1, 2, 3, "4"], [], [1, 2]],
)
def test_a_wrong_loop_count_is_refused(model, num_loops):
    with pytest.raises(ValueError, match="num_loops"):
        generate(model, PROMPTS, num_loops=num_loops, max_new_tokens=2)


def refused(model, prompts, *, message, **settings):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **({"num_loops": 2, "max_new_tokens": 2} | settings))


def test_no_prompts_are_refused(model):
    refused(model, [], message="no prompts were given")


def test_an_empty_prompt_is_refused_by_its_row(model):
    refused(model, [[1], []], message="prompt 1 is empty; give at least one token")


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**6, 1.5])
def test_an_unknown_id_is_refused_with_the_known_range(model, bad):
    refused(
        model, [[1], [2, bad]], message=rf"prompt 1 has token id {bad}; the model knows 0\.\.28"
    )


def test_a_request_beyond_the_context_is_refused_with_both_lengths(model):
    refused(
        model,
        [[1], [1] * 40],
        max_new_tokens=9,
        message="prompt 1 has 40 tokens and asks for 9 more; the model's context is 48",
    )


def test_an_unknown_cache_policy_is_refused_with_the_nearest(model):
    refused(
        model,
        PROMPTS,
        cache_policy="per_loops",
        message="unknown cache policy 'per_loops'. Did you mean 'per_loop'",
    )


@pytest.mark.parametrize("bad", [0, 2.0, True, "3"])
@pytest.mark.parametrize("name", ["max_new_tokens", "prefill_chunk"])
def test_counts_are_whole_numbers_of_at_least_one(model, name, bad):
    message = f"{name}={bad!r}; give a whole number of at least 1"
    refused(model, PROMPTS, message=message, **{name: bad})


@pytest.mark.parametrize("bad", [-1, VOCAB, "2", 1.5])
def test_a_stop_token_that_cannot_occur_is_refused(model, bad):
    message = rf"stop_ids has token id {bad!r}; the model knows 0\.\.28"
    refused(model, PROMPTS, message=message, stop_ids=[1, bad])


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_f33_weights_that_are_no_numbers_are_refused_and_not_sampled(model, sampling):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.embedding.weight[3, 0] = float("nan")
    message = "next-token scores that are no finite numbers: its weights are damaged"
    refused(broken, PROMPTS, message=message, sampling=sampling)


def test_scores_of_a_row_that_has_ended_are_not_judged(model, monkeypatch):
    """A finished row computes padding, of which nothing is used."""
    first, second = (by_full_forwards(model, p, num_loops=2, count=3) for p in PROMPTS[:2])
    assert first[0] not in second
    head, calls = model.head, []

    def broken_row(x):
        logits = head(x)
        # The first call reads the prompt, whose row has not ended.
        if calls:
            logits[0] = float("nan")
        calls.append(1)
        return logits

    monkeypatch.setattr(model, "head", broken_row)
    settings = {"num_loops": 2, "max_new_tokens": 3, "stop_ids": [first[0]]}
    result = generate(model, PROMPTS[:2], **settings)
    assert (ids(result), len(calls)) == ([[], second], 3)


def test_generation_leaves_no_gradient_and_no_table(model):
    generate(model, PROMPTS, num_loops=2, max_new_tokens=2)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(torch.tensor([[1]]), num_loops=2).requires_grad


# ---- log-probabilities


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7, top_k=5, seed=1)])
def test_logprobs_are_those_of_a_plain_forward_whatever_the_sampling(model, sampling):
    found = generate(
        model, PROMPTS, num_loops=DEPTHS, max_new_tokens=6, sampling=sampling, logprobs=True
    )
    for prompt, depth, result in zip(PROMPTS, DEPTHS, found, strict=True):
        assert len(result.logprobs) == len(result.token_ids) == 6
        row = torch.tensor([[*prompt, *result.token_ids[:-1]]])
        with torch.no_grad():
            logp_TV = model(row, num_loops=depth)[0, len(prompt) - 1 :].log_softmax(-1)
        wanted = logp_TV.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), wanted, atol=1e-5, rtol=0)


def test_logprobs_are_left_out_unless_asked_for(model):
    assert generate(model, [[1]], num_loops=1, max_new_tokens=2)[0].logprobs is None


# ---- calls that overlap


MIXED = itertools.cycle(itertools.product(POLICIES, (1, [3, 2], 4, [1, 4])))
OVERLAPPING = [
    {
        "prompts": [PROMPTS[number % 4], PROMPTS[0]],
        "num_loops": loops,
        "cache_policy": policy,
        "sampling": Sampling(temperature=1.0, seed=number),
        "max_new_tokens": 4,
    }
    for number, (policy, loops) in enumerate(itertools.islice(MIXED, 16))
]
"""Sixteen calls with different prompts, loop counts, policies and draws."""


def generate_overlapping(model, while_all_run=lambda: None):
    """The calls of OVERLAPPING in one thread each; every one has its first token before any has its
    second, and they end one after another."""
    have_begun = threading.Barrier(len(OVERLAPPING), action=while_all_run)
    has_ended = [threading.Event() for _ in OVERLAPPING]

    def run(number):
        def is_complete(new_ids):
            if not waited:
                waited.append(True)
                have_begun.wait(60)
            return False

        waited = []
        result = generate(model, is_complete=is_complete, **OVERLAPPING[number])
        assert number == 0 or has_ended[number - 1].wait(60)
        has_ended[number].set()
        return result

    with ThreadPoolExecutor(len(OVERLAPPING)) as pool:
        return list(pool.map(run, range(len(OVERLAPPING))))


def held_by(model):
    """Everything that the modules of a model hold besides their parameters."""
    return {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_f15_overlapping_generations_equal_the_same_calls_one_after_another(model):
    assert generate_overlapping(model) == [generate(model, **call) for call in OVERLAPPING]


def test_f15_a_weight_update_after_overlapping_generations_reaches_the_model(model):
    used, tokens = copy.deepcopy(model), torch.tensor(PROMPTS[:1])
    generate_overlapping(used)
    cold = LoopedLM(model.config)
    with torch.no_grad():
        for parameter in used.modulation.parameters():
            parameter.add_(0.1)
    cold.load_state_dict(used.state_dict())
    for num_loops in range(1, K + 1):
        assert torch.equal(used(tokens, num_loops=num_loops), cold(tokens, num_loops=num_loops))
        expected = ids(generate(cold, PROMPTS, num_loops=num_loops, max_new_tokens=4))
        assert ids(generate(used, PROMPTS, num_loops=num_loops, max_new_tokens=4)) == expected
    used(tokens, num_loops=2).sum().backward()
    assert all(parameter.grad is not None for parameter in used.modulation.parameters())


def test_f15_a_call_keeps_nothing_on_the_model_while_it_runs_or_after(model):
    before, during = held_by(model), []
    generate_overlapping(model, while_all_run=lambda: during.append(held_by(model)))
    assert during == [before] and held_by(model) == before
