"""Retrofitted Recurrence against the paper's own code, on files that its public converter wrote."""

import pytest
import torch
from goldens import close, open_golden
from published import WEIGHTS, copy_golden, edit_tensors

from depthdial.cache.contiguous import ContiguousCache
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.model.checkpoint import load_model, read_tensors

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def case():
    return open_golden("retrofit")


@pytest.fixture
def source(tmp_path):
    return copy_golden("retrofit", tmp_path / "source")


def zeros(case):
    """The initial state of the reference."""
    return torch.zeros(*case.vectors["ids"].shape, case.config.d_model)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_f01_logits_are_those_of_the_published_code(case, k):
    logits = case.model()(case.vectors["ids"], num_loops=k, initial_state_BTD=zeros(case))
    close(logits, case.vectors[f"logits_k{k}"], TOLERANCE)


def test_f01_cached_decoding_gives_the_published_logits(case):
    model, tokens = case.model(), case.vectors["ids"]
    cache = ContiguousCache(model.config, batch_size=2, capacity=12, policy="per_loop")
    found = []
    for first, last in [(0, 8), *((i, i + 1) for i in range(8, 12))]:
        start = zeros(case)[:, first:last]
        found.append(
            model(tokens[:, first:last], num_loops=5, cache=cache, initial_state_BTD=start)
        )
    close(torch.cat(found, dim=1), case.vectors["logits_k5"], TOLERANCE)


def test_f01_the_files_of_the_public_converter_open_and_come_back(case, source, tmp_path):
    """33 tensors without effect stopped the import."""
    left_over = [n for n in case.source if n.endswith(("norm_3.weight", "norm_4.weight"))]
    assert len([*left_over, "freqs_cis"]) == 33
    assert inspect_source(source).problems == ()
    report = import_checkpoint(source, tmp_path / "model")
    assert report.family == "retrofit" and report.num_source_tensors == len(case.source)
    model = load_model(tmp_path / "model").eval()
    logits = model(case.vectors["ids"], num_loops=5, initial_state_BTD=zeros(case))
    close(logits, case.vectors["logits_k5"], TOLERANCE)
    assert not any("norm_3" in name or "freqs" in name for name in model.state_dict())
    export_checkpoint(tmp_path / "model", tmp_path / "x", family="retrofit")
    again = read_tensors(tmp_path / "x" / WEIGHTS)
    assert again.keys() == case.source.keys()
    assert all(torch.equal(tensor, case.source[name]) for name, tensor in again.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_f01_a_copy_in_another_number_format_opens_too(case, source, tmp_path, dtype):
    edit_tensors(source, **{name: tensor.to(dtype) for name, tensor in case.source.items()})
    import_checkpoint(source, tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "x", family="retrofit")
    again = read_tensors(tmp_path / "x" / WEIGHTS)
    assert {tensor.dtype for tensor in again.values()} == {dtype}
    assert all(torch.equal(again[name], tensor.to(dtype)) for name, tensor in case.source.items())


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("transformer.prelude.0.norm_3.weight", 1e-3, r"differs by 0\.001 .*only ones"),
        ("transformer.coda.3.norm_4.weight", -1.0, "differs by 1 .*only ones"),
        ("transformer.core_block.7.norm_4.weight", torch.nan, "differs by nan|weights must be fin"),
        ("freqs_cis", 0.1, r"differs by 0\.1 from"),
    ],
)
def test_f01_the_same_tensors_with_an_effect_are_refused_by_name(
    case, source, tmp_path, name, change, match
):
    edit_tensors(source, **{name: case.source[name] + change})
    with pytest.raises(ValueError, match=f"tensor '{name}'.*{match}"):
        import_checkpoint(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_f01_half_a_unit_of_the_number_format_is_no_one(case, source, tmp_path):
    """A table may be rounded; a gain of 1.0078 acts."""
    name = "transformer.prelude.0.norm_3.weight"
    nearly = torch.full_like(case.source[name], 1 + 2**-7).bfloat16()
    edit_tensors(source, **{name: nearly})
    with pytest.raises(ValueError, match="only ones are without effect"):
        import_checkpoint(source, tmp_path / "model")


def test_f01_a_table_of_the_rotation_that_runs_is_not_the_one_that_is_left_over(case, source):
    """The left-over table is of `rope_base`, the rotation of `rope_theta`."""
    theta, length = case.config.rope_theta, case.source["freqs_cis"].shape[1]
    angles = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, 8, 2) / 8))
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)[None, :, None]
    edit_tensors(source, freqs_cis=table)
    with pytest.raises(ValueError, match="'freqs_cis' differs by"):
        import_checkpoint(source, source.parent / "model")
