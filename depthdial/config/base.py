"""Base of all configs: strict, frozen, read from JSON or YAML; errors that name the key.

What the fields mean is in `config/model.py` and `config/recipe.py`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, Tag, ValidationError

from depthdial.config.limits import MAX_SHOWN, shortened
from depthdial.config.text import check_plain, read_mapping

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


def shortest_pattern(letters: str) -> str:
    """The shortest text that gives `letters`, a layout, when it is repeated."""
    return letters[: (letters + letters).find(letters, 1)]


class StrictConfig(BaseModel):
    """Base of all configs: no unknown keys, no silent conversion, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON types.

        Raises: ValueError listing every problem with its key; an unknown key
        comes with the nearest known one.
        """
        check_plain(values)
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            raise ValueError(_explain(cls, error)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read `.json`, `.yaml` or `.yml`. Raises FileNotFoundError or ValueError."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no config file at {path}")
        values = read_mapping(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field present."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Stable text: two-space indent, fields in declaration order."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def differences(self, other: Self) -> Iterator[tuple[str, Any, Any]]:
        """Dotted key, own value and the other's value of everything that differs."""
        for name in type(self).model_fields:
            own, others = getattr(self, name), getattr(other, name)
            if isinstance(own, StrictConfig) and type(own) is type(others):
                for key, value, others_value in own.differences(others):
                    yield f"{name}.{key}", value, others_value
            elif own != others:
                yield name, own, others

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed, validated again. Dotted keys reach nested configs."""
        values = self.to_dict()
        for key, value in changes.items():
            set_dotted(values, key, value.to_dict() if isinstance(value, StrictConfig) else value)
        return type(self).from_dict(values)


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` inside nested dictionaries, creating a level that is absent or null."""
    *parents, last = key.split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ValueError(f"'{key}': '{parent}' is a value, not a group of keys.")
    values[last] = value


def nearest_name(name: str, known: list[str]) -> str:
    """' Did you mean ...?' or the list of known names, for an error message."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else f" Known: {', '.join(sorted(known))}."


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    """One line per problem: dotted key, what was given, what is allowed."""
    lines = []
    for item in error.errors():
        shown, fields = _walk(cls, item["loc"])
        where = ".".join(shown)
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key '{where}'.{nearest_name(shown[-1], fields)}")
        elif item["type"] == "value_error":
            lines.append((f"{where}: " if where else "") + str(item["ctx"]["error"]))
        elif item["type"] == "missing":
            lines.append(f"missing key '{where}'.")
        elif item["type"] == "union_tag_invalid":
            given, known = item["ctx"]["tag"], item["ctx"]["expected_tags"]
            lines.append(f"{where}.kind='{given}' is unknown; known: {known}.")
        else:
            given = item["input"]
            is_spelled = isinstance(given, str) and item["type"] in ("int_type", "float_type")
            hint = " Write it in plain decimal digits." if is_spelled else ""
            lines.append(f"{where}={shortened(repr(given))}: {item['msg']}.{hint}")
    return "\n".join(shortened(line, 3 * MAX_SHOWN) for line in lines)


def _walk(cls: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The keys of a location as a person wrote them, and the fields of the last config on it.

    pydantic puts the chosen member of a union into its locations; that is no key.
    """
    shown, members = [], {"": cls}
    for part in location:
        if part in members:
            cls = members[part]
            continue
        shown.append(str(part))
        if part in cls.model_fields:
            members = _members(cls.model_fields[part].annotation)
            cls = next(iter(members.values()), cls)
    return shown, list(cls.model_fields)


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """Configs inside an annotation, by their tag where they have one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.__name__: annotation}
    found: dict[str, type[BaseModel]] = {}
    arguments = get_args(annotation)
    tags = [argument.tag for argument in arguments if isinstance(argument, Tag)]
    for argument in arguments:
        inner = _members(argument)
        found |= dict.fromkeys(tags, *inner.values()) if tags and len(inner) == 1 else inner
    return found
