"""How many times the core runs, and for which rows of a batch.

The number of loops is checked here, once, for every caller; caches and models read it alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthdial.config import ModelConfig
from depthdial.config.limits import MAX_LOOPS

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
    if highest > MAX_LOOPS:
        raise ValueError(f"num_loops={highest:,} is not allowed; at most {MAX_LOOPS:,} loops run.")
    if max_loops is not None and highest > max_loops:
        raise ValueError(
            f"num_loops={highest} exceeds max_loops={max_loops}, the most that this model is made "
            "for. Ask for fewer loops; sweeps measure more. A model whose config says "
            "loop.beyond_max_loops 'extrapolate' allows it."
        )
    return num_loops


def allowed_num_loops(config: ModelConfig, num_loops: NumLoops, *, batch_size: int) -> NumLoops:
    """`check_num_loops` with the model's own rule about loop counts beyond max_loops."""
    limit = config.max_loops if config.loop.beyond_max_loops == "refuse" else None
    return check_num_loops(num_loops, batch_size=batch_size, max_loops=limit)


class ActiveRows:
    """Rows of a batch that still loop, deepest first.

    Sorted by depth, the rows whose loops are done are always the last ones, and active rows stay
    a prefix. While every row runs one common int of loops and none stops early, `rows` is None.
    """

    def __init__(self, num_loops: NumLoops, batch_size: int) -> None:
        self.num_rows = batch_size
        self.rows: Tensor | None = None
        self.num_loops = num_loops
        if isinstance(num_loops, Tensor):
            self.rows = torch.argsort(num_loops, descending=True, stable=True)
            self.num_loops = num_loops[self.rows]

    def num_leaving(self, loop_idx: int) -> int:
        """Rows at the end whose last pass is `loop_idx`."""
        if isinstance(self.num_loops, int):
            return self.num_rows if loop_idx == self.num_loops - 1 else 0
        return int((self.num_loops == loop_idx + 1).sum())

    def after(self, loop_idx: int, keep: Tensor | None) -> Tensor | slice | None:
        """Drop the rows that are done after pass `loop_idx`, and those that `keep` says stop.

        Args: keep: bool per active row; None keeps all.
        Returns: places of the rows that stay, among those that were active; a slice where these
            are a prefix, which costs no copy of the index; None if all stay.
        """
        num_staying = self.num_rows - self.num_leaving(loop_idx)
        if keep is None:
            if num_staying == self.num_rows:
                return None
            self._keep(torch.arange(num_staying))
            return slice(0, num_staying)
        stays = keep.cpu().clone()
        stays[num_staying:] = False
        places = stays.nonzero()[:, 0]
        if len(places) == self.num_rows:
            return None
        self._keep(places)
        return places

    def _keep(self, places: Tensor) -> None:
        self.rows = places if self.rows is None else self.rows[places]
        if isinstance(self.num_loops, Tensor):
            self.num_loops = self.num_loops[places]
        self.num_rows = len(places)
