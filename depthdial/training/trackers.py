"""Where metrics go besides metrics.jsonl: TensorBoard or Weights & Biases, if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from depthdial.config import Recipe


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


def make_tracker(recipe: Recipe, folder: Path) -> Tracker:
    """The tracker that the recipe asks for. Raises ValueError if its package is absent."""
    if recipe.train.tracker == "tensorboard":
        return TensorBoardTracker(folder)
    if recipe.train.tracker == "wandb":
        return WandbTracker(folder, recipe)
    return NoTracker()
