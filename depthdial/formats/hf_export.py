"""A model folder that transformers opens without this package: `export_hf`.

Config, weights and tokenizer stay as they are; beside them come our own source files, made flat:
every module that the model needs, named by its path, importing the others by one dot. They are
made from the package at export time, so there is no second implementation to keep equal.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from depthdial import __version__
from depthdial.config.model import current_tensor_name
from depthdial.config.text_files import dump_json
from depthdial.data.tokenizer import GENERATION_CONFIG_FILE, TOKENIZER_FILE, Tokenizer, id_list
from depthdial.disk import new_folder
from depthdial.formats.import_export import ExportReport
from depthdial.formats.model_card import CARD_FILE, write_card
from depthdial.formats.source_folder import check_specs
from depthdial.formats.tensors.files import TensorFiles, TensorSpec
from depthdial.formats.text.files import object_or_none
from depthdial.formats.text.tokens import export_tokens, published_tokens
from depthdial.model.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_config,
    read_tensors,
    write_tensors,
)
from depthdial.model.folder import Origin, copy_licences
from depthdial.model.halting import stale_gate

FORMAT = "hf"
"""Name of this format on the command line."""
PACKAGE = "depthdial"
ENTRIES = {
    "depthdial.hf.config": "configuration_depthdial",
    "depthdial.hf.model": "modeling_depthdial",
}
"""Modules that transformers opens itself, under the names that it expects."""
AUTO_MAP = {
    "AutoConfig": "configuration_depthdial.DepthdialConfig",
    "AutoModelForCausalLM": "modeling_depthdial.DepthdialForCausalLM",
}
LIMITS = (
    "Opening it with transformers runs the Python files of this folder (`trust_remote_code=True`); "
    "they need torch, transformers 5.18 to 5.29, pydantic and PyYAML.",
    "Attention weights and input embeddings are not exchanged; gradient checkpointing and "
    "quantisation by transformers are refused.",
)
LOADING = """# pip install torch transformers pydantic pyyaml
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
# The tokenizer needs no code; without this argument transformers asks about the model's.
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
inputs = tokenizer("Once upon a time", return_tensors="pt")
tokens = model.generate(**inputs, num_loops={num_loops}, max_new_tokens=40)
print(tokenizer.decode(tokens[0]))"""


def export_hf(
    folder: str | Path,
    destination: str | Path,
    *,
    overwrite: bool = False,
) -> ExportReport:
    """Write a model folder with the code that opens it.

    Raises: FileNotFoundError; ValueError for a damaged model, or a destination that is taken.
    """
    folder, destination = Path(folder), Path(destination)
    config = read_config(folder)
    origin = Origin.load(folder)
    stored = TensorFiles(folder, only=WEIGHTS_FILE)
    specs = {
        current_tensor_name(name): TensorSpec(e.dtype, e.shape)
        for name, e in stored.entries.items()
    }
    check_specs(config, specs)
    stored.check_all()
    with new_folder(
        destination, kind="an exported model", overwrite=overwrite, apart_from=[folder]
    ) as place:
        if specs.keys() == stored.entries.keys():
            shutil.copyfile(folder / WEIGHTS_FILE, place / WEIGHTS_FILE)
        else:
            write_tensors(read_tensors(folder / WEIGHTS_FILE), place / WEIGHTS_FILE)
        values = config.to_dict() | {"auto_map": AUTO_MAP}
        (place / CONFIG_FILE).write_text(dump_json(values), encoding="utf-8")
        for name, text in code_files().items():
            (place / name).write_text(text, encoding="utf-8")
        notes = (*_write_text(folder, place, origin), *stale_gate(config))
        copy_licences(folder, place)
        write_card(
            place / CARD_FILE,
            folder=folder,
            config=config,
            format_name=FORMAT,
            loading=LOADING.format(name=destination.name, num_loops=config.num_loops),
            limits=(*LIMITS, *notes),
            origin=origin,
        )
        names = tuple(sorted(path.name for path in place.iterdir()))
    return ExportReport(
        folder=destination,
        family=FORMAT,
        files=names,
        num_tensors=len(stored.entries),
        num_bytes=sum(entry.num_bytes for entry in stored.entries.values()),
        as_it_came=False,
        warnings=notes,
    )


def code_files() -> dict[str, str]:
    """File name -> text of every module that the model needs."""
    files, waiting = {}, list(ENTRIES)
    while waiting:
        module = waiting.pop()
        name = f"{_flat_name(module)}.py"
        if name in files:
            continue
        path = _path_of(module)
        files[name], needed = _flattened(path.read_text(encoding="utf-8"), path)
        waiting += needed
    return dict(sorted(files.items()))


def _flattened(source: str, path: Path) -> tuple[str, list[str]]:
    """One module's text with its imports of ours made relative, and the modules it needs."""
    lines, needed = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE]
            assert not ours, f"{path} imports {ours}; only `from ... import ...` can be made flat"
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] != PACKAGE:
            continue
        assert _path_of(node.module).is_file(), f"{path} imports from {node.module}, no module"
        line = lines[node.lineno - 1]
        start = f"from {node.module} import"
        assert start in line, f"{path}:{node.lineno} spells an import in another way"
        lines[node.lineno - 1] = line.replace(start, f"from .{_flat_name(node.module)} import", 1)
        needed.append(node.module)
    relative = path.relative_to(_path_of(PACKAGE).parents[1])
    header = f"# From depthdial {__version__}, {relative.as_posix()}. Licence: Apache-2.0.\n"
    return header + "".join(lines), needed


def _flat_name(module: str) -> str:
    return ENTRIES[module] if module in ENTRIES else module.replace(".", "_")


def _path_of(module: str) -> Path:
    """File of one of our modules; of a package its `__init__.py`."""
    path = Path(__file__).parents[2].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _write_text(folder: Path, place: Path, origin: Origin | None) -> Iterator[str]:
    """Tokenizer files that make transformers open and end a text as the model was trained.

    Yields: a sentence where a stop is written that no file named before.
    """
    export_tokens(folder, place, changed_files=None)
    if not (folder / TOKENIZER_FILE).is_file():
        return
    tokenizer = Tokenizer.from_dir(folder)
    stated = published_tokens(folder, origin)
    stop_ids = tokenizer.stop_ids
    if stated.added_stop is not None:
        stop_ids = tuple(dict.fromkeys((*stop_ids, tokenizer.token_id(stated.added_stop))))
        yield (
            f"{stated.template_in} ends a turn with '{stated.added_stop}', which no file of the "
            f"model named as a stop; {GENERATION_CONFIG_FILE} of this export does."
        )
    target = place / GENERATION_CONFIG_FILE
    generation = object_or_none(target) or {}
    # transformers reads stop tokens from this file only.
    if set(stop_ids) != set(id_list(generation.get("eos_token_id"), str(target))):
        text = dump_json({**generation, "eos_token_id": list(stop_ids)})
        target.write_text(text, encoding="utf-8")
    if tokenizer.opening_ids and not tokenizer.template_ids:
        _add_opening(place / TOKENIZER_FILE, tokenizer.opening_ids)


def _add_opening(path: Path, opening_ids: tuple[int, ...]) -> None:
    """Make the file's own template put these tokens before every text."""
    backend = Backend.from_file(str(path))
    opening = {f"[{i}]": token_id for i, token_id in enumerate(opening_ids)}
    special_tokens = [
        {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
        for name, token_id in opening.items()
    ]
    backend.post_processor = processors.TemplateProcessing(
        single=[*opening, "$A"], pair=[*opening, "$A", "$B"], special_tokens=special_tokens
    )
    path.write_text(backend.to_str(pretty=True), encoding="utf-8")
