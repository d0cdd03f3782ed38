"""Folders that appear whole or not at all, and locks that end with their process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import depthdial
from depthdial import disk
from depthdial.disk import RECORD_FILE, new_folder, write_whole
from depthdial.locks import InUseError, locked
from depthdial.training.provenance import collect_provenance

REPOSITORY = Path(__file__).parents[1]
IMPORTS = """
import os, signal, sys
from pathlib import Path
import depthdial.disk as disk, depthdial.locks as locks
"""
HOLD = """
with locks.locked(Path(sys.argv[1]), what='the run'):
    print('held', flush=True)
    sys.stdin.read()
"""
WRITE_AND_DIE = """
with disk.new_folder(Path(sys.argv[1]), kind='a model folder', overwrite=True) as folder:
    (folder / 'half.bin').write_bytes(b'half')
    os.kill(os.getpid(), signal.SIGKILL)
"""
REPLACE_AND_DIE = """
rename, calls = Path.rename, []
def count(self, target):
    calls.append(self.name)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = count
with disk.new_folder(Path(sys.argv[1]), kind='a model folder', overwrite=True) as folder:
    (folder / 'config.json').write_text('two')
"""


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write(destination: Path, text: str, **options) -> None:
    """A model folder of two files."""
    with new_folder(destination, kind="a model folder", **options) as folder:
        (folder / "config.json").write_text(text)
        (folder / "texts").mkdir()
        (folder / "texts" / "one.txt").write_text(text)


def killed(script: str, *arguments: Path | int) -> None:
    """Run Python code that kills its own process, as no handler can prevent."""
    command = [sys.executable, "-c", IMPORTS + script, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, timeout=60)
    assert done.returncode == -signal.SIGKILL


# Locks


def test_f21_a_second_holder_is_refused_and_told_who_holds_the_lock(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", IMPORTS + HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert holder.stdout.readline() == b"held\n"
    message = rf"the run is in use by process {holder.pid}, since '\d.* UTC'. Wait until it is done"
    with pytest.raises(InUseError, match=message), locked(tmp_path / "lock", what="the run"):
        pass
    # No clean-up runs in a killed process: the system alone ends its lock.
    holder.kill()
    holder.communicate()
    assert (tmp_path / "lock").exists()
    with locked(tmp_path / "lock", what="the run"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_f21_a_lock_is_held_against_the_same_process_too(tmp_path):
    message = "the run is in use by this process"
    with locked(tmp_path / "lock", what="the run"):
        with pytest.raises(InUseError, match=message), locked(tmp_path / "lock", what="the run"):
            pass


@pytest.mark.parametrize("note", ["", "{", "[]", '{"pid": "x", "host": 1, "since": 2}'])
def test_f21_a_lock_without_a_readable_note_is_a_lock(tmp_path, note):
    with locked(tmp_path / "lock", what="the run"):
        (tmp_path / "lock").write_text(note)
        with pytest.raises(InUseError, match="in use by another process"):
            with locked(tmp_path / "lock", what="the run"):
                pass


def test_f21_the_note_of_another_machine_is_shown_without_control_characters(tmp_path):
    with locked(tmp_path / "lock", what="the run"):
        note = {"pid": 7, "host": "far\x1b[31m", "since": "today"}
        (tmp_path / "lock").write_text(json.dumps(note))
        with pytest.raises(InUseError, match=r"process 7 on 'far\\x1b\[31m', since 'today'"):
            with locked(tmp_path / "lock", what="the run"):
                pass


def test_f21_one_at_a_time_while_holders_remove_file_and_folder(tmp_path):
    """Whoever waits may hold a file that is not there any more; it must not count as the lock."""
    inside, most, done = [], [], []

    def work() -> None:
        for _ in range(25):
            with locked(tmp_path / "folder" / "lock", what="the folder", wait=True):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
            try:
                (tmp_path / "folder").rmdir()
            except OSError:
                pass
            done.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthdial.locks.POLL_SECONDS", 0.001)
        patch.setattr("depthdial.locks.warnings.warn", lambda *_, **__: None)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(done) == 6 * 25 and set(most) == {1}


def test_f21_a_lock_file_of_a_folder_that_was_moved_is_left_to_its_new_owner(tmp_path):
    with locked(tmp_path / "a" / "lock", what="a"):
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "lock").write_text("of somebody else")
    assert (tmp_path / "a" / "lock").read_text() == "of somebody else"


def test_f21_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="this file system has no locks .*Start only one"):
        with locked(tmp_path / "lock", what="the run"):
            pass
    assert list(tmp_path.iterdir()) == []


# Folders


def test_f21_a_second_writer_of_a_folder_is_refused_at_once(tmp_path):
    with new_folder(tmp_path / "a", kind="a model folder") as folder:
        with pytest.raises(InUseError, match="a is in use by this process"):
            write(tmp_path / "a", "second")
        (folder / "config.json").write_text("first")
    assert contents(tmp_path / "a")["config.json"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_f22_a_record_lists_the_files_and_only_a_folder_with_one_is_replaced(tmp_path):
    write(tmp_path / "a", "one")
    record = json.loads((tmp_path / "a" / RECORD_FILE).read_text())
    assert record == {"kind": "a model folder", "files": ["config.json", "texts/one.txt"]}
    write(tmp_path / "a", "two", overwrite=True)
    assert contents(tmp_path / "a")["texts/one.txt"] == "two"
    (tmp_path / "a" / RECORD_FILE).unlink()
    before = contents(tmp_path / "a")
    with pytest.raises(ValueError, match=r"has no intact \.depthdial\.json.* is not replaced"):
        write(tmp_path / "a", "three", overwrite=True)
    assert contents(tmp_path / "a") == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_f22_a_folder_of_another_kind_is_not_replaced(tmp_path):
    with new_folder(tmp_path / "a", kind="prepared data") as folder:
        (folder / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="a is prepared data, not a model folder, so it is not"):
        write(tmp_path / "a", "two", overwrite=True)
    assert "meta.json" in contents(tmp_path / "a")


def test_f22_loose_files_and_links_stay_where_a_folder_is_replaced(tmp_path):
    write(tmp_path / "a", "one")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.txt").write_text("x")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "a", "two", overwrite=True)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "a" / "link" / "x.txt").read_text() == "x"
    assert (tmp_path / "a" / "config.json").read_text() == "two"
    # They have not become depthdial's: the next replacement keeps them too.
    write(tmp_path / "a", "three", overwrite=True)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "elsewhere"]


def test_f22_a_loose_file_in_the_place_of_a_new_one_is_not_replaced(tmp_path):
    write(tmp_path / "a", "one")
    (tmp_path / "a" / "README.md").write_text("mine")
    before = contents(tmp_path / "a")
    with pytest.raises(ValueError, match="has a file 'README.md' that depthdial did not write"):
        with new_folder(tmp_path / "a", kind="a model folder", overwrite=True) as folder:
            (folder / "README.md").write_text("new")
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize("place", ["mine/notes.txt", "texts/notes.txt"])
def test_f22_a_folder_that_holds_files_of_others_is_not_replaced(tmp_path, place):
    write(tmp_path / "a", "one")
    (tmp_path / "a" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "a" / place).write_text("mine")
    before = contents(tmp_path / "a")
    with pytest.raises(ValueError, match="holds the folder '.*', which depthdial did not write"):
        write(tmp_path / "a", "two", overwrite=True)
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize("name", ["../precious.txt", "{absolute}"])
def test_f22_a_record_that_names_files_elsewhere_removes_nothing(tmp_path, name):
    (tmp_path / "precious.txt").write_text("precious")
    write(tmp_path / "a", "one")
    files = ["config.json", "texts/one.txt", name.format(absolute=tmp_path / "precious.txt")]
    record = {"kind": "a model folder", "files": files}
    (tmp_path / "a" / RECORD_FILE).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="has no intact"):
        write(tmp_path / "a", "two", overwrite=True)
    assert (tmp_path / "precious.txt").read_text() == "precious"


@pytest.mark.parametrize("target", ["real", "gone"])
def test_f22_a_destination_that_is_a_link_is_refused_and_stays(tmp_path, target):
    write(tmp_path / "real", "one")
    (tmp_path / "a").symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=f"a is no folder but a link to .*{target}"):
        write(tmp_path / "a", "two", overwrite=True)
    assert (tmp_path / "a").is_symlink() and contents(tmp_path / "real")["config.json"] == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "real"]


@pytest.mark.parametrize("source", ["a", "a/raw", ".", "link", "link/raw"])
def test_f22_what_is_read_and_what_is_replaced_lie_apart(tmp_path, source):
    write(tmp_path / "a", "one")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = contents(tmp_path / "a")
    with pytest.raises(ValueError, match="lie in one another; what is read is never changed"):
        write(tmp_path / "a", "two", overwrite=True, apart_from=[tmp_path / source])
    assert contents(tmp_path / "a") == before


def test_f22_a_folder_under_two_names_is_one_folder(tmp_path, monkeypatch):
    """File systems that ignore the case of letters, and folders that are mounted twice."""
    write(tmp_path / "data", "one")
    (tmp_path / "DATA").mkdir()
    samefile = Path.samefile

    def ignoring_case(self: Path, other: Path) -> bool:
        return str(self).lower() == str(other).lower() or samefile(self, other)

    monkeypatch.setattr(Path, "samefile", ignoring_case)
    with pytest.raises(ValueError, match="lie in one another"):
        write(tmp_path / "data", "two", overwrite=True, apart_from=[tmp_path / "DATA"])


@pytest.mark.parametrize("is_there", [False, True])
def test_f22_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path, is_there):
    if is_there:
        write(tmp_path / "a", "one")
    killed(WRITE_AND_DIE, tmp_path / "a")
    assert (tmp_path / ".a.depthdial" / "new" / "half.bin").exists()
    assert (tmp_path / "a").exists() == is_there
    write(tmp_path / "a", "two", overwrite=True)
    assert set(contents(tmp_path / "a")) == {"config.json", "texts/one.txt", RECORD_FILE}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("renames", "expected"), [(1, "one"), (2, "one"), (3, "two")])
def test_f22_a_replacement_that_is_killed_at_any_rename_loses_nothing(tmp_path, renames, expected):
    """Of the old folder, of the new one, and of the loose file that moves between them."""
    write(tmp_path / "a", "one")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    killed(REPLACE_AND_DIE, tmp_path / "a", renames)
    # A command that is refused puts back what it finds, too.
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(tmp_path / "a", "three")
    assert (tmp_path / "a" / "config.json").read_text() == expected
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_f22_an_interrupted_replacement_puts_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "a", "one")
    before, rename = contents(tmp_path / "a"), Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", "two", overwrite=True)
    assert contents(tmp_path / "a") == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_f22_an_old_folder_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    """Windows removes no file that somebody has open."""
    write(tmp_path / "a", "one")
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.name == "config.json":
            raise PermissionError(errno.EACCES, "open elsewhere", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="stays at .*old: .*open"):
        patch.setattr(Path, "unlink", refuse)
        write(tmp_path / "a", "two", overwrite=True)
    assert (tmp_path / "a" / "config.json").read_text() == "two"
    write(tmp_path / "a", "three", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_f21_a_full_disk_names_the_file_what_stands_and_the_way_on(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = r"could not write .*a: No space left on device \(\.depthdial\.json\)\. Nothing was"
    with pytest.raises(OSError, match=message) as caught:
        write(tmp_path / "a", "one")
    assert caught.value.errno == errno.ENOSPC
    assert "Make room or choose another folder, and run the command again" in str(caught.value)
    (tmp_path / "file.json").write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*/file\.json'"):
        write_whole(tmp_path / "file.json", "new")
    assert contents(tmp_path) == {"file.json": "old"}


# ---- Windows, simulated


@pytest.fixture
def windows(monkeypatch):
    """No sysconf, no fcntl, folders that cannot be opened, files that only a writer forces."""
    really_open, holders = os.open, {}

    def open_as_windows(path, flags, *rest, **options):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        if not flags & (os.O_WRONLY | os.O_RDWR) and str(path).endswith((".json", ".jsonl")):
            raise OSError(errno.EBADF, "Bad file descriptor: fsync of a file open for reading")
        return really_open(path, flags, *rest, **options)

    class Msvcrt:
        LK_NBLCK = 2

        @staticmethod
        def locking(descriptor, mode, count):
            place, holder = os.fstat(descriptor).st_ino, None
            with suppress(OSError, KeyError):
                holder = os.fstat(holders[place]).st_ino
            # A closed file holds nothing.
            if holder == place and holders[place] != descriptor:
                raise PermissionError(errno.EACCES, "Permission denied")
            holders[place] = descriptor

    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(disk, "IS_WINDOWS", True)
    monkeypatch.setattr(os, "open", open_as_windows)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt)


def test_f34_files_and_folders_are_forced_to_disk_without_opening_a_folder(windows, tmp_path):
    write_whole(tmp_path / "a.json", "{}")
    disk.fsync_path(tmp_path / "a.json")
    disk.fsync_path(tmp_path)
    with new_folder(tmp_path / "model", kind="a model folder") as folder:
        (folder / "config.json").write_text("{}")
    assert (tmp_path / "model" / "config.json").read_text() == "{}"


def test_f34_a_lock_without_fcntl_keeps_a_second_writer_out(windows, tmp_path):
    with (
        locked(tmp_path / "lock", what="the run"),
        pytest.raises(InUseError, match="the run is in use by this process"),
        locked(tmp_path / "lock", what="the run"),
    ):
        pass


def test_f34_provenance_says_what_windows_tells(windows):
    hardware = collect_provenance(seed=0, device="cpu")["hardware"]
    assert hardware["memory_bytes"] is None and hardware["cores"] == os.cpu_count()


def test_f34_a_run_is_trained_and_resumed(windows, tmp_path):
    small = {"model__d_model": 16, "model__d_ff": 16, "train__batch_size": 8, "train__val_rows": 4}
    result = depthdial.train("tiny-pointer", root=tmp_path, train__steps=1, name="run", **small)
    assert result.status == "finished"
    assert depthdial.resume(result.path).step == 1
