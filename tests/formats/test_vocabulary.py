"""A tokenizer.json that contradicts itself or the model: the file is named, and a way out."""

import json

import pytest
from published import SPECIALS, WORDS, add_tokenizer, copy_golden, edit_json

from depthdial.formats.import_export import import_checkpoint
from depthdial.formats.inspection import inspect_source

NUM_TOKENS = len(SPECIALS) + len(WORDS)
EMBEDDED = 96
"""Rows of the golden case's embedding."""


@pytest.fixture
def source(tmp_path):
    folder = copy_golden("llama", tmp_path / "source")
    add_tokenizer(folder, adds_bos=True)
    return folder


def edit(source, change):
    """Change the tokenizer.json in place."""
    path = source / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refused(source):
    """The message of an import, which names the user's file and is what inspect lists."""
    with pytest.raises(ValueError) as caught:
        import_checkpoint(source, source.parent / "out")
    assert str(source / "tokenizer.json") in str(caught.value)
    assert inspect_source(source).problems == (str(caught.value),)
    assert not (source.parent / "out").exists()
    return str(caught.value)


def template_id(token_id):
    def change(values):
        values["post_processor"]["special_tokens"]["<s>"]["ids"] = [token_id]

    return change


def template_spelling(values):
    values["post_processor"]["special_tokens"]["<s>"]["tokens"] = ["<bos>"]


def in_a_sequence(values):
    template_id(50)(values)
    values["post_processor"] = {"type": "Sequence", "processors": [values["post_processor"]]}


def of_roberta(values):
    values["post_processor"] = {
        "type": "RobertaProcessing",
        "sep": ["</s>", 2],
        "cls": ["<s>", 3],
        "trim_offsets": True,
        "add_prefix_space": True,
    }


def closing_only(values):
    values["post_processor"] = {"type": "BertProcessing", "sep": ["</s>", 77], "cls": ["<s>", 1]}


def undefined(values):
    values["post_processor"]["single"][0]["SpecialToken"]["id"] = "<bos>"


@pytest.mark.parametrize(
    ("change", "problem", "way_out"),
    [
        (template_id(50), "'<s>' with id 50 into every text, but the vocabulary has no", "id 1:"),
        (template_id(9999), "'<s>' with id 9999", "'<s>' has id 1: write that in"),
        (template_id(3), "'<s>' with id 3 into every text, but that id is '<|user|>'", "id 1:"),
        (template_spelling, "'<bos>' with id 1 .* but that id is '<s>'", "no '<bos>': add it"),
        (in_a_sequence, "'<s>' with id 50", "remove the token from 'post_processor'"),
        (of_roberta, "'<s>' with id 3 into every text, but that id is '<|user|>'", "id 1:"),
        (closing_only, "'</s>' with id 77", "'</s>' has id 2"),
        (undefined, "the template uses '<bos>' and does not define it", "Define it in"),
    ],
)
def test_f06_a_template_that_contradicts_the_vocabulary_is_refused(
    source, change, problem, way_out
):
    """The message named a key that no file of the user has; or nothing was said."""
    edit(source, change)
    message = refused(source)
    assert way_out in message and "post_processor" in message
    with pytest.raises(ValueError, match=problem):
        import_checkpoint(source, source.parent / "out")


def test_f06_a_template_under_another_name_is_no_contradiction(source):
    """The name of a template's token is free; its spelling stands beside the id."""

    def change(values):
        values["post_processor"]["special_tokens"] = {
            "B": {"id": "B", "ids": [1], "tokens": ["<s>"]}
        }
        values["post_processor"]["single"][0]["SpecialToken"]["id"] = "B"

    edit(source, change)
    assert import_checkpoint(source, source.parent / "out").tokens.opening_ids == (1,)


def added(content, token_id):
    """What an editor or an older library writes for a token that was added."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def fill(values, count):
    """A vocabulary of `count` tokens, with those that it has."""
    values["model"]["vocab"] |= {f"w{i}": i for i in range(NUM_TOKENS, count)}


def test_f06_an_added_token_without_a_row_in_the_embedding_is_named(source):
    def change(values):
        fill(values, EMBEDDED)
        values["added_tokens"].append(added("[PAD]", EMBEDDED))

    edit(source, change)
    message = refused(source)
    assert "does not embed: '[PAD]' (96); it embeds 96 ids, 0 to 95" in message
    assert "'added_tokens'" in message and "resize_token_embeddings(97)" in message


def test_f06_many_tokens_beyond_the_embedding_are_counted(source):
    edit(source, lambda values: fill(values, EMBEDDED + 9))
    assert "'w100' (100) and 4 more" in refused(source)


def test_f06_an_absurd_id_costs_no_time(source):
    edit(source, lambda values: values["model"]["vocab"].update(far=2**32 - 1))
    assert "'far' (4294967295)" in refused(source)


def test_f06_an_embedding_with_rows_to_spare_is_fine(source):
    edit(source, lambda values: values["added_tokens"].append(added("[PAD]", NUM_TOKENS)))
    assert import_checkpoint(source, source.parent / "out").warnings == ()


@pytest.mark.parametrize(
    ("token", "stated", "used"), [("[PAD]", 96, NUM_TOKENS), ("</s>", 9, 2), ("[PAD]", 7, 10)]
)
def test_f06_an_added_token_that_gets_another_id_than_its_own_is_a_warning(
    source, token, stated, used
):
    """The library that reads the file passes over the stated id without a word."""

    def change(values):
        others = [item for item in values["added_tokens"] if item["content"] != token]
        values["added_tokens"] = [*others, added(token, stated)]

    edit(source, change)
    [warning] = import_checkpoint(source, source.parent / "out").warnings
    assert f"states id {stated} for '{token}'" in warning and f"gives it {used}:" in warning


def test_f06_a_vocabulary_entry_of_that_name_is_no_list(source):
    def change(values):
        values["model"]["vocab"] |= {'"added_tokens": [': 10, "added_tokens": 11}

    edit(source, change)
    assert import_checkpoint(source, source.parent / "out").warnings == ()


def test_f06_a_tokenizer_without_a_token_is_refused(source):
    def change(values):
        values["model"]["vocab"], values["added_tokens"] = {}, []
        values["post_processor"] = None

    edit(source, change)
    assert "has no token at all" in refused(source)


def test_f06_an_id_in_another_file_names_that_file_and_a_way_out(source):
    edit_json(source / "generation_config.json", eos_token_id=500)
    with pytest.raises(ValueError, match=r"generation_config.json: .* id 500.* Correct the id"):
        import_checkpoint(source, source.parent / "out")
