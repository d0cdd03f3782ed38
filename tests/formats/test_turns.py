"""The token that ends a turn of a chat is a stop, whether or not a file names it."""

import json

import pytest
import torch
from published import SPECIALS, TEMPLATE, add_tokenizer, copy_golden, edit_json

import depthdial
from depthdial.data.tokenizer import Tokenizer
from depthdial.formats.hf_export import export_hf
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_model_folder, inspect_source
from depthdial.formats.text import turns
from depthdial.formats.text.turns import TurnEnd, turn_end

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
END, USER, EOS = (SPECIALS.index(token) for token in ("<|end|>", "<|user|>", "</s>"))
NOTE = "ends a turn with '<|end|>', which no"
CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] "
    "+ '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
BY_PARTS = (
    "{%- if tools %}{{- '<|user|>tools' + tools | tojson + '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}{%- set content = m.content | trim %}"
    "{%- if m.role == 'user' %}{{- '<|user|>' + content + '</s>' }}"
    "{%- elif m.role == 'assistant' %}{% generation %}{{- content }}{% endgeneration %}"
    "{{- '<|end|>' }}{%- endif %}{%- endfor %}"
)
OPENERS_ONLY = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|end|>' }}\n{{ m.content }}"
    "{% endfor %}"
)
WITH_TEXT_BETWEEN = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] <|user|>{% endif %}{{ m.content }}"
    "{% endfor %}"
)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}<|end|>"
GROWS = (
    "{% set ns = namespace(x='<|end|><|end|>') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)


@pytest.fixture
def source(tmp_path):
    """A llama checkpoint of which every file names </s> as the only stop."""
    folder = copy_golden("llama", tmp_path / "source")
    add_tokenizer(folder)
    edit_json(folder / CONFIG, chat_template=TEMPLATE)
    edit_json(folder / GENERATION, eos_token_id=EOS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(folder)
    return Tokenizer.from_file(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("template", "token_id"),
    [
        (TEMPLATE, END),
        (TEMPLATE + "</s>", END),
        (CHATML, END),
        (BY_PARTS, END),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", EOS),
        # The next speaker's token is what a model writes behind its words.
        (OPENERS_ONLY, USER),
        (WITH_TEXT_BETWEEN, None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("<|user|> and nothing of the messages", None),
    ],
)
def test_f17_the_token_behind_the_assistants_words_ends_a_turn(tokenizer, template, token_id):
    assert turn_end(template, tokenizer, {"eos_token": "</s>"}) == TurnEnd(token_id)


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, TEMPLATE + "</s>", BY_PARTS])
def test_f17_an_import_adds_it_as_a_stop_and_says_so(source, tmp_path, template):
    """A template that also spelled end-of-text hid that its own token ended nothing."""
    edit_json(source / CONFIG, chat_template=template)
    report = import_checkpoint(source, tmp_path / "model")
    assert report.tokens.stop_ids == (EOS, END) and report.warnings == ()
    assert any(NOTE in note for note in report.notes)
    assert set(Tokenizer.from_dir(tmp_path / "model").stop_ids) == {EOS, END}
    assert json.loads((tmp_path / "model" / GENERATION).read_text())["eos_token_id"] == [EOS, END]


def test_f17_generation_stops_there(source, tmp_path):
    import_checkpoint(source, tmp_path / "model")
    model = depthdial.load(tmp_path / "model")

    def head(x):
        return torch.nn.functional.one_hot(torch.tensor(END), 96).float().expand(*x.shape[:-1], 96)

    model.looped_lm.head = head
    assert model.generate("the ship", max_new_tokens=5)[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"eos_token_id": [EOS, END]}),
        (GENERATION, {"eos_token_id": [EOS, END]}),
        (CONFIG, {"eos_token": "<|end|>"}),
        ("special_tokens_map.json", {"eos_token": {"content": "<|end|>"}}),
    ],
)
def test_f17_a_token_that_any_file_names_is_nothing_to_add(source, tmp_path, file, changes):
    edit_json(source / file, **changes)
    report = import_checkpoint(source, tmp_path / "model")
    assert END in report.tokens.stop_ids and report.tokens.added_stop is None
    assert not any(NOTE in note for note in report.notes)


def test_f17_inspect_says_it_before_and_after_the_import(source, tmp_path):
    import_checkpoint(source, tmp_path / "model")
    for found in (inspect_source(source), inspect_model_folder(tmp_path / "model")):
        assert "<|end|> (4)" in found.text.stops
        assert any(NOTE in note for note in found.notes) and found.warnings == ()


def test_f17_inspect_warns_where_nothing_stops_there(source, tmp_path):
    """A folder that no import made, or whose file lost the token."""
    import_checkpoint(source, tmp_path / "model")
    edit_json(tmp_path / "model" / GENERATION, eos_token_id=EOS)
    [warning] = inspect_model_folder(tmp_path / "model").warnings
    assert "replies run on. Add 4 to eos_token_id" in warning


def test_f17_an_export_gives_the_files_back_and_says_it_in_report_and_card(source, tmp_path):
    import_checkpoint(source, tmp_path / "model")
    report = export_checkpoint(tmp_path / "model", tmp_path / "x", family="llama")
    for name in (GENERATION, CONFIG):
        before, after = (json.loads((f / name).read_text()) for f in (source, tmp_path / "x"))
        assert list(after.items()) == list(before.items())
    [warning] = report.warnings
    assert NOTE in warning and '"eos_token_id": [2, 4]' in warning
    assert warning in (tmp_path / "x" / "README.md").read_text()


def test_f17_an_export_for_transformers_names_the_stop_and_says_so(source, tmp_path):
    import_checkpoint(source, tmp_path / "model")
    [warning] = export_hf(tmp_path / "model", tmp_path / "x").warnings
    assert NOTE in warning and warning in (tmp_path / "x" / "README.md").read_text()
    assert json.loads((tmp_path / "x" / GENERATION).read_text())["eos_token_id"] == [EOS, END]


def test_f17_an_export_of_a_model_whose_files_name_it_says_nothing(source, tmp_path):
    edit_json(source / GENERATION, eos_token_id=[EOS, END])
    import_checkpoint(source, tmp_path / "model")
    assert export_checkpoint(tmp_path / "model", tmp_path / "x", family="llama").warnings == ()
    assert export_hf(tmp_path / "model", tmp_path / "y").warnings == ()


# ---- templates that cannot be run


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no <|end|> here') }}", "TemplateError: no <|end|> here"),
        ("{% if <|end|>", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}<|end|>", "SecurityError"),
        ("{{ open('/etc/hostname').read() }}<|end|>", "UndefinedError: 'open' is undefined"),
        ("<|end|>" + " " * 2**20, "it has 1,048,583 characters, over 1,048,576"),
    ],
)
def test_f17_a_template_that_cannot_be_run_is_a_warning(source, tmp_path, template, problem):
    edit_json(source / CONFIG, chat_template=template)
    report = import_checkpoint(source, tmp_path / "model")
    [warning] = report.warnings
    assert problem in warning and "replies may not end" in warning
    assert report.tokens.stop_ids == (EOS,)


@pytest.mark.parametrize("template", [LOOPS, GROWS])
def test_f31_a_template_without_end_is_stopped(source, tmp_path, template, monkeypatch):
    monkeypatch.setattr(turns, "CPU_SECONDS", 1)
    edit_json(source / CONFIG, chat_template=template)
    [warning] = import_checkpoint(source, tmp_path / "model").warnings
    assert "MemoryError" in warning or "too much time or memory" in warning
