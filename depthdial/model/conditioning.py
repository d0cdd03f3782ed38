"""What conditions one pass, as plain tensors with a row for each (loop, budget) of the batch.

The values come from `modulation.py` and `loop_lora.py`; `sublayer.py` and `update.py` read them.
Every tensor is [1 or B, 1, ...], so that rows of different loops and budgets can stand in one
call; a low-rank pair that all rows share is the parameter itself, without a row dimension.
Letters: B rows of the batch, U rows of a table, D model width, R low rank, C channels per head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import ModelConfig, count_slots, reads_first_keys
from depthdial.layers.attention import HeadGains
from depthdial.layers.primitives import Deltas, LowRankPair

Key = TypeVar("Key", bound=Hashable)
Rows = TypeVar("Rows")
"""Tensors in tuples and dicts, with rows in their first dimension."""


class SublayerModulation(NamedTuple):
    """Conditioning of one sublayer; None where nothing conditions it.

    scale [., 1, D] multiplies the norm's gain, shift is added after it, gain multiplies the
    branch: 1 + lambda, mu and 1 + omega of ELR section 3.4, stored whole. low_rank_gain [., 1, R]
    is g and low_rank holds B (down) and A (up) of its low-rank path. deltas, norm_gain [., 1, D],
    post_norm_gain [., 1, D] and head_gains are stored differences of this loop.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    gain: Tensor | None = None
    low_rank_gain: Tensor | None = None
    low_rank: LowRankPair | None = None
    deltas: Deltas | None = None
    norm_gain: Tensor | None = None
    post_norm_gain: Tensor | None = None
    head_gains: HeadGains | None = None


UNMODULATED = SublayerModulation()


class EntryModulation(NamedTuple):
    """z = raw_gain * s + norm_gain * RMSNorm(s) + shift + eta * h_in, each [1 or B, 1, 1 or D].

    A first loop has raw_gain 1 and zeros elsewhere, so it enters unchanged.
    """

    raw_gain: Tensor
    norm_gain: Tensor
    shift: Tensor
    eta: Tensor


class UpdateModulation(NamedTuple):
    """Conditioning of the update, each [1 or B, 1, 1 or D]; None where there is none.

    exit_gain multiplies the rate (pi_i + g_exit of ELR); gate_bypass is 1 where the candidate
    replaces the state exactly and 0 elsewhere; loop_share is 1 / k. anchor is the weight of the
    first candidate, non-zero after the last loop only; is_first (bool) marks rows whose candidate
    is that first one, and goes with it.
    """

    exit_gain: Tensor | None = None
    gate_bypass: Tensor | None = None
    loop_share: Tensor | None = None
    anchor: Tensor | None = None
    is_first: Tensor | None = None


class LoopModulation(NamedTuple):
    """Everything that one pass of the core is conditioned on; None where nothing conditions it."""

    sublayers: tuple[SublayerModulation, ...] | None
    entry: EntryModulation | None
    update: UpdateModulation


def row_points(
    loop_idx: int | Tensor, num_loops: NumLoops, *, num_rows: int = 1
) -> list[tuple[int, int]]:
    """(loop index, loop count) of each row; num_rows: of the batch, where neither says it."""
    loop_B, num_loops_B, _ = torch.broadcast_tensors(
        torch.as_tensor(loop_idx), torch.as_tensor(num_loops), torch.zeros(num_rows)
    )
    return list(zip(loop_B.tolist(), num_loops_B.tolist(), strict=True))


def distinct(keys: Sequence[Key]) -> tuple[list[Key], Tensor]:
    """The different keys in ascending order, and the place of each row's key among them, [B]."""
    different = sorted(set(keys))
    places = {key: place for place, key in enumerate(different)}
    return different, torch.tensor([places[key] for key in keys])


class ConditioningTable:
    """Conditioning of all passes and codas of some loop counts, computed once, without gradient.

    It belongs to the calls that share it, not to the model: it knows nothing of weights that
    change later.

    Args: loops: one row for each (loop index, loop count); codas: one for each loop count.
    """

    def __init__(
        self,
        loops: Mapping[tuple[int, int], LoopModulation],
        codas: Mapping[int, tuple[SublayerModulation, ...] | None],
    ) -> None:
        self._loops = _Entries(loops)
        self._codas = _Entries(codas)

    def for_loop(self, loop_idx: int | Tensor, num_loops: NumLoops) -> LoopModulation:
        """Conditioning of one pass; as in `LoopConditioning.for_loop`."""
        if isinstance(loop_idx, int) and isinstance(num_loops, int):
            return self._loops.one((loop_idx, num_loops))
        return self._loops.rows(row_points(loop_idx, num_loops))

    def for_coda(self, num_loops: NumLoops) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of the coda."""
        if isinstance(num_loops, int):
            return self._codas.one(num_loops)
        return self._codas.rows(num_loops.tolist())


class _Entries(Generic[Key, Rows]):
    """Entries of one row each; stacked when rows of different keys first stand in one call."""

    def __init__(self, entries: Mapping[Key, Rows]) -> None:
        self._entries = entries
        self._places = {key: place for place, key in enumerate(entries)}
        self._stacked: Rows | None = None

    def one(self, key: Key) -> Rows:
        assert key in self._entries, f"the table of this call has no {key}"
        return self._entries[key]

    def rows(self, keys: Sequence[Key]) -> Rows:
        for key in keys:
            assert key in self._entries, f"the table of this call has no {key}"
        if self._stacked is None:
            self._stacked = join_rows(list(self._entries.values()))
        return pick_rows(self._stacked, torch.tensor([self._places[key] for key in keys]))


def check_rows_mix(config: ModelConfig, loop_idx_B: Tensor, num_loops: NumLoops) -> None:
    """Refuse rows that cannot stand in one call of `loop`, before anything is computed.

    Raises: ValueError for a loop index that a row does not have, and for rows of different loops
        in a core of segments, or of the first loop beside later ones that read its keys or
        routes.
    """
    for row, (loop_idx, count) in enumerate(row_points(loop_idx_B, num_loops)):
        if not 0 <= loop_idx < count:
            raise ValueError(
                f"row {row} has loop_idx={loop_idx} of num_loops={count}; give 0 to {count - 1}."
            )
    loops = sorted(set(loop_idx_B.tolist()))
    if len(loops) == 1:
        return
    if config.segments:
        raise ValueError(
            f"segments={list(config.segments)}: each part of the core runs all its loops before "
            f"the next, so rows of the loops {loops} cannot stand in one call. Give rows of one "
            "loop index."
        )
    reason = None
    if config.loop.local_window is not None:
        reason = f"loop.local_window={config.loop.local_window}: later loops read keys and values"
    elif reads_first_keys(config):
        reason = f"loop.cache_policy='{config.loop.cache_policy}': later loops read keys and values"
    elif count_slots(config.core_layout, "routes"):
        reason = f"layout='{config.layout}': later loops read routes"
    if reason is not None and 0 in loops:
        raise ValueError(
            f"{reason} that the first loop writes, so rows of the loops {loops} cannot stand in "
            "one call. Run the rows of loop 0 by themselves."
        )


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of different loops and budgets, one part under the other, [B1 + B2 + ..., ...].

    A low-rank pair that all parts share stays one, so that its products are not batched.
    """
    return _map_rows(lambda *leaves: torch.cat(leaves), *parts)


def pick_rows(table: Rows, row_entry_B: Tensor) -> Rows:
    """The row of a table that each row of the batch uses: [U, ...] -> [B, ...]."""
    return _map_rows(lambda leaf: leaf.index_select(0, row_entry_B.to(leaf.device)), table)


def _map_rows(change: Callable[..., Tensor], *trees: Rows) -> Rows:
    """Change every tensor that has rows; None and pairs without rows stay."""

    def change_leaf(*leaves: Tensor | LowRankPair | None) -> Tensor | LowRankPair | None:
        first = leaves[0]
        if isinstance(first, LowRankPair):
            if first.down.ndim == 3:
                return LowRankPair(*(change(*parts) for parts in zip(*leaves, strict=True)))
            assert all(pair.down is first.down for pair in leaves), "shared by all rows"
            return first
        assert all((leaf is None) == (first is None) for leaf in leaves), "conditioned alike"
        return None if first is None else change(*leaves)

    return tree_map(change_leaf, *trees, is_leaf=lambda node: isinstance(node, LowRankPair))
