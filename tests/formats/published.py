"""Published checkpoint folders for tests: golden cases copied, in shards, with a tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
from goldens import GOLDEN
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|end|>")
WORDS = ("the", "ship", "sailed", "a", "day")
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def copy_golden(name: str, folder: Path) -> Path:
    """Config and weights of a golden case as a checkpoint folder."""
    folder.mkdir()
    for file_name in ("config.json", WEIGHTS):
        shutil.copyfile(GOLDEN / name / file_name, folder / file_name)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes nothing but is written as null."""
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes, indent=2))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Set or (None) remove tensors of a single-file checkpoint; dots are written as `__`."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    tensors = {name: t.clone() for name, t in tensors.items()}
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    safetensors.torch.save_file(tensors, folder / WEIGHTS)


def cut_into_shards(folder: Path, count: int) -> None:
    """Replace model.safetensors by `count` files and an index."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    weight_map = {}
    for number in range(count):
        file_name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name].clone() for name in sorted(tensors)[number::count]}
        safetensors.torch.save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    (folder / WEIGHTS).unlink()
    values = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(values))


def add_tokenizer(folder: Path, *, adds_bos: bool = False, **config: Any) -> None:
    """A word tokenizer of SPECIALS and WORDS. adds_bos: by the template in tokenizer.json."""
    vocab = {token: i for i, token in enumerate((*SPECIALS, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    backend.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config, indent=2))


def hashes(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
