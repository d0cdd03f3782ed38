"""Which group of loops an entry belongs to, and which entry of each token a loop reads.

The rules themselves are data: `config/policies.py`. An entry is the key and value of one token in
one attention layer of the core.
Letters: B rows, S source tokens, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthdial.cache.slots import Lookup
from depthdial.config import CacheRule


def group_of(rule: CacheRule, loop_idx: int, num_loops_B: Tensor) -> Tensor:
    """Group that a loop writes and reads, for rows that run `num_loops_B` loops [B]."""
    ones_B = torch.ones_like(num_loops_B)
    if rule.count is None:
        return ones_B * loop_idx
    if rule.grouping == "modulo":
        return ones_B * (loop_idx % rule.count)
    if rule.grouping == "stride":
        return ones_B * (loop_idx // rule.count)
    if rule.grouping == "first":
        return ones_B * min(loop_idx, rule.count)
    # The last loop has the highest number whatever the loop count, and all loops before the
    # last `count` share group 0.
    return (loop_idx + 1 + rule.count - num_loops_B).clamp(min=0)


def find_entries(rule: CacheRule, has_GBS: Tensor, groups_B: Tensor, *, ends_B: Tensor) -> Lookup:
    """Which entry of each token a loop reads.

    Args:
        has_GBS: whether a token has an entry in a group, the ones of this pass included.
        groups_B: group of the running loop.
        ends_B: tokens of each row; what stands behind them is neither read nor missed.
    """
    num_groups, _, num_source = has_GBS.shape
    own_BS = groups_B[:, None].expand(-1, num_source)
    is_token_BS = torch.arange(num_source, device=has_GBS.device) < ends_B[:, None]
    lacks_BS = is_token_BS & ~has_GBS.gather(0, own_BS[None])[0]
    reads_BS, missing_BS = own_BS, None
    if bool(lacks_BS.any()):
        assert rule.reads_missing != "refuse", "bind_loops refuses a call that would miss entries"
        if rule.reads_missing == "skip":
            missing_BS = lacks_BS
        else:
            numbers_G11 = torch.arange(num_groups, device=has_GBS.device)[:, None, None]
            readable_GBS = has_GBS
            if rule.reads_missing == "latest":
                readable_GBS = has_GBS & (numbers_G11 <= own_BS)
            newest_BS = torch.where(readable_GBS, numbers_G11, -1).amax(dim=0)
            applies_BS = is_token_BS & lacks_BS.any(dim=1, keepdim=True)
            reads_BS = torch.where(applies_BS, newest_BS, own_BS)
    return Lookup(
        writes_B=groups_B,
        reads_BS=reads_BS,
        targets=tuple(groups_B.unique().tolist()),
        sources=tuple(reads_BS.unique().tolist()),
        missing_BS=missing_BS,
    )
