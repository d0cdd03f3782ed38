"""Locks that end with their process: a folder or file has one writer.

A lock is a file beside what it guards; it says who holds it. `flock` on POSIX, `msvcrt` on Windows.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LOCKED_BYTE = 2**20
"""Windows lets nobody read a locked byte; this one lies behind the text of a lock file."""
POLL_SECONDS = 0.1
MAX_ATTEMPTS = 50
"""Times that a lock file may vanish while it is opened, as others remove it, before that is taken
for another fault."""


class InUseError(ValueError):
    """Another process holds the lock of a folder."""


@contextmanager
def locked(path: Path, *, what: str, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; the system ends the lock with the process.

    The folder of `path` is made if it is missing. The file is removed at the end; one that a
    killed process left is free, and is used.

    Args:
        what: what is locked, for messages.
        wait: wait until the holder is done, instead of raising.

    Raises: InUseError naming the process that holds the lock.
    """
    file = _acquired(path, what=what, wait=wait)
    try:
        yield
    finally:
        _release(file, path)


def _acquired(path: Path, *, what: str, wait: bool) -> BinaryIO:
    is_waiting, attempts = False, 0
    while True:
        attempts += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except (FileNotFoundError, FileExistsError):
            # Its last holder removed the folder in the middle of this.
            if attempts == MAX_ATTEMPTS:
                raise
            continue
        try:
            if _try_lock(file):
                if _is_at(file, path):
                    _write_holder(file)
                    return file
                # Its last holder removed the file after it was opened here: lock a new one.
            elif not wait:
                raise InUseError(
                    f"{what} is in use by {_holder(path)}. Wait until it is done, or stop it."
                )
            else:
                if not is_waiting:
                    warnings.warn(f"waiting for {_holder(path)}, which uses {what}.", stacklevel=4)
                is_waiting, attempts = True, 0
                time.sleep(POLL_SECONDS)
        except BaseException:
            file.close()
            raise
        file.close()


def _try_lock(file: BinaryIO) -> bool:
    """Lock an open file, or find that somebody else has; a crash of this process ends the lock."""
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK):
            return False
        # Some network file systems. Refusing would keep their users from working at all.
        warnings.warn(
            f"{file.name}: this file system has no locks ({error.strerror}), so that a second "
            "process that writes to the same place would not be noticed. Start only one.",
            stacklevel=5,
        )
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(file: BinaryIO) -> None:
    """Note in a locked file who holds it."""
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    note = {"pid": os.getpid(), "host": platform.node(), "since": since}
    # A full disk costs the note, not the lock.
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(note).encode())
        file.flush()


def _holder(path: Path) -> str:
    """The process that holds a lock, in words."""
    try:
        note = json.loads(path.read_bytes())
        pid, host, since = int(note["pid"]), note["host"], note["since"]
    except (OSError, ValueError, KeyError, TypeError):
        # The note is not complete yet, or is gone already.
        return "another process"
    # The text is another's: ascii() shows control characters instead of sending them.
    place = "" if host == platform.node() else f" on {ascii(host)}"
    who = "this process" if pid == os.getpid() and not place else f"process {pid}{place}"
    return f"{who}, since {ascii(since)}"


def _release(file: BinaryIO, path: Path) -> None:
    """Remove a lock file, unless its folder was moved, and end the lock.

    Who opened the file meanwhile finds that it is gone, and locks a new one.
    """
    is_ours = _is_at(file, path)
    with suppress(OSError):
        if is_ours:
            path.unlink()
            is_ours = False
    file.close()
    # Windows removes no open file. There, unlike here, a file that somebody else opened since is
    # not removed either.
    if is_ours:
        with suppress(OSError):
            path.unlink()
