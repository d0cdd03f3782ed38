"""The cache policies by name: each is a `CacheRule`, with every fact that others ask for.

A policy of a known mechanism is one entry of POLICIES. How a mechanism keeps keys and values is in
`cache/`; a new one is a class there (`cache/entries.py`), and `cache/policies.py:
register_policy` adds one from outside the package. The rules are here, below the config, because a
config refuses a policy that it does not know or that does not go with the model. Configs arrive
untyped, because this file is below theirs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from depthdial.config.letters import count_slots

Persists = Literal["every_group", "last", "first", "mean", "extra_pass"]
"""Which entries of a token are there for later calls. An entry is the key and the value of one
token in one attention layer of the core.

`every_group`: one of each group of loops. `last`, `first`: that of the last or first loop. `mean`:
the mean over the loops. `extra_pass`: that of one more pass over the core after the loops.
"""
Grouping = Literal["loop", "modulo", "stride", "first", "last"]
"""Which loops share a group, in which the last writer wins; n is the rule's `count`.

`loop`: none. `modulo`: loops of equal remainder by n. `stride`: n loops in a row. `first`: all
after the first n. `last`: all before the last n.
"""
ReadsMissing = Literal["refuse", "latest", "newest", "skip"]
"""What a loop reads of a token that has no entry in its group.

`refuse`: the call is refused. `latest`: the newest entry at or below this loop. `newest`: if any
token of the row lacks its entry, the newest entry of every token. `skip`: nothing, the token is
left out.
"""
ANCHOR_LOOPS = 8
"""Loops that keep their own entries under compress-anchor; those after them share one."""


@dataclass(frozen=True)
class CacheRule:
    """Meaning of a policy, and what else is to be known of it.

    Fields:
        summary: what is kept, in a few words.
        mechanism: name in `cache/entries.py: MECHANISMS`. `groups`: groups of loops keep an entry
            each. `one_entry`: one entry per token. `collapse`: groups until `end_prompt`, one
            entry from then on.
        persists, grouping, count, reads_missing: see their types; count is None with `loop`.
        shares_first: later loops read the first loop's entries for the call's own tokens too and
            make none, with and without a cache.
        is_exact: a call on a cache gives what the same tokens give without one.
        can_roll_back: tokens that were stored and are dropped again leave no trace.
        serves_local_window: goes with loop.local_window, whose later loops read the first loop's
            entries beside their own.
        stored_tokens: most tokens of a row that a core layer keeps; None for all.
        obstacle: why the policy does not go with a model, and what to do; None where it does.
    """

    summary: str
    mechanism: str = "groups"
    persists: Persists = "every_group"
    grouping: Grouping = "loop"
    count: int | None = None
    reads_missing: ReadsMissing = "refuse"
    shares_first: bool = False
    is_exact: bool = False
    can_roll_back: bool = False
    serves_local_window: bool = False
    stored_tokens: int | None = None
    obstacle: Callable[[Any], str | None] = lambda config: None

    @property
    def collapses(self) -> bool:
        """Whether `end_prompt` reduces the entries of each token to one."""
        return self.mechanism == "collapse"

    @property
    def has_extra_pass(self) -> bool:
        """Whether one more pass over the core has to follow the loops of a call on a cache."""
        return self.persists == "extra_pass"

    @property
    def same_at_one_loop(self) -> bool:
        """Whether a model that runs one loop keeps what it keeps under per_loop."""
        return not self.has_extra_pass and self.stored_tokens is None

    @property
    def looks_up(self) -> bool:
        """Whether the entry that is read can differ from token to token, or row to row."""
        return self.grouping != "loop" or self.reads_missing != "refuse"

    @property
    def counts_from_last(self) -> bool:
        """Whether a loop's group depends on how many loops there are to be."""
        return self.grouping == "last"

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
        has_groups = self.persists == "every_group" or (self.collapses and is_prompt)
        return self.num_groups(num_loops) if has_groups else 1


def _needs_plain_extra_pass(config: Any) -> str | None:
    """What an extra pass over the core cannot do."""
    if config.segments:
        reason = f"segments={list(config.segments)}: its extra pass runs the core as a whole"
    elif config.modulation is not None and config.modulation.kind == "time_step":
        reason = "modulation.kind='time_step': its extra pass has no time and no step size"
    elif count_slots(config.core_layout, "state"):
        reason = "recurrent layers in the core: its extra pass would read every token twice"
    else:
        return None
    return f"{reason}. Use stash_first or per_loop"


POLICIES: dict[str, CacheRule] = {
    "per_loop": CacheRule(
        "one entry per loop", is_exact=True, can_roll_back=True, serves_local_window=True
    ),
    "collapse_last": CacheRule(
        "the last loop's entry once the prompt is read", mechanism="collapse", persists="last"
    ),
    "collapse_first": CacheRule(
        "the first loop's entry once the prompt is read", mechanism="collapse", persists="first"
    ),
    "collapse_mean": CacheRule(
        "the mean over the loops once the prompt is read", mechanism="collapse", persists="mean"
    ),
    "last_step": CacheRule(
        "the last loop's entry; every loop of a call overwrites it",
        mechanism="one_entry",
        persists="last",
    ),
    "share_first": CacheRule(
        "the first loop's entry, which all loops read",
        mechanism="one_entry",
        persists="first",
        shares_first=True,
        is_exact=True,
        can_roll_back=True,
    ),
    "stash_first": CacheRule(
        "the first loop's entry; in its own call a loop reads its own",
        mechanism="one_entry",
        persists="first",
    ),
    "stash_last": CacheRule(
        "the entry of an extra pass after the loops; in its own call a loop reads its own",
        mechanism="one_entry",
        persists="extra_pass",
        obstacle=_needs_plain_extra_pass,
    ),
}
"""Rules that hold for any model."""

PUBLISHED_POLICY = re.compile(
    r"huginn:(?P<by_layers>(latest|available|always-last)-m\d+|skip"
    r"|(latest-m\d+-)?compress-(s\d+|anchor))"
    r"|parcae:compress-(?P<by_loops>s|stride|first|last)(?P<count>\d+)"
)
"""Rules that came with a published model; the numbers of huginn count attention layers of the core,
those of parcae loops."""


def check_cache_policy(name: str) -> str:
    """The name itself. Raises: ValueError for an unknown one."""
    if name not in POLICIES and not PUBLISHED_POLICY.fullmatch(name):
        close = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.5)
        raise ValueError(
            f"unknown cache policy '{name}'."
            + (f" Did you mean '{close[0]}'?" if close else "")
            + f" Known: {', '.join(POLICIES)}, and the rules of published models, such as "
            "huginn:latest-m4, huginn:compress-s8, parcae:compress-s2."
        )
    return name


def named_rule(policy: str) -> CacheRule:
    """What the name of a policy tells of its rule, whatever the model; of a published model's rule
    the groups are left open.

    Raises: ValueError for an unknown name.
    """
    return POLICIES.get(check_cache_policy(policy)) or CacheRule("a published model's rule")


def reads_first_keys(config: Any) -> bool:
    """Whether later loops of a model read the keys and values of the first one, also in calls
    without a cache."""
    is_shared = named_rule(config.loop.cache_policy).shares_first
    return is_shared or config.loop.local_window is not None


def cache_rule(policy: str, config: Any) -> CacheRule:
    """The rule of a policy for one model.

    Raises: ValueError for an unknown name, one that does not go with the model, or a number that
        does not fit the core.
    """
    rule, obstacle = named_rule(policy), policy_obstacle(policy, config)
    if obstacle is not None:
        raise ValueError(obstacle)
    parts = PUBLISHED_POLICY.fullmatch(policy)
    if parts is None:
        return rule
    if parts["by_loops"] is not None:
        return _by_loops(rule, policy, parts["by_loops"], int(parts["count"]))
    num_layers = count_slots(config.core_layout, "keys")
    return _by_layers(rule, policy, parts["by_layers"], num_layers=num_layers)


def policy_obstacle(policy: str, config: Any) -> str | None:
    """Why a policy does not go with a model, numbers in its name aside; None where it does."""
    rule, window = named_rule(policy), config.loop.local_window
    if window is not None and not rule.serves_local_window:
        able = " or ".join(name for name, other in POLICIES.items() if other.serves_local_window)
        return (
            f"cache policy '{policy}' does not go with loop.local_window={window}: later loops "
            f"read the first loop's keys and their own. Use {able}."
        )
    reason = rule.obstacle(config)
    if reason is not None:
        return f"cache policy '{policy}' does not go with {reason}."
    return None


def _by_loops(rule: CacheRule, policy: str, kind: str, count: int) -> CacheRule:
    """Rules whose number counts loops; a token without an entry is left out."""
    if count < 1:
        raise ValueError(f"cache policy '{policy}' needs a number of at least 1.")
    groupings: dict[str, Grouping] = {
        "s": "modulo",
        "stride": "stride",
        "first": "first",
        "last": "last",
    }
    return replace(rule, grouping=groupings[kind], count=count, reads_missing="skip")


def _by_layers(rule: CacheRule, policy: str, kind: str, *, num_layers: int) -> CacheRule:
    """Rules whose numbers count attention layers of the core."""
    before, _, compressed = kind.partition("compress-")
    lookup, _, layers = before.removesuffix("-").partition("-m")
    if layers and int(layers) != num_layers:
        raise ValueError(
            f"cache policy '{policy}' is for a core of {layers} attention layers, but this one "
            f"has {num_layers}; write m{num_layers}."
        )
    missing: dict[str, ReadsMissing] = {
        "": "refuse",
        "latest": "latest",
        "available": "latest",
        "always-last": "newest",
        "skip": "skip",
    }
    if not compressed:
        return replace(rule, reads_missing=missing[lookup])
    if compressed == "anchor":
        return replace(rule, grouping="first", count=ANCHOR_LOOPS, reads_missing=missing[lookup])
    kept_layers = compressed.removeprefix("s")
    if int(kept_layers) < 1 or not num_layers or int(kept_layers) % num_layers:
        raise ValueError(
            f"cache policy '{policy}' keeps {kept_layers} layers, but the core has {num_layers} "
            "attention layers; give a multiple of them."
        )
    count = int(kept_layers) // num_layers
    return replace(rule, grouping="modulo", count=count, reads_missing=missing[lookup])
