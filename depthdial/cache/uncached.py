"""Calls without a cache: slots that store nothing, and what one pass hands to the next.

Attention is over this call's own tokens, recurrence begins at zero. What later loops read of the
first one (keys and values, routes) travels in `LoopCarry` as tensors, so that training and
inference run the same rule, recomputation keeps its memory and nothing is counted twice.
Letters: B batch, T query tokens, S source tokens, G key/value heads, C channels per head,
E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from depthdial.cache.slots import slot_beside_first, written
from depthdial.config import ModelConfig, SlotKind, count_slots, reads_first_keys
from depthdial.layers.attention_ops import AttentionSpec, attention
from depthdial.layers.state import KVSlot, Routes, SharedKV, Slot, State


class UncachedSlot:
    """Stores nothing: attention over this call's own tokens (training, scoring)."""

    is_read_only = False

    def __init__(self, shared: SharedKV | None = None) -> None:
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
        return attention(q_BTHC, k_BTGC, v_BTGC, spec=spec, scale=scale)


class RecordingSlot:
    """An uncached slot that keeps this call's keys and values, for a later loop to share.

    Fields:
        k, v: [B, T, G, C] each; None before the first `attend`.
    """

    is_read_only = False
    shared = None

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        self.k, self.v = written(k_BTGC, v_BTGC)
        return attention(q_BTHC, self.k, self.v, spec=spec, scale=scale)


class GivenKV:
    """Keys and values [B, S, G, C] given as tensors; a `SharedKV` without a cache."""

    def __init__(self, k_BSGC: Tensor, v_BSGC: Tensor) -> None:
        self.k, self.v = k_BSGC, v_BSGC

    def attend(self, q_BTHC: Tensor, *, spec: AttentionSpec, scale: float) -> Tensor:
        return attention(q_BTHC, self.k, self.v, spec=spec, scale=scale)


class UncachedState:
    """A recurrent slot that keeps nothing: a call begins at zero."""

    def get(self) -> State | None:
        return None

    def set(self, state: State) -> None:
        """Nothing comes after this call."""


class UncachedRoutes:
    """The routes of one pass.

    Args: first: what an earlier loop recorded; None in the first loop.
    """

    def __init__(self, first: Routes | None = None) -> None:
        self.first = first
        self.recorded: Routes | None = None

    def replay(self) -> Routes | None:
        return self.first

    def record(self, routes: Routes) -> Routes:
        self.recorded = routes
        return routes


STORELESS: dict[SlotKind, Callable[[], Slot]] = {
    "keys": UncachedSlot,
    "state": UncachedState,
    "routes": UncachedRoutes,
}


def uncached_slots(kinds: Iterable[SlotKind]) -> tuple[Slot, ...]:
    """Slots of a pass, before the carry says what its layers read of the first loop."""
    return tuple(STORELESS[kind]() for kind in kinds)


class LoopCarry(NamedTuple):
    """Tensors that one pass hands to the next besides the state; rows first.

    Fields:
        first_keys: (k, v) of every attention layer of the core in the first loop; empty before it;
            None for models and calls whose later loops read none from here.
        first_candidate: the first loop's candidate state; before it the state, which nobody reads;
            None for updates that have no anchor.
        routes: of every routed layer of the core in the first loop; empty before it; None for
            models without one, and on a cache.
        balance, loads: of every routed layer, auxiliary losses [B] and tokens of each expert
            [B, E], summed over the loops so far: a replayed route counts in every loop.
    """

    first_keys: tuple[tuple[Tensor, Tensor], ...] | None = None
    first_candidate: Tensor | None = None
    routes: tuple[Routes, ...] | None = None
    balance: tuple[Tensor, ...] = ()
    loads: tuple[Tensor, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> LoopCarry:
        """The carry with every tensor changed, e.g. to some of its rows."""
        return tree_map(lambda x: None if x is None else change(x), self)


def first_carry(
    config: ModelConfig, *, is_cached: bool, first_candidate: Tensor | None
) -> LoopCarry:
    """The carry before the first loop."""
    has_routes = count_slots(config.core_layout, "routes") > 0
    return LoopCarry(
        first_keys=() if reads_first_keys(config) and not is_cached else None,
        first_candidate=first_candidate,
        routes=() if has_routes and not is_cached else None,
    )


def slots_from_carry(
    carry: LoopCarry, slots: tuple[Slot, ...], *, config: ModelConfig
) -> tuple[Slot, ...]:
    """The slots of one pass: recording in the first loop, then reading what it recorded."""
    keys, routes = iter(carry.first_keys or ()), iter(carry.routes or ())
    shares_first = config.loop.local_window is None
    of_pass: list[Slot] = []
    for slot in slots:
        if isinstance(slot, UncachedSlot) and carry.first_keys is not None:
            pair = next(keys, None)
            first = None if pair is None else GivenKV(*pair)
            of_pass.append(slot_beside_first(_own_slot, first, shares_first=shares_first))
        elif isinstance(slot, UncachedRoutes) and carry.routes is not None:
            of_pass.append(UncachedRoutes(next(routes, None)))
        else:
            of_pass.append(slot)
    return tuple(of_pass)


def carry_of_pass(carry: LoopCarry, slots: tuple[Slot, ...]) -> LoopCarry:
    """What a pass hands on: the carry with what its slots hold."""
    if carry.first_keys == ():
        recorded = [slot for slot in slots if isinstance(slot, RecordingSlot)]
        pairs = tuple((s.k, s.v) for s in recorded if s.k is not None and s.v is not None)
        carry = carry._replace(first_keys=pairs)
    if carry.routes is None:
        return carry
    of_pass = [slot.recorded or slot.first for slot in slots if isinstance(slot, UncachedRoutes)]
    routes = tuple(x for x in of_pass if x is not None)
    assert len(routes) == len(of_pass), "a routed layer records its routes, or replays them"
    return carry._replace(
        routes=carry.routes or routes,
        balance=_sums(carry.balance, [x.balance_B for x in routes]),
        loads=_sums(carry.loads, [x.load_BE for x in routes]),
    )


def _own_slot(shared: SharedKV | None) -> KVSlot:
    return RecordingSlot() if shared is None else UncachedSlot(shared)


def _sums(before: tuple[Tensor, ...], new: list[Tensor]) -> tuple[Tensor, ...]:
    if not before:
        return tuple(new)
    return tuple(a + b for a, b in zip(before, new, strict=True))
