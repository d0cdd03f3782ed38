"""The loop over passes: conditioning, slots, gradient cut, observers, and rows that leave.

What one pass computes is `LoopedLM.loop`; which segments follow each other, `LoopedLM.iterate`.
Letters: B batch, T query tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from depthdial.cache.loop_counts import ActiveRows, NumLoops
from depthdial.layers.state import KVSlot
from depthdial.model.call import ForwardContext
from depthdial.model.carry import LoopCarry, detach_rows
from depthdial.model.modulation import LoopModulation
from depthdial.model.passes import Begun, LoopObserver, LoopPass, rows_without_grad
from depthdial.model.sublayer import Segment

Conditioning = Callable[[int, NumLoops, Tensor | None], LoopModulation]
"""(loop_idx, num_loops, step sizes) -> conditioning of one pass."""


class OnePass(Protocol):
    """What `LoopedLM.loop` computes, for one segment."""

    def __call__(
        self,
        state_BTD: Tensor,
        h_in_BTD: Tensor,
        *,
        mod: LoopModulation,
        slots: tuple[KVSlot, ...],
        carry: LoopCarry,
        ctx: ForwardContext,
    ) -> tuple[Tensor, LoopCarry]: ...


def segment_passes(
    loop: OnePass,
    begun: Begun,
    segment: Segment,
    *,
    conditioning: Conditioning,
    carry: LoopCarry,
    rows_may_stop: bool,
    num_loops: NumLoops,
    steps: Tensor | None,
    no_grad_loops: int | Tensor = 0,
    on_loop: LoopObserver | None = None,
) -> Generator[LoopPass, Tensor | None, None]:
    """Run one segment and yield after each pass; arguments as in `LoopedLM.iterate`.

    Args: carry: handed to the first pass; rows_may_stop: whether `send` is allowed; steps: step
        sizes [1 or B, loops], checked.
    Raises: ValueError for a row that is sent to stop where none may.
    """
    state_BTD, h_in_BTD, ctx = begun.initial_state_BTD, begun.h_in_BTD, begun.ctx
    batch_size = h_in_BTD.shape[0]
    active, loop_idx = ActiveRows(num_loops, batch_size), 0
    if active.rows is not None:
        places = active.rows.to(h_in_BTD.device)
        state_BTD, h_in_BTD, ctx = state_BTD[places], h_in_BTD[places], ctx.narrow(places)
    while active.num_rows:
        rows = active.rows
        row_steps = steps if steps is None or len(steps) == 1 or rows is None else steps[rows]
        without_grad = rows_without_grad(no_grad_loops, loop_idx, rows)
        slots = begun.binding.slots("core", loop_idx=loop_idx, rows=rows)
        mod = conditioning(loop_idx, active.num_loops, row_steps)
        if mod.sublayers is not None:
            mod = mod._replace(sublayers=mod.sublayers[segment.sublayers])
        is_cut = without_grad is not None and bool(without_grad.all())
        with torch.no_grad() if is_cut else nullcontext():
            state_BTD, carry = loop(
                state_BTD,
                h_in_BTD,
                mod=mod,
                slots=slots[segment.mixers],
                carry=carry,
                ctx=ctx,
            )
        if without_grad is not None:
            state_BTD = detach_rows(state_BTD, without_grad)
            carry = carry.detached(without_grad)
        if on_loop is not None:
            replacement_BTD = on_loop(loop_idx, state_BTD, rows)
            state_BTD = state_BTD if replacement_BTD is None else replacement_BTD
        keep = yield LoopPass(loop_idx, state_BTD, rows, active.num_leaving(loop_idx))
        if keep is not None and not rows_may_stop:
            raise ValueError(
                "a row cannot stop between the loops of a core in segments: earlier segments "
                "have run all of theirs. Choose the number of loops beforehand."
            )
        places = active.after(loop_idx, keep)
        if places is not None:
            if isinstance(places, Tensor):
                places = places.to(h_in_BTD.device)
            state_BTD, h_in_BTD = state_BTD[places], h_in_BTD[places]
            ctx, carry = ctx.narrow(places), carry.narrow(places)
        loop_idx += 1
