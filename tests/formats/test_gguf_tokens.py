"""Keys, tokenizers and file names as current converters to GGUF write them."""

import json
import re

import pytest
from gguf_files import TOKENS, WEIGHTS, stated, write_gguf
from published import hashes
from tokenizers import Tokenizer as Backend

from depthdial.data.tokenizer import Tokenizer
from depthdial.formats.import_export import import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.formats.source_folder import open_source

gguf = pytest.importorskip("gguf", reason="pip install 'depthdial[gguf]'")


@pytest.fixture
def source(tmp_path):
    """Path of a GGUF file to write, alone in its folder."""
    (tmp_path / "source").mkdir()
    return tmp_path / "source" / "model.gguf"


WITHOUT_EFFECT = {
    "add_sep_token": lambda writer: writer.add_add_sep_token(True),
    "cls": lambda writer: writer.add_uint32("tokenizer.ggml.cls_token_id", 1),
    "mask": lambda writer: writer.add_mask_token_id(3),
    "seperator": lambda writer: writer.add_sep_token_id(2),
    "unknown": lambda writer: writer.add_unk_token_id(0),
    "remove_extra_whitespaces": lambda writer: writer.add_remove_extra_whitespaces(True),
    **{
        f"fim_{role}": lambda writer, role=role: writer.add_uint32(
            f"tokenizer.ggml.fim_{role}_token_id", 0
        )
        for role in ("pre", "suf", "mid", "pad", "rep", "sep")
    },
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the file without any of these keys becomes."""
    place = tmp_path_factory.mktemp("plain")
    import_checkpoint(write_gguf(place / "model.gguf"), place / "a")
    return place / "a"


def test_f03_keys_that_change_nothing_for_one_text_change_no_file(source, tmp_path, plain):
    """Each of them was refused; of the model folder, only the source's hash is another."""

    def edit(writer):
        for add in WITHOUT_EFFECT.values():
            add(writer)

    report = import_checkpoint(write_gguf(source, edit=edit), tmp_path / "a")
    assert report.notes == report.warnings == ()
    ours, theirs = hashes(tmp_path / "a"), hashes(plain)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"origin.json"}


@pytest.mark.parametrize(
    ("roles", "stops"),
    [(("eot",), (2, 1)), (("eom",), (2, 0)), (("eot", "eom"), (2, 1, 0))],
)
def test_f03_ends_of_turns_and_messages_are_stops(source, tmp_path, roles, stops):
    def edit(writer):
        for role in roles:
            getattr(writer, f"add_{role}_token_id")({"eot": 1, "eom": 0}[role])

    report = import_checkpoint(write_gguf(source, edit=edit), tmp_path / "a")
    tokenizer = Tokenizer.from_dir(tmp_path / "a")
    assert report.tokens.stop_ids == tokenizer.stop_ids == stops
    assert tokenizer.eos_token == "<2>" and report.warnings == ()


def test_f03_an_end_of_turn_ends_texts_where_no_end_of_text_is_named(source, tmp_path):
    def edit(writer):
        del writer.kv_data[0]["tokenizer.ggml.eos_token_id"]
        writer.add_eot_token_id(1)

    import_checkpoint(write_gguf(source, edit=edit), tmp_path / "a")
    assert Tokenizer.from_dir(tmp_path / "a").eos_token == "<1>"


def test_f03_ends_of_turns_are_stops_without_a_tokenizer_too(source, tmp_path):
    def edit(writer):
        stated(writer, "tokenizer.ggml.pre", "another")
        writer.add_eot_token_id(1)

    report = import_checkpoint(write_gguf(source, edit=edit), tmp_path / "a")
    assert report.tokens.stop_ids == (2, 1)
    config = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [2, 1]


def test_f03_the_template_for_tools_is_kept_beside_the_default(source, tmp_path):
    templates = [
        {"name": "default", "template": "{{ messages }}<2>"},
        {"name": "tool_use", "template": "{{ tools }}<2>"},
    ]
    write_gguf(source, edit=lambda writer: writer.add_chat_template(templates))
    report = import_checkpoint(source, tmp_path / "a")
    assert report.tokens.template_in == "tokenizer_config.json" and report.warnings == ()
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    by_name = {item["name"]: item["template"] for item in config["chat_template"]}
    assert by_name == {item["name"]: item["template"] for item in templates}


def test_f03_a_file_that_closes_texts_says_so_in_its_tokenizer(source, tmp_path):
    """The flag was read and had no effect."""
    write_gguf(source, edit=lambda writer: writer.add_add_eos_token(True))
    import_checkpoint(source, tmp_path / "a")
    backend = Backend.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert backend.encode("ab").ids == [6, 2]
    assert Tokenizer.from_dir(tmp_path / "a").opening_ids == ()


def test_f03_an_id_that_spells_no_such_token_is_none(source, tmp_path):
    report = import_checkpoint(
        write_gguf(source, edit=lambda writer: writer.add_pad_token_id(2**32 - 1)), tmp_path / "a"
    )
    assert report.tokens.has_tokenizer and report.notes == ()


def test_f03_an_id_beyond_the_embedding_is_left_out_and_named(source, tmp_path):
    report = import_checkpoint(
        write_gguf(source, edit=lambda writer: writer.add_eot_token_id(500)), tmp_path / "a"
    )
    assert report.tokens.has_tokenizer and report.tokens.stop_ids == (2,)
    assert "the eot token the id 500, which is left out: the model has 96 ids" in report.notes[0]


def not_utf8(writer):
    """The third token in bytes that no text has; the writer itself takes texts only."""
    stated(writer, "tokenizer.ggml.tokens", [b"\xff" if t == "<2>" else t for t in TOKENS])


UNREADABLE = {
    "an unknown key": (
        lambda writer: writer.add_uint32("tokenizer.ggml.mystery", 4),
        "no known meaning: tokenizer.ggml.mystery",
    ),
    "many unknown keys": (
        lambda writer: [writer.add_uint32(f"tokenizer.mystery_{i}", 4) for i in range(9)],
        "9 of its keys .* and 4 more",
    ),
    "another kind": (lambda w: stated(w, "tokenizer.ggml.model", "llama"), "model 'llama'"),
    "no kind": (lambda w: w.kv_data[0].pop("tokenizer.ggml.model"), "model None"),
    "no tokens": (lambda w: w.kv_data[0].pop("tokenizer.ggml.tokens"), "no list of UTF-8 texts"),
    "no types": (lambda w: w.kv_data[0].pop("tokenizer.ggml.token_type"), "no list .*token_type"),
    "no merges": (lambda w: w.kv_data[0].pop("tokenizer.ggml.merges"), "texts .*merges"),
    "merges of unknown tokens": (
        lambda w: stated(w, "tokenizer.ggml.merges", ["a c"]),
        "contradicts itself: 96 tokens",
    ),
    "a token twice": (
        lambda w: stated(w, "tokenizer.ggml.tokens", [*TOKENS[:-1], "a"]),
        "96 tokens, 95 of them different",
    ),
    "more tokens than the embedding": (
        lambda w: (
            stated(w, "tokenizer.ggml.tokens", [*TOKENS, "beyond"]),
            stated(w, "tokenizer.ggml.token_type", [1] * 97),
        ),
        r"'beyond' \(96\); it embeds 96 ids",
    ),
    "bytes that are no text": (not_utf8, "no list of UTF-8 texts 'tokenizer.ggml.tokens'"),
    "a space before texts": (lambda w: w.add_add_space_prefix(True), "a space before every text"),
    "an opening token without a name": (
        lambda w: (w.kv_data[0].pop("tokenizer.ggml.bos_token_id"), w.add_add_bos_token(True)),
        "add_bos_token is true, and the header names no bos token",
    ),
    "a flag that is none": (
        lambda w: w.add_uint32("tokenizer.ggml.add_bos_token", 2),
        "add_bos_token is 2; true or false",
    ),
    "a template that is no text": (
        lambda w: w.add_uint32("tokenizer.chat_template", 2),
        "tokenizer.chat_template is no UTF-8 text",
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_f03_a_tokenizer_that_cannot_be_read_does_not_stop_the_weights(
    source, tmp_path, plain, what
):
    """Unknown keys, contradictions and surplus tokens were refused, against the docs."""
    edit, reason = UNREADABLE[what]
    report = import_checkpoint(write_gguf(source, edit=edit), tmp_path / "a")
    assert not report.tokens.has_tokenizer and not report.warnings
    [note] = report.notes
    assert re.search(f"tokenizer of this GGUF file is not read.*{reason}", note)
    assert "add the model's tokenizer.json to the model folder" in note and "/tmp" not in note
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (plain / WEIGHTS).read_bytes()
    assert not (tmp_path / "a" / "tokenizer.json").exists()


def test_f03_inspect_says_why_a_tokenizer_is_not_read(source):
    write_gguf(source, edit=lambda writer: writer.add_uint32("tokenizer.ggml.mystery", 4))
    inspected = inspect_source(source)
    assert inspected.problems == ()
    assert "no known meaning: tokenizer.ggml.mystery" in inspected.notes[0]


# ---- names of files


def test_f03_a_suffix_in_capitals_is_the_same_file(source, tmp_path):
    """It was taken for a folder without config.json."""
    capitals = write_gguf(source).rename(source.with_name("MODEL.GGUF"))
    assert import_checkpoint(capitals, tmp_path / "a").family == "llama"
    assert import_checkpoint(capitals.parent, tmp_path / "b").family == "llama"


def refused(path, match):
    with pytest.raises(ValueError, match=match):
        open_source(path)


def as_part(number, count):
    def edit(writer):
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", 57)

    return edit


def test_f03_one_part_of_a_split_file_is_refused_with_the_way_to_join_them(source):
    """The message named keys without a meaning, or the architecture None."""
    part = source.with_name("model-00002-of-00003.gguf")
    refused(
        write_gguf(part, edit=as_part(1, 3)),
        "00002-of-00003.gguf is part 2 of the 3 of a GGUF file; only whole files .* "
        "llama-gguf-split --merge model-00001-of-00003.gguf model.gguf",
    )


def test_f03_a_later_part_has_no_architecture_and_is_named_as_a_part_all_the_same(source):
    writer = gguf.GGUFWriter(source, "llama")
    del writer.kv_data[0]["general.architecture"]
    as_part(2, 3)(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(source, "model.gguf is part 3 of the 3 .* --merge FIRST_PART")


def test_f03_a_folder_of_parts_says_how_to_join_them(source):
    for number in (1, 2):
        source.with_name(f"model-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    refused(source.parent, "source has 2 parts of one GGUF file; .*Join the parts")


def test_f03_a_split_into_one_part_is_a_whole_file(source, tmp_path):
    write_gguf(source, edit=as_part(0, 1))
    assert import_checkpoint(source, tmp_path / "a").tokens.has_tokenizer
