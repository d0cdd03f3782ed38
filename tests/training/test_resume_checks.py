"""What a run reads is what it was, or the run does not go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from depthdial.config import Recipe
from depthdial.data.text import prepare
from depthdial.data.tokenizer import Tokenizer
from depthdial.studies.finished_run import FinishedRun
from depthdial.training.pretrain import resume
from depthdial.training.run_dir import RunDir


class StoppedRun(NamedTuple):
    """A run of text that stopped before its last step; the data may be anywhere else."""

    path: Path
    data: Path


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> StoppedRun:
    """A run whose last checkpoint is gone. Change nothing in it."""
    root = tmp_path_factory.mktemp("whole")
    shutil.copytree(tiny_folder / "data", root / "data")
    path = shutil.copytree(tiny_folder / "runs" / "tiny", root / "tiny")
    shutil.rmtree(path / "checkpoints" / "step_4")
    return StoppedRun(path, root / "data")


@pytest.fixture
def stopped(whole: StoppedRun, tmp_path: Path) -> StoppedRun:
    """A copy to spoil."""
    copies = (shutil.copytree(path, tmp_path / path.name) for path in whole)
    return StoppedRun(*copies)


def go_on(stopped: StoppedRun, **overrides: Any):
    """Resume with the data of the copy."""
    return resume(stopped.path, overrides={"data.path": str(stopped.data)} | overrides)


def change_contents(path: Path) -> None:
    """Change a file of tokens or lengths without changing its size, nor any sum over it."""
    values = np.load(path) if path.suffix == ".npy" else np.fromfile(path, dtype="<u2")
    first = values[:, 0] if values.ndim == 2 else values
    assert first[1] > 0
    first[0] += 1
    first[1] -= 1
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        values.tofile(path)


def spoil(folder: Path, name: str, *, forged: bool) -> None:
    """Change a prepared file; `forged`: meta.json describes it as it is now."""
    path = folder / name
    meta = json.loads((folder / "meta.json").read_text())
    if name == "tokenizer.json":
        tokenizer = json.loads(path.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        path.write_text(json.dumps(tokenizer))
        json_text = Tokenizer.from_dir(folder).to_json()
        meta["tokenizer_sha256"] = hashlib.sha256(json_text.encode()).hexdigest()
    else:
        change_contents(path)
        split, suffix = name.split(".", maxsplit=1)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        meta["splits"][split]["sha256"][suffix] = digest
    if forged:
        (folder / "meta.json").write_text(json.dumps(meta))


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FILES = {
    "train.bin": "training data of .* are not what they were",
    "train.index.npy": "training data of .* are not what they were",
    "valid.bin": "validation data of .* are not what they were",
    "valid.index.npy": "validation data of .* are not what they were",
    "tokenizer.json": "tokenizer of .* is not what it was",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forged", [False, True])
def test_f25_resume_refuses_data_that_changed(stopped, name, forged):
    """Files of equal size and documents held out passed: no hash was computed."""
    spoil(stopped.data, name, forged=forged)
    before = tree(stopped.path)
    damaged = f"{name} is (damaged or was replaced|not the one that the token files were made with)"
    with pytest.raises(ValueError, match=FILES[name] if forged else damaged):
        go_on(stopped)
    assert tree(stopped.path) == before


def test_f25_resume_refuses_data_that_were_prepared_in_another_way(stopped, tiny_folder):
    prepare([tiny_folder / "texts"], stopped.data, vocab_size=300, valid_frac=0.7, overwrite=True)
    with pytest.raises(ValueError, match="training data of .* are not what they were"):
        go_on(stopped)
    prepare([tiny_folder / "texts"], stopped.data, vocab_size=300, valid_frac=0.3, overwrite=True)
    assert go_on(stopped).status == "finished"


def test_f25_a_report_refuses_held_out_documents_that_changed(stopped):
    run = RunDir.open(stopped.path)
    recipe = Recipe.from_file(run.config_path).replace(**{"data.path": str(stopped.data)})
    run.write_config(recipe)
    assert FinishedRun.open(stopped.path).validation_documents()
    spoil(stopped.data, "valid.bin", forged=True)
    with pytest.raises(ValueError, match="held-out documents in .* are not those that .*tiny was"):
        FinishedRun.open(stopped.path).validation_documents()


def test_f25_data_may_move_since_their_contents_are_compared(stopped):
    moved = shutil.move(stopped.data, stopped.data.with_name("moved"))
    assert go_on(stopped._replace(data=Path(moved))).status == "finished"
    assert Recipe.from_file(stopped.path / "config.json").data.path == str(moved)


OTHER = {
    "name": "other",
    "train.seed": 1,
    "train.steps": 8,
    "train.batch_size": 16,
    "model.d_model": 32,
    "model.max_loops": 4,
    "model.num_loops": 3,
    "model.d_ff": 64,
    "model.modulation": None,
    "model.loop.update": "residual",
    "data.context": 8,
    "data.isolate_documents": False,
    "depth.override_frac": 0.25,
    "depth.switch_frac": 0.0,
    "optim.optimizer": "adamw",
    "optim.freeze": ["embedding.*"],
}


@pytest.mark.parametrize("key", OTHER)
def test_f25_a_config_that_was_edited_by_hand_is_refused(stopped, key):
    """Seed, width and steps were taken from the edited file without a word."""
    recipe = Recipe.from_file(stopped.path / "config.json")
    values = recipe.to_dict()
    *parents, last = key.split(".")
    group = values
    for parent in parents:
        group = group[parent]
    assert last in group and group[last] != OTHER[key]
    group[last] = OTHER[key]
    (stopped.path / "config.json").write_text(json.dumps(values))
    before = tree(stopped.path)
    with pytest.raises(ValueError, match=rf"config.json: {key} is .*, but the run was"):
        go_on(stopped)
    assert tree(stopped.path) == before
    sealed = stopped.path / "checkpoints" / "step_2" / "recipe.json"
    shutil.copyfile(sealed, stopped.path / "config.json")
    assert Recipe.from_file(stopped.path / "config.json") == recipe


def test_f25_a_key_that_a_resume_may_change_is_taken_with_a_warning(stopped):
    """A resume with a flag may also have been killed before its first checkpoint."""
    run = RunDir.open(stopped.path)
    run.write_config(Recipe.from_file(run.config_path).replace(**{"optim.lr": 0.125}))
    with pytest.warns(UserWarning, match="optim.lr is 0.125 instead of .* up to 2 had"):
        assert go_on(stopped).status == "finished"
    rates = [r["lr/matrices"] for r in run.read_metrics() if "lr/matrices" in r]
    assert rates[-1] > 0.01 > rates[1]


def test_f25_a_damaged_config_names_the_sealed_copy(stopped):
    (stopped.path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON.* kept in .*recipe\.json"):
        go_on(stopped)


def test_f25_a_checkpoint_of_an_earlier_version_is_told_from_a_changed_one(stopped):
    folder = stopped.path / "checkpoints" / "step_2"
    (folder / "recipe.json").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["recipe.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="begun by an earlier version.* Start a new run from its"):
        go_on(stopped)


def test_f25_a_sealed_recipe_that_was_edited_is_no_checkpoint(stopped):
    path = stopped.path / "checkpoints" / "step_2" / "recipe.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match="step_2 is skipped: .*'recipe.json' changed"):
        go_on(stopped)
