"""Checkpoints that lie: every one is refused in words, before anything is executed or allocated."""

import json
import os
import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from published import INDEX, WEIGHTS, copy_golden, cut_into_shards, edit_json, edit_tensors

from depthdial.config.limits import MAX_CONFIG_BYTES
from depthdial.formats.import_export import import_checkpoint
from depthdial.model.checkpoint import read_tensors
from depthdial.model.tensor_header import read_header

MiB = 2**20


@pytest.fixture(scope="module", autouse=True)
def modules_are_loaded(tmp_path_factory):
    """What is measured below is the refusal, not the first import of a library."""
    place = tmp_path_factory.mktemp("first")
    import_checkpoint(copy_golden("llama", place / "source"), place / "out")


@pytest.fixture
def source(tmp_path):
    return copy_golden("llama", tmp_path / "source")


def refused(source, match, kind=ValueError):
    """The import fails with these words, holds little memory and leaves nothing behind."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=match):
            import_checkpoint(source, source.parent / "out")
        assert tracemalloc.get_traced_memory()[1] < 30 * MiB
    finally:
        tracemalloc.stop()
    assert sorted(path.name for path in source.parent.iterdir()) == [source.name]


# ---- safetensors headers


def file_of(path, header, data=b"", length=None):
    """A safetensors file with any header text and any claim about its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HEADERS = {
    "no bytes at all": (b"", b"", None, "header claims"),
    "length beyond the file": ({}, b"", 2**60, "header claims 1,152,921,504,606,846,976 bytes"),
    "length of all ones": ({}, b"", 2**64 - 1, "header claims"),
    "length of zero": ({}, b"", 0, "header claims 0 bytes"),
    "no JSON": (b"{]", b"", None, "no JSON object of tensors"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "no JSON object of tensors"),
    "a list": ([], b"", None, "is a list"),
    "nested without end": (b"[" * 200_000, b"", None, "no JSON object of tensors"),
    "a name twice": (
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        b"",
        None,
        "key 'a' is given twice",
    ),
    "an unknown format": ({"a": entry(0, 8, dtype="F8_E4M3")}, b"\0" * 8, None, "'F8_E4M3'"),
    "a format that is a list": ({"a": entry(0, 8, dtype=["F32"])}, b"\0" * 8, None, "format"),
    "an unknown key": ({"a": entry(0, 8) | {"x": 1}}, b"\0" * 8, None, "must state dtype, shape"),
    "a tensor that is a number": ({"a": 3}, b"", None, "must state dtype, shape"),
    "a negative size": ({"a": entry(0, 8, shape=(-2,))}, b"\0" * 8, None, "not a list of sizes"),
    "a size of true": ({"a": entry(0, 4, shape=(True,))}, b"\0" * 4, None, "not a list of sizes"),
    "a size of 2.0": ({"a": entry(0, 8, shape=(2.0,))}, b"\0" * 8, None, "not a list of sizes"),
    "a product beyond 64 bits": (
        {"a": entry(0, 8, shape=(2**40, 2**40, 2))},
        b"\0" * 8,
        None,
        r"of shape \[1099511627776, 1099511627776, 2\] in F32 needs",
    ),
    "a product that wraps to its place": (
        {"a": entry(0, 8, shape=(2**61 + 1, 2))},
        b"\0" * 8,
        None,
        "needs",
    ),
    "an empty tensor of absurd size": (
        {"a": entry(0, 0, shape=(0, 2**70))},
        b"",
        None,
        r"no memory holds: \[0, 1180591620717411",
    ),
    "an empty tensor of absurd sizes": (
        {"a": entry(0, 0, shape=(0, 2**62, 2**62))},
        b"",
        None,
        "a shape that no memory holds",
    ),
    "dimensions without end": (
        {"a": entry(0, 4, shape=(1,) * 100_000)},
        b"\0" * 4,
        None,
        "has 100,000 dimensions, more",
    ),
    "a shape of other size": ({"a": entry(0, 8, shape=(3,))}, b"\0" * 8, None, "needs 12 bytes"),
    "an end before the beginning": ({"a": entry(8, 0)}, b"\0" * 8, None, "not a beginning and end"),
    "three offsets": (
        {"a": entry(0, 8) | {"data_offsets": [0, 4, 8]}},
        b"\0" * 8,
        None,
        "not a beginning and end",
    ),
    "beyond the file": ({"a": entry(0, 8)}, b"\0" * 4, None, "ends at byte"),
    "far beyond the file": ({"a": entry(2**62, 2**62 + 8)}, b"\0" * 8, None, "are unused"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12, None, "'a' and 'b' overlap"),
    "one in another": (
        {"a": entry(0, 16, shape=(4,)), "b": entry(4, 12)},
        b"\0" * 16,
        None,
        "'a' and 'b' overlap",
    ),
    "a gap": ({"a": entry(0, 8), "b": entry(16, 24)}, b"\0" * 24, None, "8 bytes before tensor"),
    "bytes after": ({"a": entry(0, 8)}, b"\0" * 9, None, "1 bytes follow its last tensor"),
    "metadata of numbers": ({"__metadata__": {"format": 1}}, b"", None, "must map names to texts"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_false_header_is_refused(name, tmp_path):
    header, data, length, match = HEADERS[name]
    path = file_of(tmp_path / WEIGHTS, header, data, length)
    if name == "no bytes at all":
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=match):
        read_header(path)


@pytest.mark.parametrize("name", ["overlap", "length beyond the file", "a product beyond 64 bits"])
def test_a_false_header_is_refused_by_every_way_in(name, source):
    header, data, length, match = HEADERS[name]
    file_of(source / WEIGHTS, header, data, length)
    refused(source, match)
    with pytest.raises(ValueError, match=match):
        read_tensors(source / WEIGHTS)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 5_000, -1])
def test_truncated_weights_are_refused(source, keep):
    data = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).write_bytes(data[:keep])
    refused(source, "damaged or cut short")


# ---- configs


def test_a_huge_config_is_refused_unread(source):
    with (source / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    refused(source, "has 4,194,305 bytes; such a file has at most 4,194,304")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 40 + "1" + "}" * 40])
def test_a_config_nested_without_end_is_refused(source, text):
    (source / "config.json").write_text(text)
    refused(source, "nests groups deeper than 32 levels|its brackets nest too deeply")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"vocab_size": 1, "vocab_size": 2}', "key 'vocab_size' is given twice"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
    ],
)
def test_a_config_that_is_no_object_is_refused_by_name(source, text, match):
    (source / "config.json").write_text(text)
    refused(source, f"config.json.*{match}")


def test_a_config_that_is_no_text_is_refused_with_the_place(source):
    (source / "config.json").write_bytes(b'{"a": "\xff"}')
    refused(source, r"no[t]? UTF-8 text \(byte 0xff at 7\)")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vocab_size": 10**9}, "asks for 32,000,064,928 parameters, but the files"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000: .* less than or equal to 2147483647"),
        ({"hidden_size": 10**9}, "asks for"),
        ({"intermediate_size": 10**9}, "asks for"),
        ({"intermediate_size": 10**15}, "d_ff=1000000000000000: .* less than or equal to"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1,000,000,000; at most 10,000"),
        ({"max_position_embeddings": 10**12}, "max_context=1000000000000: .* or equal to 16777216"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"vocab_size": 96.5}, "vocab_size"),
        ({"vocab_size": "96"}, "vocab_size"),
        ({"model_type": "nothing"}, "no known family has model_type='nothing'"),
        ({"suprising_switch": True}, "suprising_switch"),
    ],
)
def test_absurd_values_are_refused_before_anything_is_built(source, changes, match):
    edit_json(source / "config.json", **changes)
    refused(source, match)


def test_absurd_loop_counts_are_refused(tmp_path):
    source = copy_golden("ouro", tmp_path / "source")
    edit_json(source / "config.json", total_ut_steps=10**9)
    refused(source, "'total_ut_steps' is 1,000,000,000 .* at most 1,024 loops")


def test_a_smaller_config_than_the_weights_is_refused_by_shape(source):
    edit_json(source / "config.json", vocab_size=95)
    refused(
        source, r"'embedding.weight' has shape \[96, 32\], the config asks for shape \[95, 32\]"
    )


# ---- weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused_by_name_and_place(source, value, dtype):
    bad = torch.ones(32, dtype=dtype)
    bad[7] = value
    edit_tensors(source, model__norm__weight=bad)
    refused(source, f"tensor 'model.norm.weight' has {value} at place 7 of 32")


def test_an_unknown_tensor_is_refused_with_the_nearest_name(source):
    edit_tensors(source, model__norm__weights=torch.ones(32))
    refused(source, r"unknown tensor 'model.norm.weights'. Did you mean 'model.norm.weight'")


def test_a_missing_tensor_is_refused_by_name(source):
    edit_tensors(source, model__norm__weight=None)
    refused(source, "missing tensor 'model.norm.weight'")


def test_a_tied_head_that_differs_is_refused(source):
    edit_tensors(source, lm_head__weight=torch.ones(96, 32))
    refused(source, "'lm_head.weight' differs from 'model.embed_tokens.weight'")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_a_buffer_that_is_no_number_of_floating_point_is_refused_by_name(source, dtype):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(source, **{name: torch.ones(4, dtype=dtype)})
    refused(source, f"tensor '{name}' is {dtype}; expected are floating-point numbers")


def test_a_tied_head_of_integers_is_refused_by_name(source):
    edit_tensors(source, lm_head__weight=torch.ones(96, 32, dtype=torch.int64))
    refused(source, "tensor 'lm_head.weight' is torch.int64; expected are floating-point numbers")


def test_integer_weights_are_refused(source):
    edit_tensors(source, model__norm__weight=torch.ones(32, dtype=torch.int32))
    refused(source, "'final_norm.weight' is torch.int32")


# ---- files


def test_a_missing_shard_is_named(source):
    cut_into_shards(source, 3)
    (source / "model-00002-of-00003.safetensors").unlink()
    refused(source, "lacks 1 of the 3 files.*model-00002-of-00003", FileNotFoundError)


def test_an_index_that_names_another_file_than_the_tensor_is_in_is_refused(source):
    cut_into_shards(source, 2)
    values = json.loads((source / INDEX).read_text())
    first, second = sorted(set(values["weight_map"].values()))
    values["weight_map"]["model.norm.weight"] = first
    values["weight_map"]["model.embed_tokens.weight"] = second
    values["weight_map"]["model.extra.weight"] = second
    (source / INDEX).write_text(json.dumps(values))
    refused(source, "tensors are not where model.safetensors.index.json says")


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/outside.safetensors",
        "sub/inside.safetensors",
        "sub\\inside.safetensors",
        "C:outside.safetensors",
        "model.bin",
        "..",
        3,
        None,
    ],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(source, name):
    cut_into_shards(source, 1)
    (source.parent / "outside.safetensors").write_bytes(b"")
    edit_json(source / INDEX, weight_map={"model.norm.weight": name})
    with pytest.raises(ValueError, match="allowed is the plain name of a .safetensors file"):
        import_checkpoint(source, source.parent / "out")


def test_one_file_beside_an_index_of_others_is_ambiguous(source):
    """Two checkpoints in one folder: it was the index that decided, in silence."""
    whole = (source / WEIGHTS).read_bytes()
    cut_into_shards(source, 2)
    (source / WEIGHTS).write_bytes(whole)
    refused(source, "has both model.safetensors and model.safetensors.index.json with 2 other")


def test_an_index_of_one_file_is_read(source):
    cut_into_shards(source, 1)
    os.replace(source / "model-00001-of-00001.safetensors", source / WEIGHTS)
    stated = json.loads((source / INDEX).read_text())["weight_map"]
    edit_json(source / INDEX, weight_map=dict.fromkeys(stated, WEIGHTS))
    assert import_checkpoint(source, source.parent / "out").num_source_tensors == 56


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("beside_a_base", [True, False])
def test_an_adapter_is_not_passed_over(source, name, beside_a_base):
    if not beside_a_base:
        (source / "config.json").unlink()
    (source / name).write_text("{}")
    refused(source, rf"has an adapter \({name}\), which is not read.* Merge it into the weights")


def test_a_shard_may_be_a_link_as_in_a_hub_cache(source):
    elsewhere = source.parent / "blob"
    os.replace(source / WEIGHTS, elsewhere)
    (source / WEIGHTS).symlink_to(elsewhere)
    assert import_checkpoint(source, source.parent / "out").num_source_tensors == 56


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_what_is_no_regular_file_is_not_read(source, make):
    (source / WEIGHTS).unlink()
    make(source / WEIGHTS)
    refused(source, "has no safetensors file", FileNotFoundError)


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt"])
def test_a_pickle_is_refused_and_not_executed(source, name):
    mark = source / "unpickled"
    (source / WEIGHTS).unlink()
    (source / name).write_bytes(pickle.dumps(Bomb(mark)))
    refused(source, f"pickle files only \\({name}\\)")
    assert not mark.exists()


def test_a_pickle_named_safetensors_is_refused_and_not_executed(source):
    mark = source / "unpickled"
    (source / WEIGHTS).write_bytes(pickle.dumps(Bomb(mark)))
    refused(source, "damaged or cut short")
    assert not mark.exists()


def test_a_folder_without_a_config_is_no_checkpoint(source):
    (source / "config.json").unlink()
    refused(source, "has no config.json", FileNotFoundError)


def test_a_huge_tokenizer_is_refused_unread(source):
    with (source / "tokenizer.json").open("wb") as file:
        file.truncate(257 * MiB)
    refused(source, "a tokenizer has at most 268,435,456")


def test_a_huge_tokenizer_config_is_refused(source):
    with (source / "tokenizer_config.json").open("wb") as file:
        file.truncate(65 * MiB)
    refused(source, "such a file has at most")
