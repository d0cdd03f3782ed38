"""The `depthdial` command: picks a subcommand, maps errors and signals to exit codes.

    0 done   1 failed   2 the command line cannot be understood
    75 stopped by SIGTERM   130 stopped by Ctrl-C; training saves first

Results go to standard output, progress and messages to standard error. The subcommands are in the
modules that `COMMANDS` names; only the chosen one's is imported.
"""

from __future__ import annotations

import difflib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from depthdial import __version__
from depthdial.cli.console import leave_closed_pipe, open_closed_streams, say, say_traceback, write

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from depthdial.cli.options import Options

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_TERMINATED, EXIT_INTERRUPTED = 0, 1, 2, 75, 130


class Command(NamedTuple):
    """One command: the module below `depthdial.cli` that has its two functions, and a summary.

    Fields:
        module: of both functions. parser: makes the parser. run: takes its options, returns the
            exit code. summary: a line of `depthdial --help`.
    """

    module: str
    parser: str
    run: str
    summary: str

    def functions(self) -> tuple[Callable[[], ArgumentParser], Callable[[Options], int]]:
        """The parser's maker and the runner; imports the module."""
        module = import_module(f"depthdial.cli.{self.module}")
        return getattr(module, self.parser), getattr(module, self.run)


COMMANDS = {
    "demo": Command(
        "report",
        "demo_parser",
        "run_demo",
        "train, measure and report on this machine (8 to 12 minutes)",
    ),
    "train": Command(
        "train",
        "train_parser",
        "run_train",
        "train a recipe; any of its keys can be changed by a flag",
    ),
    "resume": Command("train", "resume_parser", "run_resume", "continue a run that was stopped"),
    "prepare": Command(
        "prepare", "prepare_parser", "run_prepare", "turn your text into training data"
    ),
    "report": Command("report", "report_parser", "run_report", "write the HTML report of a run"),
    "sweep": Command(
        "sweep", "sweep_parser", "run_sweep", "loss and cost of a model at every loop count"
    ),
    "generate": Command(
        "generate",
        "generate_parser",
        "run_generate",
        "continue a text at one loop count, or at all of them",
    ),
    "plan": Command(
        "plan", "plan_parser", "run_plan", "memory, FLOPs and cache of a model before building it"
    ),
    "import": Command(
        "import_export",
        "import_parser",
        "run_import",
        "turn a published checkpoint into a model folder",
    ),
    "export": Command(
        "import_export", "export_parser", "run_export", "write a model in a published format"
    ),
    "convert": Command(
        "convert", "convert_parser", "run_convert", "make a pretrained model elastic"
    ),
    "inspect": Command(
        "inspect",
        "inspect_parser",
        "run_inspect",
        "what a model is: partition, loops, parameters, cache, text",
    ),
    "list": Command("list", "list_parser", "run_list", "shipped recipes, presets and corpora"),
}
"""The one table of commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; None for the process's own arguments."""
    open_closed_streams()
    if argv is None:
        # A traceback quotes paths and texts, too.
        sys.excepthook = say_traceback
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    with _one_line_warnings(), _sigterm_raises():
        try:
            return _run(argv)
        except SystemExit as stop:
            # Raised by --help.
            return EXIT_OK if stop.code is None else int(stop.code)
        except KeyboardInterrupt:
            say("stopped.")
            return EXIT_INTERRUPTED
        except _Terminated:
            say("stopped.")
            return EXIT_TERMINATED
        except BrokenPipeError:
            leave_closed_pipe()
            return EXIT_FAILED
        except (ValueError, OSError, RuntimeError, ImportError, ArithmeticError) as error:
            if debug:
                raise
            say(f"error: {_text_of(error)}")
            return EXIT_FAILED


def help_text() -> str:
    """What `depthdial --help` prints."""
    width = max(map(len, (*COMMANDS, "--version")))
    lines = [
        "usage: depthdial COMMAND ...",
        "",
        "Elastic-depth looped language models: one set of weights, the loop count chosen",
        "per request.",
        "",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        f"  {'--version':<{width}}  print the version",
        f"  {'--help':<{width}}  this text; `depthdial COMMAND --help` for one command",
        "",
        "Start with: depthdial demo, or depthdial train tiny-text",
    ]
    return "\n".join(lines)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        write(help_text())
        return EXIT_OK if argv else EXIT_USAGE
    if argv[0] == "--version":
        write(f"depthdial {__version__}")
        return EXIT_OK
    name, *rest = argv
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        say(f"error: unknown command '{name}'.{hint} Commands: {', '.join(COMMANDS)}.")
        return EXIT_USAGE
    # Here and not at the top: `depthdial --help` stays quick.
    from depthdial.cli.options import UsageError, parse

    make_parser, run = COMMANDS[name].functions()
    try:
        return run(parse(make_parser(), rest))
    except UsageError as error:
        say(f"error: {error}")
        return EXIT_USAGE


class _Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt no error that a command could handle."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: at once, but with half-written folders removed.

    A second one kills. Training takes the signal itself. Only the main thread may take signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        # None for a handler that Python did not set, which it cannot set again.
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Warnings for users as one line on standard error, without file and source line."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        # As Python's own: a warning that cannot be printed ends nothing.
        with suppress(OSError):
            say(f"warning: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        # Notes for programmers (deprecations) are not for users of the command.
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        yield


def _text_of(error: Exception) -> str:
    """The message without Python's decoration of operating-system errors."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
