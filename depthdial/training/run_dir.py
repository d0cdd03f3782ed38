"""What a training run leaves behind: one folder, readable and never half true.

    config.json, provenance.json, metrics.jsonl, checkpoints/step_N/ (with manifest.json)

Here lives how these files get onto the disk and which checkpoint may be trusted: its manifest,
written last, has the size and SHA-256 of every file. What a checkpoint holds is written by the
caller; provenance is collected in `provenance.py`. `step` counts finished optimizer steps:
checkpoint and metrics line N stand after N steps.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from depthdial.config import StrictConfig
from depthdial.config.text import parse_json
from depthdial.disk import fsync_path, hash_file, write_synced, write_whole
from depthdial.locks import locked
from depthdial.model.folder import LICENCE_NAMES
from depthdial.training.metrics_file import MetricsFile, json_text

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOCK_FILE = ".lock"
CHECKPOINT_NAME = re.compile(r"step_(\d+)")
UNFINISHED_NAME = re.compile(r"\.step_(\d+)\.tmp")
REPLACED_NAME = re.compile(r"\.step_(\d+)\.old")
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
# Formats that cannot carry code; anything else (pickles above all) is refused. `.model` is the
# piece table of a tokenizer.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: finished optimizer steps and its folder."""

    step: int
    path: Path


class RunDir:
    """Folder of one run. Make a new one with `create`, take up an old one with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.provenance_path = path / "provenance.json"
        self.metrics_path = path / "metrics.jsonl"
        self.discarded_path = path / "metrics.discarded.jsonl"
        self._metrics = MetricsFile(self.metrics_path, self.discarded_path)
        self.report_path = path / "report.html"
        self.checkpoints_path = path / "checkpoints"

    @classmethod
    @contextmanager
    def create(
        cls, root: str | Path, name: str, *, config: StrictConfig, provenance: dict[str, Any]
    ) -> Iterator[Self]:
        """Claim `root/name`, write its config and provenance, and hold it while the block runs.

        A block that fails before its first checkpoint leaves the name as free as it was.
        Raises: ValueError if the name is no plain folder name or the folder has content; InUseError
            if another process holds it; OSError if the disk refuses.
        """
        if not RUN_NAME.fullmatch(name):
            raise ValueError(
                f"run name '{name}' must start with a letter or digit and hold only letters, "
                "digits, '.', '_' and '-'."
            )
        run = cls(Path(root) / name)
        was_there = run.path.exists()
        if was_there and not run.path.is_dir():
            raise ValueError(f"{run.path} is no folder. Give the new run another name.")
        try:
            with run.held():
                # Of a process that was killed before its first checkpoint: nothing was trained.
                run._remove_unstarted()
                run._check_free()
                try:
                    run.checkpoints_path.mkdir()
                    run.write_config(config)
                    run.write_provenance(provenance)
                    yield run
                except BaseException:
                    run._remove_unstarted()
                    raise
        finally:
            if not was_there:
                # Only where nothing came into it.
                with suppress(OSError):
                    run.path.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Take up an existing run. Raises FileNotFoundError if this is none."""
        run = cls(Path(path))
        if not run.config_path.is_file():
            raise FileNotFoundError(
                f"{run.path} is no run: it has no config.json. Name a folder made by "
                "`depthdial train`, e.g. runs/NAME."
            )
        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process from writing this run while the block runs.

        Raises: InUseError naming the process that trains it.
        """
        with locked(self.path / LOCK_FILE, what=f"the run {self.path}"):
            self._restore_replaced()
            yield

    def write_config(self, config: StrictConfig) -> None:
        """Write config.json whole; also for a resume with changed settings."""
        with self._saying_the_way_on(self.config_path):
            write_whole(self.config_path, config.to_json())

    def write_provenance(self, provenance: dict[str, Any]) -> None:
        """Write provenance.json whole; again at the end, with training cost added."""
        with self._saying_the_way_on(self.provenance_path):
            write_whole(self.provenance_path, json_text(provenance, indent=2))

    def read_provenance(self) -> dict[str, Any]:
        """Contents of provenance.json. Raises ValueError naming the file if it is damaged."""
        try:
            values = parse_json(self.provenance_path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}, not keys and values")
            return values
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.provenance_path} is missing or damaged ({error}). It holds facts for the "
                "report only: restore it, or write {} into it."
            ) from error

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append one JSON line; as `MetricsFile.append`."""
        with self._saying_the_way_on(self.metrics_path):
            self._metrics.append(record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; as `MetricsFile.read`."""
        return self._metrics.read()

    def discard_metrics_after(self, step: int) -> int:
        """Move lines with a later step aside, before a resume at `step`; their number."""
        with self._saying_the_way_on(self.metrics_path):
            return self._metrics.discard_after(step)

    def save_checkpoint(
        self, step: int, write: Callable[[Path], None], *, keep: int, spare: int | None = None
    ) -> Checkpoint:
        """Save after `step` finished steps, whole or not at all; then keep the newest `keep`.

        Args:
            write: fills the empty folder it is given with safetensors, JSON and text files.
            spare: step of a checkpoint to keep beside them.

        Raises: ValueError if keep < 1, step < 0, or `write` left nothing or a file of another
            kind; OSError or RuntimeError if writing failed. The message names the checkpoint
            that is still good; earlier checkpoints and metrics are as before.
        """
        if step < 0 or keep < 1:
            raise ValueError(f"step={step} must not be negative, keep={keep} must be at least 1.")
        self._restore_replaced()
        temporary = self.checkpoints_path / f".step_{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            if self.metrics_path.exists():
                fsync_path(self.metrics_path)
            temporary.mkdir(parents=True)
            write(temporary)
            seal(temporary, step=step)
            self._move_into_place(temporary, step=step)
        except ValueError:
            raise
        except OSError as error:
            raise OSError(error.errno, self._failure_text(step, error)) from error
        except Exception as error:
            # A writer's own errors, e.g. of safetensors on a full disk, are no OSError.
            raise RuntimeError(self._failure_text(step, error)) from error
        finally:
            # Nothing is left of it after success. If even this fails, the name marks it as
            # unfinished and the next save removes it.
            shutil.rmtree(temporary, ignore_errors=True)
        self._prune(step, keep=keep, spare=spare)
        return Checkpoint(step, self.checkpoints_path / f"step_{step}")

    def latest_checkpoint(self) -> Checkpoint:
        """Newest checkpoint whose every file agrees with its manifest.

        A newer one that is damaged or unfinished is skipped with a warning that says what is
        wrong and which one is used.
        Raises: FileNotFoundError if there is none, ValueError if none is intact.
        """
        problems = []
        for step, path in self._candidates():
            problem = self._problem_of(path, step=step)
            if problem is None:
                for text in problems:
                    warnings.warn(f"{text} Using {path.name} instead.", stacklevel=2)
                return Checkpoint(step, path)
            problems.append(f"checkpoint {path.name} is skipped: {problem}.")
        if problems:
            raise ValueError(
                f"{self.checkpoints_path} has no intact checkpoint. " + " ".join(problems) + " "
                "Restore one from a backup, or start the run again under another name."
            )
        raise FileNotFoundError(
            f"{self.checkpoints_path} has no checkpoint: the run ended before its first one. "
            "Start it again under another name, with a smaller train.checkpoint_every."
        )

    def checkpoints(self) -> list[Checkpoint]:
        """Finished checkpoints, newest first; whether they are intact is not looked at."""
        return [
            Checkpoint(step, path)
            for step, path in self._candidates()
            if CHECKPOINT_NAME.fullmatch(path.name)
        ]

    def checkpoint(self, name: str) -> Checkpoint:
        """An intact checkpoint by its name, e.g. `step_40`.

        Raises: ValueError naming those that are there, or what is wrong with it.
        """
        named = {saved.path.name: saved for saved in self.checkpoints()}
        if name not in named:
            raise ValueError(
                f"{self.path} has no checkpoint '{name}'; it has "
                f"{', '.join(reversed(named)) or 'none'}."
            )
        problem = problem_of(named[name].path, step=named[name].step)
        if problem is not None:
            raise ValueError(f"checkpoint {name} of {self.path} cannot be used: {problem}.")
        return named[name]

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps, so that none of them is the newest; a warning names
        them."""
        moved = []
        for later in self.checkpoints():
            if later.step > step:
                target = later.path.with_name(f"{later.path.name}.discarded")
                while target.exists():
                    target = target.with_name(f"{target.name}_")
                moved.append(later.path.rename(target).name)
        if moved:
            fsync_path(self.checkpoints_path)
            warnings.warn(
                f"the run goes on from step {step}; its later checkpoints are kept in "
                f"{self.checkpoints_path} as {', '.join(reversed(moved))}, for you to remove.",
                stacklevel=2,
            )

    def _remove_unstarted(self) -> None:
        """Remove a run that never came to a checkpoint, if nothing else is in its folder.

        Only for the process that holds the run: in its first save, it looks like this too.
        """
        names = {path.name for path in self.path.iterdir()} - {LOCK_FILE}
        if self.checkpoints_path.name not in names:
            return
        written = (self.config_path, self.provenance_path)
        written = (*written, *(path.with_name(f".{path.name}.tmp") for path in written))
        saves = list(self.checkpoints_path.iterdir())
        if names - {self.checkpoints_path.name} <= {path.name for path in written} and all(
            UNFINISHED_NAME.fullmatch(path.name) for path in saves
        ):
            for path in saves:
                shutil.rmtree(path)
            for path in written:
                path.unlink(missing_ok=True)
            self.checkpoints_path.rmdir()

    def _check_free(self) -> None:
        """The folder is empty but for the lock. Raises: ValueError saying what to do."""
        if not {path.name for path in self.path.iterdir()} - {LOCK_FILE}:
            return
        has_checkpoint = any(
            not UNFINISHED_NAME.fullmatch(path.name) for _, path in self._candidates()
        )
        go_on = f"Continue that run with `depthdial resume {self.path}`, or give"
        raise ValueError(
            f"{self.path} exists already and is not empty. {go_on if has_checkpoint else 'Give'} "
            "the new run another name."
        )

    @contextmanager
    def _saying_the_way_on(self, path: Path) -> Iterator[None]:
        """A disk that refuses leaves this file as it was; the error says so, and how to go on."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"could not write {path}: {error.strerror}; it is as it was, and {self._way_on()}",
            ) from error

    def _candidates(self) -> list[tuple[int, Path]]:
        """Checkpoints and unfinished ones, newest first; a finished one before its namesakes.

        A process that reads changes nothing: one that stepped aside counts where it is.
        """
        if not self.checkpoints_path.is_dir():
            return []
        found = []
        for path in self.checkpoints_path.iterdir():
            for rank, pattern in enumerate((UNFINISHED_NAME, REPLACED_NAME, CHECKPOINT_NAME)):
                if match := pattern.fullmatch(path.name):
                    found.append((int(match[1]), rank, path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _problem_of(self, path: Path, *, step: int) -> str | None:
        """Why a candidate cannot be trusted, or None."""
        if UNFINISHED_NAME.fullmatch(path.name):
            return "it was never finished"
        return problem_of(path, step=step)

    def _failure_text(self, step: int, error: Exception) -> str:
        """Message for a checkpoint that could not be written."""
        return (
            f"could not write checkpoint step_{step} in {self.checkpoints_path}: {error}. Its "
            f"unfinished files were removed; {self._way_on()}"
        )

    def _way_on(self) -> str:
        """After a disk refused: what stands, and what to do when there is space again."""
        self._restore_replaced()
        for step, path in self._candidates():
            if self._problem_of(path, step=step) is None:
                good = f"{path.name} is still good"
                return f"{good}. Free disk space, then `depthdial resume {self.path}`."
        return (
            "there is no earlier checkpoint, so nothing is kept. Free disk space, then start the "
            "run again."
        )

    def _move_into_place(self, temporary: Path, *, step: int) -> None:
        """Give a sealed folder its final name; a namesake stays until that is done."""
        final = self.checkpoints_path / f"step_{step}"
        replaced = self.checkpoints_path / f".step_{step}.old"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        fsync_path(self.checkpoints_path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _restore_replaced(self) -> None:
        """Undo or finish a replacement that a crash cut between its two renames."""
        if not self.checkpoints_path.is_dir():
            return
        for path in list(self.checkpoints_path.iterdir()):
            match = REPLACED_NAME.fullmatch(path.name)
            if not match:
                continue
            final = self.checkpoints_path / f"step_{match[1]}"
            if final.exists():
                shutil.rmtree(path)
            else:
                path.rename(final)

    def _prune(self, newest_step: int, *, keep: int, spare: int | None) -> None:
        """Remove all but the newest `keep` up to this step, and leftovers of killed saves.

        Later steps are left alone: the one just written must not fall to a damaged later one.
        """
        earlier = [saved for saved in self.checkpoints() if saved.step < newest_step]
        unfinished = [p for _, p in self._candidates() if UNFINISHED_NAME.fullmatch(p.name)]
        for path in [*(s.path for s in earlier[keep - 1 :] if s.step != spare), *unfinished]:
            shutil.rmtree(path)


def seal(folder: Path, *, step: int) -> None:
    """Force every file to disk and write the manifest last.

    Raises: ValueError if the folder is empty or holds a link or a file of another kind.
    """
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in files:
        if not is_allowed(path) or path.is_symlink():
            raise ValueError(
                f"checkpoint step_{step}: '{path.name}' is not allowed; it holds "
                f"regular files of the kinds {', '.join(ALLOWED_SUFFIXES)}, and licences."
            )
    if not files or folder / MANIFEST in files:
        raise ValueError(
            f"checkpoint step_{step}: its writer left {len(files)} files; expected at least one, "
            f"and none named {MANIFEST}."
        )
    entries = {}
    for path in files:
        fsync_path(path)
        entries[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": hash_file(path),
        }
    manifest = {"manifest_version": MANIFEST_VERSION, "step": step, "files": entries}
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        fsync_path(path)


def is_allowed(path: Path) -> bool:
    """Whether a file of this name may be in a checkpoint."""
    return path.suffix in ALLOWED_SUFFIXES or LICENCE_NAMES.fullmatch(path.name) is not None


def problem_of(folder: Path, *, step: int) -> str | None:
    """Why a sealed folder cannot be trusted, or None. Reads every byte."""
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = parse_json(manifest_path.read_text(encoding="utf-8"))
        version, listed_step, files = (
            manifest["manifest_version"], manifest["step"], manifest["files"]
        )  # fmt: skip
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if version != MANIFEST_VERSION:
        return f"its manifest_version is {version}, this program reads {MANIFEST_VERSION}"
    if listed_step != step or not expected:
        return f"its {MANIFEST} is of step {listed_step} and lists {len(expected)} files"
    for name, (num_bytes, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"'{name}' is missing"
        if path.stat().st_size != num_bytes:
            return f"'{name}' has {path.stat().st_size} bytes instead of {num_bytes}"
        if hash_file(path) != digest:
            return f"the contents of '{name}' changed (SHA-256 differs)"
    return None
