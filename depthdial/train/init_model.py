"""The model of a run's first step: new, or from a model directory with what travels with it.

The recipe's model must be the folder's, but for the loop limits and a modulation that the run
grafts; anything else is a conversion, which `depthdial convert` makes and proves.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from depthdial.config import ModelConfig, ModulationConfig, Recipe
from depthdial.model.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_model, read_config
from depthdial.model.looped_lm import LoopedLM
from depthdial.train.patterns import check_patterns, freeze_parameters
from depthdial.train.sealed_folder import MANIFEST, file_sha256, is_allowed

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE, MANIFEST)
"""What every checkpoint writes anew; everything else in a folder travels with the model."""
FREE_KEYS = ("num_loops", "max_loops", "trained_loops", "modulation")
FREE_LOOP_KEYS = ("cache_policy", "beyond_max_loops")
"""Keys of the recipe's model, and of its loop, that may differ from the folder's."""


def first_model(recipe: Recipe, *, starts_late: bool) -> LoopedLM:
    """The model of the first step on its device, frozen as the recipe says; its config knows what
    was trained before.

    Args: starts_late: the first steps run one loop; a modulation is then grafted after them, and
        until then a new model has none.
    Raises: as `load_init` and `check_patterns`.
    """
    config, settings = recipe.model, recipe.train
    with torch.device("meta"):
        names = [name for name, _ in LoopedLM(config).named_parameters()]
    check_patterns(recipe.optim, names)
    if settings.init is not None:
        model = load_init(settings.init, config)
    else:
        config = config.replace(modulation=None) if starts_late else config
        model = LoopedLM(config.with_trained(()), seed=settings.seed)
    freeze_parameters(model, recipe.optim.freeze)
    return model.to(settings.device)


def load_init(folder: str | Path, config: ModelConfig) -> LoopedLM:
    """The folder's weights in float32, in a model with the loop limits of `config`.

    Without a modulation in the folder it has none yet: the run grafts that of `config`.
    Raises: as `load_model`; ValueError if `config` is another model than the folder's.
    """
    stored = read_config(folder)
    check_agreement(config, stored, folder)
    tensors = load_model(folder).state_dict()
    with torch.device("meta"):
        known = config.replace(modulation=stored.modulation).with_trained(stored.trained_at)
        model = LoopedLM(known)
    model.load_state_dict(tensors, assign=True)
    return in_own_memory(model)


def in_own_memory(model: LoopedLM) -> LoopedLM:
    """The model with every parameter copied to float32 memory of its own.

    Tensors of a file lie at any multiple of 8 bytes, and matrix products of the same numbers
    differ in the last bit by how their memory is aligned: a resumed run would leave the path of
    the uninterrupted one.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32, copy=True)
    return model


def check_agreement(config: ModelConfig, stored: ModelConfig, folder: str | Path) -> None:
    """The model of a recipe is the folder's.

    Raises: ValueError naming the first key that differs, with both values.
    """
    wanted, found = _comparable(config), _comparable(stored)
    for key, value in wanted.items():
        if value != found[key]:
            raise ValueError(
                f"model.{key}={value!r}, but train.init={folder} has {found[key]!r}. Weights can "
                "start another model only through `depthdial convert`; here num_loops, max_loops, "
                "loop.cache_policy and loop.beyond_max_loops may differ, and a modulation of kind "
                "'elr' may be added."
            )
    if stored.modulation is None:
        if config.modulation is not None and not isinstance(config.modulation, ModulationConfig):
            raise ValueError(
                f"model.modulation.kind='{config.modulation.kind}' cannot be added to trained "
                "weights: its gates start closed. Only kind 'elr' keeps the function."
            )
    elif config.modulation != stored.modulation:
        raise ValueError(
            f"model.modulation={config.modulation!r}, but train.init={folder} has "
            f"{stored.modulation!r}, which is trained; leave it out."
        )
    elif isinstance(stored.modulation, ModulationConfig) and config.max_loops != stored.max_loops:
        raise ValueError(
            f"model.max_loops={config.max_loops}, but the modulation of train.init={folder} was "
            f"trained on k / {stored.max_loops}; another limit would change every budget."
        )


def folder_facts(folder: str | Path) -> dict[str, Any]:
    """What tells a model directory from any other, without its place on the machine.

    Returns: name, sha256 of everything together, and that of each file.
    """
    files = {
        path.name: file_sha256(path)
        for path in (Path(folder) / CONFIG_FILE, Path(folder) / WEIGHTS_FILE, *companions(folder))
    }
    whole = hashlib.sha256("".join(f"{n} {files[n]}\n" for n in sorted(files)).encode())
    return {"name": Path(folder).resolve().name, "sha256": whole.hexdigest(), "files": files}


def check_facts(folder: str | Path, facts: dict[str, Any], *, role: str) -> None:
    """A folder is still what it was when the run began. Raises: ValueError."""
    found = folder_facts(folder)
    if found["sha256"] != facts["sha256"]:
        raise ValueError(
            f"{role} {folder} is not what it was when the run began (SHA-256 "
            f"{facts['sha256'][:16]}..., now {found['sha256'][:16]}...). Restore it, or start a "
            "new run."
        )


def companions(folder: str | Path) -> Iterator[Path]:
    """Files that travel with a model: tokenizer, chat template, origin, licences; by name."""
    for path in sorted(Path(folder).iterdir()):
        if path.is_file() and path.name not in OWN_FILES and is_allowed(path):
            yield path


def copy_companions(source: str | Path, destination: Path) -> None:
    """Copy what travels with a model, byte for byte."""
    for path in companions(source):
        shutil.copyfile(path, destination / path.name)


def _comparable(config: ModelConfig) -> dict[str, Any]:
    """Keys that must agree, by dotted name."""
    values = config.to_dict()
    loop = values.pop("loop")
    found = {key: value for key, value in values.items() if key not in FREE_KEYS}
    found |= {f"loop.{key}": value for key, value in loop.items() if key not in FREE_LOOP_KEYS}
    return found
