"""What a tokenizer.json from elsewhere may cost: its patterns take time, its replacements memory.

The library that runs them ends a single match after ten million attempts, by a panic, and bounds
nothing else. Its parts are read here as the JSON that they are stored as.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Backend

SECONDS, SECONDS_PER_CHARACTER = 60.0, 1e-3
"""Longest time for a text; published tokenizers take about a millionth of a second for each
character, and the machine may be busy."""
MAX_GROWTH = 4096
"""Times that the replacements of a tokenizer may lengthen a text; those of published ones keep its
length, about."""
Result = TypeVar("Result")
PANIC = "PanicException"
"""The library's error for a fault of its own; it is no Exception, and cannot be imported."""


class Part(Protocol):
    """A normalizer, pre-tokenizer, post-processor or decoder of the library."""

    def __getstate__(self) -> bytes:
        """Its JSON."""


def part_values(part: Part | None) -> dict[str, Any]:
    """One part of a tokenizer as its JSON says; empty for none."""
    return {} if part is None else json.loads(part.__getstate__())


def has_patterns(backend: Backend) -> bool:
    """Whether regular expressions of the file cut or change a text."""
    parts = (backend.normalizer, backend.pre_tokenizer)
    return any(b'"Regex"' in part.__getstate__() for part in parts if part is not None)


def check_growth(backend: Backend) -> None:
    """Refuse replacements that lengthen a text without measure.

    Raises: ValueError with the factor and what is allowed.
    """
    for name, part in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        growth = _growth(part_values(part))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} may make a text {growth:.3g} times as long; at most {MAX_GROWTH:,} "
                "times is read. Take the tokenizer from its publisher."
            )


def _growth(values: dict[str, Any]) -> float:
    """Bound of new over old length for each part of a sequence, multiplied."""
    growth = 1.0
    for inner in (*values.get("normalizers", ()), *values.get("decoders", ())):
        growth *= _growth(inner)
    if values.get("type") == "Replace":
        pattern, new = values["pattern"], len(values["content"])
        # A regular expression may match nothing, between any two characters.
        old = len(pattern.get("String", ""))
        growth *= max(1.0, new / old) if old else 1.0 + new
    if values.get("type") == "Prepend":
        growth *= 1.0 + len(values["prepend"])
    return growth


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of the library into a ValueError."""
    try:
        yield
    # A panic is below Exception, where `except Exception` does not see it.
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise ValueError(f"{error} (in the tokenizers library)") from None


def within_time(call: Callable[[], Result], num_characters: int) -> Result:
    """The result of a call that works on so many characters.

    The call runs in a thread, which nothing can stop: one that takes too long is left to itself
    and ends with the process.

    Raises: what the call raises; ValueError where it takes too long.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        # Whatever it is, it belongs to the caller's thread.
        except BaseException as error:
            errors.append(error)

    seconds = SECONDS + SECONDS_PER_CHARACTER * num_characters
    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise ValueError(
            f"it takes more than {seconds:.3g} seconds for {num_characters:,} characters"
        )
    return results[0]
