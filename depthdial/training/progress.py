"""What a person watches while a run trains: one live line, and one line per validation."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class TrainObserver(Protocol):
    """Told about every metrics record and every notice of a run."""

    def record(self, record: dict[str, Any]) -> None:
        """One metrics record, training or validation."""

    def notice(self, text: str) -> None:
        """Something a person should know."""


class SilentObserver:
    """Shows nothing."""

    def record(self, record: dict[str, Any]) -> None:
        return None

    def notice(self, text: str) -> None:
        return None


class RichObserver:
    """Progress bar with tokens per second, loss per executed loop count and time left."""

    def __init__(self, name: str, *, steps: int, first_step: int, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=8),
            TextColumn("{task.completed}/{task.total}", markup=False),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task(
            name, total=steps, completed=first_step, numbers="starting"
        )
        self._losses: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The last drawing of a display whose log is full; the run has ended already.
        with suppress(OSError):
            self._progress.stop()

    def record(self, record: dict[str, Any]) -> None:
        """Training records move the bar; validation records print a line above it."""
        # Not before: a run that is refused, or has nothing left to do, shows no bar.
        self._progress.start()
        losses = _by_loops(record, "val/loss_k")
        if losses:
            self._print(f"step {record['step']:>6}  validation loss  {_shown(losses)}", wrap=True)
            return
        self._losses.update(_by_loops(record, "train/loss_k"))
        numbers = f"{record['train/tok_per_sec']:,.0f} tok/s  loss {_shown(self._losses)}"
        self._progress.update(self._task, completed=record["step"], numbers=numbers)

    def notice(self, text: str) -> None:
        self._print(text, wrap=False)

    def _print(self, text: str, *, wrap: bool) -> None:
        # A path may hold brackets, which are no markup, whatever the console makes of them.
        self._console.print(text, soft_wrap=not wrap, markup=False, emoji=False, highlight=False)


def _by_loops(record: dict[str, Any], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix) and value is not None
    }


def _shown(losses: dict[str, float]) -> str:
    return "  ".join(
        f"k{k} {loss:.3f}" for k, loss in sorted(losses.items(), key=lambda at: int(at[0]))
    )
