"""What a loop cache holds, what one call brings, and what is done to all of it at once.

Selecting rows, keeping one entry of several, filling in missing ones. Which slots
read and write it is decided in `cache/contiguous.py`.
Letters: B rows, T tokens of a call, S positions (capacity + 1, the last a bin for padding),
G groups of loops. Numbers of rows are on the CPU, where they decide what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from depthdial.cache.slots import KVBuffer, WritePlace
from depthdial.config.policies import Persists

Block = Literal["prelude", "core", "coda"]
# Group of the entries that outlive the loops, under the policies that keep one.
KEPT = -1
# More groups than any model has: the entries of a row without tokens are complete.
ALL_GROUPS = 1 << 30


@dataclass(frozen=True)
class CacheCall:
    """Where one call's tokens go.

    Fields:
        place: all rows, and the position of each token; the capacity for padding.
        real_BT: False at padding.
        num_new_B: real tokens per row.
        document_ids_BT, source_document_ids_BS: of the call [B, T], and of all positions
            [B, capacity + 1]; or None.
    """

    place: WritePlace
    real_BT: Tensor
    num_new_B: Tensor
    document_ids_BT: Tensor | None
    source_document_ids_BS: Tensor | None

    def narrow(self, rows: Tensor | None) -> WritePlace:
        """The place of some rows, given on the CPU; None for all."""
        if rows is None:
            return self.place
        rows = rows.to(self.place.rows.device)
        return WritePlace(rows, self.place.index_BT[rows], self.place.num_source_tokens)


@dataclass
class CacheState:
    """Contents of a cache.

    Fields:
        policy, capacity: of the cache.
        lengths_B: tokens per row.
        row_loops_B: loop count that each row's newest call asked for; ran_B: that it ran so far.
        least_B: groups, counted from 0, in which every token of the row has an entry: at least so
            many.
        has_GBS: whether a token has an entry in a group of loops; groups are added when a loop
            first writes them. Meaningless behind a row's last token.
        open_index_BT: positions of the tokens of a running call whose entries `has_GBS` does not
            show yet.
        prompt_ended: `end_prompt` has reduced the prompt to one entry per token.
        document_ids_BS: of all tokens; None without documents.
        buffers: by block, attention layer of the block, and group.
    """

    policy: str
    capacity: int
    lengths_B: Tensor
    row_loops_B: Tensor
    ran_B: Tensor
    least_B: Tensor
    has_GBS: Tensor
    open_index_BT: Tensor | None = None
    prompt_ended: bool = False
    document_ids_BS: Tensor | None = None
    buffers: dict[tuple[Block, int, int], KVBuffer] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Of everything that is stored per token."""
        return self.has_GBS.device

    @staticmethod
    def empty(
        policy: str, *, batch_size: int, capacity: int, device: torch.device | str
    ) -> CacheState:
        """No tokens, nothing allocated."""
        return CacheState(
            policy,
            capacity,
            lengths_B=torch.zeros(batch_size, dtype=torch.int64),
            row_loops_B=torch.zeros(batch_size, dtype=torch.int64),
            ran_B=torch.zeros(batch_size, dtype=torch.int64),
            least_B=torch.full((batch_size,), ALL_GROUPS),
            has_GBS=torch.zeros(0, batch_size, capacity + 1, dtype=torch.bool, device=device),
        )

    def select(self, rows: Tensor) -> CacheState:
        """A copy whose row i is row rows[i]; rows: on the CPU."""
        documents, on_device = self.document_ids_BS, rows.to(self.device)
        return CacheState(
            self.policy,
            self.capacity,
            lengths_B=self.lengths_B[rows],
            row_loops_B=self.row_loops_B[rows],
            ran_B=self.ran_B[rows],
            least_B=self.least_B[rows],
            has_GBS=self.has_GBS[:, on_device],
            prompt_ended=self.prompt_ended,
            document_ids_BS=None if documents is None else documents[on_device],
            buffers={key: buffer.select(on_device) for key, buffer in self.buffers.items()},
        )

    def crop(self, lengths_B: Tensor) -> None:
        """Drop the newest tokens of each row."""
        self.lengths_B = lengths_B
        self.least_B = self.least_B.masked_fill(lengths_B == 0, ALL_GROUPS)

    def buffer(self, block: Block, slot_idx: int, group: int) -> KVBuffer:
        """One buffer, made at first."""
        key = (block, slot_idx, group)
        if key not in self.buffers:
            self.buffers[key] = KVBuffer(len(self.lengths_B), self.capacity)
        return self.buffers[key]

    def core_slots(self) -> list[int]:
        """Attention layers of the core that have stored something."""
        return sorted({slot_idx for block, slot_idx, _ in self.buffers if block == "core"})

    def add_groups(self, num_groups: int) -> None:
        """Have at least so many groups."""
        num_new = num_groups - self.has_GBS.shape[0]
        if num_new > 0:
            more_GBS = self.has_GBS.new_zeros(num_new, *self.has_GBS.shape[1:])
            self.has_GBS = torch.cat([self.has_GBS, more_GBS])

    def mark_first(self, index_BT: Tensor, num_groups_B: Tensor) -> None:
        """Note that the tokens of all rows have entries in so many groups from 0, and in no
        other."""
        self.add_groups(int(num_groups_B.max()))
        groups_G1 = torch.arange(self.has_GBS.shape[0], device=self.device)[:, None]
        rows_B1 = torch.arange(len(index_BT), device=self.device)[:, None]
        has_GB1 = (groups_G1 < num_groups_B.to(self.device))[..., None]
        self.has_GBS[:, rows_B1, index_BT] = has_GB1

    def mark(self, groups_B: Tensor, rows: Tensor, index_BT: Tensor, *, is_first: bool) -> None:
        """Note that tokens have entries in a group, and after the first loop in no other."""
        if is_first:
            self.has_GBS[:, rows[:, None], index_BT] = False
        self.has_GBS[groups_B[:, None], rows[:, None], index_BT] = True

    def tokens(self) -> Tensor:
        """Boolean [B, S]: positions that hold a token of an earlier call."""
        positions = torch.arange(self.capacity + 1, device=self.device)
        return positions < self.lengths_B.to(self.device)[:, None]

    def num_complete_groups(self) -> Tensor:
        """Groups, counted from 0, in which every token of the row has an entry, [B]."""
        complete_GB = (self.has_GBS | ~self.tokens()).all(dim=2)
        complete_B = complete_GB.long().cumprod(dim=0).sum(dim=0).cpu()
        return complete_B.masked_fill(self.lengths_B == 0, ALL_GROUPS)

    def keep_one(self, persists: Persists) -> None:
        """Reduce the loops' entries of each token to one: of its last or first loop, or the mean.

        Tokens may have run different numbers of loops.
        """
        has_GBS = self.has_GBS & self.tokens()
        for slot_idx in self.core_slots():
            # The first loop's buffer becomes the kept one: no third copy is ever held.
            one = self.buffers.pop(("core", slot_idx, 0))
            for group in range(1, has_GBS.shape[0]):
                buffer = self.buffers.pop(("core", slot_idx, group), None)
                rows, positions = has_GBS[group].nonzero(as_tuple=True)
                if persists == "first" or buffer is None or not len(rows):
                    continue
                k, v = buffer.entries(rows, positions)
                if persists == "last":
                    one.put(rows, positions, k=k, v=v)
                else:
                    one.average(rows, positions, k=k, v=v, num_averaged=group)
            self.buffers["core", slot_idx, KEPT] = one
        self.has_GBS = self.has_GBS[:0]

    def fill(self, rows: Tensor, group: int, *, num_groups_B: Tensor) -> None:
        """Give tokens whose deepest entry is in `group` copies of it in deeper groups.

        Args: num_groups_B: groups that each of `rows` is to have.
        """
        rows, most_groups = rows.to(self.device), int(num_groups_B.max())
        stopped_BS = self.has_GBS[group, rows] & ~self.has_GBS[group + 1 :, rows].any(dim=0)
        stopped_BS[:, self.capacity] = False
        self.add_groups(most_groups)
        for target in range(group + 1, most_groups):
            wanted_BS = stopped_BS & (target < num_groups_B).to(self.device)[:, None]
            at, positions = wanted_BS.nonzero(as_tuple=True)
            if not len(at):
                continue
            for slot_idx in self.core_slots():
                k, v = self.buffer("core", slot_idx, group).entries(rows[at], positions)
                self.buffer("core", slot_idx, target).put(rows[at], positions, k=k, v=v)
            self.has_GBS[target, rows[at], positions] = True
