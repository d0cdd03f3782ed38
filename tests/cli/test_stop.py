"""SIGTERM ends every command at once, with its exit code and without half-written folders."""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from depthdial.cli.main import COMMANDS
from depthdial.cli.options import new_parser
from depthdial.model.looped_lm import LoopedLM

Command = Callable[..., Any]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_f29_every_command_ends_on_sigterm(
    name: str, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = COMMANDS[name]
    module = import_module(f"depthdial.cli.{command.module}")
    reached = []

    def run(options: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        reached.append(options)
        return 0

    monkeypatch.setattr(module, command.parser, lambda: new_parser(name, usage="", description=""))
    monkeypatch.setattr(module, command.run, run)
    before = signal.getsignal(signal.SIGTERM)
    assert cli(name) == (75, "", "stopped.\n")
    assert reached == [] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("command", ["sweep", "report"])
def test_f29_no_forward_of_a_sweep_follows_a_stop(
    command: str,
    number: signal.Signals,
    code: int,
    cli: Command,
    tiny_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forwards = []
    loop = LoopedLM.loop

    def stopped(self: LoopedLM, *args: Any, **values: Any) -> Any:
        forwards.append(1)
        if len(forwards) == 3:
            signal.raise_signal(number)
        return loop(self, *args, **values)

    monkeypatch.setattr(LoopedLM, "loop", stopped)
    page = tiny_run / "report.html"
    before = page.read_bytes() if page.exists() else None
    done = cli(command, tiny_run)
    assert (done.code, done.out) == (code, "")
    assert done.err.endswith("stopped.\n") and len(forwards) == 3
    assert (page.read_bytes() if page.exists() else None) == before


def test_f29_a_stop_while_preparing_leaves_nothing_behind(
    cli: Command, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from depthdial.data.shards import SplitWriter

    def stopped(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 1

    monkeypatch.setattr(SplitWriter, "add", stopped)
    before = sorted(tmp_path.iterdir())
    done = cli("prepare", tiny_folder / "texts", "--out", tmp_path / "data")
    assert (done.code, done.out, done.err) == (75, "", "stopped.\n")
    assert [path for path in sorted(tmp_path.iterdir()) if path.suffix != ".lock"] == before
