"""Small files that ask for anything: refused before anything is built, wherever they enter."""

import json
import tracemalloc

import pytest

from depthdial.cache.loop_counts import check_num_loops
from depthdial.config import ModelConfig, Recipe
from depthdial.config.limits import (
    MAX_CONFIG_BYTES,
    MAX_LOOPS,
    MAX_SHOWN,
    MAX_SUBLAYERS,
    MAX_YAML_BYTES,
    MAX_YAML_VALUES,
    shortened,
)
from depthdial.config.text import load_yaml, read_mapping
from depthdial.model.checkpoint import read_config
from depthdial.model.count import plan
from depthdial.recipes import recipe_file

MiB = 2**20
RECIPE = Recipe.from_file(recipe_file("tiny-text"))
TOO_MANY = f"more than {MAX_YAML_VALUES:,} values"


def chain(first, repeat):
    """YAML whose every line names the one before nine times: few bytes, 9^9 values."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {repeat(','.join([f'*a{i - 1}'] * 9))}" for i in range(1, 10)]
    return "\n".join(lines)


BOMBS = {
    "lists": (chain("[x]", lambda names: f"[{names}]"), TOO_MANY),
    "merged groups": (chain("{x: 1}", lambda names: f"{{<<: [{names}]}}"), TOO_MANY),
    "a list in itself": ("a: &a [*a]", "an alias .* stands inside what it is the alias of"),
    "brackets": ("a: " + "[" * 100, "nests groups deeper than 32 levels"),
}


def quick(read, *arguments, kind=ValueError, match):
    """It is refused in these words, and little memory is held on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=match):
            read(*arguments)
        assert tracemalloc.get_traced_memory()[1] < 30 * MiB
    finally:
        tracemalloc.stop()


# ---- numbers


@pytest.mark.parametrize("config", [ModelConfig, Recipe])
def test_f31_every_whole_number_and_every_list_of_numbers_has_a_largest_value(config):
    """A field without one would be the next way in."""
    schema = config.model_json_schema()
    unlimited = []

    def visit(node, where):
        if isinstance(node, dict):
            if (
                node.get("type") == "integer"
                and not {
                    "maximum",
                    "exclusiveMaximum",
                    "const",
                }
                & node.keys()
            ):
                unlimited.append(where)
            if node.get("type") == "array" and "maxItems" not in node:
                if node["items"].get("type") == "integer":
                    unlimited.append(where)
            for key, inner in node.items():
                visit(inner, f"{where}.{key}")
        elif isinstance(node, list):
            for position, inner in enumerate(node):
                visit(inner, f"{where}.{position}")

    visit(schema, "")
    assert unlimited == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_loops": 10**9}, "max_loops=1000000000: .* less than or equal to 1024"),
        ({"max_loops": 10**9, "num_loops": 10**9}, "num_loops=1000000000: .* or equal to 1024"),
        ({"trained_loops": [10**9]}, "trained_loops.0=1000000000: .* or equal to 1024"),
        ({"split": [0, 30_000_000, 0]}, "split.1=30000000: .* or equal to 20000"),
        ({"split": [8000, 8000, 8000]}, "adds up to 24,000 sublayers; at most 20,000"),
        ({"layout": "AF" * 10**6}, "layout='AFAF.* at most 20000 characters"),
        ({"segments": [2] * 10**5, "split": [0, 20_000, 0]}, "segments=.* at most 20000 items"),
        ({"value_embeddings": list(range(10**5))}, "value_embeddings=.* at most 20000 items"),
        ({"max_context": 10**12}, "max_context=1000000000000: .* or equal to 16777216"),
        ({"vocab_size": 10**15}, "vocab_size=1000000000000000: .* or equal to 2147483647"),
        ({"d_model": 2**62}, "d_model=4611686018427387904: .* or equal to 2147483647"),
        (
            {"loop_lora": {"rank": 2, "sets_by_loop": [0] * 10**5}},
            "loop_lora.sets_by_loop=.* at most 1024 items",
        ),
    ],
)
def test_f31_absurd_sizes_of_a_model_are_refused_at_once(changes, match):
    values = RECIPE.model.to_dict() | changes
    with pytest.raises(ValueError, match=match) as caught:
        ModelConfig.from_dict(values)
    assert len(str(caught.value)) < 6 * MAX_SHOWN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.max_loops", 10**9),
        ("depth.num_depth_slices", 10**9),
        ("depth.fixed_loops", 10**9),
        ("depth.listed_loops", [2] * 10**5),
        ("depth.backprop_loops", 10**9),
        ("train.steps", 10**15),
        ("data.context", 10**12),
    ],
)
def test_f31_absurd_numbers_of_a_recipe_are_refused_at_once(key, value):
    with pytest.raises(ValueError, match=key):
        RECIPE.replace(**{key: value})


def test_f31_the_largest_model_that_is_read_takes_no_time():
    """The limits themselves are no way in."""
    values = RECIPE.model.to_dict() | {"split": [0, MAX_SUBLAYERS, 0], "max_loops": MAX_LOOPS}
    config = ModelConfig.from_dict(values)
    assert len(config.sublayers) == MAX_SUBLAYERS and len(config.trained_at) == MAX_LOOPS


@pytest.mark.parametrize("k", [MAX_LOOPS + 1, 10**6])
def test_f31_a_request_for_absurd_loops_is_refused(k):
    with pytest.raises(ValueError, match="at most 1,024 loops"):
        check_num_loops(k)
    with pytest.raises(ValueError, match="at most 1,024 loops"):
        plan(RECIPE.model, num_loops=[1, k], context=64)
    assert check_num_loops(MAX_LOOPS) == MAX_LOOPS


# ---- files


@pytest.mark.parametrize("name", BOMBS)
def test_f31_yaml_that_grows_is_refused(name, tmp_path):
    text, match = BOMBS[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    quick(read_mapping, path, match=match)
    quick(Recipe.from_file, path, match=match)
    quick(ModelConfig.from_file, path, match=match)


def test_f31_a_few_aliases_are_read():
    assert load_yaml("a: &a [1, 2]\nb: [*a, *a]") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


@pytest.mark.parametrize(("suffix", "most"), [("json", MAX_CONFIG_BYTES), ("yaml", MAX_YAML_BYTES)])
def test_f31_a_file_of_settings_has_a_largest_size(tmp_path, suffix, most):
    path = tmp_path / f"recipe.{suffix}"
    with path.open("wb") as file:
        file.truncate(most + 1)
    quick(read_mapping, path, match=f"has {most + 1:,} bytes; a .* has at most {most:,}")


def test_f31_a_model_folder_of_ours_is_read_with_the_same_limits(tmp_path):
    values = RECIPE.model.to_dict() | {"max_loops": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(values))
    quick(read_config, tmp_path, match="config.json: max_loops=1000000000")


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert shortened("x" * MAX_SHOWN) == "x" * MAX_SHOWN
    assert shortened("a" * 600 + "b" * 600, 10) == "aaaaa ... bbbbb"
