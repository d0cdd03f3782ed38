"""What the model, the engine and the transformers face ask of a cache; nobody asks for more.

Caches that keep to it: `cache/contiguous.py`. Layers see slots, never a cache.
Letters: B batch, T query tokens, S source tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import CacheRule
from depthdial.layers.state import Routes, Slot

Block = Literal["prelude", "core", "coda"]


@dataclass(frozen=True)
class CacheCall:
    """Where the tokens of one call go, as `open_call` has planned it.

    Fields:
        rows: numbers of all rows, on the device.
        index_BT: position of each token in its row; the capacity for padding.
        num_source_tokens: S, positions that some row may read.
        is_token_BT: False at padding.
        num_new_B, ends_B: real tokens of the call, and tokens of the row with them; on the CPU.
        document_ids_BT, source_document_ids_BS: of the call [B, T], and of all positions
            [B, capacity + 1]; None without documents.
        routes: what routed layers of the core recorded in this call, by their place among the
            slots; nothing of it outlives the call.
    """

    rows: Tensor
    index_BT: Tensor
    num_source_tokens: int
    is_token_BT: Tensor
    num_new_B: Tensor
    ends_B: Tensor
    document_ids_BT: Tensor | None
    source_document_ids_BS: Tensor | None
    routes: dict[int, Routes] = field(default_factory=dict)


class LoopCache(Protocol):
    """State of a batch of sequences at every loop.

    One call: `bind_loops`, `open_call`, `slots` of prelude, core (once per pass) and coda,
    `extra_slots` where `rule.has_extra_pass`, `advance`.

    Fields:
        policy, rule: name and meaning of what is kept.
        capacity: most tokens per row.
        batch_size: rows. lengths_B: tokens stored per row, on the CPU.
        can_roll_back: tokens that were stored and cropped again leave no trace.
        exit_obstacle: why a row cannot stop before its last loop; None where it can.
    """

    policy: str
    rule: CacheRule
    capacity: int

    @property
    def batch_size(self) -> int: ...

    @property
    def lengths_B(self) -> Tensor: ...

    @property
    def can_roll_back(self) -> bool: ...

    @property
    def exit_obstacle(self) -> str | None: ...

    def bind_loops(self, num_loops: NumLoops) -> None:
        """Remember each row's loop count. Raises: ValueError for one that the content forbids."""
        ...

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
        ...

    def slots(
        self, block: Block, *, call: CacheCall, loop_idx: int = 0, rows: Tensor | None = None
    ) -> tuple[Slot, ...]:
        """The slots of one pass over a block, one per layer that has one.

        Args: rows: of the cache, in the order of the pass, on the CPU; None for all.
        """
        ...

    def extra_slots(self, *, call: CacheCall) -> tuple[Slot, ...]:
        """The slots of the extra pass over the core: it writes what later calls read."""
        ...

    def advance(self, call: CacheCall) -> None:
        """Count the call's tokens as stored; once per call, after the coda."""
        ...

    def end_prompt(self, rows: Tensor | None = None) -> None:
        """The prompts of these rows are complete, of all rows where none are named: collapse_*
        keeps one entry of each of their tokens, and a later call may bring such a row one token.

        Raises: ValueError for a row without a prompt.
        """
        ...

    def fill(self, rows: Tensor, from_loop: int) -> None:
        """Rows stopped after `from_loop` of their newest call: give its tokens the deeper entries.

        Args: rows: of the cache, [n]; from_loop: 0-based.
        """
        ...

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i]; rows may repeat, vanish, or grow."""
        ...

    def crop(self, lengths: int | Tensor) -> None:
        """Drop the newest tokens of each row; a row that keeps none starts afresh.

        Args: lengths: tokens to keep, for all rows or per row [B].
        Raises: ValueError for more than are stored, or an earlier length that a recurrent state or
            a rule that drops tokens cannot go back to.
        """
        ...

    def snapshot(self) -> Any:
        """A copy of everything stored, for `restore`; as large as the cache."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, as often as wanted."""
        ...

    def num_slots(self) -> int:
        """Key/value slots allocated so far, over all blocks and loops."""
        ...

    def num_bytes(self) -> int:
        """Bytes of everything stored."""
        ...
