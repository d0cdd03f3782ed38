"""A published checkpoint, folder or GGUF file, opened and checked as far as needs no weights.

Config and tensor headers are compared with each other before anything is allocated. Writing a
model folder from it is in `import_export.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from depthdial.config import ModelConfig
from depthdial.config.limits import MAX_CONFIG_BYTES
from depthdial.config.text_files import read_json_object
from depthdial.disk import named_in_errors
from depthdial.formats.families.registry import (
    Family,
    Get,
    SourceConfig,
    TensorRule,
    detect,
    family_named,
    select_rules,
)
from depthdial.formats.gguf.files import GgufFile, find_gguf
from depthdial.formats.gguf.tokens import write_tokenizer
from depthdial.formats.reasons import Reasons
from depthdial.formats.source_config import MAX_LAYERS
from depthdial.formats.tensors.files import TensorFiles, TensorSpec
from depthdial.formats.text.tokens import TokenReport, read_tokens
from depthdial.model.checkpoint import CONFIG_FILE, empty_model
from depthdial.model.count import count_parameters
from depthdial.model.folder import carried_files, check_own, licence_files

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class OpenedSource:
    """A published checkpoint after everything was checked that needs no weights.

    Fields:
        folder: that its files are in.
        values: its config.json, or what the header of a GGUF file says in its place. config: ours.
        rules: the rules of the tensors that it has. specs: our tensors.
        tokens: what its files say of text.
    """

    folder: Path
    family: Family
    values: dict[str, Any]
    config: ModelConfig
    files: TensorFiles | GgufFile
    rules: tuple[TensorRule, ...]
    specs: dict[str, TensorSpec]
    tokens: TokenReport


def open_source(
    path: Path, *, family: str | None = None, dtype: torch.dtype | None = None
) -> OpenedSource:
    """Read config, headers and tokenizer of a published checkpoint; no weights.

    Args:
        path: folder with config.json and safetensors, or a .gguf file or a folder with one.
        family: name of the family; None to recognise it.
        dtype: of the tensors read from GGUF; None for float32. A folder's own is kept.

    Raises: FileNotFoundError; ValueError naming what is damaged, unknown, missing or beyond this
        runtime, or an option without effect; `Refused` where it is several things.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        header_only = GgufFile(gguf, dtype=torch.float32 if dtype is None else dtype)
        values = header_only.values
        _check_layers(values)
    else:
        if dtype is not None:
            raise ValueError(
                f"dtype={dtype} has no effect on {path}: the numbers of a safetensors checkpoint "
                "keep their format. Leave it out."
            )
        values = read_source_config(path)
    if values.get("model_type") == ModelConfig.model_fields["model_type"].default:
        raise ValueError("this is a model folder of depthdial already; open it as it is.")
    known = detect(values) if family is None else family_named(family)
    reasons = Reasons()
    config = files = tokens = None
    rules: list[TensorRule] = []
    specs: dict[str, TensorSpec] = {}
    with reasons.collect():
        config = read_family(values, known, reasons)
    with reasons.collect():
        files = TensorFiles(path) if gguf is None else header_only
    if config is not None and files is not None:
        with reasons.collect():
            rules = _rules_of(config, known, values, files)
            specs = our_specs(rules, files.shape_only)
            check_specs(config, specs)
    vocab_size = None if config is None else config.vocab_size
    with reasons.collect(), text_folder(path if gguf is None else header_only) as (folder, notes):
        tokens = read_tokens(folder, config=values, vocab_size=vocab_size)
        # A GGUF that has none says why in its own words.
        tokens = replace(
            tokens, notes=notes + tokens.notes if tokens.has_tokenizer or not notes else notes
        )
    place = path if gguf is None else gguf.parent
    for name in (*(carried_files(place) if gguf is None else ()), *licence_files(place)):
        with reasons.collect():
            check_own(place, name)
    reasons.raise_if_any()
    assert config is not None and files is not None and tokens is not None
    return OpenedSource(files.folder, known, values, config, files, tuple(rules), specs, tokens)


def _rules_of(
    config: ModelConfig, known: Family, values: dict[str, Any], files: TensorFiles | GgufFile
) -> list[TensorRule]:
    """The rules of the tensors that the files hold.

    Raises: Refused; ValueError for a config that asks for far more than they hold.
    """
    wanted = count_parameters(config).total
    # A little too few is a missing tensor, which the rules name.
    if wanted > 2 * files.num_values:
        raise ValueError(
            f"the config asks for {wanted:,} parameters, but the files of {files.folder} hold "
            f"{files.num_values:,} numbers. Config and weights must come from the same checkpoint."
        )
    unheld = files.unheld if isinstance(files, TensorFiles) else {}
    return select_rules(known.rules(config, values), files.entries, unheld=unheld)


@contextmanager
def text_folder(source: Path | GgufFile) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The folder with the tokenizer files, and notes on it; a GGUF's tokenizer is written first."""
    if isinstance(source, Path):
        yield source, ()
        return
    with TemporaryDirectory() as staged, named_in_errors(Path(staged), source.path):
        vocab_size = source.values["vocab_size"]
        yield Path(staged), write_tokenizer(source.header, Path(staged), vocab_size=vocab_size)


def read_source_config(folder: Path) -> dict[str, Any]:
    """A published config.json in the order of its text, its numbers of layers within reason.

    Raises: FileNotFoundError, ValueError.
    """
    adapter = [name for name in ADAPTER_FILES if (folder / name).is_file()]
    if adapter:
        raise ValueError(
            f"{folder} has an adapter ({', '.join(adapter)}), which is not read: without it the "
            "model would be another one. Merge it into the weights (peft: merge_and_unload, "
            "save_pretrained) and import the result, or remove it to import the base alone."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG_FILE}. Give the folder of a published checkpoint, with "
            f"{CONFIG_FILE} and safetensors, or a .gguf file."
        )
    values = read_json_object(folder / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
    _check_layers(values)
    return values


def read_family(values: dict[str, Any], known: Family, reasons: Reasons) -> ModelConfig:
    """Config of ours from one of a family, every key of it read.

    What is refused goes into `reasons`, and the value that this runtime can do takes its place.

    Raises: ValueError for what leaves no config to read on with.
    """
    source = SourceConfig(values, reasons=reasons)
    config = known.read(source)
    with reasons.collect():
        source.check_all_read()
    return config


def our_specs(rules: Iterable[TensorRule], shape_only: Get) -> dict[str, TensorSpec]:
    """Formats and shapes of our tensors, found by running the rules on shapes alone.

    Raises: ValueError for a source tensor whose shape the config contradicts.
    """
    specs: dict[str, TensorSpec] = {}
    for rule in rules:
        if rule.our_names:
            for name, tensor in rule.to_ours(shape_only).items():
                assert name not in specs, f"two rules fill '{name}'"
                specs[name] = TensorSpec.of(tensor)
    return specs


def check_specs(config: ModelConfig, specs: Mapping[str, TensorSpec]) -> None:
    """Our tensors are exactly those of the model. Raises: ValueError naming those that are not."""
    expected = {name: tuple(t.shape) for name, t in empty_model(config).state_dict().items()}
    given = {name: spec.shape for name, spec in specs.items()}
    problems = [
        f"'{name}' has {_shown(given.get(name))}, the config asks for {_shown(expected.get(name))}"
        for name in sorted(given.keys() | expected.keys())
        if given.get(name) != expected.get(name)
    ]
    problems += [
        f"'{name}' is {spec.dtype}, weights are floating point"
        for name, spec in specs.items()
        if not spec.dtype.is_floating_point
    ]
    if problems:
        raise ValueError(
            f"{len(problems)} tensors do not fit the config: {'; '.join(problems[:5])}. Config and "
            "weights must come from the same checkpoint."
        )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"shape {list(shape)}"


def _check_layers(values: dict[str, Any]) -> None:
    """Every family counts its layers under a key with this word."""
    for key, value in _whole_numbers(values):
        if "layer" in key and value > MAX_LAYERS:
            raise _absurd(key, value, MAX_LAYERS)


def _absurd(name: str, value: int, limit: int) -> ValueError:
    return ValueError(
        f"the source config asks for {name}={value:,}; at most {limit:,} is read. It is damaged."
    )


def _whole_numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Dotted key and value of every whole number in a config's groups."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _whole_numbers(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, int):
        yield key, value
