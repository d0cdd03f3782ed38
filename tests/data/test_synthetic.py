"""Pointer programs against a slow solver, and their statistics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthdial.data.synthetic import (
    REACH_PROBABILITIES,
    VOCAB_SIZE,
    WORDS,
    DepthAccuracy,
    PointerPrograms,
    accuracy_by_depth,
    count_by_depth,
    function_table,
    pointer_tokenizer,
)
from depthdial.data.tokenizer import Tokenizer

RECORDED_PROGRAM = [[0, 1, 12, 9, 30, 10, 19, 20]]
RECORDED_VALUES = [[0, 1, 5, 3, 7, 5, 4, 4]]


def solve(tokens, table, place):
    """(value, depth) at one position, by following the chain."""
    reach, operand = divmod(tokens[place], 8)
    if reach == 0:
        return operand, 1
    value, depth = solve(tokens, table, place - reach)
    return int(table[operand][value]), depth + 1


@given(seed=st.integers(0, 2**63 - 1), first=st.integers(0, 2**40), context=st.integers(1, 40))
def test_values_and_depths_equal_a_slow_solver(seed, first, context):
    source = PointerPrograms(seed, context=context)
    batch, depths_BT = source.rows(first, 2), source.depths(first, 2)
    for row in range(2):
        tokens = batch.tokens_BT[row].tolist()
        solved = [solve(tokens, source.table, place) for place in range(context)]
        assert [value for value, _ in solved] == batch.targets_BT[row].tolist()
        assert [depth for _, depth in solved] == depths_BT[row].tolist()


@given(
    seed=st.integers(0, 2**63 - 1),
    context=st.integers(1, 40),
    first=st.integers(0, 10**6),
    count=st.integers(2, 6),
)
def test_rows_are_pure_in_their_number(seed, context, first, count):
    together = PointerPrograms(seed, context=context).rows(first, count).tokens_BT
    for i in reversed(range(count)):
        alone = PointerPrograms(seed, context=context).rows(first + i, 1).tokens_BT
        assert torch.equal(alone, together[i : i + 1])


def test_programs_of_a_seed_are_the_recorded_ones():
    """Old runs must resume on new versions: neither programs nor table may ever change."""
    source = PointerPrograms(3, context=8)
    assert source.rows(2, 1).tokens_BT.tolist() == RECORDED_PROGRAM
    assert source.rows(2, 1).targets_BT.tolist() == RECORDED_VALUES


def test_no_pointer_leaves_its_row():
    tokens_BT = PointerPrograms(0).rows(0, 500).tokens_BT
    assert (tokens_BT // 8 <= torch.arange(32)).all()


def test_reaches_have_their_probabilities_and_operands_are_uniform():
    tokens = PointerPrograms(1).rows(0, 4000).tokens_BT[:, 3:].flatten()
    reach_frac = torch.bincount(tokens // 8) / len(tokens)
    assert torch.allclose(reach_frac, torch.tensor(REACH_PROBABILITIES), atol=0.005)
    assert torch.allclose(torch.bincount(tokens % 8) / len(tokens), torch.tensor(0.125), atol=0.005)


def test_deep_chains_are_present():
    depths = PointerPrograms(0).depths(0, 2000).float()
    assert 4.0 < depths.mean() < 5.5
    assert (depths >= 10).float().mean() > 0.05


def test_train_and_validation_share_no_program():
    rows = {
        split: {
            tuple(row) for row in PointerPrograms(0, split=split).rows(0, 2000).tokens_BT.tolist()
        }
        for split in ("train", "valid")
    }
    assert len(rows["train"]) == len(rows["valid"]) == 2000
    assert not rows["train"] & rows["valid"]


def test_table_depends_on_the_task_seed_alone():
    one, two = PointerPrograms(1), PointerPrograms(2, split="valid")
    assert (one.table == two.table).all()
    assert (one.table != PointerPrograms(1, task_seed=1).table).any()
    assert (one.rows(0, 1).tokens_BT != two.rows(0, 1).tokens_BT).any()


def test_table_holds_permutations():
    assert (torch.from_numpy(function_table(5)).sort(dim=1).values == torch.arange(8)).all()


def test_value_and_literal_share_one_id():
    targets_BT = PointerPrograms(0).rows(0, 100).targets_BT
    assert {WORDS[i] for i in targets_BT.unique().tolist()} == {f"c{v}" for v in range(8)}


def test_typed_program_is_encoded_and_solved():
    source, tokenizer = PointerPrograms(0), pointer_tokenizer()
    answers = source.answers(torch.tensor([tokenizer.encode("c3 r1f2 r2f5")]))
    expected = [3, int(source.table[2][3]), int(source.table[5][3])]
    assert answers.values_BT.tolist() == [expected]
    assert answers.depths_BT.tolist() == [[1, 2, 2]]


def test_pointer_before_the_start_is_refused_by_its_word():
    ids = pointer_tokenizer().encode("c3 r2f1")
    with pytest.raises(ValueError, match="'r2f1' at position 1 points before the start"):
        PointerPrograms(0).answers(torch.tensor([ids]))


def test_unknown_id_is_refused():
    with pytest.raises(ValueError, match="token ids 0..32, known are 0..31"):
        PointerPrograms(0).answers(torch.tensor([[0, VOCAB_SIZE]]))


def test_tokenizer_round_trip_through_its_file(tmp_path):
    pointer_tokenizer().save(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    ids = PointerPrograms(0).rows(0, 1).tokens_BT[0].tolist()
    text = tokenizer.decode(ids)
    assert text.split() == [WORDS[i] for i in ids]
    assert tokenizer.encode(text) == ids
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (32, None)


def test_tokenizer_loads_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    pointer_tokenizer().save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("c3 r1f2")["input_ids"] == [3, 10]


def test_word_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="cannot encode .*c9"):
        pointer_tokenizer().encode("c3 c9")


def test_accuracy_by_depth_counts_each_depth_apart():
    depths = torch.tensor([[1, 1, 2, 4]])
    result = accuracy_by_depth(
        torch.tensor([[3, 0, 5, 1]]), torch.tensor([[3, 3, 5, 1]]), depths, 3
    )
    assert result == [DepthAccuracy(1, 1, 2), DepthAccuracy(2, 1, 1), DepthAccuracy(3, 0, 0)]
    assert [depth.accuracy for depth in result] == [0.5, 1.0, None]


def test_counts_by_depth_stay_apart_for_each_row():
    depths = torch.tensor([[1, 1, 2], [1, 3, 2]])
    counts = count_by_depth(
        torch.tensor([[3, 0, 5], [0, 1, 5]]), torch.tensor([[3, 3, 5], [3, 1, 5]]), depths,
        max_depth=2,
    )  # fmt: skip
    assert counts.correct_BP.tolist() == [[1, 1], [0, 1]]
    assert counts.total_BP.tolist() == [[2, 1], [1, 1]]


def test_accuracy_by_depth_refuses_different_shapes():
    one = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="differ in shape"):
        accuracy_by_depth(one, one[:, :1], one, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0, "context": 0}, "context=0"),
        ({"seed": 0, "split": "test"}, "split 'test' is unknown"),
        ({"seed": 0, "task_seed": -2}, "seed=-2"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PointerPrograms(**options)
