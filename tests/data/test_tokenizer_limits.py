"""A small tokenizer.json that costs hours or memory: nothing of it runs before it is asked to."""

import json
import threading
import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from depthdial.data import tokenizer_limits
from depthdial.data.tokenizer import TOKENIZER_FILE, Tokenizer, train_bpe
from depthdial.data.tokenizer_limits import MAX_GROWTH

EXPONENTIAL = r"(a+)+$"
STEADY = r"(?:a|aa){20}b|."
"""Exponential in a bounded part: a fraction of a second at each character, below every limit of
the library."""


def write(folder, **parts):
    """A byte-level tokenizer.json with some parts replaced."""
    values = json.loads(train_bpe(["aab ab"], 260, allow_fewer=True).to_json())
    (folder / TOKENIZER_FILE).write_text(json.dumps(values | parts))
    return folder / TOKENIZER_FILE


def split(pattern):
    return {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ],
    }  # fmt: skip


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_f31_a_pattern_that_the_library_gives_up_on_is_an_error_in_words(tmp_path):
    """It ended in a panic, which no `except Exception` catches."""
    tokenizer = Tokenizer.from_file(write(tmp_path, pre_tokenizer=split(EXPONENTIAL)))
    with pytest.raises(ValueError, match="cannot encode .*retry-limit-in-match over"):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_f31_a_pattern_that_takes_too_long_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_limits, "SECONDS", 0.0)
    tokenizer = Tokenizer.from_file(write(tmp_path, pre_tokenizer=split(STEADY)))
    started = time.monotonic()
    with pytest.raises(ValueError, match="takes more than 0.04 seconds for 40 characters"):
        tokenizer.encode("a" * 40)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("pattern", [EXPONENTIAL, STEADY])
def test_f31_nothing_is_cut_to_learn_what_opens_a_text(tmp_path, pattern, monkeypatch):
    opening = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    template = json.loads(opening.__getstate__())
    path = write(tmp_path, pre_tokenizer=split(pattern), post_processor=template)

    def no_thread(*arguments):
        raise AssertionError("a text was cut")

    monkeypatch.setattr("depthdial.data.tokenizer.within_time", no_thread)
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.template_ids == (0,) and tokenizer.special_tokens == ("<|endoftext|>",)


def test_f31_a_trained_tokenizer_starts_no_thread(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread started"))
    assert train_bpe(["aab ab"], 260, allow_fewer=True).encode("ab")


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (replace("a" * 5000, String="a"), "normalizer"),
        ({"type": "Prepend", "prepend": "a" * 5000}, "normalizer"),
        ({"type": "Sequence", "normalizers": [replace("ab", Regex="")] * 40}, "normalizer"),
        ({"type": "Sequence", "normalizers": [replace("a" * 10, String="a")] * 8}, "normalizer"),
        (
            {"type": "Sequence", "decoders": [replace("a" * 100, String="a")] * 3},
            "decoder",
        ),
    ],
)
def test_f31_replacements_without_measure_are_refused_at_once(tmp_path, part, name):
    path = write(tmp_path, **{name: part})
    with pytest.raises(ValueError, match=f"its {name} may make a text .* at most {MAX_GROWTH:,}"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                             replace("\u2581", String=" ")]},
        {"type": "Sequence", "normalizers": [replace('"', String="``"), {"type": "NFKD"},
                                             replace(" ", Regex=" {2,}")]},
    ],
)  # fmt: skip
def test_f31_replacements_of_published_tokenizers_are_read(tmp_path, part):
    Tokenizer.from_file(write(tmp_path, normalizer=part))


# ---- what opens a text, read from the template


def opening(*parts):
    """What the library itself puts before a text."""
    vocab = {token: i for i, token in enumerate(("a", "<s>", "</s>", "<x>"))}
    backend = Backend(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.Sequence(list(parts)) if len(parts) > 1 else parts[0]
    framed = backend.encode("a").ids
    return Tokenizer(backend, eos_token=None).template_ids, tuple(framed[: framed.index(0)])


SPECIALS = [("<s>", 1), ("</s>", 2), ("<x>", 3)]
TEMPLATE = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=SPECIALS)
DOUBLE = processors.TemplateProcessing(single="<x> <s> $A", special_tokens=SPECIALS)


@pytest.mark.parametrize(
    "parts",
    [
        (TEMPLATE,),
        (DOUBLE,),
        (processors.ByteLevel(), DOUBLE),
        (processors.BertProcessing(("</s>", 2), ("<s>", 1)),),
        (processors.RobertaProcessing(("</s>", 2), ("<x>", 3)),),
        (processors.TemplateProcessing(single="$A </s>", special_tokens=SPECIALS),),
        (processors.ByteLevel(),),
    ],
)
def test_what_opens_a_text_is_what_the_library_puts_there(parts):
    read, put = opening(*parts)
    assert read == put
