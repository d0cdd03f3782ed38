"""What the passes of one call share: their slots, what each yields, and cutting gradients.

The loop over passes itself is in `segment_passes.py`.
Letters: B batch, T query tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from depthdial.cache.contiguous import LoopCache
from depthdial.cache.state import Block, CacheCall
from depthdial.layers.primitives import rms_normalise
from depthdial.layers.state import KVSlot, UncachedSlot
from depthdial.model.call import ForwardContext
from depthdial.model.modulation import EntryModulation


class LoopPass(NamedTuple):
    """What `iterate` yields after each pass.

    rows: user-order indices of the rows in `state_BTD`, deepest first; None for the whole batch.
    num_leaving: rows at the end of `state_BTD` whose last pass this was.
    """

    loop_idx: int
    state_BTD: Tensor
    rows: Tensor | None
    num_leaving: int


LoopObserver = Callable[[int, Tensor, Tensor | None], Tensor | None]
"""(loop_idx, state_BTD, rows) -> None, or a replacement for the state."""


class SlotBinding:
    """The slots of one call: the cache's, or storeless ones without a cache.

    Args: num_slots: token mixers in each block.
    """

    def __init__(
        self, cache: LoopCache | None, call: CacheCall | None, num_slots: dict[Block, int]
    ) -> None:
        self.cache = cache
        self.call = call
        self.num_slots = num_slots

    def slots(
        self, block: Block, *, loop_idx: int = 0, rows: Tensor | None = None
    ) -> tuple[KVSlot, ...]:
        """One slot per token mixer of the block."""
        count = self.num_slots[block]
        if self.cache is None or self.call is None:
            return (UncachedSlot(),) * count
        return self.cache.slots(block, count, loop_idx=loop_idx, rows=rows, call=self.call)

    def stash_slots(self) -> tuple[KVSlot, ...]:
        """Slots of the pass after the last loop that writes what persists."""
        assert self.cache is not None and self.call is not None, "only a cache stashes"
        return self.cache.stash_slots(self.num_slots["core"], call=self.call)


class Begun(NamedTuple):
    """A call whose prelude has run: what `iterate` and `finish` need."""

    h_in_BTD: Tensor
    initial_state_BTD: Tensor
    ctx: ForwardContext
    binding: SlotBinding


def enter(injected_BTD: Tensor, h_in_BTD: Tensor, entry: EntryModulation, *, eps: float) -> Tensor:
    """Loop entry z_i (ELR section 3.4); the norm has no gain of its own."""
    normed_BTD = rms_normalise(injected_BTD, eps)
    return (
        entry.raw_gain * injected_BTD
        + entry.norm_gain * normed_BTD
        + entry.shift
        + entry.eta * h_in_BTD
    )


def last_states(passes: Iterable[LoopPass]) -> Tensor:
    """The state of every row after its own last pass, rows in the order given to the loops."""
    leaving_parts, order = [], None
    for done in passes:
        order = done.rows if done.loop_idx == 0 else order
        if done.num_leaving:
            leaving_parts.append(done.state_BTD[done.state_BTD.shape[0] - done.num_leaving :])
    if order is None:
        return leaving_parts[0]
    # The shallowest rows left first, so the parts stand in reverse of the deepest-first order.
    return torch.cat(leaving_parts[::-1])[torch.argsort(order)]


def rows_without_grad(
    no_grad_loops: int | Tensor, loop_idx: int, rows: Tensor | None
) -> Tensor | None:
    """Which rows no gradient enters in this pass: one mark for all or one per active row; None for
    no row."""
    if isinstance(no_grad_loops, int):
        return torch.tensor([True]) if loop_idx < no_grad_loops else None
    marks = loop_idx < (no_grad_loops if rows is None else no_grad_loops[rows])
    return marks if bool(marks.any()) else None
