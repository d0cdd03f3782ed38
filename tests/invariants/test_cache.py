"""Cached decoding equals decoding without a cache; what calls a cache refuses.

Every policy against its own rule: `test_cache_policies.py`.
"""

import pytest
import torch
from toys import MAX_LOOPS, toy_config, toy_model, toy_tokens

from depthdial.cache.contiguous import ContiguousCache
from depthdial.engine.generate import generate

TOLERANCE = 1e-4
ALL_LOOPS = range(1, MAX_LOOPS + 1)


def new_cache(model, policy="per_loop", batch_size=1, capacity=64):
    return ContiguousCache(model.config, batch_size=batch_size, capacity=capacity, policy=policy)


def in_calls(model, tokens, cuts, *, num_loops, cache):
    """Logits of all positions, fed in pieces."""
    edges = [0, *cuts, tokens.shape[1]]
    pieces = zip(edges, edges[1:], strict=False)
    return torch.cat(
        [model(tokens[:, a:b], num_loops=num_loops, cache=cache) for a, b in pieces], dim=1
    )


def greedy_uncached(model, prompt, num_loops, steps):
    """Full forward per token; returns ids and the logits each was taken from."""
    ids, logits = list(prompt), []
    for _ in range(steps):
        logits.append(model(torch.tensor([ids]), num_loops=num_loops)[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_b01_cached_greedy_equals_full_forward_over_32_tokens(model, num_loops):
    prompt = toy_tokens(1, 9)[0].tolist()
    ids, logits = greedy_uncached(model, prompt, num_loops, 32)
    cache = new_cache(model)
    cached = [model(torch.tensor([prompt]), num_loops=num_loops, cache=cache)[0, -1]]
    for token in ids[:-1]:
        cached.append(model(torch.tensor([[token]]), num_loops=num_loops, cache=cache)[0, -1])
    assert (torch.stack(cached) - logits).abs().max() <= TOLERANCE
    [row] = generate(model, [prompt], num_loops=num_loops, max_new_tokens=32)
    assert row.token_ids == ids


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_b01_slot_counts_follow_the_policy(model, num_loops):
    """2 attention layers in each of prelude, core and coda."""
    prompt = toy_tokens(1, 5)
    counts = {}
    for policy in ("per_loop", "collapse_last", "last_step"):
        cache = new_cache(model, policy)
        model(prompt, num_loops=num_loops, cache=cache)
        during = cache.num_slots()
        cache.end_prompt()
        counts[policy] = (during, cache.num_slots())
    per_loop = 2 + 2 * num_loops + 2
    assert counts["per_loop"] == (per_loop, per_loop)
    assert counts["collapse_last"] == (per_loop, 6)
    assert counts["last_step"] == (6, 6)


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_b05_one_token_at_a_time_equals_one_forward_everywhere(model, num_loops):
    tokens = toy_tokens(1, 12)
    whole = model(tokens, num_loops=num_loops)
    single = in_calls(model, tokens, range(1, 12), num_loops=num_loops, cache=new_cache(model))
    assert (whole - single).abs().max() <= TOLERANCE


def test_b05_order_of_earlier_tokens_matters(model):
    tokens = toy_tokens(1, 12)
    swapped = tokens.clone()
    swapped[0, [2, 5]] = tokens[0, [5, 2]]
    change = model(tokens, num_loops=2)[0, -1] - model(swapped, num_loops=2)[0, -1]
    assert change.abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("policy", ["per_loop", "collapse_last"])
@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_chunked_prefill_equals_one_prefill(model, policy, num_loops):
    tokens = toy_tokens(2, 14)
    one, chunked = (new_cache(model, policy, batch_size=2) for _ in range(2))
    whole = model(tokens[:, :13], num_loops=num_loops, cache=one)
    pieces = in_calls(model, tokens[:, :13], [3, 4, 9], num_loops=num_loops, cache=chunked)
    assert (whole - pieces).abs().max() <= TOLERANCE
    last = []
    for cache in (one, chunked):
        cache.end_prompt()
        last.append(model(tokens[:, 13:], num_loops=num_loops, cache=cache))
    assert (last[0] - last[1]).abs().max() <= TOLERANCE


def test_cache_refuses_another_loop_count_and_keeps_its_content(model):
    tokens = toy_tokens(1, 6)
    cache = new_cache(model)
    model(tokens[:, :5], num_loops=2, cache=cache)
    with pytest.raises(ValueError, match="ran 2 loops so far and now asks for 3"):
        model(tokens[:, 5:], num_loops=3, cache=cache)
    after = model(tokens[:, 5:], num_loops=2, cache=cache)
    assert (after - model(tokens, num_loops=2)[:, 5:]).abs().max() <= TOLERANCE


def test_overflowing_cache_says_both_sizes(model):
    cache = new_cache(model, capacity=4)
    with pytest.raises(ValueError, match="would hold 5 tokens; the cache was made for 4"):
        model(toy_tokens(1, 5), num_loops=1, cache=cache)


def test_cache_bytes_grow_with_loops_only_where_each_loop_keeps_its_own():
    model = toy_model()
    sizes = {}
    for policy in ("per_loop", "last_step"):
        for num_loops in (1, 3):
            cache = new_cache(model, policy)
            model(toy_tokens(1, 5), num_loops=num_loops, cache=cache)
            sizes[policy, num_loops] = cache.num_bytes()
    assert sizes["per_loop", 3] * 6 == sizes["per_loop", 1] * 10
    assert sizes["last_step", 3] == sizes["last_step", 1]


def test_config_policy_is_the_default():
    config = toy_config(**{"loop.cache_policy": "last_step"})
    assert ContiguousCache(config, batch_size=1, capacity=4).policy == "last_step"


def test_a_refused_call_leaves_the_cache_as_it_was(model):
    """Document ids used to be stored while the call was still being planned."""
    tokens, cache = toy_tokens(1, 6), new_cache(model, capacity=6)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match="would hold 7 tokens"):
        model(toy_tokens(1, 7), num_loops=2, cache=cache, document_ids_BT=ids)
    model(tokens[:, :5], num_loops=2, cache=cache)
    with pytest.raises(ValueError, match="in every call on a cache"):
        model(tokens[:, 5:], num_loops=2, cache=cache, document_ids_BT=ids[:, 5:6])
    last = model(tokens[:, 5:], num_loops=2, cache=cache)
    assert (last - model(tokens, num_loops=2)[:, 5:]).abs().max() <= TOLERANCE


def test_end_prompt_without_a_prompt_is_refused(model):
    with pytest.raises(ValueError, match="feed the prompt first"):
        new_cache(model, "collapse_last").end_prompt()


def test_autocast_must_not_change_between_calls_of_one_cache(model):
    cache = new_cache(model)
    model(toy_tokens(1, 3), num_loops=1, cache=cache)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="keep autocast on or off"),
    ):
        model(toy_tokens(1, 1), num_loops=1, cache=cache)


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_mixed_depths_documents_padding_and_cache_together(model, num_loops):
    """Every row of the batch equals its own uncached, unpadded, single-document runs."""
    depths = torch.tensor([num_loops, 1, 3])
    tokens = toy_tokens(3, 10)
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 10, [5] * 7 + [9] * 3])
    real = torch.ones(3, 10, dtype=torch.bool)
    real[0, :2], real[1, 8:] = False, False
    cache = new_cache(model, batch_size=3)
    edges = [0, 3, 4, 8, 10]
    logits = torch.cat(
        [
            model(
                tokens[:, a:b],
                num_loops=depths,
                cache=cache,
                padding_mask_BT=real[:, a:b],
                document_ids_BT=documents[:, a:b],
            )
            for a, b in zip(edges, edges[1:], strict=False)
        ],
        dim=1,
    )
    for row in range(3):
        for document in documents[row].unique():
            here = (documents[row] == document) & real[row]
            alone = model(tokens[row, here][None], num_loops=int(depths[row]))[0]
            assert (logits[row, here] - alone).abs().max() <= TOLERANCE
