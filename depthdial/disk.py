"""Files and folders that appear whole or not at all.

`new_folder` is the one way in which a command writes or replaces a folder; a training run holds
its own folder with `locked`. What these folders hold is decided by their callers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from depthdial.locks import locked

IS_WINDOWS = os.name == "nt"
FolderKind = Literal["a model folder", "an exported model", "prepared data"]
"""What a folder that `new_folder` wrote is; one of another kind is never replaced."""
RECORD_FILE = ".depthdial.json"
"""In every folder that `new_folder` wrote: its kind and its files. Only these are ever removed."""
TRAINING_FILES = ("manifest.json", "metrics.jsonl", "provenance.json")
"""What a training run and its checkpoints hold, and no other folder."""


# Files


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a crash leaves the old or the new one.

    Raises: OSError naming the file if the disk refuses; it is then what it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with _naming_file(temporary, path):
        try:
            write_synced(temporary, text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(path.parent)


def write_synced(path: Path, text: str) -> None:
    """Write a text file, the same bytes on every system, and force it to disk.

    Raises: OSError naming the file if the disk refuses; it may be half written.
    """
    with _naming_file(path, path), path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk."""
    if IS_WINDOWS and path.is_dir():
        # It opens no folder, and forces a name to disk with the file that bears it.
        return
    # Windows forces only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if IS_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def named_in_errors(temporary: Path, shown: Path) -> Iterator[None]:
    """Put another path in the place of one that is gone when an error's message is read."""

    def renamed(text: object) -> object:
        return text.replace(str(temporary), str(shown)) if isinstance(text, str) else text

    try:
        yield
    except OSError as error:
        error.args = tuple(map(renamed, error.args))
        # Setting what was not there would change how the error is printed.
        if error.strerror is not None:
            error.strerror = renamed(error.strerror)
        if error.filename is not None:
            error.filename = renamed(error.filename)
        if error.filename2 is not None:
            error.filename2 = renamed(error.filename2)
        raise
    except ValueError as error:
        error.args = tuple(map(renamed, error.args))
        raise


@contextmanager
def _naming_file(temporary: Path, path: Path) -> Iterator[None]:
    """Give errors of the system the name of the file: those of writing and syncing have none."""
    with named_in_errors(temporary, path):
        try:
            yield
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise


# Folders


@contextmanager
def new_folder(
    destination: Path,
    *,
    kind: FolderKind,
    overwrite: bool = False,
    apart_from: Sequence[Path] = (),
    not_over: Sequence[Path] = (),
    wait: bool = False,
) -> Iterator[Path]:
    """A folder to write into; it takes the name `destination` when the block ends well.

    On any error, and whenever the process is killed, `destination` is what it was; what a killed
    process left beside it is used or removed by the next one. Only one process at a time writes.

    Args:
        kind: what the folder is.
        overwrite: replace a folder of this kind that this function wrote. Other files in it stay;
            one that holds other folders, or is a training run or checkpoint, is not replaced.
        apart_from: files and folders that must stay as they are; `destination` may neither hold
            one nor lie in it.
        not_over: the same for what `destination` may lie in, but not hold.
        wait: wait for another process that writes the same folder.

    Raises: ValueError if the destination is taken, or lies where it must not; InUseError if another
        process writes it; OSError saying what stands if the disk refuses.
    """
    _check_place(destination, apart_from, not_over)
    new_parents = [parent for parent in destination.parents if not parent.exists()]
    work = destination.with_name(f".{destination.name}.depthdial")
    new, old = work / "new", work / "old"
    try:
        with locked(work / "lock", what=str(destination), wait=wait):
            _take_up(old, destination)
            # Of a killed process, which nobody has seen.
            shutil.rmtree(new, ignore_errors=True)
            _check_replaceable(destination, kind=kind, overwrite=overwrite)
            try:
                with named_in_errors(new, destination), _saying_what_stands(new, destination):
                    new.mkdir()
                    yield new
                    _write_record(new, kind=kind)
                    _check_replaceable(destination, kind=kind, overwrite=overwrite)
                    _put_in_place(new, old, destination)
            finally:
                _take_up(old, destination)
                shutil.rmtree(new, ignore_errors=True)
    finally:
        _remove_empty([work, *new_parents])


@contextmanager
def _saying_what_stands(new: Path, destination: Path) -> Iterator[None]:
    """Errors of a disk that refuses say which folder was not written and what stands."""
    try:
        yield
    except OSError as error:
        # A full or broken disk has no type of its own; an error with the name of a file elsewhere
        # is of reading.
        is_elsewhere = error.filename is not None and str(new) not in str(error.filename)
        if type(error) is not OSError or is_elsewhere:
            raise
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason += f" ({Path(error.filename).name})"
        stands = "What was there is unchanged" if destination.exists() else "Nothing was left there"
        number = errno.EIO if error.errno is None else error.errno
        raise OSError(
            number,
            f"could not write {destination}: {reason}. {stands}. Make room or choose another "
            "folder, and run the command again.",
        ) from error


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, that nothing came into."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _check_place(destination: Path, apart_from: Sequence[Path], not_over: Sequence[Path]) -> None:
    """The destination is a name of its own, apart from what is read. Raises: ValueError."""
    if destination.name in ("", ".."):
        raise ValueError(
            f"the destination '{destination}' names no new folder, which could take its place only "
            "when it is complete. Give the name of a new one."
        )
    if destination.is_symlink():
        raise ValueError(
            f"{destination} is no folder but a link to {os.readlink(destination)}. Give the folder "
            "itself, or the name of a new one."
        )
    wanted = destination.resolve()
    for read, may_hold in (*((p, False) for p in apart_from), *((p, True) for p in not_over)):
        # A link is kept as it is, too, wherever it leads.
        for source in (read.resolve(), read.parent.resolve() / read.name):
            if _lies_in(source, wanted) or (not may_hold and _lies_in(wanted, source)):
                raise ValueError(
                    f"the destination {destination} and {read} lie in one another; what is read "
                    "is never changed. Give another destination."
                )


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, under whatever name: some file systems ignore
    the case of letters, and a folder may be mounted twice."""
    if path.is_relative_to(folder):
        return True
    if not folder.exists():
        return False
    return any(part.exists() and part.samefile(folder) for part in (path, *path.parents))


def _check_replaceable(destination: Path, *, kind: FolderKind, overwrite: bool) -> None:
    """Nothing is there, or a folder that may be replaced. Raises: ValueError saying what it is."""
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ValueError(f"{destination} is no folder. Give the name of a new one.")
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"{destination} exists and is not empty. Give the name of a new folder, or allow "
            f"{kind} to be replaced: --overwrite, in Python overwrite=True."
        )
    for name in TRAINING_FILES:
        if (destination / name).exists():
            raise ValueError(
                f"{destination} has {name}, so it is a training run or one of its checkpoints, "
                "which is never replaced. Give the name of a new folder."
            )
    found, own = _read_record(destination)
    if found is None:
        raise ValueError(
            f"{destination} has no intact {RECORD_FILE}, which lists the files that depthdial "
            "wrote and may remove, so it is not replaced. Give the name of a new folder."
        )
    if found != kind:
        raise ValueError(
            f"{destination} is {found}, not {kind}, so it is not replaced. Give the name of a new "
            "folder."
        )
    for folder in sorted(path for path in destination.iterdir() if _is_folder(path)):
        inside = {path for path in folder.rglob("*") if not _is_folder(path)}
        if not inside or not inside <= {destination / name for name in own}:
            raise ValueError(
                f"{destination} holds the folder '{folder.name}', which depthdial did not write, "
                "so it is not replaced. Give the name of a new folder, or move that one elsewhere."
            )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _write_record(folder: Path, *, kind: FolderKind) -> None:
    """Note the files that a folder has now, in the folder."""
    files = (path for path in folder.rglob("*") if not _is_folder(path))
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    write_synced(folder / RECORD_FILE, json.dumps({"kind": kind, "files": names}, indent=2) + "\n")


def _read_record(folder: Path) -> tuple[str | None, set[str]]:
    """Kind and files of a folder that `new_folder` wrote; no kind for any other folder."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        kind, names = str(record["kind"]), {str(name) for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None, set()
    # A record may come from elsewhere, and files that it names are removed.
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        return None, set()
    return kind, names | {RECORD_FILE}


def _put_in_place(new: Path, old: Path, destination: Path) -> None:
    """Rename; a folder that is there steps aside first, and comes back if that fails."""
    if destination.exists():
        _, own = _read_record(destination)
        for path in destination.iterdir():
            if path.name not in own and not _is_folder(path) and (new / path.name).exists():
                raise ValueError(
                    f"{destination} has a file '{path.name}' that depthdial did not write, in the "
                    "place of a new one. Move it elsewhere, or give the name of a new folder."
                )
        # Before the old folder goes, the new one must outlast a loss of power.
        for path in (*new.rglob("*"), new):
            fsync_path(path)
        destination.rename(old)
    new.rename(destination)


def _take_up(old: Path, destination: Path) -> None:
    """End a replacement, wherever it stopped: the replaced folder comes back, or its own files go.

    Files that depthdial did not write go from the replaced folder to the new one.
    """
    if not old.is_dir():
        return
    if not destination.exists():
        old.rename(destination)
        return
    _, own = _read_record(old)
    try:
        for path in list(old.iterdir()):
            if path.name not in own and not _is_folder(path):
                if (destination / path.name).exists():
                    raise FileExistsError(errno.EEXIST, "another file has its name", str(path))
                path.rename(destination / path.name)
        # The record last: without it nothing is known to be depthdial's.
        for name in sorted(own - {RECORD_FILE}):
            (old / name).unlink(missing_ok=True)
        for folder in sorted((path for path in old.rglob("*") if _is_folder(path)), reverse=True):
            folder.rmdir()
        (old / RECORD_FILE).unlink(missing_ok=True)
        old.rmdir()
    except OSError as error:
        warnings.warn(
            f"the replaced folder could not be removed and stays at {old}: {error}. The next "
            f"command that writes {destination} tries again.",
            stacklevel=4,
        )
