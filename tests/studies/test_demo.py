"""The demonstration runs from nothing to a report, and goes on where it stopped."""

import json

import pytest
from rich.console import Console

from depthdial.studies.demo import JOBS, run_demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_quick_demo_writes_a_report_of_both_sections_and_a_second_call_trains_nothing(tmp_path):
    console = Console(width=100)
    paths = run_demo(tmp_path, quick=True, console=console)
    data = json.loads((tmp_path / "report.json").read_text())
    assert [section["kind"] for section in data["sections"]] == ["text", "pointer_program"]
    assert all(section["baseline"] for section in data["sections"])
    assert paths.html.stat().st_size > 50_000
    metrics = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in JOBS}
    run_demo(tmp_path, quick=True, console=console)
    for name in JOBS:
        assert (tmp_path / name / "metrics.jsonl").read_text() == metrics[name]


def test_a_failing_run_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("depthdial.studies.demo.JOBS", ("tiny-pointer", "tiny-pointer-baseline"))
    broken = tmp_path / "tiny-pointer"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"tiny-pointer\.log ends"):
        run_demo(tmp_path, quick=True, console=Console(width=100))
