"""Which layers to loop: how far each layer turns the hidden states, and the flat part of that.

Layers that turn them little, between the first ones and the last ones, are proposed as the core:
all of them, or the calmest few.
The curve is drawn by `report/core_choice.py`.
Letters: L layers, B rows, T tokens, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthdial.convert.base_model import CoreRange, block_places
from depthdial.convert.equality import run_layers
from depthdial.data.corpora import corpus_names, read_corpus
from depthdial.data.documents import AnyDocument, find_files, read_documents
from depthdial.data.tokenizer import Tokenizer
from depthdial.model.looped_lm import LoopedLM

NUM_TEXTS = 256
"""Texts that a curve is measured on."""
PIECE_CHARS = 400
"""A text is a piece of a document of about this length."""
PIECE_TOKENS = 64
"""Of each text, so many tokens are read."""
BATCH_ROWS = 16
MIN_LAYERS = 3
"""Fewer layers have no prelude, core and coda."""


@dataclass(frozen=True)
class CoreCurve:
    """Angular distance that each layer of a base turns the hidden states by.

    Fields:
        distances: arccos(cos(h_l, h_{l+1})) / pi in [0, 1], mean over tokens, per layer.
        knees: layers between the two knees of the curve. proposed: those, or the calmest run of
            as many layers as were asked for between them.
        num_texts, num_tokens: that were read. source: where they came from.
    """

    distances: tuple[float, ...]
    knees: CoreRange
    proposed: CoreRange
    num_texts: int
    num_tokens: int
    source: str

    def as_json(self) -> dict[str, Any]:
        """What core_choice.json says."""
        return {
            "measure": "arccos(cos(h_l, h_l+1)) / pi, mean over tokens",
            "distances": list(self.distances),
            "knees": list(self.knees),
            "proposed": list(self.proposed),
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "source": self.source,
        }


def measure_core(
    model: LoopedLM,
    tokenizer: Tokenizer,
    *,
    texts: Path | None = None,
    num_layers: int | None = None,
    num_texts: int = NUM_TEXTS,
) -> CoreCurve:
    """Curve of a dense model and the core it proposes.

    Args:
        texts: file or folder of text; None for the embedded corpus.
        num_layers: of the core; None for all between the knees.
        num_texts: how many pieces of text to read.

    Raises: ValueError for too little text, or a model of fewer than three layers.
    """
    count = len(block_places(model.config))
    if count < MIN_LAYERS:
        raise ValueError(
            f"the base has {count} layers, too few for a prelude, a core and a coda. Give "
            "the core as a:b."
        )
    pieces = read_pieces(texts, num_texts, purpose="the proposal of a core")
    limit = min(PIECE_TOKENS, model.config.max_context)
    opening = list(tokenizer.opening_ids)
    rows = [[*opening, *ids][:limit] for ids in tokenizer.encode_batch(pieces)]
    distances = layer_distances(model, rows)
    knees = between_knees(distances)
    return CoreCurve(
        distances=tuple(distances),
        knees=knees,
        proposed=knees if num_layers is None else calmest(distances, knees, num_layers),
        num_texts=len(rows),
        num_tokens=sum(map(len, rows)),
        source=corpus_names()[0] if texts is None else texts.name,
    )


def read_pieces(texts: Path | None, count: int, *, purpose: str) -> list[str]:
    """Pieces of about PIECE_CHARS characters, spread evenly over all documents.

    Args: purpose: what needs them, for the message.
    Raises: ValueError if the text gives fewer than `count`.
    """
    if texts is None:
        documents = read_corpus(corpus_names()[0])
    else:
        documents = list(read_documents(find_files([texts]).supported))
    pieces = [piece for document in documents for piece in _cut(document)]
    if len(pieces) < count:
        raise ValueError(
            f"the text gives {len(pieces)} pieces of {PIECE_CHARS} characters, but {purpose} "
            f"needs {count}. Give more text, or none for the embedded corpus."
        )
    return [pieces[i * len(pieces) // count] for i in range(count)]


@torch.no_grad()
def layer_distances(model: LoopedLM, rows: Sequence[Sequence[int]]) -> list[float]:
    """Mean angular distance between the input and the output of every layer.

    Args: rows: token ids, each at least one.
    """
    totals: np.ndarray | None = None
    for tokens_BT, is_token_BT in _batches(rows):
        states = [model.embed(tokens_BT, positions_BT=_positions(tokens_BT))]
        _, outputs = run_layers(model, tokens_BT, 1)
        states += [output_BTD for _, output_BTD in outputs]
        sums = np.array(
            [
                float(angular_distance(below, above)[is_token_BT].sum(dtype=torch.float64))
                for below, above in zip(states, states[1:], strict=False)
            ]
        )
        totals = sums if totals is None else totals + sums
    assert totals is not None, "at least one row"
    return [float(total) for total in totals / sum(map(len, rows))]


def angular_distance(first_BTD: Tensor, second_BTD: Tensor) -> Tensor:
    """arccos(cos) / pi per token, [B, T]."""
    first_BTD = torch.nn.functional.normalize(first_BTD.float(), dim=-1)
    second_BTD = torch.nn.functional.normalize(second_BTD.float(), dim=-1)
    # Not through arccos, which near cos = 1 loses half the digits.
    across = (first_BTD - second_BTD).norm(dim=-1)
    along = (first_BTD + second_BTD).norm(dim=-1)
    return 2 * torch.atan2(across, along) / math.pi


def between_knees(distances: Sequence[float]) -> CoreRange:
    """The core between the two knees of a curve that falls, stays low and rises again.

    Each side, from its end to the lowest point, is bent most where it lies farthest below its
    chord (the Kneedle criterion, without its smoothing).
    """
    lowest = int(np.argmin(distances))
    falling, rising = distances[: lowest + 1], distances[lowest:][::-1]
    return CoreRange(_knee(falling), len(distances) - _knee(rising))


def calmest(distances: Sequence[float], within: CoreRange, num_layers: int) -> CoreRange:
    """The run of `num_layers` layers that turns the states least in all.

    Raises: ValueError for more layers than there are in `within`, or none.
    """
    available = within.end - within.start
    if not 1 <= num_layers <= available:
        raise ValueError(
            f"{num_layers} layers were asked for, and the curve has {available} between its knees "
            f"({within}). Ask for 1 to {available}, or give the core as a:b."
        )
    starts = range(within.start, within.end - num_layers + 1)
    start = min(starts, key=lambda a: sum(distances[a : a + num_layers]))
    return CoreRange(start, start + num_layers)


def _knee(falling: Sequence[float]) -> int:
    """Place where a falling curve lies farthest below the line from its first to its last value."""
    values = np.asarray(falling, dtype=np.float64)
    if len(values) < 2 or values[0] <= values[-1]:
        return 0
    if len(values) == 2:
        return 1
    heights = (values - values[-1]) / (values[0] - values[-1])
    return int(np.argmax(np.linspace(1, 0, len(values)) - heights))


def _cut(document: AnyDocument) -> Iterator[str]:
    """Consecutive pieces that end at a space; a short rest is left out."""
    text, start = document.text, 0
    while start + PIECE_CHARS <= len(text):
        end = text.find(" ", start + PIECE_CHARS)
        end = len(text) if end < 0 else end
        yield text[start:end].strip()
        start = end


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows padded on the right, which causal attention never reads, and where they are real."""
    ordered = sorted(rows, key=len)
    for start in range(0, len(ordered), BATCH_ROWS):
        part = ordered[start : start + BATCH_ROWS]
        longest = len(part[-1])
        tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in part])
        lengths_B = torch.tensor([len(row) for row in part])
        yield tokens_BT, torch.arange(longest) < lengths_B[:, None]


def _positions(tokens_BT: Tensor) -> Tensor:
    return torch.arange(tokens_BT.shape[1]).expand(tokens_BT.shape)
