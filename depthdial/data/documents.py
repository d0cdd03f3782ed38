"""Documents from files: txt, jsonl, parquet and folders of them.

Here live finding and reading. Splitting and tokenising are in `text.py`, named
corpora in `corpora.py`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from depthdial.config.text import parse_json

ROW_SUFFIXES = (".jsonl", ".parquet")
"""Files of rows with named fields."""
SUFFIXES = (".txt", *ROW_SUFFIXES)
PART_BYTES = 2**20
"""Bytes read in one go, of a text file or of the rows of a parquet file."""
PARQUET_ROWS = 1024
"""Rows read in one go where they are short."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """A piece of text that is split, packed and scored as one."""

    name: str
    """Unique in its collection; decides the split."""
    text: str

    def parts(self) -> Iterator[str]:
        """The text from its first to its last character, some at a time."""
        for start in range(0, len(self.text), PART_BYTES):
            yield self.text[start : start + PART_BYTES]

    def piece(self, name: str, start: int, end: int | None) -> Document:
        """Characters [start, end) as a document of its own."""
        return Document(name, self.text[start:end])


@dataclass(frozen=True)
class FileDocument:
    """Characters [start, end) of a large text file, which are read anew each time they are used."""

    name: str
    path: Path
    start: int = 0
    end: int | None = None

    @property
    def text(self) -> str:
        """All of it, in memory."""
        return "".join(self.parts())

    def parts(self) -> Iterator[str]:
        """The text from its first to its last character, some at a time.

        Raises: ValueError naming the file for text that is not UTF-8; OSError naming the file.
        """
        position = 0
        for part in _decoded_parts(self.path):
            start, end = self.start - position, None if self.end is None else self.end - position
            position += len(part)
            wanted = part[max(0, start) : end if end is None else max(0, end)]
            if wanted:
                yield wanted
            if self.end is not None and position >= self.end:
                return

    def piece(self, name: str, start: int, end: int | None) -> FileDocument:
        """Characters [start, end) of this document as one of its own."""
        ends = [
            place
            for place in (self.end, None if end is None else self.start + end)
            if place is not None
        ]
        last = min(ends, default=None)
        return FileDocument(name, self.path, self.start + start, last)


AnyDocument = Document | FileDocument
ReadDocuments = Callable[[], Iterable[AnyDocument]]
"""Starts a new pass over the same documents in the same order."""


class InputFiles(NamedTuple):
    """Files found below the given paths."""

    supported: list[tuple[str, Path]]
    """(document name, path), sorted within each given path."""
    unsupported: list[str]
    """Names of files that were left out: another suffix, or hidden."""


def find_files(paths: Sequence[str | Path]) -> InputFiles:
    """All txt, jsonl and parquet files at or below `paths`, each once.

    A file in a folder is named by the folder's name and its path inside, so names
    (and with them the split) do not depend on where the folder lies.
    Raises: FileNotFoundError, or ValueError for a file of another type, two equal
        names, or no file at all.
    """
    supported: dict[str, Path] = {}
    unsupported: list[str] = []
    seen: set[Path] = set()
    for path in (Path(path) for path in paths):
        if not path.exists():
            raise FileNotFoundError(f"no file or folder at {path}")
        if path.is_file() and path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path} is not one of {', '.join(SUFFIXES)}. Convert it first.")
        files = _files_below(path)
        if len(paths) > 1 and not any(_is_text(name, file) for name, file in files):
            raise ValueError(
                f"{path} holds no {', '.join(SUFFIXES)} file, so nothing of it would be read. "
                "Leave it out."
            )
        for name, file in files:
            # A link with a name of its own is a file of its own.
            place = file.parent.resolve() / file.name
            if place in seen:
                continue
            seen.add(place)
            if not _is_text(name, file):
                unsupported.append(name)
            elif name in supported:
                raise ValueError(
                    f"{supported[name]} and {file} are both named '{name}'. Rename one of the two, "
                    "or give a folder that holds both."
                )
            else:
                supported[name] = file
    if not supported:
        raise ValueError(
            f"no {', '.join(SUFFIXES)} file in {', '.join(map(str, paths)) or 'an empty list'} "
            f"({len(unsupported)} files of other types)."
        )
    return InputFiles(list(supported.items()), unsupported)


def read_documents(
    files: Iterable[tuple[str, Path]], *, text_field: str = "text"
) -> Iterator[AnyDocument]:
    """Documents of the given (name, path) files, in order; rows are named `file:number`.

    A text file of more than PART_BYTES is not read here, but in parts where it is used.

    Raises: ValueError naming file and line or row for text that is not UTF-8, not JSON, lacks
        `text_field`, or cannot be read; OSError naming the file.
    """
    for name, path in files:
        suffix = path.suffix.lower()
        with _naming(path):
            if suffix == ".txt" and path.stat().st_size > PART_BYTES:
                yield FileDocument(name, path)
            elif suffix == ".txt":
                yield Document(name, _decode(path.read_bytes(), str(path)))
            elif suffix == ".jsonl":
                yield from _read_jsonl(name, path, text_field)
            else:
                yield from _read_parquet(name, path, text_field)


def nothing_in(num_documents: int) -> str:
    """In words, that none of the documents read has text."""
    if num_documents == 0:
        return "the files hold no document"
    if num_documents == 1:
        return "the only document is empty"
    return f"all {num_documents:,} documents are empty"


def is_empty(document: AnyDocument) -> bool:
    """No text, or white space only."""
    return all(not part or part.isspace() for part in document.parts())


def _is_text(name: str, file: Path) -> bool:
    """Whether a file can be read, and is not hidden below the folder that was given."""
    is_hidden = any(part.startswith(".") for part in Path(name).parts[1:])
    return file.suffix.lower() in SUFFIXES and not is_hidden


def _files_below(path: Path) -> list[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    root = path.resolve()
    found = [file for file in path.rglob("*") if file.is_file()]
    named = [(f"{root.name}/{file.relative_to(path).as_posix()}", file) for file in found]
    return sorted(named)


def _decoded_parts(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in parts, without a byte order mark. Raises as `read_documents`."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    with _naming(path), path.open("rb") as file:
        while True:
            raw = file.read(PART_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                place = read - pending + error.start
                raise ValueError(_not_utf8(str(path), error, place)) from None
            if not raw:
                return
            read += len(raw)


def _read_jsonl(name: str, path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _text_of_line(line, f"{path} line {number}", text_field)
            # A line may be a book; its bytes are not kept beside its text.
            del line
            if text is not None:
                yield Document(f"{name}:{number}", text)


def _text_of_line(line: bytes, where: str, text_field: str) -> str | None:
    """The text of one line of jsonl; None for a line of white space."""
    text = _decode(line, where)
    if not text or text.isspace():
        return None
    try:
        row = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(row).__name__}.")
    if text_field not in row:
        raise ValueError(_no_field(where, text_field, list(row)))
    return _text_of(row[text_field], where, text_field)


def _read_parquet(name: str, path: Path, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"reading {path} needs pyarrow: pip install 'depthdial[train]', or give jsonl."
        ) from None
    unreadable = (pyarrow.ArrowException, OSError)
    try:
        # Damage that still decompresses shows in the checksums alone, where the file has them.
        # With a buffer pages are read one by one, not a column of the group at once.
        file = pyarrow.parquet.ParquetFile(
            path, page_checksum_verification=True, buffer_size=PART_BYTES
        )
    except unreadable as error:
        if _is_of_the_disk(error):
            raise
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    with file:
        if text_field not in file.schema_arrow.names:
            raise ValueError(_no_field(str(path), text_field, file.schema_arrow.names))
        number = 0
        for group in range(file.num_row_groups):
            first = number
            try:
                for batch in _batches(file, group, text_field, _rows_at_once(file, group)):
                    for value in _values(batch.column(0), path, number):
                        number += 1
                        text = _text_of(value, f"{path} row {number}", text_field)
                        yield Document(f"{name}:{number}", text)
            except unreadable as error:
                if _is_of_the_disk(error):
                    raise
                row = first + 1 + _readable_rows(file, group, text_field, unreadable)
                raise ValueError(
                    f"{path} row {row} cannot be read: {error}. Copy the file again, or leave it "
                    "out."
                ) from None


def _rows_at_once(file: Any, group: int) -> int:
    """As many rows as make about PART_BYTES: a row may be a book."""
    facts = file.metadata.row_group(group)
    return max(1, min(PARQUET_ROWS, PART_BYTES * facts.num_rows // max(1, facts.total_byte_size)))


def _batches(file: Any, group: int, text_field: str, num_rows: int) -> Iterator[Any]:
    return file.iter_batches(row_groups=[group], columns=[text_field], batch_size=num_rows)


def _values(column: Any, path: Path, rows_before: int) -> list[Any]:
    """Python values of a column. Raises: ValueError naming the row that is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        pass
    for idx, value in enumerate(column):
        try:
            value.as_py()
        except UnicodeDecodeError as error:
            where = f"{path} row {rows_before + idx + 1}"
            raise ValueError(_not_utf8(where, error)) from None
    raise AssertionError("a column is read as its values are")


def _readable_rows(
    file: Any, group: int, text_field: str, unreadable: tuple[type[Exception], ...]
) -> int:
    """Rows of a damaged group before the first that cannot be read: those of whole pages."""
    count = 0
    try:
        for batch in _batches(file, group, text_field, 1):
            count += len(batch)
    except unreadable:
        pass
    return count


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the system refused, not the content; pyarrow raises OSError for both."""
    return isinstance(error, OSError) and error.errno is not None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A disk that fails while a file is read, not opened, does not say which file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _text_of(value: object, where: str, text_field: str) -> str:
    """The text of one row; null is an empty document, counted later."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: field '{text_field}' must be text, got {type(value).__name__}. "
            "Choose another field with `text_field`."
        )
    # JSON escapes can spell half of a surrogate pair, which no UTF-8 text contains.
    if half := _SURROGATE.search(value):
        raise ValueError(
            f"{where}: field '{text_field}' has half a surrogate pair at character "
            f"{half.start()}. Repair the text."
        )
    return value


def _no_field(where: str, text_field: str, known: Sequence[str]) -> str:
    return (
        f"{where} has no field '{text_field}'; it has {', '.join(known) or 'none'}. "
        "Choose one with `text_field`."
    )


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(where, error)) from None


def _not_utf8(where: str, error: UnicodeDecodeError, place: int | None = None) -> str:
    """Args: place: of the byte in the whole text; None where the error has the whole text."""
    byte = error.object[error.start]
    place = error.start if place is None else place
    return f"{where} is not UTF-8 text (byte {byte:#x} at {place}). Convert it."
