"""Rows of a recipe: chains in the letters of a model, and documents as that model expects them."""

import json
import os
import shutil
import signal

import pytest
import torch

from depthdial.data.pointer_chains import PointerChains
from depthdial.data.shards import TokenShards
from depthdial.data.text import prepare
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.model.checkpoint import read_tensors
from depthdial.training.pretrain import resume, train
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import held_out_documents, open_data, start_id, task_rows


class Interrupter:
    """Sends this process Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, record) -> None:
        if record["step"] == self.step and "train/loss" in record:
            os.kill(os.getpid(), signal.SIGINT)

    def notice(self, text: str) -> None:
        return None


def final_tensors(run):
    folder = RunDir.open(run).latest_checkpoint().path
    return read_tensors(folder / "model.safetensors") | read_tensors(
        folder / "optimizer.safetensors"
    )


# Chains


def test_chains_are_written_with_the_tokenizer_of_the_folder(chain_recipe, byte_base):
    data = open_data(chain_recipe())
    assert data.folder is None
    assert data.tokenizer.to_json() == Tokenizer.from_dir(byte_base).to_json()
    text = data.tokenizer.decode(data.train.rows(0, 1).tokens_BT[0].tolist())
    lines = text.splitlines()
    assert len(lines) == 12 and all(line[1] == "=" for line in lines)


def test_validation_rows_are_those_of_no_training_seed_and_of_every_run(chain_recipe):
    one, two = (open_data(chain_recipe(**{"train.seed": seed})) for seed in (0, 5))
    assert torch.equal(one.valid.rows(0, 8).tokens_BT, two.valid.rows(0, 8).tokens_BT)
    assert not torch.equal(one.train.rows(0, 8).tokens_BT, two.train.rows(0, 8).tokens_BT)
    assert not torch.equal(one.train.rows(0, 8).tokens_BT, one.valid.rows(0, 8).tokens_BT)


def test_unseen_rows_are_the_validation_rows(chain_recipe):
    recipe = chain_recipe()
    data = open_data(recipe)
    unseen = task_rows(recipe, split="valid", tokenizer=data.tokenizer)
    assert isinstance(unseen, PointerChains)
    assert torch.equal(unseen.rows(3, 4).targets_BT, data.valid.rows(3, 4).targets_BT)


@pytest.mark.parametrize("context", [41, 43])
def test_a_context_that_is_no_row_of_the_chains_is_refused(chain_recipe, context):
    with pytest.raises(ValueError, match=rf"context={context}, but 2 chains of 3 letters are rows "
                       "of 42 tokens; set it to that"):  # fmt: skip
        open_data(chain_recipe(**{"data.context": context}))


def test_chains_without_a_model_to_start_from_are_refused(chain_recipe):
    with pytest.raises(ValueError, match="written in a model's letters, so it needs train.init"):
        open_data(chain_recipe(**{"train.init": None}))


def test_a_tokenizer_that_cannot_spell_chains_is_refused(chain_recipe, byte_base, tmp_path):
    folder = shutil.copytree(byte_base, tmp_path / "words")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    tokenizer["model"] = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "the": 1},
                          "unk_token": "<|endoftext|>"}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="as single tokens, so pointer chains cannot"):
        open_data(chain_recipe(**{"train.init": str(folder)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_chains": None}, "num_chains goes with task='pointer_chain'"),
        ({"task": "pointer_program"}, "num_chains goes with task='pointer_chain'"),
        ({"num_chains": 9, "context": 40}, "need 27 letters"),
    ],
)
def test_keys_of_chains_go_with_chains(chain_recipe, change, message):
    with pytest.raises(ValueError, match=message):
        open_data(chain_recipe(**{f"data.{key}": value for key, value in change.items()}))


def test_loss_falls_on_chains(chain_recipe, tmp_path):
    changes = {"train.steps": 60, "train.batch_size": 16, "train.val_every": 60, "optim.lr": 2e-2}
    run = train(chain_recipe(**changes), root=tmp_path)
    losses = [r["train/loss"] for r in RunDir.open(run.path).read_metrics() if "train/loss" in r]
    # An untrained model of 257 tokens starts at ln 257 = 5.55; ten digits are 2.30.
    assert losses[0] > 5.0
    assert sum(losses[-10:]) / 10 < 2.4


def test_a_run_on_chains_resumes_bit_for_bit_without_the_folder(chain_recipe, byte_base, tmp_path):
    moved = shutil.copytree(byte_base, tmp_path / "moved")
    changes = {"train.init": str(moved)}
    whole = train(chain_recipe(name="whole", **changes), root=tmp_path)
    part = train(chain_recipe(name="part", **changes), root=tmp_path, observer=Interrupter(3))
    assert (part.status, part.step) == ("interrupted", 3)
    shutil.rmtree(moved)
    assert resume(part.path).status == "finished"
    expected, found = final_tensors(whole.path), final_tensors(part.path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


# Documents


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, byte_base):
    root = tmp_path_factory.mktemp("texts")
    texts = root / "texts"
    texts.mkdir()
    for i in range(9):
        (texts / f"{i}.txt").write_text(f"Text {i}. ", encoding="utf-8")
    prepare([texts], root / "prepared", tokenizer=Tokenizer.from_dir(byte_base), valid_frac=0.4)
    return root / "prepared"


def imported(byte_base, tmp_path, opening):
    """The tokenizer of `byte_base` as an import writes it: with a publisher's opening tokens."""
    folder = shutil.copytree(byte_base, tmp_path / "imported")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"opening_tokens": opening}))
    return Tokenizer.from_dir(folder)


def test_documents_of_a_model_of_ours_open_and_close_with_the_end_of_text(byte_base, prepared):
    tokenizer = Tokenizer.from_dir(byte_base)
    documents = held_out_documents(prepared, tokenizer)
    assert start_id(tokenizer) == tokenizer.eos_id == 0
    assert documents and {int(d.tokens_T[-1]) for d in documents} == {0}


@pytest.mark.parametrize(("opening", "expected"), [([], None), (["a"], "a")])
def test_documents_of_an_imported_model_follow_its_publisher(
    byte_base, prepared, tmp_path, opening, expected
):
    tokenizer = imported(byte_base, tmp_path, opening)
    assert start_id(tokenizer) == (expected and tokenizer.token_id(expected))
    stored = list(TokenShards.open(prepared, "valid").documents())
    documents = held_out_documents(prepared, tokenizer)
    assert [d.tokens_T.tolist() for d in documents] == [d.tokens_T[:-1].tolist() for d in stored]
    assert {d.first_bytes for d in documents} == {1}, "a tokenizer of single bytes"


def test_a_model_that_opens_texts_with_several_tokens_cannot_be_scored(byte_base, tmp_path):
    with pytest.raises(ValueError, match="opens documents with 2 tokens"):
        start_id(imported(byte_base, tmp_path, ["a", "b"]))


def test_documents_of_another_tokenizer_are_refused(prepared):
    with pytest.raises(ValueError, match="prepared with another tokenizer than this model's"):
        held_out_documents(prepared, train_bpe(["abc abc abc"], 258))
