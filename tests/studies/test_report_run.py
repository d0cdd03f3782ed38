"""A run becomes a report whose data keep every document's loss."""

import dataclasses
import json

import pytest

from depthdial.config import DataConfig, DepthConfig, ModelConfig, OptimConfig, Recipe, TrainConfig
from depthdial.data.synthetic import pointer_tokenizer
from depthdial.data.text import prepare
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.model.count import count_parameters
from depthdial.studies import report_run as study
from depthdial.studies.finished_run import FinishedRun, hardware_text, trained_loops
from depthdial.studies.report_run import report_run, section_of
from depthdial.studies.samples import text_samples
from depthdial.train.pretrain import train

FIXED = DepthConfig(sampler="fixed", fixed_loops=1, num_depth_slices=2)


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
        depth=DepthConfig(num_depth_slices=2) if looped else FIXED,
        optim=OptimConfig(),
        train=TrainConfig(steps=4, batch_size=4, val_every=2, val_rows=4, precision="fp32"),
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def few_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "POINTER_ROWS", 24)
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
        monkeypatch.setattr(study, "POINTER_ROWS", 23 if run is plain else 24)
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
    with pytest.raises(ValueError, match=r"context=16.*pointer_program and 8"):
        report_run(looped, baseline=short)


def test_text_without_an_end_token_is_refused(text_run, monkeypatch):
    """Token 0 once stood in for it in silence."""
    run = dataclasses.replace(FinishedRun.open(text_run), tokenizer=pointer_tokenizer())
    with pytest.raises(ValueError, match="no end-of-text token"):
        section_of(run, None)


def test_a_run_without_checkpoint_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        report_run(tmp_path)


# Which loop counts training ran


def schedule_of(steps=4, max_loops=4, **depth):
    recipe = tiny_recipe("r", DataConfig(task="pointer_program", context=16), 32, looped=True)
    recipe = recipe.replace(**{"model.max_loops": max_loops, "train.steps": steps})
    return recipe.replace(depth={"num_depth_slices": 2} | depth)


@pytest.mark.parametrize(
    ("depth", "finished_steps", "expected"),
    [
        ({"sampler": "sync_uniform"}, 4, (1, 2, 3, 4)),
        ({"sampler": "fixed", "fixed_loops": 2}, 4, (2,)),
        ({"sampler": "fixed", "fixed_loops": 2, "switch_frac": 0.5}, 4, (1, 2)),
        ({"sampler": "override", "override_frac": 1.0}, 4, (1,)),
        ({"sampler": "sync_uniform", "switch_frac": 1.0}, 4, (1,)),
        ({"sampler": "sync_uniform", "switch_frac": 0.5}, 2, (1,)),
        ({"sampler": "sync_uniform", "switch_frac": 0.5}, 3, (1, 2, 3, 4)),
    ],
)
def test_b15_only_loop_counts_that_training_ran_are_trained(depth, finished_steps, expected):
    assert trained_loops(schedule_of(**depth), finished_steps=finished_steps) == expected


def test_b15_one_loop_is_outside_a_training_of_two_fixed_loops(tmp_path):
    recipe = schedule_of(max_loops=2, sampler="fixed", fixed_loops=2)
    run = FinishedRun.open(train(recipe, root=tmp_path).path)
    depths = section_of(run, None)["section"]["depths"]
    assert [d["trained"] for d in depths] == [False, True, False, False]
