"""Opening prepared folders: damage is noticed and named."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from depthdial.data.shards import TokenShards, token_dtype
from depthdial.data.text import prepare


@pytest.fixture
def folder(tmp_path, byte_tokenizer):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"text of document {i}" + "." * i)
    prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "out", tokenizer=byte_tokenizer)
    return tmp_path / "out"


def test_tokens_are_mapped_not_loaded_and_read_only(folder):
    shards = TokenShards.open(folder, "train")
    assert isinstance(shards.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        shards.tokens[0] = 1


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_token_type_holds_the_largest_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)


def test_truncated_token_file_is_refused_with_both_sizes(folder):
    path = folder / "train.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    message = f"train.bin is truncated: it has {len(data) - 3} bytes, .* promises {len(data)}"
    with pytest.raises(ValueError, match=message):
        TokenShards.open(folder, "train")


def test_longer_token_file_is_refused(folder):
    with (folder / "train.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(ValueError, match="train.bin is too long"):
        TokenShards.open(folder, "train")


def test_truncated_index_is_refused(folder):
    path = folder / "train.index.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="train.index.npy is damaged"):
        TokenShards.open(folder, "train")


def test_index_of_another_folder_is_refused(folder):
    index = np.load(folder / "train.index.npy")
    index[0, 0] += 1
    np.save(folder / "train.index.npy", index)
    with pytest.raises(ValueError, match="train.index.npy is damaged or was replaced"):
        TokenShards.open(folder, "train")


def test_wrong_number_of_names_is_refused(folder):
    (folder / "train.names.json").write_text('["one"]')
    with pytest.raises(ValueError, match="train.names.json is damaged or was replaced"):
        TokenShards.open(folder, "train")


@pytest.mark.parametrize("name", ["train.bin", "train.index.npy", "train.names.json"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        TokenShards.open(folder, "train")


def test_folder_without_its_last_file_does_not_open(folder):
    """meta.json is written last, so an interrupted write leaves a folder without it."""
    (folder / "meta.json").unlink()
    with pytest.raises(ValueError, match="no meta.json: .* interrupted"):
        TokenShards.open(folder, "train")


def test_cut_meta_file_does_not_open(folder):
    path = folder / "meta.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match="meta.json is damaged"):
        TokenShards.open(folder, "train")


def test_other_format_version_is_refused(folder):
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    with pytest.raises(ValueError, match="this version reads"):
        TokenShards.open(folder, "train")


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no prepared folder at .*absent"):
        TokenShards.open(tmp_path / "absent", "train")


def test_unknown_split_is_refused(folder):
    with pytest.raises(ValueError, match="split 'test' is unknown; choose one of train, valid"):
        TokenShards.open(folder, "test")


def test_an_id_outside_the_vocabulary_names_the_damaged_file(folder):
    """Same size, other bytes: it used to be an IndexError deep in the embedding."""
    path = folder / "train.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    shards = TokenShards.open(folder, "train")
    with pytest.raises(ValueError, match=r"train\.bin has token id 65535"):
        list(shards.documents())


def forge(folder, name):
    """Make meta.json describe a file as it is now."""
    meta = json.loads((folder / "meta.json").read_text())
    split, suffix = name.split(".", maxsplit=1)
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    meta["splits"][split]["sha256"][suffix] = digest
    (folder / "meta.json").write_text(json.dumps(meta))


def swap_two(folder, name):
    """Change a file without changing its size, nor any sum over it."""
    path = folder / name
    values = np.load(path) if name.endswith(".npy") else np.fromfile(path, dtype="<u2")
    other = next(i for i in range(1, len(values)) if (values[i] != values[0]).any())
    values[[0, other]] = values[[other, 0]]
    if name.endswith(".npy"):
        np.save(path, values)
    else:
        values.tofile(path)


@pytest.mark.parametrize("name", ["train.index.npy", "valid.index.npy"])
def test_f25_an_index_with_the_right_sums_and_wrong_lengths_is_refused(folder, name):
    if name.startswith("valid"):
        index = np.load(folder / name)
        index[0] = index[0][::-1]
        np.save(folder / name, index)
    else:
        swap_two(folder, name)
    with pytest.raises(ValueError, match=f"{name} is damaged or was replaced: its SHA-256"):
        TokenShards.open(folder, name.split(".")[0])


def test_f25_a_token_file_of_equal_size_is_noticed_where_its_contents_matter(folder):
    """The hash was copied from meta.json, and never computed."""
    TokenShards.open(folder, "train").check_tokens()
    swap_two(folder, "train.bin")
    with pytest.raises(ValueError, match="train.bin is damaged or was replaced"):
        TokenShards.open(folder, "train").check_tokens()


@pytest.mark.parametrize("name", ["train.bin", "train.index.npy"])
def test_f25_the_fingerprint_is_of_the_contents_whatever_meta_says(folder, name):
    before = TokenShards.open(folder, "train").fingerprint
    assert before == TokenShards.open(folder, "train").fingerprint
    assert before != TokenShards.open(folder, "valid").fingerprint
    swap_two(folder, name)
    forge(folder, name)
    assert TokenShards.open(folder, "train").fingerprint != before


@pytest.mark.parametrize("name", ["meta.json", "train.names.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "{", b"\xff"])
def test_f11_a_file_of_the_folder_that_is_no_json_is_named(folder, name, content):
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(raw)
    with pytest.raises(ValueError, match=f"{name} is damaged .*Prepare the folder again"):
        TokenShards.open(folder, "train")
