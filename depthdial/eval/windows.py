"""Rows of whole documents: every token scored exactly once, whatever the context.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthdial.data.packing import IGNORE
from depthdial.data.shards import TokenDocument


class Window(NamedTuple):
    """One model row of a document: inputs, and targets with IGNORE where another row scores."""

    document_idx: int
    tokens_T: np.ndarray
    targets_T: np.ndarray


def windows(
    documents: Sequence[TokenDocument], *, context: int, stride: int, start_id: int | None
) -> Iterator[Window]:
    """Cut documents into rows of at most `context` inputs; every token is scored exactly once.

    The first token is predicted from `start_id`; without one it is not scored. Rows overlap by
    context - stride tokens, which are read again but not scored again.
    """
    for document_idx, document in enumerate(documents):
        tokens_T = np.asarray(document.tokens_T, dtype=np.int64)
        if start_id is not None:
            tokens_T = np.concatenate([[start_id], tokens_T])
        inputs_T, targets_T = tokens_T[:-1], tokens_T[1:]
        scored, begin = 0, 0
        while scored < len(targets_T):
            end = min(begin + context, len(targets_T))
            row_T = targets_T[begin:end].copy()
            row_T[: scored - begin] = IGNORE
            yield Window(document_idx, inputs_T[begin:end], row_T)
            scored, begin = end, begin + stride


def collate(rows: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Right-pad to the longest row; no mask where nothing is padded."""
    longest = max(len(row.tokens_T) for row in rows)
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets_BT = torch.full((len(rows), longest), IGNORE)
    real_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.tokens_T)
        tokens_BT[i, :length] = torch.from_numpy(row.tokens_T)
        targets_BT[i, :length] = torch.from_numpy(row.targets_T)
        real_BT[i, :length] = True
    return tokens_BT, targets_BT, None if bool(real_BT.all()) else real_BT
