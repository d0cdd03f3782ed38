"""Recipes by name or file with some keys replaced, as Python and the command line take them.

What the keys mean is in `config/`, the shipped files in `recipes/`. Reading needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthdial.config import Recipe
from depthdial.recipes import needs_init, recipe_file

DATA_SOURCES = ("data.path", "data.corpus", "data.task")
MODEL_FOLDERS = ("train.init", "objective.distill.teacher")
"""Keys that take whatever `load` takes, a run among it."""
TASK_KEYS = ("data.num_chains", "data.chain_length")


def load_recipe(recipe: str | Path | Recipe, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A checked recipe with some keys replaced.

    Args:
        recipe: name of a shipped recipe, a YAML or JSON file, or a `Recipe`.
        overrides: dotted key -> value of plain JSON types. A group (`model.modulation`) and keys
            of it may both be given: the keys then change the group that was given. train.init,
            what `load` takes, replaces the recipe's model by that model; changes of `model` keys
            apply to it.

    Raises: ValueError naming every wrong key or value, or that the recipe needs train.init;
        FileNotFoundError.
    """
    # A group before its keys: it must not take back what they set.
    changes = dict(sorted((overrides or {}).items(), key=lambda item: item[0].count(".")))
    _check_groups(changes)
    _replace_source(changes)
    for key in MODEL_FOLDERS:
        if changes.get(key) is not None:
            from depthdial.api.paths import model_folder

            changes[key] = str(model_folder(changes[key]))
    init = changes.get("train.init")
    if not isinstance(recipe, Recipe):
        path = recipe_path(recipe)
        if init is not None:
            # All at once: limits of the folder's model must change before anything is checked.
            return Recipe.from_file(path, init=init, changes=changes)
        if needs_init(path):
            raise ValueError(
                f"{recipe}: missing key 'model'. A recipe without it starts from a model "
                "directory: name one with --init (in Python train__init), or give it a model."
            )
        recipe = Recipe.from_file(path)
    return recipe.replace(**changes) if changes else recipe


def recipe_path(recipe: str | Path) -> Path:
    """The file that a recipe's name or path stands for. Raises: ValueError, FileNotFoundError."""
    path = Path(recipe)
    if path.is_file():
        return path
    if isinstance(recipe, Path) or path.suffix in (".yaml", ".yml", ".json"):
        raise FileNotFoundError(f"no recipe file at {path}")
    return recipe_file(recipe)


def _replace_source(changes: dict[str, Any]) -> None:
    """A recipe has one source of data: naming another one takes the keys of the first away."""
    named = [key for key in DATA_SOURCES if changes.get(key) is not None]
    if not named:
        return
    for key in DATA_SOURCES:
        changes.setdefault(key, None)
    if "data.corpus" not in named:
        changes.setdefault("data.tokenizer_vocab", None)
    if changes["data.task"] != "pointer_chain":
        for key in TASK_KEYS:
            changes.setdefault(key, None)


def _check_groups(changes: Mapping[str, Any]) -> None:
    """Refuse a group that is null together with keys of it."""
    for group, value in changes.items():
        inside = [key for key in changes if key.startswith(f"{group}.")]
        if value is None and inside:
            raise ValueError(
                f"{group}=null and {inside[0]}={changes[inside[0]]} contradict each other: a group "
                "that is null has no keys. Leave one of them out."
            )
