"""Token ids of a text of any length in constant memory: windows that overlap and must agree.

A tokenizer's own result takes about ninety bytes for each byte of text, so a long text is encoded
window by window. Neighbouring windows share some text, and one is left for the other inside a
stretch of tokens that both give, and that the shared text alone gives too.
For byte-pair encoding this is exact: its result is the one sequence of which every two neighbours
are the result of their own text, and each pair of the joined sequence stands in some window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

WINDOW_CHARS = 200_000
"""Characters encoded at a time, and the longest text that is encoded as a whole."""
OVERLAP_CHARS = 4096
"""Characters that two windows share, some thousand tokens of usual text."""
AGREED_TOKENS = 16
"""Equal tokens on either side of the place where two windows are joined."""
STARTS_TRIED = 128
"""Beginnings of the shared text that are tried: in an endless run of one token of up to so many
characters, one of them is where a token of the window begins."""

Encode = Callable[[str], Sequence[int]]


class Seam(NamedTuple):
    """Where one window goes over into the next.

    start: character of the window where the next one begins; ids: tokens of the shared text;
    left_end, right_begin: tokens of the window before the seam, and of the next one before it.
    """

    start: int
    ids: Sequence[int]
    left_end: int
    right_begin: int


def encode_parts(encode: Encode, parts: Iterable[str]) -> Iterator[Sequence[int]]:
    """Token ids of the text that `parts` spell together, in order, a window at a time.

    Args: encode: ids of one text, from its first to its last character.
    Raises: ValueError for a tokenizer whose tokens depend on the text as a whole.
    """
    reader = _Reader(parts)
    text = reader.take(WINDOW_CHARS)
    ids, done = encode(text), 0
    while not reader.is_at_end():
        seam = _find_seam(encode, text, ids, after=done)
        joined = None
        if seam is not None:
            shared = text[seam.start :]
            following = shared + reader.take(WINDOW_CHARS - len(shared))
            joined = encode(following)
            agreed = seam.right_begin + AGREED_TOKENS
            if joined[:agreed] == seam.ids[:agreed]:
                yield ids[done : seam.left_end]
                text, ids, done = following, joined, seam.right_begin
                continue
            reader.give_back(following[len(shared) :])
        # No place where both agree, as in one endless word: the two windows become one.
        text += reader.take(len(text))
        grown = encode(text)
        if grown[:done] != ids[:done]:
            raise ValueError(
                f"a text of more than {WINDOW_CHARS:,} characters cannot be encoded in parts by "
                "this tokenizer: what follows changes tokens far before it. Split the document."
            )
        ids = grown
    yield ids[done:]


def _find_seam(encode: Encode, text: str, ids: Sequence[int], *, after: int) -> Seam | None:
    """A place in the last half of a window where its tokens are those of the shared text alone."""
    overlap = OVERLAP_CHARS
    while overlap + STARTS_TRIED <= len(text) // 2:
        for shift in range(STARTS_TRIED):
            start = len(text) - overlap - shift
            shared = encode(text[start:])
            agreed = _equal_at_end(ids, shared)
            if agreed >= 2 * AGREED_TOKENS:
                # The middle: as far from where the shared text begins as from where it ends.
                kept = agreed // 2
                if len(ids) - kept > after:
                    return Seam(start, shared, len(ids) - kept, len(shared) - kept)
        overlap *= 2
    return None


def _equal_at_end(a: Sequence[int], b: Sequence[int]) -> int:
    """How many last entries of two sequences are equal."""
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count


class _Reader:
    """Takes a text that comes in parts by numbers of characters."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = iter(parts)
        self._rest = ""

    def take(self, count: int) -> str:
        """The next `count` characters, fewer at the end."""
        held = [self._rest]
        length = len(self._rest)
        while length < count and (part := next(self._parts, None)) is not None:
            held.append(part)
            length += len(part)
        text = "".join(held)
        self._rest = text[count:]
        return text[:count]

    def give_back(self, text: str) -> None:
        """Put characters back in front."""
        self._rest = text + self._rest

    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return True
            self._rest = part
        return False
