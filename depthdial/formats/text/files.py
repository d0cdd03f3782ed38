"""The chat templates of a checkpoint.

What its files say of special tokens is compared in `tokens.py`; which files there are is in
`model/folder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from depthdial.config.text_files import read_json_object, read_text
from depthdial.data.tokenizer import TOKENIZER_CONFIG_FILE
from depthdial.model.folder import TEMPLATE_FILE, TEMPLATE_KEY


class Template(NamedTuple):
    """A chat template and the file that holds it."""

    where: str
    text: str


def find_template(folder: Path) -> str | None:
    """Name of the file whose chat template holds; None for none. Raises: as `chat_templates`."""
    templates = chat_templates(folder)
    return templates[0].where if templates else None


def chat_templates(folder: Path) -> list[Template]:
    """Every statement of the chat template; the first one holds, as in transformers.

    Raises: ValueError for a file that is damaged, or a template that is no text.
    """
    found = []
    if (folder / TEMPLATE_FILE).is_file():
        found.append(Template(TEMPLATE_FILE, read_text(folder / TEMPLATE_FILE)))
    for name in ("chat_template.json", TOKENIZER_CONFIG_FILE):
        text = _template_text(
            (object_or_none(folder / name) or {}).get(TEMPLATE_KEY), folder / name
        )
        if text is not None:
            found.append(Template(name, text))
    return found


def other_templates(templates: list[Template]) -> Iterator[str]:
    """Warnings on statements that differ from the one that holds."""
    for other in templates[1:]:
        # Editors and `save_pretrained` differ in the last line break.
        if other.text.strip() != templates[0].text.strip():
            yield (
                f"{templates[0].where} and {other.where} hold different chat templates; that of "
                f"{templates[0].where} is used."
            )


def object_or_none(path: Path) -> dict[str, Any] | None:
    """A JSON file's keys; None where there is no file."""
    return read_json_object(path) if path.is_file() else None


def _template_text(value: Any, path: Path) -> str | None:
    """The default of one or several templates; all of them where none is called so."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(map(_is_named_template, value)):
        shown = repr(value)
        raise ValueError(
            f"{path} has {TEMPLATE_KEY}={shown[:100]}; it must be a text, or a list of groups with "
            "the texts 'name' and 'template'. Copy the file again."
        )
    by_name = {item["name"]: item["template"] for item in value}
    return by_name.get("default", "\n".join(by_name.values())) if by_name else None


def _is_named_template(item: Any) -> bool:
    return isinstance(item, Mapping) and all(
        isinstance(item.get(key), str) for key in ("name", "template")
    )
