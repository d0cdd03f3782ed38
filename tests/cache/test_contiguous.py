"""What is done to a whole cache: rows, lengths, copies, missing entries."""

import pytest
import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.groups import GroupEntries
from depthdial.config import POLICIES, LoopConfig, ModelConfig
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 1e-5
PUBLISHED = (
    "huginn:latest-m2",
    "huginn:skip",
    "huginn:latest-m2-compress-s4",
    "parcae:compress-last1",
)
EVERY_POLICY = (*POLICIES, *PUBLISHED)


@pytest.fixture(scope="module")
def model():
    """Two attention layers in the core."""
    config = ModelConfig(
        vocab_size=23, d_model=16, split=(2, 4, 2), num_heads=2, num_kv_heads=1, head_dim=6,
        d_ff=24, max_context=64, num_loops=2, max_loops=4, init_std=0.3,
        loop=LoopConfig(update="delta", injection="add", delta_init=0.7),
    )  # fmt: skip
    return LoopedLM(config).eval()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tokens(batch, length, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 23, (batch, length), generator=generator)


def new_cache(model, policy="per_loop", batch_size=1, capacity=16):
    return ContiguousCache(model.config, batch_size=batch_size, capacity=capacity, policy=policy)


def prompted(model, policy, prompts, *, num_loops=3):
    """A cache that holds the prompts, ready for single tokens."""
    cache = new_cache(model, policy, batch_size=len(prompts))
    model(prompts, num_loops=num_loops, cache=cache)
    cache.end_prompt()
    return cache


def same(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_reordered_rows_continue_as_the_rows_they_were(model, policy):
    prompts, rows = tokens(3, 5), torch.tensor([2, 0, 0, 1])
    cache = prompted(model, policy, prompts)
    cache.reorder(rows)
    assert cache.batch_size == 4
    again = prompted(model, policy, prompts[rows])
    for step in range(3):
        new = tokens(4, 1, seed=step)
        same(
            model(new, num_loops=3, cache=cache),
            model(new, num_loops=3, cache=again),
        )


def test_reordered_rows_that_were_one_do_not_share_what_comes_later(model):
    cache = prompted(model, "per_loop", tokens(1, 4))
    cache.reorder(torch.tensor([0, 0]))
    model(torch.tensor([[1], [2]]), num_loops=3, cache=cache)
    logits = model(torch.tensor([[3], [3]]), num_loops=3, cache=cache)
    assert (logits[0] - logits[1]).abs().max() > 100 * TOLERANCE


def test_reorder_takes_loop_counts_and_documents_along(model):
    cache = new_cache(model, batch_size=2)
    ids = torch.tensor([[0, 0, 1], [0, 1, 1]])
    loops = torch.tensor([1, 3])
    model(tokens(2, 3), num_loops=loops, cache=cache, document_ids_BT=ids)
    cache.reorder(torch.tensor([1]))
    with pytest.raises(ValueError, match="ran 3 loops so far"):
        cache.bind_loops(1)
    new = tokens(1, 1, seed=1)
    logits = model(new, num_loops=3, cache=cache, document_ids_BT=torch.tensor([[1]]))
    document = torch.cat([tokens(2, 3)[1:, 1:], new], dim=1)
    same(logits, model(document, num_loops=3)[:, -1:])


@pytest.mark.parametrize("rows", [[], [2], [-1, 0]])
def test_reorder_refuses_rows_that_do_not_exist(model, rows):
    with pytest.raises(ValueError, match="each from 0 to 1"):
        new_cache(model, batch_size=2).reorder(torch.tensor(rows, dtype=torch.int64))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_cropped_rows_continue_as_if_the_dropped_tokens_had_never_been(model, policy):
    prompts = tokens(2, 5)
    cache, clean = (prompted(model, policy, prompts) for _ in range(2))
    for step in range(3):
        # The dropped calls run deeper where that is allowed: nothing of them may stay behind.
        loops = 3 if policy == "per_loop" else 4
        model(tokens(2, 1, seed=9 + step), num_loops=loops, cache=cache)
    cache.crop(5)
    assert cache.lengths_B.tolist() == [5, 5]
    for step in range(2):
        new = tokens(2, 1, seed=step)
        same(model(new, num_loops=3, cache=cache), model(new, num_loops=3, cache=clean))


def test_rows_are_cropped_one_by_one(model):
    prompts = tokens(2, 6)
    cache = prompted(model, "per_loop", prompts)
    cache.crop(torch.tensor([2, 5]))
    new = tokens(2, 1, seed=4)
    logits = model(new, num_loops=3, cache=cache)
    for row, kept in ((0, 2), (1, 5)):
        whole = torch.cat([prompts[row, :kept], new[row]])[None]
        same(logits[row, -1], model(whole, num_loops=3)[0, -1])


@pytest.mark.parametrize("lengths", [6, -1, torch.tensor([1, 6])])
def test_crop_refuses_lengths_that_are_not_stored(model, lengths):
    cache = prompted(model, "per_loop", tokens(2, 5))
    with pytest.raises(ValueError, match=r"cannot crop rows of \[5, 5\] tokens"):
        cache.crop(lengths)


@pytest.mark.parametrize("policy", ["per_loop", "collapse_mean"])
def test_a_cache_cropped_to_nothing_is_a_new_one(model, policy):
    """A collapsed cache takes a prompt again, and any loop count."""
    cache = prompted(model, policy, tokens(1, 5))
    cache.crop(0)
    assert cache.num_slots() == 0
    again = tokens(1, 7, seed=1)
    same(model(again, num_loops=2, cache=cache), model(again, num_loops=2))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_restored_cache_continues_as_at_its_snapshot_every_time(model, policy):
    cache = prompted(model, policy, tokens(2, 5))
    snapshot = cache.snapshot()
    new = tokens(2, 1, seed=1)
    expected = model(new, num_loops=3, cache=cache)
    for _ in range(2):
        model(tokens(2, 1, seed=2), num_loops=3, cache=cache)
        cache.crop(3)
        cache.restore(snapshot)
        assert cache.lengths_B.tolist() == [5, 5]
        assert torch.equal(model(new, num_loops=3, cache=cache), expected)


def test_a_snapshot_before_the_prompt_ended_reopens_it(model):
    cache = new_cache(model, "collapse_last")
    model(tokens(1, 5), num_loops=2, cache=cache)
    snapshot = cache.snapshot()
    cache.end_prompt()
    cache.restore(snapshot)
    more = tokens(1, 3, seed=1)
    whole = model(torch.cat([tokens(1, 5), more], dim=1), num_loops=2)
    same(model(more, num_loops=2, cache=cache), whole[:, 5:])


def test_a_snapshot_of_another_kind_of_cache_is_refused(model):
    snapshot = new_cache(model, "last_step").snapshot()
    with pytest.raises(ValueError, match="snapshot of a last_step cache for 16 tokens"):
        new_cache(model).restore(snapshot)


# ---- rows that stopped early


def fill_all(cache, exits, *, num_loops):
    """Fill every row that stopped before the last loop."""
    for loop_idx in range(num_loops - 1):
        cache.fill((exits == loop_idx).nonzero()[:, 0], loop_idx)


def with_exits(model, cache, new, *, num_loops, exits, fill_at_once=False):
    """One call in which row b stops after loop exits[b]; logits in user order.

    Args: fill_at_once: fill before the call is counted as stored.
    """
    begun = model.begin(Call(new, num_loops=num_loops, cache=cache))
    states = torch.zeros_like(begun.h_in_BTD)
    passes = model.iterate(begun)
    done = next(passes)
    try:
        while True:
            rows = torch.arange(len(new)) if done.rows is None else done.rows
            states[rows] = done.state_BTD
            done = passes.send(exits[rows] > done.loop_idx)
    except StopIteration:
        if fill_at_once:
            fill_all(cache, exits, num_loops=num_loops)
        return model.head(model.finish(states, begun))


@pytest.mark.parametrize("policy", ["per_loop", "collapse_last", "collapse_mean"])
def test_filled_entries_are_copies_of_those_of_the_last_loop_that_ran(model, policy):
    """Before a prompt ends, copies read like the rule that looks for the newest entry."""
    filled, newest = (
        new_cache(model, policy, batch_size=3),
        new_cache(model, PUBLISHED[0], batch_size=3),
    )
    for step, exits in enumerate(([3, 1, 0], [0, 3, 2], [1, 1, 3])):
        new, exits = tokens(3, 3 - step, seed=step), torch.tensor(exits)
        ours = with_exits(model, filled, new, num_loops=4, exits=exits)
        same(ours, with_exits(model, newest, new, num_loops=4, exits=exits))
        fill_all(filled, exits, num_loops=4)
    last = tokens(3, 1, seed=8)
    same(model(last, num_loops=4, cache=filled), model(last, num_loops=4, cache=newest))


def test_fill_before_and_after_the_call_is_counted_is_the_same(model):
    early, late = (new_cache(model, batch_size=2) for _ in range(2))
    new, exits = tokens(2, 3), torch.tensor([0, 2])
    with_exits(model, early, new, num_loops=3, exits=exits, fill_at_once=True)
    with_exits(model, late, new, num_loops=3, exits=exits)
    fill_all(late, exits, num_loops=3)
    last = tokens(2, 1, seed=8)
    same(*(model(last, num_loops=3, cache=cache) for cache in (early, late)))


def test_an_early_exit_that_was_not_filled_is_refused(model):
    cache = new_cache(model, batch_size=2)
    with_exits(model, cache, tokens(2, 3), num_loops=4, exits=torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="row 1 .* entries of 2 loops only, and 4 loops read"):
        model(tokens(2, 1), num_loops=4, cache=cache)


@pytest.mark.parametrize("policy", ["per_loop", "collapse_last", "huginn:compress-s4"])
def test_entries_are_counted_only_after_something_stopped_early(model, policy, monkeypatch):
    counts, count = [], GroupEntries.num_complete_groups

    def counting(state):
        counts.append(len(state.lengths_B))
        return count(state)

    monkeypatch.setattr(GroupEntries, "num_complete_groups", counting)
    cache, loops = new_cache(model, policy, batch_size=2), torch.tensor([2, 4])
    for step in range(3):
        model(tokens(2, 2, seed=step), num_loops=loops, cache=cache)
    assert not counts
    with_exits(model, cache, tokens(2, 1), num_loops=loops, exits=torch.tensor([1, 0]))
    fill_all(cache, torch.tensor([1, 0]), num_loops=4)
    for step in range(2):
        model(tokens(2, 1, seed=step), num_loops=loops, cache=cache)
    assert len(counts) == 1


def test_a_row_cropped_to_nothing_takes_any_loop_count(model):
    cache = prompted(model, "per_loop", tokens(2, 5), num_loops=3)
    cache.crop(torch.tensor([0, 5]))
    new, loops = tokens(2, 1, seed=1), torch.tensor([4, 3])
    logits = model(new, num_loops=loops, cache=cache)
    same(logits[:1], model(new[:1], num_loops=4))
    with pytest.raises(ValueError, match="row 0 .* ran 4 loops so far and now asks for 3"):
        model(new, num_loops=3, cache=cache)


@pytest.mark.parametrize("policy", ["per_loop", "last_step"])
def test_gradients_of_a_cached_call_are_those_of_the_entries_as_they_were_read(model, policy):
    """The loops after a read may overwrite the buffer."""
    new = tokens(2, 4)
    with torch.enable_grad():
        gradients = []
        for cache in (None, new_cache(model, policy, batch_size=2)):
            model.zero_grad()
            model(new, num_loops=3, cache=cache).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, cached in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, cached, rtol=1e-4, atol=1e-6)
    model.zero_grad()


@pytest.mark.parametrize("policy", ["last_step", "share_first", "huginn:skip"])
def test_fill_has_no_effect_where_no_entry_can_lack(model, policy):
    cache = new_cache(model, policy, batch_size=2)
    with_exits(model, cache, tokens(2, 3), num_loops=4, exits=torch.tensor([3, 1]))
    slots, num_bytes = cache.num_slots(), cache.num_bytes()
    cache.fill(torch.tensor([1]), 1)
    assert (cache.num_slots(), cache.num_bytes()) == (slots, num_bytes)
    assert model(tokens(2, 1), num_loops=4, cache=cache).isfinite().all()


@pytest.mark.parametrize("from_loop", [-1, 3])
def test_fill_refuses_a_loop_that_did_not_run(model, from_loop):
    cache = prompted(model, "per_loop", tokens(1, 3), num_loops=3)
    with pytest.raises(ValueError, match=r"from_loop=.* the rows run \[3\] loops"):
        cache.fill(torch.tensor([0]), from_loop)


def test_prompts_whose_rows_stopped_early_collapse_to_what_each_token_ran(model):
    """Mean and last are over the loops that ran, not over those that were asked for."""
    for policy in ("collapse_last", "collapse_mean", "collapse_first"):
        early, shallow = (new_cache(model, policy, batch_size=2) for _ in range(2))
        prompts = tokens(2, 4)
        with_exits(model, early, prompts, num_loops=4, exits=torch.tensor([1, 3]))
        model(prompts, num_loops=torch.tensor([2, 4]), cache=shallow)
        early.end_prompt()
        shallow.end_prompt()
        for step in range(2):
            new = tokens(2, 1, seed=step)
            same(model(new, num_loops=3, cache=early), model(new, num_loops=3, cache=shallow))


# ---- an extra pass


def test_only_stash_last_needs_an_extra_pass(model):
    needing = [policy for policy in POLICIES if POLICIES[policy].has_extra_pass]
    assert needing == ["stash_last"]


def test_an_aborted_call_leaves_no_entries_behind(model):
    """A call that failed after its third loop, then the same token with one loop."""
    cache, clean = (prompted(model, "huginn:skip", tokens(1, 4), num_loops=3) for _ in range(2))

    def fail(loop_idx, state_BTD, rows):
        if loop_idx == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        model(tokens(1, 1), num_loops=3, cache=cache, on_loop=fail)
    for c in (cache, clean):
        model(tokens(1, 1), num_loops=1, cache=c)
    last = tokens(1, 1, seed=3)
    same(*(model(last, num_loops=3, cache=c) for c in (cache, clean)))


# ---- rows of one cache in their prompt and after it

COLLAPSING = [name for name, rule in POLICIES.items() if rule.collapses]


@pytest.mark.parametrize("policy", COLLAPSING)
def test_rows_in_their_prompt_and_after_it_stand_in_one_cache(model, policy):
    """Row 0 decodes while row 1 still reads its prompt and row 2 begins late."""
    together = new_cache(model, policy, batch_size=3)
    alone = [new_cache(model, policy) for _ in range(3)]
    loops = torch.tensor([3, 2, 4])
    lengths = [(3, 4, 0), (1, 2, 3), (1, 3, 1), (1, 1, 1), (1, 1, 1)]
    ends_after = [{0}, set(), {1, 2}, set(), set()]
    for call, (counts, ending) in enumerate(zip(lengths, ends_after, strict=True)):
        new = tokens(3, max(counts), seed=call)
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        logits = model(new, num_loops=loops, cache=together, padding_mask_BT=real)
        for row, count in enumerate(counts):
            if count:
                own = model(new[row : row + 1, :count], num_loops=int(loops[row]), cache=alone[row])
                same(logits[row, :count], own[0])
            if row in ending:
                alone[row].end_prompt()
        if ending:
            together.end_prompt(torch.tensor(sorted(ending)))
    assert together.num_slots() == alone[0].num_slots()


@pytest.mark.parametrize("policy", COLLAPSING)
def test_a_row_that_was_emptied_takes_a_prompt_again_beside_others(model, policy):
    cache = prompted(model, policy, tokens(2, 5))
    cache.crop(torch.tensor([5, 0]))
    new, real = tokens(2, 4, seed=1), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    logits = model(new, num_loops=3, cache=cache, padding_mask_BT=real)
    same(logits[1], model(new[1:], num_loops=3)[0])
    clean = prompted(model, policy, tokens(2, 5)[:1])
    same(logits[0, :1], model(new[:1, :1], num_loops=3, cache=clean)[0])
    with pytest.raises(ValueError, match="2 tokens in one call after end_prompt"):
        model(tokens(2, 2), num_loops=3, cache=cache)


@pytest.mark.parametrize("policy", COLLAPSING)
def test_reordered_rows_keep_whether_their_prompt_has_ended(model, policy):
    cache = new_cache(model, policy, batch_size=2)
    model(tokens(2, 4), num_loops=3, cache=cache)
    cache.end_prompt(torch.tensor([1]))
    cache.reorder(torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match="2 tokens in one call"):
        model(tokens(3, 2), num_loops=3, cache=cache)
    real = torch.tensor([[1, 0], [1, 1], [1, 0]])
    assert model(tokens(3, 2), num_loops=3, cache=cache, padding_mask_BT=real).isfinite().all()


def test_end_prompt_of_a_row_without_a_prompt_is_refused(model):
    cache = new_cache(model, "collapse_last", batch_size=2)
    real = torch.tensor([[1, 1], [0, 0]])
    model(tokens(2, 2), num_loops=2, cache=cache, padding_mask_BT=real)
    with pytest.raises(ValueError, match=r"end_prompt of empty rows \[1\]; feed their prompts"):
        cache.end_prompt(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="each from 0 to 1"):
        cache.end_prompt(torch.tensor([2]))
    cache.end_prompt()
    assert model(tokens(2, 1), num_loops=2, cache=cache).isfinite().all()
