"""Shuffled pointer chains as text: `q=m`, `m=4`, then the question `q=` for every letter.

A chain is a row of letters, each pointing at the next, the last at a digit; the depth of a
letter is the number of look-ups from it to its digit. Lines of all chains are shuffled, and so
are the questions, whose answers never stand in the text. Chains may end at equal digits.
Letters: B rows, T positions.
"""

from __future__ import annotations

import string
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthdial.data.packing import IGNORE, Batch, check_rows, check_seed
from depthdial.data.tokenizer import Tokenizer

VARIABLES = string.ascii_lowercase
DIGITS = string.digits
TOKENS_PER_LINE = 4
"""Letter, `=`, letter or digit, line end."""
TOKENS_PER_QUESTION = 3
"""Letter, `=`, line end."""
_SPLIT_STREAMS = {"train": 16, "valid": 17}
_DRAWS_PER_COUNTER = 4


class Spelling(NamedTuple):
    """Token ids of the characters of a row."""

    variables: np.ndarray
    digits: np.ndarray
    equals: int
    line_end: int


class PointerChains:
    """Endless rows of chains for a model of text.

    Every character is one token, whatever longer pieces the tokenizer has: the task is about
    look-ups, not about spelling.

    Args:
        tokenizer: must have each letter, digit, `=` and the line end as a token.
        seed: of the rows, in [0, 2**63).
        num_chains, chain_length: at most 26 letters together.
        split: the two splits of any seed draw from different random streams.
    """

    epoch_tokens = None
    """The rows never repeat."""
    title = "pointer chains"
    depth_words = "depth is the number of look-ups from a letter to its digit"
    guess_words = "naming the digit of any chain"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        num_chains: int,
        chain_length: int,
        split: Literal["train", "valid"] = "train",
    ) -> None:
        check_seed(seed)
        if split not in _SPLIT_STREAMS:
            raise ValueError(f"split '{split}' is unknown; choose train or valid.")
        num_letters = num_chains * chain_length
        if num_chains < 1 or chain_length < 1 or num_letters > len(VARIABLES):
            raise ValueError(
                f"num_chains={num_chains} of chain_length={chain_length} need {num_letters} "
                f"letters; give at least 1 of each and at most {len(VARIABLES)} together."
            )
        self.num_chains = num_chains
        self.chain_length = chain_length
        self.seed = seed
        self.split = split
        self.spelling = _spelling(tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self.context = num_letters * (TOKENS_PER_LINE + TOKENS_PER_QUESTION)
        self.fingerprint = f"pointer chains {num_chains}x{chain_length}"

    @property
    def answer_ids(self) -> Tensor:
        """Token ids of the ten digits, the only answers, int64 [10]."""
        return torch.from_numpy(self.spelling.digits)

    @property
    def chance_accuracy(self) -> float:
        """Share of right answers of who names the digit of any chain, without a look-up: it is
        the right chain, or one that happens to end at the same digit."""
        right_chain = 1 / self.num_chains
        return right_chain + (1 - right_chain) / len(DIGITS)

    @property
    def row_words(self) -> str:
        """What one row is."""
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        letters = "1 letter" if self.chain_length == 1 else f"{self.chain_length} letters"
        return f"{chains} of {letters}"

    def rows(self, first_row: int, num_rows: int) -> Batch:
        """Rows and their targets: the digit at each question's `=`, IGNORE elsewhere.

        Raises: ValueError for a negative row or num_rows < 1.
        """
        tokens_BT, targets_BT, _ = self._build(first_row, num_rows)
        return Batch(tokens_BT=tokens_BT, targets_BT=targets_BT)

    def depths(self, first_row: int, num_rows: int) -> Tensor:
        """Look-ups to the answer at each question's `=`, 0 elsewhere, int64 [B, T]."""
        return self._build(first_row, num_rows)[2]

    def _build(self, first_row: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        check_rows(first_row, num_rows)
        chains, length = self.num_chains, self.chain_length
        num_letters = chains * length
        sizes = [len(VARIABLES), chains, num_letters, num_letters]
        counters = -(-sum(sizes) // _DRAWS_PER_COUNTER)
        bits = self._bits(first_row * counters, num_rows * counters * _DRAWS_PER_COUNTER)
        parts = np.split(bits.reshape(num_rows, -1)[:, : sum(sizes)], np.cumsum(sizes)[:-1], axis=1)
        letters, digits, line_order, question_order = parts
        # Sorting random numbers is a random permutation; the first letters of it are used.
        names = np.argsort(letters, axis=1, kind="stable")[:, :num_letters]
        values = (digits % np.uint64(len(DIGITS))).astype(np.int64)
        places = np.arange(num_letters)
        is_last = (places + 1) % length == 0
        following = self.spelling.variables[names[:, np.where(is_last, 0, places + 1)]]
        answers = self.spelling.digits[values[:, places // length]]
        pointed = np.where(is_last, answers, following)
        depths = length - places % length
        own = self.spelling.variables[names]

        lines = np.argsort(line_order, axis=1, kind="stable")
        asked = np.argsort(question_order, axis=1, kind="stable")
        text = self._lines(np.take_along_axis(own, lines, 1), np.take_along_axis(pointed, lines, 1))
        questions = self._lines(np.take_along_axis(own, asked, 1), None)
        tokens = np.concatenate([text, questions], axis=1)
        at_equals = text.shape[1] + 1 + TOKENS_PER_QUESTION * np.arange(num_letters)
        targets, depth_at = np.full(tokens.shape, IGNORE), np.zeros(tokens.shape, dtype=np.int64)
        targets[:, at_equals] = np.take_along_axis(answers, asked, 1)
        depth_at[:, at_equals] = depths[asked]
        return torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(depth_at)

    def _lines(self, left: np.ndarray, right: np.ndarray | None) -> np.ndarray:
        """`left=right` lines, or questions without a right side, as ids of one row."""
        equals = np.full_like(left, self.spelling.equals)
        end = np.full_like(left, self.spelling.line_end)
        columns = [left, equals, end] if right is None else [left, equals, right, end]
        return np.stack(columns, axis=-1).reshape(len(left), -1)

    def _bits(self, counter: int, count: int) -> np.ndarray:
        """`count` uint64 from this split's stream; raw bits, equal in every version of NumPy."""
        key = np.array([self.seed, _SPLIT_STREAMS[self.split]], dtype=np.uint64)
        start = np.array([counter, 0, 0, 0], dtype=np.uint64)
        return np.random.Philox(key=key, counter=start).random_raw(count)


def _spelling(tokenizer: Tokenizer) -> Spelling:
    """Raises: ValueError naming the characters that are not one token each."""
    ids = {char: tokenizer.encode(char) for char in (*VARIABLES, *DIGITS, "=", "\n")}
    shared = [tuple(found) for found in ids.values()]
    # An unknown-token id would stand for many characters at once.
    if wrong := [c for c, found in ids.items() if len(found) != 1 or shared.count((*found,)) > 1]:
        raise ValueError(
            f"this tokenizer does not have {wrong[:5]} as single tokens, so pointer chains cannot "
            "be written with it. Use a byte-level tokenizer."
        )
    one = {char: found[0] for char, found in ids.items()}
    return Spelling(
        variables=np.array([one[char] for char in VARIABLES]),
        digits=np.array([one[char] for char in DIGITS]),
        equals=one["="],
        line_end=one["\n"],
    )
