"""LAYERS is the one table of layer types: nobody else compares letters, and its facts are true."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from depthdial.config import LETTERS, LayerFacts, ModelConfig
from depthdial.layers.layer_type import PlacedLayer
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.sublayer import LAYERS, placed_layers, register_layer

PACKAGE = Path(__file__).parents[2] / "depthdial"
OWNERS = ("config/letters.py", "model/sublayer.py")
"""The table of facts and the table of types."""


def letters_in(node: ast.AST | None, names: dict[str, ast.AST]) -> set[str]:
    """Layout letters that an expression writes out, also by the name of a constant of its file."""
    if isinstance(node, ast.Name) and node.id in names:
        return letters_in(names[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value} & LETTERS.keys()
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set().union(*(letters_in(item, names) for item in node.elts))
    if isinstance(node, ast.Call):
        return set().union(*(letters_in(argument, names) for argument in node.args))
    return set()


def letter_comparisons(source: str) -> Iterator[tuple[int, str]]:
    """(line, code) wherever a layout letter decides something.

    A comparison, a membership test, a case, the argument of a method such as `startswith`, and a
    table whose keys are letters.
    """
    tree = ast.parse(source)
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Compare):
            found = set().union(*(letters_in(x, names) for x in (node.left, *node.comparators)))
        elif isinstance(node, ast.MatchValue):
            found = letters_in(node.value, names)
        elif isinstance(node, ast.Dict):
            keys = [letters_in(key, names) for key in node.keys]
            found = set().union(*keys) if keys and all(keys) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tests = ("startswith", "endswith", "count", "index", "find", "issubset")
            if node.func.attr in tests:
                found = set().union(*(letters_in(x, names) for x in node.args))
        if found:
            yield node.lineno, ast.unparse(node)


def test_no_other_file_compares_layout_letters():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {code}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in OWNERS
        for line, code in letter_comparisons(path.read_text(encoding="utf-8"))
    ]
    assert not found, "ask LETTERS or LAYERS instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "if letter == 'A': pass",
        "n = sum(x in ('A', 'S') for x in layout)",
        "KEYS = frozenset({'A', 'S'})\nok = letter in KEYS",
        "SLIDING = 'S'\nok = SLIDING in layout",
        "widths = {'A': 1, 'F': 2}",
        "match letter:\n    case 'F': pass",
        "if layout.startswith('A'): pass",
        "n = layout.count('F')",
    ],
)
def test_self_a_comparison_of_letters_is_seen(source):
    assert list(letter_comparisons(source))


@pytest.mark.parametrize(
    "source", ["layout = 'AF'", "theirs = {'mlp': 'F'}", "if name == 'FF': pass", "f('A')"]
)
def test_self_letters_that_decide_nothing_are_allowed(source):
    assert not list(letter_comparisons(source))


# ---- the table


CONFIG = ModelConfig(
    vocab_size=17, d_model=12, layout="AFSF", split=(4, 8, 4), num_heads=4, num_kv_heads=2,
    head_dim=4, d_ff=20, core_d_ff=28, max_context=16, sliding={"window": 5},
)  # fmt: skip
VARIANTS = {
    "plain": CONFIG,
    "biases": CONFIG.replace(attention_bias="qkvo", ff_bias=True, ff="gelu"),
    "head norms": CONFIG.replace(qk_norm="rms"),
    "gates": CONFIG.replace(output_gate=True, value_embeddings=[0, 3]),
    "mixed loops": CONFIG.replace(**{"loop.local_window": 3}),
    "normalised": CONFIG.replace(
        norm="ngpt", ngpt={"alpha_init": 0.1, "scale_std": 0.2}, output_gate=True
    ),
}
BLOCKS = ("prelude", "core", "coda")


def mixers(config: ModelConfig) -> list[tuple[PlacedLayer, nn.Module]]:
    """Every layer of the table beside the mixer that the model has."""
    with torch.device("meta"):
        model = LoopedLM(config)
    placed = placed_layers(config)
    stacks = {name: model.get_submodule(f"{name}_stack") for name in BLOCKS}
    return [
        (layer, sublayer.mixer)
        for name in BLOCKS
        for layer, sublayer in zip(placed[name], stacks[name], strict=True)
    ]


def test_every_letter_of_a_config_has_a_layer_with_the_same_facts():
    assert {letter: layer.facts for letter, layer in LAYERS.items()} == LETTERS


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_table_counts_the_parameters_of_every_mixer(config):
    for layer, mixer in mixers(config):
        assert layer.num_parameters() == sum(p.numel() for p in mixer.parameters())


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_linear_maps_of_the_table_are_those_of_the_mixer(config):
    for layer, mixer in mixers(config):
        found = {
            name: (child.in_features, child.out_features)
            for name, child in mixer.named_children()
            if isinstance(child, nn.Linear) and name != "value_gate"
        }
        assert layer.linear_shapes() == found
        assert layer.layer.spared_maps | layer.layer.output_maps <= found.keys()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_of_a_mixer_has_an_optimizer_group(config):
    for layer, mixer in mixers(config):
        groups = {name: layer.group_of(name, p) for name, p in mixer.named_parameters()}
        assert None not in groups.values()
        matrices = {name for name, group in groups.items() if group == "matrices"}
        assert matrices == {f"{name}.weight" for name in layer.linear_shapes()}


# ---- registration


TOY = replace(LAYERS["F"], facts=LayerFacts("a toy"))


@pytest.fixture
def registered():
    """Registers a layer for one test."""
    letters = []

    def register(letter: str, layer=TOY) -> None:
        register_layer(letter, layer)
        letters.append(letter)

    yield register
    for letter in letters:
        del LAYERS[letter], LETTERS[letter]


def test_a_registered_letter_is_taken_by_configs(registered):
    with pytest.raises(ValueError, match=r"unknown letters \['X'\].*must be registered"):
        CONFIG.replace(layout="AXSF")
    registered("X")
    assert CONFIG.replace(layout="AXSF").core_layout == "AXSFAXSF"


@pytest.mark.parametrize("letter", ["A", "F"])
def test_a_letter_that_is_taken_is_refused(letter):
    with pytest.raises(ValueError, match=f"letter '{letter}' is taken"):
        register_layer(letter, TOY)


@pytest.mark.parametrize("letter", ["", "AB", "1", " ", "ä"])
def test_what_is_no_single_letter_is_refused(letter):
    with pytest.raises(ValueError, match="must be one letter"):
        register_layer(letter, TOY)


def test_a_layer_without_a_unit_form_is_refused_in_a_normalised_model(registered):
    registered("X")
    with pytest.raises(ValueError, match="X .a toy. has no form for norm='ngpt'"):
        VARIANTS["normalised"].replace(layout="AXSF")


def test_options_of_a_layer_need_its_letter_and_the_other_way_round(registered):
    with pytest.raises(ValueError, match="the layout letter S goes with `sliding`"):
        CONFIG.replace(layout="AFAF")
    registered("X", replace(TOY, facts=replace(TOY.facts, options="sliding")))
    assert CONFIG.replace(layout="AXAF").sliding is not None


def test_a_value_embedding_needs_an_attention_layer_that_reads_it():
    with pytest.raises(ValueError, match=r"those of this layout are \[0, 1, 2, 3, 4, 5, 6, 7\]"):
        CONFIG.replace(value_embeddings=[8])
