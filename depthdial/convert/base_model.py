"""A base model taken apart into blocks, and blocks put together under another split.

A block is a token mixer with what follows it up to the next one: what published models call a
layer. Methods that decide which block goes where are in `tying.py`, `low_rank.py`, `grafts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from depthdial.config import LETTERS, LoopConfig, ModelConfig, shortest_pattern
from depthdial.formats.families.decoder_layers import sublayer_name
from depthdial.formats.families.family import loop_traces

STACKS = ("prelude_stack.", "core_stack.", "coda_stack.")
VALUE_EMBEDDING = "mixer.value_embedding.weight"


class CoreRange(NamedTuple):
    """Blocks [start, end) of a base model."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"


class Block(NamedTuple):
    """One block: its letters, and the tensors of each of its sublayers by the name within it."""

    layout: str
    sublayers: tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class BaseModel:
    """The model to convert: config, and its tensors as in `state_dict`."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]

    def blocks(self) -> list[Block]:
        """All physical blocks, bottom to top."""
        return [
            Block(
                self.config.sublayers[places.start : places.stop],
                tuple(self._sublayer(place) for place in places),
            )
            for places in block_places(self.config)
        ]

    def other_tensors(self) -> dict[str, Tensor]:
        """Tensors that are in no block: embeddings, final norm, head."""
        return {name: t for name, t in self.tensors.items() if not name.startswith(STACKS)}

    def _sublayer(self, place: int) -> dict[str, Tensor]:
        prefix = sublayer_name(self.config, place) + "."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


class LoopPair(NamedTuple):
    """Loop counts at which base and result are compared."""

    base: int
    result: int


@dataclass(frozen=True)
class Converted:
    """What a method decided.

    Fields:
        config: of the result.
        tensors: of the result; parameters that are left out start at their usual initial values.
        pairs: loop counts to compare at; the layers are compared at the first one.
        promises: `bits`: equal bit for bit at every pair; `close`: within 1e-4; `none`.
        why_not: why nothing is promised; empty otherwise.
        matching: base block, in the order of execution, that each executed block of the result
            stands for; None where they correspond one to one.
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    pairs: tuple[LoopPair, ...]
    promises: Literal["bits", "close", "none"]
    why_not: str = ""
    matching: tuple[int, ...] | None = None

    def trained_loops(self, base: ModelConfig) -> set[int]:
        """Loop counts of the result that are what training of the base has run.

        Where nothing is promised there are none. Where several loop counts equal one of the base,
        only the first one counts: the others run loops that no training has run.
        """
        if self.promises == "none":
            return set()
        first = {pair.base: pair.result for pair in reversed(self.pairs)}
        return {first.get(k, k) for k in base.trained_at}


def block_places(config: ModelConfig) -> list[range]:
    """Physical sublayers of each block, counted from the bottom."""
    letters = config.sublayers
    starts = [i for i, letter in enumerate(letters) if LETTERS[letter].mixes_tokens and i]
    bounds = [0, *starts, len(letters)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def check_dense(config: ModelConfig) -> None:
    """Refuse a model whose split means something already. Raises: ValueError."""
    wrong = loop_traces(config)
    if wrong:
        raise ValueError(
            "a core is chosen in a dense model, one that runs its layers once, but the base has "
            f"{'; '.join(wrong)}. Give a dense model, or the method elastic-fixed to a model that "
            "loops already."
        )


def read_core_range(text: str, num_blocks: int) -> CoreRange:
    """A core from `a:b`. Raises: ValueError with what is allowed."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    core_range = CoreRange(int(match[1]), int(match[2])) if match else None
    if core_range is None or not core_range.start < core_range.end <= num_blocks:
        raise ValueError(
            f"core '{text}' is no core of this base. Give a:b, the first layer and the one after "
            f"the last, counted from 0, with a < b <= {num_blocks}."
        )
    return core_range


def looped_config(
    config: ModelConfig,
    prelude: Sequence[Block],
    core: Sequence[Block],
    coda: Sequence[Block],
    *,
    loop: LoopConfig,
    max_loops: int,
    **changes: Any,
) -> ModelConfig:
    """The config of a model that loops `core` between the two others.

    Args: config: of the base; loop, max_loops: of the result; changes: more fields of it.
    Raises: ValueError where MLPs of a part have several widths.
    """
    split = [sum(len(block.layout) for block in part) for part in (prelude, core, coda)]
    blocks = [*prelude, *core, *coda]
    outer_width = _width([*prelude, *coda]) or _width(core)
    core_width = _width(core)
    values = config.to_dict() | {
        "layout": shortest_pattern("".join(block.layout for block in blocks)),
        "split": split,
        "d_ff": outer_width or config.d_ff,
        "core_d_ff": core_width if core_width != outer_width else None,
        "value_embeddings": _value_embeddings(blocks),
        "loop": loop.to_dict(),
        "max_loops": max_loops,
        **changes,
    }
    return ModelConfig.from_dict(values)


def placed(
    prelude: Sequence[Block], core: Sequence[Block], coda: Sequence[Block]
) -> dict[str, Tensor]:
    """The blocks' tensors under the names that they have in a model of these three parts."""
    tensors = {}
    for stack, blocks in zip(STACKS, (prelude, core, coda), strict=True):
        sublayers = [sublayer for block in blocks for sublayer in block.sublayers]
        for place, sublayer in enumerate(sublayers):
            tensors |= {f"{stack}{place}.{name}": tensor for name, tensor in sublayer.items()}
    return tensors


def check_alike(blocks: Sequence[Block], core_range: CoreRange) -> None:
    """Blocks that are to share weights have equal shapes. Raises: ValueError naming two of them."""
    for number, block in enumerate(
        blocks[core_range.start : core_range.end], start=core_range.start
    ):
        if _shapes(block) != _shapes(blocks[core_range.start]):
            raise ValueError(
                f"layers {core_range.start} ({blocks[core_range.start].layout}) and {number} "
                f"({block.layout}) of the core differ in kind or size, so they cannot share "
                "weights. Choose a core of equal layers."
            )


def _shapes(block: Block) -> tuple[Any, ...]:
    sizes = [{name: t.shape for name, t in sublayer.items()} for sublayer in block.sublayers]
    return block.layout, sizes


def _width(blocks: Sequence[Block]) -> int | None:
    """Hidden width of the MLPs of some blocks; None where there is none."""
    widths = {
        sublayer["mixer.down_proj.weight"].shape[1]
        for block in blocks
        for letter, sublayer in zip(block.layout, block.sublayers, strict=True)
        if "core_d_ff" in LETTERS[letter].reads
    }
    if len(widths) > 1:
        raise ValueError(
            f"the MLPs of this base have the widths {sorted(widths)}, and core or surroundings "
            "would mix them. Choose a core that holds all layers of one width."
        )
    return next(iter(widths), None)


def _value_embeddings(blocks: Sequence[Block]) -> list[int]:
    """Attention layers, from the bottom, that have a value embedding."""
    attention = [
        sublayer
        for block in blocks
        for letter, sublayer in zip(block.layout, block.sublayers, strict=True)
        if LETTERS[letter].slot == "keys"
    ]
    return [idx for idx, sublayer in enumerate(attention) if VALUE_EMBEDDING in sublayer]
