"""How tensors of a published checkpoint and ours correspond; every rule works both ways.

Rules move, cut and join; none computes with the values, so import, export and import again
give the same bytes. Which rules a family needs is in `families/`; files are not read here.
"""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from depthdial.config import nearest_name
from depthdial.formats.reasons import MOST_SHOWN, Refused

Get = Callable[[str], Tensor]
"""Name -> tensor, of the source or of ours."""


class TensorRule(Protocol):
    """Correspondence of some source tensors and some of ours."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """Source tensors that the rule accounts for."""

    @property
    def our_names(self) -> tuple[str, ...]:
        """Our tensors that the rule fills."""

    @property
    def is_exported(self) -> bool:
        """Export writes it where nothing is known about an earlier source."""

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        """Our tensors from the source's. Raises: ValueError for a shape or value that differs."""

    def to_source(self, get: Get) -> dict[str, Tensor]:
        """The source's tensors from ours."""


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    source: str
    ours: str
    is_exported: bool = True

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def our_names(self) -> tuple[str, ...]:
        return (self.ours,)

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        return {self.ours: get(self.source)}

    def to_source(self, get: Get) -> dict[str, Tensor]:
        return {self.source: get(self.ours)}


@dataclass(frozen=True)
class Split:
    """One source tensor that holds several of ours, one after another along the first dimension.

    Args: ours, sizes: our names and their rows; source_shape: the source's own shape where it is
        not [sum of sizes, ...].
    """

    source: str
    ours: tuple[str, ...]
    sizes: tuple[int, ...]
    source_shape: tuple[int, ...] | None = None
    is_exported: bool = True

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def our_names(self) -> tuple[str, ...]:
        return self.ours

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        whole = get(self.source)
        if self.source_shape is not None:
            _check_shape(self.source, whole, self.source_shape)
            whole = whole.reshape(sum(self.sizes), -1).squeeze(-1)
        _check_rows(self.source, whole, sum(self.sizes))
        parts = whole.split(self.sizes)
        return {name: part.contiguous() for name, part in zip(self.ours, parts, strict=True)}

    def to_source(self, get: Get) -> dict[str, Tensor]:
        whole = torch.cat([get(name) for name in self.ours])
        return {self.source: whole.reshape(self.source_shape or whole.shape)}


@dataclass(frozen=True)
class Regroup:
    """One source tensor of equal blocks of rows, which ours hold in another grouping and order.

    Args: rows: of one block; ours: our name -> numbers of the source's blocks that it joins.
    """

    source: str
    rows: int
    ours: Mapping[str, tuple[int, ...]]
    is_exported: bool = True

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def our_names(self) -> tuple[str, ...]:
        return tuple(self.ours)

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        whole = get(self.source)
        _check_rows(self.source, whole, self.rows * sum(map(len, self.ours.values())))
        blocks = whole.split(self.rows)
        return {name: torch.cat([blocks[i] for i in idx]) for name, idx in self.ours.items()}

    def to_source(self, get: Get) -> dict[str, Tensor]:
        blocks: dict[int, Tensor] = {}
        for name, idx in self.ours.items():
            blocks |= zip(idx, get(name).split(self.rows), strict=True)
        return {self.source: torch.cat([blocks[i] for i in sorted(blocks)])}


@dataclass(frozen=True)
class Reshape:
    """The same values in another shape."""

    source: str
    ours: str
    source_shape: tuple[int, ...]
    our_shape: tuple[int, ...]
    is_exported: bool = True

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def our_names(self) -> tuple[str, ...]:
        return (self.ours,)

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        tensor = get(self.source)
        _check_shape(self.source, tensor, self.source_shape)
        return {self.ours: tensor.reshape(self.our_shape)}

    def to_source(self, get: Get) -> dict[str, Tensor]:
        return {self.source: get(self.ours).reshape(self.source_shape)}


@dataclass(frozen=True)
class Copy:
    """A source tensor that repeats another one, such as a tied head: checked, not stored again.

    Args: source: the repeated tensor; same_as: source name of the tensor it repeats; ours: our
        name of that tensor.
    """

    source: str
    same_as: str
    ours: str
    is_exported: bool = True

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def our_names(self) -> tuple[str, ...]:
        return ()

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        repeated = get(self.source)
        _check_floating(self.source, repeated)
        if not _same_values(repeated, get(self.same_as)):
            raise ValueError(
                f"tensor '{self.source}' differs from '{self.same_as}', although the source "
                "config says that they are tied; one of the two is damaged."
            )
        return {}

    def to_source(self, get: Get) -> dict[str, Tensor]:
        return {self.source: get(self.ours)}

    def to_keep(self, get: Get) -> dict[str, Tensor]:
        """What export would not write again to the bit: a copy in another number format."""
        repeated = get(self.source)
        return {self.source: repeated} if repeated.dtype != get(self.same_as).dtype else {}

    def still_holds(self, kept: Tensor, get: Get) -> bool:
        """Whether a kept copy still repeats our tensor, which may have been trained since."""
        return _same_values(kept, get(self.ours))


@dataclass(frozen=True)
class Buffer:
    """A source tensor that the config determines, such as a rotary table: checked, not stored.

    Args: make: computes it in float32; shape: of the result, checked before it is computed;
        tolerance: largest absolute difference that is taken for rounding of another library, 0 for
        exact values; also: make the tensors that other versions of the library store in its place;
        otherwise: what other values would mean, the end of the message that refuses them.
    """

    source: str
    make: Callable[[], Tensor]
    shape: tuple[int, ...]
    tolerance: float = 1e-4
    is_exported: bool = True
    also: tuple[Callable[[], Tensor], ...] = ()
    otherwise: str = "the checkpoint is damaged, or made by code with other constants"

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def our_names(self) -> tuple[str, ...]:
        return ()

    def to_ours(self, get: Get) -> dict[str, Tensor]:
        stored = get(self.source)
        _check_shape(self.source, stored, self.shape)
        _check_floating(self.source, stored)
        differences = [self._difference(stored, make()) for make in (self.make, *self.also)]
        # Not `> 0`: NaN differs, too.
        if all(worst != 0 for worst in differences):
            raise ValueError(
                f"tensor '{self.source}' differs by {min(differences):.3g} from what the source "
                f"config determines; {self.otherwise}."
            )
        return {}

    def _difference(self, stored: Tensor, made: Tensor) -> float:
        """Largest absolute difference; 0 for one that rounding explains."""
        worst = (stored.float() - made).abs().max().item()
        # A 16-bit table is off by half a unit in the last place, relative to its largest value.
        rounding = torch.finfo(stored.dtype).eps * made.abs().max().item()
        allowed = max(self.tolerance, rounding) if self.tolerance else 0.0
        return 0.0 if worst <= allowed else worst

    def to_source(self, get: Get) -> dict[str, Tensor]:
        return {self.source: self.make()}

    def to_keep(self, get: Get) -> dict[str, Tensor]:
        """What export would not write again to the bit: a table made by another library."""
        stored, made = get(self.source), self.make()
        is_made_again = made.dtype == stored.dtype and torch.equal(made, stored)
        return {} if is_made_again else {self.source: stored}

    def still_holds(self, kept: Tensor, get: Get) -> bool:
        """True. Raises: ValueError for a kept table that is another one."""
        self.to_ours({self.source: kept}.__getitem__)
        return True


def select_rules(
    rules: Sequence[TensorRule], stored: Iterable[str], *, unheld: Mapping[str, str] | None = None
) -> list[TensorRule]:
    """The rules of a checkpoint that holds the tensors named `stored`.

    A tensor of ours may have several rules, one for each spelling of its source, of which the
    checkpoint must use exactly one; a rule without tensors of ours (a copy, a buffer) may be
    absent. A copy that is stored alone, without the tensor that it repeats, is that tensor.

    Args: unheld: tensor -> file of what an index names and no file holds; only spellings and
        copies that the checkpoint does without may be among them.

    Raises: Refused naming every tensor that no rule accounts for, with the nearest known name,
        every tensor that is missing or stored twice, or what all names have before those known.
    """
    present, unheld = set(stored), {} if unheld is None else unheld
    rules = [_alone(rule, present) for rule in rules]
    known = [name for rule in rules for name in rule.source_names]
    _check_prefix(present, rules)
    unknown = sorted((present | unheld.keys()) - {*known})
    # A name is compared with all known ones, which takes its time, and a file may have millions.
    problems = [f"unknown tensor '{name}'.{_nearest(name, known)}" for name in unknown[:MOST_SHOWN]]
    problems += [f"unknown tensor '{name}'." for name in unknown[MOST_SHOWN:]]
    chosen = [rule for rule in rules if present.issuperset(rule.source_names)]
    spellings: dict[str, list[str]] = {}
    for rule in rules:
        for ours in rule.our_names:
            spellings.setdefault(ours, []).append(" + ".join(rule.source_names))
    filled = Counter(ours for rule in chosen for ours in rule.our_names)
    for ours, names in spellings.items():
        if filled[ours] == 0:
            where = f" The index says that {unheld[names[0]]} has it." if names[0] in unheld else ""
            problems.append(f"missing tensor '{names[0]}'.{where}")
        elif filled[ours] > 1:
            problems.append(f"{' and '.join(names)} are the same tensor; remove one.")
    if problems:
        raise Refused(sorted(problems))
    return chosen


WRAPPERS = {
    "_orig_mod.": "a model that torch.compile wrapped was saved; save its `_orig_mod`",
    "module.": "a model that DistributedDataParallel wrapped was saved; save its `module`",
    "base_model.model.": "a model with adapters was saved by peft; merge them (merge_and_unload) "
    "and save the result",
}
"""What training tools put before all names, and how a checkpoint without it is made."""


def _check_prefix(present: Set[str], rules: Sequence[TensorRule]) -> None:
    """Refuse names that all have one thing too much, or too little, before them.

    Raises: Refused with that, and what is wrong apart from it.
    """
    names = sorted(present)
    wanted = {name for rule in rules for name in rule.source_names}
    if not names or wanted & present:
        return
    # What all sorted names share is what the first and the last one share.
    shared = os.path.commonprefix([names[0], names[-1]])
    for end in (place + 1 for place, letter in enumerate(shared) if letter == "."):
        if any(name[end:] in wanted for name in names):
            prefix = shared[:end]
            why = WRAPPERS.get(prefix, "save the model without what wraps it, or rename them")
            found = (
                f"all {len(names)} tensors have '{prefix}' before the names of this family: {why}."
            )
            raise Refused([found, *_problems_of(rules, {name[end:] for name in names})])
    for prefix in sorted({name.partition(".")[0] + "." for name in wanted}):
        if all(f"{prefix}{name}" in wanted for name in names):
            found = (
                f"all {len(names)} tensors lack '{prefix}' before the names of this family, as "
                "where a model was saved without its head: save the whole one (in transformers, "
                "the class that config.json names in 'architectures')."
            )
            raise Refused([found, *_problems_of(rules, {f"{prefix}{name}" for name in names})])


def _problems_of(rules: Sequence[TensorRule], present: Set[str]) -> tuple[str, ...]:
    try:
        select_rules(rules, present)
    except Refused as error:
        return error.reasons
    return ()


def _alone(rule: TensorRule, present: set[str]) -> TensorRule:
    """A copy without the tensor that it repeats holds the values itself: writers of safetensors
    keep one name of a shared tensor, the first in the alphabet."""
    if isinstance(rule, Copy) and rule.source in present and rule.same_as not in present:
        return Rename(rule.source, rule.ours, is_exported=False)
    return rule


def rules_to_export(rules: Sequence[TensorRule], origin: Iterable[str] | None) -> list[TensorRule]:
    """The rules that an export writes.

    Args: origin: tensor names of the source that the model came from, written again exactly;
        None for a model of our own.
    """
    if origin is None:
        return [rule for rule in rules if rule.is_exported]
    return select_rules(rules, origin)


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = nearest_name(name, list(known))
    return hint if hint.startswith(" Did") else ""


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Equal in shape and values, whatever their formats: a narrow number is a wide one, too."""
    return a.shape == b.shape and bool((a == b).all())


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(
            f"tensor '{name}' is {tensor.dtype}; expected are floating-point numbers. The "
            "checkpoint is damaged, or of another family."
        )


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    if tensor.ndim == 0 or tensor.shape[0] != rows:
        raise ValueError(
            f"tensor '{name}' has shape {list(tensor.shape)}, but the source config asks for "
            f"{rows} rows."
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"tensor '{name}' has shape {list(tensor.shape)}, but the source config asks for "
            f"{list(shape)}."
        )
