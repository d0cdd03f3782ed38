"""Rules between published tensors and ours: both ways, and damaged tensors named."""

import pytest
import torch
from goldens import open_golden

from depthdial.formats.tensors.rules import (
    Buffer,
    Copy,
    Regroup,
    Rename,
    Reshape,
    Split,
    rules_to_export,
)


def test_rules_work_both_ways():
    source = {
        "a": torch.randn(3, 2),
        "b": torch.randn(6, 2),
        "c": torch.arange(8.0).reshape(4, 2),
        "d": torch.randn(2, 1, 2, 2),
        "e": torch.randn(4),
    }
    rules = [
        Rename("a", "x"),
        Split("b", ("q", "k"), (4, 2)),
        Regroup("c", 1, {"m": (2, 0), "n": (3, 1)}),
        Split("d", ("qb", "kb"), (4, 4), (2, 1, 2, 2)),
        Reshape("e", "y", (4,), (1, 4)),
    ]
    ours, back = {}, {}
    for rule in rules:
        ours |= rule.to_ours(source.__getitem__)
    assert torch.equal(ours["m"], source["c"][[2, 0]])
    assert torch.equal(ours["kb"], source["d"][1].flatten())
    assert ours["y"].shape == (1, 4)
    for rule in rules:
        back |= rule.to_source(ours.__getitem__)
    assert all(torch.equal(back[name], tensor) for name, tensor in source.items())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Split("t", ("a", "b"), (4, 4)), r"\[6, 2\].*8 rows"),
        (Regroup("t", 2, {"a": (0, 1)}), r"\[6, 2\].*4 rows"),
        (Reshape("t", "a", (5, 2), (10,)), r"asks for \[5, 2\]"),
    ],
)
def test_a_wrong_shape_names_tensor_and_both_shapes(rule, message):
    with pytest.raises(ValueError, match=message):
        rule.to_ours(lambda name: torch.zeros(6, 2))


def test_b49_zeroed_rotary_frequencies_are_refused():
    """A public file lost its frequencies on loading, and its model became blind to order."""
    opened = open_golden("llama")
    rules = opened.family.rules(opened.config, opened.values)
    buffer = next(rule for rule in rules if isinstance(rule, Buffer))
    right = 500000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    assert buffer.to_ours(lambda name: right) == {}
    assert buffer.to_ours(lambda name: right.bfloat16()) == {}
    with pytest.raises(ValueError, match="inv_freq' differs by 1 from"):
        buffer.to_ours(lambda name: torch.zeros(4))
    with pytest.raises(ValueError, match="differs by nan"):
        buffer.to_ours(lambda name: right / 0 * 0)


def test_a_buffer_knows_whether_its_bytes_can_be_made_again():
    buffer = Buffer("t", lambda: torch.ones(3), (3,), tolerance=0.1)
    assert buffer.to_keep({"t": torch.ones(3)}.__getitem__) == {}
    for stored in (torch.ones(3) + 0.01, torch.ones(3, dtype=torch.bfloat16)):
        assert buffer.to_keep({"t": stored}.__getitem__) == {"t": stored}


def test_without_an_origin_only_what_the_format_stores_is_written():
    rules = [
        Rename("a", "x"),
        Copy("b", "a", "x", is_exported=False),
        Buffer("c", lambda: torch.ones(1), (1,)),
    ]
    names = [rule.source_names for rule in rules_to_export(rules, None)]
    assert names == [("a",), ("c",)]
    assert rules_to_export(rules, ["a", "b"]) == rules[:2]


def test_a_table_of_another_shape_is_refused_before_it_is_made():
    """A config may ask for a table of any size; the stored one says what memory it takes."""

    def make():
        raise AssertionError("the table was made")

    with pytest.raises(ValueError, match=r"'t' has shape \[3\].*asks for \[1000000000000\]"):
        Buffer("t", make, (10**12,)).to_ours(lambda name: torch.ones(3))
