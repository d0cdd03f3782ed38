"""Run folders: creation, metrics, checkpoints that survive crashes, damage and full disks."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from depthdial.config import LoopConfig
from depthdial.train import sealed_folder
from depthdial.train.run_dir import Checkpoint, RunDir

CONFIG = LoopConfig(update="residual")


@pytest.fixture
def run(tmp_path):
    """A new run."""
    return RunDir.create(tmp_path / "runs", "try-1", config=CONFIG, provenance={"seed": 3})


def writer(value, *, num_values=200):
    """Writes a model folder and optimizer state whose contents depend on `value`."""

    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"value": value}))
        weights = {"weight": np.full(num_values, value, dtype=np.float32)}
        save_file(weights, folder / "model" / "model.safetensors")
        save_file(weights, folder / "optimizer.safetensors")

    return write


def saved_value(checkpoint):
    return float(load_file(checkpoint.path / "optimizer.safetensors")["weight"][0])


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def tree_bytes(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_new_run_holds_its_config_and_provenance(run):
    assert LoopConfig.from_file(run.config_path) == CONFIG
    assert run.read_provenance() == {"seed": 3}
    assert names_in(run.path) == ["checkpoints", "config.json", "provenance.json"]


def test_existing_run_is_refused_with_advice_and_left_alone(run):
    run.append_metrics({"step": 1})
    before = tree_bytes(run.path)
    with pytest.raises(ValueError, match="depthdial resume .*try-1.* another name"):
        RunDir.create(run.path.parent, "try-1", config=LoopConfig(), provenance={})
    assert tree_bytes(run.path) == before


def test_empty_folder_of_that_name_is_used(tmp_path):
    (tmp_path / "empty").mkdir()
    assert RunDir.create(tmp_path, "empty", config=CONFIG, provenance={}).config_path.is_file()


@pytest.mark.parametrize("name", ["", "../escape", "a/b", ".hidden", "a b"])
def test_name_that_is_no_plain_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="run name"):
        RunDir.create(tmp_path, name, config=CONFIG, provenance={})


def test_open_takes_up_a_run_and_refuses_another_folder(run, tmp_path):
    assert RunDir.open(str(run.path)).metrics_path == run.metrics_path
    with pytest.raises(FileNotFoundError, match="is no run"):
        RunDir.open(tmp_path)


def test_provenance_can_be_completed_at_the_end(run):
    run.write_provenance(run.read_provenance() | {"training_flops": 1.5e12})
    assert run.read_provenance() == {"seed": 3, "training_flops": 1.5e12}


def test_each_metrics_record_is_one_line_on_disk_at_once(run):
    for step in (1, 2):
        run.append_metrics({"step": step, "loss": {"1": 2.5, "4": 2.25}, "tokens": 10 * step})
        assert len(run.metrics_path.read_text().splitlines()) == step
    assert run.read_metrics()[1] == {"step": 2, "loss": {"1": 2.5, "4": 2.25}, "tokens": 20}


def test_nan_and_infinity_are_written_as_null_and_named(run):
    run.append_metrics({"step": 1, "loss": {"1": float("nan"), "2": 1.0}, "norms": [float("inf")]})

    def refuse(text):
        raise AssertionError(f"not JSON: {text}")

    record = json.loads(run.metrics_path.read_text(), parse_constant=refuse)
    assert record["loss"] == {"1": None, "2": 1.0} and record["norms"] == [None]
    assert record["nonfinite"] == {"loss.1": "nan", "norms.0": "inf"}


@pytest.mark.parametrize("record", [{"loss": 1.0}, {"step": "3"}, {"step": 3.0}])
def test_record_without_an_integer_step_is_refused(run, record):
    with pytest.raises(ValueError, match="needs an integer 'step'"):
        run.append_metrics(record)


def test_resume_moves_later_lines_aside_and_says_so(run):
    for step in range(1, 8):
        run.append_metrics({"step": step})
    with pytest.warns(UserWarning, match="3 metrics lines after step 4"):
        assert run.discard_metrics_after(4) == 3
    run.append_metrics({"step": 5, "again": True})
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 4, 5]
    discarded = [json.loads(line) for line in run.discarded_path.read_text().splitlines()]
    assert discarded == [{"step": 5}, {"step": 6}, {"step": 7}]


@pytest.mark.filterwarnings("error")
def test_resume_with_nothing_to_move_is_silent(run):
    assert run.discard_metrics_after(0) == 0
    run.append_metrics({"step": 1})
    assert run.discard_metrics_after(1) == 0
    assert not run.discarded_path.exists()


@pytest.mark.filterwarnings("error")
def test_line_cut_by_a_kill_is_dropped_before_the_next_append(run):
    run.append_metrics({"step": 1})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert run.read_metrics() == [{"step": 1}]
    run.discard_metrics_after(1)
    run.append_metrics({"step": 2})
    assert run.read_metrics() == [{"step": 1}, {"step": 2}]


def test_damaged_line_is_named(run):
    run.metrics_path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is damaged"):
        run.read_metrics()


def test_checkpoint_comes_back_with_its_step(run):
    saved = run.save_checkpoint(20, writer(2.0), keep=2)
    assert run.latest_checkpoint() == saved == Checkpoint(20, run.checkpoints_path / "step_20")
    assert saved_value(saved) == 2.0


def test_manifest_lists_every_file_with_size_and_digest(run):
    saved = run.save_checkpoint(20, writer(2.0), keep=1)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    files = {"model/config.json", "model/model.safetensors", "optimizer.safetensors"}
    assert manifest["step"] == 20 and set(manifest["files"]) == files
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == (saved.path / name).stat().st_size
        assert len(entry["sha256"]) == 64


def test_every_file_and_folder_is_forced_to_disk_before_it_gets_its_name(run, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(descriptor):
        is_named = (run.checkpoints_path / "step_20").exists()
        synced.append((os.fstat(descriptor).st_ino, is_named))
        fsync(descriptor)

    monkeypatch.setattr(sealed_folder.os, "fsync", record)
    saved = run.save_checkpoint(20, writer(2.0), keep=1)
    before = {inode for inode, is_named in synced if not is_named}
    after = {inode for inode, is_named in synced if is_named}
    inside = [saved.path, *saved.path.rglob("*")]
    assert {path.stat().st_ino for path in inside} <= before
    assert run.checkpoints_path.stat().st_ino in after


def test_newest_is_the_largest_step_not_the_last_name(run):
    for step in (9, 10, 100):
        run.save_checkpoint(step, writer(step), keep=3)
    assert run.latest_checkpoint().step == 100


def test_only_the_newest_are_kept(run):
    for step in (1, 2, 3, 4):
        run.save_checkpoint(step, writer(step), keep=2)
    assert names_in(run.checkpoints_path) == ["step_3", "step_4"]


def test_old_checkpoints_stay_until_the_new_one_is_complete(run):
    run.save_checkpoint(1, writer(1), keep=1)

    def write(folder):
        assert (run.checkpoints_path / "step_1" / "manifest.json").is_file()
        writer(2)(folder)

    run.save_checkpoint(2, write, keep=1)
    assert names_in(run.checkpoints_path) == ["step_2"]


def test_checkpoint_just_written_is_not_pruned_for_a_damaged_later_one(run):
    run.save_checkpoint(30, writer(30), keep=1)
    (run.checkpoints_path / "step_30" / "manifest.json").unlink()
    run.save_checkpoint(20, writer(20), keep=1)
    with pytest.warns(UserWarning, match="step_30 is skipped"):
        assert run.latest_checkpoint().step == 20


def test_same_step_again_replaces_the_checkpoint(run):
    run.save_checkpoint(5, writer(1), keep=2)
    run.save_checkpoint(5, writer(2), keep=2)
    assert names_in(run.checkpoints_path) == ["step_5"]
    assert saved_value(run.latest_checkpoint()) == 2.0


def test_replacement_cut_between_its_renames_keeps_the_old_checkpoint(run):
    run.save_checkpoint(5, writer(1), keep=2)
    (run.checkpoints_path / "step_5").rename(run.checkpoints_path / ".step_5.old")
    assert saved_value(run.latest_checkpoint()) == 1.0


@pytest.mark.parametrize("values", [{"step": -1, "keep": 1}, {"step": 1, "keep": 0}])
def test_impossible_step_or_number_to_keep_is_refused(run, values):
    with pytest.raises(ValueError, match="must"):
        run.save_checkpoint(values["step"], writer(1), keep=values["keep"])


@pytest.mark.parametrize("name", ["optimizer.pt", "state.pkl", "model.bin", "data"])
def test_checkpoint_with_anything_but_safetensors_and_text_is_refused(run, name):
    run.save_checkpoint(1, writer(1), keep=2)
    with pytest.raises(ValueError, match=f"'{name}' is not allowed"):
        run.save_checkpoint(2, lambda folder: (folder / name).write_bytes(b"x"), keep=2)
    assert names_in(run.checkpoints_path) == ["step_1"]


def test_writer_that_leaves_nothing_is_refused(run):
    with pytest.raises(ValueError, match="left 0 files"):
        run.save_checkpoint(1, lambda folder: None, keep=1)


def truncate(folder):
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def flip_one_bit(folder):
    path = folder / "model" / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-5] ^= 1
    path.write_bytes(contents)


def remove_file(folder):
    (folder / "model" / "config.json").unlink()


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:40])


def change_version(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"manifest_version": 99}))


def change_step(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 3}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, r"'optimizer\.safetensors' has \d+ bytes instead of \d+"),
        (flip_one_bit, r"contents of 'model/model\.safetensors' changed"),
        (remove_file, r"'model/config\.json' is missing"),
        (remove_manifest, r"it has no manifest\.json"),
        (cut_manifest, r"manifest\.json cannot be read"),
        (change_version, "manifest_version is 99"),
        (change_step, "is of step 3"),
    ],
)
def test_damaged_checkpoint_is_skipped_with_its_name_the_reason_and_the_one_used(
    run, damage, reason
):
    run.save_checkpoint(10, writer(1), keep=2)
    run.save_checkpoint(20, writer(2), keep=2)
    damage(run.checkpoints_path / "step_20")
    with pytest.warns(UserWarning, match=rf"step_20 is skipped: .*{reason}.*Using step_10"):
        checkpoint = run.latest_checkpoint()
    assert checkpoint.step == 10 and saved_value(checkpoint) == 1.0


def test_every_damaged_checkpoint_is_named(run):
    for step in (1, 2, 3):
        run.save_checkpoint(step, writer(step), keep=3)
    truncate(run.checkpoints_path / "step_3")
    flip_one_bit(run.checkpoints_path / "step_2")
    with pytest.warns(UserWarning) as caught:
        assert run.latest_checkpoint().step == 1
    assert ["step_3" in str(caught[0].message), "step_2" in str(caught[1].message)] == [True, True]


def test_half_written_checkpoint_of_a_killed_save_is_named_and_later_removed(run):
    run.save_checkpoint(10, writer(1), keep=2)
    half_written = run.checkpoints_path / ".step_20.tmp"
    half_written.mkdir()
    (half_written / "optimizer.safetensors").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"\.step_20\.tmp is skipped: it was never finished"):
        assert run.latest_checkpoint().step == 10
    run.save_checkpoint(15, writer(2), keep=2)
    assert names_in(run.checkpoints_path) == ["step_10", "step_15"]


@pytest.mark.filterwarnings("error")
def test_older_half_written_checkpoint_is_no_news(run):
    run.save_checkpoint(10, writer(1), keep=2)
    (run.checkpoints_path / ".step_5.tmp").mkdir()
    assert run.latest_checkpoint().step == 10


def test_no_intact_checkpoint_is_an_error_that_lists_what_is_wrong(run):
    for step in (1, 2):
        run.save_checkpoint(step, writer(step), keep=2)
        truncate(run.checkpoints_path / f"step_{step}")
    with pytest.raises(ValueError, match="no intact checkpoint.*step_2.*bytes.*step_1.*bytes"):
        run.latest_checkpoint()


def test_run_without_checkpoint_is_an_error_with_advice(run):
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        run.latest_checkpoint()
    shutil.rmtree(run.checkpoints_path)
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        run.latest_checkpoint()


def no_space(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_while_syncing_keeps_the_earlier_checkpoint_and_the_metrics(run, monkeypatch):
    run.append_metrics({"step": 10})
    run.save_checkpoint(10, writer(1), keep=1)
    before = tree_bytes(run.path)
    monkeypatch.setattr(sealed_folder.os, "fsync", no_space)
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
    monkeypatch.setattr(sealed_folder.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.save_checkpoint(20, writer(2), keep=1)
    monkeypatch.undo()
    assert run.save_checkpoint(20, writer(2), keep=1) == run.latest_checkpoint()


REAL_LIMIT = """
import resource, sys
import numpy as np
from safetensors.numpy import save_file
from depthdial.train.run_dir import RunDir

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
    assert metrics.startswith("OSError") and "lines before are intact" in metrics
    assert names_in(run.checkpoints_path) == ["step_10"]
    assert run.latest_checkpoint().step == 10
    assert [r["step"] for r in run.read_metrics()] == list(range(10, 11 + int(num_records)))
    assert run.metrics_path.read_bytes().endswith(b"}\n")


def test_full_disk_while_writing_the_config_keeps_the_old_one(run, monkeypatch):
    monkeypatch.setattr(sealed_folder.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.write_config(LoopConfig(update="replace"))
    monkeypatch.undo()
    assert LoopConfig.from_file(run.config_path) == CONFIG
    assert ".config.json.tmp" not in names_in(run.path)
