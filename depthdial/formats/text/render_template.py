"""Runs a chat template; `turns.py` starts this file as a process of its own, under limits.

A template is a program from elsewhere: it may loop without end or grow without bound, and only a
process can be stopped. Nothing of this project is imported here.
Standard input: {"template", "tokens", "conversations", "marker", "cpu_seconds"} as JSON. Standard
output: for each conversation the text after the last marker, or null where the marker is lost.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 2**30
MAX_TEXT = 10_000
"""Characters of the answer: what follows a turn is short."""


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` of transformers: marks text, changes none."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Answer the one request on standard input."""
    request = json.load(sys.stdin)
    _limit(request["cpu_seconds"])
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    # As in transformers: JSON as it is, not escaped for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = environment.from_string(request["template"])
    texts = [_text_after(template, request, messages) for messages in request["conversations"]]
    json.dump(texts, sys.stdout)


def _text_after(template: Any, request: dict[str, Any], messages: Any) -> str | None:
    text = template.render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=False,
        **request["tokens"],
    )
    _, found, rest = text.rpartition(request["marker"])
    return rest[:MAX_TEXT] if found else None


def _limit(cpu_seconds: int) -> None:
    """Limits of the operating system; Windows has none, and the caller's clock alone holds."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    try:
        main()
    # Whatever a template raises is its own fault; one line says it to the caller.
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
