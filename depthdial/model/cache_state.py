"""What a loop cache holds, and what is done to all of it at once.

Selecting rows, keeping one entry of several, filling in missing ones. Which slots
read and write it is decided in `loop_cache.py`.
Letters: B rows, S positions (capacity + 1, the last a bin for padding), G groups of loops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from depthdial.layers.kv_buffer import KVBuffer
from depthdial.model.cache_policies import Kept

Block = Literal["prelude", "core", "coda"]
# Group of the entries that outlive the loops, under the policies that keep one.
KEPT = -1


@dataclass
class CacheState:
    """Contents of a cache.

    Fields:
        policy, capacity: of the cache.
        lengths_B: tokens per row.
        row_loops_B: loop count of each row's newest call, on the CPU.
        has_GBS: whether a token has an entry in a group of loops; groups are added when a loop
            first writes them. Meaningless behind a row's last token.
        prompt_ended: `end_prompt` has reduced the prompt to one entry per token.
        document_ids_BS: of all tokens; None without documents.
        buffers: by block, attention layer of the block, and group.
    """

    policy: str
    capacity: int
    lengths_B: Tensor
    row_loops_B: Tensor
    has_GBS: Tensor
    prompt_ended: bool = False
    document_ids_BS: Tensor | None = None
    buffers: dict[tuple[Block, int, int], KVBuffer] = field(default_factory=dict)

    @staticmethod
    def empty(
        policy: str, *, batch_size: int, capacity: int, device: torch.device | str
    ) -> CacheState:
        """No tokens, nothing allocated."""
        return CacheState(
            policy,
            capacity,
            lengths_B=torch.zeros(batch_size, dtype=torch.int64, device=device),
            row_loops_B=torch.zeros(batch_size, dtype=torch.int64),
            has_GBS=torch.zeros(0, batch_size, capacity + 1, dtype=torch.bool, device=device),
        )

    def select(self, rows: Tensor) -> CacheState:
        """A copy whose row i is row rows[i]."""
        documents = self.document_ids_BS
        return CacheState(
            self.policy,
            self.capacity,
            lengths_B=self.lengths_B[rows],
            row_loops_B=self.row_loops_B[rows.cpu()],
            has_GBS=self.has_GBS[:, rows],
            prompt_ended=self.prompt_ended,
            document_ids_BS=None if documents is None else documents[rows],
            buffers={key: buffer.select(rows) for key, buffer in self.buffers.items()},
        )

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

    def mark(self, groups_B: Tensor, rows: Tensor, index_BT: Tensor, *, is_first: bool) -> None:
        """Note that tokens have entries in a group, and after the first loop in no other."""
        if is_first:
            self.has_GBS[:, rows[:, None], index_BT] = False
        self.has_GBS[groups_B[:, None], rows[:, None], index_BT] = True

    def tokens(self) -> Tensor:
        """Boolean [B, S]: positions that hold a token of an earlier call."""
        positions = torch.arange(self.capacity + 1, device=self.lengths_B.device)
        return positions < self.lengths_B[:, None]

    def num_complete_groups(self) -> Tensor:
        """Groups, counted from 0, in which every token of the row has an entry, [B]."""
        complete_GB = (self.has_GBS | ~self.tokens()).all(dim=2)
        return complete_GB.long().cumprod(dim=0).sum(dim=0)

    def keep_one(self, kept: Kept) -> None:
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
                if kept == "first" or buffer is None or not len(rows):
                    continue
                k, v = buffer.entries(rows, positions)
                if kept == "last":
                    one.put(rows, positions, k=k, v=v)
                else:
                    one.average(rows, positions, k=k, v=v, num_averaged=group)
            self.buffers["core", slot_idx, KEPT] = one
        self.has_GBS = self.has_GBS[:0]

    def fill(self, rows: Tensor, group: int, *, num_groups_B: Tensor) -> None:
        """Give tokens whose deepest entry is in `group` copies of it in deeper groups.

        Args: num_groups_B: groups that each of `rows` is to have.
        """
        stopped_BS = self.has_GBS[group, rows] & ~self.has_GBS[group + 1 :, rows].any(dim=0)
        stopped_BS[:, self.capacity] = False
        self.add_groups(int(num_groups_B.max()))
        for target in range(group + 1, int(num_groups_B.max())):
            wanted_BS = stopped_BS & (target < num_groups_B)[:, None]
            at, positions = wanted_BS.nonzero(as_tuple=True)
            if not len(at):
                continue
            for slot_idx in self.core_slots():
                k, v = self.buffer("core", slot_idx, group).entries(rows[at], positions)
                self.buffer("core", slot_idx, target).put(rows[at], positions, k=k, v=v)
            self.has_GBS[target, rows[at], positions] = True
