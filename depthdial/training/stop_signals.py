"""Ctrl-C and SIGTERM as data: the running step is finished and saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

StopStatus = Literal["interrupted", "terminated"]


@contextmanager
def stop_signals() -> Iterator[list[StopStatus]]:
    """A list that Ctrl-C or SIGTERM fills.

    A second Ctrl-C acts as usual; SIGTERM after Ctrl-C does not, so that a parent that stops its
    children does not cut their save short. Only the main thread may take signals.
    """
    stop: list[StopStatus] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(number: int, frame: object) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.append("interrupted" if number == signal.SIGINT else "terminated")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_interrupt) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
