"""One optimizer step: whole depth slices in, one gradient, one update.

Which slice runs how many loops is data here (`depth_schedule.py` decides); where rows come from
and what is written down is the business of `pretrain.py`.
Letters: B rows, T tokens, D model width.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from depthdial.data.packing import Batch
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.schedule import NumLoops
from depthdial.train.losses import DepthLosses, count_targets, step_loss_share, token_losses
from depthdial.train.optim import Optimizers

Precision = Literal["fp32", "bf16"]
# Every (rows, dtype, grad mode) of a block is one graph; hitting the limit is an error, never a
# silent return to eager speed.
RECOMPILE_LIMIT = 64


class LossModule(nn.Module):
    """What a data-parallel wrapper wraps: rows and loop counts in, token losses out."""

    def __init__(self, model: LoopedLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, num_loops: NumLoops) -> Tensor:
        """Negative log-likelihood of every target in nats, 0 where none is scored, [B, T] fp32."""
        x_BTD = self.model.trunk(
            batch.tokens_BT,
            num_loops=num_loops,
            padding_mask_BT=batch.padding_mask_BT,
            document_ids_BT=batch.document_ids_BT,
        )
        return self.read_out(x_BTD, batch.targets_BT)

    def read_out(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Head and loss together: one graph when compiled."""
        return token_losses(self.model.head(x_BTD), targets_BT)


class BlockCompiler:
    """torch.compile per block: prelude, one pass of the core, coda, head with loss.

    One pass is one graph, so a new loop count needs no new compilation. Outside `active()` the
    model runs eagerly.
    """

    def __init__(self, loss_module: LossModule) -> None:
        model = loss_module.model
        self._blocks = [
            (model, "prelude", torch.compile(model.prelude)),
            (model, "loop", torch.compile(model.loop)),
            (model, "coda", torch.compile(model.coda)),
            (loss_module, "read_out", torch.compile(loss_module.read_out)),
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the compiled blocks in place of the eager ones."""
        with torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True
        ):
            for module, name, block in self._blocks:
                setattr(module, name, block)
            try:
                yield
            finally:
                for module, name, _ in self._blocks:
                    delattr(module, name)


def make_compiler(loss_module: LossModule, *, wanted: bool) -> BlockCompiler | None:
    """A compiler if wanted and possible; without a C++ compiler, eager and a warning."""
    if not wanted:
        return None
    candidates = [os.environ.get("CXX", "g++"), "clang++"]
    if loss_module.model.embedding.weight.device.type == "cpu" and not any(
        shutil.which(name) for name in candidates
    ):
        warnings.warn(
            f"train.compile needs a C++ compiler, and none of {candidates} was found; training "
            "runs eagerly, which is slower and gives the same results up to rounding.",
            stacklevel=2,
        )
        return None
    return BlockCompiler(loss_module)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Fields: loss: token mean over all slices, nats; loss_by_loops: the same per loop count;
    num_targets: tokens that carried loss; grad_norm: before clipping.
    """

    loss: float
    loss_by_loops: dict[int, float]
    num_targets: int
    grad_norm: float


def train_step(
    loss_module: LossModule,
    batch: Batch,
    optimizers: Optimizers,
    *,
    loops_per_slice: Sequence[int],
    is_mixed: bool,
    micro_batch_size: int,
    precision: Precision,
) -> StepResult:
    """Accumulate the gradient of the token-mean loss over the global batch, clip, update.

    Args:
        batch: the global batch; its rows are cut into as many equal slices as `loops_per_slice`
            has entries.
        is_mixed: pass one loop count per row even where they happen to agree, so that compiled
            blocks see one kind of input.
        micro_batch_size: rows per forward, whole slices; changes memory, not the result.
    """
    device = loss_module.model.embedding.weight.device
    step_targets = count_targets(batch.targets_BT)
    rows_per_slice = len(batch.tokens_BT) // len(loops_per_slice)
    losses = DepthLosses()
    optimizers.zero_grad()
    for start in range(0, len(batch.tokens_BT), micro_batch_size):
        part = take_rows(batch, start, start + micro_batch_size, device=device)
        first_slice = start // rows_per_slice
        last_slice = (start + micro_batch_size) // rows_per_slice
        loops = loops_per_slice[first_slice:last_slice]
        with autocast(device, precision):
            nll_BT = loss_module(part, loops_of_rows(loops, rows_per_slice, is_mixed=is_mixed))
        step_loss_share(nll_BT, step_targets=step_targets).backward()
        losses.add(nll_BT, part.targets_BT, loops_per_slice=loops)
    grad_norm = optimizers.clip_gradients()
    optimizers.step()
    return StepResult(losses.mean(), losses.mean_by_loops(), step_targets, grad_norm)


def loops_of_rows(loops: Sequence[int], rows_per_slice: int, *, is_mixed: bool) -> NumLoops:
    """One int for equal slices, else one entry per row."""
    if not is_mixed and len(set(loops)) == 1:
        return loops[0]
    return torch.tensor(loops).repeat_interleave(rows_per_slice)


def take_rows(batch: Batch, start: int, end: int, *, device: torch.device) -> Batch:
    """Rows [start, end) on a device."""
    return Batch(*(None if t is None else t[start:end].to(device) for t in batch))


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """bf16 matrix products over fp32 weights and state, or plain fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


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
            nll_BT = loss_module(part, num_loops)
        losses.add(nll_BT, part.targets_BT, loops_per_slice=(num_loops,))
    return losses.mean()
