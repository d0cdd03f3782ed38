"""What the source of an import stands for: a path, or a checkpoint on the hub."""

from __future__ import annotations

import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "LICENSE*",
    "NOTICE*",
]
"""What is fetched: never code, never pickles."""


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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"there is no folder {name}, and as a hub id it cannot be fetched ({reason}). Check "
            "the name and the connection, or give the path of the checkpoint."
        ) from error
