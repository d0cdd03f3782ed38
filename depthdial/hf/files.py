"""What a folder's tensors are stored in, which transformers does not ask.

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

from depthdial.config.model import current_tensor_name
from depthdial.model.checkpoint import WEIGHTS_FILE, used_formats
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.tensor_header import read_header

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
    place = {key: arguments[key] for key in HUB_ARGUMENTS if key in arguments}
    try:
        found = cached_file(path_or_id, WEIGHTS_FILE, **place)
    except OSError:
        return {}
    if found is None:
        return {}
    entries = {current_tensor_name(name): e for name, e in read_header(Path(found)).items()}
    return used_formats(entries) if len({entry.dtype for entry in entries.values()}) > 1 else {}


def widest(formats: Mapping[str, torch.dtype]) -> torch.dtype:
    """The narrowest format that holds all of them."""
    return reduce(torch.promote_types, formats.values())


def bring_to(model: LoopedLM, formats: Mapping[str, torch.dtype]) -> None:
    """Give each parameter its own number format."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(formats[name])
