"""Special tokens, chat template and generation config: carried over, compared, in force."""

import json

import pytest
import torch
from published import (
    SPECIALS,
    TEMPLATE,
    WORDS,
    add_tokenizer,
    copy_golden,
    edit_json,
)

import depthdial
from depthdial.api.data import token_documents
from depthdial.api.model import Model
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
END = SPECIALS.index("<|end|>")
"""Id of the end-of-turn token."""
PUBLISHED_FILES = ("tokenizer.json", CONFIG, GENERATION, "chat_template.jinja",
                   "special_tokens_map.json", "added_tokens.json")  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """A llama checkpoint: bos 1 and eos 2 in its config, as in its tokenizer."""
    folder = copy_golden("llama", tmp_path / "source")
    add_tokenizer(folder)
    return folder


def imported(source, **changes):
    return import_checkpoint(source, source.parent / "out", **changes)


def forced(folder, token_id):
    """The model of a folder whose every next token is one token."""
    model = depthdial.load(folder)
    vocab_size = model.config.vocab_size

    def head(x):
        logits = torch.zeros(*x.shape[:-1], vocab_size)
        logits[..., token_id] = 1.0
        return logits

    model.looped_lm.head = head
    return model


# ---- B41: nothing lost


def test_b41_each_special_token_has_the_same_id_afterwards(source):
    imported(source)
    before = Tokenizer.from_file(source / "tokenizer.json")
    after = Tokenizer.from_dir(source.parent / "out")
    assert {t: after.token_id(t) for t in SPECIALS} == {t: before.token_id(t) for t in SPECIALS}
    assert after.special_tokens == before.special_tokens == SPECIALS


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_b41_the_chat_template_is_kept_where_it_was(source, place):
    if place == CONFIG:
        edit_json(source / CONFIG, chat_template=TEMPLATE)
    else:
        (source / place).write_text(TEMPLATE)
    report = imported(source)
    assert report.tokens.template_in == place
    out = source.parent / "out" / place
    text = json.loads(out.read_text())["chat_template"] if place == CONFIG else out.read_text()
    assert text == TEMPLATE


def test_b41_generation_stops_at_the_end_of_turn_token(source):
    edit_json(source / CONFIG, chat_template=TEMPLATE)
    edit_json(source / GENERATION, eos_token_id=[2, END])
    assert imported(source).tokens.stop_ids == (2, END)
    model = forced(source.parent / "out", END)
    [completion] = model.generate("the ship", max_new_tokens=5)
    assert (completion.finish_reason, completion.text) == ("stop", "")


def test_generation_stops_at_every_id_that_only_the_config_states(tmp_path):
    """Published with a list of end ids in config.json and no generation config."""
    source = copy_golden("iquest-loop", tmp_path / "source")
    add_tokenizer(source)
    assert imported(source).tokens.stop_ids == (2, 90, 91)
    stated = json.loads((tmp_path / "out" / GENERATION).read_text())
    assert stated == {"eos_token_id": [2, 90, 91]}
    [completion] = forced(tmp_path / "out", 91).generate("the ship", max_new_tokens=5)
    assert completion.finish_reason == "stop"


def test_a_token_that_is_no_stop_token_does_not_end_a_text(source):
    imported(source)
    model = forced(source.parent / "out", len(SPECIALS))
    [completion] = model.generate("the ship", max_new_tokens=3)
    assert (completion.finish_reason, completion.completion_tokens) == ("length", 3)


def test_an_export_gives_every_text_file_back(source):
    for name in ("special_tokens_map.json", "added_tokens.json", GENERATION):
        values = {"added_tokens.json": {"<|end|>": END}}.get(name, {"eos_token_id": 2})
        (source / name).write_text(json.dumps(values, indent=2) + "\n")
    edit_json(source / "special_tokens_map.json", eos_token={"content": "</s>"})
    (source / "chat_template.jinja").write_text(TEMPLATE)
    imported(source)
    export_checkpoint(source.parent / "out", source.parent / "x", family="llama")
    for name in PUBLISHED_FILES:
        theirs, ours = (source / name).read_text(), (source.parent / "x" / name).read_text()
        assert theirs == ours or json.loads(theirs) == json.loads(ours), name


def test_files_that_an_import_adds_are_not_exported(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    imported(source)
    assert (tmp_path / "out" / GENERATION).is_file()
    export_checkpoint(tmp_path / "out", tmp_path / "x", family="llama")
    assert not (tmp_path / "x" / GENERATION).exists()


# ---- opening tokens


@pytest.mark.parametrize(
    ("template", "keys"),
    [
        (False, {}),
        (True, {}),
        (False, {"add_bos_token": True}),
        (False, {"add_bos_token": False}),
        (True, {"add_bos_token": False}),
        (True, {"add_bos_token": True}),
        (True, {"add_bos_token": None}),
    ],
)
def test_a_text_opens_as_in_transformers(source, template, keys):
    from transformers import AutoTokenizer

    add_tokenizer(source, adds_bos=template, **keys)
    imported(source)
    tokenizer = Tokenizer.from_dir(source.parent / "out")
    ours = [*tokenizer.opening_ids, *tokenizer.encode("the ship")]
    assert ours == AutoTokenizer.from_pretrained(source)("the ship")["input_ids"]


def test_the_prompt_and_the_sweep_open_with_the_publishers_token(source):
    add_tokenizer(source, adds_bos=True)
    imported(source)
    model = forced(source.parent / "out", 2)
    assert model.generate("the ship")[0].prompt_tokens == 3
    sweep = depthdial.sweep(model, ["the ship sailed"], loops=[1], context=32)
    assert sweep.tokens_N.tolist() == [3]


def test_an_id_that_the_tokenizer_cannot_spell_gives_no_text(source):
    """Published models embed more ids than their tokenizers have, to a round number."""
    imported(source)
    [completion] = forced(source.parent / "out", 95).generate("the ship", max_new_tokens=2)
    assert (completion.text, completion.completion_tokens) == ("", 2)


def test_a_model_without_opening_token_gets_none(source):
    imported(source)
    model = depthdial.load(source.parent / "out")
    assert model.tokenizer.opening_ids == ()
    assert model.generate("the ship", max_new_tokens=1)[0].prompt_tokens == 2


def test_a_sweep_without_opening_token_scores_all_tokens_but_the_first(source):
    imported(source)
    model = depthdial.load(source.parent / "out")
    text = "the ship sailed a day"
    ids = torch.tensor([model.tokenizer.encode(text)])
    logits = model.looped_lm(ids, num_loops=1)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    sweep = depthdial.sweep(model, [text], loops=[1], context=32)
    assert sweep.tokens_N.tolist() == [4]
    assert sweep.mean_loss(1) == pytest.approx(loss, abs=1e-5)


def test_rows_of_a_sweep_without_opening_token_score_each_token_once(source):
    imported(source)
    model = depthdial.load(source.parent / "out")
    sweep = depthdial.sweep(model, ["the ship sailed a day " * 3], loops=[1], context=4)
    assert sweep.tokens_N.tolist() == [14]


def test_a_document_of_one_token_has_nothing_to_score(source):
    imported(source)
    model = depthdial.load(source.parent / "out")
    with pytest.raises(ValueError, match="have no token to score, first 'text 1'"):
        depthdial.sweep(model, ["ship"], loops=[1], context=4)


def test_documents_of_an_imported_model_are_not_closed(source):
    imported(source)
    tokenizer = Tokenizer.from_dir(source.parent / "out")
    [document] = token_documents(["the ship"], tokenizer)
    assert document.tokens_T.tolist() == tokenizer.encode("the ship")


def test_a_tokenizer_of_our_own_still_opens_and_closes_with_end_of_text(tmp_path):
    train_bpe(["the ship"], 260, allow_fewer=True).save(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.opening_ids == tokenizer.closing_ids == tokenizer.stop_ids == (0,)


def test_saving_and_loading_keeps_stop_and_opening_tokens(source):
    """A run that continues an imported model saves its tokenizer into every checkpoint."""
    add_tokenizer(source, adds_bos=True)
    edit_json(source / GENERATION, eos_token_id=[2, END], temperature=0.6)
    imported(source)
    first = Tokenizer.from_dir(source.parent / "out")
    first.save(source.parent / "again")
    again = Tokenizer.from_dir(source.parent / "again")
    for name in ("stop_ids", "opening_ids", "closing_ids", "eos_id"):
        assert getattr(again, name) == getattr(first, name)
    assert json.loads((source.parent / "again" / GENERATION).read_text())["temperature"] == 0.6


def test_an_export_of_our_own_tokenizer_opens_texts_in_transformers_as_here(tmp_path):
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    imported(copy_golden("llama", tmp_path / "source"))
    config = load_model(out).config.replace(vocab_size=300)
    save_model(LoopedLM(config), tmp_path / "own")
    tokenizer = train_bpe(["the ship sailed"], 270, allow_fewer=True)
    tokenizer.save(tmp_path / "own")
    export_checkpoint(tmp_path / "own", tmp_path / "x", family="llama")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "x")("the ship")["input_ids"]
    assert theirs == [*tokenizer.opening_ids, *tokenizer.encode("the ship")]


# ---- contradictions


def test_a_source_that_agrees_with_itself_gives_no_warning(source):
    edit_json(source / GENERATION, eos_token_id=2, bos_token_id=1)
    edit_json(source / "special_tokens_map.json", eos_token="</s>", bos_token="<s>")
    edit_json(source / CONFIG, added_tokens_decoder={"2": {"content": "</s>"}})
    assert imported(source).warnings == ()


@pytest.mark.parametrize(
    ("file", "changes", "warning"),
    [
        (GENERATION, {"eos_token_id": 3}, "eos token is 2 in config.json and 3 in generation"),
        (GENERATION, {"bos_token_id": 4}, "bos token is 1 in config.json and 4 in generation"),
        (CONFIG, {"eos_token": "<|end|>"}, "eos token is 2 in config.json and 4 in tokenizer_con"),
        ("special_tokens_map.json", {"bos_token": "</s>"}, "and 2 in special_tokens_map.json"),
        ("special_tokens_map.json", {"pad_token": "<pad>"}, "pad_token '<pad>' is not in token"),
        (CONFIG, {"add_bos_token": True}, "add_bos_token=true, but the template"),
        ("added_tokens.json", {"<|end|>": 7}, "id 7 is '<|end|>', but tokenizer.json has 'sailed'"),
        (
            CONFIG,
            {"added_tokens_decoder": {"2": {"content": "<pad>"}}},
            "id 2 is '<pad>', but tokenizer.json has '</s>' there",
        ),
        (CONFIG, {"chat_template": "<|user|>{{ m }}<|end|>"}, "but generation stops at </s>"),
    ],
)
def test_every_contradiction_is_reported_by_name(source, file, changes, warning):
    edit_json(source / file, **changes)
    assert any(warning in text for text in imported(source).warnings)


def test_all_of_contradicting_end_tokens_end_a_text(source):
    edit_json(source / GENERATION, eos_token_id=END)
    assert set(imported(source).tokens.stop_ids) == {2, END}
    stated = json.loads((source.parent / "out" / GENERATION).read_text())["eos_token_id"]
    assert set(stated) == {2, END}


def test_a_template_that_ends_with_the_stop_token_gives_no_warning(source):
    edit_json(source / CONFIG, chat_template=TEMPLATE + "</s>")
    assert imported(source).warnings == ()


@pytest.mark.parametrize("file", ["config.json", GENERATION])
@pytest.mark.parametrize("token_id", [96, 10**12, [2, 96]])
def test_an_id_beyond_the_vocabulary_is_refused(source, file, token_id):
    edit_json(source / file, eos_token_id=token_id)
    with pytest.raises(ValueError, match=f"{file}.*eos token has id .* the model has 96 ids"):
        imported(source)


@pytest.mark.parametrize("file", ["config.json", GENERATION])
@pytest.mark.parametrize("key", ["pad_token_id", "bos_token_id"])
def test_minus_one_is_no_token_and_is_said(source, file, key):
    """Configs of the first Llama have pad_token_id -1."""
    edit_json(source / file, **{key: -1})
    report = imported(source)
    assert f"{file}: {key} -1 is read as no {key[:3]} token." in report.notes
    assert -1 not in json.loads((source.parent / "out" / GENERATION).read_text()).values() or (
        file == GENERATION
    )


def test_null_is_no_token(source):
    edit_json(source / "config.json", pad_token_id=None)
    report = imported(source)
    assert report.warnings == () and not any("pad" in note for note in report.notes)


@pytest.mark.parametrize("token_id", [-1, "2", 2.0, [True], {}])
def test_an_id_that_is_no_id_is_refused(source, token_id):
    edit_json(source / GENERATION, eos_token_id=token_id)
    with pytest.raises(ValueError, match="a token id is a whole number of at least 0"):
        imported(source)


def test_a_tokenizer_larger_than_the_model_is_refused(source):
    train_bpe(["the ship"], 260, allow_fewer=True).save(source)
    with pytest.raises(ValueError, match=r"does not embed: .* and \d+ more; it embeds 96 ids"):
        imported(source)


def test_an_end_token_that_the_vocabulary_lacks_is_refused(source):
    edit_json(source / CONFIG, eos_token="<stop>")
    with pytest.raises(ValueError, match="tokenizer_config.json, eos_token: token '<stop>'"):
        imported(source)


def test_an_end_token_that_only_ids_name_becomes_the_tokenizers(source):
    edit_json(source / CONFIG, eos_token=None)
    imported(source)
    assert Tokenizer.from_dir(source.parent / "out").eos_token == "</s>"


# ---- no tokenizer


def test_a_model_without_tokenizer_files_is_imported_with_a_note(tmp_path):
    report = imported(copy_golden("llama", tmp_path / "source"))
    assert not report.tokens.has_tokenizer
    assert any("token ids work, text does not" in note for note in report.notes)
    with pytest.raises(FileNotFoundError, match="works on token ids only"):
        depthdial.load(tmp_path / "out")


def test_a_tokenizer_in_another_format_is_carried_and_named(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    (source / "tokenizer.model").write_bytes(b"sentencepiece")
    report = imported(source)
    assert any("only tokenizer.model" in note for note in report.notes)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"sentencepiece"


def test_a_damaged_opening_key_is_refused(source):
    imported(source)
    for value, match in (("<s>", "expected a list"), (["<no>"], "opening_tokens: token '<no>'")):
        edit_json(source.parent / "out" / CONFIG, opening_tokens=value)
        with pytest.raises(ValueError, match=match):
            Tokenizer.from_dir(source.parent / "out")


def test_a_sweep_refuses_a_model_that_opens_with_two_tokens(source):
    imported(source)
    edit_json(source.parent / "out" / CONFIG, opening_tokens=["<s>", "<|user|>"])
    tokenizer = Tokenizer.from_dir(source.parent / "out")
    model = Model(load_model(source.parent / "out"), tokenizer)
    with pytest.raises(ValueError, match="opens documents with 2 tokens"):
        depthdial.sweep(model, [" ".join(WORDS)], loops=[1], context=8)
