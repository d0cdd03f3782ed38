"""From text and tasks to training rows.

`documents` reads files, `text` splits and tokenises them, `shards` is the folder format,
`packing` cuts rows and defines `Batch`, `corpora` names real text, `synthetic` generates
tasks, `tokenizer` stands between text and ids.
"""

from depthdial.data.corpora import corpus_names, describe_corpus, prepare_corpus, read_corpus
from depthdial.data.documents import Document
from depthdial.data.packing import (
    IGNORE,
    Batch,
    DataState,
    PackedText,
    RowSource,
    iterate_batches,
)
from depthdial.data.shards import TokenDocument, TokenShards
from depthdial.data.synthetic import (
    Answers,
    DepthAccuracy,
    PointerPrograms,
    accuracy_by_depth,
    pointer_tokenizer,
)
from depthdial.data.text import PrepareReport, prepare
from depthdial.data.tokenizer import Tokenizer, train_bpe

__all__ = [
    "IGNORE",
    "Answers",
    "Batch",
    "DataState",
    "DepthAccuracy",
    "Document",
    "PackedText",
    "PointerPrograms",
    "PrepareReport",
    "RowSource",
    "TokenDocument",
    "TokenShards",
    "Tokenizer",
    "accuracy_by_depth",
    "corpus_names",
    "describe_corpus",
    "iterate_batches",
    "pointer_tokenizer",
    "prepare",
    "prepare_corpus",
    "read_corpus",
    "train_bpe",
]
