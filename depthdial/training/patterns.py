"""Patterns over parameter names: which tensors are frozen, which have their own learning rate.

A pattern is a shell glob on the whole name (`core_stack.*.mixer.*`). One that matches nothing is
an error: a misspelt name would otherwise train what was to be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from depthdial.config import OptimConfig, nearest_name


def check_patterns(config: OptimConfig, names: Collection[str]) -> None:
    """Every pattern has an effect on a model of these parameter names.

    Args: names: of the whole model, modules that are grafted later included.
    Raises: ValueError for a pattern that matches nothing or only frozen parameters, for two
        rates of one parameter, and if nothing is left to train.
    """
    frozen = {name for name in names if matches_any(name, config.freeze)}
    for key, patterns in (("freeze", config.freeze), ("lr_by_pattern", config.lr_by_pattern)):
        for pattern in patterns:
            matched = {name for name in names if fnmatchcase(name, pattern)}
            if not matched:
                raise ValueError(
                    f"optim.{key}: '{pattern}' matches none of the {len(names)} parameters."
                    f"{_hint(pattern, names)}"
                )
            others = [other for other in patterns if other != pattern]
            if key == "freeze" and all(matches_any(name, others) for name in matched):
                raise ValueError(
                    f"optim.freeze: '{pattern}' has no effect: other patterns freeze all that it "
                    "matches. Remove it."
                )
            if key == "lr_by_pattern" and matched <= frozen:
                raise ValueError(
                    f"optim.lr_by_pattern: '{pattern}' matches frozen parameters only, so its "
                    "rate has no effect. Remove it, or the pattern in optim.freeze."
                )
    for name in names:
        lr_pattern(name, config)
    if len(frozen) == len(names):
        raise ValueError(
            f"optim.freeze={list(config.freeze)} leaves nothing to train: it matches all "
            f"{len(names)} parameters."
        )


def lr_pattern(name: str, config: OptimConfig) -> str | None:
    """The pattern whose learning rate a parameter has; None for the rate of its group.

    Raises: ValueError if two patterns match.
    """
    matched = [pattern for pattern in config.lr_by_pattern if fnmatchcase(name, pattern)]
    if len(matched) > 1:
        raise ValueError(
            f"optim.lr_by_pattern: '{name}' matches both '{matched[0]}' and '{matched[1]}'; a "
            "parameter has one learning rate. Make the patterns disjoint."
        )
    return matched[0] if matched else None


def freeze_parameters(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Take the matching parameters out of training; the others are left as they are.

    A parameter of several names is frozen if one of them matches.
    Returns: their names.
    """
    patterns = tuple(patterns)
    frozen = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if matches_any(name, patterns):
            parameter.requires_grad_(False)
            frozen.append(name)
    return tuple(frozen)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _hint(pattern: str, names: Collection[str]) -> str:
    """The nearest first part of a name, for a person who misspelt one."""
    return nearest_name(pattern.partition(".")[0], sorted({n.partition(".")[0] for n in names}))
