"""Stored keys and values, and the slots over them.

A slot is bound to the rows and positions of one call; which buffer it reads and writes is decided
in `cache/contiguous.py`.
Letters: B rows of a call, T query tokens, S source tokens, G key/value heads, C channels per
head; a buffer has N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from depthdial.layers.attention_ops import AttentionSpec, attention
from depthdial.layers.state import SharedKV, written


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


class StoredKV:
    """A view on a buffer that a later loop shares; stores nothing."""

    def __init__(self, buffer: KVBuffer, place: WritePlace) -> None:
        self.buffer = buffer
        self.place = place

    def attend(self, q_BTHC: Tensor, *, spec: AttentionSpec, scale: float) -> Tensor:
        k_BSGC, v_BSGC = self.place.read(self.buffer)
        return attention(q_BTHC, k_BSGC, v_BSGC, spec=spec, scale=scale)


class CachedSlot:
    """Writes the call's entries, then reads them and those of earlier tokens."""

    is_read_only = False

    def __init__(
        self, buffer: KVBuffer, place: WritePlace, *, shared: SharedKV | None = None
    ) -> None:
        self.buffer = buffer
        self.place = place
        self.shared = shared

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        k_BTGC, v_BTGC = written(k_BTGC, v_BTGC)
        self.buffer.put(self.place.rows[:, None], self.place.index_BT, k=k_BTGC, v=v_BTGC)
        k_BSGC, v_BSGC = self.place.read(self.buffer)
        return attention(q_BTHC, k_BSGC, v_BSGC, spec=spec, scale=scale)


class OverlaySlot:
    """Reads its own entries for the call's tokens and the stored ones for earlier tokens.

    Args:
        num_averaged: the stored entry is the mean of so many loops of this call, and this loop
            joins it; None leaves what is stored as it is.
    """

    is_read_only = False
    shared = None

    def __init__(
        self, buffer: KVBuffer, place: WritePlace, *, num_averaged: int | None = None
    ) -> None:
        self.buffer = buffer
        self.place = place
        self.num_averaged = num_averaged

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        k_BTGC, v_BTGC = written(k_BTGC, v_BTGC)
        self.buffer.reserve(k_BTGC, v_BTGC)
        num_source = self.place.num_source_tokens
        # One position more than is attended to takes the place of the bin.
        k_BSGC, v_BSGC = self.buffer.read(self.place.rows, num_source + 1)
        index_BT = self.place.index_BT.clamp(max=num_source)
        batch_B1 = torch.arange(len(index_BT), device=index_BT.device)[:, None]
        k_BSGC[batch_B1, index_BT] = k_BTGC
        v_BSGC[batch_B1, index_BT] = v_BTGC
        if self.num_averaged is not None:
            self.buffer.average(
                self.place.rows[:, None],
                self.place.index_BT,
                k=k_BTGC,
                v=v_BTGC,
                num_averaged=self.num_averaged,
            )
        return attention(
            q_BTHC, k_BSGC[:, :num_source], v_BSGC[:, :num_source], spec=spec, scale=scale
        )


@dataclass(frozen=True)
class Lookup:
    """Where a loop writes its entries, and which entry it reads of each token.

    Fields:
        writes_B: buffer that each row writes.
        reads_BS: buffer that each source token is read from.
        sources: all numbers in `reads_BS`, ascending; targets: all numbers in `writes_B`.
        missing_BS: source tokens that are left out; None for none.
    """

    writes_B: Tensor
    reads_BS: Tensor
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    missing_BS: Tensor | None


class LookupSlot:
    """Several buffers of one layer: tokens may lack an entry in some of them.

    Args: buffers: by the numbers in `lookup`.
    """

    is_read_only = False
    shared = None

    def __init__(
        self, buffers: Mapping[int, KVBuffer], place: WritePlace, *, lookup: Lookup
    ) -> None:
        self.buffers = buffers
        self.place = place
        self.lookup = lookup

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        k_BTGC, v_BTGC = written(k_BTGC, v_BTGC)
        rows, index_BT = self.place.rows, self.place.index_BT
        for target in self.lookup.targets:
            of_target = (self.lookup.writes_B == target).nonzero()[:, 0]
            self.buffers[target].put(
                rows[of_target][:, None],
                index_BT[of_target],
                k=k_BTGC[of_target],
                v=v_BTGC[of_target],
            )
        first, *others = self.lookup.sources
        k_BSGC, v_BSGC = self._read(first)
        for source in others:
            is_here = (self.lookup.reads_BS == source)[..., None, None]
            k_here, v_here = self._read(source)
            k_BSGC = torch.where(is_here, k_here, k_BSGC)
            v_BSGC = torch.where(is_here, v_here, v_BSGC)
        if self.lookup.missing_BS is not None:
            spec = spec.without(self.lookup.missing_BS)
        return attention(q_BTHC, k_BSGC, v_BSGC, spec=spec, scale=scale)

    def _read(self, source: int) -> tuple[Tensor, Tensor]:
        return self.buffers[source].read(self.place.rows, self.place.num_source_tokens)
