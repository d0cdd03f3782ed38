"""What `depthdial inspect` says of a model, as data: from configs and headers, without weights.

A published checkpoint that cannot be imported is described too, with every reason. How the facts
are printed is in `cli/inspect.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthdial.config import ModelConfig
from depthdial.data.tokenizer import TOKENIZER_FILE, Tokenizer
from depthdial.formats.families.registry import Family, SourceConfig, detect, select_rules
from depthdial.formats.gguf.files import GgufFile, find_gguf
from depthdial.formats.source_folder import open_source, read_source_config, text_folder
from depthdial.formats.tensors.files import TensorFiles
from depthdial.formats.text.files import find_template
from depthdial.formats.text.tokens import TokenReport, read_tokens
from depthdial.model.checkpoint import WEIGHTS_FILE, read_config
from depthdial.model.folder import Origin
from depthdial.model.tensor_header import DTYPE_NAMES

TENSOR_PROBLEM = re.compile(r" (?=unknown tensor |missing tensor |\.\.\. and )")
"""Between the sentences of `select_rules`."""


@dataclass(frozen=True)
class TextFacts:
    """Tokenizer facts, tokens by their spelling.

    Fields:
        num_tokens: ids of the tokenizer; None without one.
        stops, opens: tokens that end a text, and that open one, as `<text> (id)`.
        template_in: file that holds the chat template; None for none.
    """

    num_tokens: int | None
    stops: tuple[str, ...]
    opens: tuple[str, ...]
    template_in: str | None


@dataclass(frozen=True)
class Inspection:
    """Facts about one model.

    Fields:
        kind: what the path holds, in words. family: of a published format; None for ours alone.
        summary: the family in one sentence.
        config: of the model as it runs here; None where it cannot.
        formats: number formats of the stored tensors. num_bytes: of them.
        text: None where nothing could be read.
        problems: reasons why it cannot be imported; empty where it can.
        warnings, notes: sentences for people.
    """

    kind: str
    family: str | None
    summary: str
    config: ModelConfig | None
    formats: tuple[str, ...]
    num_bytes: int | None
    text: TextFacts | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def inspect_model_folder(folder: Path) -> Inspection:
    """Facts about a model folder of ours. Raises: as `read_config` and `TensorFiles`."""
    config = read_config(folder)
    origin = Origin.load(folder)
    files = TensorFiles(folder, only=WEIGHTS_FILE)
    text = TextFacts(None, (), (), None)
    if (folder / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.from_dir(folder)
        text = _text_facts(
            tokenizer, tokenizer.stop_ids, tokenizer.opening_ids, find_template(folder)
        )
    return Inspection(
        kind="model folder" if origin is None else f"model folder, imported from {origin.source}",
        family=None if origin is None else origin.family,
        summary="",
        config=config,
        formats=_formats(files),
        num_bytes=files.num_bytes,
        text=text,
        problems=(),
        warnings=(),
        notes=() if text.num_tokens else ("It has no tokenizer: token ids work, text does not.",),
    )


def inspect_source(path: Path) -> Inspection:
    """Facts about a published checkpoint, also of one that cannot be imported.

    Raises: FileNotFoundError if the path is no checkpoint at all; ValueError for a config.json
        that cannot be read.
    """
    gguf = find_gguf(path)
    kind = "published checkpoint" if gguf is None else "GGUF file"
    values = read_source_config(path) if gguf is None else GgufFile(gguf).values
    try:
        family = detect(values)
    except ValueError as error:
        return _closed(kind, None, [str(error)])
    try:
        opened = open_source(path)
        with text_folder(opened) as (folder, notes):
            tokens = read_tokens(folder, config=opened.values, vocab_size=opened.config.vocab_size)
            text = _stated_text(folder, tokens)
    except (ValueError, FileNotFoundError) as error:
        return _closed(kind, family, _problems(path, family, values) or [str(error)])
    files = opened.files
    return Inspection(
        kind=kind,
        family=family.name,
        summary=family.summary,
        config=opened.config,
        formats=_formats(files),
        num_bytes=None if isinstance(files, GgufFile) else files.num_bytes,
        text=text,
        problems=(),
        warnings=tokens.warnings,
        notes=(*(notes or tokens.notes), *family.notes(opened.config, opened.values)),
    )


class ListingConfig(SourceConfig):
    """A source config that notes refused values and reads on as if they were allowed."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.problems: list[str] = []

    def expect(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value, or the first allowed one in its place."""
        try:
            return super().expect(key, *allowed, default=default)
        except ValueError as error:
            self.problems.append(str(error))
            return allowed[0]


def _closed(kind: str, family: Family | None, problems: list[str]) -> Inspection:
    """A checkpoint that cannot be imported."""
    name, summary = (None, "") if family is None else (family.name, family.summary)
    return Inspection(kind, name, summary, None, (), None, None, tuple(problems), (), ())


def _problems(path: Path, family: Family, values: dict[str, Any]) -> list[str]:
    """Everything in the way of an import, where an import names the first thing."""
    source, config = ListingConfig(values), None
    try:
        config = family.read(source)
        problems = source.problems
        problems += [f"config key '{key}' has no known meaning." for key in source.unused()]
    except ValueError as error:
        problems = source.problems + str(error).splitlines()
    try:
        files = TensorFiles(path) if find_gguf(path) is None else None
        if config is not None and files is not None:
            select_rules(family.rules(config, values), files.entries, unheld=files.unheld)
    except FileNotFoundError as error:
        problems.append(str(error))
    except ValueError as error:
        problems += TENSOR_PROBLEM.split(str(error))
    return problems


def _stated_text(folder: Path, tokens: TokenReport) -> TextFacts:
    if not tokens.has_tokenizer:
        stops = tuple(map(str, sorted(tokens.stop_ids)))
        return TextFacts(None, stops, (), tokens.template_in)
    tokenizer = Tokenizer.from_file(folder / TOKENIZER_FILE)
    return _text_facts(tokenizer, tokens.stop_ids, tokens.opening_ids, tokens.template_in)


def _text_facts(
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    opening_ids: tuple[int, ...],
    template_in: str | None,
) -> TextFacts:
    def spelled(ids: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(f"{tokenizer.token_of(token_id)} ({token_id})" for token_id in ids)

    # Any of them ends a text; files list them in orders of their own.
    stops = spelled(tuple(sorted(stop_ids)))
    return TextFacts(tokenizer.vocab_size, stops, spelled(opening_ids), template_in)


def _formats(files: TensorFiles | GgufFile) -> tuple[str, ...]:
    if isinstance(files, GgufFile):
        return tuple(sorted({kind.name for kind in files.kinds.values()}))
    return tuple(sorted({DTYPE_NAMES[entry.dtype] for entry in files.entries.values()}))
