"""Methods without new parameters: loop a core as it is, or tie its layers to fewer ones.

Low-rank differences between the loops of tied layers are in `low_rank.py`.
L layers of a core, B passes, M = L / B tied layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthdial.config import LoopConfig, ModelConfig
from depthdial.convert.base_model import (
    BaseModel,
    Block,
    Converted,
    CoreRange,
    LoopPair,
    check_alike,
    looped_config,
    placed,
)
from depthdial.convert.methods import (
    AnchoredOptions,
    DampedOptions,
    LoopCoreOptions,
    Order,
    Selection,
    TyingOptions,
)

ONE_LOOP = (LoopPair(1, 1),)


def loop_core(base: BaseModel, core_range: CoreRange, options: LoopCoreOptions) -> Converted:
    """Repeat the core's layers as they are; one loop is the base."""
    loop = LoopConfig(update="replace", cache_policy=options.cache_policy)
    return looped(base, core_range, loop=loop, max_loops=options.max_loops)


def damped(base: BaseModel, core_range: CoreRange, options: DampedOptions) -> Converted:
    """x <- (1 - 1/k) x + g(x) / k, k times (arXiv 2605.23872)."""
    loop = LoopConfig(update="damped", cache_policy=options.cache_policy)
    return looped(base, core_range, loop=loop, max_loops=options.max_loops)


def anchored(base: BaseModel, core_range: CoreRange, options: AnchoredOptions) -> Converted:
    """a g(x_0) + (1 - a) times the damped result (arXiv 2605.23872)."""
    loop = LoopConfig(update="anchored", anchor=options.anchor, cache_policy=options.cache_policy)
    return looped(base, core_range, loop=loop, max_loops=options.max_loops)


def tie_layers(base: BaseModel, core_range: CoreRange, options: TyingOptions) -> Converted:
    """M layers in place of L, each run B times (arXiv 2410.20672, 2507.10524)."""
    config, tensors, _ = tied(base, core_range, options)
    count, num_loops = core_range.end - core_range.start, options.num_loops
    return Converted(
        config=config,
        tensors=tensors,
        pairs=(LoopPair(1, num_loops),),
        promises="none",
        why_not=f"{count} distinct layers became {count // num_loops}",
    )


def looped(
    base: BaseModel, core_range: CoreRange, *, loop: LoopConfig, max_loops: int
) -> Converted:
    """The chosen blocks as the core, weights unchanged, under a rule that is exact at one loop."""
    blocks = base.blocks()
    parts = (
        blocks[: core_range.start],
        blocks[core_range.start : core_range.end],
        blocks[core_range.end :],
    )
    config = looped_config(base.config, *parts, loop=loop, max_loops=max_loops)
    return Converted(config, base.other_tensors() | placed(*parts), ONE_LOOP, "bits")


def tied(
    base: BaseModel, core_range: CoreRange, options: TyingOptions
) -> tuple[ModelConfig, dict[str, Tensor], list[list[int]]]:
    """Config and tensors with tied layers, and the base layers that each of them stands for.

    The layers of one tied layer are listed by loop.
    Raises: ValueError if the passes do not divide the core, or its layers differ in kind.
    """
    blocks = base.blocks()
    check_alike(blocks, core_range)
    count, num_loops = core_range.end - core_range.start, options.num_loops
    if count % num_loops:
        raise ValueError(
            f"the core {core_range} has {count} layers, which {num_loops} passes do not divide. "
            f"Choose a core of a multiple of {num_loops} layers, or another num_loops."
        )
    groups = tied_groups(count // num_loops, num_loops, order=options.order)
    inside = blocks[core_range.start : core_range.end]
    core = select(inside, groups, options.selection)
    parts = blocks[: core_range.start], core, blocks[core_range.end :]
    has_segments = options.order == "sequence" and len(core) > 1
    config = looped_config(
        base.config,
        *parts,
        loop=LoopConfig(update="replace"),
        max_loops=num_loops,
        num_loops=num_loops,
        segments=[len(block.layout) for block in core] if has_segments else [],
    )
    sources = [[core_range.start + layer for layer in group] for group in groups]
    return config, base.other_tensors() | placed(*parts), sources


def tied_groups(num_tied: int, num_loops: int, *, order: Order) -> list[list[int]]:
    """Layers of the core that each tied layer stands for, by loop.

    cycle: loop i of tied layer j is layer i M + j; sequence: layer j B + i.
    """
    if order == "cycle":
        return [[i * num_tied + j for i in range(num_loops)] for j in range(num_tied)]
    return [[j * num_loops + i for i in range(num_loops)] for j in range(num_tied)]


def select(
    blocks: Sequence[Block], groups: Sequence[Sequence[int]], selection: Selection
) -> list[Block]:
    """The tied layers.

    stepwise: layers round(linspace(0, L - 1, M)); average: the mean of each group, taken in
    float64; lower: layers 0 to M - 1.
    """
    count = len(groups)
    if selection == "average":
        return [_mean([blocks[layer] for layer in group]) for group in groups]
    if selection == "lower":
        return list(blocks[:count])
    return [blocks[layer] for layer in stepwise_layers(len(blocks), count)]


def stepwise_layers(num_layers: int, count: int) -> list[int]:
    """round(linspace(0, num_layers - 1, count)): the first and the last are kept."""
    places = torch.linspace(0, num_layers - 1, count, dtype=torch.float64)
    return [int(place) for place in places.round()]


def _mean(blocks: Sequence[Block]) -> Block:
    def mean(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).to(torch.float64).mean(dim=0).to(tensors[0].dtype)

    sublayers = zip(*(block.sublayers for block in blocks), strict=True)
    return Block(
        blocks[0].layout,
        tuple(
            {name: mean([sublayer[name] for sublayer in group]) for name in group[0]}
            for group in sublayers
        ),
    )
