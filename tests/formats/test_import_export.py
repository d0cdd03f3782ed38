"""Import and export of whole folders: nothing lost, nothing changed, nothing half-written."""

import json
import weakref

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN
from published import (
    INDEX,
    WEIGHTS,
    add_tokenizer,
    copy_golden,
    cut_into_shards,
    edit_tensors,
    hashes,
)

from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.tensors.files import TensorFiles
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.folder import ORIGIN_TENSORS_FILE
from depthdial.model.looped_lm import LoopedLM

CASES = {
    "ouro": "ouro",
    "huginn": "huginn",
    "dory": "dory",
    "nanbeige": "nanbeige",
    "iquest-loop": "iquest-loop",
    "parcae": "parcae",
    "loopformer": "loopformer",
    "loopus": "loopus",
    "llama": "llama",
    "qwen3": "qwen3",
    "retrofit": "retrofit",
    "rrt-lora": "llama",
}
"""Golden case -> its family."""


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    return found


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", CASES)
def test_b34_import_export_import_gives_equal_bytes_and_keys(name, tmp_path):
    report = import_checkpoint(GOLDEN / name, tmp_path / "a")
    assert report.family == CASES[name]
    exported = export_checkpoint(tmp_path / "a", tmp_path / "x", family=report.family)
    assert exported.as_it_came
    source = json.loads((GOLDEN / name / "config.json").read_text())
    again = json.loads((tmp_path / "x" / "config.json").read_text())
    assert list(again.items()) == list(source.items())
    golden = safetensors.torch.load_file(GOLDEN / name / WEIGHTS)
    assert_same_tensors(tensors_of(tmp_path / "x"), golden)
    import_checkpoint(tmp_path / "x", tmp_path / "b")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert (tmp_path / "a" / "config.json").read_bytes() == (
        tmp_path / "b" / "config.json"
    ).read_bytes()


def test_the_second_format_of_dory_comes_back_too(tmp_path):
    source = copy_golden("dory", tmp_path / "source")
    text = (GOLDEN / "dory" / "config_format1.json").read_text()
    (source / "config.json").write_text(text)
    import_checkpoint(source, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="dory")
    assert json.loads((tmp_path / "x" / "config.json").read_text()) == json.loads(text)


@pytest.mark.parametrize("name", CASES)
def test_an_imported_folder_opens_as_the_one_model_class(name, tmp_path):
    report = import_checkpoint(GOLDEN / name, tmp_path / "a")
    model = load_model(tmp_path / "a")
    assert type(model) is LoopedLM and model.config == report.config
    assert sum(p.numel() for p in model.parameters()) == report.num_parameters


def test_logits_of_an_imported_folder_are_those_of_the_reference(tmp_path):
    import_checkpoint(GOLDEN / "ouro", tmp_path / "a")
    vectors = safetensors.torch.load_file(GOLDEN / "ouro" / "vectors.safetensors")
    logits = load_model(tmp_path / "a")(vectors["input_ids"], num_loops=3)
    torch.testing.assert_close(logits, vectors["logits_k3"], atol=1e-4, rtol=0)


def test_a_tied_head_is_stored_once_and_written_again_as_it_came(tmp_path):
    import_checkpoint(GOLDEN / "huginn", tmp_path / "a")
    assert not any("head" in name for name in tensors_of(tmp_path / "a"))
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="huginn")
    assert "lm_head.weight" in tensors_of(tmp_path / "x")


@pytest.mark.parametrize(("body", "head"), [("bfloat16", "float32"), ("float32", "float64")])
def test_a_tied_head_in_another_format_is_accepted_and_comes_back(tmp_path, body, head):
    source = copy_golden("llama", tmp_path / "source")
    tensors = {name: t.to(getattr(torch, body)) for name, t in tensors_of(source).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(getattr(torch, head))
    safetensors.torch.save_file(tensors, source / WEIGHTS)
    import_checkpoint(source, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    assert_same_tensors(tensors_of(tmp_path / "x"), tensors)


def test_a_kept_head_that_training_left_behind_is_not_exported(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    edit_tensors(source, lm_head__weight=embedding.double())
    import_checkpoint(source, tmp_path / "a")
    model = load_model(tmp_path / "a")
    model.embedding.weight.data = model.embedding.weight * 2
    save_model(model, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    assert torch.equal(tensors_of(tmp_path / "x")["lm_head.weight"], 2 * embedding)


def test_a_buffer_that_cannot_be_made_again_is_kept(tmp_path):
    source = copy_golden("huginn", tmp_path / "source")
    stored = tensors_of(source)["freqs_cis"] * (1 + 1e-6)
    edit_tensors(source, freqs_cis=stored)
    import_checkpoint(source, tmp_path / "a")
    assert set(tensors_of(tmp_path / "a")) >= {"freqs_cis"}
    assert (tmp_path / "a" / ORIGIN_TENSORS_FILE).is_file()
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="huginn")
    assert torch.equal(tensors_of(tmp_path / "x")["freqs_cis"], stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_keep_their_format(tmp_path, dtype):
    source = copy_golden("llama", tmp_path / "source")
    tensors = {name: t.to(dtype) for name, t in tensors_of(source).items()}
    safetensors.torch.save_file(tensors, source / WEIGHTS)
    import_checkpoint(source, tmp_path / "a")
    assert {t.dtype for t in tensors_of(tmp_path / "a").values()} == {dtype}
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    assert_same_tensors(tensors_of(tmp_path / "x"), tensors)


def test_shards_give_the_same_model_and_come_back_as_the_same_shards(tmp_path):
    source = copy_golden("ouro", tmp_path / "source")
    import_checkpoint(source, tmp_path / "single")
    cut_into_shards(source, 4)
    import_checkpoint(source, tmp_path / "a")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "single" / WEIGHTS).read_bytes()
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="ouro")
    for path in source.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "x" / path.name).read_bytes()
    source_map = json.loads((source / INDEX).read_text())["weight_map"]
    assert json.loads((tmp_path / "x" / INDEX).read_text())["weight_map"] == source_map


def test_at_most_four_tensors_are_in_memory_at_a_time(tmp_path, monkeypatch):
    """A joined matrix needs its three parts, while the tensor before it is being dropped."""
    source = copy_golden("huginn", tmp_path / "source")
    alive, most = set(), []
    get = TensorFiles.get

    def counted(self, name):
        tensor = get(self, name)
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(TensorFiles, "get", counted)
    import_checkpoint(source, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="huginn")
    assert len(most) > 150 and max(most) <= 4


# ---- what is written where


def test_b41_the_source_folder_is_byte_equal_afterwards(tmp_path):
    source = copy_golden("ouro", tmp_path / "source")
    add_tokenizer(source, chat_template="{{ messages }}")
    before = hashes(source)
    import_checkpoint(source, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="ouro")
    assert hashes(source) == before


def test_b41_an_export_leaves_the_model_folder_byte_equal(tmp_path):
    import_checkpoint(GOLDEN / "ouro", tmp_path / "a")
    before = hashes(tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="ouro")
    assert hashes(tmp_path / "a") == before


@pytest.mark.parametrize("place", ["source", "source/inside", "."])
def test_a_destination_in_or_around_the_source_is_refused(tmp_path, place):
    source = copy_golden("llama", tmp_path / "source")
    before = hashes(tmp_path)
    with pytest.raises(ValueError, match="lie in one another"):
        import_checkpoint(source, tmp_path / place, overwrite=True)
    assert hashes(tmp_path) == before


def test_a_destination_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not empty"):
        import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    with pytest.raises(ValueError, match="has no intact .*so it is not replaced"):
        import_checkpoint(GOLDEN / "llama", tmp_path / "a", overwrite=True)
    assert hashes(tmp_path / "a").keys() == {"mine.txt"}


def test_a_model_folder_is_replaced_when_that_is_allowed(tmp_path):
    import_checkpoint(GOLDEN / "huginn", tmp_path / "a")
    import_checkpoint(GOLDEN / "llama", tmp_path / "a", overwrite=True)
    import_checkpoint(GOLDEN / "llama", tmp_path / "b")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_import_leaves_an_older_model_and_nothing_else(tmp_path):
    import_checkpoint(GOLDEN / "huginn", tmp_path / "a")
    before = hashes(tmp_path / "a")
    source = copy_golden("llama", tmp_path / "source")
    edit_tensors(source, model__norm__weight=torch.full((32,), float("nan")))
    with pytest.raises(ValueError, match="must be finite"):
        import_checkpoint(source, tmp_path / "a", overwrite=True)
    assert hashes(tmp_path / "a") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "source"]


def test_a_missing_parent_folder_is_made(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "deep" / "down" / "a")
    assert (tmp_path / "deep" / "down" / "a" / WEIGHTS).is_file()


def test_licence_texts_travel_with_the_weights(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    (source / "LICENSE.md").write_text("terms")
    import_checkpoint(source, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    assert (tmp_path / "x" / "LICENSE.md").read_text() == "terms"


# ---- choices


def test_an_unknown_family_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="unknown family 'lama'. Did you mean 'llama'"):
        import_checkpoint(GOLDEN / "llama", tmp_path / "a", family="lama")


def test_a_model_folder_of_our_own_needs_no_import(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    with pytest.raises(ValueError, match="is a model folder of depthdial already"):
        import_checkpoint(tmp_path / "a", tmp_path / "b")


def test_a_dtype_without_effect_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no effect on .* keep their format"):
        import_checkpoint(GOLDEN / "llama", tmp_path / "a", dtype=torch.bfloat16)


def test_a_source_that_is_not_there_is_told_from_a_hub_that_cannot_be_reached(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is nothing at .*nowhere"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="as a hub id it cannot be fetched"):
        import_checkpoint("some-org/some-model", tmp_path / "a")


def test_a_format_that_cannot_say_what_the_model_is_is_refused(tmp_path):
    import_checkpoint(GOLDEN / "ouro", tmp_path / "a")
    with pytest.raises(ValueError, match="this model cannot be written as 'llama': "):
        export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    assert not (tmp_path / "x").exists()


def test_a_model_of_our_own_is_exported_where_the_format_can_say_it(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "a")
    model = load_model(tmp_path / "a")
    save_model(model, tmp_path / "own")
    report = export_checkpoint(tmp_path / "own", tmp_path / "x", family="llama")
    assert not report.as_it_came
    import_checkpoint(tmp_path / "x", tmp_path / "b")
    tokens = torch.arange(12)[None]
    assert torch.equal(load_model(tmp_path / "b")(tokens, num_loops=1), model(tokens, num_loops=1))


def test_an_export_after_a_change_of_the_config_says_what_the_model_is_now(tmp_path):
    import_checkpoint(GOLDEN / "ouro", tmp_path / "a")
    model = load_model(tmp_path / "a")
    model.config = model.config.replace(num_loops=2)
    save_model(model, tmp_path / "a")
    report = export_checkpoint(tmp_path / "a", tmp_path / "x", family="ouro")
    assert not report.as_it_came
    assert import_checkpoint(tmp_path / "x", tmp_path / "b").config.num_loops == 2
