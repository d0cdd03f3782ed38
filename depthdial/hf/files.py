"""What a folder's tensors are stored in, and under which config: transformers does not ask.

transformers gives all parameters one number format, that of some tensor of the file; ours keep
several where a file has them (`model/checkpoint.py: used_formats`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from depthdial.config import ModelConfig
from depthdial.config.model import current_tensor_name
from depthdial.config.text_files import read_json_object
from depthdial.hf.config import DepthdialConfig
from depthdial.model.checkpoint import WEIGHTS_FILE, used_formats
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.tensor_header import INDEX_SUFFIX, read_header

HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that say which file is meant."""


def mixed_formats(
    path_or_id: str | os.PathLike[str] | None, arguments: Mapping[str, Any]
) -> dict[str, torch.dtype]:
    """The number format in which each tensor is used, by our names.

    Args: arguments: of `from_pretrained`.
    Returns: empty where the file has one format, where another one is asked for, and where there
        is no such file, which transformers reports.
    Raises: ValueError for a damaged file.
    """
    asked = [arguments.get(key) for key in ("dtype", "torch_dtype")]
    if path_or_id is None or any(dtype not in (None, "auto") for dtype in asked):
        return {}
    entries = {
        current_tensor_name(name): entry
        for file in _weight_files(path_or_id, _place(arguments))
        for name, entry in read_header(file).items()
    }
    return used_formats(entries) if len({entry.dtype for entry in entries.values()}) > 1 else {}


def _weight_files(path_or_id: str | os.PathLike[str], place: dict[str, Any]) -> list[Path]:
    """The file of the weights, or those that its index lists; none where there is neither."""
    whole = _cached(path_or_id, WEIGHTS_FILE, place)
    if whole is not None:
        return [whole]
    index = _cached(path_or_id, WEIGHTS_FILE + INDEX_SUFFIX, place)
    if index is None:
        return []
    names = sorted(set(read_json_object(index)["weight_map"].values()))
    return [file for name in names if (file := _cached(path_or_id, name, place)) is not None]


def _cached(path_or_id: str | os.PathLike[str], name: str, place: dict[str, Any]) -> Path | None:
    try:
        found = cached_file(path_or_id, name, **place)
    except OSError:
        return None
    return None if found is None else Path(found)


def stored_config(
    path_or_id: str | os.PathLike[str] | None, arguments: Mapping[str, Any]
) -> ModelConfig | None:
    """The config beside the weights; None where there is none, and the caller's own is all.

    Args: arguments: of `from_pretrained`.
    """
    if path_or_id is None:
        return None
    try:
        return DepthdialConfig.from_pretrained(path_or_id, **_place(arguments)).looped
    except OSError:
        return None


def _place(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in HUB_ARGUMENTS if key in arguments}


def widest(formats: Mapping[str, torch.dtype]) -> torch.dtype:
    """The narrowest format that holds all of them."""
    return reduce(torch.promote_types, formats.values())


def bring_to(model: LoopedLM, formats: Mapping[str, torch.dtype]) -> None:
    """Give each parameter its own number format."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(formats[name])
