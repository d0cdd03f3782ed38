"""Stored keys and values of one layer and loop, and where one call's tokens stand in them.

Letters: B rows of a call, T query tokens, S source tokens, G key/value heads, C channels per
head; a buffer has N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class KVBuffer:
    """Contiguous keys and values of one (layer, loop): [N, capacity + 1, G, C] each.

    The last position is a bin for padding tokens: written, never read.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def reserve(self, k_like: Tensor, v_like: Tensor) -> tuple[Tensor, Tensor]:
        """The stored tensors, made at first for heads like those of [..., G, C].

        Raises: ValueError if the dtype differs from what is stored.
        """
        if self.k is None or self.v is None:
            shape = (self.num_rows, self.capacity + 1)
            self.k = k_like.new_zeros(*shape, *k_like.shape[-2:])
            self.v = v_like.new_zeros(*shape, *v_like.shape[-2:])
        if self.k.dtype != k_like.dtype:
            raise ValueError(
                f"this cache holds {self.k.dtype} keys and the call brings {k_like.dtype}; keep "
                "autocast on or off for all calls of one cache."
            )
        return self.k, self.v

    def put(self, rows: Tensor, positions: Tensor, *, k: Tensor, v: Tensor) -> None:
        """Store single tokens; rows and positions broadcast to the leading dimensions of k, v."""
        stored_k, stored_v = self.reserve(k, v)
        stored_k[rows, positions] = k
        stored_v[rows, positions] = v

    def average(
        self, rows: Tensor, positions: Tensor, *, k: Tensor, v: Tensor, num_averaged: int
    ) -> None:
        """Join means of so many entries: m + (x - m) / (num_averaged + 1), in float32.

        Args: rows, positions: broadcast to the leading dimensions of k and v.
        """
        for stored, new in zip(self.reserve(k, v), (k, v), strict=True):
            mean = stored[rows, positions].float()
            mean = torch.lerp(mean, new.float(), 1 / (num_averaged + 1))
            stored[rows, positions] = mean.to(stored.dtype)

    def read(self, rows: Tensor, num_source_tokens: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of the first positions, [B, S, G, C] each."""
        assert self.k is not None and self.v is not None, "a slot is read after its first write"
        return self.k[rows, :num_source_tokens], self.v[rows, :num_source_tokens]

    def view(self, num_source_tokens: int) -> tuple[Tensor, Tensor]:
        """Those of all rows as they are stored, to be read before anything is written."""
        assert self.k is not None and self.v is not None, "a slot is read after its first write"
        return self.k[:, :num_source_tokens], self.v[:, :num_source_tokens]

    def entries(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of single tokens, [..., G, C] each."""
        assert self.k is not None and self.v is not None, "an entry is read after its write"
        return self.k[rows, positions], self.v[rows, positions]

    def select(self, rows: Tensor) -> KVBuffer:
        """A new buffer whose row i is a copy of row rows[i]."""
        selected = KVBuffer(len(rows), self.capacity)
        if self.k is not None and self.v is not None:
            selected.k, selected.v = self.k[rows], self.v[rows]
        return selected

    def num_bytes(self) -> int:
        """Bytes held, the bin included."""
        if self.k is None or self.v is None:
            return 0
        return self.k.nbytes + self.v.nbytes


@dataclass(frozen=True)
class WritePlace:
    """Rows and positions of one call's tokens.

    Fields:
        rows: row of the buffer for each row of the call, [B].
        index_BT: position of each token; the capacity for padding.
        num_source_tokens: S, positions that may be read.
        is_whole: `rows` are all rows of the buffer, in order.
    """

    rows: Tensor
    index_BT: Tensor
    num_source_tokens: int
    is_whole: bool = False

    def read(self, buffer: KVBuffer) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, [B, S, G, C] each."""
        # A backward needs them as they were, and the next loop may overwrite the buffer.
        if self.is_whole and not torch.is_grad_enabled():
            return buffer.view(self.num_source_tokens)
        return buffer.read(self.rows, self.num_source_tokens)
