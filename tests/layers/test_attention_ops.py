"""Attention products against a softmax written out, over every kind of spec."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthdial.layers import attention_ops
from depthdial.layers.attention_ops import AttentionSpec, attention, choose_attention

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH = 4, 2, 6
SCALE = WIDTH**-0.5


def spec_of(case: dict, *, impl="sdpa", dtype=torch.float64) -> AttentionSpec:
    """A spec from plain lists; `cached` says how many tokens of each row came before."""
    real = None if case["real"] is None else torch.tensor(case["real"])
    documents = None if case["documents"] is None else torch.tensor(case["documents"])
    batch, num_queries = case["shape"]
    if case["cached"] is None:
        return AttentionSpec(
            num_queries, num_queries, dtype, impl, is_token_BT=real, source_is_token_BS=real,
            document_ids_BT=documents, source_document_ids_BS=documents, window=case["window"],
        )  # fmt: skip
    before_B = torch.tensor(case["cached"])
    is_token_BT = torch.ones(batch, num_queries, dtype=torch.bool) if real is None else real
    place_BT = before_B[:, None] + is_token_BT.long().cumsum(1) - 1
    num_sources = int((before_B + is_token_BT.sum(1)).max())
    place_BT = place_BT.masked_fill(~is_token_BT, num_sources + 3)
    source_ids = None
    if documents is not None:
        generator = torch.Generator().manual_seed(0)
        source_ids = torch.randint(0, 2, (batch, num_sources + 4), generator=generator)
        source_ids = source_ids.scatter(1, place_BT, documents)[:, :num_sources]
    return AttentionSpec(
        num_queries, num_sources, dtype, impl, place_BT=place_BT, is_token_BT=is_token_BT,
        document_ids_BT=documents, source_document_ids_BS=source_ids, window=case["window"],
    )  # fmt: skip


@st.composite
def cases(draw) -> dict:
    batch, num_queries = draw(st.integers(1, 3)), draw(st.integers(1, 9))

    def table(values):
        row = st.lists(values, min_size=num_queries, max_size=num_queries)
        return draw(st.none() | st.lists(row, min_size=batch, max_size=batch))

    rows = st.lists(st.integers(0, 5), min_size=batch, max_size=batch)
    case = {
        "shape": (batch, num_queries),
        "real": table(st.booleans()),
        "documents": table(st.integers(0, 2)),
        "window": draw(st.none() | st.integers(1, 6)),
        "cached": draw(st.none() | rows),
    }
    if case["cached"] is not None and case["real"] is not None:
        # A cached call reads at least one token.
        case["real"][0][0] = True
    return case


def slow_allowed(case: dict, spec: AttentionSpec) -> torch.Tensor:
    """Pair by pair, from the words of `AttentionSpec`."""
    batch, num_queries = case["shape"]
    allowed = torch.zeros(batch, num_queries, spec.num_sources, dtype=torch.bool)
    for b in range(batch):
        for t in range(num_queries):
            real = case["real"] is None or case["real"][b][t]
            place = t if spec.place_BT is None else int(spec.place_BT[b, t])
            for s in range(spec.num_sources):
                source_real = True
                if spec.source_is_token_BS is not None:
                    source_real = bool(spec.source_is_token_BS[b, s])
                same = True
                if case["documents"] is not None:
                    same = int(spec.source_document_ids_BS[b, s]) == case["documents"][b][t]
                near = True
                if spec.window is not None:
                    between = range(s, min(place, spec.num_sources - 1))
                    if spec.source_is_token_BS is None:
                        distance = place - s
                    else:
                        distance = sum(bool(spec.source_is_token_BS[b, x + 1]) for x in between)
                    near = distance < spec.window
                allowed[b, t, s] = real and source_real and same and near and s <= place
    return allowed


def slow_attention(q, k, v, allowed):
    """Row by row, head by head; 0 for a query without keys."""
    y = torch.zeros_like(q)
    per_group = HEADS // GROUPS
    for b in range(len(q)):
        for t in range(q.shape[1]):
            keys = allowed[b, t].nonzero()[:, 0]
            for head in range(HEADS):
                if len(keys):
                    scores = k[b, keys, head // per_group] @ q[b, t, head] * SCALE
                    y[b, t, head] = scores.softmax(0) @ v[b, keys, head // per_group]
    return y


def inputs_of(case: dict, spec: AttentionSpec, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    batch, num_queries = case["shape"]

    def random(tokens, heads):
        return torch.randn(batch, tokens, heads, WIDTH, generator=generator, dtype=dtype)

    return (
        random(num_queries, HEADS),
        random(spec.num_sources, GROUPS),
        random(spec.num_sources, GROUPS),
    )


@settings(max_examples=60)
@given(cases())
def test_pairs_are_those_of_the_words_whole_and_in_chunks(case):
    spec = spec_of(case)
    wanted = slow_allowed(case, spec)
    found = spec.allowed(0, spec.num_queries, device=CPU).expand(wanted.shape)
    assert torch.equal(found, wanted)
    for start in range(spec.num_queries):
        first, last = spec.sources_of(start, start + 1)
        part = spec.allowed(start, start + 1, first=first, last=last, device=CPU)
        assert torch.equal(
            part.expand(len(wanted), 1, -1), wanted[:, start : start + 1, first:last]
        )
        outside = wanted[:, start].clone()
        outside[:, first:last] = False
        assert not outside.any()


@settings(max_examples=60)
@given(cases())
def test_positions_count_the_tokens_that_may_be_attended_to(case):
    spec = spec_of({**case, "window": None})
    wanted = (spec.allowed(0, spec.num_queries, device=CPU).sum(-1) - 1).clamp(min=0)
    found = spec.default_positions(CPU)
    real = torch.ones(case["shape"], dtype=torch.bool)
    if case["real"] is not None:
        real = torch.tensor(case["real"])
    assert torch.equal(found.expand(case["shape"])[real], wanted.expand(case["shape"])[real])


@settings(max_examples=40)
@given(cases(), st.sampled_from(["explicit", "sdpa", "chunks", "flex"]))
def test_every_product_equals_the_softmax_written_out(case, product):
    spec = spec_of(case, impl="sdpa" if product == "chunks" else product)
    q, k, v = inputs_of(case, spec)
    wanted = slow_attention(q, k, v, slow_allowed(case, spec))
    # In chunks: no table is made beforehand, and three pairs fit into one.
    ready = spec if product == "chunks" else spec.ready(CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_ops, "CHUNK_PAIRS", 3 if product == "chunks" else 2**20)
        found = attention(q, k, v, spec=ready, scale=SCALE)
    assert (found - wanted).abs().max() <= 1e-10


@pytest.mark.parametrize("cached", [None, [3, 0]])
def test_gradients_through_chunks_are_those_of_the_whole_table(cached, monkeypatch):
    case = {
        "shape": (2, 8), "real": [[True] * 8, [False] + [True] * 7],
        "documents": [[0, 0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 6, 6, 6]], "window": None,
        "cached": cached,
    }  # fmt: skip
    spec, found = spec_of(case), []
    for ready, pairs in ((spec.ready(CPU), 2**20), (spec, 16)):
        monkeypatch.setattr(attention_ops, "CHUNK_PAIRS", pairs)
        inputs = [x.requires_grad_() for x in inputs_of(case, spec)]
        attention(*inputs, spec=ready, scale=SCALE).square().sum().backward()
        found.append([x.grad for x in inputs])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), slice(0, 2)])
@pytest.mark.parametrize("keeps_table", [True, False])
def test_narrowing_a_spec_is_making_it_of_those_rows(rows, keeps_table):
    case = {
        "shape": (3, 5), "real": [[True] * 5, [False, True, True, True, True], [True] * 5],
        "documents": [[0, 0, 1, 1, 1], [2] * 5, [3, 3, 3, 4, 4]], "window": 3, "cached": None,
    }  # fmt: skip
    whole = spec_of(case)
    narrowed = (whole.ready(CPU) if keeps_table else whole).narrow(rows)
    q, k, v = (x[rows] for x in inputs_of(case, whole))
    wanted = attention(*inputs_of(case, whole), spec=whole.ready(CPU), scale=SCALE)[rows]
    torch.testing.assert_close(
        attention(q, k, v, spec=narrowed, scale=SCALE), wanted, rtol=0, atol=1e-12
    )


def test_narrowing_keeps_what_all_rows_share():
    spec = AttentionSpec(3, 3, torch.float32, "explicit").ready(CPU)
    assert spec.narrow(torch.tensor([2, 0])).table.bias_BTS is spec.table.bias_BTS


@pytest.mark.parametrize("keeps_table", [True, False])
def test_left_out_tokens_are_not_attended_to(keeps_table):
    case = {
        "shape": (2, 4), "real": None, "documents": None, "window": None, "cached": [3, 2],
    }  # fmt: skip
    spec = spec_of(case)
    missing = torch.zeros(2, spec.num_sources, dtype=torch.bool)
    missing[0, 1] = missing[1, 0] = True
    q, k, v = inputs_of(case, spec)
    wanted = slow_attention(q, k, v, slow_allowed(case, spec) & ~missing[:, None])
    spec = (spec.ready(CPU) if keeps_table else spec).without(missing)
    assert (attention(q, k, v, spec=spec, scale=SCALE) - wanted).abs().max() <= 1e-10


def test_a_table_is_kept_only_while_it_is_small(monkeypatch):
    window = AttentionSpec(64, 64, torch.float32, window=8)
    assert window.ready(CPU).table is not None
    monkeypatch.setattr(attention_ops, "CHUNK_PAIRS", 64 * 64 - 1)
    assert window.ready(CPU).table is None
    assert AttentionSpec(64, 64, torch.float32).ready(CPU).table is None


def test_fully_masked_queries_are_zero_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for impl in ("explicit", "sdpa"):
            real = torch.zeros(2, 3, dtype=torch.bool)
            spec = AttentionSpec(3, 3, dtype, impl, is_token_BT=real, source_is_token_BS=real)
            q, k, v = inputs_of({"shape": (2, 3)}, spec, dtype)
            assert not attention(q, k, v, spec=spec.ready(CPU), scale=SCALE).any()


def test_flex_is_chosen_on_cuda_alone_and_where_a_table_would_be_needed(monkeypatch):
    monkeypatch.setattr(attention_ops, "has_flex", lambda: True)

    def choose(device_type, is_plain):
        return choose_attention(
            torch.float32, num_source_tokens=64, device_type=device_type, is_plain=is_plain
        )

    assert choose("cuda", False) == "flex"
    assert choose("cuda", True) == choose("cpu", False) == "sdpa"
    monkeypatch.setattr(attention_ops, "has_flex", lambda: False)
    assert choose("cuda", False) == "sdpa"


def test_a_spec_says_what_it_is_without_its_table():
    spec = AttentionSpec(4, 4, torch.float32, "explicit")
    assert spec.ready(CPU).table is not None
    assert repr(spec.ready(CPU)) == repr(spec)
    assert replace(spec, window=2).is_plain is False
