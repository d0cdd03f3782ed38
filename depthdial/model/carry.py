"""Tensors that one pass of the core hands to the next besides the state.

Without a cache, models whose later loops read the first loop's keys and values get them from
here, so that training and inference run the same rule and recomputation keeps its memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from depthdial.config import ModelConfig
from depthdial.layers.primitives import wide_dtype
from depthdial.layers.state import GivenKV, KVSlot, ReadOnlySlot, RecordingSlot, UncachedSlot


class LoopCarry(NamedTuple):
    """Fields:
    first_keys: (k, v) of every token mixer of the core in the first loop; empty before it; None
        for models and calls that need none.
    first_candidate: the first loop's candidate state; None before it, and for updates that have
        no anchor.
    """

    first_keys: tuple[tuple[Tensor, Tensor], ...] | None = None
    first_candidate: Tensor | None = None

    def narrow(self, places: Tensor | slice) -> LoopCarry:
        """Keep some rows of the batch."""
        return tree_map(lambda t: None if t is None else t[places], self)

    def detached(self, without_grad: Tensor) -> LoopCarry:
        """The carry, cut off from its history in the rows marked True; see `detach_rows`."""
        return tree_map(lambda t: None if t is None else detach_rows(t, without_grad), self)


def detach_rows(x: Tensor, without_grad: Tensor) -> Tensor:
    """A tensor [B, ...], cut off from its history in the rows marked True; one mark is for all."""
    if len(without_grad) == 1:
        return x.detach()
    marks = without_grad.to(x.device).view(-1, *(1,) * (x.ndim - 1))
    return torch.where(marks, x.detach(), x)


def first_carry(config: ModelConfig, *, is_cached: bool) -> LoopCarry:
    """The carry before the first loop."""
    shares = config.loop.cache_policy == "share_first" or config.loop.local_window is not None
    return LoopCarry(first_keys=() if shares and not is_cached else None)


def slots_from_carry(
    carry: LoopCarry, slots: tuple[KVSlot, ...], *, config: ModelConfig
) -> tuple[KVSlot, ...]:
    """The slots of one pass: recording in the first loop, then reading what it recorded."""
    if carry.first_keys is None:
        return slots
    if not carry.first_keys:
        return tuple(RecordingSlot() for _ in slots)
    if config.loop.local_window is not None:
        return tuple(UncachedSlot(shared=GivenKV(k, v)) for k, v in carry.first_keys)
    return tuple(ReadOnlySlot(GivenKV(k, v)) for k, v in carry.first_keys)


def with_first_keys(carry: LoopCarry, slots: tuple[KVSlot, ...]) -> LoopCarry:
    """The carry with what recording slots hold."""
    if carry.first_keys != ():
        return carry
    recorded = [slot for slot in slots if isinstance(slot, RecordingSlot)]
    pairs = tuple((s.k, s.v) for s in recorded if s.k is not None and s.v is not None)
    return carry._replace(first_keys=pairs)


def with_first_candidate(carry: LoopCarry, candidate_BTD: Tensor) -> LoopCarry:
    """The carry with the candidate of the first loop."""
    if carry.first_candidate is not None:
        return carry
    return carry._replace(first_candidate=candidate_BTD)


def anchor(state_BTD: Tensor, first_candidate_BTD: Tensor | None, weight: Tensor) -> Tensor:
    """(1 - w) state + w first candidate, [B, T, D] (arXiv 2605.23872)."""
    assert first_candidate_BTD is not None
    # fp32: a bf16 weight moves in steps of half a percent.
    wide = wide_dtype(state_BTD.dtype)
    weight = weight.to(wide)
    return torch.lerp(state_BTD.to(wide), first_candidate_BTD.to(wide), weight).to(state_BTD.dtype)
