"""Imported models through the whole command line: convert, train, sweep, generate, report."""

import json
import re

import pytest
import yaml
from published import copy_golden, edit_json
from tokenizers import Tokenizer, decoders, models, processors

from depthdial.model.checkpoint import read_config, read_tensors
from depthdial.training.run_dir import RunDir

TRAINS = True
CHARS = [*"abcdefghijklmnopqrstuvwxyz0123456789=. \n"]
SPECIALS = ("<s>", "</s>", "<|end|>")
TEXT = "the ship sailed past the island and the island saw the ship. "


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("depthdial.eval.depth_sweep.CHAIN_ROWS", 12)


def publish(name, folder):
    """A golden case as its publisher would put it out, with a tokenizer of characters: texts are
    opened by <s>, and generation stops at </s> and <|end|>."""
    copy_golden(name, folder)
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate([*SPECIALS, *CHARS])}, merges=[])
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIALS))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    edit_json(folder / "config.json", bos_token_id=0, eos_token_id=1)
    edit_json(folder / "generation_config.json", bos_token_id=0, eos_token_id=[1, 2])
    return folder


def run_all(cli, *commands):
    """Outcomes of command lines that must all succeed."""
    outcomes = []
    for argv in commands:
        outcome = cli(*argv)
        assert outcome.code == 0, (argv, outcome.err)
        outcomes.append(outcome)
    return outcomes


def loops_of(sweep_output):
    """Loop counts of the tables, with their marks."""
    return re.findall(r"(?m)^ *(\d\*?) +[\d.]", sweep_output)


def section_of(run):
    [section] = json.loads((run / "report.json").read_text())["sections"]
    return section


def test_an_imported_looped_model_learns_chains_and_every_tool_works_on_the_run(cli, tmp_path):
    """The checkpoint loops four times; three loops are not drawn here."""
    model, run = tmp_path / "model", tmp_path / "runs" / "chains"
    recipe = {
        "name": "chains",
        "data": {"task": "pointer_chain", "num_chains": 2, "chain_length": 3, "context": 42},
        "depth": {"sampler": "listed", "listed_loops": [1, 2, 4]},
        "train": {"steps": 2, "batch_size": 4, "val_rows": 2, "precision": "fp32"},
    }
    (tmp_path / "chains.yaml").write_text(yaml.safe_dump(recipe))
    root = ("--root", tmp_path / "runs")
    _, trained, swept, written, _ = run_all(
        cli,
        ("import", publish("ouro", tmp_path / "source"), model),
        ("train", tmp_path / "chains.yaml", "--init", model, *root),
        ("sweep", run, "--no-timing"),
        ("generate", run, "a=b", "--num-loops", "3", "--max-new-tokens", "4"),
        ("report", run),
    )
    assert "finished after 2 of 2 steps" in trained.out
    # The published training ran all four of them.
    marked = ["1", "2", "3", "4", "5*", "6*"]
    assert loops_of(swept.out.partition("Right answers")[0]) == marked * 2
    assert "naming the digit of any chain gives 55.0%" in " ".join(swept.out.split())
    # <s> and three characters.
    assert "k = 3: 4 prompt tokens" in written.err
    section = section_of(run)
    assert section["kind"] == "pointer_chain" and len(section["samples"][0]["outputs"]) == 4
    checkpoint = RunDir.open(run).latest_checkpoint().path
    assert read_config(checkpoint).max_loops == 4
    assert json.loads((checkpoint / "origin.json").read_text())["family"] == "ouro"


def test_an_imported_dense_model_is_converted_healed_and_measured_on_text(cli, tmp_path):
    """The base stays as it is: at one loop only what the conversion stored beside it is new."""
    dense, elastic, run = tmp_path / "dense", tmp_path / "elastic", tmp_path / "runs" / "heal-text"
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(TEXT * 8 + f"day {i}. " * 3)
    changes = ("--data.path", tmp_path / "data", "--data.context", "32", "--train.steps", "2",
               "--train.val_rows", "2", "--train.precision", "fp32")  # fmt: skip
    joint = ("--method", "joint-deltas", "--core", "1:5", "--rank", "2", "--texts", texts)
    prepared = ("--tokenizer", elastic, "--valid-frac", "0.3")
    *_, swept, written, _ = run_all(
        cli,
        ("import", publish("llama", tmp_path / "source"), dense),
        ("convert", dense, elastic, *joint),
        ("prepare", texts, "--out", tmp_path / "data", *prepared),
        ("train", "heal-text", "--init", elastic, "--root", tmp_path / "runs", *changes),
        ("sweep", run, "--no-timing", "--num-loops", "1,2"),
        ("generate", run, "the ship", "--compare", "--max-new-tokens", "4"),
        ("report", run),
    )
    assert f"held-out documents of {tmp_path / 'data'}" in swept.out and "bits/byte" in swept.out
    assert written.out.count("k = ") == 4
    before = read_tensors(elastic / "model.safetensors")
    after = read_tensors(RunDir.open(run).latest_checkpoint().path / "model.safetensors")
    changed = {name.partition(".")[0] for name, t in before.items() if not t.equal(after[name])}
    assert changed and changed <= {"state_update", "loop_lora"}
    section = section_of(run)
    assert section["kind"] == "text" and 1 < section["documents"] < 12
    # <s> predicts the first token, and no end-of-text token is scored.
    stored = json.loads((run / "sweep.json").read_text())
    lengths = {len(path.read_text()) for path in texts.iterdir()}
    assert set(stored["tokens_N"]) <= lengths
