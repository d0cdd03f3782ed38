"""The slots over what a cache stores, and the one rule of loops that read the first one's keys.

A slot is bound to the rows and positions of one call; which buffer it reads and writes is decided
by the entries of a rule (`cache/entries.py`, `cache/groups.py`).
Letters: B rows of a call, T query tokens, S source tokens, H query heads, G key/value heads,
C channels per head; a cache has N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from depthdial.cache.buffers import KVBuffer, WritePlace
from depthdial.layers.attention_ops import AttentionSpec, attention
from depthdial.layers.state import KVSlot, Routes, SharedKV, State


def written(k_BTGC: Tensor | None, v_BTGC: Tensor | None) -> tuple[Tensor, Tensor]:
    """The keys and values of a slot that stores."""
    assert k_BTGC is not None and v_BTGC is not None, "this slot stores keys and values"
    return k_BTGC, v_BTGC


class ReadOnlySlot:
    """Reads what another loop wrote, this call's tokens included."""

    is_read_only = True
    shared = None

    def __init__(self, entries: SharedKV) -> None:
        self.entries = entries

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        assert k_BTGC is None and v_BTGC is None, "a read-only slot takes no keys and values"
        return self.entries.attend(q_BTHC, spec=spec, scale=scale)


def slot_beside_first(
    own: Callable[[SharedKV | None], KVSlot], first: SharedKV | None, *, shares_first: bool
) -> KVSlot:
    """The slot of a loop in models whose later loops read the first one's keys and values.

    The one rule of calls with and without a cache: the first loop has a slot of its own; later
    loops read the first one's alone (share_first), or mix it with their own (local window).

    Args: own: makes a slot of the loop's own, given what it shares; first: None in the first loop.
    """
    if first is None:
        return own(None)
    return ReadOnlySlot(first) if shares_first else own(first)


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


class RowsSlot:
    """Rows of one call under several rules; each part attends by itself.

    Args: parts: places among the rows of the call, ascending, and the slot of these rows. Together
        they are all rows.
    """

    is_read_only = False
    shared = None

    def __init__(self, parts: Sequence[tuple[Tensor, KVSlot]]) -> None:
        self.parts = parts

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
        y_BTHC = torch.empty_like(q_BTHC)
        for places, slot in self.parts:
            k_here, v_here, spec_here = k_BTGC[places], v_BTGC[places], spec.narrow(places)
            y_BTHC[places] = slot.attend(
                q_BTHC[places], k_here, v_here, spec=spec_here, scale=scale
            )
        return y_BTHC


class StateSlot:
    """The recurrent state of one (layer, loop), kept for all rows of the cache.

    Args:
        stored: states of [N, ...] by `key`; filled at the first `set`.
        rows: of the cache, on the CPU, in the order of the pass; None for all, in order.
    """

    def __init__(
        self,
        stored: MutableMapping[Hashable, State],
        key: Hashable,
        *,
        rows: Tensor | None,
        num_rows: int,
    ) -> None:
        self.stored, self.key = stored, key
        self.rows, self.num_rows = rows, num_rows

    def get(self) -> State | None:
        state = self.stored.get(self.key)
        if state is None or self.rows is None:
            return state
        return tuple(x[self.rows.to(x.device)] for x in state)

    def set(self, state: State) -> None:
        if self.rows is not None:
            # Rows that ran no such loop have read nothing in it: zeros.
            before = self.stored.get(self.key)
            if before is None:
                before = tuple(x.new_zeros(self.num_rows, *x.shape[1:]) for x in state)
            pairs = zip(before, state, strict=True)
            state = tuple(old.index_copy(0, self.rows.to(old.device), x) for old, x in pairs)
        self.stored[self.key] = state


class CallRoutes:
    """Routes of one layer, kept until the call ends.

    Args:
        recorded: of all rows of the call, by `key`; filled in the first loop, which all rows run.
        rows: of the call, on the CPU, in the order of the pass; None for all, in order.
    """

    def __init__(
        self, recorded: MutableMapping[int, Routes], key: int, *, rows: Tensor | None
    ) -> None:
        self.recorded, self.key, self.rows = recorded, key, rows

    def replay(self) -> Routes | None:
        routes = self.recorded.get(self.key)
        if routes is None or self.rows is None:
            return routes
        return tree_map(lambda x: x[self.rows.to(x.device)], routes)

    def record(self, routes: Routes) -> Routes:
        in_order = routes
        if self.rows is not None:
            before = self.recorded.get(self.key)
            if before is None:
                in_order = tree_map(lambda x: x[torch.argsort(self.rows).to(x.device)], routes)
            else:
                in_order = tree_map(
                    lambda old, x: old.index_copy(0, self.rows.to(x.device), x), before, routes
                )
        self.recorded[self.key] = in_order
        return routes
