"""origin.json: what an import remembers, and that nothing in it leads an export astray."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN
from published import WEIGHTS, add_tokenizer, copy_golden, edit_json, edit_tensors, hashes

from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.tensors.files import TensorFiles
from depthdial.model.folder import ORIGIN_FILE, ORIGIN_TENSORS_FILE, Origin


@pytest.fixture
def imported(tmp_path):
    """An imported folder with a tokenizer, so that its origin has something in every field."""
    source = copy_golden("llama", tmp_path / "source")
    add_tokenizer(source)
    import_checkpoint(source, tmp_path / "a")
    return tmp_path / "a"


def test_the_origin_keeps_the_config_in_its_order_and_the_hashes_of_the_source(tmp_path):
    source = copy_golden("dory", tmp_path / "checkpoint")
    import_checkpoint(source, tmp_path / "a")
    origin = Origin.load(tmp_path / "a")
    values = json.loads((source / "config.json").read_text())
    assert list(origin.config.items()) == list(values.items())
    assert origin.sha256 == hashes(source)
    assert (origin.family, origin.source) == ("dory", "checkpoint")
    assert set(origin.tensors) == set(TensorFiles(source).entries)


def test_the_origin_names_no_path_of_this_machine(tmp_path):
    import_checkpoint(GOLDEN / "dory", tmp_path / "a")
    text = (tmp_path / "a" / ORIGIN_FILE).read_text()
    assert str(tmp_path) not in text and str(Path.cwd()) not in text


@pytest.mark.parametrize("change", [{"format_version": 2}, {"extra": 1}])
def test_an_origin_of_another_version_is_refused(tmp_path, change):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    edit_json(tmp_path / "a" / ORIGIN_FILE, **change)
    with pytest.raises(ValueError, match=r"origin.json has format_version"):
        export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")


OUTSIDE = ("../outside", "../../outside", "/outside", "sub/inside", "a\\b", "C:x", "..", ".", "")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("content", [None, {}])
def test_a_changed_file_outside_of_the_export_is_refused(imported, name, content):
    """An export deleted or wrote whatever file the origin named."""
    precious = imported.parent / "outside"
    precious.write_text("mine")
    edit_json(imported / ORIGIN_FILE, changed_files={name: content})
    before = hashes(imported.parent)
    with pytest.raises(ValueError, match=r"origin.json has changed_files=.* it must be groups of"):
        export_checkpoint(imported, imported.parent / "x", family="llama")
    assert hashes(imported.parent) == before


def test_a_file_that_no_import_changes_is_no_changed_file(imported):
    edit_json(imported / ORIGIN_FILE, changed_files={"model.safetensors": None})
    with pytest.raises(ValueError, match="for generation_config.json and tokenizer_config.json"):
        Origin.load(imported)


@pytest.mark.parametrize(
    "name", [*(f"{name}.safetensors" for name in OUTSIDE[:6]), "config.json", "x" * 300, 3, None]
)
def test_a_tensor_file_outside_of_the_export_is_refused(imported, name):
    tensors = dict(Origin.load(imported).tensors)
    edit_json(imported / ORIGIN_FILE, tensors=tensors | {"model.norm.weight": name})
    before = hashes(imported.parent)
    with pytest.raises(ValueError, match=r"origin.json has tensors=.* plain names of .safetensors"):
        export_checkpoint(imported, imported.parent / "x", family="llama")
    assert hashes(imported.parent) == before


TEXT, LIST, GROUP = "text", [{}], {"a": [None]}
WRONG = {
    "family": (None, 3, LIST, GROUP),
    "source": (None, 3, LIST, GROUP),
    "config": (None, 3, TEXT, LIST),
    "tensors": (None, 3, TEXT, LIST, GROUP),
    "kept_tensors": (None, 3, TEXT, LIST, GROUP),
    "changed_files": (None, 3, TEXT, LIST, GROUP),
    "sha256": (None, 3, TEXT, LIST, GROUP, {"config.json": "ab"}),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_field_of_another_kind_is_refused_by_name(imported, key, value):
    edit_json(imported / ORIGIN_FILE, **{key: value})
    with pytest.raises(ValueError, match=f"origin.json has {key}="):
        Origin.load(imported)


@pytest.fixture
def with_buffer(tmp_path):
    """An import that kept a table which cannot be made again to the bit."""
    source = copy_golden("huginn", tmp_path / "source")
    stored = safetensors.torch.load_file(source / WEIGHTS)["freqs_cis"]
    edit_tensors(source, freqs_cis=stored * (1 + 1e-6))
    import_checkpoint(source, tmp_path / "a")
    return tmp_path / "a"


def test_kept_tensors_that_are_not_there_are_refused(with_buffer):
    safetensors.torch.save_file({"other": torch.ones(2)}, with_buffer / ORIGIN_TENSORS_FILE)
    with pytest.raises(ValueError, match=r"origin.safetensors has the tensors \['other'\], but"):
        export_checkpoint(with_buffer, with_buffer.parent / "x", family="huginn")


def test_a_kept_table_that_is_another_one_is_refused(with_buffer):
    stored = safetensors.torch.load_file(with_buffer / ORIGIN_TENSORS_FILE)["freqs_cis"]
    changed = {"freqs_cis": stored + 1}
    safetensors.torch.save_file(changed, with_buffer / ORIGIN_TENSORS_FILE)
    with pytest.raises(ValueError, match="'freqs_cis' differs by 1 from"):
        export_checkpoint(with_buffer, with_buffer.parent / "x", family="huginn")


def test_a_kept_tensor_never_takes_the_place_of_a_weight(with_buffer):
    """Whatever lay in origin.safetensors was exported under its name."""
    name = "transformer.ln_f.weight"
    kept = safetensors.torch.load_file(with_buffer / ORIGIN_TENSORS_FILE)
    edit_json(with_buffer / ORIGIN_FILE, kept_tensors=["freqs_cis", name])
    planted = {name: torch.zeros(64), "freqs_cis": kept["freqs_cis"].clone()}
    safetensors.torch.save_file(planted, with_buffer / ORIGIN_TENSORS_FILE)
    export_checkpoint(with_buffer, with_buffer.parent / "x", family="huginn")
    exported = safetensors.torch.load_file(with_buffer.parent / "x" / WEIGHTS)
    assert exported[name].any()


def test_a_missing_field_is_refused(imported):
    values = json.loads((imported / ORIGIN_FILE).read_text())
    del values["tensors"]
    (imported / ORIGIN_FILE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="origin.json has format_version"):
        Origin.load(imported)


def test_a_huge_value_is_not_printed_whole(imported):
    edit_json(imported / ORIGIN_FILE, config="x" * 100_000)
    with pytest.raises(ValueError) as error:
        Origin.load(imported)
    assert len(str(error.value)) < 1000
