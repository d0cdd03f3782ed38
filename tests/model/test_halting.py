"""Exit distributions and what is read out by them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthdial.model.halting import (
    ExitGate,
    cumulative_exit,
    exit_distribution,
    mix_by_distribution,
    q_exit,
    select_by_loop,
)

gate_rows = st.lists(st.floats(-80, 80), min_size=1, max_size=9)


def row(values):
    """[1, 1, L]."""
    return torch.tensor([[values]], dtype=torch.float32)


@given(gate_rows)
def test_an_exit_distribution_sums_to_one_and_has_no_negative_entry(gates):
    p_BTL = exit_distribution(row(gates))
    assert float(p_BTL.min()) >= 0
    assert float(p_BTL.sum()) == pytest.approx(1, abs=1e-6)


@given(gate_rows)
def test_an_exit_distribution_is_the_product_rule_with_the_rest_at_the_end(gates):
    going, expected = 1.0, []
    stops = torch.sigmoid(torch.tensor(gates, dtype=torch.float64)).tolist()
    for stop in stops[:-1]:
        expected.append(going * stop)
        going *= 1 - stop
    assert exit_distribution(row(gates))[0, 0].tolist() == pytest.approx([*expected, going])


@given(gate_rows, st.floats(-80, 80))
def test_the_gate_of_the_last_loop_has_no_effect(gates, other):
    assert torch.equal(exit_distribution(row(gates)), exit_distribution(row([*gates[:-1], other])))


@given(gate_rows)
def test_q_zero_stops_after_the_first_loop(gates):
    assert q_exit(exit_distribution(row(gates)), 0.0).tolist() == [[1]]


@given(gate_rows, st.floats(1, 9))
def test_q_of_one_or_more_never_stops_before_the_last_loop(gates, q):
    """The sum of probabilities may round to 1 at the first loop; that is no exit."""
    assert q_exit(exit_distribution(row(gates)), q).tolist() == [[len(gates)]]


@given(gate_rows, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_q_never_stops_earlier(gates, first, second):
    p_BTL = exit_distribution(row(gates))
    low, high = sorted((first, second))
    assert int(q_exit(p_BTL, low)) <= int(q_exit(p_BTL, high))


def test_q_exit_stops_where_the_sum_reaches_q_exactly():
    p_BTL = row([0.25, 0.25, 0.5])
    assert [int(q_exit(p_BTL, q)) for q in (0.25, 0.2501, 0.5, 0.5001)] == [1, 2, 2, 3]


def test_probabilities_of_bf16_gates_are_summed_in_fp32():
    """A sum of 999 times 0.001 in bf16 stalls at 0.5."""
    p_BTL = torch.full((1, 1, 1000), 1e-3, dtype=torch.bfloat16)
    assert float(cumulative_exit(p_BTL)[0, 0, -1]) == pytest.approx(1, abs=1e-2)
    assert exit_distribution(p_BTL).dtype == torch.float32


def test_select_by_loop_takes_every_token_from_its_own_loop():
    logits = [torch.full((2, 2, 3), float(loop)) for loop in (1, 2, 3)]
    loops_BT = torch.tensor([[3, 1], [2, 2]])
    assert select_by_loop(logits, loops_BT)[..., 0].tolist() == [[3, 1], [2, 2]]


@pytest.mark.parametrize("count", [0, 4])
def test_select_by_loop_refuses_a_loop_without_logits(count):
    logits = [torch.zeros(1, 1, 3)] * 3
    with pytest.raises(ValueError, match=f"loop counts {count}.*1..3"):
        select_by_loop(logits, torch.tensor([[count]]))


def test_mixing_by_a_point_mass_selects():
    logits = [torch.randn(1, 2, 3) for _ in range(3)]
    p_BTL = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    mixed_BTV = mix_by_distribution(logits, p_BTL)
    assert torch.equal(mixed_BTV, select_by_loop(logits, torch.tensor([[2, 3]])))


def test_mixing_refuses_another_number_of_loops():
    with pytest.raises(ValueError, match="2 loops of logits, but 3 exit"):
        mix_by_distribution([torch.zeros(1, 1, 3)] * 2, torch.zeros(1, 1, 3))


@pytest.mark.parametrize("has_norm", [False, True])
def test_an_exit_gate_reads_the_state_or_its_layer_norm(has_norm):
    torch.manual_seed(0)
    gate, state_BTD = ExitGate(4, has_norm=has_norm), 3 + torch.randn(2, 3, 4)
    read_BTD = torch.nn.functional.layer_norm(state_BTD, (4,)) if has_norm else state_BTD
    expected_BT = (read_BTD * gate.linear.weight[0]).sum(-1) + gate.linear.bias
    torch.testing.assert_close(gate(state_BTD), expected_BT)


def test_a_bf16_exit_gate_gives_fp32_logits():
    gate = ExitGate(4, has_norm=True).bfloat16()
    assert gate(torch.randn(1, 2, 4, dtype=torch.bfloat16)).dtype == torch.float32
