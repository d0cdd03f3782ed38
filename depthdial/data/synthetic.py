"""Pointer programs: a task whose difficulty is a number of look-ups, not an amount of text.

A program is a row of words. `c5` is the literal 5; `r2f3` applies function 3 of a fixed
table of permutations to the value two positions before. The target at every position is
the value there, so the depth of a position (length of its chain down to a literal, which
has depth 1) says how many look-ups one after another a model must make.
The chance level is 1/8.
Letters: B rows, T positions, P dependency depths.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from torch import Tensor

from depthdial.data.packing import Batch, check_rows, check_seed
from depthdial.data.tokenizer import Tokenizer

NUM_VALUES = 8
"""Values, literals, and functions of the table."""
MAX_REACH = 3
"""Farthest position a pointer looks back."""
VOCAB_SIZE = NUM_VALUES * (1 + MAX_REACH)
REACH_PROBABILITIES = (0.15, 0.35, 0.25, 0.25)
"""Of a literal (reach 0) and of pointers that reach back 1, 2 and 3 positions."""
WORDS = tuple(
    f"r{reach}f{value}" if reach else f"c{value}"
    for reach in range(1 + MAX_REACH)
    for value in range(NUM_VALUES)
)
"""Word of each token id, 8 * reach + value; so a value and its literal share an id."""
_DRAWS_PER_COUNTER = 4
_SPLIT_STREAMS = {"train": 0, "valid": 1, "table": 2}


class Answers(NamedTuple):
    """Solution of programs."""

    values_BT: Tensor
    """Value at each position, int64 in 0..7: also the id of the literal that spells it."""
    depths_BT: Tensor
    """Length of the chain that ends at each position, int64, at least 1."""


class DepthCounts(NamedTuple):
    """Answers of each row at depths 1..P, int64."""

    correct_BP: np.ndarray
    total_BP: np.ndarray


class DepthAccuracy(NamedTuple):
    """Right answers among the positions of one depth."""

    depth: int
    correct: int
    total: int

    @property
    def accuracy(self) -> float | None:
        """Fraction that is right; None without any position."""
        return self.correct / self.total if self.total else None


class PointerPrograms:
    """Endless rows of random programs with their answers as targets.

    A pointer that would leave the row is replaced by a literal, so the first position
    always is one. The table depends on `task_seed` alone: a model learns one table.
    """

    epoch_tokens = None
    """The rows never repeat."""
    vocab_size = VOCAB_SIZE
    answer_ids = None
    """Every word is tried as an answer."""
    title = "pointer programs"
    depth_words = "depth 1 is a literal, each further depth one look-up"
    guess_words = "guessing"
    chance_accuracy = 1 / NUM_VALUES

    def __init__(
        self,
        seed: int,
        *,
        context: int = 32,
        split: Literal["train", "valid"] = "train",
        task_seed: int = 0,
    ) -> None:
        """Programs of `context` words.

        Args:
            seed: of the programs, in [0, 2**63).
            split: the two splits of any seed draw from different random streams.
            task_seed: of the function table.
        """
        check_seed(seed)
        check_seed(task_seed)
        if context < 1:
            raise ValueError(f"context={context} must be at least 1 word.")
        if split not in ("train", "valid"):
            raise ValueError(f"split '{split}' is unknown; choose train or valid.")
        self.context = context
        self.seed = seed
        self.split = split
        self.task_seed = task_seed
        self.table = function_table(task_seed)
        self.fingerprint = f"pointer programs of task seed {task_seed}"

    @property
    def row_words(self) -> str:
        """What one row is."""
        return f"one program of {self.context} words"

    def rows(self, first_row: int, num_rows: int) -> Batch:
        """Programs and their values; every position is scored.

        Raises: ValueError for a negative row or num_rows < 1.
        """
        tokens_BT = torch.from_numpy(self._programs(first_row, num_rows))
        return Batch(tokens_BT=tokens_BT, targets_BT=self.answers(tokens_BT).values_BT)

    def depths(self, first_row: int, num_rows: int) -> Tensor:
        """Depth of each position of the same rows, int64 [B, T]."""
        return self.answers(torch.from_numpy(self._programs(first_row, num_rows))).depths_BT

    def answers(self, tokens_BT: Tensor) -> Answers:
        """Solve any programs, also such as were typed by hand.

        Raises: ValueError for an unknown id or a pointer that leaves its row.
        """
        tokens = tokens_BT.numpy()
        if tokens.min() < 0 or tokens.max() >= VOCAB_SIZE:
            raise ValueError(
                f"program has token ids {tokens.min()}..{tokens.max()}, known are "
                f"0..{VOCAB_SIZE - 1}."
            )
        reaches_BT, operands_BT = np.divmod(tokens, NUM_VALUES)
        if (outside := reaches_BT > np.arange(tokens.shape[1])).any():
            row, place = (int(index) for index in np.argwhere(outside)[0])
            raise ValueError(
                f"row {row}: '{WORDS[tokens[row, place]]}' at position {place} points before the "
                f"start of the program. Use a literal ({WORDS[0]}..{WORDS[NUM_VALUES - 1]}) there."
            )
        values_BT, depths_BT = np.empty_like(tokens), np.ones_like(tokens)
        rows = np.arange(len(tokens))
        for place in range(tokens.shape[1]):
            reach, operand = reaches_BT[:, place], operands_BT[:, place]
            source = place - reach
            # A literal points at itself; what is read there is discarded by `where`.
            looked_up = self.table[operand, np.where(reach > 0, values_BT[rows, source], 0)]
            values_BT[:, place] = np.where(reach > 0, looked_up, operand)
            depths_BT[:, place] = np.where(reach > 0, depths_BT[rows, source] + 1, 1)
        return Answers(torch.from_numpy(values_BT), torch.from_numpy(depths_BT))

    def _programs(self, first_row: int, num_rows: int) -> np.ndarray:
        """Token ids [B, T]; row r uses its own range of the random generator's counter."""
        check_rows(first_row, num_rows)
        counters = -(-self.context // _DRAWS_PER_COUNTER)
        bits = _random_bits(
            self.seed,
            stream=self.split,
            counter=first_row * counters,
            count=num_rows * counters * _DRAWS_PER_COUNTER,
        )
        bits_BT = bits.reshape(num_rows, -1)[:, : self.context]
        uniform_BT = (bits_BT >> np.uint64(11)) * 2.0**-53
        bounds = np.cumsum(REACH_PROBABILITIES[:-1])
        reaches_BT = np.searchsorted(bounds, uniform_BT, side="right")
        reaches_BT[reaches_BT > np.arange(self.context)] = 0
        # The lowest bits: the draw of the reach used only the upper 53.
        operands_BT = (bits_BT & np.uint64(NUM_VALUES - 1)).astype(np.int64)
        return reaches_BT * NUM_VALUES + operands_BT


def function_table(task_seed: int) -> np.ndarray:
    """The permutations [function, value], int64 [8, 8]."""
    bits = _random_bits(task_seed, stream="table", counter=0, count=NUM_VALUES**2)
    return np.argsort(bits.reshape(NUM_VALUES, NUM_VALUES), axis=1, kind="stable")


def count_by_depth(
    predictions_BT: Tensor, targets_BT: Tensor, depths_BT: Tensor, *, max_depth: int
) -> DepthCounts:
    """Right and all answers of each row at depths 1 .. max_depth; deeper ones are left out.

    Raises: ValueError if the shapes differ or max_depth < 1.
    """
    shapes = [tuple(t.shape) for t in (predictions_BT, targets_BT, depths_BT)]
    if len(set(shapes)) != 1:
        raise ValueError(f"predictions, targets and depths differ in shape: {shapes}.")
    if max_depth < 1:
        raise ValueError(f"max_depth={max_depth} must be at least 1.")
    at_depth_BTP = depths_BT.cpu().numpy()[..., None] == np.arange(1, max_depth + 1)
    is_right_BT = (predictions_BT == targets_BT).cpu().numpy()
    return DepthCounts(
        correct_BP=(at_depth_BTP & is_right_BT[..., None]).sum(axis=1),
        total_BP=at_depth_BTP.sum(axis=1),
    )


def accuracy_by_depth(
    predictions_BT: Tensor, targets_BT: Tensor, depths_BT: Tensor, max_depth: int
) -> list[DepthAccuracy]:
    """Accuracy over all rows at depths 1 .. max_depth; arguments as in `count_by_depth`."""
    counts = count_by_depth(predictions_BT, targets_BT, depths_BT, max_depth=max_depth)
    correct, total = counts.correct_BP.sum(axis=0).tolist(), counts.total_BP.sum(axis=0).tolist()
    return [DepthAccuracy(d, correct[d - 1], total[d - 1]) for d in range(1, max_depth + 1)]


def pointer_tokenizer() -> Tokenizer:
    """The 32 words, separated by spaces; it has no end-of-text token."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, eos_token=None)


def _random_bits(seed: int, *, stream: str, counter: int, count: int) -> np.ndarray:
    """`count` uint64; raw bits, which NumPy keeps equal in every version."""
    key = np.array([seed, _SPLIT_STREAMS[stream]], dtype=np.uint64)
    start = np.array([counter, 0, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=start).random_raw(count)
