"""Ctrl-C and SIGTERM as data: what must be whole is saved first, anything else ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

StopStatus = Literal["interrupted", "terminated"]


class StopRequested(Exception):
    """A stop came while only work was done that can be done again."""


class StopSignals:
    """Whether a stop was asked for.

    Attributes:
        status: of the first signal, `interrupted` (Ctrl-C) or `terminated` (SIGTERM); None so far.
    """

    def __init__(self) -> None:
        self.status: StopStatus | None = None
        self._may_raise = False

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """In the block a stop raises StopRequested, and so does an earlier one at its start.

        For work that leaves nothing half done, such as a measurement.
        """
        self._may_raise = True
        try:
            if self.status is not None:
                raise StopRequested
            yield
        finally:
            self._may_raise = False

    def receive(self, number: int, frame: object = None) -> None:
        """Handle a signal. A second Ctrl-C acts as usual; SIGTERM after Ctrl-C does not, so that a
        parent that stops its children does not cut their save short.
        """
        is_first = self.status is None
        if not is_first and number == signal.SIGINT:
            raise KeyboardInterrupt
        if is_first:
            self.status = "interrupted" if number == signal.SIGINT else "terminated"
            # Of the first signal alone: the save that follows is never cut short.
            if self._may_raise:
                raise StopRequested


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Take up Ctrl-C and SIGTERM for the block. Only the main thread may take signals."""
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.receive) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
