"""Padding, positions and documents are honoured, with and without cache, at every depth."""

import pytest
import torch
from toys import MAX_LOOPS, VOCAB, toy_tokens

from depthdial.cache.contiguous import ContiguousCache

ALL_LOOPS = range(1, MAX_LOOPS + 1)


def padded(tokens, left, right, *, pad_id=0):
    """One row with masked pads on both sides, and its mask."""
    row = torch.cat([torch.full((1, left), pad_id), tokens, torch.full((1, right), pad_id)], dim=1)
    mask = torch.zeros(row.shape, dtype=torch.bool)
    mask[:, left : left + tokens.shape[1]] = True
    return row, mask


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
@pytest.mark.parametrize(("left", "right"), [(4, 0), (0, 4), (3, 2)])
def test_b03_pad_ids_never_reach_real_positions(model, num_loops, left, right):
    tokens = toy_tokens(1, 8)
    row, mask = padded(tokens, left, right)
    other = torch.where(mask, row, torch.randint(1, VOCAB, row.shape))
    first = model(row, num_loops=num_loops, padding_mask_BT=mask)[mask]
    second = model(other, num_loops=num_loops, padding_mask_BT=mask)[mask]
    assert (first - second).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_b03_masks_of_every_type_agree(model, dtype):
    row, mask = padded(toy_tokens(1, 8), 2, 1)
    expected = model(row, num_loops=2, padding_mask_BT=mask)
    assert torch.equal(model(row, num_loops=2, padding_mask_BT=mask.to(dtype)), expected)


def test_b03_mask_of_wrong_length_is_refused(model):
    row, mask = padded(toy_tokens(1, 8), 2, 1)
    with pytest.raises(ValueError, match=r"padding_mask_BT has shape \(1, 10\)"):
        model(row, num_loops=2, padding_mask_BT=mask[:, 1:])


def test_b03_additive_mask_is_refused(model):
    row, mask = padded(toy_tokens(1, 8), 2, 1)
    additive = torch.where(mask, 0.0, -1e9)
    with pytest.raises(ValueError, match="besides 0 and 1"):
        model(row, num_loops=2, padding_mask_BT=additive)


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_b04_left_padding_does_not_shift_positions(model, num_loops):
    tokens = toy_tokens(1, 8)
    alone = model(tokens, num_loops=num_loops)[:, -1]
    for pads in range(10):
        row, mask = padded(tokens, pads, 0)
        shifted = model(row, num_loops=num_loops, padding_mask_BT=mask)[:, -1]
        assert (alone - shifted).abs().max() <= 1e-5


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_b04_left_padded_rows_train_as_alone(model, num_loops):
    """Gradients of a loss over the real positions are those of the row without pads."""
    tokens = toy_tokens(1, 8)
    row, mask = padded(tokens, 5, 0)
    grads = []
    for inputs, real in ((tokens, None), (row, mask)):
        with torch.enable_grad():
            logits = model(inputs, num_loops=num_loops, padding_mask_BT=real)
            loss = logits[:, -8:].logsumexp(dim=-1).sum()
            parameter = model.core_stack[0].mixer.q_proj.weight
            grads.append(torch.autograd.grad(loss, parameter)[0])
    assert (grads[0] - grads[1]).abs().max() <= 1e-5 * grads[0].abs().max()


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_b04_padded_prompts_continue_from_the_cache(model, num_loops):
    tokens = toy_tokens(1, 9)
    whole = model(tokens, num_loops=num_loops)[:, -1]
    for left, right in ((3, 0), (0, 3), (2, 2)):
        cache = ContiguousCache(model.config, batch_size=1, capacity=9)
        row, mask = padded(tokens[:, :8], left, right)
        model(row, num_loops=num_loops, cache=cache, padding_mask_BT=mask)
        last = model(tokens[:, 8:], num_loops=num_loops, cache=cache)[:, -1]
        assert (whole - last).abs().max() <= 1e-4


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
def test_rows_of_a_mixed_depth_padded_batch_equal_solo_rows(model, num_loops):
    lengths, depths = [5, 9, 2, 7], torch.tensor([num_loops, 1, 4, 2])
    rows = [toy_tokens(1, n, seed=n) for n in lengths]
    batch = torch.zeros(4, 9, dtype=torch.int64)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = 9 - lengths[i] if i % 2 else 0
        batch[i, start : start + lengths[i]] = row[0]
        mask[i, start : start + lengths[i]] = True
    logits = model(batch, num_loops=depths, padding_mask_BT=mask)
    for i, row in enumerate(rows):
        alone = model(row, num_loops=int(depths[i]))[0]
        assert (logits[i][mask[i]] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("num_loops", ALL_LOOPS)
@pytest.mark.parametrize("cached", [False, True])
def test_altering_a_packed_neighbour_document_changes_nothing(model, num_loops, cached):
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    tokens = toy_tokens(1, 12)
    other = tokens.clone()
    other[:, :5] = (tokens[:, :5] + 1) % VOCAB
    other[:, 9:] = (tokens[:, 9:] + 1) % VOCAB

    def logits(ids):
        if not cached:
            return model(ids, num_loops=num_loops, document_ids_BT=documents)
        cache = ContiguousCache(model.config, batch_size=1, capacity=12)
        pieces = [
            model(ids[:, a:b], num_loops=num_loops, cache=cache, document_ids_BT=documents[:, a:b])
            for a, b in ((0, 7), (7, 8), (8, 12))
        ]
        return torch.cat(pieces, dim=1)

    alone = model(tokens[:, 5:9], num_loops=num_loops)
    assert (logits(tokens)[:, 5:9] - logits(other)[:, 5:9]).abs().max() <= 1e-6
    assert (logits(tokens)[:, 5:9] - alone).abs().max() <= 1e-5


def test_pads_and_documents_together(model):
    tokens = toy_tokens(1, 10)
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 1]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0, 0]])
    logits = model(tokens, num_loops=3, padding_mask_BT=mask, document_ids_BT=documents)
    first, second = model(tokens[:, 2:6], num_loops=3), model(tokens[:, 6:8], num_loops=3)
    assert (logits[:, 2:6] - first).abs().max() <= 1e-5
    assert (logits[:, 6:8] - second).abs().max() <= 1e-5


def test_a_fully_masked_row_gives_finite_logits(model):
    mask = torch.tensor([[True] * 4, [False] * 4])
    assert model(toy_tokens(2, 4), num_loops=2, padding_mask_BT=mask).isfinite().all()


def test_future_tokens_never_reach_earlier_positions(model):
    tokens = toy_tokens(1, 10)
    other = tokens.clone()
    other[:, 6:] = (tokens[:, 6:] + 1) % VOCAB
    change = model(tokens, num_loops=3) - model(other, num_loops=3)
    assert change[:, :6].abs().max() == 0


def test_given_positions_are_used(model):
    tokens = toy_tokens(1, 6)
    spread = torch.arange(6)[None] * 2
    assert not torch.allclose(
        model(tokens, num_loops=2), model(tokens, num_loops=2, positions_BT=spread)
    )
    shifted = model(tokens, num_loops=2, positions_BT=torch.arange(6)[None] + 3)
    assert (model(tokens, num_loops=2) - shifted).abs().max() <= 1e-4
