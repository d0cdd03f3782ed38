"""A run becomes a report whose data keep every document's loss."""

import json

import pytest

from depthdial.config import DataConfig, DepthConfig, ModelConfig, OptimConfig, Recipe, TrainConfig
from depthdial.data.text import prepare
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.model.count import count_parameters
from depthdial.studies import report_run as study
from depthdial.studies.report_run import FinishedRun, report_run, section_of
from depthdial.train.pretrain import train


def tiny_recipe(name: str, data: DataConfig, vocab_size: int, *, looped: bool) -> Recipe:
    loops = 2 if looped else 1
    return Recipe(
        name=name,
        model=ModelConfig(
            vocab_size=vocab_size, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=2,
            head_dim=8, d_ff=16, max_context=32, num_loops=loops, max_loops=loops,
        ).replace(**{"loop.update": "adaptive_delta" if looped else "replace"}),
        data=data,
        depth=DepthConfig(num_depth_slices=2)
        if looped
        else DepthConfig(sampler="fixed", fixed_loops=1, num_depth_slices=2),
        optim=OptimConfig(),
        train=TrainConfig(steps=4, batch_size=4, val_every=2, val_rows=4, precision="fp32"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(study, "POINTER_ROWS", 24)


@pytest.fixture(scope="module")
def pointer_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pointer")
    data = DataConfig(task="pointer_program", context=16)
    return tuple(
        train(tiny_recipe(name, data, 32, looped=looped), root=root).path
        for name, looped in (("looped", True), ("plain", False))
    )


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    texts = root / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"Article {i} says that loops are data. " * 12)
    prepare([texts], root / "prepared", vocab_size=280, valid_frac=0.3)
    data = DataConfig(path=str(root / "prepared"), context=16)
    return train(tiny_recipe("text", data, 280, looped=True), root=root).path


def test_a_pointer_run_with_baseline_becomes_a_page_with_both_sides(pointer_runs):
    looped, plain = pointer_runs
    paths = report_run(looped, baseline=plain)
    page = paths.html.read_text()
    assert "outside training" in page and "http" not in page.split("<body")[1]
    assert paths.curve.stat().st_size > 5_000
    data = json.loads((looped / "report.json").read_text())
    [section] = data["sections"]
    assert [d["num_loops"] for d in section["depths"]] == [1, 2, 3, 4]
    assert [d["trained"] for d in section["depths"]] == [True, True, False, False]
    assert section["baseline"]["executed_sublayers"] == 6
    assert (
        section["training"]["looped"]["params"]
        == count_parameters(FinishedRun.open(looped).model.config).total
    )
    assert len(section["samples"][0]["outputs"]) == 2


def test_a_text_run_keeps_per_document_losses_and_samples_at_every_k(text_run):
    report_run(text_run)
    sweep = DepthSweep.load(text_run / "sweep.json")
    assert sweep.nll_KN.shape == (4, len(sweep.names)) and len(sweep.names) > 2
    section = json.loads((text_run / "report.json").read_text())["sections"][0]
    assert "baseline" not in section
    assert section["documents"] == len(sweep.names)
    assert [o["num_loops"] for o in section["samples"][0]["outputs"]] == [1, 2]


def test_differences_are_paired_over_documents(pointer_runs):
    looped, plain = (FinishedRun.open(path) for path in pointer_runs)
    section = section_of(looped, plain)["section"]
    first = section["depths"][0]
    tax = first["vs_baseline"]
    assert tax["estimate"] == pytest.approx(first["loss"] - section["baseline"]["loss"])
    assert tax["high"] - tax["low"] < first["high"] - first["low"]


def test_a_run_without_checkpoint_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        report_run(tmp_path)
