"""Entries of every loop while a row's prompt runs, and one per token after its `end_prompt`.

Rows of one cache may be in their prompt and after it at the same time.
Letters: B rows of the cache, T tokens of a call.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from depthdial.cache.entries import Entries, OneEntry
from depthdial.cache.groups import GroupEntries
from depthdial.cache.protocol import CacheCall
from depthdial.cache.slots import RowsSlot
from depthdial.config import ModelConfig
from depthdial.layers.state import KVSlot


class CollapsingEntries(Entries):
    """Two ways to keep entries over the same buffers, chosen row by row.

    Fields:
        prompt, after: of rows in their prompt, and of the others; what one holds is empty in the
            other, but for group 0, whose buffer both use.
        ended_B: rows after their prompt.
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
        super().__init__(policy, config, num_rows=num_rows, capacity=capacity, device=device)
        self.prompt = GroupEntries(
            policy, config, num_rows=num_rows, capacity=capacity, device=device
        )
        self.after = OneEntry(policy, config, num_rows=num_rows, capacity=capacity, device=device)
        self.after.buffers = self.buffers = self.prompt.buffers
        self.ended_B = torch.zeros(num_rows, dtype=torch.bool)

    def bind_loops(self, num_loops_B: Tensor) -> None:
        self.prompt.bind_loops(num_loops_B)

    def check_call(self, num_new_B: Tensor) -> None:
        most = int(num_new_B.masked_fill(~self.ended_B, 0).max())
        if most > 1:
            raise ValueError(
                f"{most} tokens in one call after end_prompt under {self.policy}: "
                "they would read each other at the wrong loop. Feed one token per call, or "
                "prefill again in a new cache."
            )

    def slots(
        self, layers: Sequence[int], *, loop_idx: int, rows: Tensor | None, call: CacheCall
    ) -> list[KVSlot]:
        every_row = torch.arange(len(self.ended_B)) if rows is None else rows
        has_ended = self.ended_B[every_row]
        if not bool(has_ended.any()):
            return self.prompt.slots(layers, loop_idx=loop_idx, rows=rows, call=call)
        if bool(has_ended.all()):
            return self.after.slots(layers, loop_idx=loop_idx, rows=rows, call=call)
        parts = []
        for entries, chosen in ((self.prompt, ~has_ended), (self.after, has_ended)):
            places = chosen.nonzero()[:, 0]
            slots = entries.slots(layers, loop_idx=loop_idx, rows=every_row[places], call=call)
            parts.append([(places.to(self.device), slot) for slot in slots])
        return [RowsSlot(of_layer) for of_layer in zip(*parts, strict=True)]

    def advance(self, num_new_B: Tensor) -> None:
        self.prompt.advance(num_new_B.masked_fill(self.ended_B, 0))
        super().advance(num_new_B)

    def end_prompt(self, rows: Tensor | None) -> None:
        """Keep one entry of each token of these rows.

        Raises: ValueError for a row without tokens.
        """
        has_prompt_B = ~self.ended_B & (self.lengths_B > 0)
        if rows is None and not bool(self.lengths_B.any()):
            raise ValueError("end_prompt on an empty cache; feed the prompt first.")
        if rows is not None:
            empty = rows[self.lengths_B[rows] == 0].tolist()
            if empty:
                raise ValueError(f"end_prompt of empty rows {empty}; feed their prompts first.")
            named_B = torch.zeros_like(has_prompt_B).index_fill(0, rows, True)
            has_prompt_B = has_prompt_B & named_B
        self.prompt.keep_one(has_prompt_B.nonzero()[:, 0])
        self.ended_B = self.ended_B | has_prompt_B

    def fill(self, rows: Tensor, from_loop: int) -> None:
        self.prompt.fill(rows[~self.ended_B[rows]], from_loop)

    def crop(self, lengths_B: Tensor) -> None:
        super().crop(lengths_B)
        self.prompt.crop(lengths_B)
        self.ended_B = self.ended_B & (self.lengths_B > 0)

    def select(self, rows: Tensor) -> Self:
        selected = copy.copy(self)
        selected.prompt, selected.after = self.prompt.select(rows), copy.copy(self.after)
        selected.after.buffers = selected.buffers = selected.prompt.buffers
        selected.lengths_B, selected.ended_B = self.lengths_B[rows], self.ended_B[rows]
        selected.after.lengths_B = selected.lengths_B
        return selected
