"""Rows of whole documents: every token scored exactly once, whatever the context.

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from depthdial.data.shards import TokenDocument
from depthdial.eval.scoring import ScoredRow


class DocumentRow(NamedTuple):
    """One model row of a document: what it reads, and what of it is scored here."""

    document_idx: int
    scored: ScoredRow


def document_rows(
    documents: Sequence[TokenDocument], *, context: int, stride: int, start_id: int | None
) -> Iterator[DocumentRow]:
    """Cut documents into rows of at most `context` inputs; every token is scored exactly once.

    The first token is predicted from `start_id`; without one it is not scored. Rows overlap by
    context - stride tokens, which are read again but not scored again.
    """
    for document_idx, document in enumerate(documents):
        tokens_T = np.asarray(document.tokens_T, dtype=np.int64)
        if start_id is not None:
            tokens_T = np.concatenate([[start_id], tokens_T])
        num_targets = len(tokens_T) - 1
        scored, begin = 0, 0
        while scored < num_targets:
            end = min(begin + context, num_targets)
            read_T = tokens_T[begin : scored + 1]
            yield DocumentRow(document_idx, ScoredRow(read_T, tokens_T[scored + 1 : end + 1]))
            scored, begin = end, begin + stride
