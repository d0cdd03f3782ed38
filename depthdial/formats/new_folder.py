"""A folder that appears whole or not at all.

Import and export write beside their destination and rename at the end; what they write is in
`import_export.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from depthdial.model.checkpoint import CONFIG_FILE
from depthdial.model.folder import TEMPLATES_FOLDER

TRAINING_FILES = ("manifest.json", "metrics.jsonl", "provenance.json")
"""What a training run and its checkpoints hold, and no other model folder."""


@contextmanager
def new_folder(
    destination: Path, *, overwrite: bool = False, apart_from: Sequence[Path] = ()
) -> Iterator[Path]:
    """A folder to write into; it takes the name `destination` when the block ends well.

    Args:
        overwrite: replace a model folder that is there; anything else is never replaced, nor is
            a training run or one of its checkpoints.
        apart_from: files and folders that must stay as they are; `destination` may neither hold
            one nor lie in it.

    Raises: ValueError if the destination is taken, or lies where it must not.
    """
    _check_destination(destination, overwrite=overwrite, apart_from=apart_from)
    new_parents = [parent for parent in destination.parents if not parent.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with named_in_errors(temporary, destination):
            yield temporary
            _put_in_place(temporary, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(new_parents)


@contextmanager
def named_in_errors(temporary: Path, shown: Path) -> Iterator[None]:
    """Put another path in the place of one that is gone when an error's message is read."""

    def renamed(text: object) -> object:
        return text.replace(str(temporary), str(shown)) if isinstance(text, str) else text

    try:
        yield
    except OSError as error:
        error.args = tuple(map(renamed, error.args))
        # Setting a name that was not there would change how the error is printed.
        if error.filename is not None:
            error.filename = renamed(error.filename)
        if error.filename2 is not None:
            error.filename2 = renamed(error.filename2)
        raise
    except ValueError as error:
        error.args = tuple(map(renamed, error.args))
        raise


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, that nothing came into."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _check_destination(destination: Path, *, overwrite: bool, apart_from: Sequence[Path]) -> None:
    if destination.name in ("", ".."):
        raise ValueError(
            f"the destination '{destination}' names no new folder, which could take its place only "
            "when it is complete. Give the name of a new one."
        )
    wanted = destination.resolve()
    for read in apart_from:
        # A link is kept as it is, too, wherever it leads.
        link = read.parent.resolve() / read.name
        if any(
            wanted.is_relative_to(source) or source.is_relative_to(wanted)
            for source in (read.resolve(), link)
        ):
            raise ValueError(
                f"the destination {destination} and {read} lie in one another; what is read "
                "is never changed. Give another destination."
            )
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_symlink() or not destination.is_dir():
        raise ValueError(f"{destination} is no folder. Give the name of a new one.")
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"{destination} exists and is not empty. Give the name of a new folder, or allow a "
            "model folder to be replaced (overwrite=True, --overwrite)."
        )
    _check_replaceable(destination)


def _check_replaceable(folder: Path) -> None:
    """A folder is a model and nothing more. Raises: ValueError naming what else it is."""
    for name in TRAINING_FILES:
        if (folder / name).exists():
            raise ValueError(
                f"{folder} has {name}, so it is a training run or one of its checkpoints, which is "
                "never replaced. Give the name of a new folder."
            )
    others = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if foreign := [name for name in others if name != TEMPLATES_FOLDER]:
        raise ValueError(
            f"{folder} holds the folder '{foreign[0]}', which no model folder has, so it is not "
            "replaced. Give the name of a new folder, or move that one elsewhere."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG_FILE}, so it is no model folder and is not replaced. "
            "Give the name of a new folder."
        )


def _put_in_place(temporary: Path, destination: Path) -> None:
    """Rename; an older folder there goes only when the new one has its place."""
    if not destination.exists():
        temporary.rename(destination)
        return
    old = destination.with_name(f".{destination.name}.old-{os.getpid()}")
    destination.rename(old)
    try:
        temporary.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old)
