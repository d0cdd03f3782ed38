"""Log-probabilities of given tokens at one loop count: batched, padded, common prefixes read once.

Which rows a document makes is in `document_rows.py`; what losses mean for a curve is in
`depth_sweep.py`.
Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.loop_counts import check_num_loops
from depthdial.cache.protocol import LoopCache
from depthdial.config import named_rule
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

Precision = Literal["fp32", "bf16"]
CACHED_PREFIX_TOKENS = 16
"""Shortest common prefix that is read once for several rows: below it a second call costs more."""


class ScoredRow(NamedTuple):
    """Tokens that are read, and the tokens after them that are scored.

    Fields:
        prefix_ids: at least one token; the first target is predicted from its last one.
        target_ids: at least one token; each is predicted from everything before it.
    """

    prefix_ids: Sequence[int]
    target_ids: Sequence[int]


@torch.no_grad()
def token_logprobs(
    model: LoopedLM,
    rows: Sequence[ScoredRow],
    num_loops: int,
    *,
    rows_per_forward: int = 16,
    precision: Precision = "fp32",
) -> list[Tensor]:
    """Log-probability of every target of every row, in nats.

    Rows of one call are padded on the right. Neighbouring rows of one prefix of at least
    `CACHED_PREFIX_TOKENS` tokens read it once, where the model's cache policy keeps each loop's
    entries, so that the result does not depend on how calls are cut; else every row reads its own.

    Args:
        num_loops: for all rows; beyond max_loops is allowed.
        rows_per_forward: most rows of one call; changes memory, and rounding.
        precision: `fp32` or `bf16` (autocast). In bf16 log-probabilities move with the batch by up
            to 1.6e-2, more where logits are large (docs/exactness.md).

    Returns: one tensor per row, as long as its targets, fp32 on the CPU.
    Raises: ValueError for no rows, an empty prefix or target, or a number that is not allowed.
    """
    check_scoring(rows_per_forward=rows_per_forward, precision=precision)
    check_num_loops(num_loops)
    if not rows:
        raise ValueError("there are no rows to score; give at least one.")
    for number, row in enumerate(rows):
        if not len(row.prefix_ids) or not len(row.target_ids):
            raise ValueError(
                f"row {number} has {len(row.prefix_ids)} tokens to read and {len(row.target_ids)} "
                "to score; give at least one of each."
            )
    is_exact = named_rule(model.config.loop.cache_policy).is_exact
    found: list[Tensor] = []
    for part, has_common_prefix in _calls(rows, rows_per_forward, shares=is_exact):
        score = _after_common_prefix if has_common_prefix else _whole_rows
        found += score(model, part, num_loops, precision)
    return found


def check_scoring(*, rows_per_forward: int, precision: str) -> None:
    """Refuse what would score nothing, or in another precision than meant. Raises: ValueError."""
    if not isinstance(rows_per_forward, int) or rows_per_forward < 1:
        raise ValueError(f"rows_per_forward={rows_per_forward!r} must be an integer of at least 1.")
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r} is unknown; give 'fp32' or 'bf16'.")


def _calls(
    rows: Sequence[ScoredRow], rows_per_forward: int, *, shares: bool
) -> Iterator[tuple[list[ScoredRow], bool]]:
    """Rows of each call in order, and whether they have a common prefix that is read once."""
    waiting: list[ScoredRow] = []
    for prefix, group in groupby(rows, key=lambda row: tuple(row.prefix_ids)):
        alike = list(group)
        if shares and len(alike) > 1 and len(prefix) >= CACHED_PREFIX_TOKENS:
            if waiting:
                yield waiting, False
                waiting = []
            for start in range(0, len(alike), rows_per_forward):
                yield alike[start : start + rows_per_forward], True
            continue
        for row in alike:
            waiting.append(row)
            if len(waiting) == rows_per_forward:
                yield waiting, False
                waiting = []
    if waiting:
        yield waiting, False


def _whole_rows(
    model: LoopedLM, rows: Sequence[ScoredRow], num_loops: int, precision: Precision
) -> list[Tensor]:
    """Every row read from its first token."""
    inputs = [[*row.prefix_ids, *row.target_ids[:-1]] for row in rows]
    return _read(model, inputs, rows, num_loops, precision, cache=None)


def _after_common_prefix(
    model: LoopedLM, rows: Sequence[ScoredRow], num_loops: int, precision: Precision
) -> list[Tensor]:
    """The prefix read once, but for its last token, and its entries copied to every row."""
    prefix = [*rows[0].prefix_ids]
    capacity = len(prefix) + max(len(row.target_ids) for row in rows)
    device = model.embedding.weight.device
    cache = ContiguousCache(model.config, batch_size=1, capacity=capacity, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        tokens_BT = torch.tensor([prefix[:-1]], device=device)
        model.hidden_states(Call(tokens_BT, num_loops=num_loops, cache=cache))
    cache.reorder(torch.zeros(len(rows), dtype=torch.int64))
    inputs = [[prefix[-1], *row.target_ids[:-1]] for row in rows]
    return _read(model, inputs, rows, num_loops, precision, cache=cache)


def _read(
    model: LoopedLM,
    inputs: Sequence[Sequence[int]],
    rows: Sequence[ScoredRow],
    num_loops: int,
    precision: Precision,
    *,
    cache: LoopCache | None,
) -> list[Tensor]:
    """One padded call; the targets of a row stand at the end of its inputs."""
    lengths_B = torch.tensor([len(ids) for ids in inputs])
    longest = int(lengths_B.max())
    tokens_BT = torch.zeros(len(inputs), longest, dtype=torch.int64)
    for row, ids in enumerate(inputs):
        tokens_BT[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
    is_token_BT = torch.arange(longest) < lengths_B[:, None]
    device = model.embedding.weight.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits_BTV = model(
            tokens_BT.to(device),
            num_loops=num_loops,
            cache=cache,
            padding_mask_BT=None if bool(is_token_BT.all()) else is_token_BT.to(device),
        )
    found = []
    for row, scored in enumerate(rows):
        end, count = int(lengths_B[row]), len(scored.target_ids)
        targets_T = torch.as_tensor(scored.target_ids, dtype=torch.int64)
        # fp32, as in training: a log of a sum over V bf16 exponentials keeps two digits.
        logits_TV = logits_BTV[row, end - count : end].float().cpu()
        found.append(-F.cross_entropy(logits_TV, targets_T, reduction="none"))
    return found
