"""Retrofitted models: Huginn's format around the layers of a Llama, read and written.

The tensors are arranged as the public converter does; with an adapter that passes the prelude on,
the model must be the dense one. Outputs of the published code are in `test_golden_retrofit.py`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from goldens import close, open_golden, published
from published import WEIGHTS, copy_golden, edit_json

from depthdial.convert.convert import convert
from depthdial.formats.families.registry import detect, map_config, select_rules
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.model.checkpoint import load_model, read_tensors, save_model
from depthdial.model.looped_lm import LoopedLM

RETROFIT = {
    "block_class_name": "SandwichBlock",
    "qk_bias": False,
    "tie_embeddings": False,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "init_values": {"std": 0.1, "out_proj": 0.01, "embedding": 0.1, "embed_scale": 1.0},
    "n_embd": 32,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 80,
    "n_layers": 6,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 3,
    "n_layers_in_coda": 2,
}


WHOLE = {
    0: "prelude.0",
    1: "core_block.0",
    2: "core_block.1",
    3: "core_block.2",
    4: "coda.0",
    5: "coda.1",
}
"""Layer of the dense case -> its published name, where none is dropped."""


def retrofitted(source, layers=WHOLE):
    """The public converter's tensors for some layers of the dense case, adapter [0 | I], without
    those that the published code never reads."""
    found = {
        "transformer.wte.weight": source["model.embed_tokens.weight"],
        "lm_head.weight": source["model.embed_tokens.weight"],
        "transformer.ln_f.weight": source["model.norm.weight"],
        "transformer.adapter.weight": torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1),
    }
    for layer, target in layers.items():
        theirs, ours = f"model.layers.{layer}", f"transformer.{target}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        found |= {
            f"{ours}.attn.Wqkv.weight": torch.cat(
                [source[f"{attention}.{x}_proj.weight"] for x in "qkv"]
            ),
            f"{ours}.attn.proj.weight": source[f"{attention}.o_proj.weight"],
            f"{ours}.mlp.fc.weight": torch.cat(
                [source[f"{mlp}.{x}_proj.weight"] for x in ("gate", "up")]
            ),
            f"{ours}.mlp.proj.weight": source[f"{mlp}.down_proj.weight"],
            f"{ours}.norm_1.weight": source[f"{theirs}.input_layernorm.weight"],
            f"{ours}.norm_2.weight": source[f"{theirs}.post_attention_layernorm.weight"],
        }
    return found


def test_a_retrofitted_model_with_a_passing_adapter_is_its_dense_model_at_any_depth():
    dense = open_golden("llama")
    values, source = published("huginn", **RETROFIT), retrofitted(dense.source)
    family, config = map_config(values)
    assert family.name == "retrofit"
    tensors = {}
    for rule in select_rules(family.rules(config, values), source):
        tensors |= rule.to_ours(source.__getitem__)
    model = LoopedLM(config)
    model.load_state_dict(tensors)
    for k in (1, 3):
        logits = model(dense.vectors["input_ids"], num_loops=k)
        close(logits, dense.vectors["logits"], 1e-4)


def test_a_retrofitted_model_knows_its_mean_depth_and_its_noise():
    family, config = map_config(published("huginn", **RETROFIT))
    assert (config.num_loops, config.max_loops) == (8, 16)
    assert config.loop.random_state_std == pytest.approx(0.1)
    assert map_config(family.write(config, None))[1] == config


def test_embed_init_starts_the_loop_from_the_prelude():
    family, config = map_config(published("huginn", **RETROFIT, initial_state_mode="embed-init"))
    assert config.loop.initial_state == "prelude"
    assert map_config(family.write(config, None))[1] == config


def test_an_unknown_initial_state_is_refused():
    with pytest.raises(ValueError, match=r"'skip-adapter'.*can do 'random' or 'embed-init'"):
        map_config(published("huginn", **RETROFIT, initial_state_mode="skip-adapter"))


def test_blocks_of_olmo_in_that_format_are_refused_by_their_norms():
    values = published("huginn", **RETROFIT)
    family, config = map_config(values)
    source = [
        *retrofitted(open_golden("llama").source),
        "transformer.coda.0.attn.q_norm.weight",
    ]
    with pytest.raises(ValueError, match="unknown tensor 'transformer.coda.0.attn.q_norm.weight'"):
        select_rules(family.rules(config, values), source)


# ---- export of a conversion

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Conversion(NamedTuple):
    """How the dense case is converted.

    Fields: core, options: of the method; layers: dense layer -> published name; dense: keys of the
        dense config that are changed; lost: fields of ours that the format leaves out, with what
        they are read as.
    """

    core: str
    options: dict[str, Any]
    layers: dict[int, str]
    dense: dict[str, Any]
    lost: dict[str, Any]


LOST = {"max_loops": 2, "trained_loops": None}
"""A mean of one loop is read as one to two, both trained."""
CONVERSIONS = {
    "all layers": Conversion("1:4", {}, WHOLE, {}, LOST),
    "dropped layers": Conversion(
        "2:4",
        {"prelude": 1, "coda": 1},
        {0: "prelude.0", 2: "core_block.0", 3: "core_block.1", 5: "coda.0"},
        {},
        LOST,
    ),
    "a random state": Conversion(
        "1:4", {"initial_state": "random"}, WHOLE, {}, LOST | {"init_std": (2 / (5 * 32)) ** 0.5}
    ),
    "scaled rotation": Conversion("1:4", {}, WHOLE, {"rope_scaling": LLAMA3}, LOST),
}


class Exported(NamedTuple):
    """A conversion, its model folder, and its export as `retrofit`."""

    conversion: Conversion
    folder: Path
    export: Path


def converted(folder, method="retrofitted-recurrence", *, core="1:4", dense=None, **options):
    """The folder of a conversion of the dense case, from an import to the saved model."""
    edit_json(copy_golden("llama", folder / "published") / "config.json", **(dense or {}))
    import_checkpoint(folder / "published", folder / "dense")
    convert(folder / "dense", folder / "model", method=method, core=core, options=options)
    return folder / "model"


@pytest.fixture(scope="module", params=CONVERSIONS)
def exported(request, tmp_path_factory):
    """The state enters the loop, as it does after training: with [0 | I] all loops are one."""
    conversion, root = CONVERSIONS[request.param], tmp_path_factory.mktemp("retrofit")
    with torch.no_grad():
        folder = converted(root, core=conversion.core, dense=conversion.dense, **conversion.options)
        model = load_model(folder)
        model.injection.adapter.weight[:, :32] += 0.1 * torch.eye(32)
        save_model(model, folder)
        export_checkpoint(folder, root / "export", family="retrofit")
    return Exported(conversion, folder, root / "export")


@pytest.fixture
def again(exported, tmp_path):
    """The export, imported."""
    import_checkpoint(exported.export, tmp_path / "again")
    return tmp_path / "again"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_an_export_has_the_tensors_of_the_public_converter_that_are_read(exported):
    tensors = read_tensors(exported.export / WEIGHTS)
    expected = retrofitted(open_golden("llama").source, exported.conversion.layers)
    expected["transformer.adapter.weight"][:, :32] += 0.1 * torch.eye(32)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_an_export_is_recognised_as_retrofit_and_not_as_huginn(exported):
    """They share their model_type."""
    assert detect(config_of(exported.export)).name == "retrofit"
    found = inspect_source(exported.export)
    assert (found.family, found.problems) == ("retrofit", ())


@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_export_opened_again_gives_the_same_logits(exported, again, k):
    tokens = open_golden("llama").vectors["input_ids"]
    before, after = (
        load_model(folder).eval()(tokens, num_loops=k) for folder in (exported.folder, again)
    )
    assert torch.equal(after, before)


def test_loop_counts_of_these_exports_differ(exported):
    """Otherwise their logits would say nothing of the adapter."""
    model, tokens = load_model(exported.folder).eval(), open_golden("llama").vectors["input_ids"]
    one, two, four = (model(tokens, num_loops=k) for k in (1, 2, 4))
    assert (two - one).abs().max() > 0.1 and (four - two).abs().max() > 1e-2


def test_an_export_says_all_of_the_config_but_what_concerns_training(exported, again):
    before = load_model(exported.folder).config.to_dict()
    assert load_model(again).config.to_dict() == before | exported.conversion.lost


@pytest.mark.parametrize("forgets_its_origin", [False, True])
def test_a_second_export_is_the_first(exported, again, tmp_path, forgets_its_origin):
    """From what the import kept of the published config, and from ours alone."""
    if forgets_its_origin:
        (again / "origin.json").unlink()
    export_checkpoint(again, tmp_path / "second", family="retrofit")
    assert config_of(tmp_path / "second") == config_of(exported.export)
    first = (exported.export / WEIGHTS).read_bytes()
    assert (tmp_path / "second" / WEIGHTS).read_bytes() == first


def test_an_export_says_which_loop_counts_it_forgets(exported, tmp_path):
    made, trained = export_checkpoint(exported.folder, tmp_path / "x", family="retrofit").warnings
    assert "made for 1 to 4 loops: opened from this export, it counts as made for 1 to 2" in made
    assert "count as trained, which they are not" in trained


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("retrofitted-recurrence", {"initial_state": "zero"}, "initial_state='zero' would be read"),
        ("retrofitted-recurrence", {"prelude": 0}, "at least one each in prelude, core and coda"),
        ("loop-window", {}, "loop.injection='none' would be read as 'concat'"),
        ("damped", {}, "loop.update='damped' would be read as 'replace'"),
    ],
)
def test_what_the_format_cannot_say_is_refused_by_its_field(tmp_path, method, options, match):
    folder = converted(tmp_path, method, **options)
    with pytest.raises(ValueError, match=match):
        export_checkpoint(folder, tmp_path / "x", family="retrofit")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": "qkvo"}, {"ff_bias": True}, {"qk_norm": "rms"}, {"norm": "post_sum"}],
)
def test_layers_that_are_no_llamas_are_refused_by_their_field(changes):
    """Their tensors have no names there; a config without them would be another model."""
    family, config = map_config(published("huginn", **RETROFIT))
    [field] = changes
    with pytest.raises(ValueError, match=f"cannot be written as 'retrofit': {field}="):
        family.write(config.replace(**changes), None)
