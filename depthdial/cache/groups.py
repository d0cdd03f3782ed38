"""Entries of several loops: one per token and group of loops.

Which loops share a group, and what a loop reads of a token that lacks its entry, is data
(`config/policies.py`).
Letters: B rows, T tokens of a call, S positions (capacity + 1, the last a bin for padding),
G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from depthdial.cache.buffers import WritePlace
from depthdial.cache.entries import Entries, cached_slot, write_place
from depthdial.cache.protocol import CacheCall
from depthdial.cache.slots import (
    Lookup,
    LookupSlot,
    StoredKV,
    slot_beside_first,
)
from depthdial.config import CacheRule, ModelConfig
from depthdial.layers.state import KVSlot

# More groups than any model has: the entries of a row without tokens are complete.
ALL_GROUPS = 1 << 30


class GroupEntries(Entries):
    """One entry per token and group of loops.

    Fields:
        loops_B: loop count that each row's newest call asked for; ran_B: that it ran so far.
        complete_B: lower bound on the number of leading groups in which every token of the row
            has an entry.
        has_GBS: whether a token has an entry in a group; groups are added when a loop first writes
            them. Meaningless behind a row's last token.
        open_index_BT: positions of the tokens of a running call whose entries `has_GBS` does not
            show yet.
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
        self.loops_B = torch.zeros(num_rows, dtype=torch.int64)
        self.ran_B = torch.zeros(num_rows, dtype=torch.int64)
        self.complete_B = torch.full((num_rows,), ALL_GROUPS)
        shape = (0, num_rows, capacity + 1)
        self.has_GBS = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.open_index_BT: Tensor | None = None

    def bind_loops(self, num_loops_B: Tensor) -> None:
        if self.rule.reads_missing == "refuse":
            if self.rule.grouping == "loop":
                self._check_unchanged(num_loops_B)
            self._check_complete(num_loops_B)
        self.loops_B = num_loops_B.clone()

    def slots(
        self, layers: Sequence[int], *, loop_idx: int, rows: Tensor | None, call: CacheCall
    ) -> list[KVSlot]:
        place = write_place(call, rows)
        if rows is None:
            self.ran_B.fill_(loop_idx + 1)
        else:
            self.ran_B[rows] = loop_idx + 1
        if not self.rule.looks_up:
            self.open_index_BT = call.index_BT
            return [self._slot_of_loop(layer, loop_idx, place) for layer in layers]
        lookup = self._lookup(loop_idx, rows, call=call, place=place)
        groups = set(lookup.targets + lookup.sources)
        return [
            LookupSlot({g: self.buffer(layer, g) for g in groups}, place, lookup=lookup)
            for layer in layers
        ]

    def advance(self, num_new_B: Tensor) -> None:
        self._show_entries()
        complete_B = torch.minimum(self.complete_B, self._groups_of(self.ran_B))
        self.complete_B = torch.where(num_new_B > 0, complete_B, self.complete_B)
        super().advance(num_new_B)

    def fill(self, rows: Tensor, from_loop: int) -> None:
        """Copies of the entries of `from_loop`, up to the loop count that was bound, which count
        as entries from then on. No effect under rules that say what a loop reads instead.

        Raises: ValueError for a loop beyond those that the rows were to run.
        """
        if not len(rows) or self.rule.reads_missing != "refuse":
            return
        loops_B = self.loops_B[rows]
        if not 0 <= from_loop < int(loops_B.max()):
            raise ValueError(
                f"from_loop={from_loop}: the rows run {loops_B.tolist()} loops; give the 0-based "
                "loop after which they stopped."
            )
        self._show_entries()
        group = int(group_of(self.rule, from_loop, loops_B)[0])
        self._copy_deeper(rows, group, num_groups_B=self._groups_of(loops_B))
        ran_B = self.ran_B[rows]
        self.ran_B[rows] = torch.where(ran_B == from_loop + 1, loops_B, ran_B)

    def crop(self, lengths_B: Tensor) -> None:
        super().crop(lengths_B)
        self.complete_B = self.complete_B.masked_fill(self.lengths_B == 0, ALL_GROUPS)

    def select(self, rows: Tensor) -> Self:
        selected = super().select(rows)
        selected.loops_B, selected.ran_B = self.loops_B[rows], self.ran_B[rows]
        selected.complete_B = self.complete_B[rows]
        selected.has_GBS = self.has_GBS[:, rows.to(self.device)]
        selected.open_index_BT = None
        return selected

    def keep_one(self, rows: Tensor) -> None:
        """Reduce the entries of each token of some rows to one, in group 0: of its last or first
        loop, or the mean. Tokens may have run different numbers of loops. The rows are then empty
        here.
        """
        chosen_B1 = torch.zeros(len(self.lengths_B), 1, dtype=torch.bool)
        chosen_B1[rows] = True
        has_GBS = self.has_GBS & self._tokens() & chosen_B1.to(self.device)
        persists = self.rule.persists
        for layer in sorted({layer for layer, _ in self.buffers}):
            # The first loop's buffer holds what stays: no further copy is ever made.
            one = self.buffers[layer, 0]
            for group in range(1, has_GBS.shape[0]):
                buffer = self.buffers.get((layer, group))
                in_rows, positions = has_GBS[group].nonzero(as_tuple=True)
                if persists == "first" or buffer is None or not len(in_rows):
                    continue
                k, v = buffer.entries(in_rows, positions)
                if persists == "last":
                    one.put(in_rows, positions, k=k, v=v)
                else:
                    one.average(in_rows, positions, k=k, v=v, num_averaged=group)
        self.lengths_B = self.lengths_B.index_fill(0, rows, 0)
        self.complete_B = self.complete_B.index_fill(0, rows, ALL_GROUPS)
        if not bool(self.lengths_B.any()):
            for key in [key for key in self.buffers if key[1] > 0]:
                del self.buffers[key]
            self.has_GBS = self.has_GBS[:0]

    def num_complete_groups(self) -> Tensor:
        """Groups, counted from 0, in which every token of the row has an entry, [B]."""
        complete_GB = (self.has_GBS | ~self._tokens()).all(dim=2)
        complete_B = complete_GB.long().cumprod(dim=0).sum(dim=0).cpu()
        return complete_B.masked_fill(self.lengths_B == 0, ALL_GROUPS)

    def _slot_of_loop(self, layer: int, group: int, place: WritePlace) -> KVSlot:
        """The slot of a loop that keeps its own entries."""
        own = partial(cached_slot, self.buffer(layer, group), place)
        mixes_loops = self.config.loop.local_window is not None
        first = StoredKV(self.buffer(layer, 0), place) if mixes_loops and group > 0 else None
        return slot_beside_first(own, first, shares_first=False)

    def _lookup(
        self, loop_idx: int, rows: Tensor | None, *, call: CacheCall, place: WritePlace
    ) -> Lookup:
        """Which entries a pass writes and reads, where those can differ from token to token."""
        loops_B = self.loops_B if rows is None else self.loops_B[rows]
        groups_B = group_of(self.rule, loop_idx, loops_B)
        self._add_groups(int(groups_B.max()) + 1)
        groups_B = groups_B.to(place.rows.device)
        self._mark(groups_B, place.rows, place.index_BT, is_first=loop_idx == 0)
        ends_B = call.ends_B.to(self.device)[place.rows]
        has_GBS = self.has_GBS[:, place.rows, : place.num_source_tokens]
        return find_entries(self.rule, has_GBS, groups_B, ends_B=ends_B)

    def _show_entries(self) -> None:
        """Mark the entries of a running call, one per loop, that only its loop counts tell: in so
        many groups from 0, and in no other."""
        index_BT = self.open_index_BT
        if index_BT is None:
            return
        self._add_groups(int(self.ran_B.max()))
        groups_G1 = torch.arange(self.has_GBS.shape[0], device=self.device)[:, None]
        rows_B1 = torch.arange(len(index_BT), device=self.device)[:, None]
        has_GB1 = (groups_G1 < self.ran_B.to(self.device))[..., None]
        self.has_GBS[:, rows_B1, index_BT] = has_GB1
        self.open_index_BT = None

    def _mark(self, groups_B: Tensor, rows: Tensor, index_BT: Tensor, *, is_first: bool) -> None:
        """Note that tokens have entries in a group, and after the first loop in no other."""
        if is_first:
            self.has_GBS[:, rows[:, None], index_BT] = False
        self.has_GBS[groups_B[:, None], rows[:, None], index_BT] = True

    def _add_groups(self, num_groups: int) -> None:
        """Have at least so many groups."""
        num_new = num_groups - self.has_GBS.shape[0]
        if num_new > 0:
            more_GBS = self.has_GBS.new_zeros(num_new, *self.has_GBS.shape[1:])
            self.has_GBS = torch.cat([self.has_GBS, more_GBS])

    def _copy_deeper(self, rows: Tensor, group: int, *, num_groups_B: Tensor) -> None:
        """Give tokens whose deepest entry is in `group` copies of it in deeper groups.

        Args: num_groups_B: groups that each of `rows` is to have.
        """
        rows, most_groups = rows.to(self.device), int(num_groups_B.max())
        stopped_BS = self.has_GBS[group, rows] & ~self.has_GBS[group + 1 :, rows].any(dim=0)
        stopped_BS[:, self.capacity] = False
        self._add_groups(most_groups)
        layers = sorted({layer for layer, _ in self.buffers})
        for target in range(group + 1, most_groups):
            wanted_BS = stopped_BS & (target < num_groups_B).to(self.device)[:, None]
            at, positions = wanted_BS.nonzero(as_tuple=True)
            if not len(at):
                continue
            for layer in layers:
                k, v = self.buffer(layer, group).entries(rows[at], positions)
                self.buffer(layer, target).put(rows[at], positions, k=k, v=v)
            self.has_GBS[target, rows[at], positions] = True

    def _tokens(self) -> Tensor:
        """Boolean [B, S]: positions that hold a token of an earlier call."""
        positions = torch.arange(self.capacity + 1, device=self.device)
        return positions < self.lengths_B.to(self.device)[:, None]

    def _groups_of(self, loops_B: Tensor) -> Tensor:
        """Groups that so many loops fill, [B]."""
        if self.rule.count is None:
            return loops_B
        return torch.tensor([self.rule.num_groups(k) for k in loops_B.tolist()])

    def _check_unchanged(self, wanted_B: Tensor) -> None:
        changed_B = (self.lengths_B > 0) & (wanted_B != self.loops_B)
        if bool(changed_B.any()):
            row = int(changed_B.nonzero()[0])
            raise ValueError(
                f"row {row} of this {self.policy} cache ran {int(self.loops_B[row])} "
                f"loops so far and now asks for {int(wanted_B[row])}. Keep the loop count, or "
                "start a new cache."
            )

    def _check_complete(self, wanted_B: Tensor) -> None:
        needed_B = self._groups_of(wanted_B)
        if bool((self.complete_B >= needed_B).all()):
            return
        # Entries were filled in, or the tokens without them dropped: only counting tells.
        complete_B = self.complete_B = self.num_complete_groups()
        lacking_B = complete_B < needed_B
        if bool(lacking_B.any()):
            row = int(lacking_B.nonzero()[0])
            raise ValueError(
                f"row {row} of this {self.policy} cache has tokens with the entries of "
                f"{int(complete_B[row])} loops only, and {int(wanted_B[row])} loops read those of "
                f"{int(needed_B[row])}. Fill them in after an early exit, or use a policy that "
                "says what a loop reads instead."
            )


def group_of(rule: CacheRule, loop_idx: int, num_loops_B: Tensor) -> Tensor:
    """Group that a loop writes and reads, for rows that run `num_loops_B` loops [B]."""
    ones_B = torch.ones_like(num_loops_B)
    if rule.count is None:
        return ones_B * loop_idx
    if rule.grouping == "modulo":
        return ones_B * (loop_idx % rule.count)
    if rule.grouping == "stride":
        return ones_B * (loop_idx // rule.count)
    if rule.grouping == "first":
        return ones_B * min(loop_idx, rule.count)
    # The last loop has the highest number whatever the loop count, and all loops before the
    # last `count` share group 0.
    return (loop_idx + 1 + rule.count - num_loops_B).clamp(min=0)


def find_entries(rule: CacheRule, has_GBS: Tensor, groups_B: Tensor, *, ends_B: Tensor) -> Lookup:
    """Which entry of each token a loop reads.

    Args:
        has_GBS: whether a token has an entry in a group, the ones of this pass included.
        groups_B: group of the running loop.
        ends_B: tokens of each row; what stands behind them is neither read nor missed.
    """
    num_groups, _, num_source = has_GBS.shape
    own_BS = groups_B[:, None].expand(-1, num_source)
    is_token_BS = torch.arange(num_source, device=has_GBS.device) < ends_B[:, None]
    lacks_BS = is_token_BS & ~has_GBS.gather(0, own_BS[None])[0]
    reads_BS, missing_BS = own_BS, None
    if bool(lacks_BS.any()):
        assert rule.reads_missing != "refuse", "bind_loops refuses a call that would miss entries"
        if rule.reads_missing == "skip":
            missing_BS = lacks_BS
        else:
            numbers_G11 = torch.arange(num_groups, device=has_GBS.device)[:, None, None]
            readable_GBS = has_GBS
            if rule.reads_missing == "latest":
                readable_GBS = has_GBS & (numbers_G11 <= own_BS)
            newest_BS = torch.where(readable_GBS, numbers_G11, -1).amax(dim=0)
            applies_BS = is_token_BS & lacks_BS.any(dim=1, keepdim=True)
            reads_BS = torch.where(applies_BS, newest_BS, own_BS)
    return Lookup(
        writes_B=groups_B,
        reads_BS=reads_BS,
        targets=tuple(groups_B.unique().tolist()),
        sources=tuple(reads_BS.unique().tolist()),
        missing_BS=missing_BS,
    )
