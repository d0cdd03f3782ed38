"""Packed rows: nothing lost, nothing leaking, every row a pure function of its number."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthdial.data.packing import IGNORE, DataState, PackedText, iterate_batches
from depthdial.data.synthetic import PointerPrograms

RECORDED_ORDER = [[6, 1, 5, 2], [7, 4, 3, 0], [7, 3, 5, 6], [4, 0, 2, 1]]
LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=8)


def packed(shards, **settings):
    """Rows of a model of our own convention: end-of-text opens a document."""
    return PackedText(shards, **{"opening_id": shards.eos_id} | settings)


def equal(left, right):
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


@st.composite
def sources(draw, memory_shards):
    lengths = draw(LENGTHS)
    context = draw(st.integers(1, sum(lengths) - 1))
    isolate = draw(st.booleans())
    return packed(
        memory_shards(lengths),
        context=context,
        seed=draw(st.integers(0, 2**63 - 1)),
        isolate_documents=isolate,
    )


def input_stream(source, length):
    """The first `length` input tokens of the stream."""
    epochs = -(-length // source.epoch_tokens) + 1
    rows = -(-epochs * source.epoch_tokens // source.context)
    return source.rows(0, rows).tokens_BT.flatten().tolist()[:length]


@given(data=st.data())
def test_every_token_of_every_epoch_is_an_input_exactly_once(memory_shards, data):
    source = data.draw(sources(memory_shards))
    total = source.epoch_tokens
    stream = input_stream(source, 3 * total)
    for epoch in range(3):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))


@given(data=st.data())
def test_documents_stay_whole_in_every_epoch(memory_shards, data):
    source = data.draw(sources(memory_shards))
    total, lengths = source.epoch_tokens, source.shards.lengths.tolist()
    starts = {sum(lengths[:i]): length for i, length in enumerate(lengths)}
    stream = input_stream(source, 2 * total)
    place = 0
    while place < 2 * total:
        length = starts[stream[place]]
        assert stream[place : place + length] == list(range(stream[place], stream[place] + length))
        place += length


@given(data=st.data(), first=st.integers(0, 50), count=st.integers(1, 5))
def test_rows_are_pure_in_their_number(memory_shards, data, first, count):
    """A fresh source asked for one row at a time agrees with one asked for all."""
    source = data.draw(sources(memory_shards))
    together = source.rows(first, count)
    for i in reversed(range(count)):
        fresh = packed(
            source.shards,
            context=source.context,
            seed=source.seed,
            isolate_documents=source.isolate_documents,
        )
        alone = fresh.rows(first + i, 1)
        assert equal(alone, [None if part is None else part[i : i + 1] for part in together])


@given(data=st.data())
def test_targets_are_the_next_tokens_of_the_stream(memory_shards, data):
    source = data.draw(sources(memory_shards))
    batch = source.rows(0, 12)
    stream_T, targets_T = batch.tokens_BT.flatten(), batch.targets_BT.flatten()
    assert torch.equal(targets_T[:-1], stream_T[1:])


@given(data=st.data())
def test_end_of_text_opens_the_document_after_it(memory_shards, data):
    """A document's first token is predicted from the end-of-text before it, and from no more."""
    lengths = data.draw(LENGTHS)
    context = data.draw(st.integers(1, sum(lengths) - 1))
    source = packed(memory_shards(lengths), context=context, seed=7)
    batch = source.rows(0, 12)
    starts = {sum(lengths[:i]) for i in range(len(lengths))}
    opens_BT = torch.tensor([[int(t) in starts for t in row] for row in batch.targets_BT])
    change_BT = batch.document_ids_BT[:, 1:] != batch.document_ids_BT[:, :-1]
    assert torch.equal(change_BT, opens_BT[:, 1:])


def test_without_isolation_there_are_no_document_ids(memory_shards):
    source = packed(memory_shards([5, 6]), context=4, seed=0, isolate_documents=False)
    batch = source.rows(0, 2)
    assert batch.document_ids_BT is None and batch.padding_mask_BT is None


def test_one_document_repeated_is_told_apart_from_itself(memory_shards):
    """At an epoch end a document can follow itself; it must not attend to its earlier copy."""
    batch = packed(memory_shards([4]), context=3, seed=0).rows(1, 1)
    assert batch.tokens_BT.tolist() == [[3, 0, 1]]
    assert batch.document_ids_BT.tolist() == [[0, 0, 0]]
    assert batch.targets_BT.tolist() == [[0, 1, 2]]
    earlier = packed(memory_shards([4]), context=3, seed=0).rows(0, 2)
    assert earlier.document_ids_BT.tolist() == [[0, 0, 0], [0, 0, 0]]
    wide = packed(memory_shards([4]), context=2, seed=0).rows(1, 1)
    assert wide.tokens_BT.tolist() == [[2, 3]]
    assert wide.document_ids_BT.tolist() == [[0, 1]]


def test_epochs_and_seeds_have_different_orders(memory_shards):
    shards = memory_shards([2] * 50)
    orders = [packed(shards, context=50, seed=seed).rows(0, 4).tokens_BT for seed in (0, 1)]
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0][:2], orders[0][2:])


def test_document_order_of_a_seed_is_the_recorded_one(memory_shards):
    """Old runs must resume on new versions: the order may never change."""
    source = packed(memory_shards([2] * 8), context=8, seed=3)
    assert (source.rows(0, 4).tokens_BT[:, ::2] // 2).tolist() == RECORDED_ORDER


def test_batch_types_are_int64(memory_shards):
    batch = packed(memory_shards([5, 6]), context=4, seed=0).rows(0, 2)
    assert {part.dtype for part in batch if part is not None} == {torch.int64}


@given(data=st.data(), batch_size=st.integers(1, 4), stop=st.integers(0, 10))
def test_resuming_anywhere_equals_the_uninterrupted_run(memory_shards, data, batch_size, stop):
    source = data.draw(sources(memory_shards))
    whole = iterate_batches(source, batch_size, DataState())
    batches = [next(whole) for _ in range(stop + 5)]
    state = batches[stop - 1][1] if stop else DataState()
    state = DataState.from_dict(state.to_dict())
    resumed = iterate_batches(source, batch_size, state)
    for expected, expected_state in batches[stop:]:
        batch, state = next(resumed)
        assert equal(batch, expected)
        assert state == expected_state


def test_a_state_set_eight_steps_before_an_epoch_end_crosses_it(memory_shards):
    source = packed(memory_shards([7, 11, 5, 9, 13, 3] * 20), context=6, seed=5)
    batch_size = 4
    steps_per_epoch = source.epoch_tokens // (source.context * batch_size)
    start = DataState((steps_per_epoch - 8) * batch_size)
    whole = iterate_batches(source, batch_size, DataState())
    expected = [next(whole) for _ in range(steps_per_epoch + 8)][steps_per_epoch - 8 :]
    resumed = iterate_batches(source, batch_size, start)
    found = [next(resumed) for _ in range(16)]
    assert all(equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(found, expected, strict=True))
    assert (start.epoch(source), found[-1][1].epoch(source)) == (0, 1)


def test_a_source_that_never_repeats_stays_in_epoch_zero():
    assert DataState(10**9).epoch(PointerPrograms(0)) == 0


@pytest.mark.parametrize(
    "values",
    [{}, {"next_row": -1}, {"next_row": 1.0}, {"next_row": True}, {"next_row": 0, "x": 1}, 3],
)
def test_bad_state_is_refused(values):
    with pytest.raises(ValueError, match="next_row"):
        DataState.from_dict(values)


def test_batch_size_zero_is_refused_at_the_call(memory_shards):
    with pytest.raises(ValueError, match="batch_size=0"):
        iterate_batches(PointerPrograms(0), 0, DataState())


def test_text_shorter_than_one_row_is_refused_with_both_numbers(memory_shards):
    message = "has 8 tokens, but one row of context 8 needs 9. .*at most 7"
    with pytest.raises(ValueError, match=message):
        packed(memory_shards([8]), context=8, seed=0)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True])
def test_bad_seed_is_refused(memory_shards, seed):
    with pytest.raises(ValueError, match="seed="):
        packed(memory_shards([8]), context=2, seed=seed)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0)])
def test_bad_row_range_is_refused(memory_shards, first, count):
    with pytest.raises(ValueError, match="first_row >= 0 and num_rows >= 1"):
        packed(memory_shards([8]), context=2, seed=0).rows(first, count)


# ---- what opens a document

OPENS, ENDS = 90, 91


@pytest.fixture
def two_documents(memory_shards):
    """Documents of 3 and 4 tokens, the last one of each end-of-text."""
    shards = memory_shards([3, 4])
    tokens = shards.tokens.copy()
    tokens[[2, 6]] = ENDS
    return dataclasses.replace(shards, tokens=tokens, eos_id=ENDS, vocab_size=100)


def test_f13_every_document_is_opened_by_the_token_that_the_model_expects(two_documents):
    """Opened by end-of-text in training and by its own token in use, a healed model knew the
    first token of a document in training only."""
    own = packed(two_documents, context=6, seed=0)
    other = packed(two_documents, context=6, seed=0, opening_id=OPENS)
    ours, theirs = own.rows(0, 4), other.rows(0, 4)
    assert torch.equal(ours.targets_BT, theirs.targets_BT)
    assert torch.equal(ours.document_ids_BT, theirs.document_ids_BT)
    is_opening = ours.tokens_BT == ENDS
    assert is_opening.sum() >= 5
    assert torch.equal(theirs.tokens_BT, ours.tokens_BT.masked_fill(is_opening, OPENS))


def test_f13_without_an_opening_token_a_first_token_is_not_scored(two_documents):
    own = packed(two_documents, context=6, seed=0).rows(0, 4)
    none = packed(two_documents, context=6, seed=0, opening_id=None).rows(0, 4)
    is_opening = own.tokens_BT == ENDS
    assert torch.equal(none.targets_BT, own.targets_BT.masked_fill(is_opening, IGNORE))
    assert torch.equal(none.tokens_BT, own.tokens_BT)
    # The end-of-text stays with the document that it ends, and the next one does not see it.
    whole = ~is_opening[:, 0]
    assert whole.sum() >= 2
    ids, ours, is_opening = (
        x[whole] for x in (none.document_ids_BT, own.document_ids_BT, is_opening)
    )
    assert torch.equal(ids[~is_opening], ours[~is_opening])
    assert (ids[is_opening] == ours[is_opening] - 1).all()


def test_f13_rows_with_another_opening_are_other_data(two_documents):
    prints = {
        packed(two_documents, context=6, seed=0, opening_id=opening).fingerprint
        for opening in (ENDS, OPENS, None)
    }
    assert len(prints) == 3 and two_documents.fingerprint in prints
