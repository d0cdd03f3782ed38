"""Published checkpoint folders in and out: `import_checkpoint`, `export_checkpoint`.

Every tensor and every config key is accounted for, or nothing is written. Tensors pass one at a
time, so memory does not grow with the model. What families mean is in `families/registry.py`,
files of tensors are in `tensors/files.py`, GGUF files in `gguf/files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthdial.config import ModelConfig
from depthdial.config.text_files import dump_json
from depthdial.data.tokenizer import GENERATION_CONFIG_FILE
from depthdial.disk import hash_file, new_folder
from depthdial.formats.families.registry import (
    Buffer,
    Copy,
    Family,
    Get,
    SourceConfig,
    TensorRule,
    family_named,
    rules_to_export,
)
from depthdial.formats.gguf.files import GgufFile
from depthdial.formats.model_card import CARD_FILE, loading_code, write_card
from depthdial.formats.source_folder import OpenedSource, open_source, text_folder
from depthdial.formats.tensors.files import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorFiles,
    TensorSpec,
    TensorWriter,
    total_bytes,
    write_index,
)
from depthdial.formats.text.tokens import (
    TokenReport,
    export_tokens,
    import_tokens,
    published_tokens,
)
from depthdial.model.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_config, used_formats
from depthdial.model.count import count_parameters
from depthdial.model.folder import (
    ORIGIN_FILE,
    ORIGIN_TENSORS_FILE,
    Origin,
    carried_files,
    copy_licences,
    local_source,
)
from depthdial.model.halting import stale_gate

DTYPE_KEYS = ("torch_dtype", "dtype")
"""Under which published configs state the number format of their weights."""


@dataclass(frozen=True)
class ImportReport:
    """What an import wrote, and what a user should know of it.

    Fields:
        folder: the model folder; family: of the source.
        config: of the model. tokens: what was found about text.
        num_source_tensors, num_parameters, num_bytes: tensors read; ours, unique; their size.
        limits: what this runtime does differently from the published one, and what of its config
            is a choice of each request.
    """

    folder: Path
    family: str
    config: ModelConfig
    tokens: TokenReport
    num_source_tensors: int
    num_parameters: int
    num_bytes: int
    limits: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that are no warnings."""
        return (*self.tokens.notes, *self.limits)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Contradictions in the source that a user should look at."""
        return self.tokens.warnings


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Fields:
        folder, family: as asked. files: names in the folder.
        num_tensors, num_bytes: tensors written, and their size.
        as_it_came: the config is the one that an earlier import read.
        warnings: what the format does not say of the model.
    """

    folder: Path
    family: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    as_it_came: bool
    warnings: tuple[str, ...] = ()


def import_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    family: str | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
) -> ImportReport:
    """Turn a published checkpoint into a model folder of ours.

    The source is only read. Numbers keep their format. The folder appears when it is complete.

    Args:
        source: folder with config.json and safetensors, .gguf file, or hub id `org/name`.
        family: name of the source's family; None to recognise it.
        overwrite: replace a model folder at `destination`.
        dtype: of the weights of a GGUF file; None for float32.

    Raises: as `open_source`; ValueError for weights that are no numbers, contradicting tokens, or
        a destination that is taken.
    """
    destination = Path(destination)
    path = local_source(source)
    opened = open_source(path, family=family, dtype=dtype)
    config, files = opened.config, opened.files
    is_gguf = isinstance(files, GgufFile)
    read = path if path.is_file() else opened.folder
    with new_folder(
        destination, kind="a model folder", overwrite=overwrite, apart_from=[read]
    ) as folder:
        tokens = _import_text(opened, folder)
        kept = _write_ours(opened, folder)
        (folder / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
        copy_licences(opened.folder, folder)
        Origin(
            family=opened.family.name,
            source=path.resolve().name if path == Path(source) else str(source),
            config=opened.values,
            tensors={} if is_gguf else dict(files.file_of),
            kept_tensors=kept,
            dtype=_matrix_format(opened.specs),
            changed_files=dict(tokens.changed_files),
            sha256={name: hash_file(opened.folder / name) for name in _files_read(opened)},
        ).save(folder)
    return ImportReport(
        folder=destination,
        family=opened.family.name,
        config=config,
        tokens=tokens,
        num_source_tensors=len(files.entries),
        num_parameters=count_parameters(config).total,
        num_bytes=total_bytes(opened.specs.values()),
        limits=(*opened.family.notes(config, opened.values), *_mixed_formats(opened.specs)),
    )


def export_checkpoint(
    folder: str | Path,
    destination: str | Path,
    *,
    family: str,
    overwrite: bool = False,
) -> ExportReport:
    """Write a model folder of ours in a published format.

    A model that was imported from this family gets its own config, files and tokenizer back.

    Raises: FileNotFoundError; ValueError if the format cannot say what the model is, or that it
        loops, a tensor has no place in it, or the destination is taken.
    """
    folder, destination = Path(folder), Path(destination)
    known = family_named(family)
    config = read_config(folder)
    origin = Origin.load(folder)
    own = origin if origin is not None and origin.family == family and origin.tensors else None
    values = known.write(config, None if origin is None else origin.config)
    warnings = (
        *_lost_loops(known, config, values),
        *_lost_training(known, config, values),
        *_lost_stop(folder, origin),
        *stale_gate(config),
    )
    as_it_came = own is not None and values == own.config
    stored = TensorFiles(folder, only=WEIGHTS_FILE)
    rules = rules_to_export(
        known.rules(config, values), own.tensors if own is not None and as_it_came else None
    )
    _check_all_exported(rules, stored.entries, family)
    with new_folder(
        destination, kind="an exported model", overwrite=overwrite, apart_from=[folder]
    ) as place:
        specs = _write_source(rules, stored, place, own if as_it_came else None, folder)
        values, note = _with_own_format(values, _matrix_format(stored.entries), origin)
        warnings += note
        (place / CONFIG_FILE).write_text(dump_json(values), encoding="utf-8")
        export_tokens(folder, place, changed_files=None if origin is None else origin.changed_files)
        copy_licences(folder, place)
        write_card(
            place / CARD_FILE,
            folder=folder,
            config=config,
            format_name=family,
            loading=loading_code(family, destination.name),
            limits=(*known.limits(config), *warnings),
            origin=origin,
        )
        names = tuple(sorted(path.name for path in place.iterdir()))
    return ExportReport(
        folder=destination,
        family=family,
        files=names,
        num_tensors=len(specs),
        num_bytes=total_bytes(specs.values()),
        as_it_came=as_it_came,
        warnings=warnings,
    )


def _matrix_format(tensors: Mapping[str, TensorSpec]) -> str:
    """Name of the number format that a model's matrices are used in, as "bfloat16"."""
    return str(used_formats(tensors)["embedding.weight"]).removeprefix("torch.")


def _with_own_format(
    values: dict[str, Any], dtype: str, origin: Origin | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A source config that does not state the number format which the weights had at import.

    transformers would round them to it. Returns: the config, and a warning if it was changed.
    """
    stated = [key for key in DTYPE_KEYS if values.get(key) is not None]
    if origin is None or dtype == origin.dtype or not stated:
        return values, ()
    changed = values | dict.fromkeys(stated, dtype)
    return changed, (
        f"{' and '.join(stated)} of the config is {dtype} now: the weights, imported as "
        f"{origin.dtype}, are stored in it since they were trained or converted.",
    )


def _lost_loops(known: Family, config: ModelConfig, values: dict[str, Any]) -> tuple[str, ...]:
    """A warning where the format does not state how many loops a model is made for.

    Raises: ValueError for a format in which no model loops.
    """
    meant = known.read(SourceConfig(values)).max_loops
    if meant == config.max_loops:
        return ()
    deepest = known.to_source(config.replace(num_loops=config.max_loops))
    if known.read(SourceConfig(deepest)).max_loops == 1:
        raise ValueError(
            f"in the format of '{known.name}' no model loops, and this one is made for 1 to "
            f"{config.max_loops} loops: what was written would run once and no more. Export it "
            "with --as hf or as a looped family; a model whose config has max_loops 1 is dense."
        )
    return (
        f"The format does not state that the model is made for 1 to {config.max_loops} loops: "
        f"opened from this export, it counts as made for 1 to {meant}.",
    )


def _lost_training(known: Family, config: ModelConfig, values: dict[str, Any]) -> Iterator[str]:
    """A warning where what is read from the export claims more training than there was."""
    meant = known.read(SourceConfig(values))
    claimed = set(meant.trained_at) - set(config.trained_at)
    if claimed:
        shown = ", ".join(map(str, sorted(claimed)))
        yield (
            "The format does not state which loop counts training has run: opened from this "
            f"export, k = {shown} count as trained, which they are not."
        )


def _lost_stop(folder: Path, origin: Origin | None) -> Iterator[str]:
    """A warning where the files that are given back do not name the token that ends a turn."""
    stated = published_tokens(folder, origin)
    if stated.added_stop is not None:
        yield (
            f"{stated.template_in} ends a turn with '{stated.added_stop}', which no file of the "
            "export names as a stop. Depthdial stops there; for other tools, write "
            f'"eos_token_id": {list(stated.stop_ids)} into {GENERATION_CONFIG_FILE}.'
        )


def _mixed_formats(specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """A note where matrices are stored in another number format than they are computed in."""
    used = used_formats(specs)
    narrower = [name for name, spec in specs.items() if spec.dtype != used[name]]
    if narrower:
        common = str(used[narrower[0]]).removeprefix("torch.")
        yield (
            f"its tensors are stored in several number formats and computed in {common}, which "
            f"holds them all; {len(narrower)} of {len(specs)} are in a narrower one."
        )


def _import_text(opened: OpenedSource, folder: Path) -> TokenReport:
    """Tokenizer files and what they say."""
    files = opened.files
    with text_folder(files if isinstance(files, GgufFile) else opened.folder) as (source, _):
        return import_tokens(source, folder, config=opened.values, facts=opened.tokens)


def _files_read(opened: OpenedSource) -> list[str]:
    """Names of the source's files that an import reads."""
    if isinstance(opened.files, GgufFile):
        return opened.files.file_names
    names = [CONFIG_FILE, *opened.files.file_names]
    names += [INDEX_FILE] if opened.files.has_index else []
    return names + carried_files(opened.folder)


def _write_ours(opened: OpenedSource, folder: Path) -> tuple[str, ...]:
    """Write model.safetensors, and origin.safetensors for what cannot be made again to the bit.

    Returns: names in origin.safetensors.
    """
    get = opened.files.get
    kept: dict[str, Tensor] = {}
    with TensorWriter(folder / WEIGHTS_FILE, opened.specs) as writer:
        for rule in opened.rules:
            for name, tensor in rule.to_ours(get).items():
                writer.write(name, tensor)
            if isinstance(rule, Buffer | Copy):
                kept |= rule.to_keep(get)
    if kept:
        _write_whole(folder / ORIGIN_TENSORS_FILE, kept)
    return tuple(kept)


def _write_whole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with TensorWriter(path, {name: TensorSpec.of(t) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def _check_all_exported(rules: Sequence[TensorRule], ours: Iterable[str], family: str) -> None:
    placed = {name for rule in rules for name in rule.our_names}
    left = sorted(set(ours) - placed)
    if left:
        raise ValueError(
            f"{len(left)} tensors of this model have no place in the format '{family}': "
            f"{', '.join(left[:5])}. Export it in another format."
        )


def _kept_tensors(
    rules: Sequence[TensorRule], stored: TensorFiles, origin: Origin | None, folder: Path
) -> dict[str, Tensor]:
    """Tensors of the source that an import kept and that still belong to the model.

    Raises: FileNotFoundError; ValueError if the file lacks one, or holds another one.
    """
    if origin is None or not origin.kept_tensors:
        return {}
    files = TensorFiles(folder, only=ORIGIN_TENSORS_FILE)
    if files.entries.keys() != set(origin.kept_tensors):
        raise ValueError(
            f"{folder / ORIGIN_TENSORS_FILE} has the tensors {sorted(files.entries)}, but "
            f"{ORIGIN_FILE} states {sorted(origin.kept_tensors)}. Import the checkpoint again."
        )
    kept = {}
    for rule in rules:
        if isinstance(rule, Buffer | Copy) and rule.source in files.entries:
            tensor = files.get(rule.source)
            if rule.still_holds(tensor, stored.get):
                kept[rule.source] = tensor
    return kept


def _write_source(
    rules: Sequence[TensorRule],
    stored: TensorFiles,
    place: Path,
    origin: Origin | None,
    folder: Path,
) -> dict[str, TensorSpec]:
    """Write the source's tensors, in the files of the origin if there is one."""
    kept = _kept_tensors(rules, stored, origin, folder)

    def tensors_of(rule: TensorRule, get: Get) -> dict[str, Tensor]:
        if kept.keys() >= set(rule.source_names):
            return {name: kept[name] for name in rule.source_names}
        return rule.to_source(get)

    specs = {
        name: TensorSpec.of(tensor)
        for rule in rules
        for name, tensor in tensors_of(rule, stored.shape_only).items()
    }
    file_of = dict.fromkeys(specs, SINGLE_FILE) if origin is None else origin.tensors
    with ExitStack() as stack:
        writers = {
            file_name: stack.enter_context(
                TensorWriter(
                    place / file_name,
                    {name: spec for name, spec in specs.items() if file_of[name] == file_name},
                )
            )
            for file_name in set(file_of.values())
        }
        for rule in rules:
            for name, tensor in tensors_of(rule, stored.get).items():
                writers[file_of[name]].write(name, tensor)
    if set(file_of.values()) != {SINGLE_FILE}:
        write_index(place, file_of, total_bytes(specs.values()))
    return specs
