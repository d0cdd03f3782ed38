"""What `sweep` may be given as data, turned into documents of token ids.

Texts, files, folders and prepared folders; reading files is in `data/documents.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthdial.data.documents import AnyDocument
    from depthdial.data.shards import TokenDocument
    from depthdial.data.tokenizer import Tokenizer


def token_documents(
    data: str | Path | Sequence[str] | Sequence[Path], tokenizer: Tokenizer
) -> list[TokenDocument]:
    """Documents as token ids; see `sweep` for `data`.

    Those of a model of ours are closed by the end-of-text token, those of an imported one are not:
    what its publisher trained at the end of a text is not known.

    Documents without text are skipped, with one warning that counts them.
    Raises: ValueError if no document has text.
    """
    from depthdial.data.documents import is_empty, nothing_in
    from depthdial.data.shards import META_FILE
    from depthdial.training.sources import held_out_documents

    if isinstance(data, str | Path):
        if (Path(data) / META_FILE).is_file():
            return held_out_documents(Path(data), tokenizer)
        data = [Path(data)]
    documents = list(_read(data))
    with_text = [document for document in documents if not is_empty(document)]
    if not with_text:
        raise ValueError(f"nothing to measure: {nothing_in(len(documents))}. Give text.")
    if len(with_text) < len(documents):
        warnings.warn(
            f"skipped {len(documents) - len(with_text)} of {len(documents)} documents: no text.",
            stacklevel=2,
        )
    return list(_tokenised(with_text, tokenizer))


def _read(data: Sequence[str] | Sequence[Path]) -> Iterator[AnyDocument]:
    """Documents of a list: texts if its items are strings, files if they are paths."""
    from depthdial.data.documents import SUFFIXES, Document, find_files, read_documents
    from depthdial.data.shards import META_FILE

    items = list(data)
    if all(isinstance(item, Path) for item in items):
        for item in items:
            if len(items) > 1 and (Path(item) / META_FILE).is_file():
                raise ValueError(
                    f"{item} is a folder written by `depthdial prepare`, which is measured alone: "
                    "its held-out documents are tokens already. Give it without other files."
                )
        files = find_files(items)
        if files.unsupported:
            warnings.warn(
                f"skipped {len(files.unsupported)} files that are not {', '.join(SUFFIXES)}: "
                f"{', '.join(files.unsupported[:3])}{', ...' if files.unsupported[3:] else ''}.",
                stacklevel=3,
            )
        yield from read_documents(files.supported)
        return
    for number, text in enumerate(items, start=1):
        if not isinstance(text, str):
            raise ValueError(
                f"item {number} of the data is a {type(text).__name__}; give a list of texts "
                "(str), or a list of files (pathlib.Path)."
            )
        if "\n" not in text and len(text) < 256 and Path(text).is_file():
            raise ValueError(
                f"item {number} of the data is '{text}', the name of a file; strings in a list "
                "are texts. For files give pathlib.Path objects."
            )
        yield Document(f"text {number}", text)


def _tokenised(documents: Sequence[AnyDocument], tokenizer: Tokenizer) -> Iterator[TokenDocument]:
    import numpy as np

    from depthdial.data.shards import TokenDocument

    ids_of_each = tokenizer.encode_batch([document.text for document in documents])
    for document, ids in zip(documents, ids_of_each, strict=True):
        tokens_T = np.array([*ids, *tokenizer.closing_ids], dtype=np.int64)
        yield TokenDocument(
            document.name,
            tokens_T,
            num_bytes=len(document.text.encode("utf-8")),
            first_bytes=tokenizer.num_bytes(ids[0]) if ids else 0,
        )
