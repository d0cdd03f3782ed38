"""What a model folder remembers of the checkpoint it was imported from: origin.json.

With it an export gives back what came in: the config's own keys in their order, the names and
files of the tensors, copies and buffers that ours do not store. `origin.safetensors` holds the few
tensors that cannot be computed again to the bit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from depthdial.config.text_files import dump_json, is_plain_name, read_json_object
from depthdial.formats.text.tokens import CHANGED_FILES

ORIGIN_FILE = "origin.json"
ORIGIN_TENSORS_FILE = "origin.safetensors"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Origin:
    """The source of an imported model.

    Fields:
        family: its family. source: name of its folder, file or hub id.
        config: its config.json, keys in their order.
        tensors: tensor -> file; empty for a source that is not written again (GGUF).
        kept_tensors: those of them that are in origin.safetensors.
        dtype: number format of the imported matrices, as "bfloat16".
        changed_files: tokenizer files that the import changed -> their content; null for none.
        sha256: file -> hash of every file that was read.
    """

    family: str
    source: str
    config: dict[str, Any]
    tensors: dict[str, str]
    kept_tensors: tuple[str, ...]
    dtype: str
    changed_files: dict[str, dict[str, Any] | None]
    sha256: dict[str, str]

    def save(self, folder: Path) -> None:
        """Write origin.json."""
        text = dump_json({"format_version": FORMAT_VERSION, **asdict(self)})
        (folder / ORIGIN_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Origin | None:
        """The origin of a model folder; None for a model of our own.

        Raises: ValueError for a damaged file, or one that a later version wrote.
        """
        path = folder / ORIGIN_FILE
        if not path.is_file():
            return None
        values = read_json_object(path)
        version = values.pop("format_version", None)
        wanted = {field.name for field in fields(cls)}
        if version != FORMAT_VERSION or set(values) != wanted:
            raise ValueError(
                f"{path} has format_version {version} and the keys {sorted(values)}; this version "
                f"reads {FORMAT_VERSION} with {sorted(wanted)}. Import the checkpoint again."
            )
        for key, (is_right, wanted) in SHAPES.items():
            if not is_right(values[key]):
                raise ValueError(
                    f"{path} has {key}={_shortened(values[key])}; it must be {wanted}. It is "
                    "damaged, or was not written by an import: import the checkpoint again."
                )
        values["kept_tensors"] = tuple(values["kept_tensors"])
        return cls(**values)


def _maps(value: Any, is_name: Callable[[str], bool], is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_name(k) and is_right(x) for k, x in value.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tensor_file(value: Any) -> bool:
    return _is_text(value) and is_plain_name(value) and value.endswith(".safetensors")


def _is_group(value: Any) -> bool:
    return isinstance(value, dict)


def _is_hash(value: Any) -> bool:
    return _is_text(value) and re.fullmatch("[0-9a-f]{64}", value) is not None


# An export writes and removes files by these names, so none of them may lead anywhere else.
SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "family": (_is_text, "a text"),
    "source": (_is_text, "a text"),
    "config": (_is_group, "a group of keys"),
    "tensors": (
        lambda value: _maps(value, _is_text, _is_tensor_file),
        "tensor names with plain names of .safetensors files",
    ),
    "kept_tensors": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of tensor names",
    ),
    "dtype": (_is_text, "a text"),
    "changed_files": (
        lambda value: _maps(value, CHANGED_FILES.__contains__, lambda x: x is None or _is_group(x)),
        f"groups of keys, or null, for {' and '.join(CHANGED_FILES)}",
    ),
    "sha256": (lambda value: _maps(value, _is_text, _is_hash), "file names with SHA-256 hashes"),
}
"""Field -> whether a value read from a file has its shape, and that shape in words."""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Name -> SHA-256 of files of one folder."""
    return {path.name: hash_file(path) for path in paths}


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
