"""Text and questions of the conversion study: blocks of corpora, a mixed training folder, rows.

What is trained on them and how arms are compared is in `conversion_arms.py` and
`conversion_results.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from depthdial.data.corpora import read_split
from depthdial.data.documents import Document
from depthdial.data.shards import TokenDocument
from depthdial.data.text import prepare_documents
from depthdial.data.tokenizer import Tokenizer

TRAINED_CORPORA = ("annual-messages", "stdlib", "botocore")
UNSEEN_CORPUS = "encyclopedia"
BLOCK_CHARS = 2000
"""Long documents are cut into blocks of about this size, so that a short run sees many of them."""
CONTEXT = 128
MIN_BLOCK_CHARS = 700
"""Shorter blocks are left out: they would not fill a row."""
BLOCKS_PER_CORPUS = 400
"""Training blocks of each corpus: several times what the longest arm reads."""
VALID_NAME = "valid: "


def blocks(document: Document) -> Iterator[Document]:
    """Whole lines of a document, up to BLOCK_CHARS characters at a time."""
    lines: list[str] = []
    size = number = 0
    for line in document.text.splitlines(keepends=True):
        if lines and size + len(line) > BLOCK_CHARS:
            yield Document(f"{document.name} #{number}", "".join(lines))
            lines, size, number = [], 0, number + 1
        lines.append(line)
        size += len(line)
    if lines:
        yield Document(f"{document.name} #{number}", "".join(lines))


def chosen_blocks(corpus: str, split: str, count: int) -> list[Document]:
    """`count` blocks of a corpus, in the order of a hash of their names."""
    found = [
        Document(f"{corpus}: {block.name}", block.text)
        for document in read_split(corpus, split)
        for block in blocks(document)
        if len(block.text) >= MIN_BLOCK_CHARS
    ]
    if len(found) < count:
        raise ValueError(
            f"corpus '{corpus}' has {len(found)} blocks of text in its {split} split; the study "
            f"needs {count}."
        )
    return sorted(found, key=_hash)[:count]


def prepare_mixture(folder: Path, tokenizer: Tokenizer) -> Path:
    """Training folder with equally many blocks of each trained corpus."""
    train = [b for name in TRAINED_CORPORA for b in chosen_blocks(name, "train", BLOCKS_PER_CORPUS)]
    valid = [
        Document(VALID_NAME + b.name, b.text)
        for name in TRAINED_CORPORA
        for b in chosen_blocks(name, "valid", 10)
    ]
    documents = sorted(train, key=_hash) + valid
    prepare_documents(
        lambda: documents,
        folder,
        choose_valid=lambda names: {name for name in names if name.startswith(VALID_NAME)},
        tokenizer=tokenizer,
        origin={"study": "conversion", "corpora": list(TRAINED_CORPORA)},
    )
    return folder


def evaluation_rows(
    corpora: Sequence[str], tokenizer: Tokenizer, *, per_corpus: int
) -> list[TokenDocument]:
    """One row of CONTEXT scored tokens from each of `per_corpus` held-out blocks."""
    documents = []
    for corpus in corpora:
        for block in chosen_blocks(corpus, "valid", per_corpus):
            ids = tokenizer.encode(block.text)[: CONTEXT + 1]
            num_bytes = len(tokenizer.decode(ids).encode())
            documents.append(TokenDocument(block.name, np.array(ids), num_bytes))
    return documents


def _hash(document: Document) -> str:
    return hashlib.sha256(document.name.encode()).hexdigest()
