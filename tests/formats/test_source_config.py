"""Source configs count their keys and name what is wrong with a value."""

import pytest

from depthdial.formats.source_config import SourceConfig


def test_every_key_is_counted_once_read():
    source = SourceConfig({"a": 1, "b": {"c": 2, "d": 3}, "e": None, "f": 4})
    source.take("a")
    source.section("b").take("c")
    source.ignore("e")
    assert source.unused() == ["b.d", "f"]
    with pytest.raises(ValueError, match=r"keys without a known meaning.*'b\.d'.*'f'"):
        source.check_all_read()


def test_keys_of_the_library_have_no_effect():
    assert (
        SourceConfig({"torch_dtype": "bfloat16", "return_dict": True, "id2label": {}}).unused()
        == []
    )


def test_an_unopened_section_is_unread_as_a_whole():
    assert SourceConfig({"b": {"c": 2}}).unused() == ["b"]


@pytest.mark.parametrize("value", [True, 0, -1, 2.0, "2", None, float("nan")])
def test_counts_are_positive_whole_numbers(value):
    with pytest.raises(ValueError, match="positive whole number"):
        SourceConfig({"n": value}).count("n")


@pytest.mark.parametrize("value", [True, 0, -1.0, "2", float("nan")])
def test_numbers_are_positive(value):
    with pytest.raises(ValueError, match="positive number"):
        SourceConfig({"n": value}).number("n")


def test_true_is_not_one_and_false_is_not_zero():
    with pytest.raises(ValueError, match="cannot do"):
        SourceConfig({"n": True}).expect("n", 1)
    with pytest.raises(ValueError, match="cannot do"):
        SourceConfig({"n": 0}).expect("n", False)


def test_a_section_that_is_no_group_is_refused():
    with pytest.raises(ValueError, match="'b' is 3, not a group of keys"):
        SourceConfig({"b": 3}).section("b")
