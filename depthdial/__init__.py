"""Depthdial: elastic-depth looped language models, one set of weights for every loop count.

    model = depthdial.load("runs/tiny-text")
    model.generate("Fellow citizens", num_loops=2)
    depthdial.train("tiny-text", train__steps=200)
    depthdial.sweep(model, "speeches.txt")

Names are imported when first used: `import depthdial` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "Completion": "depthdial.api.model",
    "DepthSweep": "depthdial.eval.depth_sweep",
    "Model": "depthdial.api.model",
    "ModelConfig": "depthdial.config",
    "Recipe": "depthdial.config",
    "TrainResult": "depthdial.training.pretrain",
    "load": "depthdial.api.model",
    "resume": "depthdial.api.model",
    "sweep": "depthdial.api.model",
    "train": "depthdial.api.model",
}

__all__ = [*_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'depthdial' has no attribute '{name}'")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
