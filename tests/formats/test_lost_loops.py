"""Exports of elastic models: what a format cannot say of loops is refused, or said."""

import pytest
from goldens import GOLDEN

from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.model.checkpoint import load_model, save_model


def imported(name, folder, **changes):
    """A golden case as a model folder, with some fields of its config changed."""
    import_checkpoint(GOLDEN / name, folder)
    if changes:
        model = load_model(folder)
        model.config = model.config.replace(**changes)
        save_model(model, folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_elastic_model_is_not_written_in_a_dense_format(tmp_path, family):
    """It was, and nobody said that the export runs once."""
    folder = imported(family, tmp_path / "a", max_loops=4)
    with pytest.raises(ValueError, match="no model loops, and this one is made for 1 to 4 loops"):
        export_checkpoint(folder, tmp_path / "x", family=family)
    assert not (tmp_path / "x").exists()


def test_a_dense_model_is_written_in_a_dense_format_without_a_word(tmp_path):
    folder = imported("llama", tmp_path / "a")
    assert export_checkpoint(folder, tmp_path / "x", family="llama").warnings == ()


@pytest.mark.parametrize(("num_loops", "meant"), [(3, 3), (1, 1)])
def test_a_lost_largest_loop_count_is_said_in_report_and_card(tmp_path, num_loops, meant):
    folder = imported("ouro", tmp_path / "a", max_loops=8, num_loops=num_loops)
    report = export_checkpoint(folder, tmp_path / "x", family="ouro")
    [warning] = report.warnings
    assert warning.endswith(f"made for 1 to 8 loops: opened from this export, it counts as made "
                            f"for 1 to {meant}.")  # fmt: skip
    assert warning in (tmp_path / "x" / "README.md").read_text()
    assert import_checkpoint(tmp_path / "x", tmp_path / "b").config.max_loops == meant


@pytest.mark.parametrize(
    "name",
    [
        "ouro",
        "huginn",
        "dory",
        "nanbeige",
        "iquest-loop",
        "parcae",
        "loopformer",
        "loopus",
        "retrofit",
    ],
)
def test_an_export_as_it_came_loses_nothing(tmp_path, name):
    folder = imported(name, tmp_path / "a")
    assert export_checkpoint(folder, tmp_path / "x", family=name).warnings == ()


def test_the_command_line_prints_the_warning(tmp_path, capsys):
    from depthdial.cli.main import main

    folder = imported("ouro", tmp_path / "a", max_loops=8)
    assert main(["export", str(folder), "--as", "ouro", str(tmp_path / "x")]) == 0
    assert "counts as made for 1 to 4" in " ".join(capsys.readouterr().out.split())


def test_training_that_a_format_would_claim_is_denied_in_report_and_card(tmp_path):
    """A conversion that nobody healed came back as trained at every loop count."""
    folder = imported("ouro", tmp_path / "a", trained_loops=(4,))
    [warning] = export_checkpoint(folder, tmp_path / "x", family="ouro").warnings
    assert "opened from this export, k = 1, 2, 3 count as trained, which they are not" in warning
    assert warning in (tmp_path / "x" / "README.md").read_text()
