"""Which tensors are frozen, and which have their own learning rate: by name, or by meaning.

A pattern is a shell glob on the whole name (`core_stack.*.mixer.*`), or `base`: all that a model
without loops has too. One that matches nothing is an error: a misspelt name would otherwise train
what was to be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from depthdial.config import OptimConfig, nearest_name

BASE = "base"
"""Pattern of `optim.freeze` for all that a model without loops has too."""


def check_patterns(
    config: OptimConfig, names: Collection[str], *, base: Collection[str] = ()
) -> None:
    """Every pattern has an effect on a model of these parameter names.

    Args: names: of the whole model, modules that are grafted later included; base: those
            that a model without loops has too.
    Raises: ValueError for a pattern that matches nothing or only frozen parameters, for two
        rates of one parameter, and if nothing is left to train.
    """
    frozen = frozen_names(config.freeze, names, base=base)
    for key, patterns in (("freeze", config.freeze), ("lr_by_pattern", config.lr_by_pattern)):
        for pattern in patterns:
            matched = frozen_names([pattern], names, base=base if key == "freeze" else ())
            if not matched:
                raise ValueError(
                    f"optim.{key}: '{pattern}' matches none of the {len(names)} parameters."
                    f"{_hint(pattern, names)}"
                )
            others = [other for other in patterns if other != pattern]
            if key == "freeze" and matched <= frozen_names(others, names, base=base):
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


def frozen_names(
    patterns: Iterable[str], names: Iterable[str], *, base: Collection[str]
) -> set[str]:
    """The names that one of the patterns stands for. Args: base: as in `check_patterns`."""
    patterns = tuple(patterns)
    globs = [pattern for pattern in patterns if pattern != BASE]
    return {
        name
        for name in names
        if (BASE in patterns and name in base) or any(fnmatchcase(name, glob) for glob in globs)
    }


def freeze_parameters(
    model: nn.Module, patterns: Iterable[str], *, base: Collection[str]
) -> tuple[str, ...]:
    """Take the matching parameters out of training; the others are left as they are.

    A parameter of several names is frozen if one of them matches.
    Args: base: as in `check_patterns`.
    Returns: their names.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = frozen_names(patterns, parameters, base=base)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return tuple(name for name in parameters if name in frozen)


def _hint(pattern: str, names: Collection[str]) -> str:
    """The nearest first part of a name, for a person who misspelt one."""
    parts = sorted({name.partition(".")[0] for name in names} | {BASE})
    return nearest_name(pattern.partition(".")[0], parts)
