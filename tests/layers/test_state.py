"""Attention products, masks and contiguous slots."""

import pytest
import torch

from depthdial.cache.slots import ReadOnlySlot
from depthdial.cache.uncached import GivenKV, RecordingSlot, UncachedSlot
from depthdial.layers.attention_ops import (
    EXPLICIT_MAX_SOURCE_TOKENS,
    AttentionSpec,
    AttentionTable,
    attention,
    blocked_score,
    choose_attention,
    narrow_rows,
)

IMPLS = ("explicit", "sdpa")
SCALE = 0.3


def spec_from(allowed_BTS, *, impl="sdpa", dtype=torch.float32):
    """A spec whose table says who may attend to whom, pair by pair."""
    bias_BTS = torch.zeros(allowed_BTS.shape, dtype=dtype)
    bias_BTS = bias_BTS.masked_fill(~allowed_BTS, blocked_score(dtype))[:, None]
    table = AttentionTable(bias_BTS, allowed_BTS.any(dim=-1))
    _, num_queries, num_sources = allowed_BTS.shape
    places_BT = torch.zeros(1, num_queries, dtype=torch.int64)
    return AttentionSpec(num_queries, num_sources, dtype, impl, place_BT=places_BT, table=table)


def qkv(batch, tokens, sources, *, heads=4, groups=2, width=6, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads), (sources, groups), (sources, groups))
    return [
        torch.randn(batch, length, count, width, generator=generator).to(dtype)
        for length, count in shapes
    ]


def one_query_at_a_time(q, k, v, allowed_BTS):
    """Softmax over the allowed keys of one query of one head; 0 if there are none."""
    y = torch.zeros_like(q)
    per_group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            keys = allowed_BTS[b, t].nonzero()[:, 0]
            for head in range(q.shape[2]):
                if len(keys):
                    scores = k[b, keys, head // per_group] @ q[b, t, head] * SCALE
                    y[b, t, head] = scores.softmax(0) @ v[b, keys, head // per_group]
    return y


def random_allowed(batch, tokens, sources, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(batch, tokens, sources, generator=generator) < 0.6
    allowed[:, :, 0] = True
    return allowed


# ---- products


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_attention_equals_one_query_at_a_time(impl, heads, groups):
    q, k, v = qkv(2, 3, 5, heads=heads, groups=groups)
    allowed = random_allowed(2, 3, 5)
    spec = spec_from(allowed, impl=impl, dtype=torch.float32)
    y = attention(q, k, v, spec=spec, scale=SCALE)
    assert y.shape == q.shape
    torch.testing.assert_close(y, one_query_at_a_time(q, k, v, allowed), rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_causal_attention_equals_one_query_at_a_time(impl):
    q, k, v = qkv(2, 6, 6)
    spec = AttentionSpec(6, 6, torch.float32, impl).ready(torch.device("cpu"))
    allowed = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    y = attention(q, k, v, spec=spec, scale=SCALE)
    torch.testing.assert_close(y, one_query_at_a_time(q, k, v, allowed), rtol=0, atol=1e-6)


@pytest.mark.parametrize("grouped", [True, False])
def test_explicit_and_fused_attention_have_equal_gradients(grouped):
    allowed = random_allowed(2, 4, 4)
    gradients = {}
    for impl in IMPLS:
        inputs = [t.requires_grad_() for t in qkv(2, 4, 4, groups=2 if grouped else 4)]
        spec = spec_from(allowed, impl=impl, dtype=torch.float32)
        attention(*inputs, spec=spec, scale=SCALE).square().sum().backward()
        gradients[impl] = [t.grad for t in inputs]
    torch.testing.assert_close(gradients["explicit"], gradients["sdpa"], rtol=0, atol=1e-5)


def test_explicit_attention_in_bf16_is_close_to_fp32():
    q, k, v = qkv(2, 8, 8, dtype=torch.bfloat16)
    allowed = torch.ones(2, 8, 8, dtype=torch.bool).tril()
    spec = spec_from(allowed, impl="explicit", dtype=torch.bfloat16)
    y = attention(q, k, v, spec=spec, scale=SCALE)
    assert y.dtype == torch.bfloat16
    expected = one_query_at_a_time(q.float(), k.float(), v.float(), allowed)
    assert (y.float() - expected).abs().max() < 0.05


# ---- masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_fully_masked_query_gives_zero_and_finite_gradients(impl, dtype):
    allowed = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    allowed[0, 1] = False
    inputs = [t.requires_grad_() for t in qkv(1, 3, 3, dtype=dtype)]
    y = attention(*inputs, spec=spec_from(allowed, impl=impl, dtype=dtype), scale=SCALE)
    assert torch.equal(y[0, 1], torch.zeros_like(y[0, 1]))
    assert y[0, 0].count_nonzero() > 0
    y.float().square().sum().backward()
    assert all(bool(torch.isfinite(t.grad).all()) for t in inputs)
    assert inputs[0].grad[0, 1].count_nonzero() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_whose_every_query_is_masked_gives_zero(impl):
    q, k, v = qkv(2, 3, 3)
    spec = spec_from(torch.zeros(2, 3, 3, dtype=torch.bool), impl=impl, dtype=torch.float32)
    y = attention(q, k, v, spec=spec, scale=SCALE)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_blocked_key_has_exactly_no_influence_however_large_its_score(impl, dtype):
    q, k, v = qkv(1, 1, 4, dtype=dtype)
    allowed = torch.tensor([[[True, True, False, True]]])
    spec = spec_from(allowed, impl=impl, dtype=dtype)
    before = attention(q, k, v, spec=spec, scale=SCALE)
    k[0, 2], v[0, 2] = 1e4, 1e4
    assert torch.equal(attention(q, k, v, spec=spec, scale=SCALE), before)


def test_narrowing_a_mask_keeps_the_named_rows_in_their_order():
    allowed = random_allowed(3, 2, 4)
    spec = spec_from(allowed, impl="sdpa", dtype=torch.float32)
    rows = torch.tensor([2, 0])
    expected = spec_from(allowed[rows], impl="sdpa", dtype=torch.float32)
    narrowed = spec.narrow(rows)
    assert torch.equal(narrowed.table.bias_BTS, expected.table.bias_BTS)
    assert torch.equal(narrowed.table.has_key_BT, expected.table.has_key_BT)
    assert narrowed.impl == "sdpa"


def test_narrowing_keeps_a_mask_that_the_whole_batch_shares():
    spec = AttentionSpec(3, 3, torch.float32, "explicit").ready(torch.device("cpu"))
    assert spec.narrow(torch.tensor([2, 0])).table.bias_BTS is spec.table.bias_BTS
    plain = AttentionSpec(3, 3, torch.float32)
    assert plain.narrow(torch.tensor([1])).table is None
    assert narrow_rows(None, torch.tensor([1])) is None


@pytest.mark.parametrize("impl", IMPLS)
def test_a_mask_without_some_sources_is_that_of_fewer_allowed_ones(impl):
    allowed = random_allowed(2, 3, 4)
    missing = torch.tensor([[False, True, False, False], [False, False, True, True]])
    spec = spec_from(allowed, impl=impl, dtype=torch.float32)
    expected = spec_from(allowed & ~missing[:, None], impl=impl, dtype=torch.float32)
    assert torch.equal(spec.without(missing).table.bias_BTS, expected.table.bias_BTS)
    assert torch.equal(spec.without(missing).table.has_key_BT, spec.table.has_key_BT)


@pytest.mark.parametrize(
    ("dtype", "sources", "device_type", "expected"),
    [
        (torch.bfloat16, EXPLICIT_MAX_SOURCE_TOKENS, "cpu", "explicit"),
        (torch.bfloat16, EXPLICIT_MAX_SOURCE_TOKENS + 1, "cpu", "sdpa"),
        (torch.bfloat16, 8, "cuda", "sdpa"),
        (torch.float32, 8, "cpu", "sdpa"),
        (torch.float32, EXPLICIT_MAX_SOURCE_TOKENS + 1, "cpu", "sdpa"),
    ],
)
def test_explicit_attention_is_chosen_for_short_bf16_on_cpu_only(
    dtype, sources, device_type, expected
):
    assert choose_attention(dtype, num_source_tokens=sources, device_type=device_type) == expected


# ---- slots


def test_uncached_slot_attends_over_the_call_alone():
    q, k, v = qkv(2, 4, 4)
    spec = AttentionSpec(4, 4, torch.float32, "sdpa").ready(torch.device("cpu"))
    expected = attention(q, k, v, spec=spec, scale=SCALE)
    assert torch.equal(UncachedSlot().attend(q, k, v, spec=spec, scale=SCALE), expected)


def test_recording_slot_keeps_what_it_attended_over():
    q, k, v = qkv(2, 4, 4)
    spec = AttentionSpec(4, 4, torch.float32, "sdpa").ready(torch.device("cpu"))
    slot = RecordingSlot()
    y = slot.attend(q, k, v, spec=spec, scale=SCALE)
    assert torch.equal(y, attention(q, k, v, spec=spec, scale=SCALE))
    assert slot.k is k and slot.v is v


def test_given_keys_and_values_are_attended_over_and_nothing_else():
    q, k, v = qkv(2, 4, 4)
    spec = AttentionSpec(4, 4, torch.float32, "sdpa").ready(torch.device("cpu"))
    expected = attention(q, k, v, spec=spec, scale=SCALE)
    slot = ReadOnlySlot(GivenKV(k, v))
    assert slot.is_read_only
    assert torch.equal(slot.attend(q, None, None, spec=spec, scale=SCALE), expected)
    assert torch.equal(GivenKV(k, v).attend(q, spec=spec, scale=SCALE), expected)
    assert UncachedSlot(GivenKV(k, v)).shared is not None
