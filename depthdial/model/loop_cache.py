"""Which stored keys and values serve (layer, loop): the named cache policies.

per_loop       one slot per (layer, loop); exact.
collapse_last  per_loop during the prompt; `end_prompt` keeps the last loop's entry of each token.
               Afterwards loop i reads its own entry for the call's token and the kept ones before.
last_step      one slot per layer; every loop overwrites the entries of the call's tokens.

Layers see slots, never this file. Only `LoopedLM` advances a cache.
Letters: B batch, T query tokens, S source tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from depthdial.config import CachePolicy, ModelConfig, nearest_name
from depthdial.layers.state import CachedSlot, KVBuffer
from depthdial.model.schedule import NumLoops

Block = Literal["prelude", "core", "coda"]
# Loop index of the buffer that outlives the loops, under the policies that keep one.
KEPT = -1


@dataclass(frozen=True)
class CacheCall:
    """Where one call's tokens go.

    Fields:
        index_BT: position of each token in its row; the capacity for padding.
        real_BT: False at padding.
        num_source_tokens: S, the longest row after this call.
        num_new_B: real tokens per row.
        document_ids_BT, source_document_ids_BS: of the call [B, T], and of all positions
            [B, capacity + 1]; or None.
    """

    index_BT: Tensor
    real_BT: Tensor
    num_source_tokens: int
    num_new_B: Tensor
    document_ids_BT: Tensor | None
    source_document_ids_BS: Tensor | None


class LoopCache:
    """Keys and values of a batch of sequences at every loop.

    Args:
        config: of the model.
        batch_size: rows.
        capacity: most tokens per row.
        policy: see the module docstring; None for the config's.
        device: of the stored tensors.

    Padding is never stored: rows are compact, whatever side the padding stood on.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int,
        capacity: int,
        policy: CachePolicy | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1 or capacity < 1:
            raise ValueError(
                f"a cache needs batch_size >= 1 and capacity >= 1, got {batch_size}, {capacity}."
            )
        if policy is not None and policy not in get_args(CachePolicy):
            raise ValueError(
                f"unknown cache policy '{policy}'."
                f"{nearest_name(policy, list(get_args(CachePolicy)))}"
            )
        self.policy: CachePolicy = config.loop.cache_policy if policy is None else policy
        self.batch_size = batch_size
        self.capacity = capacity
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._row_loops_B = torch.zeros(batch_size, dtype=torch.int64)
        self._prompt_ended = False
        self._document_ids_BS: Tensor | None = None
        self._buffers: dict[tuple[Block, int, int], KVBuffer] = {}

    def open_call(
        self,
        shape: tuple[int, int],
        *,
        real_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
    ) -> CacheCall:
        """Plan where the tokens of one call go; nothing is stored yet.

        Raises: ValueError if the batch differs, a row would overflow, or a collapsed row gets
            more than one token.
        """
        if shape[0] != self.batch_size:
            raise ValueError(f"the call has {shape[0]} rows, the cache {self.batch_size}.")
        if real_BT is None:
            real_BT = torch.ones(shape, dtype=torch.bool, device=self.lengths_B.device)
        num_new_B = real_BT.sum(dim=1)
        self._check_collapsed(num_new_B)
        ends_B = self.lengths_B + num_new_B
        longest = int(ends_B.max())
        if longest > self.capacity:
            raise ValueError(
                f"a row would hold {longest} tokens; the cache was made for {self.capacity}. "
                "Make it larger, or generate fewer tokens."
            )
        index_BT = self.lengths_B[:, None] + real_BT.long().cumsum(dim=1) - 1
        index_BT = index_BT.masked_fill(~real_BT, self.capacity)
        source_ids_BS = self._with_documents(index_BT, document_ids_BT)
        return CacheCall(index_BT, real_BT, longest, num_new_B, document_ids_BT, source_ids_BS)

    def bind_loops(self, num_loops: NumLoops) -> None:
        """Remember each row's loop count, and refuse a change that has no stored keys.

        Raises: ValueError naming the first row whose earlier tokens ran another loop count.
        """
        wanted_B = torch.as_tensor(num_loops).expand(self.batch_size)
        started_B = self.lengths_B.cpu() > 0
        changed_B = started_B & (wanted_B != self._row_loops_B)
        if not self._keeps_one_entry() and bool(changed_B.any()):
            row = int(changed_B.nonzero()[0])
            raise ValueError(
                f"row {row} of this {self.policy} cache ran {int(self._row_loops_B[row])} loops so "
                f"far and now asks for {int(wanted_B[row])}. Keep the loop count, or start a new "
                "cache."
            )
        self._row_loops_B = wanted_B.clone()

    def slots(
        self, block: Block, num_slots: int, *, loop_idx: int, rows: Tensor | None, call: CacheCall
    ) -> tuple[CachedSlot, ...]:
        """The slots of one pass over a block, bound to rows and positions."""
        index_BT = call.index_BT if rows is None else call.index_BT[rows]
        if rows is None:
            rows = torch.arange(self.batch_size, device=call.index_BT.device)
        stored_idx = KEPT if block == "core" and self._keeps_one_entry() else loop_idx
        return tuple(
            CachedSlot(
                self._buffer(block, slot_idx, stored_idx),
                rows=rows,
                index_BT=index_BT,
                num_source_tokens=call.num_source_tokens,
            )
            for slot_idx in range(num_slots)
        )

    def advance(self, call: CacheCall) -> None:
        """Count the call's tokens as stored; once per call, after the coda."""
        self.lengths_B = self.lengths_B + call.num_new_B
        self._document_ids_BS = call.source_document_ids_BS

    def end_prompt(self) -> None:
        """The prompt of every row is complete: collapse_last keeps the last loop's entries.

        Afterwards a call may bring one token per row only. No effect under other policies.
        Raises: ValueError if no prompt was stored.
        """
        if self.policy != "collapse_last" or self._prompt_ended:
            return
        if not self._buffers:
            raise ValueError("end_prompt on an empty cache; feed the prompt first.")
        by_slot: dict[int, dict[int, KVBuffer]] = {}
        for (block, slot_idx, loop_idx), buffer in self._buffers.items():
            if block == "core":
                by_slot.setdefault(slot_idx, {})[loop_idx] = buffer
        for slot_idx, loops in by_slot.items():
            self._buffers["core", slot_idx, KEPT] = self._last_loops(loops)
            for loop_idx in loops:
                del self._buffers["core", slot_idx, loop_idx]
        self._prompt_ended = True

    def num_slots(self) -> int:
        """Key/value slots allocated so far, over all blocks and loops."""
        return len(self._buffers)

    def num_bytes(self) -> int:
        """Bytes of all stored keys and values."""
        return sum(buffer.num_bytes() for buffer in self._buffers.values())

    def _keeps_one_entry(self) -> bool:
        """Whether the loops of a call share one stored entry per token."""
        return self.policy == "last_step" or self._prompt_ended

    def _buffer(self, block: Block, slot_idx: int, loop_idx: int) -> KVBuffer:
        key = (block, slot_idx, loop_idx)
        if key not in self._buffers:
            self._buffers[key] = KVBuffer(self.batch_size, self.capacity)
        return self._buffers[key]

    def _last_loops(self, loops: dict[int, KVBuffer]) -> KVBuffer:
        """One buffer holding, for each row, the entries of that row's last loop."""
        kept = KVBuffer(self.batch_size, self.capacity)
        kept.k, kept.v = loops[0].k, loops[0].v
        assert kept.k is not None and kept.v is not None, "end_prompt follows a prompt"
        for loop_idx, buffer in sorted(loops.items()):
            rows = (self._row_loops_B == loop_idx + 1).nonzero()[:, 0]
            if loop_idx > 0 and len(rows) and buffer.k is not None and buffer.v is not None:
                kept.k[rows], kept.v[rows] = buffer.k[rows], buffer.v[rows]
        return kept

    def _check_collapsed(self, num_new_B: Tensor) -> None:
        if self._prompt_ended and int(num_new_B.max()) > 1:
            raise ValueError(
                f"{int(num_new_B.max())} tokens in one call after end_prompt under collapse_last: "
                "they would read each other at the wrong loop. Feed one token per call, or "
                "prefill again in a new cache."
            )

    def _with_documents(self, index_BT: Tensor, document_ids_BT: Tensor | None) -> Tensor | None:
        """Document ids of all stored tokens and the call's; all calls give them, or none."""
        started = int(self.lengths_B.max()) > 0
        if started and (document_ids_BT is None) != (self._document_ids_BS is None):
            raise ValueError(
                "document_ids_BT must be given in every call on a cache, or in none of them."
            )
        if document_ids_BT is None:
            return None
        if self._document_ids_BS is None:
            shape = (self.batch_size, self.capacity + 1)
            return document_ids_BT.new_zeros(shape).scatter(1, index_BT, document_ids_BT)
        return self._document_ids_BS.scatter(1, index_BT, document_ids_BT)
