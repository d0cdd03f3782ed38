"""Prepared token folders: how they are written, and how one split is opened.

A folder holds tokenizer.json, meta.json (written last) and per split `S`:
`S.bin` (all documents end to end, each closed by the end-of-text token),
`S.index.npy` ([documents, 2] int64: tokens, UTF-8 bytes) and `S.names.json`. meta.json keeps the
SHA-256 of each file: index and names are checked whenever a split is opened, the token file, which
may be large, where its contents are trained on.
Reading text is in `text.py`, cutting rows for training in `packing.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from depthdial.config.text import parse_json
from depthdial.disk import hash_file, write_synced

FORMAT = "depthdial-shards"
FORMAT_VERSION = 3
SPLITS = ("train", "valid")
META_FILE = "meta.json"


class TokenDocument(NamedTuple):
    """One tokenised document."""

    name: str
    tokens_T: np.ndarray
    """Token ids, the last one end-of-text; a read-only view of the file."""
    num_bytes: int
    """UTF-8 bytes of the text, for bits per byte."""
    first_bytes: int = 0
    """Those of the first token, which is not scored where no token stands before it; 0 in files of
    token ids, which do not know it."""


@dataclass(frozen=True)
class TokenShards:
    """One split of a prepared folder, memory-mapped."""

    directory: Path
    split: str
    tokens: np.ndarray
    """All token ids of the split, read-only."""
    lengths: np.ndarray
    """Tokens of each document, with its end-of-text token."""
    num_bytes: np.ndarray
    """UTF-8 bytes of each document's text."""
    names: list[str]
    """Document names."""
    vocab_size: int
    eos_id: int
    meta: dict[str, Any]
    """Content of meta.json."""

    @classmethod
    def open(cls, directory: str | Path, split: str) -> TokenShards:
        """Map one split after checking every file against meta.json.

        Args:
            directory: folder written by `prepare`.
            split: "train" or "valid".

        Raises: FileNotFoundError if the folder or a file is missing; ValueError if
            the folder is incomplete, truncated, of another version, or has no
            document in this split.
        """
        directory = Path(directory)
        if split not in SPLITS:
            raise ValueError(f"split '{split}' is unknown; choose one of {', '.join(SPLITS)}.")
        meta = read_meta(directory)
        counts = meta["splits"][split]
        if counts["documents"] == 0:
            raise ValueError(
                f"{directory} has no document in split '{split}'. Prepare it again with more "
                "documents or another valid_frac."
            )
        dtype = np.dtype(meta["dtype"])
        bin_path = directory / f"{split}.bin"
        _check_size(bin_path, counts["tokens"] * dtype.itemsize)
        for suffix in ("index.npy", "names.json"):
            path = _existing(directory / f"{split}.{suffix}")
            if hash_file(path) != counts["sha256"][suffix]:
                raise ValueError(_not_the_file(path))
        index = np.load(directory / f"{split}.index.npy", allow_pickle=False)
        names = _read_json(directory / f"{split}.names.json")
        return cls(
            directory=directory,
            split=split,
            tokens=np.memmap(bin_path, dtype=dtype, mode="r"),
            lengths=index[:, 0],
            num_bytes=index[:, 1],
            names=names,
            vocab_size=meta["vocab_size"],
            eos_id=meta["eos_id"],
            meta=meta,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the split, end-of-text tokens included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return len(self.names)

    @cached_property
    def tokens_sha256(self) -> str:
        """SHA-256 of the token file, read from its first to its last byte."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens)).hexdigest()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that rows are cut from, as it is now: token ids and lengths."""
        lengths = hashlib.sha256(np.ascontiguousarray(self.lengths)).hexdigest()
        parts = f"{self.tokens.dtype.str} {self.tokens_sha256} {lengths}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def check_tokens(self) -> None:
        """Raise ValueError if the token file is not the one that was prepared. Reads all of it."""
        if self.tokens_sha256 != self.meta["splits"][self.split]["sha256"]["bin"]:
            raise ValueError(_not_the_file(self.directory / f"{self.split}.bin"))

    def check_ids(self, tokens: np.ndarray) -> None:
        """Raise ValueError if ids read from the file lie outside the vocabulary."""
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise ValueError(
                f"{self.directory / f'{self.split}.bin'} has token id {int(tokens.max())}, but the "
                f"vocabulary has {self.vocab_size}: the file is damaged. Prepare the folder again."
            )

    def documents(self) -> Iterator[TokenDocument]:
        """Documents in file order. Raises ValueError at an id outside the vocabulary."""
        start = 0
        for name, length, num_bytes in zip(self.names, self.lengths, self.num_bytes, strict=True):
            tokens_T = self.tokens[start : start + length]
            self.check_ids(tokens_T)
            yield TokenDocument(name, tokens_T, int(num_bytes))
            start += int(length)


class SplitWriter:
    """Appends documents of one split to its files."""

    def __init__(self, directory: Path, split: str, *, vocab_size: int, eos_id: int) -> None:
        self._directory, self._split = directory, split
        self._vocab_size, self._eos_id = vocab_size, eos_id
        self._dtype = token_dtype(vocab_size)
        self._file = (directory / f"{split}.bin").open("wb")
        self._digest = hashlib.sha256()
        self._index: list[tuple[int, int]] = []
        self._names: list[str] = []

    def add(self, name: str, parts: Iterable[Sequence[int]], *, num_bytes: int) -> int:
        """Write a document, whose ids come in parts, and its end-of-text token; nothing for one
        without ids.

        Returns: its tokens, the end-of-text token not among them.
        """
        count = sum(map(self._write, parts))
        if count:
            self._write([self._eos_id])
            self._index.append((count + 1, num_bytes))
            self._names.append(name)
        return count

    def _write(self, ids: Sequence[int]) -> int:
        tokens_T = np.array(ids, dtype=np.int64)
        assert tokens_T.max(initial=0) < self._vocab_size, "token id outside the vocabulary"
        content = tokens_T.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        return len(tokens_T)

    def finish(self) -> dict[str, Any]:
        """Write the index and names, flush all to disk; returns the facts for meta.json."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        index = np.array(self._index, dtype=np.int64).reshape(-1, 2)
        with (self._directory / f"{self._split}.index.npy").open("wb") as file:
            np.save(file, index)
            file.flush()
            os.fsync(file.fileno())
        names = json.dumps(self._names)
        write_synced(self._directory / f"{self._split}.names.json", names)
        tokens, num_bytes = (int(total) for total in index.sum(axis=0))
        digests = {"bin": self._digest.hexdigest()} | {
            suffix: hash_file(self._directory / f"{self._split}.{suffix}")
            for suffix in ("index.npy", "names.json")
        }
        return {"documents": len(index), "tokens": tokens, "bytes": num_bytes, "sha256": digests}

    def close(self) -> None:
        """Close the token file; harmless when closed already."""
        self._file.close()


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest unsigned type of the two used that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def read_meta(directory: str | Path) -> dict[str, Any]:
    """Content of meta.json.

    Raises: FileNotFoundError if there is no folder; ValueError if it was not
    written to its end or is not ours.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no prepared folder at {directory}; write one with `prepare`")
    path = directory / META_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} has no {META_FILE}: it is not a prepared folder, or writing it was "
            "interrupted. Prepare it again."
        )
    meta = _read_json(path)
    found = (meta.get("format"), meta.get("format_version")) if isinstance(meta, dict) else None
    if found != (FORMAT, FORMAT_VERSION):
        raise ValueError(
            f"{path} describes {found}, this version reads {(FORMAT, FORMAT_VERSION)}. "
            "Prepare the folder again."
        )
    return meta


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. Prepare the folder again.")
    return path


def _read_json(path: Path) -> Any:
    """Raises: FileNotFoundError; ValueError for a file that is no JSON."""
    try:
        return parse_json(_existing(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). Prepare the folder again.") from None


def _check_size(path: Path, expected_bytes: int) -> None:
    size = _existing(path).stat().st_size
    if size != expected_bytes:
        state = "truncated" if size < expected_bytes else "too long"
        raise ValueError(
            f"{path} is {state}: it has {size} bytes, {META_FILE} promises {expected_bytes}. "
            "Prepare the folder again."
        )


def _not_the_file(path: Path) -> str:
    return (
        f"{path} is damaged or was replaced: its SHA-256 is not the one in {META_FILE}. Prepare "
        "the folder again."
    )
