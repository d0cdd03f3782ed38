"""Mechanisms by name, and policies from outside the package.

What each policy keeps is data (`config/policies.py`); a mechanism is the class that keeps it.
"""

from __future__ import annotations

from depthdial.cache.collapse import CollapsingEntries
from depthdial.cache.entries import Entries, OneEntry
from depthdial.cache.groups import GroupEntries
from depthdial.config import POLICIES, CacheRule
from depthdial.config.policies import PUBLISHED_POLICY

MECHANISMS: dict[str, type[Entries]] = {
    "groups": GroupEntries,
    "one_entry": OneEntry,
    "collapse": CollapsingEntries,
}
"""`CacheRule.mechanism` -> how it is kept in a contiguous cache."""


def register_policy(name: str, rule: CacheRule, *, entries: type[Entries] | None = None) -> None:
    """Add a policy from outside the package; from then on configs and calls may name it.

    Args: entries: the class of a new mechanism, which gets the name in `rule.mechanism`; None for
        a rule of a known one.
    Raises: ValueError for a name that is taken, or a mechanism that is unknown or taken.
    """
    if name in POLICIES or PUBLISHED_POLICY.fullmatch(name):
        raise ValueError(f"cache policy '{name}' is taken; choose another name.")
    if entries is None and rule.mechanism not in MECHANISMS:
        raise ValueError(
            f"mechanism '{rule.mechanism}' is unknown; known: {', '.join(MECHANISMS)}. Give "
            "`entries`, the class that keeps it."
        )
    if entries is not None and MECHANISMS.get(rule.mechanism, entries) is not entries:
        raise ValueError(f"mechanism '{rule.mechanism}' is taken; choose another name.")
    if entries is not None:
        MECHANISMS[rule.mechanism] = entries
    POLICIES[name] = rule
