"""How many times the core runs, and for which rows of a batch.

The whole core loops as one segment; schedules of several segments belong here too. The number
of loops is checked here, once, for every caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from depthdial.config import ModelConfig

NumLoops = int | Tensor


def check_num_loops(
    num_loops: NumLoops, *, batch_size: int | None = None, max_loops: int | None = None
) -> NumLoops:
    """Refuse anything but an int >= 1 or a CPU LongTensor [B] of them.

    Args: max_loops: the largest allowed; None allows any.
    Raises: ValueError with what was given and what is allowed.
    """
    allowed = "an int >= 1, or a CPU int64 tensor [B] of such ints"
    if isinstance(num_loops, Tensor):
        is_right = num_loops.dtype == torch.int64 and num_loops.device.type == "cpu"
        if not is_right or num_loops.ndim != 1 or num_loops.numel() == 0:
            raise ValueError(
                f"num_loops is a {num_loops.dtype} tensor of shape {tuple(num_loops.shape)} on "
                f"{num_loops.device}; give {allowed}."
            )
        if batch_size is not None and num_loops.shape[0] != batch_size:
            raise ValueError(
                f"num_loops has {num_loops.shape[0]} entries for a batch of {batch_size} rows; "
                "give one int, or one entry per row."
            )
        lowest, highest = int(num_loops.min()), int(num_loops.max())
    elif isinstance(num_loops, int) and not isinstance(num_loops, bool):
        lowest = highest = num_loops
    else:
        raise ValueError(
            f"num_loops is {num_loops!r} ({type(num_loops).__name__}); give {allowed}."
        )
    if lowest < 1:
        raise ValueError(f"num_loops={lowest} is not allowed; give {allowed}.")
    if max_loops is not None and highest > max_loops:
        raise ValueError(
            f"num_loops={highest} exceeds max_loops={max_loops}, the largest depth seen in "
            "training. Ask for fewer loops; sweeps measure more. A model whose config says "
            "loop.beyond_max_loops 'extrapolate' allows it."
        )
    return num_loops


def allowed_num_loops(config: ModelConfig, num_loops: NumLoops, *, batch_size: int) -> NumLoops:
    """`check_num_loops` with the model's own rule about depths beyond training."""
    limit = config.max_loops if config.loop.beyond_max_loops == "refuse" else None
    return check_num_loops(num_loops, batch_size=batch_size, max_loops=limit)


@dataclass(frozen=True)
class LoopVisit:
    """One pass of the core over the rows that still loop.

    Fields:
        loop_idx: 0-based; num_loops: of these rows (an int, or one entry per row).
        rows: user-order rows, deepest first; None for the whole batch in user order.
        num_leaving: rows at the end of `rows` (the shallowest) that leave after this pass.
    """

    loop_idx: int
    num_loops: NumLoops
    rows: Tensor | None
    num_leaving: int


def visits(num_loops: NumLoops, batch_size: int) -> Iterator[LoopVisit]:
    """Passes of the core for one forward. Rows of a mixed batch are sorted, deepest first, so
    that the rows that leave are always the last ones and active rows stay a prefix.
    """
    if isinstance(num_loops, int):
        for loop_idx in range(num_loops):
            leaving = batch_size if loop_idx == num_loops - 1 else 0
            yield LoopVisit(loop_idx, num_loops, None, leaving)
        return
    order = torch.argsort(num_loops, descending=True, stable=True)
    depths = num_loops[order]
    for loop_idx in range(int(depths[0])):
        num_active = int((depths > loop_idx).sum())
        num_staying = int((depths > loop_idx + 1).sum())
        yield LoopVisit(loop_idx, depths[:num_active], order[:num_active], num_active - num_staying)
