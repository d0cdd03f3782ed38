"""Every cache policy equals its slow reference, alone and in batches, whatever the loop counts."""

import pytest
import torch
from slow_cache import SlowDecoder
from toys import toy_model, toy_tokens

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import POLICIES
from depthdial.engine.generate import generate

TOLERANCE = 1e-4
LOOKUPS = ("huginn:latest-m2", "huginn:available-m2", "huginn:always-last-m2", "huginn:skip")
COMPRESSED = ("huginn:latest-m2-compress-s2", "huginn:latest-m2-compress-s4")
BY_LOOPS = tuple(
    f"parcae:compress-{x}" for x in ("s1", "s2", "s3", "stride2", "first1", "last1", "last2")
)
VARIED = ("last_step", "share_first", "stash_first", "stash_last", *LOOKUPS, *COMPRESSED, *BY_LOOPS)
"""Policies whose loop count may change from call to call, up and down."""
ALL = (
    *POLICIES,
    *LOOKUPS,
    "huginn:compress-s2",
    "huginn:compress-s4",
    *COMPRESSED,
    *BY_LOOPS,
)
COLLAPSING = ("collapse_last", "collapse_first", "collapse_mean")
# Chunks of a prompt see each other as the whole prompt does.
CHUNK_FREE = ("per_loop", *COLLAPSING, "share_first", *LOOKUPS)


def new_cache(model, policy, batch_size=1, capacity=24):
    return ContiguousCache(model.config, batch_size=batch_size, capacity=capacity, policy=policy)


@pytest.mark.parametrize("num_loops", [1, 4])
@pytest.mark.parametrize("policy", ALL)
def test_policy_equals_its_slow_reference(model, policy, num_loops):
    """A prompt in two calls, then token by token."""
    tokens = toy_tokens(1, 10)
    cache, slow = new_cache(model, policy), SlowDecoder(model, policy)
    for first, last in ((0, 4), (4, 6), (6, 7), (7, 8), (8, 9), (9, 10)):
        if first == 6:
            cache.end_prompt()
            slow.end_prompt()
        ours = model(tokens[:, first:last], num_loops=num_loops, cache=cache)
        expected = slow(tokens[:, first:last], num_loops=num_loops)
        assert (ours - expected).abs().max() <= TOLERANCE


@pytest.fixture(scope="module")
def model_with_own_core():
    """A core of another width, with other heads and other keys."""
    return toy_model(
        core_d_model=20,
        core_num_heads=3,
        core_num_kv_heads=1,
        modulation=None,
        loop={"injection": "concat", "initial_state": "zero", "state_projection": True},
    )


@pytest.mark.parametrize("policy", ALL)
def test_f02_policy_equals_its_slow_reference_with_a_core_of_its_own_width(
    model_with_own_core, policy
):
    model, tokens = model_with_own_core, toy_tokens(1, 7)
    cache, slow = new_cache(model, policy), SlowDecoder(model, policy)
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 7)):
        if first == 4:
            cache.end_prompt()
            slow.end_prompt()
        ours = model(tokens[:, first:last], num_loops=3, cache=cache)
        expected = slow(tokens[:, first:last], num_loops=3)
        assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("policy", VARIED)
def test_policy_follows_its_rule_when_loop_counts_vary_between_calls(model, policy):
    tokens = toy_tokens(1, 12)
    cache, slow = new_cache(model, policy), SlowDecoder(model, policy)
    edges, depths = [0, 4, 6, 7, 8, 9, 10, 11, 12], [3, 4, 2, 1, 4, 3, 2, 4]
    for first, last, depth in zip(edges, edges[1:], depths, strict=False):
        ours = model(tokens[:, first:last], num_loops=depth, cache=cache)
        expected = slow(tokens[:, first:last], num_loops=depth)
        assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("policy", VARIED)
def test_padded_rows_of_varied_depths_equal_their_slow_references(model, policy):
    """Three rows of other lengths; each call has other loop counts, and padding on any side."""
    lengths, depths = (
        [[3, 1, 1, 0], [5, 1, 1, 1], [2, 2, 1, 1]],
        [[4, 2, 3, 1], [1, 3, 4, 2], [2, 4, 1, 3]],
    )
    cache = new_cache(model, policy, batch_size=3)
    slow = [SlowDecoder(model, policy) for _ in range(3)]
    for call in range(4):
        widest = max(row[call] for row in lengths)
        tokens = toy_tokens(3, widest, seed=call)
        real = torch.zeros(3, widest, dtype=torch.bool)
        for row, row_lengths in enumerate(lengths):
            start = widest - row_lengths[call] if row == 2 else 0
            real[row, start : start + row_lengths[call]] = True
        loops = torch.tensor([row[call] for row in depths])
        logits = model(tokens, num_loops=loops, cache=cache, padding_mask_BT=real)
        for row in range(3):
            if bool(real[row].any()):
                expected = slow[row](tokens[row, real[row]][None], num_loops=int(loops[row]))
                assert (logits[row, real[row]] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("policy", ALL)
def test_rows_of_a_mixed_depth_batch_decode_as_alone(model, policy):
    prompts = [toy_tokens(1, n, seed=n)[0].tolist() for n in (3, 9, 6)]
    depths = [2, 4, 1]
    together = generate(model, prompts, num_loops=depths, max_new_tokens=6, cache_policy=policy)
    for row, prompt in enumerate(prompts):
        [alone] = generate(
            model, [prompt], num_loops=depths[row], max_new_tokens=6, cache_policy=policy
        )
        assert together[row] == alone


@pytest.mark.parametrize("policy", CHUNK_FREE)
@pytest.mark.parametrize("num_loops", [1, 3])
def test_chunked_prefill_equals_one_prefill(model, policy, num_loops):
    tokens = toy_tokens(2, 14)
    one, chunked = (new_cache(model, policy, batch_size=2) for _ in range(2))
    whole = model(tokens[:, :13], num_loops=num_loops, cache=one)
    pieces = [
        model(tokens[:, a:b], num_loops=num_loops, cache=chunked)
        for a, b in ((0, 3), (3, 4), (4, 9), (9, 13))
    ]
    assert (whole - torch.cat(pieces, dim=1)).abs().max() <= TOLERANCE
    last = []
    for cache in (one, chunked):
        cache.end_prompt()
        last.append(model(tokens[:, 13:], num_loops=num_loops, cache=cache))
    assert (last[0] - last[1]).abs().max() <= TOLERANCE


def test_policies_differ_from_each_other_beyond_one_loop(model):
    """Guards the references: a policy that silently fell back to another would pass them."""
    tokens, alike = toy_tokens(1, 10), []
    for policy in ALL:
        cache = new_cache(model, policy)
        # A prompt in one call would not tell collapse_last from last_step.
        model(tokens[:, :3], num_loops=4, cache=cache)
        model(tokens[:, 3:5], num_loops=4, cache=cache)
        cache.end_prompt()
        calls = [model(tokens[:, t : t + 1], num_loops=4, cache=cache) for t in range(5, 10)]
        alike.append((policy, torch.cat(calls, dim=1)))
    same = {
        frozenset((a, b))
        for a, logits_a in alike
        for b, logits_b in alike
        if a != b and (logits_a - logits_b).abs().max() <= 100 * TOLERANCE
    }
    full = ("per_loop", *LOOKUPS)
    one_kept = ("last_step", "huginn:compress-s2", COMPRESSED[0], "parcae:compress-s1")
    two_kept = ("huginn:compress-s4", COMPRESSED[1], "parcae:compress-s2")
    assert same == {
        frozenset((a, b))
        for group in (full, one_kept, two_kept)
        for a in group
        for b in group
        if a != b
    }


@pytest.mark.parametrize(
    ("policy", "depths"),
    [
        ("huginn:compress-anchor", [11] * 6),
        ("huginn:latest-m2-compress-anchor", [11, 9, 3, 12, 8, 10]),
    ],
)
def test_the_anchor_equals_its_slow_reference_beyond_its_eight_loops(policy, depths):
    deep, tokens = toy_model(max_loops=12), toy_tokens(1, 10)
    cache, slow = new_cache(deep, policy), SlowDecoder(deep, policy)
    edges = [0, 4, 6, 7, 8, 9, 10]
    differs = False
    whole = deep(tokens, num_loops=depths[-1])
    for first, last, depth in zip(edges, edges[1:], depths, strict=False):
        ours = deep(tokens[:, first:last], num_loops=depth, cache=cache)
        expected = slow(tokens[:, first:last], num_loops=depth)
        assert (ours - expected).abs().max() <= TOLERANCE
        differs = (ours - whole[:, first:last]).abs().max() > TOLERANCE
    assert differs, "the rule must change what is read"


@pytest.mark.parametrize("policy", [p for p in ALL if p != "stash_last"])
def test_policies_agree_at_one_loop(model, policy):
    tokens = toy_tokens(1, 10)
    cache = new_cache(model, policy)
    first = model(tokens[:, :5], num_loops=1, cache=cache)
    cache.end_prompt()
    rest = [model(tokens[:, t : t + 1], num_loops=1, cache=cache) for t in range(5, 10)]
    whole = model(tokens, num_loops=1)
    assert (torch.cat([first, *rest], 1) - whole).abs().max() <= TOLERANCE


@pytest.mark.parametrize("policy", [p for p in ALL if p not in VARIED])
def test_cache_that_needs_every_entry_refuses_more_loops(model, policy):
    """Collapsed caches may change after the prompt: one entry per token serves any loop."""
    cache = new_cache(model, policy)
    model(toy_tokens(1, 5), num_loops=1, cache=cache)
    if policy == "huginn:compress-s2":
        assert model(toy_tokens(1, 1), num_loops=2, cache=cache).isfinite().all()
        return
    with pytest.raises(ValueError, match="now asks for 2|and 2 loops read those of 2"):
        model(toy_tokens(1, 1), num_loops=2, cache=cache)
    cache.end_prompt()
    if policy in COLLAPSING:
        assert model(toy_tokens(1, 1), num_loops=2, cache=cache).isfinite().all()


@pytest.mark.parametrize("policy", COLLAPSING)
def test_collapsed_cache_refuses_several_tokens_in_one_call(model, policy):
    cache = new_cache(model, policy)
    model(toy_tokens(1, 5), num_loops=2, cache=cache)
    cache.end_prompt()
    with pytest.raises(ValueError, match=f"2 tokens in one call after end_prompt under {policy}"):
        model(toy_tokens(1, 2), num_loops=2, cache=cache)
