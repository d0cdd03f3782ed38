"""cache.py against published totals, the ELR cost table, and its own definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counted import small

from depthdial.config import POLICIES, ModelConfig
from depthdial.model.count import plan
from depthdial.model.count.cache import cache_bytes, cache_slots, planned_policies

COST_TABLE = json.loads(
    (Path(__file__).parents[1] / "golden" / "elr" / "cost_table.json").read_text()
)


def with_attention_layers() -> ModelConfig:
    """Six attention layers, the middle three looped."""
    shape = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
    return small(layout="A", split=(2, 3, 1), d_ff=None, **shape)


def test_b01_slot_counts_are_loops_of_the_core_plus_prelude_and_coda():
    config = with_attention_layers()
    assert [cache_slots(config, k, policy="per_loop") for k in (1, 2, 4)] == [6, 9, 15]
    for policy in ("collapse_last", "last_step"):
        assert [cache_slots(config, k, policy=policy) for k in (1, 2, 4)] == [6, 6, 6]


@pytest.mark.parametrize(
    ("policy", "entries"),
    [
        ("per_loop", [1, 2, 3, 6]),
        ("share_first", [1, 1, 1, 1]),
        ("stash_first", [1, 1, 1, 1]),
        ("stash_last", [1, 1, 1, 1]),
        ("huginn:latest-m3", [1, 2, 3, 6]),
        ("huginn:skip", [1, 2, 3, 6]),
        ("huginn:compress-s6", [1, 2, 2, 2]),
        ("huginn:latest-m3-compress-s3", [1, 1, 1, 1]),
        ("parcae:compress-s2", [1, 2, 2, 2]),
        ("parcae:compress-stride2", [1, 1, 2, 3]),
        ("parcae:compress-first2", [1, 2, 3, 3]),
        ("parcae:compress-last1", [1, 2, 2, 2]),
    ],
)
def test_entries_of_a_core_layer_at_1_2_3_and_6_loops(policy, entries):
    """3 attention layers in the core, 3 outside."""
    config = with_attention_layers()
    for phase in ("prompt_peak", "steady"):
        counted = [cache_slots(config, k, policy=policy, phase=phase) for k in (1, 2, 3, 6)]
        assert counted == [3 + 3 * count for count in entries]


@pytest.mark.parametrize("policy", ["collapse_last", "collapse_first", "collapse_mean"])
def test_collapsing_policies_need_every_loop_until_the_prompt_ends(policy):
    config = with_attention_layers()
    assert cache_slots(config, 4, policy=policy, phase="prompt_peak") == 15
    assert cache_slots(config, 4, policy=policy, phase="steady") == 6


def test_every_named_policy_is_planned_and_the_own_one_of_the_model():
    assert planned_policies(small()) == tuple(POLICIES)
    own = small(loop={"cache_policy": "parcae:compress-s2"})
    assert planned_policies(own) == (*POLICIES, "parcae:compress-s2")


def test_a_model_that_mixes_loops_is_planned_per_loop_alone():
    mixing = small(loop={"local_window": 4})
    assert planned_policies(mixing) == ("per_loop",)
    with pytest.raises(ValueError, match="'last_step' does not go with loop.local_window=4"):
        cache_slots(mixing, 2, policy="last_step")


def test_a_policy_that_does_not_go_with_the_model_is_not_planned():
    timed = small(modulation={"kind": "time_step"})
    assert planned_policies(timed) == tuple(p for p in POLICIES if p != "stash_last")


def test_sublayers_without_attention_need_no_slots():
    heads = dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"))
    config = small(layout="F", split=(1, 2, 1), **heads)
    assert cache_slots(config, 3, policy="per_loop") == 0
    assert cache_bytes(config, 3, policy="per_loop", context=8, bytes_per_value=2) == 0


def test_b50_cache_of_22_looped_layers_at_256k_tokens():
    """The planner of B50 sized the cache by physical layers and ran out of memory."""
    config = small(
        layout="A", split=(0, 22, 0), num_heads=8, num_kv_heads=8, head_dim=128, d_ff=None
    )
    asked = {"context": 262_144, "bytes_per_value": 2}
    assert cache_bytes(config, 2, policy="per_loop", **asked) == 47_244_640_256
    assert cache_bytes(config, 2, policy="last_step", **asked) == 23_622_320_128
    assert cache_bytes(config, 2, policy="collapse_last", **asked) == 23_622_320_128
    for policy, peak, steady in [
        ("per_loop", 47_244_640_256, 47_244_640_256),
        ("collapse_last", 47_244_640_256, 23_622_320_128),
        ("last_step", 23_622_320_128, 23_622_320_128),
    ]:
        [row] = plan(config, num_loops=[2], context=262_144, policy=policy).rows
        assert (row.cache_peak_bytes, row.cache_steady_bytes) == (peak, steady)


def test_b50_three_of_six_attention_layers_looped_cost_half_of_k_plus_one():
    config = with_attention_layers()
    one = cache_bytes(config, 1, context=64, policy="per_loop", bytes_per_value=2)
    for loops, ratio in COST_TABLE["attention_kv"]["per_loop_over_one_loop"].items():
        k = int(loops)
        at_k = cache_bytes(config, k, context=64, policy="per_loop", bytes_per_value=2)
        assert at_k / one == ratio == (3 + 3 * k) / 6


def test_kv_gibibytes_at_128k_equal_the_cost_table():
    table = COST_TABLE["attention_kv"]
    config = with_attention_layers()
    assert config.num_kv_heads * config.head_dim == table["implied_kv_width_per_layer"]
    gib = table["gib_at_128k_bf16"]
    asked = {"context": 131_072, "bytes_per_value": 2}
    assert cache_bytes(config, 4, policy="per_loop", **asked) == gib["per_loop_k4"] * 2**30
    assert cache_bytes(config, 4, policy="last_step", **asked) == gib["last_loop"] * 2**30


def test_cache_grows_with_rows():
    asked = {"context": 16, "policy": "per_loop", "bytes_per_value": 4}
    assert cache_bytes(small(), 2, batch_size=3, **asked) == 3 * cache_bytes(small(), 2, **asked)


def test_unknown_policy_and_phase_are_refused():
    with pytest.raises(ValueError, match="unknown cache policy 'last_steps'"):
        cache_slots(small(), 2, policy="last_steps")
    with pytest.raises(ValueError, match="phase='later'"):
        cache_slots(small(), 2, policy="per_loop", phase="later")


@pytest.mark.parametrize("num_loops", [0, -1, 2.0, "2", True])
def test_a_loop_count_that_is_not_a_positive_integer_is_refused(num_loops):
    with pytest.raises(ValueError, match="num_loops=.*at least 1"):
        cache_slots(small(), num_loops, policy="per_loop")
