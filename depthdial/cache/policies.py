"""What the name of a cache policy means: which loops' entries stay, and who reads them.

A policy either keeps the entries of several loops, in numbered groups, or one entry per token;
`cache/contiguous.py` stores them and `cache.py` counts them. An entry is the key and value of
one token in one attention layer of the core.
Letters: B rows, S source tokens, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from depthdial.cache.slots import Lookup
from depthdial.config import (
    PUBLISHED_POLICY,
    ModelConfig,
    check_cache_policy,
    count_slots,
    policy_obstacle,
)

Kept = Literal["last", "first", "mean", "stash", "shared"]
"""The one entry that stays: the last loop's, the first loop's, the mean over the loops, that of
an extra pass after them; or the first loop's, which the other loops read for every token."""
Grouping = Literal["loop", "modulo", "stride", "first", "last"]
Missing = Literal["refuse", "latest", "newest", "skip"]
"""What a loop reads of a token without an entry in its group: such calls are refused; the newest
entry up to this loop; of every token its newest entry of all, as soon as one token of the row
lacks an entry; or nothing, the token is left out."""


ANCHOR_LOOPS = 8
"""Loops that keep their own entries under compress-anchor; those after them share one."""


@dataclass(frozen=True)
class CacheRule:
    """Meaning of a policy.

    Fields:
        kept: the one entry per token that stays; None where groups of loops stay.
        kept_after_prompt: `kept` holds from `end_prompt` on, and each loop keeps its own before.
        grouping: how loops share entries; within a group the last writer wins.
        count: number that goes with the grouping: groups for `modulo`, loops per group for
            `stride`, loops with a group of their own for `first` and `last`; None for `loop`.
        missing: see `Missing`.
    """

    kept: Kept | None = None
    kept_after_prompt: bool = False
    grouping: Grouping = "loop"
    count: int | None = None
    missing: Missing = "refuse"

    @property
    def looks_up(self) -> bool:
        """Whether the buffer that is read can differ from token to token, or row to row."""
        return self.grouping != "loop" or self.missing != "refuse"

    @property
    def counts_from_last(self) -> bool:
        """Whether a loop's group depends on how many loops there are to be."""
        return self.grouping == "last"

    def group(self, loop_idx: int, num_loops_B: Tensor) -> Tensor:
        """Group that a loop writes and reads, for rows that run `num_loops_B` loops [B]."""
        ones_B = torch.ones_like(num_loops_B)
        if self.count is None:
            return ones_B * loop_idx
        if self.grouping == "modulo":
            return ones_B * (loop_idx % self.count)
        if self.grouping == "stride":
            return ones_B * (loop_idx // self.count)
        if self.grouping == "first":
            return ones_B * min(loop_idx, self.count)
        # The last loop has the highest number whatever the loop count, and all loops before the
        # last `count` share group 0.
        return (loop_idx + 1 + self.count - num_loops_B).clamp(min=0)

    def num_groups(self, num_loops: int) -> int:
        """Groups that `num_loops` loops fill."""
        if self.count is None:
            return num_loops
        if self.grouping == "modulo":
            return min(num_loops, self.count)
        if self.grouping == "stride":
            return -(-num_loops // self.count)
        return min(num_loops, self.count + 1)

    def entries(self, num_loops: int, *, is_prompt: bool) -> int:
        """Entries per token and attention layer of the core."""
        one_stays = self.kept is not None and not (is_prompt and self.kept_after_prompt)
        return 1 if one_stays else self.num_groups(num_loops)


NAMED_RULES = {
    "per_loop": CacheRule(),
    "collapse_last": CacheRule(kept="last", kept_after_prompt=True),
    "collapse_first": CacheRule(kept="first", kept_after_prompt=True),
    "collapse_mean": CacheRule(kept="mean", kept_after_prompt=True),
    "last_step": CacheRule(kept="last"),
    "share_first": CacheRule(kept="shared"),
    "stash_first": CacheRule(kept="first"),
    "stash_last": CacheRule(kept="stash"),
}


def cache_rule(policy: str, config: ModelConfig) -> CacheRule:
    """The rule of a policy for one model.

    Raises: ValueError for an unknown name, one that does not go with the model, or a number that
        does not fit the core.
    """
    check_cache_policy(policy)
    obstacle = policy_obstacle(policy, config)
    if obstacle is not None:
        raise ValueError(obstacle)
    if policy in NAMED_RULES:
        return NAMED_RULES[policy]
    parts = PUBLISHED_POLICY.fullmatch(policy)
    assert parts is not None, f"'{policy}' was checked"
    if parts["by_loops"] is not None:
        return _by_loops(policy, parts["by_loops"], int(parts["count"]))
    return _by_layers(
        policy, parts["by_layers"], num_layers=count_slots(config.core_layout, "keys")
    )


def _by_loops(policy: str, kind: str, count: int) -> CacheRule:
    """Rules whose number counts loops; a token without an entry is left out."""
    if count < 1:
        raise ValueError(f"cache policy '{policy}' needs a number of at least 1.")
    groupings: dict[str, Grouping] = {
        "s": "modulo",
        "stride": "stride",
        "first": "first",
        "last": "last",
    }
    return CacheRule(grouping=groupings[kind], count=count, missing="skip")


def _by_layers(policy: str, kind: str, *, num_layers: int) -> CacheRule:
    """Rules whose numbers count attention layers of the core."""
    before, _, compressed = kind.partition("compress-")
    lookup, _, layers = before.removesuffix("-").partition("-m")
    if layers and int(layers) != num_layers:
        raise ValueError(
            f"cache policy '{policy}' is for a core of {layers} attention layers, but this one "
            f"has {num_layers}; write m{num_layers}."
        )
    missing: dict[str, Missing] = {
        "": "refuse",
        "latest": "latest",
        "available": "latest",
        "always-last": "newest",
        "skip": "skip",
    }
    if not compressed:
        return CacheRule(missing=missing[lookup])
    if compressed == "anchor":
        return CacheRule(grouping="first", count=ANCHOR_LOOPS, missing=missing[lookup])
    kept_layers = compressed.removeprefix("s")
    if int(kept_layers) < 1 or not num_layers or int(kept_layers) % num_layers:
        raise ValueError(
            f"cache policy '{policy}' keeps {kept_layers} layers, but the core has {num_layers} "
            "attention layers; give a multiple of them."
        )
    count = int(kept_layers) // num_layers
    return CacheRule(grouping="modulo", count=count, missing=missing[lookup])


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
        assert rule.missing != "refuse", "bind_loops refuses a call that would miss entries"
        if rule.missing == "skip":
            missing_BS = lacks_BS
        else:
            numbers_G11 = torch.arange(num_groups, device=has_GBS.device)[:, None, None]
            readable_GBS = has_GBS
            if rule.missing == "latest":
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
