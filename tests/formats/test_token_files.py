"""Files for text: which ones travel, and which chat template holds."""

import json

import pytest
from published import TEMPLATE, add_tokenizer, copy_golden, edit_json, hashes

from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.formats.text.files import chat_templates, find_template
from depthdial.model.folder import Origin

CONFIG, JINJA = "tokenizer_config.json", "chat_template.jinja"


@pytest.fixture
def source(tmp_path):
    """A llama checkpoint with a tokenizer."""
    folder = copy_golden("llama", tmp_path / "source")
    add_tokenizer(folder)
    return folder


def imported(source):
    return import_checkpoint(source, source.parent / "out")


@pytest.mark.parametrize(
    "name",
    [
        "spiece.model",
        "sentencepiece.bpe.model",
        "tokenizer.tiktoken",
        "qwen.tiktoken",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/rag.jinja",
    ],
)
def test_b41_every_file_for_text_travels_in_and_out(source, name):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text(TEMPLATE)
    imported(source)
    export_checkpoint(source.parent / "out", source.parent / "x", family="llama")
    for folder in ("out", "x"):
        assert (source.parent / folder / name).read_text() == TEMPLATE
    assert Origin.load(source.parent / "out").sha256[name] == hashes(source)[name]


def test_a_file_that_is_no_template_stays_behind(source):
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "run.py").write_text("print()")
    imported(source)
    assert not (source.parent / "out" / "additional_chat_templates").exists()


def test_a_tokenizer_in_a_format_that_is_not_read_is_named(tmp_path):
    source = copy_golden("llama", tmp_path / "source")
    (source / "tokenizer.tiktoken").write_text("x")
    assert any("only tokenizer.tiktoken" in note for note in imported(source).notes)


# ---- chat templates


def test_two_different_templates_are_a_warning_and_the_file_of_its_own_holds(source):
    (source / JINJA).write_text(TEMPLATE + "</s>")
    edit_json(source / CONFIG, chat_template=TEMPLATE + "</s></s>")
    report = imported(source)
    assert any(
        "chat_template.jinja and tokenizer_config.json hold different chat templates; that of "
        "chat_template.jinja is used" in warning
        for warning in report.warnings
    )
    assert report.tokens.template_in == JINJA


def test_two_equal_templates_are_no_warning(source):
    (source / JINJA).write_text(TEMPLATE + "</s>\n")
    edit_json(source / CONFIG, chat_template=TEMPLATE + "</s>")
    assert imported(source).warnings == ()


def test_the_default_of_several_templates_is_compared(source):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}]
    edit_json(source / CONFIG, chat_template=named)
    (source / JINJA).write_text(TEMPLATE)
    assert [text for _, text in chat_templates(source)] == [TEMPLATE, TEMPLATE]


@pytest.mark.parametrize(
    "value",
    [["x"], [{"name": "default"}], [{"template": 3, "name": "a"}], {"default": "x"}, 3, [[]]],
)
def test_a_template_that_is_no_text_is_refused_by_name(source, value):
    edit_json(source / CONFIG, chat_template=value)
    with pytest.raises(ValueError, match=r"tokenizer_config.json has chat_template=.* a text, or"):
        imported(source)
    assert "chat_template" in inspect_source(source).problems[0]


@pytest.mark.parametrize("value", [None, []])
def test_no_template_is_none(source, value):
    edit_json(source / CONFIG, chat_template=value)
    assert find_template(source) is None


# ---- ids


@pytest.mark.parametrize("stated", ["9" * 30, str(2**32), str(2**64), "-1", "\N{SUPERSCRIPT TWO}"])
def test_an_added_token_of_absurd_id_is_a_contradiction(source, stated):
    edit_json(source / CONFIG, added_tokens_decoder={stated: {"content": "</s>"}})
    assert any(f"id {stated} is '</s>'" in warning for warning in imported(source).warnings)


@pytest.mark.parametrize("stated", [10**30, 2**32, -1, None, {"a": 1}])
def test_an_added_token_of_absurd_number_is_a_contradiction(source, stated):
    (source / "added_tokens.json").write_text(json.dumps({"</s>": stated}))
    assert any("added_tokens.json: id" in warning for warning in imported(source).warnings)
