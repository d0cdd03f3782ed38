"""count.py against published totals, the ELR cost table, and its own definitions."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from counted import small

from depthdial.config import ModelConfig, ModulationConfig
from depthdial.model.count import (
    count_parameters,
    effective_depth,
    executed_sublayers,
    flops_per_token,
    mean_training_loops,
    plan,
    training_cost_ratio,
)
from depthdial.model.presets import preset

COST_TABLE = json.loads(
    (Path(__file__).parents[1] / "golden" / "elr" / "cost_table.json").read_text()
)
MODELS = COST_TABLE["models"]
MODEL_IDS = [model["model"] for model in MODELS]


def with_partition(model: dict) -> ModelConfig:
    """A model with the sublayer split and K of one entry of the cost table."""
    return small(split=tuple(model["partition"]), num_loops=1, max_loops=model["K"])


def test_every_part_of_a_small_model_counts_what_its_tensors_hold():
    attention = 12 * 24 + 2 * (12 * 12) + 24 * 12
    swiglu = 3 * 12 * 20
    pair = attention + swiglu + 2 * 12
    count = count_parameters(small())
    assert (count.prelude, count.core, count.coda) == (pair, 2 * pair, pair)
    assert (count.embedding, count.head, count.final_norm) == (600, 600, 12)
    assert count.state_update == 12 * 12 + 2 * 12
    assert count.modulation == 0
    assert count.total == 4 * pair + 1200 + 12 + 168
    assert count.non_embedding == count.total - 1200


def test_a_tied_head_is_counted_once():
    untied, tied = count_parameters(small()), count_parameters(small(tie_embeddings=True))
    assert tied.head == 0
    assert untied.total - tied.total == 50 * 12


def test_qk_norm_adds_two_gains_per_attention_sublayer():
    plain, normed = count_parameters(small()), count_parameters(small(qk_norm="rms"))
    assert normed.total - plain.total == 4 * 2 * 6


@pytest.mark.parametrize(
    ("update", "expected"),
    [("replace", 0), ("residual", 0), ("delta", 12), ("adaptive_delta", 168)],
)
def test_each_state_update_has_its_own_parameters(update, expected):
    config = small(loop={"update": update})
    assert count_parameters(config).state_update == expected


def test_parameters_do_not_depend_on_the_loop_count():
    assert count_parameters(small(num_loops=1)) == count_parameters(small(num_loops=4))


@pytest.mark.parametrize(("width", "expected"), COST_TABLE["gate_parameters"].items())
def test_gate_parameters_equal_the_cost_table(width, expected):
    assert count_parameters(small(d_model=int(width))).state_update == expected


def test_gpt_05b_has_31600640_conditioning_parameters():
    """Consistent with the paper's 31.6M under the layout of spec 1.6.

    The layout (embedding widths, biased heads, low-rank pairs per modulated sublayer) is
    reconstructed, not published; this shows that it meets the published total.
    """
    count = count_parameters(preset("gpt-0.5b-modulated"))
    assert count.modulation == 31_600_640
    assert count.backbone == count_parameters(preset("gpt-0.5b")).total
    assert round(100 * count.modulation / count.backbone, 2) == 6.34


def test_koi_has_155627520_conditioning_parameters():
    """d = 3072 and 24 + 14 modulated sublayers; consistent with the paper's 155.6M."""
    koi = small(d_model=3072, split=(14, 24, 14), modulation=ModulationConfig())
    assert count_parameters(koi).modulation == 155_627_520


@pytest.mark.parametrize("entry", COST_TABLE["conditioning_parameters"]["table"])
def test_conditioning_parameters_equal_the_cost_table(entry):
    core = 14 if entry["modulated_sublayers"] == 22 else 24
    split = (0, core, entry["modulated_sublayers"] - core)
    config = small(d_model=entry["d"], split=split, modulation=ModulationConfig())
    assert count_parameters(config).modulation == entry["total"]


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_executed_sublayers_equal_the_cost_table(model):
    config = with_partition(model)
    counted = {str(k): executed_sublayers(config, k) for k in range(1, model["K"] + 1)}
    assert counted == model["D_eff"]


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_depth_at_the_mean_loop_count_equals_the_cost_table(model):
    mean = mean_training_loops(model["K"], model["f"])
    assert mean == pytest.approx(model["mean_k"], abs=1e-12)
    depth = effective_depth(with_partition(model), mean)
    assert depth == pytest.approx(model["D_eff_mean"], abs=1e-12)


@pytest.mark.parametrize("entry", COST_TABLE["sweep"])
def test_mean_loops_under_override_equal_the_cost_table(entry):
    mean = mean_training_loops(entry["K"], entry["f"])
    assert mean == pytest.approx(entry["mean_k"], abs=1e-12)


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_training_cost_ratios_equal_the_cost_table(model):
    for share, expected in model["training_cost_ratio_by_mixed_share_rho"].items():
        ratio = training_cost_ratio(
            with_partition(model), model["mean_k"], mixed_frac=float(Fraction(share))
        )
        assert ratio == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_wallclock_ratio_follows_the_majority_draw(model):
    """Derived: overridden ranks wait, so the mean of the uniform draw counts, not the mean k."""
    ratio = training_cost_ratio(
        with_partition(model), mean_training_loops(model["K"], 0.0), mixed_frac=1.0
    )
    assert ratio == pytest.approx(model["wallclock_ratio_if_overridden_ranks_wait"], abs=1e-12)


@pytest.mark.parametrize("num_loops", [0, -1, 2.0, "2", True])
def test_a_loop_count_that_is_not_a_positive_integer_is_refused(num_loops):
    with pytest.raises(ValueError, match="num_loops=.*at least 1"):
        executed_sublayers(small(), num_loops)


def test_fractions_outside_zero_to_one_are_refused():
    with pytest.raises(ValueError, match="mixed_frac=1.5"):
        training_cost_ratio(small(), 2.0, mixed_frac=1.5)
    with pytest.raises(ValueError, match="override_frac=-0.1"):
        mean_training_loops(4, -0.1)
    with pytest.raises(ValueError, match="mean_loops=0.5"):
        effective_depth(small(), 0.5)


def test_plan_rows_agree_with_the_single_functions():
    config = preset("gpt-0.5b-modulated")
    planned = plan(
        config,
        num_loops=[1, 5],
        context=2048,
        batch_size=2,
        mean_loops=mean_training_loops(5, 0.15),
        mixed_frac=0.25,
    )
    row = planned.rows[1]
    assert planned.weight_bytes == 2 * count_parameters(config).total
    assert planned.training_cost_ratio == pytest.approx(1.1983333333333333)
    assert (row.executed_sublayers, row.depth_ratio) == (86, 86 / 30)
    assert row.prompt_flops_per_token == flops_per_token(config, 5, context=2048).total
    assert row.decode_flops_per_token > row.prompt_flops_per_token
    assert row.memory_peak_bytes == planned.weight_bytes + row.cache_peak_bytes


@pytest.mark.parametrize(
    ("mean_loops", "ratio"), [(None, (4 + 4 * 2.5) / 8), (1.0, 1.0), (4.0, 2.5), (1.75, 11 / 8)]
)
def test_plan_takes_the_mean_loop_count_of_training(mean_loops, ratio):
    """Without one: uniform draws from 1..4, 2.5 on average."""
    planned = plan(small(), num_loops=[1], context=8, mean_loops=mean_loops)
    assert planned.mean_training_loops == (2.5 if mean_loops is None else mean_loops)
    assert planned.training_cost_ratio == pytest.approx(ratio)


def test_plan_takes_the_policy_of_the_config_unless_one_is_given():
    config = small(loop={"cache_policy": "last_step"})
    assert plan(config, num_loops=[2], context=8).cache_policy == "last_step"
    assert plan(config, num_loops=[2], context=8, policy="per_loop").cache_policy == "per_loop"


def test_b15_plan_marks_loop_counts_outside_training():
    rows = plan(small(), num_loops=[4, 5], context=8).rows
    assert [row.is_beyond_max_loops for row in rows] == [False, True]


def test_plan_marks_a_context_longer_than_the_model_is_meant_for():
    assert plan(small(), num_loops=[1], context=33).is_beyond_max_context
    assert not plan(small(), num_loops=[1], context=32).is_beyond_max_context


def test_plan_without_loop_counts_is_refused():
    with pytest.raises(ValueError, match="num_loops is empty"):
        plan(small(), num_loops=[], context=8)
