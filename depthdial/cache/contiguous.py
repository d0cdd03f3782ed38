"""The cache of one batch: contiguous keys and values, recurrent states, routes of the running call.

Prelude and coda run once and keep an entry per token; what the core keeps is up to the rule of the
policy (`config/policies.py`) and its mechanism (`cache/policies.py`). A recurrent layer keeps one
state per loop under every policy, whose size does not depend on the number of tokens. A state
cannot go back to an earlier token: only a snapshot can.
Letters: B batch, T query tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from depthdial.cache.buffers import KVBuffer
from depthdial.cache.entries import EXTRA_PASS, Entries, write_place
from depthdial.cache.loop_counts import NumLoops
from depthdial.cache.policies import MECHANISMS
from depthdial.cache.protocol import Block, CacheCall
from depthdial.cache.slots import CachedSlot, CallRoutes, StateSlot
from depthdial.config import CachePolicy, ModelConfig, cache_rule, slot_kinds
from depthdial.layers.state import Slot, State


class ContiguousCache:
    """Keys, values and states of a batch of sequences at every loop; a `LoopCache`.

    Args:
        config: of the model.
        batch_size: rows.
        capacity: most tokens per row.
        policy: name of a cache policy; None for the config's.
        device: of the stored tensors.

    Padding is never stored: rows are compact, whatever side the padding stood on.
    Raises: ValueError for a policy that is unknown or does not go with the model.
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
        self.policy: CachePolicy = config.loop.cache_policy if policy is None else policy
        self.rule = cache_rule(self.policy, config)
        self.capacity = capacity
        self._config = config
        self._kinds = {block: slot_kinds(layout) for block, layout in config.layouts.items()}
        self._device = torch.device(device)
        self._content = self._empty(batch_size)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.lengths_B)

    @property
    def lengths_B(self) -> Tensor:
        """Tokens stored per row, on the CPU."""
        return self._content.lengths_B

    @property
    def can_roll_back(self) -> bool:
        """Whether tokens that were stored and cropped again leave no trace."""
        return self.rule.can_roll_back and not self._has_states()

    @property
    def exit_obstacle(self) -> str | None:
        """Why a row cannot stop before its last loop; None where it can."""
        if self.rule.counts_from_last:
            return (
                f"cache policy '{self.policy}' counts loops from the last one, which is not known "
                "before a row stops. Use per_loop, last_step, or a policy that counts from the "
                "first."
            )
        if "state" in self._kinds["core"]:
            return (
                "the core has recurrent layers, whose states of the deeper loops would miss the "
                "tokens of a row that stops. Run without a cache, or all loops."
            )
        return None

    def bind_loops(self, num_loops: NumLoops) -> None:
        """Remember each row's loop count, and refuse one that has no stored keys or states.

        Raises: ValueError naming the first row whose earlier tokens ran another loop count
            (where each loop keeps its own) or lack entries that no rule replaces.
        """
        wanted_B = torch.as_tensor(num_loops).expand(self.batch_size)
        if "state" in self._kinds["core"]:
            changed_B = (self.lengths_B > 0) & (wanted_B != self._content.loops_B)
            if bool(changed_B.any()):
                row = int(changed_B.nonzero()[0])
                raise ValueError(
                    f"row {row} ran {int(self._content.loops_B[row])} loops so far and now asks "
                    f"for {int(wanted_B[row])}; recurrent layers have a state of each loop. Keep "
                    "the loop count, or start a new cache."
                )
        self._content.entries.bind_loops(wanted_B)
        self._content.loops_B = wanted_B.clone()

    def open_call(
        self,
        shape: tuple[int, int],
        *,
        is_token_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
    ) -> CacheCall:
        """Plan where the tokens of one call go; nothing is stored yet.

        Raises: ValueError if the batch differs, a row would overflow, or a collapsed row gets
            more than one token.
        """
        if shape[0] != self.batch_size:
            raise ValueError(f"the call has {shape[0]} rows, the cache {self.batch_size}.")
        if is_token_BT is None:
            is_token_BT = torch.ones(shape, dtype=torch.bool, device=self._device)
            num_new_B = torch.full(shape[:1], shape[1])
        else:
            num_new_B = is_token_BT.sum(dim=1).cpu()
        self._content.entries.check_call(num_new_B)
        ends_B = self.lengths_B + num_new_B
        longest = int(ends_B.max())
        if longest > self.capacity:
            raise ValueError(
                f"a row would hold {longest} tokens; the cache was made for {self.capacity}. "
                "Make it larger, or generate fewer tokens."
            )
        index_BT = self.lengths_B.to(self._device)[:, None] + is_token_BT.cumsum(dim=1) - 1
        index_BT = index_BT.masked_fill(~is_token_BT, self.capacity)
        return CacheCall(
            rows=torch.arange(self.batch_size, device=self._device),
            index_BT=index_BT,
            num_source_tokens=longest,
            is_token_BT=is_token_BT,
            num_new_B=num_new_B,
            ends_B=ends_B,
            document_ids_BT=document_ids_BT,
            source_document_ids_BS=self._with_documents(index_BT, document_ids_BT),
        )

    def slots(
        self, block: Block, *, call: CacheCall, loop_idx: int = 0, rows: Tensor | None = None
    ) -> tuple[Slot, ...]:
        """The slots of one pass over a block, one per layer that has one.

        Args: rows: of the cache, in the order of the pass, on the CPU; None for all.
        """
        kinds, content = self._kinds[block], self._content
        keyed = [layer for layer, kind in enumerate(kinds) if kind == "keys"]
        if block == "core":
            found = content.entries.slots(keyed, loop_idx=loop_idx, rows=rows, call=call)
        else:
            place = write_place(call, rows)
            found = [CachedSlot(self._outer_buffer(block, layer), place) for layer in keyed]
        of_layer: dict[int, Slot] = dict(zip(keyed, found, strict=True))
        for layer, kind in enumerate(kinds):
            if kind == "state":
                key = (block, layer, loop_idx)
                of_layer[layer] = StateSlot(
                    content.states, key, rows=rows, num_rows=self.batch_size
                )
            elif kind == "routes":
                # Prelude and coda run once, so nothing of theirs is replayed.
                recorded = call.routes if block == "core" else {}
                of_layer[layer] = CallRoutes(recorded, layer, rows=rows)
        return tuple(of_layer[layer] for layer in range(len(kinds)))

    def extra_slots(self, *, call: CacheCall) -> tuple[Slot, ...]:
        """The slots of the extra pass over the core: it writes what later calls read."""
        assert self.rule.has_extra_pass, f"{self.policy} has no extra pass"
        return self.slots("core", loop_idx=EXTRA_PASS, call=call)

    def advance(self, call: CacheCall) -> None:
        """Count the call's tokens as stored; once per call, after the coda."""
        self._content.entries.advance(call.num_new_B)
        self._content.lengths_B = call.ends_B
        self._content.document_ids_BS = call.source_document_ids_BS

    def end_prompt(self, rows: Tensor | None = None) -> None:
        """The prompts of these rows are complete, of all rows that have one where none are named:
        collapse_* keeps one entry of each of their tokens.

        Afterwards a call may bring such a row one token. No effect under other policies.
        Raises: ValueError for a row without a prompt.
        """
        self._content.entries.end_prompt(None if rows is None else self._checked(rows))

    def fill(self, rows: Tensor, from_loop: int) -> None:
        """Rows stopped after `from_loop` of their newest call: give its tokens the deeper entries.

        They become copies of those of `from_loop`, up to the loop count that was bound, and count
        as entries from then on. No effect under policies where no loop lacks entries, or that say
        what it reads instead.

        Args: rows: of the cache, [n]; from_loop: 0-based.
        Raises: ValueError for a loop beyond those that the rows were to run.
        """
        self._content.entries.fill(rows.cpu(), from_loop)

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i] (beam search); rows may repeat, vanish, or grow.

        Raises: ValueError for rows that do not exist, or none.
        """
        self._content = self._content.select(self._checked(rows))

    def crop(self, lengths: int | Tensor) -> None:
        """Drop the newest tokens of each row; a row that keeps none starts afresh.

        Args: lengths: tokens to keep, for all rows or per row [B].
        Raises: ValueError for a length beyond what is stored, or an earlier one where a recurrent
            state cannot go back to it or a rule has dropped tokens.
        """
        lengths_B = torch.as_tensor(lengths).cpu().expand(self.batch_size).clone()
        stored_B = self.lengths_B
        if bool(((lengths_B < 0) | (lengths_B > stored_B)).any()):
            raise ValueError(
                f"cannot crop rows of {stored_B.tolist()} tokens to {lengths_B.tolist()}; "
                "give at most as many as are stored, and at least 0."
            )
        reason = None
        if self._has_states():
            reason = "a recurrent layer's state cannot go back to an earlier token"
        elif self.rule.stored_tokens is not None:
            reason = f"cache policy '{self.policy}' has dropped earlier tokens"
        if reason is not None and bool(((lengths_B > 0) & (lengths_B < stored_B)).any()):
            raise ValueError(
                f"cannot crop rows of {stored_B.tolist()} tokens to {lengths_B.tolist()}: "
                f"{reason}. Keep all tokens of a row or none, or restore a snapshot."
            )
        if int(lengths_B.max()) == 0:
            self._content = self._empty(self.batch_size)
        else:
            self._content.crop(lengths_B)

    def snapshot(self) -> CacheContent:
        """A copy of everything stored, for `restore`; as large as the cache."""
        return self._content.select(torch.arange(self.batch_size))

    def restore(self, snapshot: CacheContent) -> None:
        """Go back to a snapshot, as often as wanted.

        Raises: ValueError for a snapshot of another kind of cache.
        """
        theirs = (snapshot.entries.policy, snapshot.entries.capacity)
        if theirs != (self.policy, self.capacity):
            raise ValueError(
                f"a snapshot of a {theirs[0]} cache for {theirs[1]} tokens does not go into a "
                f"{self.policy} cache for {self.capacity}."
            )
        self._content = snapshot.select(torch.arange(len(snapshot.lengths_B)))

    def num_slots(self) -> int:
        """Key/value slots allocated so far, over all blocks and loops."""
        return len(self._content.buffers())

    def num_bytes(self) -> int:
        """Bytes of all stored keys, values and recurrent states."""
        keys = sum(buffer.num_bytes() for buffer in self._content.buffers())
        return keys + sum(x.nbytes for state in self._content.states.values() for x in state)

    def _empty(self, num_rows: int) -> CacheContent:
        entries = MECHANISMS[self.rule.mechanism](
            self.policy,
            self._config,
            num_rows=num_rows,
            capacity=self.capacity,
            device=self._device,
        )
        zeros_B = torch.zeros(num_rows, dtype=torch.int64)
        return CacheContent(zeros_B, zeros_B, entries=entries, outer={}, states={})

    def _has_states(self) -> bool:
        return any("state" in kinds for kinds in self._kinds.values())

    def _outer_buffer(self, block: Block, layer: int) -> KVBuffer:
        """One buffer of prelude or coda, made at first."""
        outer = self._content.outer
        if (block, layer) not in outer:
            outer[block, layer] = KVBuffer(self.batch_size, self.capacity)
        return outer[block, layer]

    def _checked(self, rows: Tensor) -> Tensor:
        """Rows of the cache on the CPU. Raises: ValueError for none, or one that does not exist."""
        rows = rows.cpu()
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= self.batch_size:
            raise ValueError(
                f"rows={rows.tolist()}: give at least one row number, each from 0 to "
                f"{self.batch_size - 1}."
            )
        return rows

    def _with_documents(self, index_BT: Tensor, document_ids_BT: Tensor | None) -> Tensor | None:
        """Document ids of all stored tokens and the call's; all calls give them, or none."""
        stored_BS = self._content.document_ids_BS
        started = int(self.lengths_B.max()) > 0
        if started and (document_ids_BT is None) != (stored_BS is None):
            raise ValueError(
                "document_ids_BT must be given in every call on a cache, or in none of them."
            )
        if document_ids_BT is None:
            return None
        if stored_BS is None:
            shape = (self.batch_size, self.capacity + 1)
            return document_ids_BT.new_zeros(shape).scatter(1, index_BT, document_ids_BT)
        return stored_BS.scatter(1, index_BT, document_ids_BT)


@dataclass
class CacheContent:
    """Everything that a contiguous cache stores, all rows together.

    Fields:
        lengths_B: tokens per row; loops_B: loop count that each row's newest call asked for.
        entries: keys and values of the core.
        outer: those of prelude and coda, by block and layer.
        states: recurrent states, by block, layer and loop.
        document_ids_BS: of all tokens; None without documents.
    """

    lengths_B: Tensor
    loops_B: Tensor
    entries: Entries
    outer: dict[tuple[Block, int], KVBuffer]
    states: dict[Hashable, State]
    document_ids_BS: Tensor | None = None

    def buffers(self) -> list[KVBuffer]:
        """All keys and values."""
        return [*self.outer.values(), *self.entries.buffers.values()]

    def select(self, rows: Tensor) -> CacheContent:
        """A copy whose row i is row rows[i]; rows: on the CPU."""
        documents, on_device = self.document_ids_BS, rows.to(self.entries.device)
        return CacheContent(
            lengths_B=self.lengths_B[rows],
            loops_B=self.loops_B[rows],
            entries=self.entries.select(rows),
            outer={key: buffer.select(on_device) for key, buffer in self.outer.items()},
            states={key: tuple(x[on_device] for x in s) for key, s in self.states.items()},
            document_ids_BS=None if documents is None else documents[on_device],
        )

    def crop(self, lengths_B: Tensor) -> None:
        """Drop the newest tokens of each row; states of rows without tokens are zero again."""
        self.lengths_B = lengths_B
        self.entries.crop(lengths_B)
        is_kept_B = (lengths_B > 0).to(self.entries.device)
        self.states = {
            key: tuple(torch.where(is_kept_B.view(-1, *(1,) * (x.ndim - 1)), x, 0) for x in state)
            for key, state in self.states.items()
        }
