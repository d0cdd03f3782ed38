"""Shipped recipes: the YAML files beside this one, found by name.

Reading and overriding a recipe is in `api/recipes.py`; what its keys mean is in `config/`.
"""

from __future__ import annotations

from pathlib import Path

from depthdial.config import nearest_name
from depthdial.config.text import read_mapping

RECIPES = Path(__file__).parent
"""Folder of the shipped recipes."""


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """File of a shipped recipe. Raises ValueError with the nearest name."""
    if name not in recipe_names():
        known = nearest_name(name, recipe_names())
        raise ValueError(f"'{name}' is neither a recipe file nor a shipped recipe.{known}")
    return RECIPES / f"{name}.yaml"


def needs_init(path: Path) -> bool:
    """Whether a recipe file has no model of its own: it starts from a model directory that whoever
    trains it names.

    Raises: ValueError for a file that holds no keys and values.
    """
    values = read_mapping(path)
    train = values.get("train")
    init = train.get("init") if isinstance(train, dict) else None
    return values.get("model") is None and init is None
