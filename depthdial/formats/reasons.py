"""Everything that stands in the way of opening a checkpoint, not the first thing alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MOST_SHOWN = 20
"""Reasons that a message lists; a file of another family has one for each of its tensors."""
MOST_KEPT = 100
"""Reasons that are kept; a file may have millions of tensors."""


class Refused(ValueError):
    """A checkpoint that cannot be opened.

    Attributes: reasons: one sentence or more for each thing in the way, in the order of reading.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        kept = tuple(reasons[:MOST_KEPT])
        more = len(reasons) - len(kept)
        self.reasons = (*kept, f"... and {more:,} more.") if more else kept
        super().__init__(_listed(reasons))


class Reasons:
    """Collects errors, so that reading goes on behind one and all are named in the end."""

    def __init__(self) -> None:
        self._errors: list[ValueError | FileNotFoundError] = []

    def add(self, message: str) -> None:
        """One more reason."""
        self._errors.append(ValueError(message))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note an error about the checkpoint instead of raising it."""
        try:
            yield
        except (ValueError, FileNotFoundError) as error:
            self._errors.append(error)

    def raise_if_any(self) -> None:
        """Raises: the one error that was noted; `Refused` with all reasons of several."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            # A reason that two parts of the reading meet is one reason.
            found = [reason for error in self._errors for reason in reasons_of(error)]
            raise Refused(tuple(dict.fromkeys(found)))


def reasons_of(error: ValueError | FileNotFoundError) -> tuple[str, ...]:
    """The reasons in an error: those of `Refused`, or its message alone."""
    return error.reasons if isinstance(error, Refused) else (str(error),)


def _listed(reasons: Sequence[str]) -> str:
    if len(reasons) == 1:
        return reasons[0]
    shown = [f"- {reason}" for reason in reasons[:MOST_SHOWN]]
    more = len(reasons) - MOST_SHOWN
    return "\n".join([f"{len(reasons):,} things are in the way:", *shown]) + (
        f"\n... and {more:,} more." if more > 0 else ""
    )
