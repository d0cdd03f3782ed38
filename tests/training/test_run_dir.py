"""Run folders: creation, configs and metrics; checkpoints in `test_checkpoints.py`."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from run_folders import CONFIG, names_in, new_run, saved_value, tree_bytes, writer

from depthdial.config import LoopConfig
from depthdial.locks import InUseError
from depthdial.training.run_dir import RunDir


def test_new_run_holds_its_config_and_provenance(run):
    assert LoopConfig.from_file(run.config_path) == CONFIG
    assert run.read_provenance() == {"seed": 3}
    assert names_in(run.path) == ["checkpoints", "config.json", "provenance.json"]


def test_existing_run_is_refused_with_advice_and_left_alone(run):
    run.append_metrics({"step": 1})
    run.save_checkpoint(1, writer(1), keep=1)
    before = tree_bytes(run.path)
    with pytest.raises(ValueError, match="depthdial resume .*try-1.* another name"):
        new_run(run.path.parent, "try-1", config=LoopConfig())
    assert tree_bytes(run.path) == before


def test_empty_folder_of_that_name_is_used(tmp_path):
    (tmp_path / "empty").mkdir()
    assert new_run(tmp_path, "empty").config_path.is_file()


@pytest.mark.parametrize("name", ["", "../escape", "a/b", ".hidden", "a b"])
def test_name_that_is_no_plain_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="run name"):
        new_run(tmp_path, name)


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


# One process at a time


def test_f23_of_many_starts_of_one_name_one_gets_the_folder_and_keeps_it(tmp_path):
    """Two starts within a second once deleted each other's folder."""
    for attempt in range(5):
        root, start, won, refused = tmp_path / str(attempt), threading.Barrier(6), [], []
        ended = threading.Semaphore(0)

        def work(number, root=root, start=start, won=won, refused=refused, ended=ended):
            start.wait()
            try:
                with RunDir.create(root, "x", config=CONFIG, provenance={"n": number}) as run:
                    won.append(number)
                    for _ in range(5):
                        ended.acquire()
                    run.save_checkpoint(0, writer(number), keep=1)
            except InUseError as error:
                refused.append(str(error))
                ended.release()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and len(refused) == 5
        run = RunDir.open(root / "x")
        assert run.read_provenance() == {"n": won[0]}
        assert saved_value(run.latest_checkpoint()) == won[0]


def test_f23_a_run_in_its_first_save_is_not_one_that_never_started(tmp_path):
    with RunDir.create(tmp_path, "x", config=CONFIG, provenance={"n": 1}) as run:

        def write(folder):
            writer(1)(folder)
            before = tree_bytes(run.path)
            with pytest.raises(InUseError, match="the run .*x is in use by this process, since"):
                new_run(tmp_path, "x", provenance={"n": 2})
            assert tree_bytes(run.path) == before

        run.save_checkpoint(0, write, keep=1)
    assert saved_value(run.latest_checkpoint()) == 1.0
    assert names_in(run.path) == ["checkpoints", "config.json", "provenance.json"]


DIE_AT = """
import os, signal, sys
from depthdial.config import LoopConfig
from depthdial.training.run_dir import RunDir
fsync, calls = os.fsync, []
def die(descriptor):
    calls.append(descriptor)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = die
with RunDir.create(sys.argv[1], "x", config=LoopConfig(), provenance={}) as run:
    run.save_checkpoint(0, lambda folder: (folder / "a.json").write_text("{}"), keep=1)
"""


@pytest.mark.parametrize("call", [1, 3, 5])
def test_f23_a_process_killed_before_its_first_checkpoint_leaves_the_name_free(tmp_path, call):
    """While it writes config.json, provenance.json and the checkpoint."""
    done = subprocess.run(
        [sys.executable, "-c", DIE_AT, str(tmp_path), str(call)], cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -signal.SIGKILL and os.listdir(tmp_path / "x")
    run = new_run(tmp_path, "x", provenance={"n": 2})
    assert run.read_provenance() == {"n": 2}
    assert names_in(run.path) == ["checkpoints", "config.json", "provenance.json"]


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints/notes.txt", "metrics.jsonl"])
def test_f23_a_folder_with_anything_else_in_it_is_never_taken(tmp_path, name):
    run = new_run(tmp_path, "x")
    (run.path / name).write_text("")
    before = tree_bytes(run.path)
    with pytest.raises(ValueError, match="x exists already and is not empty. Give the new run an"):
        new_run(tmp_path, "x")
    assert tree_bytes(run.path) == before


def test_f23_a_config_alone_is_no_run_that_never_started(tmp_path):
    """Somebody's model folder, which `train --root models --name llama` must not empty."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="llama exists already"):
        new_run(tmp_path, "llama")
    assert names_in(tmp_path / "llama") == ["config.json"]
