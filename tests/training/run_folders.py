"""What run folders in tests hold, and how they are looked at."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from depthdial.config import LoopConfig
from depthdial.training.run_dir import RunDir

CONFIG = LoopConfig(update="residual")


def new_run(root, name, **options):
    """A run that nobody holds, as one whose process was killed."""
    with RunDir.create(root, name, **({"config": CONFIG, "provenance": {}} | options)) as run:
        return run


def writer(value, *, num_values=200):
    """Writes a model folder and optimizer state whose contents depend on `value`."""

    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"value": value}))
        weights = {"weight": np.full(num_values, value, dtype=np.float32)}
        save_file(weights, folder / "model" / "model.safetensors")
        save_file(weights, folder / "optimizer.safetensors")

    return write


def saved_value(checkpoint):
    return float(load_file(checkpoint.path / "optimizer.safetensors")["weight"][0])


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def tree_bytes(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
