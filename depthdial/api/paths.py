"""What a path or hub id stands for: a model directory, a run and its recipe.

What a model or run is used for is in `api/model.py`.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from depthdial.config import Recipe
from depthdial.model.folder import HUB_ID, fetch


def run_recipe(path: str | Path) -> Recipe | None:
    """The recipe of the run that a path is, or is a checkpoint of; None outside a run."""
    path = Path(path)
    for folder in (path, path.parent.parent):
        if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
            return Recipe.from_file(folder / "config.json")
    return None


def model_folder(path_or_id: str | Path) -> Path:
    """The model directory that a path or hub id stands for; see `load`."""
    from depthdial.training.run_dir import CHECKPOINT_NAME, RunDir, problem_of

    path = Path(path_or_id)
    if not path.exists():
        return _from_hub(str(path_or_id))
    run = RunDir(path)
    if run.checkpoints_path.is_dir():
        return run.latest_checkpoint().path
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match and path.parent.name == "checkpoints":
        problem = problem_of(path, step=int(match[1]))
        if problem is not None:
            raise ValueError(
                f"checkpoint {path} cannot be used: {problem}. Give the run folder "
                f"{path.parent.parent} to use its newest intact checkpoint."
            )
    return path


def check_is_run(path: str | Path, *, flag: str | None = None) -> None:
    """Refuse a checkpoint where a whole run is meant.

    Args: flag: of the command, that takes the name of a checkpoint.
    Raises: ValueError naming the run.
    """
    from depthdial.training.run_dir import CHECKPOINT_NAME

    path = Path(path)
    if CHECKPOINT_NAME.fullmatch(path.name) and path.parent.name == "checkpoints":
        run = path.parent.parent
        instead = f"{run}" if flag is None else f"{run} {flag} {path.name}"
        raise ValueError(f"{path} is a checkpoint of the run {run}, not a run. Give {instead}.")


def _from_hub(name: str) -> Path:
    """Download a model directory, or say why there is none.

    Raises: FileNotFoundError.
    """
    parent = Path(name).parent
    if not HUB_ID.fullmatch(name) or parent.is_dir():
        siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        close = difflib.get_close_matches(Path(name).name, siblings, n=1)
        raise FileNotFoundError(
            f"no model at {name}."
            + (f" Did you mean '{parent / close[0]}'?" if close else "")
            + " Give a run folder, a checkpoint, a model directory, or a hub id org/name."
        )
    return fetch(name)
