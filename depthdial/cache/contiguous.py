"""Which stored keys and values serve (layer, loop): the named cache policies.

per_loop       one entry per loop; exact.
collapse_last, collapse_first, collapse_mean
               per_loop during the prompt; `end_prompt` keeps the last or first loop's entry of
               each token, or the mean over its loops. Afterwards loop i reads its own entry for
               the call's token and the kept ones before; the call's is kept by the same rule.
last_step      one entry; every loop overwrites those of the call's tokens.
share_first    one entry, the first loop's; later loops read it for the call's tokens too.
stash_first    one entry, the first loop's, for later calls; in its call a loop reads its own.
stash_last     the same with the entry that an extra pass over the core writes after the loops.
huginn:..., parcae:...
               several loops share entries, or tokens may lack some: `cache/policies.py`.

Layers see slots, never this file. Only `LoopedLM` advances a cache.
Letters: B batch, T query tokens, S source tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthdial.cache.loop_counts import NumLoops
from depthdial.cache.policies import find_entries, group_of
from depthdial.cache.slots import (
    CachedSlot,
    KVBuffer,
    Lookup,
    LookupSlot,
    OverlaySlot,
    StoredKV,
    WritePlace,
)
from depthdial.cache.state import ALL_GROUPS, KEPT, Block, CacheCall, CacheState
from depthdial.config import CachePolicy, CacheRule, ModelConfig, cache_rule
from depthdial.layers.state import KVSlot, ReadOnlySlot


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
        self.policy: CachePolicy = config.loop.cache_policy if policy is None else policy
        self.capacity = capacity
        self._rule = cache_rule(self.policy, config)
        self._shares_first = config.loop.local_window is not None
        self._state = CacheState.empty(
            self.policy, batch_size=batch_size, capacity=capacity, device=device
        )

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.lengths_B)

    @property
    def lengths_B(self) -> Tensor:
        """Tokens stored per row, on the CPU."""
        return self._state.lengths_B

    @property
    def needs_stash_pass(self) -> bool:
        """Whether one more pass over the core, on `stash_slots`, has to follow the loops."""
        return self._rule.has_extra_pass

    @property
    def counts_from_last(self) -> bool:
        """Where a loop's entry goes depends on how many loops there are to be."""
        return self._rule.counts_from_last

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
        device = self._state.device
        if real_BT is None:
            real_BT = torch.ones(shape, dtype=torch.bool, device=device)
            num_new_B = torch.full(shape[:1], shape[1])
        else:
            num_new_B = real_BT.sum(dim=1).cpu()
        self._check_collapsed(num_new_B)
        longest = int((self.lengths_B + num_new_B).max())
        if longest > self.capacity:
            raise ValueError(
                f"a row would hold {longest} tokens; the cache was made for {self.capacity}. "
                "Make it larger, or generate fewer tokens."
            )
        index_BT = self.lengths_B.to(device)[:, None] + real_BT.cumsum(dim=1) - 1
        index_BT = index_BT.masked_fill(~real_BT, self.capacity)
        source_ids_BS = self._with_documents(index_BT, document_ids_BT)
        rows = torch.arange(self.batch_size, device=device)
        place = WritePlace(rows, index_BT, longest, is_whole=True)
        return CacheCall(place, real_BT, num_new_B, document_ids_BT, source_ids_BS)

    def bind_loops(self, num_loops: NumLoops) -> None:
        """Remember each row's loop count, and refuse one that has no stored keys.

        Raises: ValueError naming the first row whose earlier tokens ran another loop count
            (where each loop keeps its own entries) or lack entries that no rule replaces.
        """
        wanted_B = torch.as_tensor(num_loops).expand(self.batch_size)
        if not self._keeps_one() and self._rule.reads_missing == "refuse":
            is_same = torch.equal(wanted_B, self._state.row_loops_B)
            if self._rule.grouping == "loop" and not is_same:
                self._check_unchanged(wanted_B)
            self._check_entries(wanted_B)
        self._state.row_loops_B = wanted_B.clone()

    def slots(
        self, block: Block, num_slots: int, *, loop_idx: int, rows: Tensor | None, call: CacheCall
    ) -> tuple[KVSlot, ...]:
        """The slots of one pass over a block, bound to rows and positions.

        Args: rows: of the cache, in the order of the pass, on the CPU; None for all.
        """
        state, place = self._state, call.narrow(rows)
        if block != "core":
            return self._cached(block, num_slots, 0, place=place)
        if self._keeps_one():
            buffers = [state.buffer("core", i, KEPT) for i in range(num_slots)]
            return tuple(_kept_slot(self._rule, buffer, place, loop_idx) for buffer in buffers)
        if rows is None:
            state.ran_B.fill_(loop_idx + 1)
        else:
            state.ran_B[rows] = loop_idx + 1
        if not self._rule.looks_up:
            state.open_index_BT = call.place.index_BT
            return self._cached("core", num_slots, loop_idx, place=place)
        lookup = self._lookup(loop_idx, rows, call=call, place=place)
        groups = set(lookup.targets + lookup.sources)
        return tuple(
            LookupSlot({g: state.buffer("core", i, g) for g in groups}, place, lookup=lookup)
            for i in range(num_slots)
        )

    def stash_slots(
        self, num_slots: int, *, rows: Tensor | None = None, call: CacheCall
    ) -> tuple[KVSlot, ...]:
        """The slots of the extra pass after the loops: it writes what later calls read."""
        assert self.needs_stash_pass, f"{self.policy} has no extra pass"
        return self._cached("core", num_slots, KEPT, place=call.narrow(rows))

    def advance(self, call: CacheCall) -> None:
        """Count the call's tokens as stored; once per call, after the coda."""
        state = self._state
        if not self._keeps_one():
            self._show_entries()
            least_B = torch.minimum(state.least_B, self._groups_of(state.ran_B))
            state.least_B = torch.where(call.num_new_B > 0, least_B, state.least_B)
        state.lengths_B = self.lengths_B + call.num_new_B
        state.document_ids_BS = call.source_document_ids_BS

    def end_prompt(self) -> None:
        """The prompt of every row is complete: collapse_* keeps one entry of each token.

        Afterwards a call may bring one token per row only. No effect under other policies.
        Raises: ValueError if no prompt was stored.
        """
        if not self._rule.collapses or self._state.prompt_ended:
            return
        if not int(self.lengths_B.max()):
            raise ValueError("end_prompt on an empty cache; feed the prompt first.")
        self._state.keep_one(self._rule.persists)
        self._state.prompt_ended = True

    def fill(self, rows: Tensor, from_loop: int) -> None:
        """Rows stopped after `from_loop` of their newest call: give its tokens the deeper entries.

        They become copies of those of `from_loop`, up to the loop count that was bound, and count
        as entries from then on. No effect under policies where no loop lacks entries, or that say
        what it reads instead.

        Args: rows: of the cache, [n]; from_loop: 0-based.
        Raises: ValueError for a loop beyond those that the rows were to run.
        """
        if not len(rows) or self._keeps_one() or self._rule.reads_missing != "refuse":
            return
        rows = rows.cpu()
        loops_B = self._state.row_loops_B[rows]
        if not 0 <= from_loop < int(loops_B.max()):
            raise ValueError(
                f"from_loop={from_loop}: the rows run {loops_B.tolist()} loops; give the 0-based "
                "loop after which they stopped."
            )
        self._show_entries()
        group = int(group_of(self._rule, from_loop, loops_B)[0])
        self._state.fill(rows, group, num_groups_B=self._groups_of(loops_B))
        ran_B = self._state.ran_B[rows]
        self._state.ran_B[rows] = torch.where(ran_B == from_loop + 1, loops_B, ran_B)

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i] (beam search); rows may repeat, vanish, or grow.

        Raises: ValueError for rows that do not exist, or none.
        """
        rows = rows.cpu()
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= self.batch_size:
            raise ValueError(
                f"rows={rows.tolist()}: give at least one row number, each from 0 to "
                f"{self.batch_size - 1}."
            )
        self._state = self._state.select(rows)

    def crop(self, lengths: int | Tensor) -> None:
        """Drop the newest tokens of each row; an empty cache starts afresh.

        Args: lengths: tokens to keep, for all rows or per row [B].
        Raises: ValueError for a length beyond what is stored.
        """
        lengths_B = torch.as_tensor(lengths).cpu().expand(self.batch_size).clone()
        if bool(((lengths_B < 0) | (lengths_B > self.lengths_B)).any()):
            raise ValueError(
                f"cannot crop rows of {self.lengths_B.tolist()} tokens to {lengths_B.tolist()}; "
                "give at most as many as are stored, and at least 0."
            )
        if int(lengths_B.max()) == 0:
            self._state = CacheState.empty(
                self.policy,
                batch_size=self.batch_size,
                capacity=self.capacity,
                device=self._state.device,
            )
        else:
            self._state.crop(lengths_B)

    def snapshot(self) -> CacheState:
        """A copy of everything stored, for `restore`; as large as the cache."""
        return self._state.select(torch.arange(self.batch_size))

    def restore(self, snapshot: CacheState) -> None:
        """Go back to a snapshot, as often as wanted.

        Raises: ValueError for a snapshot of another kind of cache.
        """
        ours, theirs = (self.policy, self.capacity), (snapshot.policy, snapshot.capacity)
        if ours != theirs:
            raise ValueError(
                f"a snapshot of a {theirs[0]} cache for {theirs[1]} tokens does not go into a "
                f"{ours[0]} cache for {ours[1]}."
            )
        self._state = snapshot.select(torch.arange(len(snapshot.lengths_B)))

    def num_slots(self) -> int:
        """Key/value slots allocated so far, over all blocks and loops."""
        return len(self._state.buffers)

    def num_bytes(self) -> int:
        """Bytes of all stored keys and values."""
        return sum(buffer.num_bytes() for buffer in self._state.buffers.values())

    def _keeps_one(self) -> bool:
        """Whether one entry of each token stays at this time, and not one of each group."""
        is_prompt = self._rule.collapses and not self._state.prompt_ended
        return self._rule.persists != "every_group" and not is_prompt

    def _lookup(
        self, loop_idx: int, rows: Tensor | None, *, call: CacheCall, place: WritePlace
    ) -> Lookup:
        """Which entries a pass writes and reads, where those can differ from token to token."""
        state = self._state
        loops_B = state.row_loops_B if rows is None else state.row_loops_B[rows]
        groups_B = group_of(self._rule, loop_idx, loops_B)
        state.add_groups(int(groups_B.max()) + 1)
        groups_B = groups_B.to(place.rows.device)
        state.mark(groups_B, place.rows, place.index_BT, is_first=loop_idx == 0)
        ends_B = (self.lengths_B + call.num_new_B).to(state.device)[place.rows]
        has_GBS = state.has_GBS[:, place.rows, : place.num_source_tokens]
        return find_entries(self._rule, has_GBS, groups_B, ends_B=ends_B)

    def _show_entries(self) -> None:
        """Mark the entries of a running call, one per loop, that only its loop counts tell."""
        if self._state.open_index_BT is not None:
            self._state.mark_first(self._state.open_index_BT, self._state.ran_B)
            self._state.open_index_BT = None

    def _groups_of(self, loops_B: Tensor) -> Tensor:
        """Groups that so many loops fill, [B]."""
        if self._rule.count is None:
            return loops_B
        return torch.tensor([self._rule.num_groups(k) for k in loops_B.tolist()])

    def _cached(
        self, block: Block, num_slots: int, group: int, *, place: WritePlace
    ) -> tuple[KVSlot, ...]:
        """Slots that write and read one buffer each."""
        slots = []
        for slot_idx in range(num_slots):
            shared = None
            if self._shares_first and block == "core" and group > 0:
                shared = StoredKV(self._state.buffer("core", slot_idx, 0), place)
            buffer = self._state.buffer(block, slot_idx, group)
            slots.append(CachedSlot(buffer, place, shared=shared))
        return tuple(slots)

    def _check_unchanged(self, wanted_B: Tensor) -> None:
        has_tokens_B = self._state.least_B < ALL_GROUPS
        changed_B = has_tokens_B & (wanted_B != self._state.row_loops_B)
        if bool(changed_B.any()):
            row = int(changed_B.nonzero()[0])
            raise ValueError(
                f"row {row} of this {self.policy} cache ran {int(self._state.row_loops_B[row])} "
                f"loops so far and now asks for {int(wanted_B[row])}. Keep the loop count, or "
                "start a new cache."
            )

    def _check_entries(self, wanted_B: Tensor) -> None:
        needed_B = self._groups_of(wanted_B)
        if bool((self._state.least_B >= needed_B).all()):
            return
        # Entries were filled in, or the tokens without them dropped: only counting tells.
        complete_B = self._state.least_B = self._state.num_complete_groups()
        lacking_B = complete_B < needed_B
        if bool(lacking_B.any()):
            row = int(lacking_B.nonzero()[0])
            raise ValueError(
                f"row {row} of this {self.policy} cache has tokens with the entries of "
                f"{int(complete_B[row])} loops only, and {int(wanted_B[row])} loops read those of "
                f"{int(needed_B[row])}. Fill them in after an early exit, or use a policy that "
                "says what a loop reads instead."
            )

    def _check_collapsed(self, num_new_B: Tensor) -> None:
        if self._state.prompt_ended and int(num_new_B.max()) > 1:
            raise ValueError(
                f"{int(num_new_B.max())} tokens in one call after end_prompt under {self.policy}: "
                "they would read each other at the wrong loop. Feed one token per call, or "
                "prefill again in a new cache."
            )

    def _with_documents(self, index_BT: Tensor, document_ids_BT: Tensor | None) -> Tensor | None:
        """Document ids of all stored tokens and the call's; all calls give them, or none."""
        stored_BS = self._state.document_ids_BS
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


def _kept_slot(rule: CacheRule, buffer: KVBuffer, place: WritePlace, loop_idx: int) -> KVSlot:
    """The slot of one loop where one entry per token stays.

    An extra pass overwrites what the first loop writes.
    """
    if loop_idx == 0 or rule.persists == "last":
        return CachedSlot(buffer, place)
    if rule.shares_first:
        return ReadOnlySlot(StoredKV(buffer, place))
    return OverlaySlot(buffer, place, num_averaged=loop_idx if rule.persists == "mean" else None)
