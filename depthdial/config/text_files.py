"""JSON and text files of foreign checkpoints, read with limits.

A file from elsewhere may be huge or nested without end; here it costs no more than its limit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from depthdial.config.limits import MAX_NESTING
from depthdial.config.text import load_json

LICENCE_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Texts that whoever passes weights on must pass on too."""
MAX_JSON_BYTES = 64 * 2**20
"""Largest JSON file: an index of a million tensors has as much."""
MAX_NAME_LENGTH = 200
"""Longest file name, in characters; file systems allow 255 bytes."""


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The keys and values of a JSON file, in the order of its text.

    Raises: FileNotFoundError; ValueError naming the file, for one that is too large, too deep,
        no JSON, or no object.
    """
    text = read_text(path, max_bytes=max_bytes)
    try:
        values = load_json(text)
    # Also a key that is given twice, or a number of thousands of digits.
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error} Copy it again.") from None
    if _nesting(values) > MAX_NESTING:
        raise ValueError(f"{path} nests groups deeper than {MAX_NESTING} levels; it is damaged.")
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values


def read_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """A UTF-8 text file. Raises: FileNotFoundError; ValueError if too large or no UTF-8."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.name} in {path.parent}.")
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(
            f"{path} has {size:,} bytes; such a file has at most {max_bytes:,}. It is damaged, or "
            "something else than its name says."
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is damaged or not UTF-8 text (byte {error.object[error.start]:#x} at "
            f"{error.start}). Copy it again."
        ) from None


def is_plain_name(name: str) -> bool:
    """Whether a name stands for a file of its own folder, whatever the operating system: neither
    a path nor a drive.
    """
    is_short = 0 < len(name) <= MAX_NAME_LENGTH
    return is_short and name not in (".", "..") and not set(name) & set("/\\:\0")


def dump_json(values: dict[str, Any]) -> str:
    """JSON text with the keys in their order, as `transformers` indents it."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _nesting(value: Any) -> int:
    """Levels of lists and groups."""
    deepest, open_values = 0, [(value, 0)]
    while open_values:
        value, level = open_values.pop()
        deepest = max(deepest, level)
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            open_values.extend((item, level + 1) for item in inner)
    return deepest
