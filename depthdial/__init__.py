"""Depthdial: elastic-depth looped language models, one set of weights for every loop count.

    model = depthdial.load("runs/tiny-text")
    model.generate("Fellow citizens", num_loops=2)
    depthdial.train("tiny-text", train__steps=200)
    depthdial.sweep(model, "speeches.txt")

Names are imported when first used: `import depthdial` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from depthdial import train as _train_package

if TYPE_CHECKING:
    from pathlib import Path

    from depthdial.config import Recipe
    from depthdial.train.pretrain import TrainResult
    from depthdial.train.progress import TrainObserver

__version__ = "0.1.0"

_NAMES = {
    "Completion": "depthdial.api",
    "DepthSweep": "depthdial.eval.depth_sweep",
    "Model": "depthdial.api",
    "ModelConfig": "depthdial.config",
    "Recipe": "depthdial.config",
    "TrainResult": "depthdial.train.pretrain",
    "load": "depthdial.api",
    "resume": "depthdial.api",
    "sweep": "depthdial.api",
}

__all__ = [*_NAMES, "train", "__version__"]


class _CallablePackage(ModuleType):
    """`depthdial.train` is a package and, by the front door, a function.

    Importing any `depthdial.train.*` binds the package to that name, so a plain function there
    would vanish with the first such import.
    """

    def __call__(
        self,
        recipe: str | Path | Recipe,
        *,
        root: str | Path = "runs",
        observer: TrainObserver | None = None,
        **overrides: Any,
    ) -> TrainResult:
        """Train a recipe into a new folder root/name; see `depthdial.api.train`."""
        from depthdial.api import train

        return train(recipe, root=root, observer=observer, **overrides)


_train_package.__class__ = _CallablePackage


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'depthdial' has no attribute '{name}'")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
