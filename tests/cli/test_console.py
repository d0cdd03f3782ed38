"""What reaches the terminal: plain text, whatever paths, names, models and encodings bring."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.table import Table
from rich.text import Text

from depthdial.cli import console
from depthdial.cli.main import COMMANDS, main
from depthdial.training.progress import RichObserver

PACKAGE = Path(__file__).parents[2] / "depthdial"
CONSOLE = PACKAGE / "cli" / "console.py"
PIPED = PACKAGE / "formats" / "text" / "render_template.py"
"""Runs in a process of its own, whose standard output is a pipe to the process that started it."""
ENCODINGS = ("cp1252", "ascii", "cp932")
# Markup, a colour, a window title, a carriage return, an 8-bit CSI, a turn of direction, Chinese.
HOSTILE = "[/red]\x1b[31m\x1b]0;owned\x07\rgone\x9b2J\u202egnp\u4e2d\U0001f600"
MAKERS = ("Console", "get_console", "Text", "from_markup", "print", "print_json")
"""What of rich makes a console or text, or prints by itself."""
RAW = set("\x1b\x07\x9b\u202e")


class Printed(NamedTuple):
    """What one command line wrote on two streams of one encoding."""

    code: int
    out: str
    err: str


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Printed]:
    """Runs a command line on strict streams of an encoding, as a terminal of that encoding has."""

    def run(*argv: str | Path, encoding: str = "utf-8") -> Printed:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            code = main([str(part) for part in argv])
        for stream in streams:
            stream.flush()
        return Printed(code, *(stream.buffer.getvalue().decode(encoding) for stream in streams))

    return run


def printed_outside(source: str) -> list[str]:
    """Ways past the console that a module takes, by the text of the expression."""
    found, of_rich = [], {"rich"}
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rich":
            of_rich |= {alias.asname or alias.name for alias in node.names}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name("sys"), attr=name) if name.strip("_") in (
                "stdout",
                "stderr",
            ):
                found.append(ast.unparse(node))
            case ast.ImportFrom(module="sys", names=names):
                found += [x.name for x in names if x.name in ("stdout", "stderr")]
            case ast.ImportFrom(module="rich", names=names):
                found += [x.name for x in names if x.name in ("print", "get_console", "inspect")]
            case ast.Call(func=function, keywords=keywords):
                name = ast.unparse(function)
                given = {word.arg: ast.unparse(word.value) for word in keywords}
                is_forbidden = name in ("print", "os.write")
                if name.partition(".")[0] in of_rich:
                    last = name.rpartition(".")[2]
                    is_forbidden |= last in MAKERS
                    # What displays something itself is given the console, and reads no markup.
                    is_forbidden |= (
                        last in ("Live", "Progress", "Status") and "console" not in given
                    )
                    is_forbidden |= last == "TextColumn" and given.get("markup") != "False"
                if is_forbidden:
                    found.append(ast.unparse(node))
    return found


class TestOnePlace:
    def test_f28_no_other_module_prints_or_makes_a_console(self) -> None:
        found = {
            str(path.relative_to(PACKAGE)): ways
            for path in sorted(PACKAGE.rglob("*.py"))
            if path not in (CONSOLE, PIPED)
            and (ways := printed_outside(path.read_text(encoding="utf-8")))
        }
        assert found == {}

    @pytest.mark.parametrize(
        "source",
        [
            "print('x')",
            "def f():\n    from rich.console import Console\n    Console(stderr=True).print('x')",
            "import sys\nsys.stdout.write('x')",
            "import sys\nsys.__stderr__.write('x')",
            "from sys import stdout\nstdout.write('x')",
            "from rich import print\nprint('x')",
            "import rich.text\nrich.text.Text.from_markup('x')",
            "from rich.progress import Progress, BarColumn\nProgress(BarColumn())",
            "from rich.progress import TextColumn\nTextColumn('{task.description}')",
            "from rich.live import Live\nLive(table)",
        ],
    )
    def test_f28_self_a_way_past_the_console_is_detected(self, source: str) -> None:
        assert printed_outside(source)

    def test_f28_self_what_commands_do_is_allowed(self) -> None:
        source = "from depthdial.cli.console import write\nwrite('x')\nresult_console().print(t)"
        assert printed_outside(source) == []

    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("command", sorted(COMMANDS))
    def test_f10_f28_every_command_answers_a_hostile_name_in_plain_text(
        self, command: str, encoding: str, printed: Callable[..., Printed]
    ) -> None:
        code, out, err = printed(command, HOSTILE, "--out", HOSTILE, encoding=encoding)
        assert code in (1, 2)
        assert err.startswith("error: ")
        assert not RAW & set(out + err) and "Traceback" not in err

    @pytest.mark.parametrize("command", sorted(COMMANDS))
    def test_f10_help_of_every_command_prints_in_every_encoding(
        self, command: str, printed: Callable[..., Printed]
    ) -> None:
        code, out, _ = printed(command, "--help", encoding="ascii")
        assert code == 0 and out.startswith(f"usage: depthdial {command}")

    @pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-8"])
    def test_f10_f28_an_unknown_command_is_named_in_plain_text(
        self, encoding: str, printed: Callable[..., Printed]
    ) -> None:
        code, out, err = printed(HOSTILE, encoding=encoding)
        assert (code, out) == (2, "")
        spelled = r"[/red]\x1b[31m\x1b]0;owned\x07\rgone\x9b2J\u202egnp".replace(r"\r", r"\x0d")
        assert f"unknown command '{spelled}" in err

    def test_f10_f28_a_traceback_is_plain_text_too(self) -> None:
        argv = [sys.executable, "-m", "depthdial", "train", f"{HOSTILE}.yaml", "--debug"]
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONIOENCODING": "cp1252"}
        done = subprocess.run(argv, env=environment, capture_output=True)
        shown = done.stderr.decode("cp1252")
        assert done.returncode == 1 and shown.startswith("Traceback")
        assert r"[/red]\x1b[31m" in shown and not RAW & set(shown)


class TestSpelling:
    def test_f28_a_terminal_is_never_steered_and_nothing_is_lost(self) -> None:
        for code in [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xD800]:
            shown = console.visible(f"a{chr(code)}b")
            if chr(code) in "\n\t":
                assert shown == f"a{chr(code)}b"
            else:
                escape = f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
                assert shown == f"a{escape}b"

    def test_f28_text_of_every_writing_is_left_as_it_is(self) -> None:
        text = "na\u00efve \u4e2d\u6587 \u0627\u0644\u0633 \U0001f468\u200d\U0001f469 a\r\nb\tc"
        assert console.visible(text) == text

    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_f10_a_result_keeps_what_the_encoding_has_and_spells_the_rest(
        self, encoding: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        console.write("plain \u4e2d \u00e9 \ufffd \U0001f600")
        stream.flush()
        text = stream.buffer.getvalue().decode(encoding)
        has = {"cp1252": "\\u4e2d \u00e9", "ascii": "\\u4e2d \\xe9", "cp932": "\u4e2d \\xe9"}
        assert text == f"plain {has[encoding]} \\ufffd \\U0001f600\n"

    def test_f28_whatever_a_console_is_given_it_prints_plain(self, capsys: Any) -> None:
        """Strings, rich texts and cells; a table stays straight beside an escape."""
        grid = Table(box=None)
        for name in ("left", "right"):
            grid.add_column(name, no_wrap=True)
        grid.add_row("[bold]\x1b[1mx", Text("\x1b]0;y\x07"))
        grid.add_row("short", ":smile:")
        shown = console.result_console()
        shown.print("[/red]\x1b[31m", Text("\x1b[2J"), soft_wrap=True)
        shown.print(grid)
        out = capsys.readouterr().out
        assert not RAW & set(out)
        assert "[/red]\\x1b[31m \\x1b[2J" in out and ":smile:" in out
        first, second = out.splitlines()[-2:]
        assert first.index("\\x1b]0") == second.index(":smile:")


@pytest.fixture
def talking_model(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose every continuation is hostile."""
    from depthdial.api.model import Completion

    made = Completion.__init__

    def hostile(self: Completion, *args: Any, **values: Any) -> None:
        made(self, *args, **values)
        object.__setattr__(self, "text", HOSTILE)

    monkeypatch.setattr(Completion, "__init__", hostile)
    return tiny_run


class TestModelText:
    @pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-8"])
    @pytest.mark.parametrize("flags", [(), ("--compare",)])
    def test_f10_f28_generated_text_is_printed_whole_and_plain(
        self, talking_model: Path, flags: tuple[str, ...], encoding: str, printed: Any
    ) -> None:
        prompt = "caf\u00e9 \u4e2d\x1b[2J"
        argv = ("generate", talking_model, prompt, "--max-new-tokens", "1", *flags)
        code, out, err = printed(*argv, encoding=encoding)
        assert code == 0 and not RAW & set(out + err)
        assert r"[/red]\x1b[31m\x1b]0;owned\x07\x0dgone\x9b2J\u202egnp" in out
        assert ("\u4e2d" in out) == (encoding in ("cp932", "utf-8"))
        if flags:
            assert "prompt  caf" in out and "\\x1b[2J" in out

    def test_f28_inspect_spells_token_names_and_config_keys(
        self, tiny_run: Path, tmp_path: Path, printed: Any
    ) -> None:
        import shutil

        from depthdial.api.paths import model_folder

        folder = shutil.copytree(model_folder(tiny_run), tmp_path / "[/red]\x1b[31m")
        code, out, err = printed("inspect", folder)
        assert code == 0 and "[/red]\\x1b[31m" in out
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["\x1b]0;key\x07[/red]"] = 1
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _, out, refused = printed("inspect", folder)
        assert "\\x1b]0;key\\x07[/red]" in out + refused
        tokens = folder / "tokenizer_config.json"
        named = json.loads(tokens.read_text(encoding="utf-8")) | {"eos_token": "\x1b[8m[/red]"}
        tokens.write_text(json.dumps(named), encoding="utf-8")
        argv = ("generate", folder, "x")
        del config["\x1b]0;key\x07[/red]"]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _, _, wrong = printed(*argv)
        assert "\\x1b[8m[/red]" in wrong
        assert not RAW & set(out + err + refused + wrong)


class TestRuns:
    @pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
    def test_f28_a_run_below_brackets_and_escapes_stops_with_its_message(
        self, tiny_flags: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: Any,
        encoding: str, printed: Any,
    ) -> None:  # fmt: skip
        """`runs/[/red]` was read as a closing tag, and SIGTERM ended in a traceback."""
        record = RichObserver.record

        def record_then_stop(self: RichObserver, values: dict[str, Any]) -> None:
            record(self, values)
            if values["step"] == 1:
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(RichObserver, "record", record_then_stop)
        root = tmp_path / "[" / "red]\x1b[31m\u4e2d"
        where = ["--root", root, "--data.path", tiny_folder / "data", "--name", "stopped"]
        code, out, err = printed("train", "tiny-text", *where, *tiny_flags(), encoding=encoding)
        assert code == 75
        assert "red]\\x1b[31m" in out and "depthdial resume" in err.replace("\n", "")
        assert not RAW & set(out + err)

    def test_f28_files_that_prepare_and_report_name_are_plain(
        self, tmp_path: Path, printed: Any
    ) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a.txt").write_text("Some words. " * 40, encoding="utf-8")
        (tmp_path / "in" / "b.txt").write_text("More words. " * 40, encoding="utf-8")
        (tmp_path / "in" / "c\x1b[31m[red].pdf").touch()
        out_folder = tmp_path / "[/data]\x1b[1m\udcff"
        code, out, err = printed("prepare", tmp_path / "in", "--out", out_folder)
        assert code == 0, err
        assert "c\\x1b[31m[red].pdf" in out and "\\udcff: vocabulary of" in out
        assert not RAW & set(out + err)
