"""A full disk loses nothing that was there before."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import CONFIG, names_in, new_run, saved_value, tree_bytes, writer

from depthdial import disk
from depthdial.config import LoopConfig
from depthdial.training.run_dir import RunDir


def no_space(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_while_syncing_keeps_the_earlier_checkpoint_and_the_metrics(run, monkeypatch):
    run.append_metrics({"step": 10})
    run.save_checkpoint(10, writer(1), keep=1)
    before = tree_bytes(run.path)
    monkeypatch.setattr(disk.os, "fsync", no_space)
    with pytest.raises(OSError, match=r"step_20.*No space left.*step_10 is still good") as caught:
        run.save_checkpoint(20, writer(2), keep=1)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert tree_bytes(run.path) == before
    assert names_in(run.checkpoints_path) == ["step_10"]
    assert run.latest_checkpoint().step == 10


def test_full_disk_in_the_writer_keeps_the_earlier_checkpoint(run):
    run.save_checkpoint(10, writer(1), keep=1)

    def write(folder):
        (folder / "config.json").write_text("{}")
        no_space()

    with pytest.raises(OSError, match="step_10 is still good"):
        run.save_checkpoint(20, write, keep=1)
    assert names_in(run.checkpoints_path) == ["step_10"]


def test_full_disk_at_the_last_rename_keeps_the_checkpoint_being_replaced(run, monkeypatch):
    run.save_checkpoint(10, writer(1), keep=1)
    rename = Path.rename

    def refuse_final(path, target):
        return no_space() if path.name == ".step_10.tmp" else rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_final)
    with pytest.raises(OSError, match="step_10 is still good"):
        run.save_checkpoint(10, writer(2), keep=1)
    monkeypatch.undo()
    assert names_in(run.checkpoints_path) == ["step_10"]
    assert saved_value(run.latest_checkpoint()) == 1.0


def test_first_checkpoint_that_fails_says_that_there_is_none(run):
    with pytest.raises(OSError, match="there is no earlier checkpoint"):
        run.save_checkpoint(20, no_space, keep=1)
    assert names_in(run.checkpoints_path) == []


def test_error_of_the_writer_becomes_a_runtime_error_with_its_text(run):
    class LibraryError(Exception):
        """What a tensor library may raise on a full disk."""

    def write(folder):
        raise LibraryError("device is full")

    run.save_checkpoint(10, writer(1), keep=1)
    with pytest.raises(RuntimeError, match="device is full.*step_10 is still good"):
        run.save_checkpoint(20, write, keep=1)
    assert names_in(run.checkpoints_path) == ["step_10"]


def test_interrupt_while_saving_leaves_no_temporary(run):
    def write(folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(20, write, keep=1)
    assert names_in(run.checkpoints_path) == []


def test_saving_works_again_when_there_is_space(run, monkeypatch):
    monkeypatch.setattr(disk.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.save_checkpoint(20, writer(2), keep=1)
    monkeypatch.undo()
    assert run.save_checkpoint(20, writer(2), keep=1) == run.latest_checkpoint()


REAL_LIMIT = """
import resource, sys
import numpy as np
from safetensors.numpy import save_file
from depthdial.training.run_dir import RunDir

run = RunDir.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
large = {"weight": np.ones(100_000, dtype=np.float32)}
for write in (
    lambda folder: save_file(large, folder / "optimizer.safetensors"),
    lambda folder: (folder / "state.json").write_bytes(bytes(100_000)),
):
    try:
        run.save_checkpoint(20, write, keep=1)
    except (OSError, RuntimeError) as error:
        print(type(error).__name__, error)
    else:
        print("saved")
records = 0
try:
    while True:
        run.append_metrics({"step": 11 + records, "text": "x" * 900})
        records += 1
except OSError as error:
    print(type(error).__name__, error)
print(records)
"""


def test_real_file_size_limit_loses_nothing(run):
    """The operating system itself refuses: no mock between the writer and the disk."""
    run.append_metrics({"step": 10})
    run.save_checkpoint(10, writer(1), keep=1)
    done = subprocess.run(
        [sys.executable, "-c", REAL_LIMIT, str(run.path)],
        capture_output=True, text=True, check=True, timeout=60,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    by_library, by_python, metrics, num_records = done.stdout.splitlines()
    for line in (by_library, by_python):
        assert "could not write checkpoint step_20" in line and "step_10 is still good" in line
    assert metrics.startswith("OSError") and "it is as it was, and step_10 is still good" in metrics
    assert names_in(run.checkpoints_path) == ["step_10"]
    assert run.latest_checkpoint().step == 10
    assert [r["step"] for r in run.read_metrics()] == list(range(10, 11 + int(num_records)))
    assert run.metrics_path.read_bytes().endswith(b"}\n")


def test_full_disk_while_writing_the_config_keeps_the_old_one(run, monkeypatch):
    monkeypatch.setattr(disk.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.write_config(LoopConfig(update="replace"))
    monkeypatch.undo()
    assert LoopConfig.from_file(run.config_path) == CONFIG
    assert ".config.json.tmp" not in names_in(run.path)


def full_from(call, monkeypatch):
    """Refuse to sync from the n-th call on; returns the calls."""
    calls, fsync = [], os.fsync

    def refuse(descriptor):
        calls.append(descriptor)
        if len(calls) >= call:
            no_space()
        fsync(descriptor)

    monkeypatch.setattr(disk.os, "fsync", refuse)
    return calls


def test_f24_a_full_disk_at_any_write_of_a_new_run_leaves_a_free_name_or_a_good_checkpoint(
    tmp_path, monkeypatch
):
    """The folder was accepted by neither train nor resume, or the advice was to resume nothing."""
    ends = []
    for call in itertools.count(1):
        path = tmp_path / f"x{call}"
        with monkeypatch.context() as patch:
            full_from(call, patch)
            try:
                with RunDir.create(tmp_path, path.name, config=CONFIG, provenance={}) as run:
                    run.save_checkpoint(0, writer(0), keep=2)
                    run.write_provenance({"n": 1})
                break
            except OSError as error:
                text = str(error)
        assert "could not write" in text and "No space left on device" in text
        if path.exists():
            assert f"step_0 is still good. Free disk space, then `depthdial resume {path}`" in text
            assert RunDir.open(path).latest_checkpoint().step == 0
        else:
            assert "nothing is kept. Free disk space, then start the run again" in text
            new_run(tmp_path, path.name)
        ends.append("kept" if "still good" in text else "free")
    # Config, provenance and a checkpoint of several files, before anything is kept.
    assert ends.index("kept") > 8 and "free" not in ends[ends.index("kept") :]


def test_f24_interrupting_the_first_save_leaves_a_free_name(tmp_path):
    def interrupted(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with RunDir.create(tmp_path, "x", config=CONFIG, provenance={}) as run:
            run.save_checkpoint(0, interrupted, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_f21_a_full_disk_names_the_file_what_was_kept_and_the_way_on(run, monkeypatch):
    run.save_checkpoint(10, writer(1), keep=1)
    for step in (9, 10, 11):
        run.append_metrics({"step": step})
    before = tree_bytes(run.path)
    monkeypatch.setattr(disk.os, "fsync", no_space)
    message = r"could not write .*{}: No space left on device; it is as it was, and step_10 is"
    with pytest.raises(OSError, match=message.format(r"provenance\.json")):
        run.write_provenance({"n": 2})
    with pytest.raises(OSError, match=message.format(r"metrics\.jsonl")):
        with pytest.warns(UserWarning, match="1 metrics lines"):
            run.discard_metrics_after(10)
    monkeypatch.undo()
    after = tree_bytes(run.path)
    assert after.pop("metrics.discarded.jsonl") == b'{"step": 11}\n' and after == before
