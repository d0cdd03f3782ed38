"""A model directory: config.json and model.safetensors, read strictly.

Each unique tensor is stored once, whatever the loop count. Nothing is ever unpickled. Run
checkpoints (optimizer, data position, manifest) belong to `training/run_dir.py`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from depthdial.config import ModelConfig
from depthdial.config.model import current_tensor_name
from depthdial.config.text import load_json
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.tensor_header import read_header

CONFIG_FILE = "config.json"
RANDOM_INITIALISERS = (
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.kaiming_uniform_,
    nn.init.normal_,
    nn.init.uniform_,
)
WEIGHTS_FILE = "model.safetensors"
OWN_FORMAT = re.compile(r"(exit_gate|loop_lora)\.|.*\.(mix_gate|value_embedding)\.")
"""Matrices whose products are brought to the format of the hidden states afterwards, or before."""


def save_model(
    model: LoopedLM, folder: str | Path, *, trained_loops: Collection[int] | None = None
) -> None:
    """Write config.json and model.safetensors; each file replaces an old one in one step.

    Equal weights give equal bytes.
    Args: trained_loops: loop counts that training has run; None for those of the model's config.
    Raises: OSError if the disk refuses; an older model in the folder is then untouched.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    config = model.config if trained_loops is None else model.config.with_trained(trained_loops)
    temporary = folder / (CONFIG_FILE + ".tmp")
    try:
        # Both files are complete on disk before either replaces an old one.
        temporary.write_text(config.to_json(), encoding="utf-8")
        write_tensors(tensors, folder / WEIGHTS_FILE)
        os.replace(temporary, folder / CONFIG_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file beside `path`, then rename.

    Raises: OSError if the disk refuses; `path` is then what it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, path)
    except (OSError, safetensors.SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"could not write {path.name}: {error}") from error


def load_model(folder: str | Path, *, device: str = "cpu") -> LoopedLM:
    """Open a model directory.

    Matrices in several number formats are brought to one that holds them all: `used_formats`.

    Raises:
        FileNotFoundError: the folder or one of its two files is missing.
        ValueError: an unknown config key, a damaged file, or tensors that are missing, unknown,
            of another shape or not floating point; the message names them.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder / WEIGHTS_FILE)
    model = empty_model(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    _check_tensors(expected, tensors, folder)
    modules = dict(model.named_modules())
    for name, dtype in used_formats(tensors).items():
        # As `load_state_dict(assign=True)`, which takes half as long as building the model.
        owner, _, last = name.rpartition(".")
        modules[owner].register_parameter(last, nn.Parameter(tensors[name].to(dtype)))
    return model if device == "cpu" else model.to(device)


def in_own_memory(model: LoopedLM) -> LoopedLM:
    """The model with every parameter copied to float32 memory of its own.

    Tensors of a file lie at any multiple of 8 bytes, and matrix products of the same numbers
    differ in the last bit by how their memory is aligned: a resumed run would leave the path of
    the uninterrupted one.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32, copy=True)
    return model


class StoredTensor(Protocol):
    """A tensor, or what a file's header says of one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


def used_formats(tensors: Mapping[str, StoredTensor]) -> dict[str, torch.dtype]:
    """The number format in which a model uses each of its tensors.

    The matrices that meet the hidden states, and their biases, need a common one: where a file
    mixes several it is the narrowest that holds them all, so no value changes. Every other tensor
    has at least that; a wider gain, scale or matrix of OWN_FORMAT keeps its own.
    """
    formats = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(formats.values())) == 1:
        return formats
    meeting = [name for name, tensor in tensors.items() if _meets_states(name, len(tensor.shape))]
    common = reduce(torch.promote_types, {formats[name] for name in meeting})
    return {name: torch.promote_types(dtype, common) for name, dtype in formats.items()}


def _meets_states(name: str, num_dimensions: int) -> bool:
    if OWN_FORMAT.match(name):
        return False
    # The biases of a state update are added in float32.
    return num_dimensions > 1 or (name.endswith(".bias") and not name.startswith("state_update."))


def empty_model(config: ModelConfig) -> LoopedLM:
    """A model of shapes alone, on the meta device: it costs neither memory nor initial values."""
    with torch.device("meta"), _WithoutInitialValues():
        return LoopedLM(config)


class _WithoutInitialValues(TorchFunctionMode):
    """Leaves out random initial values.

    On the meta device they have no effect, but drawing them imports the compiler of torch, which
    takes longer than opening a model.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in RANDOM_INITIALISERS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a model directory.

    Raises: FileNotFoundError; ValueError for keys or values that are wrong, or another project's.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a model directory: it has no {CONFIG_FILE}. Give the folder that "
            "`depthdial train` or `save_model` wrote."
        )
    try:
        return ModelConfig.from_file(path)
    except ValueError:
        model_type = _foreign_model_type(path)
        if model_type is None:
            raise
        raise ValueError(
            f"{path} is that of a published checkpoint (model_type '{model_type}'). A model "
            "directory is made of it by: depthdial import SRC DST."
        ) from None


def _foreign_model_type(path: Path) -> str | None:
    """What another project calls its models in a config.json; None where it is ours or none."""
    try:
        values = load_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    model_type = values.get("model_type") if isinstance(values, dict) else None
    ours = ModelConfig.model_fields["model_type"].default
    return model_type if isinstance(model_type, str) and model_type != ours else None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, mapped: pages that are not changed cost no memory.

    Raises: FileNotFoundError; ValueError if the file is truncated or damaged.
    """
    # Before the file is mapped: its statements about itself may be false.
    read_header(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged or cut short ({error}). Use another checkpoint, or copy it again."
        ) from error
    return {current_tensor_name(name): tensor for name, tensor in tensors.items()}


def _check_tensors(
    expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], folder: Path
) -> None:
    problems = []
    for name in sorted(set(tensors) - set(expected)):
        close = difflib.get_close_matches(name, expected, n=1)
        problems.append(f"unknown tensor '{name}'" + (f" (nearest: '{close[0]}')" if close else ""))
    for name in sorted(set(expected) - set(tensors)):
        problems.append(f"missing tensor '{name}'")
    for name in sorted(set(expected) & set(tensors)):
        if expected[name] != tuple(tensors[name].shape):
            problems.append(
                f"'{name}' has shape {tuple(tensors[name].shape)}, the config asks for "
                f"{expected[name]}"
            )
        elif not tensors[name].is_floating_point():
            problems.append(f"'{name}' is {tensors[name].dtype}, weights are floating point")
    if problems:
        shown = "; ".join(problems[:5])
        raise ValueError(
            f"{folder}: {len(problems)} tensors do not fit the config: {shown}. Config and weights "
            "must come from the same model."
        )
