"""A run becomes a report whose data keep every document's loss."""

import dataclasses
import json
import shutil

import pytest

from depthdial.config import DataConfig, DepthConfig, ModelConfig, OptimConfig, Recipe, TrainConfig
from depthdial.data import corpora
from depthdial.data.documents import Document
from depthdial.data.synthetic import pointer_tokenizer
from depthdial.data.text import prepare
from depthdial.engine.generate import generate
from depthdial.eval import depth_sweep
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.model.count import count_parameters
from depthdial.model.looped_lm import LoopedLM
from depthdial.studies import report_run as study
from depthdial.studies import samples
from depthdial.studies.finished_run import FinishedRun, hardware_text
from depthdial.studies.report_run import report_run, section_of
from depthdial.studies.samples import text_samples
from depthdial.training.pretrain import train

FIXED = DepthConfig(sampler="fixed", fixed_loops=1)


def tiny_recipe(
    name: str, data: DataConfig, vocab_size: int, *, looped: bool, max_context: int = 32
) -> Recipe:
    loops = 2 if looped else 1
    return Recipe(
        name=name,
        model=ModelConfig(
            vocab_size=vocab_size, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=2,
            head_dim=8, d_ff=16, max_context=max_context, num_loops=loops, max_loops=loops,
        ).replace(**{"loop.update": "adaptive_delta" if looped else "replace"}),
        data=data,
        depth=DepthConfig() if looped else FIXED,
        optim=OptimConfig(),
        train=TrainConfig(steps=4, batch_size=4, val_every=2, val_rows=4, precision="fp32"),
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def few_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth_sweep, "POINTER_ROWS", 24)
        patch.setattr(depth_sweep, "CHAIN_ROWS", 24)
        yield


@pytest.fixture(scope="module")
def pointer_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pointer")
    data = DataConfig(task="pointer_program", context=16)
    return tuple(
        train(tiny_recipe(name, data, 32, looped=looped), root=root).path
        for name, looped in (("looped", True), ("plain", False))
    )


@pytest.fixture(scope="module")
def pointer_page(few_rows, pointer_runs):
    """The looped run reported against the plain one, whose folder holds a sweep of its own."""
    looped, plain = pointer_runs
    (plain / "sweep.json").write_text("its own")
    return report_run(looped, baseline=plain).html.read_text()


def train_text(root, *, documents=40, valid_frac=0.3, **changes):
    """Run folder of a tiny model of `documents` short texts."""
    texts = root / "texts"
    texts.mkdir()
    for i in range(documents):
        (texts / f"{i}.txt").write_text(f"Article {i} says that loops are data. " * 12)
    prepare([texts], root / "prepared", vocab_size=280, valid_frac=valid_frac)
    data = DataConfig(path=str(root / "prepared"), context=16)
    return train(tiny_recipe("text", data, 280, looped=True, **changes), root=root).path


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    return train_text(tmp_path_factory.mktemp("text"))


def reported(path):
    return json.loads((path / "report.json").read_text())


def test_a_pointer_run_with_baseline_becomes_a_page_with_both_sides(pointer_runs, pointer_page):
    looped, _ = pointer_runs
    assert "outside training" in pointer_page and "http" not in pointer_page.split("<body")[1]
    assert (looped / "curve.png").stat().st_size > 5_000
    [section] = reported(looped)["sections"]
    assert [d["num_loops"] for d in section["depths"]] == [1, 2, 3, 4]
    assert [d["trained"] for d in section["depths"]] == [True, True, False, False]
    assert section["baseline"]["executed_sublayers"] == 6
    assert (
        section["training"]["looped"]["params"]
        == count_parameters(FinishedRun.open(looped).model.config).total
    )
    assert len(section["samples"][0]["outputs"]) == 2


def test_reporting_leaves_the_folder_of_the_baseline_alone(pointer_runs, pointer_page):
    """The baseline's own sweep was once overwritten by one of a single loop count."""
    looped, plain = pointer_runs
    assert (plain / "sweep.json").read_text() == "its own"
    assert not [path.name for path in plain.iterdir() if "report" in path.name]
    own, base = (DepthSweep.load(looped / name) for name in ("sweep.json", "baseline_sweep.json"))
    own.check_paired(base)
    assert base.loops == (1,)


def test_provenance_and_cost_of_both_sides_are_reported(pointer_runs, pointer_page):
    looped, _ = pointer_runs
    data = reported(looped)
    assert list(data["provenance"]) == ["looped", "plain", "this report"]
    for name in ("looped", "plain"):
        facts = data["provenance"][name]
        assert {"flops", "seconds"} <= set(facts["training"]) and "cores" in facts["hardware"]
        assert facts["git"] is None or "dirty_patch" not in facts["git"]
    assert set(data["sections"][0]["training"]) == {"looped", "baseline"}
    assert "(training and measurement)" in data["sections"][0]["hardware"]


def test_other_machines_are_told_apart(pointer_runs):
    looped, plain = (FinishedRun.open(path) for path in pointer_runs)
    here = looped.provenance["hardware"]
    text = hardware_text(looped, plain, measured_on=here | {"cpu_model": "Other CPU"})
    first, second = text.split("; ")
    assert first.startswith("training of the looped model, training of the baseline: ")
    assert second.startswith("measurement: Other CPU, ")


def test_both_sides_are_timed_in_one_call(pointer_runs, monkeypatch):
    calls, measure = [], study.measure_latencies

    def spy(sides, **lengths):
        calls.append([num_loops for _, num_loops in sides])
        return measure(sides, **lengths)

    monkeypatch.setattr(study, "measure_latencies", spy)
    section = section_of(*(FinishedRun.open(path) for path in pointer_runs))["section"]
    assert calls == [[1, 2, 3, 4, 1]]
    assert section["baseline"]["ms_per_token_min"] > 0


def test_a_text_run_keeps_per_document_losses_and_samples_at_every_k(text_run):
    report_run(text_run)
    sweep = DepthSweep.load(text_run / "sweep.json")
    assert sweep.nll_KN.shape == (4, len(sweep.names)) and len(sweep.names) > 2
    section = reported(text_run)["sections"][0]
    assert "baseline" not in section
    assert section["documents"] == len(sweep.names)
    assert [o["num_loops"] for o in section["samples"][0]["outputs"]] == [1, 2]


def test_one_held_out_document_gives_a_report_without_intervals(tmp_path):
    path = train_text(tmp_path, documents=10, valid_frac=0.1)
    page = report_run(path).html.read_text()
    section = reported(path)["sections"][0]
    assert section["documents"] == 1
    assert [d["low"] for d in section["depths"]] == [None] * 4
    assert section["depths"][1]["vs_previous"]["low"] is None
    assert "No interval: one document" in page


def test_a_short_context_leaves_room_to_write(tmp_path):
    """A prompt of 24 tokens once asked for -8 new ones at a context of 16."""
    run = FinishedRun.open(train_text(tmp_path, max_context=16))
    [first, _] = text_samples(run, None)
    assert len(first["outputs"]) == 2 and all(output["text"] for output in first["outputs"])


def test_differences_are_paired_over_documents(pointer_runs):
    looped, plain = (FinishedRun.open(path) for path in pointer_runs)
    section = section_of(looped, plain)["section"]
    first = section["depths"][0]
    tax = first["vs_baseline"]
    assert tax["estimate"] == pytest.approx(first["loss"] - section["baseline"]["loss"])
    assert tax["high"] - tax["low"] < first["high"] - first["low"]


def test_sweeps_that_cannot_be_paired_are_refused(pointer_runs, monkeypatch):
    looped, plain = (FinishedRun.open(path) for path in pointer_runs)
    sweep_run = study.sweep_run

    def other_rows(run, loops):
        monkeypatch.setattr(depth_sweep, "POINTER_ROWS", 23 if run is plain else 24)
        return sweep_run(run, loops)

    monkeypatch.setattr(study, "sweep_run", other_rows)
    with pytest.raises(ValueError, match="24 and 23 documents"):
        section_of(looped, plain)


def test_a_looped_or_otherwise_fed_baseline_is_refused(pointer_runs, text_run, tmp_path):
    looped, _ = pointer_runs
    with pytest.raises(ValueError, match="has max_loops=2; a report compares with a matched"):
        report_run(looped, baseline=looped)
    data = DataConfig(task="pointer_program", context=8)
    short = train(tiny_recipe("short", data, 32, looped=False), root=tmp_path).path
    with pytest.raises(ValueError, match=r"has data.context=16, the baseline .* has 8"):
        report_run(looped, baseline=short)


def test_text_without_an_end_token_is_refused(text_run, monkeypatch):
    """Token 0 once stood in for it in silence."""
    run = dataclasses.replace(FinishedRun.open(text_run), tokenizer=pointer_tokenizer())
    with pytest.raises(ValueError, match="no end-of-text token"):
        section_of(run, None)


# Runs that started from a model directory


@pytest.fixture(scope="module")
def chain_report(few_rows, chain_run, tmp_path_factory):
    copy = shutil.copytree(chain_run, tmp_path_factory.mktemp("reported") / "chains")
    page = report_run(copy).html.read_text()
    return page, reported(copy)["sections"][0]


def test_a_run_on_chains_becomes_a_page_of_chains(chain_report):
    page, section = chain_report
    body = page.split("<body")[1].split("<details>")[0].replace("\N{NO-BREAK SPACE}", " ")
    assert (section["name"], section["kind"]) == ("Pointer chains", "pointer_chain")
    assert section["chance_accuracy"] == pytest.approx(0.55)
    assert "144 answers in 24 rows evaluated" in body
    assert "Naming the digit of any chain gives 55 %" in body
    assert "program" not in body and "document" not in body
    for depth in section["depths"]:
        cells = depth["accuracy_by_depth"]
        assert [(c["dependency_depth"], c["positions"]) for c in cells] == [
            (1, 48),
            (2, 48),
            (3, 48),
        ]
    assert [d["trained"] for d in section["depths"]] == [True, True, False, False, False]


def test_a_sample_of_chains_is_answered_by_look_ups(chain_run, chain_report):
    _, section = chain_report
    run = FinishedRun.open(chain_run)
    [sample] = section["samples"]
    source = run.unseen_rows()
    told = dict(line.split("=") for line in sample["prompt"].splitlines()[0].split(" "))
    assert len(told) == 6
    assert [output["num_loops"] for output in sample["outputs"]] == [1, 2, 3]
    rows = [source.rows(row, 1) for row in range(24, 44)]
    batch = next(b for b in rows if len(b.targets_BT.unique()) > 2)
    assert run.tokenizer.decode(batch.tokens_BT[0, :24].tolist()).split() == [
        f"{letter}={value}" for letter, value in told.items()
    ]
    given_BT = run.model(batch.tokens_BT, num_loops=2)[..., source.answer_ids].argmax(dim=-1)
    right = int((source.answer_ids[given_BT] == batch.targets_BT).sum())
    answers = [line.split(": ") for line in sample["outputs"][1]["text"].splitlines()]
    assert [depth for depth, _ in answers] == ["1", "2", "3"]
    pairs = [pair.split("=") for _, line in answers for pair in line.split(" ")]
    assert sum("[" not in answer for _, answer in pairs) == right
    for letter, answer in pairs:
        while not letter.isdigit():
            letter = told[letter]
        assert (answer == letter) == ("[" not in answer)


def test_a_single_chain_has_a_sample_too(chain_run, chain_recipe, tmp_path):
    changes = {"data.num_chains": 1, "data.context": 21, "train.steps": 1}
    run = FinishedRun.open(train(chain_recipe(**changes), root=tmp_path).path)
    [sample] = samples.question_samples(run, None)
    assert len(sample["outputs"][0]["text"].splitlines()) == 3


def test_a_baseline_on_other_chains_is_refused(chain_run, chain_recipe, tmp_path):
    changes = {"model.max_loops": 1, "model.num_loops": 1, "data.num_chains": 3,
               "data.chain_length": 2, "depth": FIXED}  # fmt: skip
    other = train(chain_recipe(**changes), root=tmp_path).path
    with pytest.raises(ValueError, match=r"has data.num_chains=2, the baseline .* has 3"):
        report_run(chain_run, baseline=other)


def test_a_baseline_on_the_same_chains_is_compared(chain_run, chain_recipe, tmp_path):
    copy = shutil.copytree(chain_run, tmp_path / "looped")
    changes = {"model.max_loops": 1, "model.num_loops": 1, "depth": FIXED}
    other = train(chain_recipe(**changes), root=tmp_path).path
    section = section_of(FinishedRun.open(copy), FinishedRun.open(other))["section"]
    assert section["baseline"]["accuracy_by_depth"][0]["positions"] == 48
    assert section["samples"][0]["baseline"].startswith("1: ")


def test_a_baseline_of_another_tokenizer_is_refused(chain_run):
    run = FinishedRun.open(chain_run)
    config = run.model.config.replace(max_loops=1, num_loops=1, trained_loops=None)
    other = dataclasses.replace(run, tokenizer=pointer_tokenizer(), model=LoopedLM(config, seed=0))
    with pytest.raises(ValueError, match="have different tokenizers"):
        section_of(run, other)


@pytest.fixture(scope="module")
def imported_run(tmp_path_factory, byte_base):
    """A run on text from an imported model, whose publisher opens texts with nothing and stops at
    two tokens; its folder is gone."""
    root = tmp_path_factory.mktemp("imported")
    base = shutil.copytree(byte_base, root / "base")
    config = json.loads((base / "tokenizer_config.json").read_text()) | {"opening_tokens": []}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 101]}))
    changes = {
        "data": {"corpus": "short", "context": 16, "cache_dir": str(root / "cache")},
        "train.init": str(base),
    }
    texts = [Document(f"{i}", f"Article {i} says that loops are data. " * 4) for i in range(30)]
    short = corpora.Corpus(
        "short texts", lambda: iter(texts), lambda: "1", lambda names: set(names[::3])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_corpora", lambda: {"short": short})
        recipe = tiny_recipe("text", DataConfig(path="x", context=16), 257, looped=True)
        path = train(recipe.replace(**changes), root=root).path
        shutil.rmtree(base)
        yield path


def test_a_run_on_a_named_corpus_is_reported_without_the_folder_it_started_from(imported_run):
    section = section_of(FinishedRun.open(imported_run), None)["section"]
    assert section["documents"] == 10
    assert "documents of corpus short" in section["what"]
    assert len(section["samples"]) == 2


def test_documents_of_an_imported_model_are_scored_as_its_publisher_trained_it(imported_run):
    """Without an opening token the first token has nothing to be predicted from."""
    run = FinishedRun.open(imported_run)
    assert run.start_id() is None
    documents = run.validation_documents()
    sweep = study.sweep_run(run, [1])
    assert sweep.tokens_N.tolist() == [len(d.tokens_T) - 1 for d in documents]
    assert all(0 not in d.tokens_T for d in documents)


def test_samples_of_an_imported_model_end_at_every_stop_id(imported_run, monkeypatch):
    run, seen = FinishedRun.open(imported_run), []

    def record(model, prompts, **options):
        seen.append((prompts, options["stop_ids"]))
        return generate(model, prompts, **options)

    monkeypatch.setattr(samples, "generate", record)
    text_samples(run, None)
    assert {stop_ids for _, stop_ids in seen} == {(0, 101)}
    document = run.validation_documents()[0]
    assert seen[0][0] == [document.tokens_T[: len(seen[0][0][0])].tolist()]


def test_a_run_without_checkpoint_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        report_run(tmp_path)


# Which loop counts training ran


def schedule_of(steps=80, max_loops=4, objective=None, **depth):
    recipe = tiny_recipe("r", DataConfig(task="pointer_program", context=16), 32, looped=True)
    recipe = recipe.replace(**{"model.max_loops": max_loops, "train.steps": steps})
    if depth["sampler"] == "poisson_truncated":
        depth["num_depth_slices"] = 2
    return recipe.replace(depth=depth, objective={"trajectory": objective})


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        ({"sampler": "fixed", "fixed_loops": 2}, (2,)),
        ({"sampler": "fixed", "fixed_loops": 2, "switch_frac": 0.5}, (1, 2)),
        ({"sampler": "fixed", "fixed_loops": 1}, (1,)),
        ({"sampler": "listed", "listed_loops": [1]}, (1,)),
        ({"sampler": "listed", "listed_loops": [2, 2, 4]}, (2, 4)),
        # The rise comes to four loops in the last step.
        ({"sampler": "fixed", "fixed_loops": 4, "curriculum": "linear", "curriculum_frac": 1.0},
         (1, 2, 3, 4)),
        # Shorter paths of three loops have one or two.
        ({"sampler": "fixed", "fixed_loops": 3, "objective": {}}, (1, 2, 3)),
    ],
)  # fmt: skip
def test_b15_only_loop_counts_that_training_ran_are_trained(depth, expected, tmp_path):
    run = train(schedule_of(steps=8, **depth), root=tmp_path).path
    assert FinishedRun.open(run).trained_loops == expected


@pytest.mark.parametrize("sampler", ["poisson_truncated", "poisson_lognormal"])
def test_b15_a_loop_count_that_was_possible_but_never_drawn_is_not_trained(sampler, tmp_path):
    """Every one of 1..max_loops once counted as trained, however rare."""
    recipe = schedule_of(steps=6, max_loops=12, sampler=sampler, mean_loops=3)
    run = FinishedRun.open(train(recipe, root=tmp_path).path)
    drawn = {k for record in run.metrics for k in record.get("loops/per_slice", ())}
    assert run.trained_loops == tuple(sorted(drawn))
    assert 12 not in drawn


def test_b15_one_loop_is_outside_a_training_of_two_fixed_loops(tmp_path):
    recipe = schedule_of(max_loops=2, sampler="fixed", fixed_loops=2)
    run = FinishedRun.open(train(recipe, root=tmp_path).path)
    depths = section_of(run, None)["section"]["depths"]
    assert [d["trained"] for d in depths] == [False, True, False, False]
