"""Tensors of foreign checkpoints, one at a time: found, checked, read, written.

A folder's safetensors files are read as one source; a pickle is never opened. A written file gets
its header first and then its tensors in any order, so memory holds one tensor, not a model. What
the names mean is not known here.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

from depthdial.config.text_files import is_plain_name, read_json_object
from depthdial.model.tensor_header import DTYPE_NAMES, TensorEntry, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ALIGNMENT = 8
"""The data begins at a multiple of this, as the format asks."""
SCAN_ELEMENTS = 1 << 24
"""Values looked at together when a tensor is searched for NaN."""


class TensorFiles:
    """All tensors of a checkpoint folder by name, whichever file they are in.

    Links are followed (a hub cache consists of them); what a link leads to must be a regular file.
    The headers are read and checked at once, the tensors when they are asked for.
    """

    def __init__(self, folder: Path, *, only: str | None = None) -> None:
        """Open a checkpoint's headers.

        Args: only: name of the one file to read; None for what index and names say.
        Raises: FileNotFoundError, ValueError naming the file that is missing or damaged.
        """
        self.folder = folder
        self.file_names, stated = _files_of(folder) if only is None else ([only], None)
        self.entries: dict[str, TensorEntry] = {}
        self.file_of: dict[str, str] = {}
        for file_name in self.file_names:
            for name, entry in read_header(folder / file_name).items():
                if name in self.entries:
                    raise ValueError(
                        f"tensor '{name}' is both in {self.file_of[name]} and in {file_name} of "
                        f"{folder}; a tensor must be in one file. Use another checkpoint."
                    )
                self.entries[name], self.file_of[name] = entry, file_name
        self.has_index = stated is not None
        self.unheld: dict[str, str] = {}
        """Tensor -> file, of those that the index names and the file does not hold: what they mean
        says whether they may be absent."""
        if stated is not None:
            self.unheld = {n: f for n, f in stated.items() if n not in self.file_of}
            _check_index(folder, stated, self.file_of)

    def get(self, name: str) -> Tensor:
        """One tensor, read now into memory of its own.

        Raises: ValueError for NaN or infinite weights, or a file that changed while it was read.
        """
        entry = self.entries[name]
        path = self.folder / self.file_of[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.num_bytes:
            with path.open("rb", buffering=0) as file:
                file.seek(entry.start)
                _fill(file, tensor, path)
        check_numbers(name, tensor, path)
        return tensor

    def check_all(self) -> None:
        """Read every tensor once. Raises: as `get`."""
        for name in self.entries:
            self.get(name)

    def shape_only(self, name: str) -> Tensor:
        """Shape and dtype of one tensor, without its data."""
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    @property
    def num_bytes(self) -> int:
        """Data of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def num_values(self) -> int:
        """Numbers in all tensors."""
        return sum(entry.num_bytes // entry.dtype.itemsize for entry in self.entries.values())


def check_numbers(name: str, tensor: Tensor, where: Path) -> None:
    """Refuse NaN and infinity. Raises: ValueError naming the tensor and the first bad place."""
    if not tensor.is_floating_point():
        return
    flat = tensor.flatten()
    for start in range(0, flat.numel(), SCAN_ELEMENTS):
        bad = ~torch.isfinite(flat[start : start + SCAN_ELEMENTS])
        if bool(bad.any()):
            place = start + int(bad.nonzero()[0])
            raise ValueError(
                f"{where}: tensor '{name}' has {float(flat[place])} at place {place:,} of "
                f"{flat.numel():,}; weights must be finite. Use another checkpoint."
            )


@dataclass(frozen=True)
class TensorSpec:
    """What a file's header says of one tensor before there are data."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor, which may be on the meta device."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorWriter:
    """Writes a safetensors file tensor by tensor, in any order, each exactly once.

        with TensorWriter(path, specs) as writer:
            writer.write(name, tensor)

    Leaving without an error checks that nothing is missing and puts the data on the disk.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.path = path
        self._specs = dict(specs)
        self._places: dict[str, int] = {}
        self._missing = set(self._specs)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # Wide numbers first, so that tensors are aligned; byte for byte what the library writes.
        order = list(DTYPE_NAMES)
        for name, spec in sorted(
            self._specs.items(), key=lambda item: (order.index(item[1].dtype), item[0])
        ):
            end = offset + spec.num_bytes
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            self._places[name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % ALIGNMENT)
        self._data_start = ALIGNMENT + len(text)
        self._end = self._data_start + offset
        self._opening = struct.pack("<Q", len(text)) + text
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = self.path.open("wb")
        self._file.write(self._opening)
        self._file.truncate(self._end)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor of the header."""
        assert self._file is not None, "a TensorWriter writes inside its `with` block"
        assert name in self._missing, f"'{name}' is no tensor of this file, or was written before"
        given = TensorSpec.of(tensor)
        assert given == self._specs[name], f"'{name}': {given} instead of {self._specs[name]}"
        self._missing.remove(name)
        self._file.seek(self._data_start + self._places[name])
        if tensor.numel():
            self._file.write(_bytes_of(tensor))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._file is not None
        with self._file as file:
            if error is not None:
                return
            assert not self._missing, f"{self.path} lacks {sorted(self._missing)[:3]}"
            file.flush()
            os.fsync(file.fileno())


def write_index(folder: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of a checkpoint in several files."""
    values = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(file_of.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _files_of(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Safetensors files of a checkpoint, and where its index says that the tensors are."""
    if (folder / INDEX_FILE).is_file():
        stated = _read_index(folder / INDEX_FILE)
        names = sorted(set(stated.values()))
        if SINGLE_FILE not in names and (folder / SINGLE_FILE).is_file():
            raise ValueError(
                f"{folder} has both {SINGLE_FILE} and {INDEX_FILE} with {len(names)} other files, "
                "so it is open which of them are the model. Remove one of the two."
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {len(missing)} of the {len(names)} files that {INDEX_FILE} names: "
                f"{', '.join(missing[:5])}. Fetch the whole checkpoint."
            )
        return names, stated
    found = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    if SINGLE_FILE in found:
        return [SINGLE_FILE], None
    if len(found) == 1:
        return found, None
    if found:
        raise ValueError(
            f"{folder} has {len(found)} safetensors files ({', '.join(found[:5])}) and neither "
            f"{SINGLE_FILE} nor {INDEX_FILE}, so it is open which of them are the model. Leave "
            "one, or add the index."
        )
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has its weights as pickle files only ({', '.join(pickles[:5])}). A pickle "
            "can run any program when it is opened, so none is. Get the safetensors version of "
            "this checkpoint, or convert it where you trust it."
        )
    raise FileNotFoundError(f"{folder} has no safetensors file. Give the folder of a checkpoint.")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises: ValueError for a name that leads out of the folder."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map from tensors to files; it is damaged.")
    for name, file_name in weight_map.items():
        is_plain = isinstance(file_name, str) and is_plain_name(file_name)
        if not is_plain or not file_name.endswith(".safetensors"):
            raise ValueError(
                f"{path} says that tensor '{name}' is in {file_name!r}; allowed is the plain name "
                "of a .safetensors file in the same folder. Use another checkpoint."
            )
    return weight_map


def _check_index(folder: Path, stated: dict[str, str], file_of: dict[str, str]) -> None:
    """Every tensor of a file is where the index says. Raises: ValueError."""
    wrong = sorted(name for name in file_of if stated.get(name) != file_of[name])
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{folder}: {len(wrong)} tensors are not where {INDEX_FILE} says; '{name}' should be "
            f"in {stated.get(name, 'no file')} and is in {file_of[name]}. Index and "
            "files must come from the same checkpoint."
        )


def _fill(file: BinaryIO, tensor: Tensor, path: Path) -> None:
    """Read a tensor's bytes; a read may return less than asked (2 GiB at most on Linux)."""
    view = memoryview(_bytes_of(tensor)).cast("B")
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            raise ValueError(f"{path} became shorter while it was read. Copy it again.")
        filled += count


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor, shared if it is contiguous."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy())


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    """Data of several tensors."""
    return sum(spec.num_bytes for spec in specs)
