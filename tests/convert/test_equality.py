"""The comparison of base and result: what it measures, what it refuses."""

import math

import pytest
import torch
from goldens import close, open_golden

from depthdial.convert.base_model import Converted, LoopPair
from depthdial.convert.equality import (
    Comparison,
    as_json,
    check_promise,
    compare,
    mean_kl,
    run_layers,
    widened,
)
from depthdial.convert.tying import ONE_LOOP


@pytest.fixture(scope="module")
def golden():
    return open_golden("llama")


def plan_of(model, promises="close", pairs=ONE_LOOP, matching=None, why_not=""):
    return Converted(model.config, model.state_dict(), pairs, promises, why_not, matching)


def measured(max_abs=0.0, is_identical=True):
    return Comparison(1, 2, max_abs, 0.25, is_identical, ())


def test_layers_and_logits_are_those_of_the_reference(golden):
    x = golden.vectors["input_ids"]
    logits, layers = run_layers(golden.model(), x, 1)
    close(logits, golden.vectors["logits"], 1e-4)
    assert [layer for layer, _ in layers] == list(range(6))
    for (_, output), expected in zip(layers, golden.vectors["layer_outputs"], strict=True):
        close(output, expected, 1e-4)


def test_layers_of_a_loop_come_once_per_loop(golden):
    model = golden.model(split=[2, 6, 4], max_loops=3)
    _, layers = run_layers(model, golden.vectors["input_ids"], 2)
    assert [layer for layer, _ in layers] == [0, 1, 2, 3, 1, 2, 3, 4, 5]


def test_a_model_equals_itself_bit_for_bit(golden):
    model = golden.model()
    [found] = compare(model, golden.model(), golden.vectors["input_ids"], plan_of(model))
    assert (found.max_abs, found.mean_kl, found.is_identical, found.is_close) == (0, 0, True, True)
    assert [(x.layer, x.loop_idx, x.max_abs) for x in found.layers] == [(i, 0, 0) for i in range(6)]


def test_a_change_shows_from_its_layer_on(golden):
    model, changed, x = golden.model(), golden.model(), golden.vectors["input_ids"]
    changed.core_stack[7].mixer.down_proj.weight[0] += 0.1
    [found] = compare(model, changed, x, plan_of(model))
    assert [layer.max_abs > 0 for layer in found.layers] == [False] * 3 + [True] * 3
    difference = (changed(x, num_loops=1) - model(x, num_loops=1)).abs().max()
    assert found.max_abs == pytest.approx(float(difference))
    assert not found.is_identical and found.mean_kl > 0


def test_each_pair_is_compared_at_its_own_loop_counts(golden):
    model, x = golden.model(split=[2, 6, 4], max_loops=3), golden.vectors["input_ids"]
    pairs = (LoopPair(2, 2), LoopPair(1, 3))
    same, different = compare(model, model, x, plan_of(model, pairs=pairs))
    assert (same.is_identical, different.is_identical) == (True, False)
    assert (different.base_loops, different.num_loops) == (1, 3)
    assert [(x.layer, x.loop_idx) for x in same.layers] == [
        *((0, 0), (1, 0), (2, 0), (3, 0)),
        *((1, 1), (2, 1), (3, 1), (4, 0), (5, 0)),
    ]
    assert different.layers == ()


def test_the_divergence_is_that_of_the_definition():
    """KL of (1/2, 1/2) to (1/4, 3/4) is ln 2 - ln(3) / 2; the second token agrees."""
    expected = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    given = torch.tensor([[[0.0, math.log(3)], [1.0, 0.0]]])
    assert mean_kl(expected, given) == pytest.approx((math.log(2) - math.log(3) / 2) / 2)


@pytest.mark.parametrize(
    ("promises", "found", "is_kept"),
    [
        ("bits", measured(), True),
        ("bits", measured(1e-6, False), False),
        ("close", measured(1e-6, False), True),
        ("close", measured(1e-4, False), True),
        ("close", measured(1.1e-4, False), False),
        ("close", measured(math.nan, False), False),
        ("none", measured(5.0, False), True),
    ],
)
def test_a_broken_promise_is_refused(golden, promises, found, is_kept):
    converted = plan_of(golden.model(), promises)
    if is_kept:
        check_promise("some-method", converted, [measured(), found])
    else:
        with pytest.raises(ValueError, match="'some-method' promises .* at 2 loops.*Nothing was"):
            check_promise("some-method", converted, [measured(), found])


def test_widened_tensors_are_shared_between_the_two():
    stored = torch.arange(6, dtype=torch.bfloat16)
    memo = {}
    first = widened({"a": stored, "b": torch.ones(2)}, torch.float32, memo)
    second = widened({"other": stored}, torch.float32, memo)
    assert first["a"].data_ptr() == second["other"].data_ptr()
    assert first["a"].dtype == first["b"].dtype == torch.float32


@pytest.mark.parametrize(
    ("promises", "stated"), [("bits", "identical"), ("close", "within 0.0001"), ("none", "none")]
)
def test_the_record_says_promise_reason_and_numbers(golden, promises, stated):
    model, x = golden.model(), golden.vectors["input_ids"]
    converted = plan_of(model, promises, why_not="a reason" if promises == "none" else "")
    record = as_json(converted, compare(model, model, x, converted))
    assert record["promise"] == stated
    assert record["why_none"] == ("a reason" if promises == "none" else None)
    [pair] = record["compared"]
    assert (pair["base_loops"], pair["num_loops"], pair["is_identical"]) == (1, 1, True)
    assert len(pair["layers"]) == 6
    assert pair["layers"][2].keys() == {"layer", "loop_idx", "max_abs_difference", "base_rms"}
