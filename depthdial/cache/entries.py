"""How keys and values of the core's attention layers are kept under one rule: one class each.

`Entries` is what a mechanism has to do; here are the two that keep one entry per token. Those
that keep one per group of loops are in `cache/groups.py`, their list in `cache/policies.py`.
An entry is the key and value of one token in one attention layer of the core.
Letters: B rows of the cache, T tokens of a call. Numbers of rows are on the CPU, where they decide
what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from depthdial.cache.buffers import KVBuffer, WritePlace
from depthdial.cache.protocol import CacheCall
from depthdial.cache.slots import CachedSlot, OverlaySlot, StoredKV, slot_beside_first
from depthdial.config import ModelConfig, cache_rule
from depthdial.layers.state import KVSlot, SharedKV

EXTRA_PASS = -1
"""In place of a loop index: the pass after the loops, of rules with an extra pass."""


class Entries:
    """Entries of all rows of one cache; a subclass says how they are kept.

    Args:
        policy: name; its meaning for the model is `rule`.
        config: of the model.
        num_rows, capacity: rows, and most tokens of each.

    Fields:
        buffers: by attention layer (its place among the core's slots) and group of loops.
        lengths_B: tokens per row that have entries here.
    """

    def __init__(
        self,
        policy: str,
        config: ModelConfig,
        *,
        num_rows: int,
        capacity: int,
        device: torch.device | str,
    ) -> None:
        self.policy, self.rule = policy, cache_rule(policy, config)
        self.config, self.capacity = config, capacity
        self.device = torch.device(device)
        self.buffers: dict[tuple[int, int], KVBuffer] = {}
        self.lengths_B = torch.zeros(num_rows, dtype=torch.int64)

    def bind_loops(self, num_loops_B: Tensor) -> None:
        """The next call runs so many loops. Raises: ValueError where entries forbid it."""

    def check_call(self, num_new_B: Tensor) -> None:
        """The next call brings so many tokens. Raises: ValueError where that is not allowed."""

    def slots(
        self, layers: Sequence[int], *, loop_idx: int, rows: Tensor | None, call: CacheCall
    ) -> list[KVSlot]:
        """A slot per layer for one pass; loop_idx may be EXTRA_PASS.

        Args: rows: of the cache, in the order of the pass; None for all.
        """
        raise NotImplementedError

    def advance(self, num_new_B: Tensor) -> None:
        """Count the call's tokens as stored."""
        self.lengths_B = self.lengths_B + num_new_B

    def end_prompt(self, rows: Tensor | None) -> None:
        """The prompts of these rows are complete, of all rows that have one for None."""

    def fill(self, rows: Tensor, from_loop: int) -> None:
        """Give the newest call's tokens of these rows the entries of loops after `from_loop`."""

    def crop(self, lengths_B: Tensor) -> None:
        """Drop the newest tokens of each row."""
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)

    def select(self, rows: Tensor) -> Self:
        """A copy whose row i is row rows[i]."""
        selected = copy.copy(self)
        on_device = rows.to(self.device)
        selected.buffers = {key: x.select(on_device) for key, x in self.buffers.items()}
        selected.lengths_B = self.lengths_B[rows]
        return selected

    def buffer(self, layer: int, group: int) -> KVBuffer:
        """One buffer, made at first."""
        if (layer, group) not in self.buffers:
            self.buffers[layer, group] = KVBuffer(len(self.lengths_B), self.capacity)
        return self.buffers[layer, group]


def write_place(call: CacheCall, rows: Tensor | None) -> WritePlace:
    """Where some rows of a call, given on the CPU, are written; None for all."""
    index_BT, num_source = call.index_BT, call.num_source_tokens
    if rows is None:
        return WritePlace(call.rows, index_BT, num_source, is_whole=True)
    rows = rows.to(index_BT.device)
    return WritePlace(rows, index_BT[rows], num_source)


class OneEntry(Entries):
    """One entry per token, in group 0: `rule.persists` says which loop's."""

    def slots(
        self, layers: Sequence[int], *, loop_idx: int, rows: Tensor | None, call: CacheCall
    ) -> list[KVSlot]:
        place = write_place(call, rows)
        return [self._slot(self.buffer(layer, 0), place, loop_idx) for layer in layers]

    def _slot(self, buffer: KVBuffer, place: WritePlace, loop_idx: int) -> KVSlot:
        persists = self.rule.persists
        if self.rule.shares_first:
            own = partial(cached_slot, buffer, place)
            first = StoredKV(buffer, place) if loop_idx > 0 else None
            return slot_beside_first(own, first, shares_first=True)
        # The extra pass overwrites what the first loop wrote.
        if loop_idx in (0, EXTRA_PASS) or persists == "last":
            return CachedSlot(buffer, place)
        return OverlaySlot(buffer, place, num_averaged=loop_idx if persists == "mean" else None)


def cached_slot(buffer: KVBuffer, place: WritePlace, shared: SharedKV | None) -> KVSlot:
    """A slot that writes and reads one buffer."""
    return CachedSlot(buffer, place, shared=shared)
