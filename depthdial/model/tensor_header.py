"""The header of a safetensors file, checked before anything is mapped or allocated.

A file from elsewhere may lie about sizes, shapes and places; here every statement is compared with
the file itself. Reading tensors is in `checkpoint.py` and `formats/tensors/files.py`.
Format: 8 bytes with the header's length (little endian), a JSON object
{name: {dtype, shape, data_offsets}}, then the data without gaps.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from depthdial.config.text import load_json

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows."""
MAX_VALUES = 2**60
"""Far beyond what any memory holds; torch counts bytes in 63 bits."""
MAX_DIMENSIONS = 64
"""Most dimensions that torch computes with."""
METADATA_KEY = "__metadata__"
INDEX_SUFFIX = ".index.json"
"""After the name of a file that is stored in several: the list of those."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

TORCH_DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Number formats that weights and buffers come in, in the order in which the format's own writer
puts tensors; others (8-bit floats) are refused by name."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Fields:
        dtype: of torch; shape: as stored.
        start, end: its bytes in the file, counted from the file's beginning.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, formats and places of all tensors, in the order of the header.

    Raises: FileNotFoundError saying what stands in its place; ValueError if the file is cut short
        or any statement of the header is false.
    """
    if not path.is_file():
        raise FileNotFoundError(_what_is_there(path))
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        opening = file.read(LENGTH_BYTES)
        length = struct.unpack("<Q", opening)[0] if len(opening) == LENGTH_BYTES else 0
        data_start = LENGTH_BYTES + length
        if not 2 <= length <= MAX_HEADER_BYTES or data_start > file_bytes:
            raise _damaged(
                path,
                f"its header claims {length:,} bytes, the file has {file_bytes:,} and the format "
                f"allows {MAX_HEADER_BYTES:,}",
            )
        text = file.read(length)
    if len(text) != length:
        raise _damaged(path, f"its header ends after {len(text):,} of {length:,} bytes")
    values = _header_values(path, text)
    entries = {
        name: _entry(path, name, value, data_start=data_start)
        for name, value in values.items()
        if name != METADATA_KEY
    }
    _check_places(path, entries, data_start=data_start, file_bytes=file_bytes)
    return entries


def _what_is_there(path: Path) -> str:
    """In what other form a folder holds the tensors of a file that it lacks."""
    folder, index = path.parent, path.with_name(path.name + INDEX_SUFFIX)
    if index.is_file():
        return (
            f"{folder} has its weights in several files, which {index.name} lists; a model folder "
            f"has one, {path.name}. transformers joins them, once depthdial.hf is imported: "
            f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained(another folder)."
        )
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        return (
            f"there is no {path.name} in {folder}, and {', '.join(pickles[:5])} cannot replace it: "
            "pickle files can run any program when they are opened, so they are never opened. Get "
            "the safetensors version of this model."
        )
    return f"there is no file {path.name} in {folder}."


def _header_values(path: Path, text: bytes) -> dict[str, Any]:
    try:
        values = load_json(text.decode("utf-8"))
    # json.JSONDecodeError and UnicodeDecodeError are ValueErrors; deep nesting ends the stack.
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON object of tensors: {error}") from None
    if not isinstance(values, dict):
        raise _damaged(path, f"its header is a {type(values).__name__}, not an object of tensors")
    metadata = values.get(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise _damaged(path, f"{METADATA_KEY} must map names to texts")
    return values


def _entry(path: Path, name: str, value: Any, *, data_start: int) -> TensorEntry:
    """One tensor's statements, checked against each other."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"tensor '{name}' must state dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise ValueError(
            f"{path}: tensor '{name}' has the number format {dtype!r}, which is not read here; "
            f"known: {', '.join(TORCH_DTYPES)}. Use the checkpoint in one of these formats."
        )
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(x) is int and x >= 0 for x in numbers):
            raise _damaged(path, f"tensor '{name}' has {what} {numbers!r}, not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise _damaged(
            path, f"tensor '{name}' has {len(shape):,} dimensions, more than {MAX_DIMENSIONS}"
        )
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"tensor '{name}' has data_offsets {offsets}, not a beginning and end")
    # Python's integers do not overflow: a product beyond 64 bits is compared as it is.
    wanted = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if wanted != offsets[1] - offsets[0]:
        raise _damaged(
            path,
            f"tensor '{name}' of shape {shape} in {dtype} needs {wanted:,} bytes, its place has "
            f"{offsets[1] - offsets[0]:,}",
        )
    # An empty tensor has no bytes that contradict its other sizes, yet torch multiplies them.
    if math.prod(size for size in shape if size) >= MAX_VALUES:
        raise _damaged(path, f"tensor '{name}' has a shape that no memory holds: {shape}")
    start, end = (data_start + offset for offset in offsets)
    return TensorEntry(TORCH_DTYPES[dtype], tuple(shape), start, end)


def _check_places(
    path: Path, entries: dict[str, TensorEntry], *, data_start: int, file_bytes: int
) -> None:
    """The tensors fill the file, each byte once."""
    place, previous = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < place:
            raise _damaged(path, f"the tensors '{previous}' and '{name}' overlap")
        if entry.start > place:
            raise _damaged(path, f"{entry.start - place:,} bytes before tensor '{name}' are unused")
        place, previous = entry.end, name
    if place > file_bytes:
        raise _damaged(
            path, f"tensor '{previous}' ends at byte {place:,}, the file at {file_bytes:,}"
        )
    if place < file_bytes:
        raise _damaged(path, f"{file_bytes - place:,} bytes follow its last tensor")


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is damaged or cut short: {reason}. Use another checkpoint, or copy it again "
        "(nothing of it was loaded)."
    )
