"""The README.md of an export."""

import json

import numpy as np
import pytest
from goldens import GOLDEN
from huggingface_hub import ModelCard
from published import add_tokenizer, copy_golden

from depthdial.convert.convert import convert
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.formats.hf_export import export_hf
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.model_card import CurvePoint, read_curve
from depthdial.model.checkpoint import load_model, save_model

CARD = "README.md"


def exported(name, tmp_path, **config):
    """Text of the card of one golden case, imported and exported again."""
    report = import_checkpoint(GOLDEN / name, tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "x", family=report.family)
    return (tmp_path / "x" / CARD).read_text()


@pytest.fixture
def sweep():
    return DepthSweep(
        loops=(1, 2, 6),
        max_loops=4,
        trained_loops=(1, 2, 4),
        names=("a", "b"),
        tokens_N=np.array([10, 30]),
        bytes_N=np.array([40, 120]),
        nll_KN=np.array([[30.0, 90.0], [20.0, 60.0], [25.0, 75.0]]),
    )


def test_a_card_states_depth_policy_and_limits(tmp_path):
    text = exported("ouro", tmp_path)
    assert "Made for 1 to 4 loops; more are refused in generation" in text
    assert "Training has run k = 1 to 4." in text
    assert "policy `per_loop`, which is exact" in text
    assert "- The released forward with labels" in text
    assert "imported from `ouro` (ouro)" in text


def test_a_card_has_metadata_that_the_hub_reads(tmp_path):
    exported("ouro", tmp_path)
    data = ModelCard.load(tmp_path / "x" / CARD).data
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["depthdial", "looped-transformer", "ouro"]


def test_a_dense_model_is_not_called_looped(tmp_path):
    text = exported("llama", tmp_path)
    assert "Made for one loop" in text and "a language model whose core runs once" in text
    assert "None beyond those of the base model" in text


def test_the_curve_of_a_saved_sweep_is_in_the_card(tmp_path, sweep):
    import_checkpoint(GOLDEN / "ouro", tmp_path / "model")
    sweep.save(tmp_path / "model" / "sweep.json")
    export_checkpoint(tmp_path / "model", tmp_path / "x", family="ouro")
    text = (tmp_path / "x" / CARD).read_text()
    assert "| 1 | 3.0000 | yes |\n| 2 | 2.0000 | yes |\n| 6 | 2.5000 | no |" in text


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ((1, 2, 4), "Training has run k = 1, 2 and 4."),
        ((2,), "Training has run k = 2."),
        ((), "No training has run any of them yet."),
    ],
)
def test_b15_a_card_says_which_loop_counts_training_has_run(tmp_path, trained, words):
    import_checkpoint(GOLDEN / "ouro", tmp_path / "model")
    save_model(load_model(tmp_path / "model"), tmp_path / "model", trained_loops=trained)
    export_checkpoint(tmp_path / "model", tmp_path / "x", family="ouro")
    assert words in (tmp_path / "x" / CARD).read_text()


def test_b15_a_card_of_an_unhealed_conversion_claims_one_loop(tmp_path):
    import_checkpoint(GOLDEN / "llama", tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "model", method="loop-window", core="2:4")
    export_hf(tmp_path / "model", tmp_path / "x")
    text = (tmp_path / "x" / CARD).read_text()
    assert "imported from `llama`" in text and "Made for 1 to 4 loops" in text
    assert "Training has run k = 1." in text


def test_a_card_without_a_sweep_says_so(tmp_path):
    assert "No loss curve was saved with this model." in exported("ouro", tmp_path)


def test_the_curve_is_the_mean_loss_of_the_sweep(tmp_path, sweep):
    sweep.save(tmp_path / "sweep.json")
    points = [CurvePoint(k, sweep.mean_loss(k), sweep.is_trained(k)) for k in sweep.loops]
    assert read_curve(tmp_path) == points


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"tokens_N": []}', '{"tokens_N": [0]}'])
def test_a_damaged_sweep_is_named(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match="sweep.json is no saved sweep"):
        read_curve(tmp_path)


def test_the_python_in_a_card_runs(tmp_path, monkeypatch, capsys):
    source = copy_golden("ouro", tmp_path / "source")
    add_tokenizer(source)
    (source / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"eos_token_id": 2})
    )
    import_checkpoint(source, tmp_path / "m")
    export_checkpoint(tmp_path / "m", tmp_path / "x", family="ouro")
    code = (tmp_path / "x" / CARD).read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "model" / "config.json").is_file()
