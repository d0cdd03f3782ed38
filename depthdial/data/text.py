"""From documents to a prepared token folder: the train/valid split and tokenising.

Reading files is in `documents.py`, the folder's format in `shards.py`, cutting it into
training rows in `packing.py`, named corpora in `corpora.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from depthdial.data.documents import (
    ROW_SUFFIXES,
    SUFFIXES,
    AnyDocument,
    FileDocument,
    ReadDocuments,
    find_files,
    is_empty,
    nothing_in,
    read_documents,
)
from depthdial.data.long_text import WINDOW_CHARS
from depthdial.data.shards import (
    FORMAT,
    FORMAT_VERSION,
    META_FILE,
    SPLITS,
    SplitWriter,
    token_dtype,
)
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.disk import new_folder, write_synced

DEFAULT_VOCAB = 4096
BATCH_CHARS = 2_000_000
"""Characters encoded in one call: large enough to use all threads, small in memory."""

ChooseValid = Callable[[Sequence[str]], set[str]]
"""From the names of all documents with text to those of the validation split."""


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` wrote and what it left out."""

    directory: Path
    vocab_size: int
    documents: dict[str, int]
    """Documents per split."""
    tokens: dict[str, int]
    """Tokens per split, one end-of-text token per document included."""
    num_bytes: dict[str, int]
    """UTF-8 bytes of text per split."""
    empty_documents: int
    """Documents without text (or only white space), skipped."""
    one_token_documents: int
    """Documents of a single token; kept, as their end of text is still a target."""
    unsupported_files: tuple[str, ...]
    """Files in the given folders that are not txt, jsonl or parquet, skipped."""

    def __str__(self) -> str:
        lines = [f"{self.directory}: vocabulary of {self.vocab_size:,} tokens"]
        for split in SPLITS:
            lines.append(
                f"  {split}: {self.documents[split]:,} documents, {self.tokens[split]:,} tokens, "
                f"{self.num_bytes[split]:,} bytes"
            )
        if self.documents["valid"] == 0:
            lines.append("  no validation document: training on this folder cannot validate")
        if self.empty_documents:
            lines.append(f"  skipped {self.empty_documents:,} empty documents")
        if self.one_token_documents:
            lines.append(f"  {self.one_token_documents:,} documents have a single token")
        if self.unsupported_files:
            shown = ", ".join(self.unsupported_files[:3])
            lines.append(
                f"  skipped {len(self.unsupported_files):,} files that are not "
                f"{', '.join(SUFFIXES)}: {shown}" + (", ..." if self.unsupported_files[3:] else "")
            )
        return "\n".join(lines)


def prepare(
    paths: Sequence[str | Path],
    dst: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    text_field: str = "text",
    valid_frac: float = 0.05,
    overwrite: bool = False,
) -> PrepareReport:
    """Turn files or folders of text into a prepared token folder.

    A single document is cut near its end, so that there is something to validate on.

    Args:
        paths: txt files (one document each), jsonl and parquet files (one document per
            row), or folders, read recursively in sorted order.
        dst: folder to write; it appears only when complete.
        vocab_size: tokens of a byte-level BPE trained on the training split; without it
            and without `tokenizer`, up to 4096, fewer if the text supports fewer.
        tokenizer: use this one instead of training.
        text_field: key (jsonl) or column (parquet) of the text.
        valid_frac: expected fraction of documents in the validation split, in [0, 1),
            chosen by a hash of the name; at least one document when there are two.
        overwrite: replace `dst` if it is a prepared folder; other files in it stay.

    Raises: FileNotFoundError or ValueError naming the file and line at fault; as `new_folder`.
    """
    if not 0.0 <= valid_frac < 1.0:
        raise ValueError(f"valid_frac={valid_frac} must be at least 0 and below 1.")
    files = find_files(paths)
    has_fields = any(path.suffix.lower() in ROW_SUFFIXES for _, path in files.supported)
    if text_field != "text" and not has_fields:
        raise ValueError(
            f"text_field={text_field} has no effect: none of the files is "
            f"{' or '.join(ROW_SUFFIXES)}, which alone have fields. Leave it out."
        )
    read: ReadDocuments = partial(read_documents, files.supported, text_field=text_field)
    choose_valid = partial(split_by_hash, valid_frac=valid_frac)
    parts = _cut_single_document(read, valid_frac)
    if parts is not None:
        read, choose_valid = parts
    return prepare_documents(
        read,
        dst,
        choose_valid=choose_valid,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        unsupported_files=tuple(files.unsupported),
        overwrite=overwrite,
        not_over=[Path(path) for path in paths],
    )


def prepare_documents(
    read: ReadDocuments,
    dst: str | Path,
    *,
    choose_valid: ChooseValid,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    origin: dict[str, Any] | None = None,
    unsupported_files: tuple[str, ...] = (),
    overwrite: bool = False,
    not_over: Sequence[Path] = (),
    wait: bool = False,
) -> PrepareReport:
    """`prepare` for any source of documents; `read` is called up to three times.

    Args:
        choose_valid: picks the validation split by name.
        origin: JSON value kept in meta.json, saying where the documents come from.
        overwrite, not_over, wait: as in `new_folder`.

    Raises: ValueError, also when no document has text; OSError if the disk refuses, which leaves
        `dst` as it was.
    """
    dst = Path(dst)
    with new_folder(
        dst, kind="prepared data", overwrite=overwrite, not_over=not_over, wait=wait
    ) as folder:
        names, empty_documents = _survey(read)
        if not names:
            raise ValueError(f"nothing to prepare: {nothing_in(empty_documents)}.")
        valid_names = choose_valid(names)
        tokenizer = _choose_tokenizer(read, valid_names, vocab_size=vocab_size, tokenizer=tokenizer)
        splits, spelled_empty, one_token = _write_splits(read, folder, valid_names, tokenizer)
        if splits["train"]["documents"] == 0:
            raise ValueError("nothing to train on: no document of the train split has a token.")
        tokenizer.save(folder)
        meta = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "tokenizer_sha256": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
            "origin": origin,
            "empty_documents": empty_documents + spelled_empty,
            "one_token_documents": one_token,
            "unsupported_files": len(unsupported_files),
            "splits": splits,
        }
        write_synced(folder / META_FILE, json.dumps(meta, indent=2) + "\n")
    return PrepareReport(
        directory=dst,
        vocab_size=tokenizer.vocab_size,
        documents={split: splits[split]["documents"] for split in SPLITS},
        tokens={split: splits[split]["tokens"] for split in SPLITS},
        num_bytes={split: splits[split]["bytes"] for split in SPLITS},
        empty_documents=empty_documents + spelled_empty,
        one_token_documents=one_token,
        unsupported_files=unsupported_files,
    )


def split_by_hash(names: Sequence[str], *, valid_frac: float) -> set[str]:
    """Validation names: those whose SHA-256, read as a fraction, is below `valid_frac`.

    A name keeps its split when other documents come or go. With valid_frac > 0 and
    two or more names, the lowest hash is always validation and the highest never.
    """
    if valid_frac == 0.0 or len(names) < 2:
        return set()
    ranked = sorted(names, key=_hash_fraction)
    chosen = {name for name in ranked if _hash_fraction(name) < valid_frac}
    return (chosen | {ranked[0]}) - {ranked[-1]}


def _survey(read: ReadDocuments) -> tuple[list[str], int]:
    """Names of the documents with text, and how many have none."""
    names: dict[str, None] = {}
    empty_documents = 0
    for document in read():
        if is_empty(document):
            empty_documents += 1
            continue
        if document.name in names:
            raise ValueError(f"two documents are named '{document.name}'; names must differ.")
        names[document.name] = None
    return list(names), empty_documents


def _choose_tokenizer(
    read: ReadDocuments,
    valid_names: set[str],
    *,
    vocab_size: int | None,
    tokenizer: Tokenizer | None,
) -> Tokenizer:
    """The given tokenizer, or one trained on the documents outside `valid_names`."""
    if tokenizer is None:
        texts = (d.parts() for d in read() if d.name not in valid_names and not is_empty(d))
        if vocab_size is None:
            return train_bpe(texts, DEFAULT_VOCAB, allow_fewer=True)
        return train_bpe(texts, vocab_size)
    if vocab_size is not None:
        raise ValueError("give vocab_size (to train a tokenizer) or tokenizer, not both.")
    if tokenizer.eos_id is None:
        raise ValueError("this tokenizer has no end-of-text token, so documents cannot be closed.")
    return tokenizer


def _write_splits(
    read: ReadDocuments, folder: Path, valid_names: set[str], tokenizer: Tokenizer
) -> tuple[dict[str, dict[str, int]], int, int]:
    """Tokenise; returns counts per split, documents without any token, and with a single one."""
    assert tokenizer.eos_id is not None
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    writers = {split: SplitWriter(folder, split, **sizes) for split in SPLITS}
    no_token = one_token = 0
    try:
        for document, parts in _encoded(read(), tokenizer):
            split = "valid" if document.name in valid_names else "train"
            num_bytes = sum(len(part.encode("utf-8")) for part in document.parts())
            num_tokens = writers[split].add(document.name, parts, num_bytes=num_bytes)
            no_token += num_tokens == 0
            one_token += num_tokens == 1
        return {split: writers[split].finish() for split in SPLITS}, no_token, one_token
    finally:
        for writer in writers.values():
            writer.close()


def _encoded(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer
) -> Iterator[tuple[AnyDocument, Iterable[Sequence[int]]]]:
    """Documents with text, each with its token ids in parts, which are made as they are read.

    Raises: ValueError naming the document that the tokenizer cannot spell.
    """
    for batch in _batches_by_size(documents):
        if _is_long(batch[0]):
            yield batch[0], _encode_long(batch[0], tokenizer)
        else:
            yield from ((d, [ids]) for d, ids in zip(batch, _encode(batch, tokenizer), strict=True))


def _is_long(document: AnyDocument) -> bool:
    """Whether a document is encoded in parts."""
    return isinstance(document, FileDocument) or len(document.text) > WINDOW_CHARS


def _encode_long(document: AnyDocument, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    try:
        yield from tokenizer.encode_parts(document.parts())
    except ValueError as error:
        raise ValueError(f"document '{document.name}': {error}") from error


def _encode(batch: list[AnyDocument], tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([document.text for document in batch])
    except ValueError:
        # Which one is not told, so they are tried again.
        for document in batch:
            for _ in _encode_long(document, tokenizer):
                pass
        raise


def _batches_by_size(documents: Iterable[AnyDocument]) -> Iterator[list[AnyDocument]]:
    """Documents with text, grouped up to about BATCH_CHARS characters; a long one alone."""
    batch: list[AnyDocument] = []
    chars = 0
    for document in documents:
        if is_empty(document):
            continue
        if _is_long(document) and batch:
            yield batch
            batch, chars = [], 0
        batch.append(document)
        chars += BATCH_CHARS if _is_long(document) else len(document.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _cut_single_document(
    read: ReadDocuments, valid_frac: float
) -> tuple[ReadDocuments, ChooseValid] | None:
    """If just one document has text: a reader of its two parts, and the rule that splits them."""
    with_text = (document for document in read() if not is_empty(document))
    only = next(with_text, None)
    if only is None or valid_frac == 0.0 or next(with_text, None) is not None:
        return None
    # The place alone is kept: a document may take much memory.
    place = _cutting_place(only, valid_frac)
    if any(map(is_empty, _cut(only, place))):
        return None

    def read_parts() -> Iterator[AnyDocument]:
        for document in read():
            yield from [document] if is_empty(document) else _cut(document, place)

    valid_names = {_cut(only, place)[1].name}
    return read_parts, lambda names: valid_names


def _cut(document: AnyDocument, place: int) -> tuple[AnyDocument, AnyDocument]:
    """The parts of a document before and after a character, to train and to validate on."""
    name = document.name
    return document.piece(f"{name}#train", 0, place), document.piece(f"{name}#valid", place, None)


def _cutting_place(document: AnyDocument, valid_frac: float) -> int:
    """The last paragraph, line or word end before where `valid_frac` of the characters are left."""
    length = sum(map(len, document.parts()))
    wanted = round(length * (1.0 - valid_frac))
    # Only near the wanted place: a lone line end far ahead would give most to validation.
    earliest = max(0, wanted - length // 20)
    found = dict.fromkeys(("\n\n", "\n", " "), 0)
    position, before = 0, ""
    for part in document.parts():
        # With the character before, a mark that two parts share is seen.
        text, start = before + part, position - len(before)
        for mark in found:
            place = text.rfind(mark, max(0, earliest - start), max(0, wanted - start))
            if place >= 0 and start + place > 0:
                found[mark] = start + place + len(mark)
        position += len(part)
        before = part[-1:]
    return next((place for place in found.values() if place), wanted)


def _hash_fraction(name: str) -> float:
    """A number in [0, 1) from the SHA-256 of the name."""
    return (
        int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:6], "big")
        / 2**48
    )
