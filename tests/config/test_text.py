"""Reading config files: damaged, ambiguous and non-JSON input is named, never guessed at."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml

from depthdial.api.model import load_recipe
from depthdial.config import ModelConfig, Recipe
from depthdial.config.text import load_json, load_yaml, parse_json


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb: 2\na: 3", "c:\n  a: 1\n\n  a: 1", "{a: 1,\n\n a: 2}"],
    ids=["top", "in", "{}"],
)
def test_a_key_given_twice_in_yaml_is_refused_with_both_lines(text: str) -> None:
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if "a:" in line]
    with pytest.raises(yaml.YAMLError) as caught:
        load_yaml(text)
    assert str(caught.value).startswith(
        f"key 'a' is given twice, in line {lines[0]} and in line {lines[1]}."
    )


def test_a_merged_key_may_be_given_again() -> None:
    values = load_yaml("x: &x {a: 1, b: 1}\ny:\n  <<: *x\n  a: 2")
    assert values["y"] == {"a": 2, "b": 1}


def test_a_key_given_twice_in_json_is_refused() -> None:
    with pytest.raises(ValueError, match="key 'a' is given twice"):
        load_json('{"b": {"a": 1, "a": 1}}')


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_with_a_key_given_twice_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"twice.{suffix}"
    path.write_text('{"name": "a", "name": "b"}')
    with pytest.raises(ValueError, match=f"twice.{suffix} is not valid .*'name' is given twice"):
        Recipe.from_file(path)


def test_dates_are_text_and_typed_floats_are_numbers() -> None:
    assert load_yaml("{a: 2020-01-01, b: 1e-3}") == {"a": "2020-01-01", "b": 1e-3}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datetime.date(2020, 1, 1), r"train.steps=datetime.date\(2020, 1, 1\) is of type date"),
        ({1: 2}, r"train.steps=\{1: 2\}: the key 1 is of type int"),
        (b"x", r"train.steps=b'x' is of type bytes"),
    ],
)
def test_a_value_that_is_not_json_is_refused_with_its_key(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny-text", {"train.steps": value})


@pytest.mark.parametrize("number", ["1e400", "-1e400", ".nan", ".inf"])
def test_numbers_that_are_not_finite_are_refused_with_their_key(number: str) -> None:
    with pytest.raises(ValueError, match=r"^optim.betas.1=(-?inf|nan): .* finite number"):
        load_recipe("tiny-text", {"optim.betas": [0.9, load_yaml(number)]})


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_that_is_not_utf8_is_named_with_the_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"config.{suffix}"
    path.write_bytes(b'{"vocab_size": \xff}')
    with pytest.raises(ValueError, match=rf"config.{suffix} is damaged .*0xff at 15"):
        ModelConfig.from_file(path)


def test_a_truncated_json_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"vocab_size": 3')
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        ModelConfig.from_file(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 4301, "[-" + "1" * 9000])
def test_f11_json_that_no_reader_holds_is_a_plain_error(text):
    with pytest.raises(ValueError, match="nest too deeply|digits; at most 4,300 go"):
        parse_json(text)


def test_f11_the_largest_numbers_are_read_exactly():
    assert parse_json("1" * 4300) == int("1" * 4300)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("betas", [1, 0.95], "optim.betas.0=1"),
        ("betas", [0.9, 1.0], "optim.betas.1=1.0"),
        ("momentum", 1, "optim.momentum=1"),
    ],
)
def test_f32_a_momentum_that_lets_no_gradient_in_is_refused_with_the_config(
    key: str, value: object, named: str
) -> None:
    """It was refused by the optimizer, after data and model had been made; or never trained."""
    with pytest.raises(ValueError, match=f"^{named}: Input should be less than 1"):
        load_recipe("tiny-text", {f"optim.{key}": value})


def test_f32_a_momentum_just_below_one_is_taken() -> None:
    recipe = load_recipe("tiny-text", {"optim.betas": [0, 0.9999], "optim.momentum": 0.9999})
    assert recipe.optim.betas == (0, 0.9999)


# ---- plain scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("-3", -3), ("+5", 5), ("0", 0), ("0.5", 0.5), (".5", 0.5), ("5.", 5.0),
        ("1e-3", 1e-3), ("1.5E+2", 150.0), ("-0.0", 0.0), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", None),
    ],
)  # fmt: skip
def test_f19_plain_decimal_numbers_are_numbers(text: str, value: object) -> None:
    found = load_yaml(f"a: {text}")["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["010", "-010", "0o10", "0x10", "0b11", "1_000", "1:30", "1:30.5", "00.5", "1e", "0x", "10h",
     "yes", "no", "on", "off", "y", "\u0663"],
)  # fmt: skip
def test_f19_what_yaml_1_1_takes_for_another_number_is_text(text: str) -> None:
    """010 was read as 8, and 1:30 as 90."""
    assert load_yaml(f"a: {text}") == {"a": text}
    assert load_yaml(f"[{text}]") == [text]


@pytest.mark.parametrize("text", ["010", "1:30", "0x10", "1_000"])
def test_f19_a_number_field_refuses_it_in_files_and_flags(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    shipped = load_recipe("tiny-text", {}).to_dict()
    shipped["train"].pop("steps")
    lines = yaml.safe_dump(shipped, sort_keys=False)
    path.write_text(lines.replace("train:\n", f"train:\n  steps: {text}\n"), encoding="utf-8")
    match = rf"train.steps='{text}': .*valid integer. Write it in plain decimal digits"
    with pytest.raises(ValueError, match=match):
        Recipe.from_file(path)
    with pytest.raises(ValueError, match=match):
        load_recipe("tiny-text", {"train.steps": load_yaml(text)})


def test_f19_a_tag_does_not_smuggle_another_number_in() -> None:
    assert load_yaml("a: !!int 10") == {"a": 10}
    for text in ("!!int 010", "!!int 1:30", "!!float 1_0.5", "!!int 0x1"):
        with pytest.raises(yaml.YAMLError, match="is no plain decimal number"):
            load_yaml(f"a: {text}")


@pytest.mark.parametrize("flags", [("--context", "010"), ("--margin", "1_0"), ("--context", "0x9"),
                                   ("--num-loops", "1,02"), ("--context", "\u0663")])  # fmt: skip
def test_f19_flags_take_plain_decimal_numbers_alone(flags: tuple[str, str], cli, tiny_run) -> None:
    done = cli("sweep", tiny_run, "--baseline", tiny_run, *flags)
    assert done.code == 2 and flags[0] in done.err and flags[1].split(",")[-1] in done.err
