"""Tokenizer: round trips, files, training."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from depthdial.data.tokenizer import END_OF_TEXT, Tokenizer, _in_pieces, train_bpe

TEXTS = ["the cat sat on the mat", "the dog and the cat", "naïve café, 東京 \U0001f600"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 280)


@given(text=st.text())
def test_any_unicode_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_merges_frequent_pairs(tokenizer):
    assert len(tokenizer.encode("the cat")) < len(b"the cat")


def test_training_reaches_the_asked_size_and_puts_end_of_text_first(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (280, 0)


def test_training_twice_gives_the_same_file(tokenizer):
    assert train_bpe(iter(TEXTS), 280).to_json() == tokenizer.to_json()


def test_encode_batch_equals_encoding_one_by_one(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_end_of_text_spelled_in_a_document_is_not_the_special_token(tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


@pytest.mark.parametrize("text", ["a", " the", "\n", "é", "漢", "😀 x", "\ufffd"])
def test_the_bytes_of_the_tokens_add_up_to_those_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert sum(map(tokenizer.num_bytes, ids)) == len(text.encode())
    assert tokenizer.num_bytes(tokenizer.eos_id) == 0


def test_a_token_of_one_byte_in_a_vocabulary_of_pieces_counts_as_one():
    vocab = {"<unk>": 0, "▁the": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    pieces = Tokenizer(backend, eos_token=None)
    assert [pieces.num_bytes(i) for i in (1, 2 + 0x0A, 2 + 0xE6)] == [3, 1, 1]


def test_decode_leaves_the_end_of_text_token_out(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("the cat"), tokenizer.eos_id]) == "the cat"


def test_decode_refuses_an_id_outside_the_vocabulary(tokenizer):
    with pytest.raises(ValueError, match="token id 280 is outside the 280 known ids"):
        tokenizer.decode([280])


@pytest.mark.parametrize("vocab_size", [0, 256])
def test_training_refuses_a_vocabulary_that_cannot_hold_all_bytes(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size} is too small.*at least 257"):
        train_bpe(TEXTS, vocab_size)


def test_training_refuses_more_tokens_than_the_text_supports():
    with pytest.raises(ValueError, match="supports only 25[0-9] tokens"):
        train_bpe(["ab"], 500)


def test_training_may_be_told_to_accept_fewer_tokens():
    assert 257 <= train_bpe(["ab"], 500, allow_fewer=True).vocab_size < 500


def test_saved_tokenizer_loads_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_dir(tmp_path)
    assert (loaded.eos_id, loaded.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)
    assert loaded.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])


def test_saved_tokenizer_loads_in_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs(TEXTS[2])["input_ids"] == tokenizer.encode(TEXTS[2])


def test_saving_keeps_foreign_keys_of_the_tokenizer_config(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": "{{ messages }}"}
    path.write_text(json.dumps(config))
    Tokenizer.from_dir(tmp_path).save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert again == config


def test_end_of_text_token_is_read_from_the_tokenizer_config(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}}')
    assert Tokenizer.from_dir(tmp_path).eos_id == tokenizer.token_id("a")


def test_end_of_text_token_missing_from_the_vocabulary_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ValueError, match="'<stop>' is not among the 280 known tokens"):
        Tokenizer.from_dir(tmp_path)


def test_truncation_stored_in_a_tokenizer_file_is_not_applied(tokenizer, tmp_path):
    """A published file often carries a length limit; documents would be cut silently."""
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert Tokenizer.from_file(path).encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at .*tokenizer.json"):
        Tokenizer.from_dir(tmp_path)


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_not_utf8_is_named_with_the_place(tokenizer, tmp_path, name):
    tokenizer.save(tmp_path)
    (tmp_path / name).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=rf"{name} is damaged: no UTF-8 text \(byte 0xff at 7\)"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "tokenizer_config.json must hold a JSON object, got list"),
        ('{"eos_token": ', "tokenizer_config.json is not valid JSON"),
        ('{"eos_token": 3}', "tokenizer_config.json: eos_token is 3"),
        ('{"eos_token": "<stop>"}', "tokenizer_config.json, eos_token: token '<stop>'"),
    ],
)
def test_a_damaged_tokenizer_config_is_named(tokenizer, tmp_path, content, message):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_training_in_pieces_equals_training_on_whole_texts(monkeypatch):
    """Pieces end between words, whatever white space is there."""
    texts = [" \n a  b\n\n c \n  the ship\nthe   ship \t of\n \nbirds" * 4, "the ship", ""]
    whole = train_bpe(texts, 275).to_json()
    monkeypatch.setattr("depthdial.data.tokenizer.PIECE_CHARS", 12)
    assert train_bpe(texts, 275).to_json() == whole


def test_pieces_of_a_run_without_space_are_short_and_lose_nothing(monkeypatch):
    monkeypatch.setattr("depthdial.data.tokenizer.PIECE_CHARS", 10)
    text = "short words " + "x" * 35 + "\nand" + "y" * 11
    pieces = list(_in_pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 10


def test_training_time_of_a_run_without_space_grows_no_faster_than_its_length():
    """One word of 300,000 letters took most of a minute."""
    started = time.process_time()
    train_bpe(["ab" * 150_000], 400, allow_fewer=True)
    assert time.process_time() - started < 5
