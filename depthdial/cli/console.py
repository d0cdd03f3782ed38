"""What commands print, all of it: lines, notes and tables as plain text on every terminal.

Paths, token names, config keys and generated text are written by others. Here they are never read
as markup, and a character that would steer the terminal, or that the stream's encoding lacks, is
spelled as its escape (`\\x1b`, `\\u4e2d`), so that nothing is lost and nothing is hidden.
No other module prints or makes a console; `tests/cli/test_console.py` reads the syntax trees.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Control characters but tab and line break (a carriage return is part of one before a line feed);
# line and paragraph separators; what turns the direction of writing; halves of surrogate pairs.
_UNSEEN = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with every character that a terminal obeys instead of showing spelled out."""
    return _UNSEEN.sub(lambda match: _spelled(match[0]), text)


def write(text: object, *, end: str = "\n") -> None:
    """Print a result as it is, neither wrapped nor styled, on standard output."""
    _Spelling(sys.stdout).write(visible(f"{text}{end}"))


def say(text: str) -> None:
    """Print a line of an error or a warning on standard error."""
    stream = _Spelling(sys.stderr)
    stream.write(visible(f"{text}\n"))
    stream.flush()


def say_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print what Python prints of an error that nobody handled; a `sys.excepthook`."""
    say("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def remark(text: str) -> None:
    """Print a line that is no result, on standard error; if that is full, it is left out."""
    with suppress(OSError):
        progress_console().print(styled(text, "dim"), soft_wrap=True)


def result_console() -> Console:
    """Standard output, for tables and sentences that may be wrapped."""
    return _PlainConsole(sys.stdout)


def progress_console() -> Console:
    """Standard error, for displays that change while a command runs."""
    return _PlainConsole(sys.stderr)


def styled(text: str, style: str = "") -> Text:
    """Text of others in one style, for a cell or a line."""
    return Text(visible(text).replace("\r\n", "\n"), style=style)


def open_closed_streams() -> None:
    """A standard stream that whoever started the command closed swallows what it is given."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def leave_closed_pipe() -> None:
    """After the reader of standard output left, keep a later flush from failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Spelling(io.TextIOBase):
    """A stream that spells out characters that the encoding of `stream` lacks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """That of the stream; a stream of text alone takes everything."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        encoded = text.encode(self.encoding, errors="backslashreplace")
        return self._stream.write(encoded.decode(self.encoding))

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class _PlainConsole(Console):
    """A console for text of others: no markup, no emoji codes, no colours of its own choice."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=_Spelling(stream), markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **layout: Any) -> Text:
        """Spelled out before it is laid out, so that columns stand straight."""
        return super().render_str(visible(text), **layout)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of text without a control character, whoever made the renderable."""
        for segment in super().render(renderable, options):
            # Rich's own steering of the cursor comes in control segments, styles beside the text.
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
