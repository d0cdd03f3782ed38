"""Destinations: what they may be, and what is said when something goes wrong on the way."""

from pathlib import Path

import pytest
from goldens import GOLDEN
from published import add_tokenizer, copy_golden, edit_json, hashes

from depthdial.convert.convert import convert
from depthdial.disk import TRAINING_FILES, named_in_errors, new_folder
from depthdial.formats.hf_export import export_hf
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.locks import InUseError
from depthdial.model.checkpoint import read_config
from depthdial.training.run_dir import MANIFEST, RunDir


@pytest.mark.parametrize("place", [".", "", "..", "/"])
def test_a_destination_without_a_name_is_refused_in_words(tmp_path, monkeypatch, place):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="names no new folder.*Give the name of a new one"):
        import_checkpoint(GOLDEN / "llama", place)


def test_an_export_to_the_current_folder_is_refused_in_words(tmp_path, monkeypatch):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="names no new folder"):
        export_checkpoint(tmp_path / "a", ".", family="llama")
    with pytest.raises(ValueError, match="names no new folder"):
        export_hf(tmp_path / "a", ".")


def test_an_error_names_the_source_not_the_folder_that_is_gone(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    add_tokenizer(source)
    edit_json(source / "tokenizer_config.json", eos_token=3)
    with pytest.raises(ValueError) as error:
        import_checkpoint(source, tmp_path / "a")
    assert str(error.value).startswith(f"{source / 'tokenizer_config.json'}: eos_token is 3")


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_what_fails_while_writing_names_the_destination(tmp_path, kind):
    with pytest.raises(kind) as error, new_folder(tmp_path / "a", kind="a model folder") as folder:
        raise kind(f"{folder}/model.safetensors is bad")
    assert f"{tmp_path / 'a'}/model.safetensors is bad" in str(error.value)
    assert ".depthdial" not in str(error.value)


def test_an_error_of_the_system_keeps_its_number(tmp_path):
    with pytest.raises(FileNotFoundError) as error, named_in_errors(tmp_path, Path("place")):
        (tmp_path / "nothing").read_bytes()
    assert error.value.errno == 2
    assert str(error.value) == "[Errno 2] No such file or directory: 'place/nothing'"


TRAINING = ("manifest.json", "metrics.jsonl", "provenance.json")


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_run_or_checkpoint_is_never_replaced(tmp_path, name):
    """--overwrite once took checkpoints, metrics and optimizer state with it."""
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    (tmp_path / "a" / name).write_text("{}")
    before = hashes(tmp_path / "a")
    with pytest.raises(ValueError, match=f"has {name}, so it is a training run or one of its"):
        import_checkpoint(GOLDEN / "qwen3", tmp_path / "a", overwrite=True)
    assert hashes(tmp_path / "a") == before


def test_training_names_its_files_as_they_are_known_here(tmp_path):
    run = RunDir(tmp_path)
    assert (MANIFEST, run.metrics_path.name, run.provenance_path.name) == TRAINING_FILES
    assert TRAINING_FILES == TRAINING


def test_a_folder_with_another_folder_in_it_is_not_replaced(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    (tmp_path / "a" / "texts").mkdir()
    with pytest.raises(ValueError, match="holds the folder 'texts', which depthdial did not write"):
        import_checkpoint(GOLDEN / "qwen3", tmp_path / "a", overwrite=True)
    (tmp_path / "a" / "texts").rename(tmp_path / "a" / "additional_chat_templates")
    with pytest.raises(ValueError, match="holds the folder 'additional_chat_templates'"):
        import_checkpoint(GOLDEN / "qwen3", tmp_path / "a", overwrite=True)
    (tmp_path / "a" / "additional_chat_templates").rmdir()
    import_checkpoint(GOLDEN / "qwen3", tmp_path / "a", overwrite=True)


def test_a_folder_that_the_import_wrote_is_replaced(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    add_tokenizer(source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    import_checkpoint(source, tmp_path / "a")
    assert (tmp_path / "a" / "additional_chat_templates" / "tool.jinja").is_file()
    import_checkpoint(GOLDEN / "qwen3", tmp_path / "a", overwrite=True)
    assert not (tmp_path / "a" / "additional_chat_templates").exists()


def test_f22_an_import_keeps_the_loose_files_of_a_user(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text("mine")
    import_checkpoint(GOLDEN / "qwen3", tmp_path / "a", overwrite=True)
    assert (tmp_path / "a" / "README.md").read_text() == "mine"
    assert read_config(tmp_path / "a").qk_norm == "rms"


def test_f22_an_export_does_not_replace_a_model_folder_nor_a_checkpoint_of_others(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    import_checkpoint(GOLDEN / "llama", tmp_path / "b")
    copy_golden("llama", tmp_path / "published")
    before = {name: hashes(tmp_path / name) for name in ("b", "published")}
    with pytest.raises(ValueError, match="b is a model folder, not an exported model"):
        export_checkpoint(tmp_path / "a", tmp_path / "b", family="llama", overwrite=True)
    with pytest.raises(ValueError, match="published has no intact .depthdial.json"):
        export_hf(tmp_path / "a", tmp_path / "published", overwrite=True)
    assert {name: hashes(tmp_path / name) for name in before} == before


@pytest.mark.parametrize("command", ["import", "export", "hf", "convert"])
def test_f21_a_second_command_that_writes_one_folder_is_refused(tmp_path, command):
    import_checkpoint(GOLDEN / "llama", tmp_path / "model")
    run = {
        "import": lambda: import_checkpoint(GOLDEN / "llama", tmp_path / "a"),
        "export": lambda: export_checkpoint(tmp_path / "model", tmp_path / "a", family="llama"),
        "hf": lambda: export_hf(tmp_path / "model", tmp_path / "a"),
        "convert": lambda: convert(tmp_path / "model", tmp_path / "a", method="later-deltas"),
    }[command]
    with new_folder(tmp_path / "a", kind="a model folder"):
        with pytest.raises(InUseError, match="a is in use by this process, since"):
            run()
    assert contents_of(tmp_path / "a") == {".depthdial.json"}


def contents_of(folder):
    return {path.name for path in folder.iterdir()}


def test_a_refused_conversion_leaves_no_parent_folders(tmp_path):
    destination = tmp_path / "new" / "deep" / "a"
    with pytest.raises(ValueError), new_folder(destination, kind="a model folder"):
        raise ValueError("refused")
    assert not (tmp_path / "new").exists()
    with new_folder(destination, kind="a model folder"):
        pass
    assert destination.is_dir()
