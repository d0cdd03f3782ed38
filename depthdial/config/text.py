"""From YAML and JSON text to plain values, strictly: unique keys, and nothing that JSON lacks.

Which keys there are, and their ranges, is in `config/__init__.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from depthdial.config.limits import (
    MAX_CONFIG_BYTES,
    MAX_NESTING,
    MAX_YAML_BYTES,
    MAX_YAML_VALUES,
    shortened,
)

WHOLE_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
DECIMAL_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
"""Any number in plain decimal digits, a whole one too."""
PairsHook = Callable[[list[tuple[str, Any]]], Any]
MAX_DIGITS = 4300
"""Digits of the largest whole number that Python reads unless told otherwise."""


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a `.json`, `.yaml` or `.yml` file that exists.

    Raises: ValueError naming the file, for one that is damaged, too large or holds anything else.
    """
    kind = "JSON" if path.suffix == ".json" else "YAML"
    size, most = path.stat().st_size, MAX_CONFIG_BYTES if kind == "JSON" else MAX_YAML_BYTES
    if size > most:
        raise ValueError(
            f"{path} has {size:,} bytes; a {kind} file of settings has at most {most:,}. Give "
            "another file."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is damaged or not UTF-8 text (byte {error.object[error.start]:#x} at "
            f"{error.start}). Restore it, or save it as UTF-8."
        ) from None
    try:
        values = load_json(text) if kind == "JSON" else load_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of keys, got {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML as JSON reads it: plain scalars are null, true, false, decimal numbers or text.

    Keys are unique, and aliases stand for few values. YAML 1.1 has more scalars: 010 is eight
    there, 1:30 is ninety, 1_000 a thousand, and no is false.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.num_values = self.level = 0
        self.values_of: dict[int, int] = {}
        """Address of a finished node -> values that an alias of it stands for."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        self.level += 1
        if self.level > MAX_NESTING:
            raise yaml.YAMLError(f"it nests groups deeper than {MAX_NESTING} levels.")
        is_alias, before = self.check_event(yaml.AliasEvent), self.num_values
        node = super().compose_node(parent, index)
        self.level -= 1
        if not is_alias:
            self.num_values += 1
            self.values_of[id(node)] = self.num_values - before
        elif id(node) in self.values_of:
            self.num_values += self.values_of[id(node)]
        else:
            raise yaml.YAMLError("an alias (*name) stands inside what it is the alias of.")
        if self.num_values > MAX_YAML_VALUES:
            raise yaml.YAMLError(
                f"written out, it has more than {MAX_YAML_VALUES:,} values. Use fewer aliases "
                "(*name)."
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _check_unique(node)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number; also of a scalar whose tag says that it is one."""
        text = self.construct_scalar(node)
        number = _SPECIAL_FLOATS.get(text.lower().lstrip("+"), plain_number(text))
        if number is None:
            raise yaml.YAMLError(f"'{text}' is no plain decimal number.")
        return number


_SPECIAL_FLOATS = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
"""No config takes them; read as what they are, they are refused with their key."""
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", WHOLE_NUMBER.pattern, [*"-+0123456789"]),
    ("float", DECIMAL_NUMBER.pattern, [*"-+.0123456789"]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
    )
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def load_yaml(text: str) -> Any:
    """Values of YAML text; see `_Loader` for what a plain scalar is.

    Raises: yaml.YAMLError, also for a key that is given twice, with its lines, and for aliases that
        stand for more values than a config has.
    """
    return yaml.load(text, _Loader)


def plain_number(text: str) -> int | float | None:
    """The number that plain decimal digits spell; None for any other text.

    Leading zeros, other bases, digits in groups and clock times are no plain numbers: readers
    disagree about what they are worth.
    """
    if WHOLE_NUMBER.fullmatch(text):
        return _whole_number(text)
    return float(text) if DECIMAL_NUMBER.fullmatch(text) else None


def load_json(text: str) -> Any:
    """JSON whose keys are unique. Raises ValueError (json.JSONDecodeError if it is no JSON)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key '{twice}' is given twice. Remove one of the two.")
        return values

    return parse_json(text, object_pairs_hook=unique)


def parse_json(text: str, *, object_pairs_hook: PairsHook | None = None) -> Any:
    """JSON of any origin; what no reader can hold is one plain sentence, like any other slip.

    Raises: ValueError for no JSON, a whole number of too many digits, too many open brackets.
    """
    try:
        return json.loads(text, parse_int=_whole_number, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("its brackets nest too deeply to be read.") from None


def check_plain(value: Any, key: str = "") -> None:
    """Refuse what JSON cannot hold. Raises ValueError naming the dotted key."""
    where = f"{key}=" if key else ""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"{where}{shortened(repr(value))}: the key {name!r} is of type "
                    f"{type(name).__name__}; keys are text."
                )
            check_plain(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            check_plain(inner, f"{key}.{position}" if key else str(position))
    elif value is not None and not isinstance(value, str | int | float):
        raise ValueError(
            f"{where}{shortened(repr(value))} is of type {type(value).__name__}; allowed are text, "
            "numbers, true, false, null, lists and groups of keys."
        )


def _whole_number(digits: str) -> int:
    # Python's own message names a function of the interpreter, which may also have no limit.
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number has {len(digits):,} digits; at most {MAX_DIGITS:,} go.")
    return int(digits)


def _check_unique(node: yaml.MappingNode) -> None:
    """Refuse a mapping that spells one key twice, which YAML readers resolve as they like."""
    lines: dict[str, int] = {}
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        line = key.start_mark.line + 1
        if key.value in lines:
            raise yaml.YAMLError(
                f"key '{key.value}' is given twice, in line {lines[key.value]} and in line {line}. "
                "Remove one of the two."
            )
        lines[key.value] = line
