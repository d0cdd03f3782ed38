"""Run folders: creation, configs and metrics; checkpoints in `test_checkpoints.py`."""

import json

import pytest
from run_folders import CONFIG, names_in, tree_bytes

from depthdial.config import LoopConfig
from depthdial.training.run_dir import RunDir


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
