"""flops.py against counts by hand; against executed products: `test_count_measured.py`."""

from __future__ import annotations

import pytest
from counted import small

from depthdial.config import ModelConfig, ModulationConfig
from depthdial.model.count import plan
from depthdial.model.count.flops import flops_per_token
from depthdial.model.presets import preset


def test_forward_flops_are_two_per_weight_and_loop():
    flops = flops_per_token(small(), 3, context=9)
    attention, swiglu = 12 * 24 * 2 + 12 * 12 * 2, 3 * 12 * 20
    assert flops.prelude == flops.coda == 2 * (attention + swiglu)
    assert flops.core == 3 * 2 * 2 * (attention + swiglu)
    assert flops.gate == 3 * 2 * 12 * 12
    assert flops.head == 2 * 50 * 12
    assert flops.modulation == 0


def test_attention_flops_are_those_of_the_mean_or_the_last_query():
    executed, width = 1 + 3 * 2 + 1, 24
    mean = flops_per_token(small(), 3, context=9)
    last = flops_per_token(small(), 3, context=9, position="last")
    assert mean.attention == executed * 2 * 2 * width * 5
    assert last.attention == executed * 2 * 2 * width * 9


def test_causal_mean_is_the_average_over_all_positions():
    per_position = [
        flops_per_token(small(), 2, context=n, position="last").attention for n in range(1, 9)
    ]
    assert flops_per_token(small(), 2, context=8).attention == sum(per_position) / 8


def test_modulation_flops_are_the_low_rank_path_of_core_and_coda():
    config = small(modulation=ModulationConfig(d_cond=8, rank=5, embed_dim=4))
    assert flops_per_token(config, 3, context=9).modulation == (3 * 4 + 2) * 2 * (2 * 12 * 5)


def test_only_the_adaptive_update_spends_gate_flops():
    for update in ("replace", "residual", "delta"):
        config = small(loop={"update": update})
        assert flops_per_token(config, 2, context=8).gate == 0


def test_training_costs_three_forwards():
    forward = flops_per_token(small(), 2, context=8)
    assert flops_per_token(small(), 2, context=8, training=True).total == 3 * forward.total


def test_shares_of_all_parts_add_up_to_one():
    flops = flops_per_token(preset("gpt-0.5b-modulated"), 5, context=1024)
    parts = ("prelude", "core", "coda", "attention", "gate", "modulation", "head")
    assert sum(flops.share(part) for part in parts) == pytest.approx(1.0)
    assert 0 < flops.share("gate") < flops.share("modulation")


def test_an_unknown_part_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no part 'norms'.*gate, modulation"):
        flops_per_token(small(), 1, context=8).share("norms")


def test_unknown_position_is_refused():
    with pytest.raises(ValueError, match="position='first'"):
        flops_per_token(small(), 2, context=8, position="first")


# ---- windows, shared keys, extra passes, differences: 4 * H * C = 96 FLOPs per attended token

KEYS = 2 * 12 * 12
"""Weights of k_proj and v_proj of one attention sublayer."""


def sliding(**changes: object) -> ModelConfig:
    """One full attention in the prelude, one of window 4 in the core."""
    return small(layout="AFSF", split=(2, 2, 0), sliding={"window": 4}, **changes)


def test_a_query_of_a_sliding_layer_attends_to_its_window_at_most():
    last = flops_per_token(sliding(), 3, context=9, position="last")
    assert last.attention == 96 * (9 + 3 * 4)
    short = flops_per_token(sliding(), 3, context=3, position="last")
    assert short.attention == 96 * (3 + 3 * 3)


def test_the_mean_over_a_window_counts_the_shorter_reach_of_the_first_tokens():
    """1, 2, 3 and then six times 4 of 9 tokens; without a window 5 on average."""
    mean = flops_per_token(sliding(), 3, context=9)
    assert mean.attention == pytest.approx(96 * (5 + 3 * (1 + 2 + 3 + 6 * 4) / 9))


def test_later_loops_that_mix_keys_attend_twice():
    mixing = small(loop={"local_window": 2})
    last = flops_per_token(mixing, 3, context=9, position="last")
    first_keys, own_keys = 1 + 3 * 2 + 1, 2 * 2
    assert last.attention == 96 * (first_keys * 9 + own_keys * 2)
    assert flops_per_token(mixing, 1, context=9) == flops_per_token(small(), 1, context=9)


def test_a_sliding_layer_that_mixes_keys_takes_the_smaller_window_for_its_own():
    wide = sliding(loop={"local_window": 6})
    last = flops_per_token(wide, 3, context=9, position="last")
    assert last.attention == 96 * (9 + 3 * 4 + 2 * 4)


@pytest.mark.parametrize("by", ["config", "policy"])
def test_loops_that_share_the_first_ones_keys_make_none(by):
    plain = flops_per_token(small(), 3, context=9)
    if by == "config":
        shared = flops_per_token(small(loop={"cache_policy": "share_first"}), 3, context=9)
    else:
        shared = flops_per_token(small(), 3, context=9, policy="share_first")
    assert plain.core - shared.core == 2 * (2 * 2 * KEYS), "two loops of two attention sublayers"
    assert shared.attention == plain.attention


def test_shared_keys_spare_their_differences_too():
    deltas = {"rank": 3, "sets_by_loop": (0,)}
    plain = flops_per_token(small(loop_lora=deltas), 3, context=9)
    shared = flops_per_token(small(loop_lora=deltas), 3, context=9, policy="share_first")
    thin = 2 * 3 * (12 + 12)
    assert plain.core - shared.core == 2 * (2 * 2 * (KEYS + thin))


def test_an_extra_pass_of_the_cache_is_a_pass_of_the_core():
    config = small(modulation=ModulationConfig(d_cond=8, rank=5, embed_dim=4))
    plain, more = (flops_per_token(config, k, context=9, policy="per_loop") for k in (3, 4))
    extra = flops_per_token(config, 3, context=9, policy="stash_last")
    assert extra == more and extra.total > plain.total
    stored = small(loop={"cache_policy": "stash_last"})
    assert flops_per_token(stored, 3, context=9) == flops_per_token(small(), 3, context=9)


def test_stored_differences_are_counted_in_the_loops_that_have_some():
    config = small(loop_lora={"rank": 3, "sets_by_loop": (-1, 0)})
    attention = (12 + 24) * 2 + (12 + 12) * 2
    swiglu = 3 * (12 + 20)
    added = 2 * 2 * 3 * (attention + swiglu)
    for num_loops in (1, 3):
        plain = flops_per_token(small(), num_loops, context=9)
        ours = flops_per_token(config, num_loops, context=9)
        assert ours.core - plain.core == (num_loops - 1) * added


def test_a_plan_counts_what_its_policy_runs():
    for policy in ("share_first", "stash_last"):
        [row] = plan(small(), num_loops=[3], context=9, policy=policy).rows
        decode = flops_per_token(small(), 3, context=9, position="last", policy=policy)
        assert row.decode_flops_per_token == decode.total
        assert (
            row.decode_flops_per_token
            != flops_per_token(small(), 3, context=9, position="last").total
        )


def test_training_has_no_cache_policy():
    with pytest.raises(ValueError, match="policy='per_loop' has no effect on training"):
        flops_per_token(small(), 2, context=8, training=True, policy="per_loop")
