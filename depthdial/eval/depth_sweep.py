"""Loss of the same documents at every loop count, kept per document.

Intervals and verdicts are in `stats.py`, what each loop costs in `latency.py`, rows of text in
`document_rows.py`. Loop counts that training never ran are evaluated too and marked; which those
are is told by the caller.
Letters: K swept loop counts, N documents, P dependency depths, B rows, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from depthdial.cache.loop_counts import check_num_loops
from depthdial.data.packing import IGNORE, Batch
from depthdial.data.pointer_chains import PointerChains
from depthdial.data.shards import TokenDocument
from depthdial.data.synthetic import count_by_depth
from depthdial.disk import write_synced
from depthdial.eval.document_rows import document_rows
from depthdial.eval.scoring import Precision, check_scoring, token_logprobs
from depthdial.model.looped_lm import LoopedLM

LOOPS_BEYOND_TRAINING = 2
POINTER_ROWS = 1024
"""Pointer programs that a sweep solves: enough to show 90 % at every dependency depth below."""
POINTER_MAX_DEPTH = 16
"""Largest dependency depth of programs whose answers are counted apart."""
CHAIN_ROWS = 256
"""Rows of pointer chains that a sweep solves; each asks once per chain at every depth."""


def default_loops(max_loops: int) -> list[int]:
    """1..K and two loop counts beyond, so that every sweep shows what lies outside training."""
    return list(range(1, max_loops + LOOPS_BEYOND_TRAINING + 1))


@dataclass(frozen=True)
class DepthSweep:
    """Summed losses of every document at every swept loop count.

    Fields:
        loops: swept loop counts, ascending; max_loops: the model's K.
        trained_loops: loop counts that training ran, ascending.
        names, tokens_N, bytes_N: documents, their scored tokens, the UTF-8 bytes that those stand
            for (0: no text).
        nll_KN: nats, summed over a document's tokens.
        correct_KNP, total_NP: right answers and questions per dependency depth; None for text.
    """

    loops: tuple[int, ...]
    max_loops: int
    trained_loops: tuple[int, ...]
    names: tuple[str, ...]
    tokens_N: np.ndarray
    bytes_N: np.ndarray
    nll_KN: np.ndarray
    correct_KNP: np.ndarray | None = None
    total_NP: np.ndarray | None = None

    def nll(self, num_loops: int) -> np.ndarray:
        """Summed loss of each document at one loop count, [N] nats."""
        if num_loops not in self.loops:
            raise ValueError(f"num_loops={num_loops} was not swept; swept: {list(self.loops)}.")
        return self.nll_KN[self.loops.index(num_loops)]

    def mean_loss(self, num_loops: int) -> float:
        """Nats per token over all documents."""
        return float(self.nll(num_loops).sum() / self.tokens_N.sum())

    def bits_per_byte(self, num_loops: int) -> float:
        """Bits per UTF-8 byte of text. Raises ValueError for data without text."""
        if not self.bytes_N.sum():
            raise ValueError("these documents have no text, so there are no bits per byte.")
        return float(self.nll(num_loops).sum() / math.log(2) / self.bytes_N.sum())

    def is_trained(self, num_loops: int) -> bool:
        """Whether training ran this loop count."""
        return num_loops in self.trained_loops

    def check_paired(self, other: DepthSweep) -> None:
        """Differences are only paired over equal documents in equal order.

        Raises: ValueError saying where the names or the scored tokens differ.
        """
        if len(self.names) != len(other.names):
            raise ValueError(
                f"the two sweeps cannot be paired: {len(self.names)} and {len(other.names)} "
                "documents. Measure both models on the same data."
            )
        for name, theirs in zip(self.names, other.names, strict=True):
            if name != theirs:
                raise ValueError(
                    f"the two sweeps cannot be paired: document '{name}' here is '{theirs}' there. "
                    "Measure both models on the same data in the same order."
                )
        unequal = np.flatnonzero(self.tokens_N != other.tokens_N)
        if unequal.size:
            first = unequal[0]
            raise ValueError(
                f"the two sweeps cannot be paired: document '{self.names[first]}' has "
                f"{self.tokens_N[first]} tokens here and {other.tokens_N[first]} there. Measure "
                "both models with the same tokenizer on the same data."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DepthSweep:
        """Inverse of `to_dict`. Raises: ValueError saying what is missing or does not fit."""
        missing = [field.name for field in fields(cls) if field.name not in values]
        if missing:
            raise ValueError(f"it lacks the keys {', '.join(missing)}")
        sweep = cls(
            loops=tuple(values["loops"]),
            max_loops=values["max_loops"],
            trained_loops=tuple(values["trained_loops"]),
            names=tuple(values["names"]),
            **{
                name: None if values[name] is None else np.array(values[name])
                for name in ("tokens_N", "bytes_N", "nll_KN", "correct_KNP", "total_NP")
            },
        )
        shape = (len(sweep.loops), len(sweep.names))
        if np.shape(sweep.nll_KN) != shape or np.shape(sweep.tokens_N) != shape[1:]:
            raise ValueError(f"its losses are no table of {shape[0]} loop counts x {shape[1]} rows")
        return sweep

    def save(self, path: str | Path) -> None:
        """Write JSON; on any error the file is what it was.

        Raises: ValueError if something else than a file is there; OSError if the disk refuses.
        """
        path = Path(path).resolve()
        check_save_place(path)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            write_synced(temporary, json.dumps(self.to_dict(), allow_nan=False) + "\n")
            temporary.replace(path)
        except OSError as error:
            stands = "the file that was there is unchanged" if path.exists() else "no file was left"
            raise OSError(
                f"could not write {path}: {error.strerror}; {stands}. Make room, or save elsewhere."
            ) from error
        finally:
            # Where the folder is gone there is nothing to remove either.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> DepthSweep:
        """Read what `save` wrote. Raises: FileNotFoundError; ValueError for anything else."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"it holds a {type(values).__name__}")
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is no sweep ({error}). Give a file that `depthdial sweep --save`, "
                "`depthdial report` or `DepthSweep.save` wrote."
            ) from None


def check_save_place(path: Path) -> None:
    """A sweep may be written there: nothing is there yet, or an older sweep.

    Raises: ValueError for anything else, which would be lost.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path} is no regular file. Give the name of a file to write.")
    try:
        DepthSweep.load(path)
    except ValueError:
        raise ValueError(
            f"{path} holds something else than a sweep, and is not replaced. Give another name, "
            "or remove it."
        ) from None


class QuestionRows(Protocol):
    """Rows with one right answer at each scored position."""

    @property
    def answer_ids(self) -> Tensor | None:
        """Tokens that can be an answer; None for all."""
        ...

    def rows(self, first_row: int, num_rows: int) -> Batch:
        """Inputs and answers."""
        ...

    def depths(self, first_row: int, num_rows: int) -> Tensor:
        """Dependency depth of each position, [B, T]; 0 where nothing is asked."""
        ...


class QuestionCount(NamedTuple):
    """How many rows a sweep solves, and the largest dependency depth that it counts apart."""

    num_rows: int
    max_depth: int


def question_count(source: QuestionRows) -> QuestionCount:
    """What a sweep of a task solves unless told otherwise."""
    if isinstance(source, PointerChains):
        return QuestionCount(CHAIN_ROWS, source.chain_length)
    return QuestionCount(POINTER_ROWS, POINTER_MAX_DEPTH)


@torch.no_grad()
def sweep_documents(
    model: LoopedLM,
    documents: Sequence[TokenDocument],
    *,
    loops: Sequence[int],
    context: int,
    start_id: int | None,
    stride: int | None = None,
    rows_per_forward: int = 16,
    precision: Precision = "fp32",
    trained_loops: Sequence[int] | None = None,
) -> DepthSweep:
    """Score every document at every loop count.

    Args:
        loops: loop counts >= 1; beyond max_loops is allowed.
        context: most input tokens per row.
        start_id: the token every document is scored after; None: the first one is not scored.
        stride: new tokens per row after a document's first; None for `context` (no overlap).
        precision: `fp32` or `bf16` (autocast).
        trained_loops: loop counts that training ran; None for those of the model's config.

    Raises: ValueError for no documents, one with nothing to score, a stride outside 1..context.
    """
    loops = check_swept_loops(loops)
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} must lie in 1..{context}, the context.")
    if not documents:
        raise ValueError("there are no documents to score.")
    unscored = int(start_id is None)
    empty = [document.name for document in documents if len(document.tokens_T) <= unscored]
    if empty:
        raise ValueError(f"{len(empty)} documents have no token to score, first '{empty[0]}'.")
    check_scoring(rows_per_forward=rows_per_forward, precision=precision)
    rows = list(document_rows(documents, context=context, stride=stride, start_id=start_id))
    nll_KN = np.zeros((len(loops), len(documents)))
    for start in range(0, len(rows), rows_per_forward):
        part = rows[start : start + rows_per_forward]
        for k_idx, num_loops in enumerate(loops):
            logprobs = token_logprobs(
                model,
                [row.scored for row in part],
                num_loops,
                rows_per_forward=rows_per_forward,
                precision=precision,
            )
            for row, logprobs_T in zip(part, logprobs, strict=True):
                # fp64: a document's loss is a sum of thousands of small terms.
                nll = -float(logprobs_T.double().sum())
                _check_finite(nll, num_loops, documents[row.document_idx].name)
                nll_KN[k_idx, row.document_idx] += nll
    return DepthSweep(
        loops=loops,
        max_loops=model.config.max_loops,
        trained_loops=_trained(model, trained_loops),
        names=tuple(document.name for document in documents),
        tokens_N=np.array([len(document.tokens_T) - unscored for document in documents]),
        bytes_N=np.array(
            [document.num_bytes - unscored * document.first_bytes for document in documents]
        ),
        nll_KN=nll_KN,
    )


@torch.no_grad()
def sweep_questions(
    model: LoopedLM,
    source: QuestionRows,
    *,
    loops: Sequence[int],
    num_rows: int | None = None,
    max_depth: int | None = None,
    rows_per_forward: int = 64,
    precision: Precision = "fp32",
    trained_loops: Sequence[int] | None = None,
) -> DepthSweep:
    """Loss and right answers by dependency depth; every row counts as one document.

    Args as in `sweep_documents`; the first `num_rows` rows of the source are solved, and answers
    at dependency depths above `max_depth` count in the loss only (None: as `question_count`).
    Where the source names its answer tokens, the likeliest of them is the model's answer.
    """
    loops = check_swept_loops(loops)
    usual = question_count(source)
    num_rows = usual.num_rows if num_rows is None else num_rows
    max_depth = usual.max_depth if max_depth is None else max_depth
    check_scoring(rows_per_forward=rows_per_forward, precision=precision)
    for name, value in (("num_rows", num_rows), ("max_depth", max_depth)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    shape = (len(loops), num_rows)
    nll_KN, correct_KNP = np.zeros(shape), np.zeros((*shape, max_depth), dtype=np.int64)
    total_NP = np.zeros((num_rows, max_depth), dtype=np.int64)
    tokens_N = np.zeros(num_rows, dtype=np.int64)
    for start in range(0, num_rows, rows_per_forward):
        count = min(rows_per_forward, num_rows - start)
        batch, depths_BT = source.rows(start, count), source.depths(start, count)
        for k_idx, num_loops in enumerate(loops):
            logits_BTV = _logits(model, batch.tokens_BT, num_loops=num_loops, precision=precision)
            nll_B = _row_losses(logits_BTV, batch.targets_BT)
            for row, nll in enumerate(nll_B.tolist(), start):
                _check_finite(nll, num_loops, f"row {row}")
            nll_KN[k_idx, start : start + count] = nll_B
            answers_BT = likeliest_answers(logits_BTV, source.answer_ids)
            counts = count_by_depth(answers_BT, batch.targets_BT, depths_BT, max_depth=max_depth)
            correct_KNP[k_idx, start : start + count] = counts.correct_BP
            total_NP[start : start + count] = counts.total_BP
        tokens_N[start : start + count] = (batch.targets_BT != IGNORE).sum(dim=1).numpy()
    return DepthSweep(
        loops=loops,
        max_loops=model.config.max_loops,
        trained_loops=_trained(model, trained_loops),
        names=tuple(f"row {row}" for row in range(num_rows)),
        tokens_N=tokens_N,
        bytes_N=np.zeros(num_rows, dtype=np.int64),
        nll_KN=nll_KN,
        correct_KNP=correct_KNP,
        total_NP=total_NP,
    )


def likeliest_answers(logits_BTV: Tensor, answer_ids: Tensor | None) -> Tensor:
    """The likeliest token at each position, [B, T]; of the answer tokens where they are known."""
    if answer_ids is None:
        return logits_BTV.argmax(dim=-1)
    return answer_ids[logits_BTV[..., answer_ids].argmax(dim=-1)]


def _trained(model: LoopedLM, trained_loops: Sequence[int] | None) -> tuple[int, ...]:
    if trained_loops is None:
        return model.config.trained_at
    return tuple(sorted(set(trained_loops)))


def check_swept_loops(loops: Sequence[int]) -> tuple[int, ...]:
    """Distinct loop counts, ascending. Raises: ValueError for none, or one below 1."""
    if not loops:
        raise ValueError("no loop counts were given; give at least one, e.g. [1, 2, 4].")
    for num_loops in loops:
        check_num_loops(num_loops)
    return tuple(sorted(set(loops)))


def _check_finite(nll: float, num_loops: int, name: str) -> None:
    """Refuse a loss that is no number: a curve with it would say nothing.

    Raises: ValueError naming loop count and document.
    """
    if not math.isfinite(nll):
        raise ValueError(
            f"the loss of '{name}' at num_loops={num_loops} is {nll}: the model's scores leave the "
            "range of numbers there. Nothing was written. Sweep fewer loops, use fp32, or another "
            "checkpoint."
        )


def _logits(model: LoopedLM, tokens_BT: Tensor, *, num_loops: int, precision: Precision) -> Tensor:
    """Logits on the CPU, fp32 [B, T, V]."""
    device = model.embedding.weight.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits_BTV = model(tokens_BT.to(device), num_loops=num_loops)
    return logits_BTV.float().cpu()


def _row_losses(logits_BTV: Tensor, targets_BT: Tensor) -> np.ndarray:
    """Summed loss of each row in nats, float64 [B]."""
    nll_N = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="none"
    )
    # fp64: a document's loss is a sum of thousands of small terms.
    return nll_N.view(targets_BT.shape).double().sum(dim=1).numpy()
