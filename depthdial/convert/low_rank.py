"""Methods that store low-rank differences of the core's matrices by loop.

`relaxed-recursive` finds them by truncated SVD between tied layers and the layers that they stand
for; `later-deltas` and `joint-deltas` start them at zero beside an untouched core.
Letters: I inputs, O outputs, R low rank, N stored sets. B passes over tied layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from depthdial.config import LoopConfig, LoopLoraConfig
from depthdial.convert.base_model import BaseModel, Converted, CoreRange, LoopPair
from depthdial.convert.methods import DeltaOptions, RelaxedOptions
from depthdial.convert.tying import looped, tied

NORMS = ("norm.weight", "post_norm.weight", "mixer.q_norm.weight", "mixer.k_norm.weight")
Sublayer = Mapping[str, Tensor]


def relaxed_recursive(base: BaseModel, core_range: CoreRange, options: RelaxedOptions) -> Converted:
    """Tied layers W' with W_l - W' of every loop cut to rank R (arXiv 2410.20672), scale 1."""
    config, tensors, sources = tied(base, core_range, options)
    shared = core_sublayers(tensors, config.split[1])
    wanted = _wanted_sublayers(base, sources)
    full = _full_rank(shared)
    rank = full if options.rank == "full" else options.rank
    _check_rank(rank, full)
    has_norms = options.norms == "own"
    deltas = LoopLoraConfig(
        rank=rank, sets_by_loop=tuple(range(options.num_loops)), norms=has_norms
    )
    config = config.replace(loop_lora=deltas)
    for place, (tied_layer, by_loop) in enumerate(zip(shared, wanted, strict=True)):
        tensors |= _svd_sets(f"loop_lora.sublayers.{place}", tied_layer, by_loop, rank=rank)
        if has_norms:
            tensors |= _norm_sets(place, by_loop)
    left = _uncovered(shared, wanted, has_norms=has_norms)
    why_not = ""
    if rank < full:
        why_not = f"rank {rank} of {full} keeps a part of the differences"
    elif left:
        why_not = f"loops share {', '.join(left)}, which the layers had for themselves"
    promises = "none" if why_not else "close"
    pairs = (LoopPair(1, options.num_loops),)
    return Converted(config, tensors, pairs, promises, why_not=why_not)


def later_deltas(base: BaseModel, core_range: CoreRange, options: DeltaOptions) -> Converted:
    """Pass 1 is the base's core; later passes have differences of their own and a rate."""
    return _with_sets(base, core_range, options, sets_by_loop=(-1, 0))


def joint_deltas(base: BaseModel, core_range: CoreRange, options: DeltaOptions) -> Converted:
    """One set of differences for pass 1, one for the later passes, and a rate for these."""
    return _with_sets(base, core_range, options, sets_by_loop=(0, 1))


def truncated_svd(difference_OI: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """down [R, I] = V^T and up [O, R] = U S of the best rank-R approximation, in float32.

    Ranks beyond those of the matrix are filled with zeros.
    """
    # float64: at the cut, neighbouring singular values may agree in several digits.
    u, s, v = torch.linalg.svd(difference_OI.to(torch.float64), full_matrices=False)
    kept = min(rank, len(s))
    down_RI = difference_OI.new_zeros(rank, v.shape[1], dtype=torch.float32)
    up_OR = difference_OI.new_zeros(u.shape[0], rank, dtype=torch.float32)
    down_RI[:kept] = v[:kept].to(torch.float32)
    up_OR[:, :kept] = (u[:, :kept] * s[:kept]).to(torch.float32)
    return down_RI, up_OR


def core_sublayers(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Tensors of each core sublayer by the name within it."""
    prefixes = [f"core_stack.{place}." for place in range(count)]
    return [
        {name.removeprefix(p): tensor for name, tensor in tensors.items() if name.startswith(p)}
        for p in prefixes
    ]


def is_matrix(name: str) -> bool:
    """Whether a tensor of a sublayer gets low-rank differences."""
    return name.startswith("mixer.") and name.endswith("_proj.weight")


def copied_norms(sublayers: Sequence[Sublayer], num_sets: int) -> dict[str, Tensor]:
    """Stored norm gains of the core: every set starts with those of the sublayers."""
    gains: dict[str, Tensor] = {}
    for place, sublayer in enumerate(sublayers):
        gains |= _norm_sets(place, [sublayer] * num_sets)
    return gains


def _with_sets(
    base: BaseModel, core_range: CoreRange, options: DeltaOptions, *, sets_by_loop: tuple[int, ...]
) -> Converted:
    loop = LoopConfig(update="delta", delta_init=options.rate, gate_bypass="first_only")
    converted = looped(base, core_range, loop=loop, max_loops=options.max_loops)
    has_norms = options.norms == "own"
    deltas = LoopLoraConfig(rank=options.rank, sets_by_loop=sets_by_loop, norms=has_norms)
    tensors = dict(converted.tensors)
    sublayers = core_sublayers(tensors, converted.config.split[1])
    _check_rank(options.rank, _full_rank(sublayers))
    if has_norms:
        tensors |= copied_norms(sublayers, deltas.num_sets)
    return Converted(
        converted.config.replace(loop_lora=deltas), tensors, converted.pairs, converted.promises
    )


def _wanted_sublayers(
    base: BaseModel, sources: Sequence[Sequence[int]]
) -> list[list[dict[str, Tensor]]]:
    """For each core sublayer: the base's sublayers that its loops stand for."""
    blocks = base.blocks()
    return [
        list(by_loop)
        for layers in sources
        for by_loop in zip(*(blocks[layer].sublayers for layer in layers), strict=True)
    ]


def _full_rank(sublayers: Sequence[Sublayer]) -> int:
    """The largest rank that a matrix of these sublayers can have."""
    return max(min(shape) for sublayer in sublayers for shape in _matrix_shapes(sublayer))


def _check_rank(rank: int, full: int) -> None:
    if rank > full:
        raise ValueError(
            f"rank={rank} exceeds {full}, the full rank of these matrices; give at most {full}."
        )


def _matrix_shapes(sublayer: Sublayer) -> list[torch.Size]:
    return [tensor.shape for name, tensor in sublayer.items() if is_matrix(name)]


def _svd_sets(
    prefix: str, shared: Sublayer, by_loop: Sequence[Sublayer], *, rank: int
) -> dict[str, Tensor]:
    """Stored low-rank pairs of one sublayer, one set per loop."""
    tensors = {}
    for name in filter(is_matrix, shared):
        wide = shared[name].to(torch.float64)
        pairs = [
            truncated_svd(sublayer[name].to(torch.float64) - wide, rank) for sublayer in by_loop
        ]
        linear = name.removeprefix("mixer.").removesuffix(".weight")
        tensors[f"{prefix}.{linear}.down"] = torch.stack([down for down, _ in pairs])
        tensors[f"{prefix}.{linear}.up"] = torch.stack([up for _, up in pairs])
    return tensors


def _norm_sets(place: int, by_loop: Sequence[Sublayer]) -> dict[str, Tensor]:
    prefix = f"loop_lora.sublayers.{place}."
    return {
        prefix + name.split(".")[-2]: torch.stack([sublayer[name] for sublayer in by_loop])
        for name in NORMS
        if name in by_loop[0]
    }


def _uncovered(
    shared: Sequence[Sublayer], wanted: Sequence[Sequence[Sublayer]], *, has_norms: bool
) -> list[str]:
    """Tensors that differ between a loop and the tied layer and that no difference covers."""
    left = {
        name
        for tied_layer, by_loop in zip(shared, wanted, strict=True)
        for name, tensor in tied_layer.items()
        if not is_matrix(name) and not (has_norms and name in NORMS)
        if any(not torch.equal(sublayer[name], tensor) for sublayer in by_loop)
    }
    return sorted(left)
