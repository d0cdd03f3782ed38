"""Folders and files that a crash leaves either whole or recognisably unfinished.

Here live the manifest of a sealed folder (sizes and SHA-256 of its files, written last), its
check, and replacing a file in one move. What is in the files, and which folder is used, is
decided in `run_dir.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
# Formats that cannot carry code; anything else (pickles above all) is refused. `.model` is the
# piece table of a tokenizer.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
LICENCE_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*")


def seal(folder: Path, *, step: int) -> None:
    """Force every file to disk and write the manifest last.

    Raises: ValueError if the folder is empty or holds a link or a file of another kind.
    """
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in files:
        if not is_allowed(path) or path.is_symlink():
            raise ValueError(
                f"checkpoint step_{step}: '{path.name}' is not allowed; it holds "
                f"regular files of the kinds {', '.join(ALLOWED_SUFFIXES)}, and licences."
            )
    if not files or folder / MANIFEST in files:
        raise ValueError(
            f"checkpoint step_{step}: its writer left {len(files)} files; expected at least one, "
            f"and none named {MANIFEST}."
        )
    entries = {}
    for path in files:
        fsync_path(path)
        entries[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
        }
    manifest = {"manifest_version": MANIFEST_VERSION, "step": step, "files": entries}
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        fsync_path(path)


def is_allowed(path: Path) -> bool:
    """Whether a file of this name may be in a checkpoint."""
    return path.suffix in ALLOWED_SUFFIXES or LICENCE_NAMES.fullmatch(path.name) is not None


def problem_of(folder: Path, *, step: int) -> str | None:
    """Why a sealed folder cannot be trusted, or None. Reads every byte."""
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        version, listed_step, files = (
            manifest["manifest_version"], manifest["step"], manifest["files"]
        )  # fmt: skip
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if version != MANIFEST_VERSION:
        return f"its manifest_version is {version}, this program reads {MANIFEST_VERSION}"
    if listed_step != step or not expected:
        return f"its {MANIFEST} is of step {listed_step} and lists {len(expected)} files"
    for name, (num_bytes, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"'{name}' is missing"
        if path.stat().st_size != num_bytes:
            return f"'{name}' has {path.stat().st_size} bytes instead of {num_bytes}"
        if file_sha256(path) != digest:
            return f"the contents of '{name}' changed (SHA-256 differs)"
    return None


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a crash leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_synced(path: Path, text: str) -> None:
    """Write a text file and force it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
