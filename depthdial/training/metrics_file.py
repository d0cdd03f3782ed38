"""metrics.jsonl: one line of JSON per record, written whole or not at all.

Where the file lies, and what a record holds, is decided in `run_dir.py` and `pretrain.py`.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

from depthdial.config.text import parse_json
from depthdial.disk import write_whole


class MetricsFile:
    """The metrics of a run; `discarded_path` takes the lines that a resumed run writes again."""

    def __init__(self, path: Path, discarded_path: Path) -> None:
        self.path, self.discarded_path = path, discarded_path

    def append(self, record: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system.

        NaN and infinities become null, and the line gets a key `nonfinite` that says which
        values they were.

        Raises: ValueError without an integer `step`; OSError if the disk refuses, with the
            lines before intact.
        """
        if type(record.get("step")) is not int:
            raise ValueError(
                f"a metrics record needs an integer 'step', got {record.get('step')!r}."
            )
        _append(self.path, json_text(record))

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; an unfinished last line of a killed process is left out.

        Raises: ValueError naming a damaged line before the last.
        """
        return [record for _, record in self._lines()]

    def discard_after(self, step: int) -> int:
        """Move lines with a later step to `discarded_path`; a warning says so if there are any.

        Returns: number of lines moved.
        Raises: ValueError as `read`; OSError if the disk refuses, with every line still there.
        """
        lines = self._lines()
        if step and not any(record["step"] == step for _, record in lines):
            warnings.warn(
                f"{self.path.name} does not reach step {step}, where the run goes on: lines were "
                "lost, and its curves will have a gap.",
                stacklevel=3,
            )
        kept = "".join(f"{line}\n" for line, record in lines if record["step"] <= step)
        dropped = [line for line, record in lines if record["step"] > step]
        if dropped:
            _append(self.discarded_path, "".join(f"{line}\n" for line in dropped))
            warnings.warn(
                f"{len(dropped)} metrics lines after step {step} were moved to "
                f"{self.discarded_path.name}; the resumed run writes these steps again.",
                stacklevel=3,
            )
        if self.path.exists() and self.path.read_bytes() != kept.encode():
            write_whole(self.path, kept)
        return len(dropped)

    def _lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Complete lines and the record of each."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        *complete, _unfinished = text.split("\n")
        return [(line, self._record(line, number)) for number, line in enumerate(complete, start=1)]

    def _record(self, line: str, number: int) -> dict[str, Any]:
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"it holds {type(record).__name__}, not an object")
            if type(record.get("step")) is not int:
                raise ValueError(f"its step is {record.get('step')!r}, not a whole number")
        except ValueError as error:
            raise ValueError(
                f"{self.path} line {number} is damaged ({error}); remove that line."
            ) from error
        return record


def _append(path: Path, text: str) -> None:
    """Append text, whole or not at all. Raises: OSError if the disk refuses."""
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        size_before = file.seek(0, os.SEEK_END)
        try:
            # A nearly full disk takes a part of the text and refuses at the next call.
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size_before)
            raise


def json_text(values: dict[str, Any], *, indent: int | None = None) -> str:
    """JSON with a final newline that any parser accepts; NaN and infinities become null, and are
    named under `nonfinite`."""
    nonfinite: dict[str, str] = {}
    clean = _without_nonfinite(values, where="", found=nonfinite)
    if nonfinite:
        clean["nonfinite"] = nonfinite
    return json.dumps(clean, allow_nan=False, indent=indent) + "\n"


def _without_nonfinite(value: Any, *, where: str, found: dict[str, str]) -> Any:
    """Copy with null for NaN and infinities, whose dotted keys are put in `found`."""
    if isinstance(value, dict):
        return {
            key: _without_nonfinite(item, where=f"{where}.{key}".lstrip("."), found=found)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _without_nonfinite(item, where=f"{where}.{i}", found=found)
            for i, item in enumerate(value)
        ]
    if isinstance(value, float) and not math.isfinite(value):
        found[where] = str(value)
        return None
    return value
