"""Checkpoints of a run: complete or not there, pruned, and skipped where they are damaged."""

import json
import os
import shutil

import pytest
from run_folders import names_in, saved_value, writer

from depthdial import disk
from depthdial.training.run_dir import Checkpoint


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

    monkeypatch.setattr(disk.os, "fsync", record)
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
    # Whoever only reads must not move what another process is about to replace.
    assert names_in(run.checkpoints_path) == [".step_5.old"]
    with run.held():
        assert names_in(run.checkpoints_path) == ["step_5"]


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
