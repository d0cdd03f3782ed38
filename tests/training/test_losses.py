"""Token losses, token weights across micro-batches and slices, sums per loop count."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthdial.data.packing import IGNORE, Batch
from depthdial.training.losses import (
    DepthLosses,
    count_targets,
    step_loss_share,
    token_losses,
    total_weight,
    weighted,
)


def random_batch(*, rows=4, tokens=5, vocab=11, seed=0):
    """Logits and targets with about a third of the targets masked, at least one in row 0."""
    generator = torch.Generator().manual_seed(seed)
    logits_BTV = torch.randn(rows, tokens, vocab, generator=generator)
    targets_BT = torch.randint(vocab, (rows, tokens), generator=generator)
    targets_BT[torch.rand(rows, tokens, generator=generator) < 0.35] = IGNORE
    targets_BT[0, 0] = 1
    return logits_BTV, targets_BT


def rows_of(targets_BT, weights_BT=None):
    """A batch of which only the targets and their weights matter."""
    return Batch(torch.zeros_like(targets_BT), targets_BT, weights_BT=weights_BT)


def logits_with_losses(losses):
    """Two-token vocabulary: logits [1, T, 2] whose loss on target 0 is as given."""
    losses_T = torch.tensor(losses, dtype=torch.float64)
    logits_TV = torch.stack([torch.zeros_like(losses_T), torch.log(torch.expm1(losses_T))], dim=-1)
    return logits_TV[None].float()


def test_token_losses_are_the_negative_log_probability_of_the_target():
    logits_BTV, targets_BT = random_batch()
    nll_BT = token_losses(logits_BTV, targets_BT)
    log_probabilities = torch.log_softmax(logits_BTV.double(), dim=-1)
    for row in range(4):
        for t in range(5):
            target = int(targets_BT[row, t])
            expected = 0.0 if target == IGNORE else -float(log_probabilities[row, t, target])
            assert float(nll_BT[row, t]) == pytest.approx(expected, abs=1e-6)


def test_b45_uniform_logits_cost_the_log_of_the_vocabulary():
    targets_BT = torch.tensor([[3, IGNORE, 96]])
    nll_BT = token_losses(torch.zeros(1, 3, 97), targets_BT)
    assert nll_BT.tolist() == [pytest.approx([math.log(97), 0.0, math.log(97)])]


def test_bf16_logits_give_float32_losses_as_exact_as_their_float32_copy():
    logits_BTV, targets_BT = random_batch(vocab=500)
    nll_BT = token_losses(logits_BTV.bfloat16(), targets_BT)
    assert nll_BT.dtype == torch.float32
    assert torch.equal(nll_BT, token_losses(logits_BTV.bfloat16().float(), targets_BT))


def test_losses_stay_float32_inside_autocast():
    logits_BTV, targets_BT = random_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll_BT = token_losses(logits_BTV, targets_BT)
    assert torch.equal(nll_BT, token_losses(logits_BTV, targets_BT))


def test_b25_loss_of_a_step_is_the_token_mean_not_the_mean_of_means():
    """A has three targets of loss 1, B one of loss 5: 2.0, and not 3.0."""
    logits = [logits_with_losses([1.0, 1.0, 1.0, 9.0]), logits_with_losses([5.0, 9.0, 9.0, 9.0])]
    targets = [torch.tensor([[0, 0, 0, IGNORE]]), torch.tensor([[0, IGNORE, IGNORE, IGNORE]])]
    step_targets = sum(count_targets(part) for part in targets)
    shares = [
        step_loss_share(token_losses(part, target), step_weight=step_targets)
        for part, target in zip(logits, targets, strict=True)
    ]
    assert step_targets == 4
    assert float(sum(shares)) == pytest.approx(2.0, abs=1e-6)
    whole = step_loss_share(token_losses(torch.cat(logits), torch.cat(targets)), step_weight=4)
    assert float(whole) == pytest.approx(2.0, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), rows_per_micro_batch=st.sampled_from([1, 2, 4]))
def test_b25_gradients_of_micro_batches_add_up_to_the_single_batch(seed, rows_per_micro_batch):
    """Rows run different loop counts of one weight, as depth slices do."""
    inputs_BTV, targets_BT = random_batch(rows=8, seed=seed)
    step_targets = count_targets(targets_BT)
    weight_VV = torch.eye(11) + 0.01 * torch.arange(121.0).view(11, 11) / 121
    loops_per_row = [1, 1, 2, 2, 3, 3, 4, 4]

    def gradient(cuts):
        parameter = weight_VV.clone().requires_grad_()
        for rows in cuts:
            logits = []
            for row in rows:
                state = inputs_BTV[row : row + 1]
                for _ in range(loops_per_row[row]):
                    state = torch.tanh(state @ parameter)
                logits.append(state)
            nll_BT = token_losses(torch.cat(logits), targets_BT[list(rows)])
            step_loss_share(nll_BT, step_weight=step_targets).backward()
        return parameter.grad

    whole = gradient([range(8)])
    cut = gradient([range(r, r + rows_per_micro_batch) for r in range(0, 8, rows_per_micro_batch)])
    assert float((whole - cut).abs().max()) <= 1e-6


def test_b25_fully_masked_micro_batch_adds_nothing():
    logits_BTV = torch.randn(2, 3, 7).requires_grad_()
    targets_BT = torch.full((2, 3), IGNORE)
    nll_BT = token_losses(logits_BTV, targets_BT)
    step_loss_share(nll_BT, step_weight=5).backward()
    assert torch.equal(nll_BT, torch.zeros(2, 3))
    assert torch.equal(logits_BTV.grad, torch.zeros(2, 3, 7))
    losses = DepthLosses()
    losses.add(nll_BT, rows_of(targets_BT), loops_per_slice=[2])
    losses.add(torch.ones(1, 3), rows_of(torch.zeros(1, 3, dtype=torch.long)), loops_per_slice=[1])
    assert losses.mean() == 1.0
    assert losses.mean_by_loops() == {1: 1.0}


def test_step_without_targets_is_refused():
    with pytest.raises(ValueError, match="at least one target"):
        step_loss_share(torch.zeros(1, 3), step_weight=0)


def test_masked_targets_are_neither_counted_nor_scored():
    logits_BTV, targets_BT = random_batch()
    nll_BT = token_losses(logits_BTV, targets_BT)
    assert count_targets(targets_BT) == int((targets_BT >= 0).sum())
    assert (nll_BT[targets_BT < 0] == 0).all()


def test_mismatched_shapes_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3, 7\).*\(2, 4\)"):
        token_losses(torch.zeros(2, 3, 7), torch.zeros(2, 4, dtype=torch.long))


def test_depth_losses_keep_loop_counts_apart_and_weight_by_targets():
    losses = DepthLosses()
    nll_BT = torch.tensor([[1.0, 3.0], [5.0, 0.0], [2.0, 2.0], [8.0, 8.0]])
    targets_BT = torch.tensor([[0, 0], [0, IGNORE], [0, 0], [0, 0]])
    losses.add(nll_BT, rows_of(targets_BT), loops_per_slice=[1, 3, 1, 2])
    assert losses.per_slice() == [(1, 4.0, 2), (3, 5.0, 1), (1, 4.0, 2), (2, 16.0, 2)]
    assert losses.mean_by_loops() == {1: 2.0, 2: 8.0, 3: 5.0}
    assert losses.mean() == pytest.approx(29 / 7)


def test_depth_losses_do_not_depend_on_the_micro_batch():
    logits_BTV, targets_BT = random_batch(rows=8)
    nll_BT = token_losses(logits_BTV, targets_BT)
    loops = [1, 4, 4, 2]
    whole, cut = DepthLosses(), DepthLosses()
    whole.add(nll_BT, rows_of(targets_BT), loops_per_slice=loops)
    for slice_idx in range(4):
        rows = slice(2 * slice_idx, 2 * slice_idx + 2)
        cut.add(nll_BT[rows], rows_of(targets_BT[rows]), loops_per_slice=[loops[slice_idx]])
    assert whole.per_slice() == cut.per_slice()


def test_depth_losses_keep_no_graph():
    nll_BT = torch.ones(2, 3, requires_grad=True) * 2
    losses = DepthLosses()
    losses.add(nll_BT, rows_of(torch.zeros(2, 3, dtype=torch.long)), loops_per_slice=[1, 2])
    assert losses.mean() == 2.0
    assert not any(sums_S.requires_grad for _, sums_S, _ in losses._parts)


def test_rows_that_do_not_divide_into_slices_are_refused():
    with pytest.raises(ValueError, match="3 rows do not divide into 2"):
        DepthLosses().add(
            torch.zeros(3, 2), rows_of(torch.zeros(3, 2, dtype=torch.long)), loops_per_slice=[1, 2]
        )


def test_mean_without_any_target_is_refused():
    with pytest.raises(ValueError, match="no target"):
        DepthLosses().mean()


def test_token_weights_of_one_are_no_weights_and_of_zero_are_masked_targets():
    logits_BTV, targets_BT = random_batch()
    nll_BT = token_losses(logits_BTV, targets_BT)

    def share(batch):
        return float(step_loss_share(weighted(nll_BT, batch), step_weight=total_weight(batch)))

    plain = share(rows_of(targets_BT))
    assert share(rows_of(targets_BT, torch.ones(4, 5))) == pytest.approx(plain, abs=1e-6)
    weights_BT = torch.ones(4, 5)
    weights_BT[1:] = 0.0
    assert share(rows_of(targets_BT, weights_BT)) == pytest.approx(
        float(nll_BT[0].sum()) / count_targets(targets_BT[:1]), abs=1e-6
    )


def test_token_weights_weigh_the_loss_of_their_token():
    """Losses 1 and 5 at weights 3 and 1 have the mean 2; sums by loops follow."""
    nll_BT, targets_BT = torch.tensor([[1.0], [5.0]]), torch.zeros(2, 1, dtype=torch.long)
    batch = rows_of(targets_BT, torch.tensor([[3.0], [1.0]]))
    losses = DepthLosses()
    losses.add(nll_BT, batch, loops_per_slice=[1, 2])
    assert losses.mean() == 2.0
    assert losses.mean_by_loops() == {1: 1.0, 2: 5.0}


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_token_weights_that_are_no_weights_are_refused(wrong):
    batch = rows_of(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[1.0, wrong]]))
    with pytest.raises(ValueError, match="token weights must be finite and at least 0"):
        total_weight(batch)
