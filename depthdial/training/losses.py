"""Token losses and their weights: mixed depth over slices, distillation, shorter paths.

Here lives what turns logits into numbers to differentiate or to log. Which rows run how many
loops is decided in `depth_schedule.py`; running the model is the training step's business.
A path of L loops has steps of 1/L; its short path has M < L loops whose steps are multiples of 1/L
and add up to 1 (arXiv 2602.11451). A model conditioned on time and step size is told them; any
other model just runs M loops.
B rows, T tokens, V vocabulary, S depth slices, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from depthdial.data.packing import IGNORE, Batch
from depthdial.layers.primitives import wide_dtype
from depthdial.training.depth_schedule import PATH_STREAM, RANDOM_BITS, random_bits


def token_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, 0 where the target is IGNORE.

    Logits at position t are compared with `targets_BT[:, t]`: shifting is the data's business.

    Returns: [B, T] float32, float64 for float64 logits.
    Raises: ValueError if the shapes do not belong together.
    """
    if logits_BTV.ndim != 3 or logits_BTV.shape[:2] != targets_BT.shape:
        raise ValueError(
            f"logits of shape {tuple(logits_BTV.shape)} and targets of shape "
            f"{tuple(targets_BT.shape)} do not fit; expected [B, T, V] and [B, T]."
        )
    # fp32: the log of a sum over V bf16 exponentials keeps two digits, less than what one
    # training step changes; bf16 logits themselves are exact in fp32.
    nll_N = F.cross_entropy(
        logits_BTV.to(wide_dtype(logits_BTV.dtype)).flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORE,
        reduction="none",
    )
    return nll_N.view(targets_BT.shape)


def token_divergences(logits_BTV: Tensor, teacher_logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """KL(teacher || student) of each scored position in nats, 0 where the target is IGNORE.

        sum_v p_v (log p_v - log q_v),  p of the teacher, q of the student

    The forward direction: the student must cover everything that the teacher thinks possible.
    Returns: [B, T] as `token_losses`; no gradient reaches the teacher.
    Raises: ValueError if the shapes do not belong together.
    """
    if logits_BTV.shape != teacher_logits_BTV.shape or logits_BTV.shape[:2] != targets_BT.shape:
        raise ValueError(
            f"logits of shapes {tuple(logits_BTV.shape)} (student) and "
            f"{tuple(teacher_logits_BTV.shape)} (teacher) and targets of shape "
            f"{tuple(targets_BT.shape)} do not fit; expected [B, T, V] twice and [B, T]."
        )
    # fp32, as for `token_losses`; only scored positions, to spare V floats for each other one.
    is_scored_BT = targets_BT != IGNORE
    wide = wide_dtype(logits_BTV.dtype)
    student_NV = torch.log_softmax(logits_BTV[is_scored_BT].to(wide), dim=-1)
    teacher_NV = torch.log_softmax(teacher_logits_BTV[is_scored_BT].detach().to(wide), dim=-1)
    divergence_N = F.kl_div(student_NV, teacher_NV, log_target=True, reduction="none").sum(dim=-1)
    return torch.zeros_like(targets_BT, dtype=wide).masked_scatter(is_scored_BT, divergence_N)


def count_targets(targets_BT: Tensor) -> int:
    """Targets that carry loss."""
    return int((targets_BT != IGNORE).sum())


def total_weight(batch: Batch) -> float:
    """Sum of the weights of the targets that carry loss: their number without token weights.

    Raises: ValueError for a weight that is negative or not finite.
    """
    if batch.weights_BT is None:
        return count_targets(batch.targets_BT)
    weights_BT = batch.weights_BT
    if not bool((torch.isfinite(weights_BT) & (weights_BT >= 0)).all()):
        raise ValueError("token weights must be finite and at least 0.")
    return float(torch.where(batch.targets_BT != IGNORE, weights_BT, 0.0).double().sum())


def weighted(values_BT: Tensor, batch: Batch) -> Tensor:
    """Token values times the batch's token weights, if it has some."""
    return values_BT if batch.weights_BT is None else values_BT * batch.weights_BT


def step_loss_share(nll_BT: Tensor, *, step_weight: float) -> Tensor:
    """What one micro-batch adds to the loss of its optimizer step.

    Dividing by the targets of the whole step, not of the micro-batch, makes the shares add up
    to the token mean, whatever the cut into micro-batches and slices. The loop count of a row
    does not change its weight. A micro-batch without targets adds 0 and zero gradients.

    Args:
        step_weight: summed weight of the targets in the whole global batch, over all ranks.

    Raises: ValueError if the step has none.
    """
    if step_weight <= 0:
        raise ValueError(
            f"the targets of the optimizer step weigh {step_weight}; a loss needs at least one "
            f"target that is not {IGNORE}, of a weight above 0. Check the loss mask and the data "
            "of this batch."
        )
    return nll_BT.sum() / step_weight


class DepthLosses:
    """Running loss sums of one optimizer step or one validation, apart for each loop count.

    Keeps no graph. Each slice is summed in float32 on its device, slices in float64 on the CPU.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[tuple[int, ...], Tensor, Tensor]] = []

    def add(self, nll_BT: Tensor, batch: Batch, *, loops_per_slice: Sequence[int]) -> None:
        """Add rows of whole slices, at the batch's token weights.

        Args:
            loops_per_slice: loop count of each slice in row order; the rows are cut into as
                many equal slices.

        Raises: ValueError if the rows do not divide into the slices.
        """
        num_rows, num_slices = len(nll_BT), len(loops_per_slice)
        if num_slices < 1 or num_rows % num_slices:
            raise ValueError(f"{num_rows} rows do not divide into {num_slices} equal slices.")
        # The sums stay on the device; reading them here would wait for it at each micro-batch.
        # One sum per slice, so that neighbours in the micro-batch cannot change its rounding.
        values_BT = weighted(nll_BT.detach(), batch)
        sums_S = torch.stack([s.sum() for s in values_BT.reshape(num_slices, -1)])
        is_target_BT = batch.targets_BT != IGNORE
        counts_S = weighted(is_target_BT, batch).reshape(num_slices, -1).sum(dim=1)
        self._parts.append((tuple(loops_per_slice), sums_S, counts_S))

    def per_slice(self) -> list[tuple[int, float, float]]:
        """(loop count, summed loss in nats, weight of targets) of each slice in the order added."""
        return [
            slice_sums
            for loops, sums_S, counts_S in self._parts
            for slice_sums in zip(loops, sums_S.tolist(), counts_S.tolist(), strict=True)
        ]

    def mean(self) -> float:
        """Token mean over everything added, nats. Raises ValueError without a target."""
        parts = self.per_slice()
        num_targets = sum(count for _, _, count in parts)
        if num_targets == 0:
            raise ValueError("no target was added, so there is no mean loss.")
        return sum(total for _, total, _ in parts) / num_targets

    def mean_by_loops(self) -> dict[int, float]:
        """Token mean for each loop count that had a target, ascending, nats."""
        sums: dict[int, float] = {}
        counts: dict[int, float] = {}
        for loops, total, count in self.per_slice():
            sums[loops] = sums.get(loops, 0.0) + total
            counts[loops] = counts.get(loops, 0) + count
        return {loops: sums[loops] / counts[loops] for loops in sorted(sums) if counts[loops]}


def short_path(seed: int, *, step: int, draw_idx: int, num_loops: int) -> tuple[int, ...]:
    """Step sizes of a short path, in units of 1 / num_loops; empty for a single loop.

        M ~ U{1 .. L-1};  d_j ~ U{1 .. rest - (M - j)} for j < M;  d_M = rest

    with `rest` what the earlier steps left of L. Early steps come out larger.

    Args: draw_idx: of the depth draw within its step; rows that share one share the path.
    """
    if num_loops == 1:
        return ()
    bits = random_bits(
        seed, stream=PATH_STREAM, step=step, draw_idx=draw_idx, count=max(2, num_loops - 1)
    )
    length = _uniform(bits[0], num_loops - 1)
    path: list[int] = []
    rest = num_loops
    for steps_after in range(length - 1, 0, -1):
        path.append(_uniform(bits[len(path) + 1], rest - steps_after))
        rest -= path[-1]
    return (*path, rest)


def stacked_steps(paths: Sequence[Sequence[int]], totals: Sequence[int]) -> Tensor:
    """Step sizes [B, most loops] in float64, zero after each path's last step."""
    steps_BM = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.float64)
    for row, (path, total) in enumerate(zip(paths, totals, strict=True)):
        steps_BM[row, : len(path)] = torch.tensor(path, dtype=torch.float64) / total
    return steps_BM


def squared_distance(long_BTD: Tensor, short_BTD: Tensor) -> Tensor:
    """Mean over channels of the squared difference, [B, T], at least fp32.

    The long path is a constant.
    """
    # fp32: the difference of two close bf16 vectors keeps few correct bits.
    wide = wide_dtype(short_BTD.dtype)
    return (long_BTD.detach().to(wide) - short_BTD.to(wide)).square().mean(dim=-1)


def _uniform(bits: int, count: int) -> int:
    """1..count, equally likely."""
    return 1 + (bits * count >> RANDOM_BITS)
