"""Short paths of random steps, and how far their output is from the long path's.

A path of L loops has steps of 1/L; its short path has M < L loops whose steps are multiples of 1/L
and add up to 1. A model conditioned on time and step size is told them; any other model just runs
M loops.
Letters: B rows, T tokens, D model width.
Source: arXiv 2602.11451.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from depthdial.training.random_bits import PATH_STREAM, RANDOM_BITS, random_bits


def short_path(seed: int, *, step: int, draw_idx: int, num_loops: int) -> tuple[int, ...]:
    """Step sizes of a short path, in units of 1 / num_loops; empty for a single loop.

        M ~ U{1 .. L-1};  d_j ~ U{1 .. rest - (M - j)} for j < M;  d_M = rest

    with `rest` what the earlier steps left of L. Early steps come out larger.

    Args: draw_idx: of the depth draw within its step; rows that share one share the path.
    """
    if num_loops == 1:
        return ()
    bits = random_bits(
        seed, stream=PATH_STREAM, step=step, draw_idx=draw_idx, count=max(2, num_loops - 1)
    )
    length = _uniform(bits[0], num_loops - 1)
    path: list[int] = []
    rest = num_loops
    for steps_after in range(length - 1, 0, -1):
        path.append(_uniform(bits[len(path) + 1], rest - steps_after))
        rest -= path[-1]
    return (*path, rest)


def stacked_steps(paths: Sequence[Sequence[int]], totals: Sequence[int]) -> Tensor:
    """Step sizes [B, most loops] in float64, zero after each path's last step."""
    steps_BM = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.float64)
    for row, (path, total) in enumerate(zip(paths, totals, strict=True)):
        steps_BM[row, : len(path)] = torch.tensor(path, dtype=torch.float64) / total
    return steps_BM


def squared_distance(long_BTD: Tensor, short_BTD: Tensor) -> Tensor:
    """Mean over channels of the squared difference, [B, T] fp32; the long path is a constant."""
    # fp32: the difference of two close bf16 vectors keeps few correct bits.
    return (long_BTD.detach().float() - short_BTD.float()).square().mean(dim=-1)


def _uniform(bits: int, count: int) -> int:
    """1..count, equally likely."""
    return 1 + (bits * count >> RANDOM_BITS)
