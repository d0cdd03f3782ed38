"""GGUF files of llama-type models, read as if they were published checkpoint folders.

The header's keys become a config.json of the Llama format, its tensors are dequantised one at a
time and turned to half-split rotation. The tokenizer is in `tokens.py`.
Letters: H heads, C channels per head.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from depthdial.formats.gguf.header import (
    TOKENIZER_PREFIX,
    GgufHeader,
    GgufTensor,
    read_gguf_header,
)
from depthdial.formats.gguf.tokens import special_ids
from depthdial.formats.tensors.files import check_numbers

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"
ARCHITECTURE = "llama"
CHUNK_VALUES = 1 << 24
"""Values dequantised together: memory holds one tensor and this many values more."""
SPLIT_PREFIX = "split."
IGNORED_PREFIXES = ("general.", TOKENIZER_PREFIX, "quantize.", SPLIT_PREFIX)
"""Descriptions, the tokenizer (read elsewhere), how the file was quantised, and which part of a
split file it is (compared apart)."""
PART_NAME = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<of>\d{5})")
"""Name of one part of a split file, without its suffix."""
CONFIG_KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""Key of the header after `llama.` -> key of config.json."""
NEEDED_KEYS = tuple(
    key for key in CONFIG_KEYS if key not in ("attention.head_count_kv", "attention.key_length")
)
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of the header -> names of the Llama format, each followed by `.weight` or `.bias`."""


class GgufFile:
    """One GGUF file by the tensor names of the Llama format.

    Args: dtype: of the tensors that `get` returns.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        """Raises: FileNotFoundError; ValueError naming what is damaged or not read here."""
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}.")
        self.path, self.dtype = path, dtype
        self.folder, self.file_names = path.parent, [path.name]
        header = read_gguf_header(path)
        self.header = header.values
        _check_whole(header.values, path)
        self.values = _config_values(header)
        self.entries: dict[str, GgufTensor] = {}
        self.kinds: dict[str, GGMLQuantizationType] = {}
        for name, entry in header.tensors.items():
            ours = _llama_name(name, path)
            self.entries[ours] = entry
            self.kinds[ours] = _kind_of(name, entry, path=path, file_bytes=header.file_bytes)

    def get(self, name: str) -> Tensor:
        """One tensor, dequantised. Raises: ValueError for numbers that are not finite."""
        import numpy as np
        from gguf import dequantize
        from gguf.quants import quant_shape_to_byte_shape

        entry, kind = self.entries[name], self.kinds[name]
        rows, width = torch.Size(entry.shape[:-1]).numel(), entry.shape[-1]
        row_bytes = quant_shape_to_byte_shape((1, width), kind)[-1]
        stored = np.memmap(self.path, mode="r", offset=entry.start, shape=(rows, row_bytes))
        tensor = torch.empty(rows, width, dtype=self.dtype)
        step = max(1, CHUNK_VALUES // width)
        for row in range(0, rows, step):
            values = dequantize(np.array(stored[row : row + step]), kind)
            tensor[row : row + step] = torch.from_numpy(values.reshape(-1, width))
        tensor = self._half_split(name, tensor.reshape(entry.shape))
        check_numbers(name, tensor, self.path)
        return tensor

    def shape_only(self, name: str) -> Tensor:
        """Shape and dtype of one tensor, without its data."""
        return torch.empty(self.entries[name].shape, dtype=self.dtype, device="meta")

    @property
    def num_values(self) -> int:
        """Numbers in all tensors."""
        return sum(torch.Size(entry.shape).numel() for entry in self.entries.values())

    def _half_split(self, name: str, tensor: Tensor) -> Tensor:
        """Undo GGUF's order of query and key channels.

        Stored are pairs (2j, 2j + 1) that turn together; ours turn j with j + C/2.
        """
        heads = {
            "q_proj": self.values["num_attention_heads"],
            "k_proj": self.values["num_key_value_heads"],
        }.get(name.split(".")[-2])
        if heads is None:
            return tensor
        if tensor.shape[0] % (2 * heads):
            raise ValueError(f"{self.path}: '{name}' has {tensor.shape[0]} rows for {heads} heads.")
        pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def find_gguf(source: Path) -> Path | None:
    """The GGUF file that a path is or holds; None for anything else. The suffix may be written in
    capitals.

    Raises: ValueError for a folder with several.
    """
    if source.suffix.lower() == SUFFIX:
        return source
    if not source.is_dir() or (source / "config.json").is_file():
        return None
    found = sorted(path for path in source.iterdir() if path.suffix.lower() == SUFFIX)
    if len(found) > 1:
        parts = [PART_NAME.fullmatch(path.stem) for path in found]
        if all(parts) and len({part["model"] for part in parts if part}) == 1:
            raise ValueError(
                _join_parts(f"{source} has {len(found)} parts of one GGUF file", found[0])
            )
        raise ValueError(
            f"{source} has {len(found)} GGUF files: {', '.join(path.name for path in found[:5])}. "
            "Give the one to import."
        )
    return found[0] if found else None


def _check_whole(values: Mapping[str, Any], path: Path) -> None:
    """Raises: ValueError for one part of a file that was split."""
    count = values.get(f"{SPLIT_PREFIX}count", 1)
    if count not in (0, 1):
        number = values.get(f"{SPLIT_PREFIX}no", 0)
        shown = number + 1 if isinstance(number, int) else "one"
        raise ValueError(_join_parts(f"{path} is part {shown} of the {count} of a GGUF file", path))


def _join_parts(found: str, part: Path) -> str:
    """What to do about a split file. Args: found: what was given; part: one of its files."""
    name = PART_NAME.fullmatch(part.stem)
    stem, of = (name["model"], name["of"]) if name else (part.stem, "")
    first = f"{stem}-00001-of-{of}{part.suffix}" if of else "FIRST_PART"
    whole = f"{stem}{part.suffix}" if of else f"{stem}-whole{part.suffix}"
    return (
        f"{found}; only whole files are read. Join the parts (llama.cpp: llama-gguf-split --merge "
        f"{first} {whole}) and import the result, or import the model's safetensors version."
    )


def _config_values(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the Llama format that a header means.

    Raises: ValueError for another architecture, a missing key, or one that has no meaning here.
    """
    values, tensors = header.values, header.tensors
    architecture = values.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"this GGUF file holds a model of the architecture {architecture!r}; only "
            f"{ARCHITECTURE!r} is read. Import the model's safetensors version."
        )
    prefix = f"{ARCHITECTURE}."
    given = {key.removeprefix(prefix): x for key, x in values.items() if key.startswith(prefix)}
    strange = [key for key in values if not key.startswith((prefix, *IGNORED_PREFIXES))]
    rotating, value_length = (
        given.pop("rope.dimension_count", None),
        given.pop("attention.value_length", None),
    )
    strange += [prefix + key for key in given if key not in CONFIG_KEYS]
    if strange:
        raise ValueError(
            f"{len(strange)} keys of the GGUF header have no known meaning, so the model would not "
            f"be the published one: {', '.join(sorted(strange))}."
        )
    wrong = [key for key, x in given.items() if type(x) not in (int, float)]
    if wrong:
        raise ValueError(f"the GGUF header has no number for {prefix}{wrong[0]}; it is not read.")
    if "token_embd.weight" in tensors:
        given.setdefault("vocab_size", tensors["token_embd.weight"].shape[0])
    given.setdefault("rope.freq_base", 10_000.0)
    missing = [prefix + key for key in NEEDED_KEYS if key not in given]
    if missing:
        raise ValueError(f"the GGUF header lacks {', '.join(missing)}; the file is damaged.")
    config = {
        CONFIG_KEYS[key]: _shortest(x) if isinstance(x, float) else x for key, x in given.items()
    }
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"the GGUF header states {heads!r} attention heads; it is damaged.")
    config.setdefault("head_dim", config["hidden_size"] // heads)
    for what, size in (
        ("rope.dimension_count", rotating),
        ("attention.value_length", value_length),
    ):
        if size is not None and size != config["head_dim"]:
            raise ValueError(
                f"the GGUF header has {prefix}{what}={size}, but heads of {config['head_dim']} "
                "channels; only equal sizes are read."
            )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        **config,
        **special_ids(values, config["vocab_size"]),
    }


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF stores 1e-5 as the nearest 32-bit float."""
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if struct.pack("<f", rounded) == struct.pack("<f", value):
            return rounded
    return value


def _llama_name(name: str, path: Path) -> str:
    """Name of a tensor in the Llama format. Raises: ValueError for one without a meaning."""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in TENSOR_NAMES:
            return f"{TENSOR_NAMES[stem]}.{kind}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal():
            if parts[2] in BLOCK_NAMES:
                return f"model.layers.{int(parts[1])}.{BLOCK_NAMES[parts[2]]}.{kind}"
    hint = (
        " These are rotary factors for a longer context, which GGUF gives without their rule."
        if name == "rope_freqs.weight"
        else ""
    )
    raise ValueError(
        f"{path}: tensor '{name}' has no known meaning in a llama-type model.{hint} Import the "
        "model's safetensors version."
    )


def _kind_of(name: str, entry: GgufTensor, *, path: Path, file_bytes: int) -> GGMLQuantizationType:
    """Number format of a tensor, its place within the file.

    Raises: ValueError; ImportError with the way to install `gguf`.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ImportError(
            "reading GGUF files needs the package `gguf`: pip install 'depthdial[gguf]'."
        ) from error
    try:
        kind = GGMLQuantizationType(entry.kind)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(
            f"{path}: tensor '{name}' has the number format {entry.kind}, which the installed "
            "`gguf` package does not know."
        ) from None
    values = 1
    for size in entry.shape:
        values *= size
    needed = values // block_values * block_bytes
    if not values or entry.shape[-1] % block_values or entry.start + needed > file_bytes:
        raise ValueError(
            f"{path} is damaged or cut short: tensor '{name}' of shape {list(entry.shape)} in "
            f"{kind.name} does not fit into its {file_bytes:,} bytes. Copy it again."
        )
    return kind
