"""The header of a GGUF file, read within the bounds of the file.

Keys and values, then names, shapes and places of the tensors; no number that the file states is
trusted before it is compared with the bytes that are there. The keys are read by
`gguf/files.py`. Texts of the tokenizer that are no UTF-8 stay bytes: they stop the tokenizer, which
`gguf/tokens.py` reads, and not the weights.
Format: ggml's GGUF, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
TOKENIZER_PREFIX = "tokenizer."
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
NUMBER_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""Type number -> how `struct` reads it."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Fields:
        shape: outermost dimension first. kind: ggml's number of the number format.
        start: first byte, counted from the beginning of the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class GgufHeader:
    """Keys and tensors of a file; its size in bytes."""

    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    file_bytes: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises: ValueError if the file is damaged or of another kind."""
    file_bytes = path.stat().st_size
    if not file_bytes:
        raise ValueError(f"{path} is empty. Copy it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        if cursor.bytes(4) != MAGIC:
            raise ValueError(f"{path} does not begin with 'GGUF'; it is no GGUF file.")
        version = cursor.number("<I")
        if version not in VERSIONS:
            raise ValueError(
                f"{path} is of GGUF version {version}; versions 2 and 3 (little endian) are read."
            )
        num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
        values = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in values:
                raise ValueError(f"{path} states the key '{key}' twice; it is damaged.")
            strict = not key.startswith(TOKENIZER_PREFIX)
            values[key] = cursor.value(cursor.number("<I"), strict=strict)
        stated = [_tensor(cursor) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise ValueError(f"{path} has general.alignment={alignment!r}; it is damaged.")
        start = -(-cursor.place // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, start + at) for name, shape, kind, at in stated}
    if len(tensors) < num_tensors:
        raise ValueError(f"{path} has two tensors of one name; it is damaged.")
    return GgufHeader(values, tensors, file_bytes)


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, kind and offset. ggml writes the innermost dimension first."""
    name = cursor.string()
    num_dimensions = cursor.number("<I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(
            f"{cursor.path}: tensor '{name}' has {num_dimensions} dimensions; 1 to "
            f"{MAX_DIMENSIONS} are possible. The file is damaged."
        )
    shape = tuple(cursor.number("<Q") for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.number("<I"), cursor.number("<Q")


class _Cursor:
    """A place in the bytes; it never leaves them."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self.path = path
        self.place = 0

    def bytes(self, count: int) -> bytes:
        """The next bytes. Raises: ValueError if there are not so many."""
        left = len(self._data) - self.place
        if count > left:
            raise ValueError(
                f"{self.path} is damaged or cut short: {count:,} bytes are announced at byte "
                f"{self.place:,}, {left:,} are left. Copy it again."
            )
        start, self.place = self.place, self.place + count
        return self._data[start : self.place]

    def number(self, form: str) -> Any:
        """The next number."""
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def string(self) -> str:
        """The next text. Raises: ValueError for bytes that are no UTF-8."""
        text = self._text(strict=True)
        assert isinstance(text, str), "bytes come back only where they are asked for"
        return text

    def _text(self, *, strict: bool) -> str | bytes:
        raw = self.bytes(self.number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if not strict:
                return raw
            raise ValueError(
                f"{self.path} is damaged: no UTF-8 text before byte {self.place:,}. Copy it again."
            ) from None

    def value(self, kind: int, *, strict: bool = True) -> Any:
        """The next value of one type.

        Args: strict: refuse texts that are no UTF-8; False gives their bytes.
        """
        if kind == STRING:
            return self._text(strict=strict)
        if kind == ARRAY:
            return self._array(self.number("<I"), self.number("<Q"), strict=strict)
        if kind not in NUMBER_FORMATS:
            raise ValueError(f"{self.path}: type {kind} before byte {self.place:,} is unknown.")
        return self.number(NUMBER_FORMATS[kind])

    def _array(self, kind: int, count: int, *, strict: bool) -> list[Any]:
        """An array of numbers or texts; nested arrays do not occur in models that are read."""
        if kind == STRING:
            # Each needs at least its length: an absurd count ends here, not in a long loop.
            self._require(8 * count)
            return [self._text(strict=strict) for _ in range(count)]
        if kind not in NUMBER_FORMATS:
            raise ValueError(f"{self.path}: arrays of type {kind} are not read.")
        form = NUMBER_FORMATS[kind]
        raw = self.bytes(count * struct.calcsize(form))
        return [item[0] for item in struct.iter_unpack(form, raw)]

    def _require(self, count: int) -> None:
        start = self.place
        self.bytes(count)
        self.place = start
