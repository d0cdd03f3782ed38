"""Training rows: what a batch is, where rows come from, and iteration that can resume.

Row r of a source is a pure function of (seed, r), so any process can compute any row
and the position in the data is one number. Files are in `shards.py`, tasks that
generate their rows in `synthetic.py`.
Letters: B rows, T tokens of a row (the context).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from depthdial.data.shards import TokenShards

IGNORE = -100
"""Target of a position that is not scored; also PyTorch's default ignore_index."""
MAX_SEED = 2**63


class Batch(NamedTuple):
    """Rows ready for a model."""

    tokens_BT: Tensor
    """Inputs, int64."""
    targets_BT: Tensor
    """Token wanted at each position, int64; IGNORE where nothing is scored."""
    document_ids_BT: Tensor | None = None
    """int64, equal inside a document, different from its neighbours; None: not isolated."""
    padding_mask_BT: Tensor | None = None
    """bool, True on real tokens; None: no padding."""
    weights_BT: Tensor | None = None
    """float, weight of each target in the loss, at least 0; None: 1 for every target."""


def take_rows(batch: Batch, start: int, end: int, *, device: torch.device) -> Batch:
    """Rows [start, end) on a device."""
    return Batch(*(None if t is None else t[start:end].to(device) for t in batch))


def pick_rows(batch: Batch, rows: Tensor | slice) -> Batch:
    """Some rows of a batch; their numbers may be on another device."""
    return Batch(*(None if t is None else t[beside(rows, t)] for t in batch))


def beside(rows: Tensor | slice, tensor: Tensor) -> Tensor | slice:
    """Row numbers on the device of what they pick."""
    return rows if isinstance(rows, slice) else rows.to(tensor.device)


class RowSource(Protocol):
    """An endless supply of numbered rows of equal length."""

    context: int
    """Tokens per row."""
    vocab_size: int
    """Number of token ids."""

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens after which the data repeats; None if it never does."""

    @property
    def fingerprint(self) -> str:
        """Equal for sources of the same content."""

    def rows(self, first_row: int, num_rows: int) -> Batch:
        """Rows first_row .. first_row + num_rows - 1, depending on nothing else."""


@dataclass(frozen=True)
class DataState:
    """Position in a row source: everything that resuming needs."""

    next_row: int = 0
    """First row that has not been used."""

    def __post_init__(self) -> None:
        if type(self.next_row) is not int or self.next_row < 0:
            raise ValueError(f"next_row={self.next_row!r} must be an integer of at least 0.")

    def to_dict(self) -> dict[str, int]:
        """Plain JSON types."""
        return {"next_row": self.next_row}

    @classmethod
    def from_dict(cls, values: Any) -> DataState:
        """Inverse of `to_dict`. Raises ValueError for any other content."""
        if not isinstance(values, dict) or set(values) != {"next_row"}:
            raise ValueError(f"a data state is {{'next_row': integer}}, got {values!r}.")
        return cls(values["next_row"])

    def epoch(self, source: RowSource) -> int:
        """Epoch, from 0, that the next row starts in; 0 for a source that never repeats."""
        if source.epoch_tokens is None:
            return 0
        return self.next_row * source.context // source.epoch_tokens


def iterate_batches(
    source: RowSource, batch_size: int, state: DataState
) -> Iterator[tuple[Batch, DataState]]:
    """Endless batches from `state` on, each with the state after it.

    Passing such a state back continues as if there had been no interruption.
    Raises: ValueError for batch_size < 1, at the call.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")

    def batches() -> Iterator[tuple[Batch, DataState]]:
        next_row = state.next_row
        while True:
            batch = source.rows(next_row, batch_size)
            next_row += batch_size
            yield batch, DataState(next_row)

    return batches()


class PackedText:
    """Rows cut from an endless stream of shuffled documents; no token is lost or padded.

    The stream is epoch after epoch, each a new order of all documents. Row r holds the
    stream's tokens [r*T, r*T + T] (inputs and next-token targets), so a row may cross the
    end of an epoch, and every token of an epoch is an input exactly once.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        context: int,
        seed: int,
        opening_id: int | None,
        isolate_documents: bool = True,
    ) -> None:
        """Rows of one split.

        Args:
            context: tokens per row.
            seed: of the document order, in [0, 2**63).
            opening_id: token that opens a document (`Tokenizer.opening_id`). It stands where the
                end-of-text of the document before would be read, so that the first token of every
                document is predicted from it, as in evaluation and generation. None: a model that
                expects no such token; then a document's first token is not scored.
            isolate_documents: give document ids. The opening token belongs to the document that
                follows it.

        Raises: ValueError if the split is shorter than one row.
        """
        check_seed(seed)
        if context < 1:
            raise ValueError(f"context={context} must be at least 1 token.")
        if shards.num_tokens < context + 1:
            raise ValueError(
                f"split '{shards.split}' of {shards.directory} has {shards.num_tokens} tokens, "
                f"but one row of context {context} needs {context + 1}. Give more text, a "
                f"context of at most {shards.num_tokens - 1}, or another valid_frac."
            )
        self.shards = shards
        self.context = context
        self.seed = seed
        self.isolate_documents = isolate_documents
        self.vocab_size = shards.vocab_size
        self.epoch_tokens = shards.num_tokens
        self.opening_id = opening_id
        self._file_starts = np.cumsum(shards.lengths) - shards.lengths
        self._orders: dict[int, _EpochOrder] = {}

    @property
    def fingerprint(self) -> str:
        """Of the split, all of which is read, and what opens its documents."""
        return opened_fingerprint(self.shards, self.opening_id)

    def rows(self, first_row: int, num_rows: int) -> Batch:
        """Rows first_row .. first_row + num_rows - 1; padding_mask_BT is None.

        Raises: ValueError for a negative row, num_rows < 1, or a damaged token file.
        """
        check_rows(first_row, num_rows)
        shape = (num_rows, self.context)
        stream, serials = self._read(first_row * self.context, num_rows * self.context + 1)
        self.shards.check_ids(stream)
        inputs, targets, owners = stream[:-1].copy(), stream[1:].copy(), serials[1:].copy()
        # Where a target is the first token of its document, the input is the end-of-text of the
        # document before. An input belongs to the document of its target, so it opens the next one.
        is_first = serials[1:] != serials[:-1]
        if self.opening_id is None:
            targets[is_first] = IGNORE
            owners[is_first] = serials[:-1][is_first]
        elif self.opening_id != self.shards.eos_id:
            inputs[is_first] = self.opening_id
        document_ids_BT = None
        if self.isolate_documents:
            owners_BT = owners.reshape(shape)
            document_ids_BT = torch.from_numpy(owners_BT - owners_BT[:, :1])
        return Batch(
            tokens_BT=torch.from_numpy(inputs.reshape(shape)),
            targets_BT=torch.from_numpy(targets.reshape(shape)),
            document_ids_BT=document_ids_BT,
        )

    def _read(self, position: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Stream tokens from `position` on, and for each the serial number of its document.

        A document gets a new number in every epoch, so the last of one epoch and the
        first of the next differ even if they are the same text.
        """
        tokens = np.empty(length, dtype=np.int64)
        serials = np.empty(length, dtype=np.int64)
        done = 0
        while done < length:
            epoch, offset = divmod(position + done, self.epoch_tokens)
            order = self._order(epoch)
            rank = int(np.searchsorted(order.ends, offset, side="right"))
            count = min(int(order.ends[rank]) - offset, length - done)
            start = int(order.shifts[rank]) + offset
            tokens[done : done + count] = self.shards.tokens[start : start + count]
            serials[done : done + count] = epoch * self.shards.num_documents + rank
            done += count
        return tokens, serials

    def _order(self, epoch: int) -> _EpochOrder:
        """Document order of an epoch; the two newest asked for are kept."""
        if epoch not in self._orders:
            # Raw bits and a stable sort, not Generator.permutation: NumPy promises the same
            # bits in every version, but not the same permutation.
            keys = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
            order = np.argsort(keys.random_raw(self.shards.num_documents), kind="stable")
            lengths = self.shards.lengths[order]
            ends = np.cumsum(lengths)
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = _EpochOrder(ends, self._file_starts[order] - (ends - lengths))
        return self._orders[epoch]


def opened_fingerprint(shards: TokenShards, opening_id: int | None) -> str:
    """Equal for equal files whose documents are opened alike: the same files opened by another
    token are other rows."""
    if opening_id == shards.eos_id:
        return shards.fingerprint
    return hashlib.sha256(f"{shards.fingerprint} opened by {opening_id}".encode()).hexdigest()


class _EpochOrder(NamedTuple):
    """Shuffled documents of one epoch."""

    ends: np.ndarray
    """Position in the epoch after each document."""
    shifts: np.ndarray
    """File position minus epoch position, per document."""


def check_seed(seed: int) -> None:
    """Raises ValueError unless `seed` is an integer in [0, 2**63)."""
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed={seed!r} must be an integer in [0, 2**63).")


def check_rows(first_row: int, num_rows: int) -> None:
    """Raises ValueError unless the range is not empty and starts at 0 or later."""
    if first_row < 0 or num_rows < 1:
        raise ValueError(f"rows({first_row}, {num_rows}): first_row >= 0 and num_rows >= 1 needed.")
