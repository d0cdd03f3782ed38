"""Parsers of the command line: strict flags with near names, recipe keys as dotted flags.

Here live how text becomes values and how the keys of a recipe become flags with units and ranges.
What the commands do is in the modules that `cli/main.py` names.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jsonargparse
import yaml

from depthdial.config import Recipe
from depthdial.config.limits import MAX_LOOPS, shortened
from depthdial.config.text import WHOLE_NUMBER, load_yaml, plain_number

Options = jsonargparse.Namespace


class UsageError(Exception):
    """The command line cannot be understood; the text says why."""


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe as a flag.

    Fields:
        name: dotted; group: its first part, empty for keys of the recipe itself.
        values: what is allowed, in words; default: in words.
        is_text: taken literally; anything else is read as YAML.
        is_list: may be written without brackets.
    """

    name: str
    group: str
    description: str
    values: str
    default: str
    is_text: bool
    is_list: bool


def new_parser(command: str, *, usage: str, description: str) -> jsonargparse.ArgumentParser:
    """An empty parser for one command."""
    parser = jsonargparse.ArgumentParser(
        prog=f"depthdial {command}",
        usage=f"depthdial {command} {usage}".rstrip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
        default_env=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def parse(parser: jsonargparse.ArgumentParser, argv: Sequence[str]) -> Options:
    """Options of a command. Raises: UsageError; an unknown flag comes with the nearest one."""
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    flags = argv[: argv.index("--")] if "--" in argv else argv
    for flag in flags:
        name = flag.partition("=")[0]
        if re.fullmatch(r"--[A-Za-z][\w.-]*", name) and name not in known:
            if any(key.name == name[2:] for key in recipe_keys()):
                raise UsageError(f"`{parser.prog}` cannot change the recipe key '{name[2:]}'.")
            raise UsageError(_unknown_flag(name, known) + f" `{parser.prog} --help` lists all.")
    try:
        return parser.parse_args(list(argv))
    except argparse.ArgumentError as error:
        raise UsageError(f"{str(error).strip()}. See `{parser.prog} --help`.") from None


def add_recipe_flags(
    parser: jsonargparse.ArgumentParser, *, only: Collection[str] | None = None
) -> None:
    """A flag for every key of a recipe, in the groups of the recipe.

    Args:
        only: the keys that the command can change, in a run that has a value for each; None for
            all, with the defaults of keys that a recipe leaves out.
    """
    groups: dict[str, Any] = {}
    for key in recipe_keys():
        if only is not None and key.name not in only:
            continue
        title = f"recipe keys: {key.group}" if key.group else "recipe keys"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        allowed = f"{key.values}; {key.default}" if only is None else key.values
        text = f"{key.description} ({allowed})"
        groups[title].add_argument(
            f"--{key.name}",
            dest=_flat(key),
            metavar="VALUE",
            default=jsonargparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )


def recipe_overrides(options: Options) -> dict[str, Any]:
    """Dotted key -> value of the recipe flags that were given. Raises: UsageError."""
    given = {key: options[_flat(key)] for key in recipe_keys() if _flat(key) in options}
    return {key.name: _value(key, text) for key, text in given.items()}


def recipe_keys() -> list[RecipeKey]:
    """Every key of a recipe except those with a single possible value."""
    schema = Recipe.model_json_schema()
    return list(_keys(schema, schema["$defs"], prefix=""))


def loop_counts(texts: str | Sequence[str]) -> list[int]:
    """Loop counts from `1,2,4` or `1 2 4`. Raises: UsageError; ValueError for one out of range."""
    joined = texts if isinstance(texts, str) else ",".join(texts)
    parts = [part.strip() for part in joined.split(",")]
    for part in parts:
        if not WHOLE_NUMBER.fullmatch(part):
            raise UsageError(f"--num-loops needs whole numbers of at least 1, got '{part}'.")
        # By length first: Python reads no number of thousands of digits.
        if len(part.lstrip("+-0")) > len(str(MAX_LOOPS)) or int(part) > MAX_LOOPS:
            raise ValueError(f"--num-loops {shortened(part, 20)}: at most {MAX_LOOPS:,} loops run.")
    lowest = min(map(int, parts))
    if lowest < 1:
        raise ValueError(f"--num-loops {lowest}: give whole numbers of at least 1.")
    return [int(part) for part in parts]


def number(text: str | None, flag: str, *, whole: bool) -> Any:
    """An int (`whole`) or float from an option's text; None stays None. Raises: UsageError."""
    if text is None:
        return None
    value = plain_number(text)
    if value is None or (whole and not isinstance(value, int)):
        kind = "a whole number" if whole else "a number"
        raise UsageError(f"{flag} needs {kind} in plain decimal digits, got '{text}'.")
    return value if whole else float(value)


@contextmanager
def naming_flags(*names: str) -> Iterator[None]:
    """Errors of the block speak of flags: `valid_frac=2` becomes `--valid-frac 2`."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            text = re.sub(rf"\b{name}=True\b", flag, text)
            text = re.sub(rf"\b{name}=", f"{flag} ", text).replace(f"`{name}`", flag)
        raise ValueError(text) from error


def _flat(key: RecipeKey) -> str:
    """Name of a key's value among the options.

    Without dots: these would nest, and a group given as a whole would be lost beside its own keys.
    """
    return key.name.replace(".", "__")


def _unknown_flag(name: str, known: list[str]) -> str:
    is_key = "." in name
    kind, shown = ("key", name[2:]) if is_key else ("option", name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean '{close[0][2:] if is_key else close[0]}'?" if close else ""
    return f"unknown {kind} '{shown}'.{hint}"


def _value(key: RecipeKey, text: str) -> Any:
    """Value of a recipe flag in plain JSON types; ranges are checked by the config."""
    if key.is_text:
        return None if text == "null" and "null" in key.values else text
    if key.is_list and text == "null" and "null" in key.values:
        return None
    try:
        return load_yaml(f"[{text}]" if key.is_list and not text.startswith("[") else text)
    except yaml.YAMLError:
        raise UsageError(f"--{key.name} needs {key.values}, got '{text}'.") from None


def _keys(schema: dict[str, Any], defs: dict[str, Any], *, prefix: str) -> Iterator[RecipeKey]:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        dotted = f"{prefix}{name}"
        options = list(_options(field))
        nested = [defs[o["$ref"].rpartition("/")[2]] for o in options if "$ref" in o]
        if len(options) > 1 or not nested or prefix:
            if not _is_constant(field):
                shown = "no default" if name in required else f"default {_shown(field['default'])}"
                yield _leaf(dotted, field, options, default=shown)
        yield from _group_keys(nested, defs, prefix=f"{dotted}.")


def _group_keys(
    members: list[dict[str, Any]], defs: dict[str, Any], *, prefix: str
) -> Iterator[RecipeKey]:
    """Keys of a group; of several kinds of group, `kind` and the keys of each, once."""
    if len(members) < 2:
        for member in members:
            yield from _keys(member, defs, prefix=prefix)
        return
    kinds = [member["properties"]["kind"]["const"] for member in members]
    field = members[0]["properties"]["kind"]
    yield _leaf(
        f"{prefix}kind", field, [{"enum": kinds, "type": "string"}], default=f"default {kinds[0]}"
    )
    found: dict[str, list[tuple[str, RecipeKey]]] = {}
    for kind, member in zip(kinds, members, strict=True):
        for key in _keys(member, defs, prefix=prefix):
            found.setdefault(key.name, []).append((kind, key))
    for same in found.values():
        kind, key = same[0]
        is_common = len(same) == len(members)
        yield key if is_common else replace(key, description=f"kind {kind}: {key.description}")


def _options(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Alternatives of a field, those inside alternatives too."""
    inner = field.get("anyOf", field.get("oneOf"))
    if inner is None:
        yield field
        return
    for option in inner:
        yield from _options(option)


def _leaf(
    dotted: str, field: dict[str, Any], options: list[dict[str, Any]], *, default: str
) -> RecipeKey:
    real = [option for option in options if option.get("type") != "null"]
    values = " or ".join(dict.fromkeys(_allowed(option) for option in options))
    return RecipeKey(
        name=dotted,
        group=dotted.partition(".")[0] if "." in dotted else "",
        description=" ".join(field["description"].split()),
        values=values,
        default=default,
        is_text=all(option.get("type") == "string" for option in real),
        is_list=all(option.get("type") == "array" for option in real),
    )


def _is_constant(field: dict[str, Any]) -> bool:
    """A single possible value: naming it would have no effect."""
    return "const" in field or any("const" in item for item in field.get("prefixItems", []))


def _allowed(option: dict[str, Any]) -> str:
    """Allowed values of one JSON schema type, in words."""
    if "$ref" in option:
        return "keys in braces"
    if "enum" in option or "const" in option:
        return " | ".join(option["enum"] if "enum" in option else [option["const"]])
    kind = option["type"]
    if kind == "array" and "prefixItems" in option:
        return "list of " + ", ".join(_allowed(item) for item in option["prefixItems"])
    if kind == "array":
        return f"list of {_allowed(option['items'])}"
    if kind == "object":
        return f"names in braces, each with {_allowed(option['additionalProperties'])}"
    words = {"integer": "int", "number": "number", "boolean": "true | false", "string": "text"}
    return words.get(kind, kind) + _bounds(option)


def _bounds(option: dict[str, Any]) -> str:
    """Range of a number: ` >= 1`, ` in (0, 1]`, ...; empty if there is none."""
    low = option.get("minimum", option.get("exclusiveMinimum"))
    high = option.get("maximum", option.get("exclusiveMaximum"))
    multiple = f", multiple of {option['multipleOf']}" if "multipleOf" in option else ""
    if low is None:
        return multiple
    if high is None:
        return f" {'>=' if 'minimum' in option else '>'} {low:g}{multiple}"
    if high >= 2**53:
        return f" in [{low:g}, 2^{int(high).bit_length() - 1}){multiple}"
    opening = "[" if "minimum" in option else "("
    closing = "]" if "maximum" in option else ")"
    return f" in {opening}{low:g}, {high:g}{closing}{multiple}"


def _shown(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "that of each key" if value else "none"
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
