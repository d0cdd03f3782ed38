"""Runs that start from a model directory: agreement, data, what travels, and bit-exact resume."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

import depthdial
from depthdial.api.model import load
from depthdial.api.recipes import load_recipe
from depthdial.config import (
    DepthConfig,
    LoopConfig,
    LoopLoraConfig,
    ModelConfig,
    ModulationConfig,
    OptimConfig,
    Recipe,
    TimeModulationConfig,
)
from depthdial.data.text import prepare
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.model.checkpoint import load_model, read_config, read_tensors, save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.init_model import folder_facts, load_init
from depthdial.training.pretrain import resume, train
from depthdial.training.run_dir import RunDir
from depthdial.training.sources import open_data, prepared_folder, start_id

TEXTS = [f"The loop runs {i} times, and {i} more. " * 30 for i in range(8)]
MEASURED_ON_THE_BASE = ("README.md", "sweep.json", "equality.json", "window.json", "report.json")
ELR = ModulationConfig(d_cond=8, rank=2, embed_dim=8)
SETTINGS = {
    "name": "healed",
    "depth": {"sampler": "override", "num_depth_slices": 4, "override_frac": 0.25},
    "optim": {"lr": 1e-2, "optimizer": "adamw"},
    "train": {
        "steps": 6, "batch_size": 8, "val_every": 3, "val_rows": 8, "checkpoint_every": 2,
        "precision": "fp32",
    },
}  # fmt: skip


class Recorder:
    """Collects notices, and may send this process a signal after a step."""

    def __init__(self, *, signal_at: int | None = None, number: int = signal.SIGINT) -> None:
        self.notices: list[str] = []
        self.signal_at, self.number = signal_at, number

    def record(self, record) -> None:
        if record["step"] == self.signal_at and "train/loss" in record:
            os.kill(os.getpid(), self.number)

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 280, allow_fewer=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> Path:
    """A model directory with more rows than tokens, and files that an import leaves beside it."""
    folder = tmp_path_factory.mktemp("models") / "base"
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 7, d_model=16, split=(2, 2, 2), num_heads=2,
        num_kv_heads=2, head_dim=8, d_ff=16, max_context=32, num_loops=1, max_loops=3,
        tie_embeddings=True, loop=LoopConfig(gate_bypass="first_only"),
        loop_lora=LoopLoraConfig(rank=2, sets_by_loop=(-1, 0)), trained_loops=(1,),
    )  # fmt: skip
    save_model(LoopedLM(config, seed=3).to(torch.bfloat16), folder)
    tokenizer.save(folder)
    (folder / "origin.json").write_text('{"family": "somewhere"}\n', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "LICENSE").write_text("use it well", encoding="utf-8")
    for name in MEASURED_ON_THE_BASE:
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory, base) -> Path:
    """Text prepared with the tokenizer of `base`."""
    source, prepared = (tmp_path_factory.mktemp(name) for name in ("texts", "prepared"))
    for i, text in enumerate(TEXTS):
        (source / f"{i}.txt").write_text(text, encoding="utf-8")
    prepare([source], prepared, tokenizer=Tokenizer.from_dir(base), valid_frac=0.3)
    return prepared


@pytest.fixture
def recipe(base, texts):
    """A recipe without a model section, with some keys changed."""

    def make(**changes) -> Recipe:
        values = json.loads(json.dumps(SETTINGS)) | {"data": {"path": str(texts), "context": 16}}
        values["train"]["init"] = str(base)
        return Recipe.from_dict(values).replace(**changes)

    return make


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_tensors(RunDir.open(run).latest_checkpoint().path / "model.safetensors")


def final_state(run: Path) -> dict[str, torch.Tensor]:
    folder = RunDir.open(run).latest_checkpoint().path
    return read_tensors(folder / "model.safetensors") | read_tensors(
        folder / "optimizer.safetensors"
    )


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(t, second[name]) for name, t in first.items())


def test_the_recipe_takes_the_model_of_the_folder(recipe, base):
    assert recipe().model == read_config(base).replace(trained_loops=None)
    assert Recipe.from_dict(recipe().to_dict()) == recipe()


def test_naming_init_replaces_the_model_and_the_tokenizer_of_a_recipe(base):
    shipped = load_recipe("tiny-text")
    started = shipped.replace(**{"train.init": str(base), "model.max_loops": 4, "data.context": 32})
    assert started.model == read_config(base).replace(max_loops=4, trained_loops=None)
    assert (started.data.corpus, started.data.tokenizer_vocab) == (shipped.data.corpus, None)


def test_the_first_checkpoint_holds_the_weights_of_the_folder_in_float32(recipe, base, tmp_path):
    path = train(recipe(**{"train.steps": 1, "train.keep_checkpoints": 2}), root=tmp_path).path
    first = read_tensors(path / "checkpoints" / "step_0" / "model.safetensors")
    for name, tensor in read_tensors(base / "model.safetensors").items():
        assert first[name].dtype == torch.float32
        assert torch.equal(first[name], tensor.float()), name


def test_a_checkpoint_is_a_complete_model_directory(recipe, base, tmp_path):
    """Tokenizer, template, origin and licence byte for byte; a card of other weights is not."""
    run = train(recipe(), root=tmp_path).path
    folder = RunDir.open(run).latest_checkpoint().path
    for name in ("tokenizer.json", "tokenizer_config.json", "origin.json", "chat_template.jinja",
                 "LICENSE"):  # fmt: skip
        assert (folder / name).read_bytes() == (base / name).read_bytes(), name
    assert not (folder / "README.md").exists()
    [completion] = depthdial.load(run).generate("The loop", num_loops=3, max_new_tokens=2)
    assert completion.completion_tokens <= 2
    again = train(recipe(**{"name": "again", "train.init": str(folder)}), root=tmp_path).path
    assert (RunDir.open(again).latest_checkpoint().path / "origin.json").is_file()


def test_provenance_holds_the_hash_of_the_folder_and_no_path(recipe, base, tmp_path):
    run = RunDir.open(train(recipe(), root=tmp_path).path)
    facts = run.read_provenance()["init"]
    assert facts == folder_facts(base)
    assert facts["name"] == "base" and len(facts["sha256"]) == 64
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= facts["files"].keys()
    assert str(base) not in run.provenance_path.read_text()


HEALING = {
    "depth": DepthConfig(
        sampler="poisson_truncated", mean_loops=2, num_depth_slices=4, backprop_loops=1,
        curriculum="linear", curriculum_frac=0.5,
    ),
    "objective": {"distill": {"weight": 0.5}, "trajectory": {}},
    "optim": OptimConfig(
        lr=1e-2, freeze=("embedding.*", "prelude_stack.*"), lr_by_pattern={"loop_lora.*": 2e-2}
    ),
    "model.modulation": ELR,
}  # fmt: skip


def test_a_healing_run_resumes_bit_for_bit_without_its_folder(recipe, base, tmp_path):
    """Everything at once: frozen parts, own rates, Poisson depths, shorter paths, a graft.

    Weights read from a file used to lie unaligned, which changed last bits of matrix products.
    """
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    changes = HEALING | {"objective": {"trajectory": {}}, "train.init": str(moved)}
    whole = train(recipe(name="whole", **changes), root=tmp_path).path
    stopped = train(
        recipe(name="stopped", **changes), root=tmp_path, observer=Recorder(signal_at=3)
    )
    assert stopped.status == "interrupted"
    shutil.rmtree(moved)
    assert resume(stopped.path).status == "finished"
    assert_same(final_state(whole), final_state(stopped.path))
    assert (RunDir.open(stopped.path).latest_checkpoint().path / "origin.json").is_file()


def test_a_distilled_run_resumes_bit_for_bit_and_notices_another_teacher(recipe, base, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    changes = HEALING | {"train.init": str(moved)}
    whole = train(recipe(name="whole", **changes), root=tmp_path).path
    stopped = train(
        recipe(name="stopped", **changes), root=tmp_path, observer=Recorder(signal_at=3)
    )
    weights_file = moved / "model.safetensors"
    original = weights_file.read_bytes()
    save_model(LoopedLM(read_config(base), seed=9), moved)
    with pytest.raises(ValueError, match="the teacher .* is not what it was"):
        resume(stopped.path)
    weights_file.write_bytes(original)
    assert resume(stopped.path).status == "finished"
    assert_same(final_state(whole), final_state(stopped.path))
    records = [r for r in RunDir.open(whole).read_metrics() if "train/loss" in r]
    assert all(r["train/distill"] >= 0 for r in records)
    assert any("train/consistency" in r for r in records)
    assert all("lr/decayed:loop_lora.*" in r for r in records)
    frozen = weights(whole)
    for name, tensor in read_tensors(base / "model.safetensors").items():
        is_frozen = name.startswith(("embedding.", "prelude_stack."))
        assert torch.equal(frozen[name], tensor.float()) == is_frozen, name


def test_a_graft_on_later_passes_leaves_one_loop_bit_identical(recipe, base, tmp_path):
    """The base frozen, additions on passes >= 2 only: k = 1 is the model it started from."""
    changes = {
        "optim.freeze": ["embedding.*", "*_stack.*", "final_norm.*"],
        "depth": {"sampler": "sync_uniform"},
    }
    run = train(recipe(**changes), root=tmp_path).path
    tokens = torch.arange(40).reshape(2, 20)
    before, after = load_model(base).float(), depthdial.load(run).looped_lm
    assert torch.equal(before(tokens, num_loops=1), after(tokens, num_loops=1))
    assert not torch.equal(before(tokens, num_loops=3), after(tokens, num_loops=3))


def test_a_modulation_is_grafted_at_the_first_mixed_step(recipe, tmp_path):
    for switch, step in ((0.0, 0), (0.5, 3)):
        observer = Recorder()
        changes = {"model.modulation": ELR, "depth.switch_frac": switch, "name": f"at{step}"}
        run = train(recipe(**changes), root=tmp_path, observer=observer).path
        [notice] = [text for text in observer.notices if "grafted" in text]
        assert f"step      {step}" in notice
        assert depthdial.load(run).config.modulation == ELR


def test_what_was_measured_on_the_base_stays_with_it(recipe, tmp_path):
    """A curve of the untrained weights once stood in the model card of the trained ones."""
    run = train(recipe(), root=tmp_path).path
    names = {path.name for path in RunDir.open(run).latest_checkpoint().path.iterdir()}
    assert {"origin.json", "chat_template.jinja", "LICENSE", "tokenizer.json"} <= names
    assert not names & set(MEASURED_ON_THE_BASE)


def test_a_modulation_that_would_undo_trained_loops_is_refused(recipe, tmp_path):
    trained = str(RunDir.open(train(recipe(), root=tmp_path).path).latest_checkpoint().path)
    assert max(read_config(trained).trained_at) > 1
    changes = {"train.init": trained, "model.modulation": ELR, "name": "second"}
    with pytest.raises(ValueError, match="'one_loop' starts as another .*'every_loop', which ch"):
        train(recipe(**changes), root=tmp_path)
    changes |= {"model.modulation": ELR.replace(neutral="every_loop"), "optim.lr": 1e-12}
    run = train(recipe(**changes), root=tmp_path).path
    before, after = load_model(trained), depthdial.load(run).looped_lm
    tokens = torch.arange(40).reshape(2, 20)
    for k in (1, 2, 3):
        torch.testing.assert_close(after(tokens, num_loops=k), before(tokens, num_loops=k))


def test_another_function_of_later_loops_counts_them_as_untrained(recipe, tmp_path):
    """share_first is no saving of memory alone: later loops read other keys."""
    trained = str(RunDir.open(train(recipe(), root=tmp_path).path).latest_checkpoint().path)
    config = read_config(trained)
    shared = config.replace(loop=config.loop.replace(cache_policy="share_first"))
    assert load_init(trained, shared).config.trained_at == (1,)
    last = config.replace(loop=config.loop.replace(cache_policy="last_step"))
    assert load_init(trained, last).config.trained_at == config.trained_at


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.d_ff": 32}, r"model\.d_ff=32, but train\.init=.* has 16.*depthdial convert"),
        ({"model.loop.gate_bypass": "never"}, "model.loop.gate_bypass='never'"),
        ({"model.loop_lora": None}, "model.loop_lora=None"),
        ({"model.modulation": TimeModulationConfig(kind="time_step")}, "cannot be added"),
        ({"optim.freeze": ["core_stak.*"]}, "matches none"),
        ({"optim.freeze": ["modulation.*"]}, "matches none"),
    ],
)
def test_another_model_than_that_of_the_folder_is_refused(recipe, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(recipe(**changes), root=tmp_path)
    assert not (tmp_path / "healed").exists()


def test_limits_and_cache_policy_may_differ(recipe, tmp_path):
    changes = {"model.max_loops": 5, "model.num_loops": 4, "model.loop.cache_policy": "last_step"}
    run = train(recipe(**changes), root=tmp_path).path
    config = depthdial.load(run).config
    assert (config.max_loops, config.num_loops, config.loop.cache_policy) == (5, 4, "last_step")


def test_a_trained_modulation_keeps_its_largest_budget(recipe, tmp_path):
    run = train(recipe(**{"model.modulation": ELR}), root=tmp_path).path
    folder = str(RunDir.open(run).latest_checkpoint().path)
    with pytest.raises(ValueError, match=r"trained on k / 3"):
        train(recipe(**{"train.init": folder, "model.max_loops": 4}), root=tmp_path)
    with pytest.raises(ValueError, match="which is trained; leave it out"):
        train(recipe(**{"train.init": folder, "model.modulation.rank": 4}), root=tmp_path)


def test_a_pattern_may_name_what_is_grafted_later(recipe, tmp_path):
    changes = {
        "model.modulation": ELR,
        "depth.switch_frac": 0.5,
        "optim.freeze": ["modulation.exit.*"],
    }
    run = train(recipe(**changes), root=tmp_path).path
    found = weights(run)
    assert not found["modulation.exit.weight"].any()
    assert found["modulation.core.0.heads.weight"].any()


def test_text_of_another_tokenizer_is_refused_with_the_command(recipe, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(TEXTS), encoding="utf-8")
    prepare([tmp_path / "a.txt"], tmp_path / "prepared", vocab_size=260)
    with pytest.raises(ValueError, match=r"another tokenizer .* --tokenizer"):
        open_data(recipe(**{"data.path": str(tmp_path / "prepared")}))


def test_text_whose_documents_end_otherwise_is_refused(recipe, base, tmp_path):
    """The same vocabulary with another end-of-text token."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["eos_token"] = "a"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"closes documents with token 0, .* --tokenizer"):
        open_data(recipe(**{"train.init": str(other)}))


def test_a_task_of_other_words_is_refused(recipe):
    with pytest.raises(ValueError, match="task 'pointer_program' was made with another tokenizer"):
        open_data(recipe(**{"data.path": None, "data.task": "pointer_program"}))


def test_a_named_corpus_is_prepared_with_the_tokenizer_of_the_folder(recipe, tokenizer, tmp_path):
    data = {"corpus": "annual-messages", "context": 16, "cache_dir": str(tmp_path / "cache")}
    of = recipe(**{"data": data})
    found = open_data(of)
    assert found.tokenizer.to_json() == tokenizer.to_json()
    assert found.folder == prepared_folder(of, tokenizer=found.tokenizer)
    text = found.tokenizer.decode(found.train.rows(0, 1).tokens_BT[0].tolist())
    assert len(text) > 16 and text.isascii()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.path": None, "data.corpus": "stdlib", "data.tokenizer_vocab": 300}, "no effect"),
        ({"train.init": None, "objective": {"distill": {"weight": 1.0}}}, "needs a teacher"),
        ({"depth.backprop_loops": 3}, "no row runs more loops"),
        ({"objective": {"trajectory": {}}, "depth": {"sampler": "fixed", "fixed_loops": 1}},
         "every row runs one loop"),
        ({"depth": {"sampler": "fixed", "fixed_loops": 1, "backprop_loops": 1}},
         "no row runs more loops"),
        ({"objective": {"trajectory": {"short_weight": 0.0, "consistency_weight": 0.0}}},
         "has no effect"),
        ({"depth": {"sampler": "poisson_lognormal", "mean_loops": 9}}, "exceeds model.max_loops"),
    ],
)  # fmt: skip
def test_recipes_that_contradict_themselves_are_refused(recipe, changes, message):
    with pytest.raises(ValueError, match=message):
        recipe().replace(**changes)


def test_a_teacher_must_speak_the_same_ids(recipe, base, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    train_bpe(["quite another text"], 260, allow_fewer=True).save(other)
    objective = {"distill": {"weight": 1.0, "teacher": str(other)}}
    with pytest.raises(ValueError, match="another tokenizer"):
        train(recipe(objective=objective), root=tmp_path)
    objective["distill"] = {"weight": 1.0, "teacher_loops": 7}
    with pytest.raises(ValueError, match="teacher_loops=7 exceeds"):
        train(recipe(objective=objective), root=tmp_path)


def test_a_folder_without_a_model_is_named(recipe, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model directory"):
        recipe(**{"train.init": str(tmp_path)})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not the config of a model"):
        recipe(**{"train.init": str(tmp_path)})


def test_the_command_starts_from_a_folder_or_a_run(cli, base, texts, tmp_path):
    """A recipe file without a model section."""
    file = tmp_path / "healing.yaml"
    values = SETTINGS | {"data": {"path": str(texts), "context": 16}}
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    common = ("--root", tmp_path / "runs", "--train.steps", 2)
    first = cli("train", file, "--init", base, "--model.max_loops", 4, *common)
    assert first.code == 0, first.err
    run = tmp_path / "runs" / "healed"
    second = cli("train", file, "--init", run, "--name", "next", *common)
    assert second.code == 0, second.err
    assert depthdial.load(tmp_path / "runs" / "next").config.max_loops == 4
    both = cli("train", file, "--init", base, "--train.init", run, *common)
    assert (both.code, both.out) == (2, "")
    assert "missing key 'model'" in cli("train", file, *common).err


def test_prepare_takes_the_tokenizer_of_a_model_directory(cli, base, tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    done = cli("prepare", tmp_path / "a.txt", "--out", tmp_path / "p", "--tokenizer", base)
    assert done.code == 0, done.err
    assert Tokenizer.from_dir(tmp_path / "p").to_json() == Tokenizer.from_dir(base).to_json()


def test_sigterm_in_a_healing_run_saves_and_resumes(recipe, tmp_path):
    stopped = train(
        recipe(**HEALING), root=tmp_path, observer=Recorder(signal_at=1, number=signal.SIGTERM)
    )
    assert (stopped.status, stopped.step) == ("terminated", 1)
    assert resume(stopped.path).status == "finished"


# ---- what opens a document


@pytest.fixture
def other_opening(base, tmp_path) -> Path:
    """The base as a model that opens documents with a token of its own, as imported ones do."""
    folder = tmp_path / "opened"
    shutil.copytree(base, folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"opening_tokens": ["!"]}
    path.write_text(json.dumps(values))
    return folder


def test_f13_rows_sweeps_and_prompts_open_a_document_alike(recipe, other_opening):
    tokenizer = Tokenizer.from_dir(other_opening)
    opening = tokenizer.opening_id
    assert opening is not None and opening != tokenizer.eos_id
    data = open_data(recipe(**{"train.init": str(other_opening)}))
    for source in (data.train, data.valid):
        batch = source.rows(0, 200)
        after_end = batch.targets_BT[:, :-1] == tokenizer.eos_id
        assert after_end.any()
        assert (batch.tokens_BT[:, 1:][after_end] == opening).all()
    assert start_id(tokenizer) == opening
    assert load(other_opening)._prompt_ids(["x"])[0][0] == opening


def test_f13_a_model_that_opens_documents_with_several_tokens_is_refused(recipe, other_opening):
    path = other_opening / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"opening_tokens": ["!", "!"]}))
    with pytest.raises(ValueError, match="opens documents with 2 tokens"):
        open_data(recipe(**{"train.init": str(other_opening)}))


def test_f13_resume_notices_rows_whose_documents_open_otherwise(
    recipe, other_opening, tmp_path, monkeypatch
):
    changes = {"train.init": str(other_opening), "train.steps": 2, "train.checkpoint_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "opening_id", property(lambda self: self.eos_id))
        run = train(recipe(**changes), root=tmp_path).path
    with pytest.raises(ValueError, match="training data of .* are not what they were"):
        resume(run)
