"""Validation during training: the same rows at several loop counts, and which counts those are."""

from __future__ import annotations

import torch

from depthdial.config import ModelConfig
from depthdial.config.training import TrainConfig
from depthdial.data.packing import Batch, RowSource
from depthdial.training.losses import DepthLosses
from depthdial.training.step import LossModule, Precision, RowPlan, autocast, take_rows

ALL_LOOPS_TO = 16
"""Models of at most so many loops are validated at every loop count."""


def validated_loops(config: ModelConfig) -> list[int]:
    """Loop counts of each validation: all; of many, powers of two, the default and the largest.

    All of a thousand would take as long as hundreds of training steps.
    """
    if config.max_loops <= ALL_LOOPS_TO:
        return list(range(1, config.max_loops + 1))
    powers = [1 << exponent for exponent in range(config.max_loops.bit_length())]
    return sorted({*powers, config.num_loops, config.max_loops})


def validate(
    loss_module: LossModule, rows: RowSource, settings: TrainConfig, loops: list[int]
) -> dict[str, float]:
    """`val/loss_k1` and so on: nats per token over the first val_rows rows."""
    batch = rows.rows(0, settings.val_rows)
    return {
        f"val/loss_k{k}": mean_loss(
            loss_module,
            batch,
            num_loops=k,
            rows_per_forward=settings.micro_batch_size or settings.batch_size,
            precision=settings.precision,
        )
        for k in loops
    }


@torch.no_grad()
def mean_loss(
    loss_module: LossModule,
    batch: Batch,
    *,
    num_loops: int,
    rows_per_forward: int,
    precision: Precision,
) -> float:
    """Token-mean loss in nats over a batch at one loop count."""
    device = loss_module.model.embedding.weight.device
    losses = DepthLosses()
    for start in range(0, len(batch.tokens_BT), rows_per_forward):
        part = take_rows(batch, start, start + rows_per_forward, device=device)
        with autocast(device, precision):
            terms = loss_module(part, RowPlan(num_loops))
        losses.add(terms.nll_BT, part, loops_per_slice=(num_loops,))
    return losses.mean()
