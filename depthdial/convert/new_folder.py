"""A folder that appears whole or not at all.

Import and export write beside their destination and rename at the end; what they write is in
`hf_io.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from depthdial.model.checkpoint import CONFIG_FILE


@contextmanager
def new_folder(
    destination: Path, *, overwrite: bool = False, apart_from: Path | None = None
) -> Iterator[Path]:
    """A folder to write into; it takes the name `destination` when the block ends well.

    Args:
        overwrite: replace a model folder that is there; anything else is never replaced.
        apart_from: a file or folder that must stay as it is; `destination` may neither hold it
            nor lie in it.

    Raises: ValueError if the destination is taken, or lies where it must not.
    """
    _check_destination(destination, overwrite=overwrite, apart_from=apart_from)
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


def _check_destination(destination: Path, *, overwrite: bool, apart_from: Path | None) -> None:
    if destination.name in ("", ".."):
        raise ValueError(
            f"the destination '{destination}' names no new folder, which could take its place only "
            "when it is complete. Give the name of a new one."
        )
    if apart_from is not None:
        wanted = destination.resolve()
        # A link is kept as it is, too, wherever it leads.
        link = apart_from.parent.resolve() / apart_from.name
        if any(
            wanted.is_relative_to(source) or source.is_relative_to(wanted)
            for source in (apart_from.resolve(), link)
        ):
            raise ValueError(
                f"the destination {destination} and {apart_from} lie in one another; what is read "
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
    if not (destination / CONFIG_FILE).is_file():
        raise ValueError(
            f"{destination} has no {CONFIG_FILE}, so it is no model folder and is not replaced. "
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
