"""Stored keys and values, and the slots over them, against one query at a time."""

import pytest
import torch

from depthdial.cache.buffers import KVBuffer, WritePlace
from depthdial.cache.slots import (
    CachedSlot,
    Lookup,
    LookupSlot,
    OverlaySlot,
    ReadOnlySlot,
    StoredKV,
)
from depthdial.layers.attention_ops import (
    AttentionSpec,
    AttentionTable,
    attention,
    blocked_score,
)

SCALE = 0.3


def spec_from(allowed_BTS, *, impl="sdpa", dtype=torch.float32):
    """A spec whose table says who may attend to whom, pair by pair."""
    bias_BTS = torch.zeros(allowed_BTS.shape, dtype=dtype)
    bias_BTS = bias_BTS.masked_fill(~allowed_BTS, blocked_score(dtype))[:, None]
    table = AttentionTable(bias_BTS, allowed_BTS.any(dim=-1))
    _, num_queries, num_sources = allowed_BTS.shape
    places_BT = torch.zeros(1, num_queries, dtype=torch.int64)
    return AttentionSpec(num_queries, num_sources, dtype, impl, place_BT=places_BT, table=table)


def qkv(tokens, *, batch=1, seed=0):
    """4 query heads over 2 key heads of 6 channels."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, heads, 6, generator=generator) for heads in (4, 2, 2)]


def place(rows, positions, num_source_tokens):
    index_BT = torch.tensor([positions] * len(rows))
    return WritePlace(torch.tensor(rows), index_BT, num_source_tokens)


def causal(first, last, batch=1):
    """Queries at first..last-1 of `last` positions."""
    allowed = torch.ones(last, last, dtype=torch.bool).tril()[None, first:last]
    return spec_from(allowed.expand(batch, -1, -1), impl="sdpa", dtype=torch.float32)


def filled(tokens, *, capacity=5, seed=3):
    """A buffer of one row with stored tokens, and its keys and values."""
    buffer = KVBuffer(1, capacity)
    _, k, v = qkv(tokens, seed=seed)
    buffer.put(torch.tensor([[0]]), torch.arange(tokens)[None], k=k, v=v)
    return buffer, k, v


def test_cached_slot_attends_over_stored_and_new_tokens_of_its_own_row():
    buffer = KVBuffer(num_rows=3, capacity=5)
    q, k, v = qkv(4)
    expected = attention(q, k, v, spec=causal(0, 4), scale=SCALE)
    for first, last in ((0, 3), (3, 4)):
        slot = CachedSlot(buffer, place([1], list(range(first, last)), last))
        new = [t[:, first:last] for t in (q, k, v)]
        y = slot.attend(*new, spec=causal(first, last), scale=SCALE)
        torch.testing.assert_close(y, expected[:, first:last], rtol=0, atol=1e-6)
    assert buffer.k[[0, 2]].count_nonzero() == 0


def test_attending_twice_at_the_same_position_overwrites():
    """A slot never advances: who calls decides where the next call writes."""
    buffer = KVBuffer(num_rows=1, capacity=2)
    slot = CachedSlot(buffer, place([0], [0], 1))
    for seed in (0, 1):
        q, k, v = qkv(1, seed=seed)
        slot.attend(q, k, v, spec=causal(0, 1), scale=SCALE)
    assert torch.equal(buffer.k[:, :1], k)
    assert torch.equal(buffer.v[:, :1], v)
    assert buffer.k[:, 1:].count_nonzero() == 0


def test_padding_goes_to_the_bin_that_no_read_returns():
    buffer = KVBuffer(num_rows=1, capacity=3)
    _, k, v = qkv(2)
    buffer.put(torch.tensor([[0]]), torch.tensor([[0, 3]]), k=k, v=v)
    stored_k, stored_v = buffer.read(torch.tensor([0]), 3)
    assert torch.equal(stored_k[0, 0], k[0, 0])
    assert stored_k[0, 1:].count_nonzero() == 0
    assert stored_v[0, 1:].count_nonzero() == 0


def test_buffer_bytes_count_keys_values_and_the_bin():
    buffer = KVBuffer(num_rows=2, capacity=3)
    assert buffer.num_bytes() == 0
    _, k, v = qkv(1, batch=2)
    buffer.put(torch.tensor([[0], [1]]), torch.zeros(2, 1, dtype=torch.int64), k=k, v=v)
    assert buffer.num_bytes() == 2 * (2 * (3 + 1) * 2 * 6) * 4


def test_an_average_is_the_mean_of_all_that_joined_it():
    buffer = KVBuffer(1, 2)
    row, position = torch.tensor([[0]]), torch.tensor([[1]])
    entries = [qkv(1, seed=seed)[1:] for seed in range(3)]
    buffer.put(row, position, k=entries[0][0], v=entries[0][1])
    for count, (k, v) in enumerate(entries[1:], start=1):
        buffer.average(row, position, k=k, v=v, num_averaged=count)
    for stored, given in zip((buffer.k, buffer.v), zip(*entries, strict=True), strict=True):
        torch.testing.assert_close(stored[:, 1:2], torch.stack(given).mean(0))


def test_an_average_keeps_the_stored_dtype():
    buffer = KVBuffer(1, 1)
    _, k, v = (t.bfloat16() for t in qkv(1))
    place_ = (torch.tensor([[0]]), torch.tensor([[0]]))
    buffer.put(*place_, k=k, v=v)
    buffer.average(*place_, k=k, v=v, num_averaged=1)
    assert torch.equal(buffer.k[:, :1], k)


def test_selected_rows_are_copies_in_the_order_given():
    buffer = KVBuffer(2, 1)
    _, k, v = qkv(1, batch=2)
    buffer.put(torch.tensor([[0], [1]]), torch.zeros(2, 1, dtype=torch.int64), k=k, v=v)
    selected = buffer.select(torch.tensor([1, 1, 0]))
    assert selected.num_rows == 3
    assert torch.equal(selected.k[:, 0], k[[1, 1, 0], 0])
    buffer.k.zero_()
    assert torch.equal(selected.v[:, 0], v[[1, 1, 0], 0])
    assert selected.k.count_nonzero() > 0
    assert KVBuffer(2, 1).select(torch.tensor([0])).num_bytes() == 0


def test_read_only_slot_reads_what_another_wrote_and_takes_no_keys():
    buffer, k, v = filled(3)
    q, new_k, new_v = qkv(1)
    slot = ReadOnlySlot(StoredKV(buffer, place([0], [2], 3)))
    assert slot.is_read_only
    y = slot.attend(q, None, None, spec=causal(2, 3), scale=SCALE)
    assert torch.equal(y, attention(q, k, v, spec=causal(2, 3), scale=SCALE))
    with pytest.raises(AssertionError, match="read-only"):
        slot.attend(q, new_k, new_v, spec=causal(2, 3), scale=SCALE)


def test_cached_slot_hands_on_the_view_that_it_shares():
    first, k, v = filled(3)
    where = place([0], [2], 3)
    slot = CachedSlot(KVBuffer(1, 5), where, shared=StoredKV(first, where))
    q, _, _ = qkv(1)
    y = slot.shared.attend(q, spec=causal(2, 3), scale=SCALE)
    assert torch.equal(y, attention(q, k, v, spec=causal(2, 3), scale=SCALE))
    assert slot.buffer.k is None


@pytest.mark.parametrize("capacity", [3, 5])
def test_overlay_slot_reads_its_own_entries_and_stores_nothing(capacity):
    buffer, k, v = filled(3, capacity=capacity)
    q, own_k, own_v = qkv(1)
    slot = OverlaySlot(buffer, place([0], [2], 3))
    y = slot.attend(q, own_k, own_v, spec=causal(2, 3), scale=SCALE)
    both = [torch.cat([old[:, :2], own], 1) for old, own in ((k, own_k), (v, own_v))]
    assert torch.equal(y, attention(q, *both, spec=causal(2, 3), scale=SCALE))
    assert torch.equal(buffer.k[:, :3], k)


def test_overlay_slot_on_an_empty_buffer_reads_its_own_entries():
    q, k, v = qkv(2)
    buffer = KVBuffer(1, 2)
    y = OverlaySlot(buffer, place([0], [0, 1], 2)).attend(q, k, v, spec=causal(0, 2), scale=SCALE)
    assert torch.equal(y, attention(q, k, v, spec=causal(0, 2), scale=SCALE))
    assert buffer.k.count_nonzero() == 0


def test_overlay_slot_keeps_padding_out_of_what_it_reads():
    """Row of 2 stored tokens, a call of padding and one real token at position 2."""
    buffer, k, v = filled(2)
    q, own_k, own_v = qkv(2)
    where = WritePlace(torch.tensor([0]), torch.tensor([[5, 2]]), 3)
    allowed = torch.tensor([[[False] * 3, [True] * 3]])
    spec = spec_from(allowed, impl="sdpa", dtype=torch.float32)
    y = OverlaySlot(buffer, where).attend(q, own_k, own_v, spec=spec, scale=SCALE)
    both = [torch.cat([old, own[:, 1:]], 1) for old, own in ((k, own_k), (v, own_v))]
    expected = attention(q[:, 1:], *both, spec=causal(2, 3), scale=SCALE)
    torch.testing.assert_close(y[:, 1:], expected, rtol=0, atol=1e-6)
    assert y[:, 0].count_nonzero() == 0


def test_overlay_slot_can_join_the_stored_mean():
    buffer, k, v = filled(3)
    q, own_k, own_v = qkv(1)
    slot = OverlaySlot(buffer, place([0], [2], 3), num_averaged=1)
    slot.attend(q, own_k, own_v, spec=causal(2, 3), scale=SCALE)
    torch.testing.assert_close(buffer.k[:, 2:3], (k[:, 2:] + own_k) / 2)
    torch.testing.assert_close(buffer.v[:, 2:3], (v[:, 2:] + own_v) / 2)
    assert torch.equal(buffer.k[:, :2], k[:, :2])


def test_lookup_slot_writes_and_reads_row_by_row_and_token_by_token():
    """Two rows of 3 stored tokens in two buffers; row 0 writes buffer 1, row 1 buffer 0."""
    q, own_k, own_v = qkv(1, batch=2)
    buffers, stored = {0: KVBuffer(2, 4), 1: KVBuffer(2, 4)}, {}
    for number, buffer in buffers.items():
        _, k, v = qkv(3, batch=2, seed=10 + number)
        buffer.put(torch.tensor([[0], [1]]), torch.arange(3).expand(2, 3), k=k, v=v)
        stored[number] = (k, v)
    lookup = Lookup(
        writes_B=torch.tensor([1, 0]),
        reads_BS=torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]),
        sources=(0, 1),
        targets=(0, 1),
        missing_BS=torch.tensor([[False] * 4, [False, True, False, False]]),
    )
    slot = LookupSlot(buffers, place([0, 1], [3], 4), lookup=lookup)
    y = slot.attend(q, own_k, own_v, spec=causal(3, 4, batch=2), scale=SCALE)
    for row, tokens in ((0, [(0, 0), (1, 1), (0, 2)]), (1, [(1, 0), (0, 2)])):
        read = [
            torch.stack([stored[number][i][row, position] for number, position in tokens])
            for i in (0, 1)
        ]
        k, v = (
            torch.cat([old, own[row]])[None] for old, own in zip(read, (own_k, own_v), strict=True)
        )
        everything = torch.ones(1, 1, k.shape[1], dtype=torch.bool)
        spec = spec_from(everything, impl="sdpa", dtype=torch.float32)
        expected = attention(q[row : row + 1], k, v, spec=spec, scale=SCALE)
        torch.testing.assert_close(y[row : row + 1], expected, rtol=0, atol=1e-6)
    assert torch.equal(buffers[1].k[0, 3], own_k[0, 0])
    assert torch.equal(buffers[0].k[1, 3], own_k[1, 0])
    assert buffers[0].k[0, 3].count_nonzero() == 0


def test_a_buffer_refuses_another_dtype():
    buffer, k, v = filled(1)
    with pytest.raises(ValueError, match="keep autocast on or off"):
        buffer.put(torch.tensor([[0]]), torch.tensor([[1]]), k=k.bfloat16(), v=v.bfloat16())
