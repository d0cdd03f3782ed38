"""Where metrics go besides metrics.jsonl: TensorBoard or Weights & Biases, if asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from depthdial.config import Recipe
from depthdial.training.progress import TrainObserver


class Tracker(Protocol):
    """A second place for metrics."""

    def log(self, record: dict[str, Any]) -> None:
        """Write the numbers of one record; `step` is the x axis."""

    def close(self) -> None:
        """Flush and end."""


class NoTracker:
    """metrics.jsonl is enough."""

    def log(self, record: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None


class TensorBoardTracker:
    """Event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "train.tracker='tensorboard' needs TensorBoard: pip install 'depthdial[train]'."
            ) from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run named after the recipe."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "train.tracker='wandb' needs wandb: pip install 'depthdial[track]'."
            ) from error
        self._run = wandb.init(
            project="depthdial", name=recipe.name, dir=str(folder), config=recipe.to_dict()
        )

    def log(self, record: dict[str, Any]) -> None:
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class Onlookers:
    """Passes on what a run tells. They only look on: one that cannot write, because the disk of
    its log is full, is named once and does not end the training."""

    def __init__(self, observer: TrainObserver, tracker: Tracker) -> None:
        self._observer, self._tracker = observer, tracker
        self._failed: set[str] = set()

    def record(self, record: dict[str, Any]) -> None:
        """One metrics record, training or validation."""
        with self._failing("tracker"):
            self._tracker.log(record)
        with self._failing("display"):
            self._observer.record(record)

    def notice(self, text: str) -> None:
        """Something a person should know."""
        with self._failing("display"):
            self._observer.notice(text)

    def close(self) -> None:
        """Flush and end the tracker."""
        with self._failing("tracker"):
            self._tracker.close()

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                warnings.warn(
                    f"the {name} of the run cannot be written ({error.strerror or error}); the "
                    "training goes on, and metrics.jsonl has all numbers.",
                    stacklevel=3,
                )


def make_tracker(recipe: Recipe, folder: Path) -> Tracker:
    """The tracker that the recipe asks for. Raises ValueError if its package is absent."""
    if recipe.train.tracker == "tensorboard":
        return TensorBoardTracker(folder)
    if recipe.train.tracker == "wandb":
        return WandbTracker(folder, recipe)
    return NoTracker()
