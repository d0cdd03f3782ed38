"""The commands import, export and inspect."""

import importlib.util
import json
import re

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN
from published import add_tokenizer, copy_golden, edit_json, edit_tensors

from depthdial.api.paths import model_folder
from depthdial.cli.main import main
from depthdial.cli.tables import loop_range
from depthdial.formats.inspection import inspect_model_folder, inspect_source
from depthdial.model.checkpoint import load_model, read_config, save_model
from depthdial.model.looped_lm import LoopedLM

HAS_GGUF = importlib.util.find_spec("gguf") is not None


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def source(tmp_path):
    folder = copy_golden("ouro", tmp_path / "source")
    add_tokenizer(folder, adds_bos=True)
    edit_json(folder / "config.json", eos_token_id=2, bos_token_id=1)
    return folder


def words(text):
    return " ".join(text.split())


# ---- import and export


def test_import_says_what_it_did_and_what_to_know(cli, source, tmp_path):
    code, out, err = cli("import", source, tmp_path / "model")
    assert code == 0
    for part in (
        "imported from ouro",
        "tensors 27 read, all accounted for",
        "loops 4 by default, made for 1 to 4",
        "text tokenizer carried over",
        "stop ids 2",
        "chat template none",
        "Notes - The released forward",
    ):
        assert part in words(out), part
    assert f"depthdial inspect {tmp_path / 'model'}" in err
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_import_shows_warnings(cli, source, tmp_path):
    edit_json(source / "generation_config.json", eos_token_id=3)
    _, out, _ = cli("import", source, tmp_path / "model")
    assert "Warnings - the eos token is 2 in config.json and 3 in generation" in words(out)


def test_import_takes_a_family_and_replaces_only_when_told(cli, source, tmp_path):
    out = tmp_path / "model"
    assert cli("import", source, out, "--family", "ouro").code == 0
    code, _, err = cli("import", source, out)
    assert code == 1 and "exists and is not empty" in err
    assert cli("import", source, out, "--overwrite").code == 0
    code, _, err = cli("import", source, out, "--family", "our", "--overwrite")
    assert code == 1 and "Did you mean 'ouro'" in err


def test_import_refuses_a_dtype_without_effect(cli, source, tmp_path):
    code, _, err = cli("import", source, tmp_path / "model", "--dtype", "bf16")
    assert code == 1 and "has no effect" in err


def test_an_imported_model_generates_sweeps_and_is_exported(cli, source, tmp_path):
    model = tmp_path / "model"
    assert cli("import", source, model).code == 0
    code, out, err = cli("generate", model, "the ship", "--num-loops", 3, "--max-new-tokens", 2)
    assert code == 0 and "k = 3: 3 prompt tokens" in err
    (tmp_path / "text.txt").write_text("the ship sailed a day")
    code, out, _ = cli("sweep", model, "--data", tmp_path / "text.txt")
    assert code == 0 and "Loss in nats per token" in out
    code, out, err = cli("export", model, tmp_path / "x", "--as", "ouro")
    assert code == 0
    assert "tensors 27" in words(out) and "format ouro" in words(out) and "README.md" in out
    assert "are those of the imported checkpoint" in err
    ours = safetensors.torch.load_file(tmp_path / "x" / "model.safetensors")
    theirs = safetensors.torch.load_file(source / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_export_needs_a_format_and_knows_which(cli, source, tmp_path):
    cli("import", source, tmp_path / "model")
    assert cli("export", tmp_path / "model", tmp_path / "x").code == 2
    code, _, err = cli("export", tmp_path / "model", tmp_path / "x", "--as", "oura")
    assert code == 1 and "unknown family 'oura'. Did you mean 'ouro'" in err


# ---- inspect


def test_inspect_shows_a_published_checkpoint(cli, source):
    code, out, err = cli("inspect", source)
    assert code == 0
    for part in (
        "published checkpoint",
        "family ouro Ouro (LoopLM)",
        "stored as F32, 123.25 KiB",
        "loops 4 by default, made for 1 to 4, beyond: refused",
        "training ran k = 1..4",
        "core AF x 2 4 2 25.3k 80.3%",
        "total 4 31.6k",
        "policy k = 1 k = 2 k = 3 k = 4 per_loop 256 B 512 B 768 B 1.00 KiB",
        "last_step 256 B 256 B 256 B 256 B",
        "tokenizer 10 tokens",
        "a text opens with <s> (1)",
        "generation stops at </s> (2)",
        "chat template none",
        "- The released forward with labels",
    ):
        assert part in words(out), part
    assert "Open it: depthdial import" in err


def test_b15_import_and_inspect_of_a_fixed_loop_model_say_what_training_ran(cli, tmp_path):
    """Loop counts 1 to the default once counted as trained."""
    _, out, _ = cli("import", GOLDEN / "nanbeige", tmp_path / "model")
    assert "loops 2 by default, made for 1 to 2 training ran k = 2 " in words(out)
    for path in (GOLDEN / "nanbeige", tmp_path / "model"):
        assert "training ran k = 2 " in words(cli("inspect", path).out)


def test_b15_a_run_says_what_its_training_ran(cli, tiny_run, tmp_path):
    trained = read_config(model_folder(tiny_run)).trained_at
    _, out, _ = cli("inspect", tiny_run)
    assert f"training ran {loop_range(trained)} " in words(out)
    assert cli("export", tiny_run, "--as", "hf", tmp_path / "x").code == 0
    assert "Training has run k = " in (tmp_path / "x" / "README.md").read_text()


def test_inspect_fits_80_columns(cli, source):
    _, *lines = cli("inspect", source).out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_inspect_shows_a_folder_that_was_imported(cli, source, tmp_path):
    cli("import", source, tmp_path / "model")
    code, out, _ = cli("inspect", tmp_path / "model")
    assert code == 0
    assert "model folder, imported from source" in words(out) and "family ouro" in words(out)
    assert "generation stops at </s> (2)" in words(out)


def test_stop_ids_stand_in_one_order_before_and_after_the_import(cli, tmp_path):
    """The files of the source and of the model folder list them in orders of their own."""
    folder = copy_golden("ouro", tmp_path / "source")
    add_tokenizer(folder)
    edit_json(folder / "config.json", eos_token_id=6, bos_token_id=1)
    edit_json(folder / "tokenizer_config.json", eos_token="</s>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 6, 5]}')
    _, imported, _ = cli("import", folder, tmp_path / "model")
    assert "stop ids 2, 5, 6, 7" in words(imported)
    stops = [
        re.search(r"generation stops at (.*?) chat template", words(cli("inspect", path).out))[1]
        for path in (folder, tmp_path / "model")
    ]
    assert stops[0] == stops[1] and re.findall(r"\((\d)\)", stops[0]) == ["2", "5", "6", "7"]


def test_inspect_names_the_adapter_of_a_core_as_injection(cli):
    """It once stood under the state update, which has no weights in this model."""
    out = words(cli("inspect", GOLDEN / "huginn").out)
    assert "injection 3.20k 2.5%" in out and "state update" not in out


def test_inspect_shows_a_run_and_its_checkpoint(cli, tiny_run):
    code, out, _ = cli("inspect", tiny_run)
    assert code == 0
    assert "update adaptive_delta, starts from prelude, modulation elr" in words(out)
    assert "a text opens with <|endoftext|> (0)" in words(out)
    assert cli("inspect", tiny_run / "checkpoints" / "step_4").code == 0


def test_inspect_shows_the_asked_loop_counts(cli, source):
    out = words(cli("inspect", source, "--num-loops", 1, 8).out)
    assert "policy k = 1 k = 8 per_loop 256 B 2.00 KiB" in out and "last_step 256 B 256 B" in out


def test_inspect_shows_many_loops_by_powers_of_two(cli):
    out = words(cli("inspect", GOLDEN / "huginn").out)
    assert "policy k = 1 k = 2 k = 4 k = 8 k = 16" in out
    assert "per_loop 1.25 KiB 1.88 KiB 3.12 KiB 5.62 KiB 10.62 KiB" in out


def test_inspect_says_that_a_dense_model_is_one(cli):
    out = words(cli("inspect", GOLDEN / "qwen3").out)
    assert "loops 1: a dense model" in out and "policy k = 1 per_loop" in out
    assert "between loops" not in out


@pytest.mark.skipif(not HAS_GGUF, reason="pip install 'depthdial[gguf]'")
def test_inspect_shows_a_gguf_file(cli, tmp_path):
    from test_gguf import write_gguf

    code, out, _ = cli("inspect", write_gguf(tmp_path / "model.gguf"))
    assert code == 0
    assert "what GGUF file" in words(out) and "stored as F32" in words(out)
    assert "generation stops at <2> (2)" in words(out)


def test_inspect_lists_everything_in_the_way_of_an_import(cli, source):
    edit_json(source / "config.json", use_sliding_window=True, hidden_act="gelu", mystery=1)
    norm = torch.ones(32)
    edit_tensors(source, model__norm__weight=None, model__norms__weight=norm)
    code, out, err = cli("inspect", source)
    assert code == 1
    for part in (
        "It cannot be imported",
        "- the source config has 'hidden_act' = 'gelu'",
        "- the source config has 'use_sliding_window' = True",
        "- the source config has keys without a known meaning",
        "'mystery'",
        "- missing tensor 'model.norm.weight'",
        "- unknown tensor 'model.norms.weight'",
    ):
        assert part in words(out), part
    assert "Open it" not in err


def test_f05_import_prints_every_reason_on_a_line_of_its_own(cli, source, tmp_path):
    edit_json(source / "config.json", hidden_act="gelu", mystery=1)
    code, _, err = cli("import", source, tmp_path / "model")
    first, act, key = err.splitlines()
    assert code == 1 and first == "error: 2 things are in the way:"
    assert act.startswith("- the source config has 'hidden_act'") and "'mystery'" in key


def test_inspect_lists_a_contradicting_tokenizer(cli, source):
    edit_json(source / "config.json", eos_token_id=500)
    code, out, _ = cli("inspect", source)
    assert code == 1 and "the eos token has id 500" in words(out)


def test_inspect_of_an_unknown_family_names_the_known_ones(cli, source):
    edit_json(source / "config.json", model_type="mamba", architectures=["Mamba"])
    code, out, _ = cli("inspect", source)
    assert code == 1 and "model_type='mamba'" in words(out) and "nanbeige" in words(out)


def test_inspect_of_nothing_is_refused(cli, tmp_path):
    code, out, err = cli("inspect", tmp_path / "nowhere")
    assert (code, out) == (1, "") and "there is nothing at" in err
    (tmp_path / "empty").mkdir()
    code, _, err = cli("inspect", tmp_path / "empty")
    assert code == 1 and "has no config.json" in err


def test_inspect_reads_no_weights(source, tmp_path, monkeypatch):
    def no_reading(*arguments):
        raise AssertionError("weights were read")

    save_model(LoopedLM(inspect_source(source).config), tmp_path / "model")
    monkeypatch.setattr("depthdial.formats.tensors.files.TensorFiles.get", no_reading)
    monkeypatch.setattr("safetensors.torch.load_file", no_reading)
    assert inspect_source(source).num_bytes == inspect_model_folder(tmp_path / "model").num_bytes


def test_a_checkpoint_whose_config_is_damaged_is_refused_by_name(cli, source):
    (source / "config.json").write_text(json.dumps([]))
    code, _, err = cli("inspect", source)
    assert code == 1 and "config.json must hold a JSON object" in err


def test_a_folder_exported_for_transformers_is_opened_by_every_command(tmp_path, capsys):
    """Its config names code files besides; they are no property of the model."""
    model, exported = tmp_path / "model", tmp_path / "exported"
    assert main(["import", str(GOLDEN / "llama"), str(model)]) == 0
    assert main(["export", str(model), "--as", "hf", str(exported)]) == 0
    assert "auto_map" in (exported / "config.json").read_text()
    assert (exported / "modeling_depthdial.py").is_file()
    tokens = torch.tensor([[1, 2, 3]])
    first, second = load_model(model), load_model(exported)
    assert torch.equal(first(tokens, num_loops=1), second(tokens, num_loops=1))
    assert main(["inspect", str(exported)]) == 0
