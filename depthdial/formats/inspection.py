"""What `depthdial inspect` says of a model, as data: from configs and headers, without weights.

A published checkpoint that cannot be imported is described too, with every reason. How the facts
are printed is in `cli/inspect.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from depthdial.config import ModelConfig
from depthdial.data.tokenizer import TOKENIZER_FILE, Tokenizer
from depthdial.formats.families.registry import Family, detect
from depthdial.formats.gguf.files import GgufFile, find_gguf
from depthdial.formats.reasons import reasons_of
from depthdial.formats.source_folder import open_source, read_source_config, text_folder
from depthdial.formats.tensors.files import TensorFiles
from depthdial.formats.text.files import find_template
from depthdial.formats.text.tokens import TokenReport, published_tokens
from depthdial.model.checkpoint import WEIGHTS_FILE, read_config
from depthdial.model.folder import Origin
from depthdial.model.halting import stale_gate
from depthdial.model.tensor_header import DTYPE_NAMES


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
    text, warnings = TextFacts(None, (), (), None), ()
    notes: tuple[str, ...] = ("It has no tokenizer: token ids work, text does not.",)
    if (folder / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.from_dir(folder)
        text = _text_facts(
            tokenizer, tokenizer.stop_ids, tokenizer.opening_ids, find_template(folder)
        )
        warnings, notes = _remarks_on_stops(folder, origin, tokenizer)
    return Inspection(
        kind="model folder" if origin is None else f"model folder, imported from {origin.source}",
        family=None if origin is None else origin.family,
        summary="",
        config=config,
        formats=_formats(files),
        num_bytes=files.num_bytes,
        text=text,
        problems=(),
        warnings=(*warnings, *stale_gate(config)),
        notes=notes,
    )


def _remarks_on_stops(
    folder: Path, origin: Origin | None, tokenizer: Tokenizer
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(warnings, notes) on a token that ends a turn and that no published file names as a stop."""
    stated = published_tokens(folder, origin)
    if stated.added_stop is None:
        return (), ()
    found = f"{stated.template_in} ends a turn with '{stated.added_stop}', which"
    token_id = tokenizer.token_id(stated.added_stop)
    if token_id in tokenizer.stop_ids:
        return (), (f"{found} no published file names as a stop: generation stops there, too.",)
    return (
        f"{found} no file names as a stop: replies run on. Add {token_id} to eos_token_id in "
        "generation_config.json.",
    ), ()


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
    except (ValueError, FileNotFoundError) as error:
        return _closed(kind, family, reasons_of(error))
    files, tokens = opened.files, opened.tokens
    with text_folder(files if isinstance(files, GgufFile) else path) as (folder, _):
        text = _stated_text(folder, tokens)
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
        notes=(*tokens.notes, *family.notes(opened.config, opened.values)),
    )


def _closed(kind: str, family: Family | None, problems: Sequence[str]) -> Inspection:
    """A checkpoint that cannot be imported."""
    name, summary = (None, "") if family is None else (family.name, family.summary)
    return Inspection(kind, name, summary, None, (), None, None, tuple(problems), (), ())


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
