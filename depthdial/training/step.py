"""One optimizer step: whole depth slices in, one gradient, one update; and compilation.

Which slice runs how many loops is data here (`step_plan.py`), what is minimised is in
`objective.py`; where rows come from and what is written down is the business of `pretrain.py`.
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
from torch import Tensor

from depthdial.config import TimeModulationConfig
from depthdial.config.recipe import ObjectiveConfig
from depthdial.data.packing import Batch
from depthdial.training.loss_module import LossModule
from depthdial.training.losses import DepthLosses, count_targets
from depthdial.training.objective import Objective, TokenTerms, count_positions
from depthdial.training.optim import Optimizers
from depthdial.training.step_plan import StepPlan, plan_rows

Precision = Literal["fp32", "bf16"]
# Every (rows, dtype, grad mode) of a block is one graph; hitting the limit is an error, never a
# silent return to eager speed.
RECOMPILE_LIMIT = 64


class BlockCompiler:
    """torch.compile per block: prelude, one pass of the core, coda, head with loss.

    One pass is one graph, so a new loop count needs no new compilation. A teacher runs eagerly, and
    so does the model outside `active()`.
    """

    def __init__(self, loss_module: LossModule) -> None:
        model = loss_module.model
        self._blocks = [
            (model, "prelude", torch.compile(model.prelude)),
            (model, "loop", torch.compile(model.loop)),
            (model, "coda", torch.compile(model.coda)),
            *(
                (loss_module, name, torch.compile(getattr(loss_module, name)))
                for name in ("read_out", "read_out_compared", "distance")
            ),
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the compiled blocks in place of the eager ones."""
        with torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            # Positions that are scored, of a comparison with a teacher, differ from batch to batch.
            capture_dynamic_output_shape_ops=True,
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

    Fields: loss: cross entropy, token mean over all slices, nats; loss_by_loops: the same per loop
    count; terms: the other terms of the objective before their weights, by name; num_targets:
    tokens that carried loss; grad_norm: before clipping.
    """

    loss: float
    loss_by_loops: dict[int, float]
    terms: dict[str, float]
    num_targets: int
    grad_norm: float


def train_step(
    loss_module: LossModule,
    batch: Batch,
    optimizers: Optimizers,
    *,
    loops_per_slice: Sequence[int] | StepPlan,
    micro_batch_size: int,
    precision: Precision,
    is_mixed: bool = True,
    objective: Objective | None = None,
) -> StepResult:
    """Accumulate the gradient of the objective over the global batch, clip, update.

    Args:
        batch: the global batch; its rows are cut into as many equal slices as the plan has.
        loops_per_slice: a plan, or loop counts alone, which `is_mixed` then goes with.
        micro_batch_size: rows per forward, whole slices; changes memory, not the result.
        objective: terms beside cross entropy; None for none.
    """
    plan = loops_per_slice
    if not isinstance(plan, StepPlan):
        plan = StepPlan.of_loops(plan, is_mixed=is_mixed)
    objective = objective or Objective(loss_module, ObjectiveConfig())
    model = loss_module.model
    device = model.embedding.weight.device
    step_targets, step_positions = count_targets(batch.targets_BT), count_positions(batch)
    rows_per_slice = len(batch.tokens_BT) // len(plan.loops)
    losses, terms_sum = DepthLosses(), _TermSums(step_targets, step_positions)
    optimizers.zero_grad()
    for start in range(0, len(batch.tokens_BT), micro_batch_size):
        part = take_rows(batch, start, start + micro_batch_size, device=device)
        slices = slice(start // rows_per_slice, (start + micro_batch_size) // rows_per_slice)
        rows = plan_rows(
            plan,
            slices,
            rows_per_slice=rows_per_slice,
            is_conditioned=isinstance(model.config.modulation, TimeModulationConfig),
        )
        with autocast(device, precision):
            terms = objective(part, rows)
        share = objective.share(terms, step_targets=step_targets, step_positions=step_positions)
        # All that is trained may act on later loops only; then a step of one loop has no gradient.
        if share.requires_grad:
            share.backward()
        losses.add(terms.nll_BT, part.targets_BT, loops_per_slice=plan.loops[slices])
        terms_sum.add(terms)
    grad_norm = optimizers.clip_gradients()
    optimizers.step()
    return StepResult(
        losses.mean(), losses.mean_by_loops(), terms_sum.means(), step_targets, grad_norm
    )


class _TermSums:
    """Running sums of the terms beside cross entropy over the micro-batches of a step."""

    def __init__(self, step_targets: int, step_positions: int) -> None:
        self._counts = {
            "distill": step_targets,
            "short_loss": step_targets,
            "consistency": step_positions,
        }
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, terms: TokenTerms) -> None:
        values = (terms.divergence_BT, terms.short_nll_BT, terms.distance_BT)
        for name, value_BT in zip(self._counts, values, strict=True):
            if value_BT is not None:
                self._sums.setdefault(name, []).append(value_BT.detach().sum())

    def means(self) -> dict[str, float]:
        """Means over the step's targets or positions, rows without the term counted as zero."""
        return {
            name: sum(float(part) for part in parts) / self._counts[name]
            for name, parts in self._sums.items()
        }


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
