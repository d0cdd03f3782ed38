"""Long texts are encoded in windows: the tokens are those of the whole, the memory is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from depthdial.data import long_text, tokenizer
from depthdial.data.tokenizer import Tokenizer, train_bpe

WORDS = "the ship sailed past an island of birds in 1984 and 2048, they said: it's 12345 miles!\n"
TEXT = (
    WORDS * 3 + "  na\u00efve \u4e2d\u6587 \U0001f600\U0001f600 aaaaaaaa\n\n\tTHE END\r\n" + WORDS
)


def trained(model, trainer, **steps) -> Tokenizer:
    backend = Backend(model)
    for name, step in steps.items():
        setattr(backend, name, step)
    backend.train_from_iterator([TEXT], trainer)
    return Tokenizer(backend, eos_token=None)


def bpe_trainer(vocab_size: int, **more) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **more)


def byte_level() -> Tokenizer:
    return train_bpe([TEXT], 330)


def regex_split() -> Tokenizer:
    """Digits in threes, as published byte-level vocabularies split them."""
    pattern = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    steps = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = bpe_trainer(330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return trained(models.BPE(), trainer, pre_tokenizer=steps, normalizer=normalizers.NFC())


def one_word() -> Tokenizer:
    """No split at all, and a mark before every text: sentencepiece's byte-pair encoding."""
    mark = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trainer = bpe_trainer(
        345, special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    )
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return trained(model, trainer, normalizer=mark)


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", show_progress=False,
                                      special_tokens=["<unk>"])  # fmt: skip
    return trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())


def word_pieces() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=200, show_progress=False,
                                        special_tokens=["[UNK]"])  # fmt: skip
    model = models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=12)
    steps = {"normalizer": normalizers.BertNormalizer(), "decoder": decoders.WordPiece()}
    return trained(model, trainer, pre_tokenizer=pre_tokenizers.BertPreTokenizer(), **steps)


KINDS = (byte_level, regex_split, one_word, unigram, word_pieces)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def kind(request) -> Tokenizer:
    return request.param()


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """Windows of a few words, so that every text has many seams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "WINDOW_CHARS", 240)
        patch.setattr(tokenizer, "WINDOW_CHARS", 240)
        patch.setattr(long_text, "OVERLAP_CHARS", 60)
        patch.setattr(long_text, "AGREED_TOKENS", 6)
        patch.setattr(long_text, "STARTS_TRIED", 16)
        yield


def whole(kind: Tokenizer, text: str) -> list[int]:
    return kind._encode([text])[0]


PIECES = st.sampled_from(
    [*WORDS.split(), " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "aa", "1", "000", "e\u0301",
     "\u4e2d", "\U0001f600", "'s", "THE", " the ship", "\u2581", "x" * 30, "77", " " * 25]
)  # fmt: skip


@given(pieces=st.lists(PIECES, min_size=60, max_size=160), repeat=st.integers(1, 3))
def test_f32_windows_give_the_tokens_of_the_whole_text(kind, pieces, repeat):
    text = "".join(pieces) * repeat
    assert kind.encode(text) == whole(kind, text)


def encoded(kind: Tokenizer, text: str) -> tuple[list[int], int]:
    """Ids of a text by windows, and the length of the longest text that was encoded at once."""
    lengths = []

    def encode(part: str) -> list[int]:
        lengths.append(len(part))
        return whole(kind, part)

    return [token for ids in long_text.encode_parts(encode, [text]) for token in ids], max(lengths)


@pytest.fixture
def wider_windows(monkeypatch):
    """Windows whose shared text has many tokens, as it usually has."""
    monkeypatch.setattr(long_text, "WINDOW_CHARS", 1000)
    monkeypatch.setattr(long_text, "OVERLAP_CHARS", 300)


def test_f32_no_more_than_a_window_is_encoded_at_once(kind, wider_windows):
    text = TEXT * 40
    ids, longest = encoded(kind, text)
    assert ids == whole(kind, text)
    assert longest == long_text.WINDOW_CHARS < len(text) / 15


@pytest.mark.parametrize("unit", ["a", " ", "\n", "the", "1", "\u4e2d", "ab\u0301"])
def test_f32_text_of_a_short_period_needs_no_larger_window(unit, wider_windows):
    """Windows that begin at any place of `aaaa...` split it at other places, for ever."""
    tokenizer = train_bpe([unit * 64], 261, allow_fewer=True)
    ids, longest = encoded(tokenizer, unit * 2000)
    assert ids == whole(tokenizer, unit * 2000)
    assert longest == long_text.WINDOW_CHARS


def test_f32_windows_that_never_agree_become_one():
    def encode(text: str) -> list[int]:
        return [len(text)] * len(text)

    assert list(long_text.encode_parts(encode, ["x" * 1000])) == [[1000] * 1000]


def test_f32_a_tokenizer_that_reads_texts_as_a_whole_is_refused_not_cut():
    def encode(text: str) -> list[int]:
        codes = [ord(character) for character in text]
        return codes if "!" not in text else codes[::-1]

    text = "".join(map(chr, range(1000, 1700))) + "!" * 400
    with pytest.raises(ValueError, match="cannot be encoded in parts by this tokenizer"):
        list(long_text.encode_parts(encode, [text]))


def test_f32_parts_are_read_as_they_are_needed(kind):
    taken = 0

    def parts():
        nonlocal taken
        for start in range(0, len(text), 50):
            taken += 1
            yield text[start : start + 50]

    text = TEXT * 20
    ids = []
    for some in kind.encode_parts(parts()):
        ids += some
        if len(ids) < len(whole(kind, text)) / 2:
            assert taken * 50 < len(text) * 3 / 4
    assert ids == whole(kind, text)


def test_f32_words_to_train_on_do_not_depend_on_the_parts(monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 16)
    text = WORDS * 3 + "x" * 40
    expected = list(tokenizer._in_pieces(text))
    for size in (1, 7, 16, 17, 1000):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(tokenizer._in_pieces(parts)) == expected
    assert (
        train_bpe([[*parts], "b"], 300, allow_fewer=True).to_json()
        == train_bpe([text, "b"], 300, allow_fewer=True).to_json()
    )
