"""The list of published families: each golden case both ways, and no family outside the maps."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from goldens import open_golden, published
from published import add_tokenizer, copy_golden, edit_json

import depthdial
from depthdial.config import ModelConfig
from depthdial.formats.families.registry import (
    FAMILIES,
    detect,
    family_named,
    map_config,
    rules_to_export,
    select_rules,
)
from depthdial.formats.import_export import import_checkpoint
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.stopping_rules import stopping_rule

CASES = {
    "dory": "dory",
    "huginn": "huginn",
    "iquest-loop": "iquest-loop",
    "llama": "llama",
    "loopformer": "loopformer",
    "loopus": "loopus",
    "nanbeige": "nanbeige",
    "ouro": "ouro",
    "parcae": "parcae",
    "qwen3": "qwen3",
    "retrofit": "retrofit",
    "rrt-lora": "llama",
}
"""Golden case -> family."""


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request):
    return request.param, open_golden(request.param)


# ---- every golden case: configs and tensors both ways


def test_the_family_is_recognised(case):
    name, opened = case
    assert opened.family.name == CASES[name]
    assert family_named(CASES[name]) is opened.family


def test_our_tensors_are_exactly_those_of_the_model(case):
    _, opened = case
    model = LoopedLM(opened.config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in opened.tensors.items()} == expected


def test_export_gives_back_the_same_bytes_and_names(case):
    _, opened = case
    found = {}
    rules = opened.family.rules(opened.config, opened.values)
    for rule in rules_to_export(rules, opened.source):
        found |= rule.to_source(opened.tensors.__getitem__)
    assert found.keys() == opened.source.keys()
    for name, tensor in opened.source.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_export_gives_back_the_same_config_keys(case):
    _, opened = case
    assert opened.family.write(opened.config, opened.values) == opened.values


def test_a_config_without_an_origin_means_the_same_model(case):
    _, opened = case
    family, config = map_config(opened.family.write(opened.config, None))
    assert family is opened.family
    assert config == opened.config.replace(init_std=config.init_std)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"llama", "qwen3", "rrt-lora"}))
def test_another_default_depth_is_written_and_special_tokens_are_kept(name):
    opened = open_golden(name)
    changed = opened.config.replace(num_loops=1)
    if opened.values.get("bos_token_id") is None:
        opened = opened._replace(values=opened.values | {"bos_token_id": 7})
    values = opened.family.write(changed, opened.values)
    assert values["bos_token_id"] == opened.values["bos_token_id"]
    assert map_config(values)[1].num_loops == 1


def test_notes_and_summary_are_sentences(case):
    _, opened = case
    for text in [opened.family.summary, *opened.family.notes(opened.config, opened.values)]:
        assert text[0].isupper() and text.endswith(".")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ouro", {"early_exit_threshold": 0.5}, "--exit-rule q_exit --exit-threshold 0.5."),
        ("loopus", {}, "--exit-rule threshold --exit-threshold 0.6."),
        ("loopus", {"halting_strategy": "cdf"}, "--exit-rule cdf --exit-threshold 0.6."),
        (
            "loopus",
            {"halting_strategy": "convergence"},
            "--exit-rule convergence --exit-threshold 0.01.",
        ),
        ("loopus", {"halting_strategy": "plateau"}, "'plateau', which has no equal here."),
    ],
)
def test_published_stopping_is_told_with_the_flags_that_do_the_same(tmp_path, name, changes, words):
    """The settings were once dropped without a word."""
    source = copy_golden(name, tmp_path / "source")
    edit_json(source / "config.json", **changes)
    report = import_checkpoint(source, tmp_path / "model")
    assert any(note.endswith(words) for note in report.notes)
    if "--" in words:
        _, rule, _, threshold = words.removesuffix(".").split()
        assert stopping_rule(rule, float(threshold)).threshold == float(threshold)


def test_a_model_that_is_published_to_run_all_loops_has_no_such_note():
    for threshold in (1.0, None):
        changed = published("ouro", early_exit_threshold=threshold)
        assert family_named("ouro").choices(changed) == []


def test_an_unknown_tensor_is_named_with_the_nearest_known_one(case):
    _, opened = case
    rules = opened.family.rules(opened.config, opened.values)
    known = next(name for name in opened.source if name.endswith("weight"))
    with pytest.raises(ValueError, match=re.escape(f"unknown tensor '{known}s'. Did you mean")):
        select_rules(rules, [*opened.source, f"{known}s"])


def test_a_missing_tensor_is_named(case):
    name, opened = case
    rules = opened.family.rules(opened.config, opened.values)
    # Tables are no part of the model, and of a tied pair one is enough.
    needed = {n for rule in rules if rule.our_names for n in rule.source_names}
    tied = ("lm_head.weight", "transformer.wte.weight")
    lost = max(n for n in opened.source if n in needed and n not in tied)
    with pytest.raises(ValueError, match=re.escape(f"missing tensor '{lost}'")):
        select_rules(rules, [n for n in opened.source if n != lost])


def test_an_unknown_key_is_named_with_the_nearest_known_one(case):
    name, opened = case
    with pytest.raises(ValueError, match=r"'vocab_sizes'\. Did you mean 'vocab_size'"):
        map_config(opened.values | {"vocab_sizes": 5})


def test_all_eleven_families_are_listed():
    names = [family.name for family in FAMILIES]
    assert (
        names
        == (
            "llama qwen3 ouro huginn dory nanbeige iquest-loop parcae loopformer loopus retrofit"
        ).split()
    )


def test_an_unknown_family_says_what_it_found_and_what_is_known():
    with pytest.raises(ValueError, match=r"model_type='gpt_neox' and architectures=\['X'\].*ouro"):
        detect({"model_type": "gpt_neox", "architectures": ["X"]})
    with pytest.raises(ValueError, match="Did you mean 'nanbeige'"):
        family_named("nanbiege")


# ---- the seam: no family outside the maps


FAMILY_WORDS = re.compile(
    r"\b(llama\d*|qwen\d*|olmo\d*|smollm\d*|ouro|looplm|huginn|raven|dory|nanbeige|iquest\w*|"
    r"parcae|loopformer|loopus|lds)\b",
    re.IGNORECASE,
)
MAY_NAME_FAMILIES = ("formats/", "model/presets.py")
POLICY_PREFIXES = ("huginn", "parcae")
POLICY = re.compile(rf"\b({'|'.join(POLICY_PREFIXES)}):[\w-]+")
"""Published cache policies, whose names carry the family they came with."""
POLICY_FILES = ("config/policies.py",)
"""Where such a name is taken apart."""
ROPE_KIND = "llama3"
"""Name of a rotary scaling, in configs of many families."""


def words_in_code(path):
    """Names and strings of a file, also of parameters, keywords and imported modules.

    Docstrings and comments cite sources and are left out.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield from (node.name, node.asname or "")
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def families_in(words):
    """Families named in a name or a string, also as a part in snake or camel case."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", words)
    return FAMILY_WORDS.findall(f"{words} {parts}".replace("_", " "))


def test_no_family_is_named_outside_the_maps():
    root, found = Path(depthdial.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(MAY_NAME_FAMILIES):
            continue
        for words in words_in_code(path):
            for word in families_in(POLICY.sub("", words)):
                is_policy = name in POLICY_FILES and word in POLICY_PREFIXES
                if word != ROPE_KIND and not is_policy:
                    found.append(f"{name}: {word} in {words!r}")
    assert found == []


@pytest.mark.parametrize(
    ("code", "family"),
    [
        ("is_ouro_model = 1", "ouro"),
        ("kind == 'x Dory'", "Dory"),
        ("class LlamaBlock: pass", "Llama"),
        ("async def raven(): pass", "raven"),
        ("def f(*, parcae_rule=None): pass", "parcae"),
        ("lambda huginn: 1", "huginn"),
        ("f(loopus=1)", "loopus"),
        ("import a.qwen3", "qwen3"),
        ("import numpy as dory", "dory"),
        ("from a.nanbeige.b import c", "nanbeige"),
        ("from a import loopformer", "loopformer"),
    ],
)
def test_self_a_family_in_a_name_or_a_string_is_found(tmp_path, code, family):
    path = tmp_path / "a.py"
    path.write_text(f'"""Ouro, arXiv 2510.25741."""\n# Ouro\n{code}\n')
    found = [word for words in words_in_code(path) for word in families_in(words)]
    assert set(found) == {family}


IMPORT_ALL = """
import sys
from depthdial.cli.main import main
from depthdial.formats.import_export import import_checkpoint
from depthdial.data.tokenizer import Tokenizer

root, *names = sys.argv[1:]
for name in names:
    import_checkpoint(f"{root}/{name}", f"{root}/{name}-ours")
    assert Tokenizer.from_dir(f"{root}/{name}-ours").encode("the ship")
assert main(["import", f"{root}/{names[0]}", f"{root}/by-command"]) == 0
print([name for name in sys.modules if name.startswith("transformers")], file=sys.stderr)
"""


def test_importing_loads_no_model_class_of_transformers(tmp_path):
    """Every golden case with a tokenizer, by the function and by the command, in one process."""
    for name in CASES:
        add_tokenizer(copy_golden(name, tmp_path / name))
    argv = [sys.executable, "-c", IMPORT_ALL, str(tmp_path), *CASES]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_every_config_of_ours_is_plain_data():
    """The mapped config can be written and read again, so a model directory can hold it."""
    for name in CASES:
        config = map_config(published(name))[1]
        assert ModelConfig.from_dict(json.loads(config.to_json())) == config
