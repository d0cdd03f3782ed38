"""Which loop counts training has run: what importers say, what conversions and healing keep."""

import json
import re

import pytest
import torch
from goldens import GOLDEN, open_golden
from published import copy_golden, edit_json

from depthdial.config import ModelConfig
from depthdial.convert.base_model import CoreRange
from depthdial.convert.convert import convert_model
from depthdial.convert.methods import read_options
from depthdial.data.tokenizer import train_bpe
from depthdial.formats.families.registry import map_config
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.model.checkpoint import load_model, read_config, save_model
from depthdial.model.looped_lm import LoopedLM

TEXT = "The ship sailed past the island, and the island saw the ship no more. "


def golden_values(name, **changes):
    file = GOLDEN / name / "config.json"
    return json.loads(file.read_text()) | changes


# ---- config


@pytest.mark.parametrize("loops", [[2, 1], [1, 1], [5], [1, 5]])
def test_trained_loops_ascend_up_to_max_loops(loops):
    config = open_golden("ouro").config
    with pytest.raises(ValueError, match=r"trained_loops=.* from 1 to max_loops=4, ascending"):
        config.replace(trained_loops=loops)


def test_null_stands_for_every_loop_count():
    config = open_golden("ouro").config
    assert config.trained_loops is None and config.trained_at == (1, 2, 3, 4)
    assert config.with_trained([4, 2, 4, 9]).trained_loops == (2, 4)
    assert config.with_trained([3, 2, 1, 4]).trained_loops is None
    assert config.with_trained([]).trained_at == ()


# ---- importers


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, (1,)),
        ("ouro", {}, (1, 2, 3, 4)),
        ("dory", {}, (1, 2, 3, 4)),
        ("loopformer", {}, tuple(range(1, 9))),
        ("parcae", {}, tuple(range(1, 17))),
        ("huginn", {}, tuple(range(2, 17))),
        ("huginn", {"mean_recurrence": 32}, tuple(range(8, 65))),
        ("loopus", {}, (2, 3, 4, 5, 6)),
        ("nanbeige", {}, (2,)),
        ("nanbeige", {"num_loops": 1}, (1,)),
        ("nanbeige", {"loop_loss_weights": [0.5, 0.5]}, (1, 2, 3)),
        ("nanbeige", {"loop_loss_weights": [0.5, 0.0]}, (3,)),
        ("nanbeige", {"enable_double_loop_split": True, "loop_middle_layers": 2}, (3,)),
        ("iquest-loop", {}, (2,)),
        ("retrofit", {}, tuple(range(1, 65))),
    ],
)
def test_b15_importers_say_which_loop_counts_were_trained(name, changes, expected):
    """Every count from 1 to the default once counted as trained."""
    _, config = map_config(golden_values(name, **changes))
    assert config.trained_at == expected


@pytest.mark.parametrize("name", ["nanbeige", "iquest-loop", "loopus", "huginn"])
def test_trained_loops_are_ours_and_change_no_export(name, tmp_path):
    import_checkpoint(GOLDEN / name, tmp_path / "model")
    model = load_model(tmp_path / "model")
    save_model(model, tmp_path / "model", trained_loops=model.config.trained_at[1:])
    family = map_config(golden_values(name))[0].name
    report = export_checkpoint(tmp_path / "model", tmp_path / "x", family=family)
    assert report.as_it_came
    written = json.loads((tmp_path / "x" / "config.json").read_text())
    assert list(written.items()) == list(golden_values(name).items())


# ---- conversions


def converted(base, method, *, core_range=(1, 5), **options):
    tokens_BT = torch.randint(0, base.config.vocab_size, (2, 9))
    core_range = None if core_range is None else CoreRange(*core_range)
    chosen = read_options(method, options)
    return convert_model(
        base, tokens_BT, method=method, core_range=core_range, options=chosen
    ).model.config


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("later-deltas", {}, (1,)),
        ("joint-deltas", {}, (1,)),
        ("loop-window", {}, (1,)),
        ("damped", {}, (1,)),
        ("anchored", {}, (1,)),
        ("elr-graft", {"d_cond": 8, "rank": 4}, (1,)),
        ("elr-graft", {"d_cond": 8, "rank": 4, "start": "plain"}, ()),
        ("decay-gate", {}, ()),
        ("decay-gate-ungated-first", {}, (1,)),
        ("retrofitted-recurrence", {}, (1,)),
        ("retrofitted-recurrence", {"prelude": 0}, ()),
        ("tie-layers", {}, ()),
        ("relaxed-recursive", {"rank": 2}, ()),
        ("relaxed-recursive", {"rank": "full"}, (2,)),
    ],
)
def test_b15_a_conversion_keeps_what_stays_true_of_the_training(method, options, expected):
    """1 to max_loops once counted as trained after every conversion."""
    base = open_golden("llama").model()
    assert converted(base, method, **options).trained_at == expected


def test_b15_nothing_is_trained_after_the_conversion_of_an_untrained_base():
    config = open_golden("llama").config.with_trained([])
    assert converted(LoopedLM(config).eval(), "later-deltas").trained_at == ()


@pytest.mark.parametrize("name", ["nanbeige", "ouro"])
def test_b15_elastic_fixed_is_trained_where_its_base_was(name):
    base = open_golden(name).model()
    config = converted(
        base, "elastic-fixed", core_range=None, max_loops=6, d_cond=8, rank=4
    )  # fmt: skip
    assert config.trained_loops == base.config.trained_at


def test_b15_a_merged_first_pass_is_trained_where_one_loop_was(tmp_path):
    config = converted(open_golden("llama").model(), "joint-deltas", rank=2)
    for trained, expected in (((1, 2), (1,)), ((2, 4), ())):
        base = LoopedLM(config.with_trained(trained)).eval()
        assert converted(base, "merge-first-pass", core_range=None).trained_at == expected


# ---- conversion, sweep, healing and sweep on the command line


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    config = open_golden("llama").config.replace(vocab_size=257, max_context=64)
    save_model(LoopedLM(config), folder / "base")
    train_bpe([TEXT], 257).save(folder / "base")
    (folder / "texts").mkdir()
    for i in range(3):
        (folder / "texts" / f"{i}.txt").write_text(TEXT * 6)
    return folder


def marks(out):
    return re.findall(r"(?m)^ *(\d\*?) +[\d.]", out.partition("Cost per token")[0])


def test_b15_the_command_line_knows_what_was_trained_before_and_after_healing(cli, dense, tmp_path):
    """A conversion that nobody trained was swept without a mark up to max_loops."""
    model, texts = tmp_path / "model", dense / "texts"
    argv = ("--method", "later-deltas", "--core", "1:5", "--rank", "2")
    code, out, err = cli("convert", dense / "base", model, *argv)
    assert code == 0, err
    assert "training ran k = 1 " in " ".join(out.split())
    swept = ("sweep", "--data", texts, "--no-timing", "--context", "32")
    out = cli(*swept, model).out
    assert marks(out) == ["1", "2*", "3*", "4*", "5*", "6*"]
    assert "* outside training, which ran k = 1\n" in out
    _, _, err = cli("generate", model, "The ship", "--num-loops", "3", "--max-new-tokens", "2")
    assert "k = 3, outside training, which ran k = 1: " in err
    _, _, err = cli("generate", model, "The ship", "--num-loops", "9")
    assert "made for 1 to 4 loops (training ran k = 1)" in err

    assert cli("prepare", texts, "--out", tmp_path / "data", "--tokenizer", model).code == 0
    recipe = tmp_path / "heal.yaml"
    recipe.write_text(
        "name: heal\n"
        "depth: {sampler: listed, listed_loops: [2, 4]}\n"
        f"data: {{path: {tmp_path / 'data'}, context: 16}}\n"
        "optim: {lr: 0.01}\n"
        "train: {steps: 2, batch_size: 2, val_every: 2, val_rows: 2, precision: fp32}\n"
    )
    with torch.enable_grad():
        code, _, err = cli("train", recipe, "--init", model, "--root", tmp_path)
    assert code == 0, err
    run = tmp_path / "heal"
    assert read_config(run / "checkpoints" / "step_0").trained_loops == (1,)
    assert read_config(run / "checkpoints" / "step_2").trained_loops == (1, 2, 4)
    assert marks(cli(*swept, run).out) == ["1", "2", "3*", "4", "5*", "6*"]
    _, _, err = cli("generate", run, "The ship", "--num-loops", "4", "--max-new-tokens", "2")
    assert "k = 4: " in err


def test_a_recipe_does_not_say_what_was_trained(dense, cli, tmp_path):
    path = tmp_path / "r.yaml"
    config = ModelConfig.from_file(dense / "base" / "config.json").replace(trained_loops=[])
    recipe = {
        "name": "r",
        "model": config.to_dict(),
        "data": {"task": "pointer_program", "context": 8},
    }
    path.write_text(json.dumps(recipe | {"train": {"steps": 1, "batch_size": 8}}))
    code, _, err = cli("plan", path)
    assert code == 1 and "model.trained_loops=() is written by training" in err


def test_a_copied_golden_with_other_loops_is_trained_at_those(tmp_path):
    source = copy_golden("iquest-loop", tmp_path / "source")
    edit_json(source / "config.json", loop_num=3)
    report = import_checkpoint(source, tmp_path / "model")
    assert read_config(tmp_path / "model").trained_loops == report.config.trained_loops == (3,)
