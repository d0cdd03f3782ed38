"""What the source of an import stands for: a path, or a checkpoint on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from depthdial.config.text_files import LICENCE_PATTERNS

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    *LICENCE_PATTERNS,
]
"""What is fetched, of published checkpoints as of our own: never code, never pickles."""


def local_source(source: str | Path) -> Path:
    """The path itself where there is something, else the hub's folder of that id.

    Raises: FileNotFoundError saying why neither works.
    """
    path = Path(source)
    if path.exists():
        return path
    name = str(source)
    if not HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"there is nothing at {name}. Give the folder of a published checkpoint, a .gguf file, "
            "or a hub id org/name."
        )
    return fetch(name)


def fetch(name: str) -> Path:
    """The local copy of what the hub has under an id.

    Raises: FileNotFoundError saying why there is none.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"there is no folder {name}, and as a hub id it cannot be fetched ({_reason(error)}). "
            "Check the name and the connection, or give the path of a model or checkpoint."
        ) from error


def _reason(error: Exception) -> str:
    """Why a download failed; the library's own words are about its settings."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached, and no earlier download is kept here"
    if isinstance(error, GatedRepoError):
        return "its owner gives it only to those who asked for access"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has nothing of that name, or keeps it private"
    return str(error).strip().partition("\n")[0]
