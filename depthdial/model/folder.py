"""A model folder from outside: what a path or hub id means, which files travel, its origin.

What is in the weights and the config is read in `model/checkpoint.py`. `origin.json` is what an
imported folder remembers of its checkpoint; with it an export gives back what came in: the
config's own keys in their order, the names and files of the tensors, copies and buffers that ours
do not store. `origin.safetensors` holds the few tensors that cannot be computed again to the bit.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from depthdial.config.text_files import (
    LICENCE_PATTERNS,
    dump_json,
    is_plain_name,
    read_json_object,
)
from depthdial.data.tokenizer import GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from depthdial.disk import hash_file

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    *LICENCE_PATTERNS,
]
"""What is fetched, of published checkpoints as of our own: never code, never pickles."""
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATE_KEY = "chat_template"
OTHER_TOKENIZERS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Formats of a tokenizer that is not read here; see `is_other_tokenizer`."""
CARRIED_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TEMPLATE_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    *OTHER_TOKENIZERS,
)
"""Everything that published checkpoints keep beside their weights for text; further templates by
name are in TEMPLATES_FOLDER."""
CHANGED_FILES = (GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE)
"""Files that an import may change and an export gives back."""
ORIGIN_FILE = "origin.json"
ORIGIN_TENSORS_FILE = "origin.safetensors"
TRAVELLING_FILES = (*CARRIED_FILES, ORIGIN_FILE, ORIGIN_TENSORS_FILE)
"""Beside licences, what holds for a model whatever its weights become. What was measured on the
weights of a folder (sweeps, the proof of a conversion) stays there: training makes it untrue."""
LICENCE_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*")
FORMAT_VERSION = 1
"""Of origin.json."""


def local_source(source: str | Path) -> Path:
    """The path itself where there is something, else the hub's folder of that id.

    Raises: FileNotFoundError saying why neither works.
    """
    path = Path(source)
    if path.exists():
        return path
    name = str(source)
    if not HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"there is nothing at {name}. Give the folder of a published checkpoint, a .gguf file, "
            "or a hub id org/name."
        )
    return fetch(name)


def fetch(name: str) -> Path:
    """The local copy of what the hub has under an id.

    Raises: FileNotFoundError saying why there is none.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"there is no folder {name}, and as a hub id it cannot be fetched ({_reason(error)}). "
            "Check the name and the connection, or give the path of a model or checkpoint."
        ) from error


def _reason(error: Exception) -> str:
    """Why a download failed; the library's own words are about its settings."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached, and no earlier download is kept here"
    if isinstance(error, GatedRepoError):
        return "its owner gives it only to those who asked for access"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has nothing of that name, or keeps it private"
    return str(error).strip().partition("\n")[0]


def is_other_tokenizer(name: str) -> bool:
    """Whether a file holds a tokenizer in a format that is not read here."""
    return name in OTHER_TOKENIZERS or name.endswith(".tiktoken")


def carried_files(folder: Path) -> list[str]:
    """Names of the files for text that a folder has; links to regular files count, and may be
    refused when they are copied."""
    names = [name for name in CARRIED_FILES if (folder / name).is_file()]
    names += sorted(path.name for path in folder.glob("*.tiktoken") if path.is_file())
    templates = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    return names + [f"{TEMPLATES_FOLDER}/{path.name}" for path in templates if path.is_file()]


def licence_files(folder: Path) -> list[str]:
    """Names of the texts of a folder that whoever passes weights on must pass on too."""
    found = {path.name for pattern in LICENCE_PATTERNS for path in folder.glob(pattern)}
    return sorted(name for name in found if (folder / name).is_file())


def copy_files(source: Path, destination: Path) -> None:
    """Copy the files for text. Raises: as `copy_own`."""
    for name in carried_files(source):
        copy_own(source, name, destination)


def copy_licences(source: Path, destination: Path) -> None:
    """Copy licence texts. Raises: as `copy_own`."""
    for name in licence_files(source):
        copy_own(source, name, destination)


def copy_own(source: Path, name: str, destination: Path) -> None:
    """Copy one file of a folder as it is. Raises: as `check_own`."""
    check_own(source, name)
    (destination / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(source / name, destination / name)


def check_own(folder: Path, name: str) -> None:
    """Refuse a link that leads out of a folder: what is copied may be passed on, and a checkpoint
    from elsewhere must not pick any file of this computer for that.

    The hub's cache keeps the contents of a snapshot's links in `blobs` beside it.

    Raises: ValueError with the link, where it leads, and what to do.
    """
    root, target = folder.resolve(), (folder / name).resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent.resolve() / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{folder / name} is a link that leads out of its folder, to {target}: it is not "
            "copied. Put the file itself there, or remove the link."
        )


def companions(folder: str | Path) -> Iterator[Path]:
    """Files that travel with a model: tokenizer, chat template, origin, licences; by name."""
    for path in sorted(Path(folder).iterdir()):
        name = path.name
        travels = name in TRAVELLING_FILES or is_other_tokenizer(name)
        if path.is_file() and (travels or LICENCE_NAMES.fullmatch(name)):
            yield path


def copy_companions(source: str | Path, destination: Path) -> None:
    """Copy what travels with a model, byte for byte. Raises: as `copy_own`."""
    for path in companions(source):
        copy_own(Path(source), path.name, destination)


@dataclass(frozen=True)
class Origin:
    """The source of an imported model.

    Fields:
        family: its family. source: name of its folder, file or hub id.
        config: its config.json, keys in their order.
        tensors: tensor -> file; empty for a source that is not written again (GGUF).
        kept_tensors: those of them that are in origin.safetensors.
        dtype: number format of the imported matrices, as "bfloat16".
        changed_files: tokenizer files that the import changed -> their content; null for none.
        sha256: file -> hash of every file that was read.
    """

    family: str
    source: str
    config: dict[str, Any]
    tensors: dict[str, str]
    kept_tensors: tuple[str, ...]
    dtype: str
    changed_files: dict[str, dict[str, Any] | None]
    sha256: dict[str, str]

    def save(self, folder: Path) -> None:
        """Write origin.json."""
        text = dump_json({"format_version": FORMAT_VERSION, **asdict(self)})
        (folder / ORIGIN_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Origin | None:
        """The origin of a model folder; None for a model of our own.

        Raises: ValueError for a damaged file, or one that a later version wrote.
        """
        path = folder / ORIGIN_FILE
        if not path.is_file():
            return None
        values = read_json_object(path)
        version = values.pop("format_version", None)
        wanted = {field.name for field in fields(cls)}
        if version != FORMAT_VERSION or set(values) != wanted:
            raise ValueError(
                f"{path} has format_version {version} and the keys {sorted(values)}; this version "
                f"reads {FORMAT_VERSION} with {sorted(wanted)}. Import the checkpoint again."
            )
        for key, (is_right, wanted) in SHAPES.items():
            if not is_right(values[key]):
                raise ValueError(
                    f"{path} has {key}={_shortened(values[key])}; it must be {wanted}. It is "
                    "damaged, or was not written by an import: import the checkpoint again."
                )
        values["kept_tensors"] = tuple(values["kept_tensors"])
        return cls(**values)


def _maps(value: Any, is_name: Callable[[str], bool], is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_name(k) and is_right(x) for k, x in value.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tensor_file(value: Any) -> bool:
    return _is_text(value) and is_plain_name(value) and value.endswith(".safetensors")


def _is_group(value: Any) -> bool:
    return isinstance(value, dict)


def _is_hash(value: Any) -> bool:
    return _is_text(value) and re.fullmatch("[0-9a-f]{64}", value) is not None


# An export writes and removes files by these names, so none of them may lead anywhere else.
SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "family": (_is_text, "a text"),
    "source": (_is_text, "a text"),
    "config": (_is_group, "a group of keys"),
    "tensors": (
        lambda value: _maps(value, _is_text, _is_tensor_file),
        "tensor names with plain names of .safetensors files",
    ),
    "kept_tensors": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of tensor names",
    ),
    "dtype": (_is_text, "a text"),
    "changed_files": (
        lambda value: _maps(value, CHANGED_FILES.__contains__, lambda x: x is None or _is_group(x)),
        f"groups of keys, or null, for {' and '.join(CHANGED_FILES)}",
    ),
    "sha256": (lambda value: _maps(value, _is_text, _is_hash), "file names with SHA-256 hashes"),
}
"""Field -> whether a value read from a file has its shape, and that shape in words."""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Name -> SHA-256 of files of one folder."""
    return {path.name: hash_file(path) for path in paths}
