"""Shared weights under either name, and tensors without effect that files leave out or keep."""

import json

import pytest
import torch
from goldens import open_golden
from published import INDEX, WEIGHTS, copy_golden, cut_into_shards, edit_json, edit_tensors

from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.layers.primitives import rotary_frequencies
from depthdial.model.checkpoint import read_tensors

TIED = {
    "llama": ("llama", "model.embed_tokens.weight", "tie_word_embeddings"),
    "qwen3": ("qwen3", "model.embed_tokens.weight", "tie_word_embeddings"),
    "ouro": ("ouro", "model.embed_tokens.weight", "tie_word_embeddings"),
    "nanbeige": ("nanbeige", "model.embed_tokens.weight", "tie_word_embeddings"),
    "iquest-loop": ("iquest-loop", "model.embed_tokens.weight", "tie_word_embeddings"),
    "huginn": ("huginn", "transformer.wte.weight", "tie_embeddings"),
    "retrofit": ("retrofit", "transformer.wte.weight", "tie_embeddings"),
    "parcae": ("parcae", "transformer.wte.weight", "tie_embeddings"),
    "loopformer": ("loopformer", "transformer.wte.weight", None),
}
"""Family -> golden case, name of the embedding, key that ties the head to it."""
HEAD = "lm_head.weight"
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tied(name, folder):
    """A tied checkpoint of a family that stores the embedding alone. Returns: folder, its name."""
    case, embedding, key = TIED[name]
    copy_golden(case, folder)
    if key is not None:
        edit_json(folder / "config.json", **{key: True})
    if HEAD in read_tensors(folder / WEIGHTS):
        edit_tensors(folder, **{HEAD: None})
    return folder, embedding


def move_to_head(folder, embedding):
    """What the library's own writer does: it keeps the first name of a shared tensor."""
    values = read_tensors(folder / WEIGHTS)[embedding]
    edit_tensors(folder, **{embedding: None, HEAD: values})


@pytest.mark.parametrize("name", TIED)
def test_f04_a_tied_model_stored_under_the_heads_name_opens_and_comes_back(tmp_path, name):
    plain, embedding = tied(name, tmp_path / "plain")
    import_checkpoint(plain, tmp_path / "model")
    folder, _ = tied(name, tmp_path / "source")
    move_to_head(folder, embedding)
    assert inspect_source(folder).problems == ()
    import_checkpoint(folder, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (
        tmp_path / "model" / WEIGHTS
    ).read_bytes()
    assert export_checkpoint(tmp_path / "again", tmp_path / "x", family=name).as_it_came
    before, after = (read_tensors(path / WEIGHTS) for path in (folder, tmp_path / "x"))
    assert after.keys() == before.keys() and embedding not in after
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_f04_neither_name_is_a_missing_tensor(tmp_path):
    folder, embedding = tied("llama", tmp_path / "source")
    edit_tensors(folder, **{embedding: None})
    with pytest.raises(ValueError, match=f"missing tensor '{embedding}'"):
        import_checkpoint(folder, tmp_path / "model")


def test_f04_a_head_alone_is_no_embedding_where_the_config_does_not_tie_them(tmp_path):
    folder, embedding = tied("llama", tmp_path / "source")
    move_to_head(folder, embedding)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=f"missing tensor '{embedding}'"):
        import_checkpoint(folder, tmp_path / "model")


def index_naming(folder, *names):
    """An index over two files that also names tensors which neither holds."""
    cut_into_shards(folder, 2)
    values = json.loads((folder / INDEX).read_text())["weight_map"]
    first = min(values.values())
    edit_json(folder / INDEX, weight_map=values | dict.fromkeys(names, first))
    return first


@pytest.mark.parametrize(
    "extra",
    [(HEAD,), ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")],
)
def test_f04_an_index_may_name_what_the_model_does_without(tmp_path, extra):
    folder, _ = tied("llama", tmp_path / "source")
    before = read_tensors(folder / WEIGHTS)
    index_naming(folder, *extra)
    assert inspect_source(folder).problems == ()
    report = import_checkpoint(folder, tmp_path / "model")
    assert report.num_source_tensors == len(before)
    export_checkpoint(tmp_path / "model", tmp_path / "x", family="llama")
    assert json.loads((tmp_path / "x" / INDEX).read_text())["weight_map"].keys() == before.keys()


def test_f04_an_index_may_name_the_embedding_that_the_head_stands_for(tmp_path):
    folder, embedding = tied("llama", tmp_path / "source")
    move_to_head(folder, embedding)
    index_naming(folder, embedding)
    import_checkpoint(folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model.norm.weight", r"missing tensor 'model.norm.weight'\. The index says that {file}"),
        ("model.norm.weights", r"unknown tensor 'model.norm.weights'\. Did you mean"),
    ],
)
def test_f04_an_index_that_names_anything_else_is_refused(tmp_path, name, match):
    folder, _ = tied("llama", tmp_path / "source")
    if name == "model.norm.weight":
        edit_tensors(folder, **{name: None})
    file = index_naming(folder, name)
    with pytest.raises(ValueError, match=match.format(file=file)):
        import_checkpoint(folder, tmp_path / "model")


@pytest.mark.parametrize("kind", ["stored before scaling", "stored after scaling"])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3])
@pytest.mark.parametrize("case", ["llama", "retrofit", "loopus"])
def test_f04_stored_rotary_frequencies_are_accepted_under_every_rotation(
    tmp_path, case, scaling, kind
):
    folder = copy_golden(case, tmp_path / "source")
    owner, place = {
        "llama": ("model.layers.1.self_attn.rotary_emb", ()),
        "retrofit": ("rotary_emb", ()),
        "loopus": ("encoder.layers.0.self_attn.rotary_emb", ("base_config_dict",)),
    }[case]
    values = json.loads((folder / "config.json").read_text())
    inner = values
    for key in place:
        inner = inner[key]
    inner["rope_scaling"] = scaling
    inner.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(values))
    config = open_golden(case).family
    model = import_checkpoint(folder, tmp_path / "model").config
    used = model.rope_scaling if kind == "stored after scaling" else None
    table = rotary_frequencies(model.head_dim, model.rope_theta, scaling=used)
    edit_tensors(folder, **{f"{owner}.inv_freq": table})
    import_checkpoint(folder, tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "x", family=config.name)
    assert torch.equal(read_tensors(tmp_path / "x" / WEIGHTS)[f"{owner}.inv_freq"], table)


def test_f04_another_table_is_refused_under_scaled_rotation(tmp_path):
    folder = copy_golden("llama", tmp_path / "source")
    edit_json(folder / "config.json", rope_scaling=LINEAR)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, **{name: torch.zeros(4)})
    with pytest.raises(ValueError, match=f"'{name}' differs by"):
        import_checkpoint(folder, tmp_path / "model")
