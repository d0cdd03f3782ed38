"""tools/numerics.py sees what changes, and its record holds whatever the package registers.

The whole comparison is `make numerics`; here are its rules, on made-up numbers and one tiny model.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel

from depthdial.config import (
    LETTERS,
    POLICIES,
    DepthConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    SamplerName,
    cache_rule,
)
from depthdial.config.policies import Grouping, Persists, ReadsMissing
from depthdial.convert.methods import METHODS
from depthdial.model.presets import preset_names
from depthdial.model.stopping_rules import STOPPING_RULES
from depthdial.recipes import recipe_names

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
MODULES = (
    "numerics",
    "numerics_measures",
    "numerics_models",
    "numerics_sections",
    "numerics_training",
)


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """tools/numerics.py as a module; tools/ is no package."""
    path, before = ROOT / "tools" / "numerics.py", list(sys.path)
    spec = importlib.util.spec_from_file_location("numerics", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["numerics"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def models(tool):
    return sys.modules["numerics_models"]


@pytest.fixture(scope="module")
def runs(tool):
    return sys.modules["numerics_training"]


@pytest.fixture(scope="module")
def record(tool):
    return tool.read_record()[1]


# ---- what a comparison says


@pytest.fixture
def run(tool, tmp_path, monkeypatch, capsys):
    """Runs the tool on one made-up case; gives exit code and output."""
    monkeypatch.setattr(tool, "RECORD", tmp_path / "record.json")
    # `measure` sets them for good: a command of its own process may.
    for name in ("COLUMNS", "NO_COLOR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")

    def given(entries: dict[str, Any] | Exception) -> dict[str, Any]:
        if isinstance(entries, Exception):
            raise entries
        return entries

    def run_tool(*arguments: str, cases: dict[str, Any]) -> tuple[int, str]:
        def section(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
            yield from ((name, lambda x=x: given(x)) for name, x in cases.items())

        monkeypatch.setattr(tool, "SECTIONS", {"made up": section})
        capsys.readouterr()
        return tool.main(list(arguments)), capsys.readouterr().out

    return run_tool


def case(**changes: Any) -> dict[str, Any]:
    """Entries of every kind, some of them changed."""
    values = torch.linspace(-1, 2, 50, dtype=torch.float64)
    return {"case": {"x": values, "ids": [3, 1], "loss": 2.5, "plan": ["k  1"]} | changes}


def test_the_same_numbers_pass(run):
    assert run("--record", cases=case())[0] == 0
    code, out = run(cases=case())
    assert code == 0 and out.startswith("4 entries are bit-equal, 0 within 1e-12, 0 differ")


def nudged(size: float) -> torch.Tensor:
    values = case()["case"]["x"].clone()
    values[17] += size * float(values.norm())
    return values


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"x": nudged(1e-9)}, "case / x"),
        ({"x": nudged(float("nan"))}, "case / x"),
        ({"x": case()["case"]["x"].flip(0)}, "case / x"),
        ({"x": case()["case"]["x"].reshape(5, 10)}, "[50], is float64 [5, 10]"),
        ({"x": case()["case"]["x"].float()}, "was float64 [50], is float32 [50]"),
        ({"ids": [3, 2]}, "[1] was 1, is 2"),
        ({"ids": [3]}, "was [3, 1], is [3]"),
        ({"loss": 2.5 + 1e-9}, "was 2.5, is 2.500000001"),
        ({"loss": float("nan")}, "was 2.5, is nan"),
        ({"loss": None}, "was 2.5, is null"),
        ({"plan": ["k  2"]}, 'was "k  1", is "k  2"'),
    ],
)
def test_a_changed_number_is_reported(run, changes, shown):
    run("--record", cases=case())
    code, out = run(cases=case(**changes))
    assert code == 1 and "3 entries are bit-equal, 0 within 1e-12, 1 differ" in out
    assert shown in out


def test_another_order_of_a_sum_is_counted_apart(run):
    run("--record", cases=case())
    code, out = run(cases=case(x=nudged(1e-14), loss=2.5 * (1 + 1e-15)))
    assert code == 0 and "2 entries are bit-equal, 2 within 1e-12, 0 differ" in out
    assert "made up / case / x" in out


def test_a_missing_entry_and_a_missing_case_are_reported(run):
    run("--record", cases=case() | {"other": {"ids": [1]}})
    fewer = {"case": {"ids": [3, 1], "loss": 2.5, "plan": ["k  1"]}}
    code, out = run(cases=fewer)
    assert code == 1 and "2 differ" in out
    assert "made up / case / x  is in the record alone" in out
    assert "made up / other  is in the record alone" in out


def test_a_new_entry_is_reported_and_added_without_touching_the_others(run, tool):
    run("--record", cases=case())
    code, out = run(cases=case(more=[1]))
    assert code == 1 and "made up / case / more  is not in the record" in out
    recorded = tool.RECORD.read_text()
    assert run("--add", cases=case(more=[1], loss=2.6))[0] == 1
    assert tool.RECORD.read_text() == recorded
    assert run("--add", cases=case(more=[1]))[0] == 0
    assert run(cases=case(more=[1]))[0] == 0


def test_a_case_that_fails_is_reported_and_not_recorded_and_the_others_still_count(run, tool):
    both = case() | {"other": {"ids": [1]}}
    run("--record", cases=both)
    recorded = tool.RECORD.read_text()
    failing = both | {"case": RuntimeError("no such option")}
    code, out = run(cases=failing)
    assert code == 1 and out.startswith("1 entries are bit-equal, 0 within 1e-12, 1 differ")
    assert "made up / case / (failed)" in out and "RuntimeError: no such option" in out
    assert run("--add", cases=failing)[0] == run("--record", cases=failing)[0] == 1
    assert tool.RECORD.read_text() == recorded


def test_a_weight_moved_by_a_billionth_is_seen_in_a_real_model(tool, models, record):
    model = models.tiny_model("plain")
    expected = {"s": {"c": {k: v for k, v in record["tiny"]["plain"].items() if "logits" in k}}}

    def verdict():
        made = sys.modules["numerics_measures"].measured(model, has_gradients=False)
        wanted = {name: made[name] for name in expected["s"]["c"] if name in made}
        return tool.compare(expected, {"s": {"c": tool.kept(wanted)}})

    # Not bit for bit: kernels differ from machine to machine.
    absent = [x for x in verdict().wrong if x.what != "is in the record alone"]
    assert not absent
    with torch.no_grad():
        model.core_stack[0].mixer.q_proj.weight[0, 0] += 1e-9
    moved = {x.where for x in verdict().wrong if x.what != "is in the record alone"}
    assert {"s / c / logits k=1", "s / c / logits k=4", "s / c / logits, cached"} <= moved


# ---- what the record holds

ADD = "give it a case in tools/numerics_*.py and run: python tools/numerics.py --add"


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("golden", [path.parent.name for path in GOLDEN.glob("*/model.safetensors")]),
        ("cache", POLICIES),
        ("train", [f"sampler {name}" for name in get_args(SamplerName)]),
        ("tiny", [f"preset {name}" for name in preset_names()]),
        ("plan", [*preset_names(), *recipe_names()]),
    ],
)
def test_the_record_holds_all_that_is_registered(record, section, names):
    assert names and set(names) - record[section].keys() == set(), ADD


@pytest.mark.parametrize(("section", "names"), [("convert", METHODS), ("exits", STOPPING_RULES)])
def test_the_record_holds_every_method_and_rule(record, section, names):
    words = [case.replace(",", "").split() for case in record[section]]
    assert [name for name in names if not any(name in case for case in words)] == [], ADD


def test_every_case_that_would_run_is_in_the_record(tool, record, tmp_path):
    assert list(record) == list(tool.SECTIONS)
    for section, cases in tool.SECTIONS.items():
        (tmp_path / section).mkdir()
        names = {name for name, _ in cases(tmp_path / section)}
        assert names == record[section].keys(), ADD


def test_the_policies_of_the_record_show_every_part_of_a_rule(models):
    config = ModelConfig.from_dict(models.BASE)
    rules = [cache_rule(policy, config) for policy in models.policy_names()]
    for kind, part in (
        (Grouping, "grouping"),
        (ReadsMissing, "reads_missing"),
        (Persists, "persists"),
    ):
        assert set(get_args(kind)) <= {getattr(rule, part) for rule in rules}


NOT_NUMERIC = {
    "model_type", "architectures", "format_version", "trained_loops", "exit_gate_stale",
    "vocab_size", "max_context", "head_dim", "d_model", "num_heads", "num_loops", "d_ff", "split",
}  # fmt: skip
"""Fields that say what a file is, and sizes that every tiny model sets."""


def parts(annotation: Any) -> Iterator[Any]:
    """Literal values, config classes and plain types inside an annotation."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation is bool:
        yield from (True, False)
    elif get_args(annotation) and get_origin(annotation) not in (tuple, dict, list):
        for argument in get_args(annotation):
            yield from parts(argument)
    else:
        yield annotation


def wanted(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field, value, or "set" for a value other than the default) to be seen."""
    for name, field in kind.model_fields.items():
        if name in NOT_NUMERIC:
            continue
        for part in parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from wanted(part, f"{prefix}{name}.")
            elif isinstance(part, (str, bool)) or part is None or part is type(None):
                yield f"{prefix}{name}", None if part is type(None) else part
            elif isinstance(part, type) or get_origin(part) is not None:
                yield f"{prefix}{name}", "set"


def seen(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The same of one config."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from seen(value, f"{prefix}{name}.")
            continue
        if value is None or isinstance(value, (str, bool)):
            yield f"{prefix}{name}", value
        if value is not None and (field.is_required() or value != field.default):
            yield f"{prefix}{name}", "set"


def test_every_value_of_every_model_field_is_in_a_tiny_model(models):
    configs = [ModelConfig.from_dict(models.tiny_values(name)) for name in models.tiny_names()]
    found = {pair for config in configs for pair in seen(config)}
    assert sorted(set(map(str, wanted(ModelConfig))) - set(map(str, found))) == [], ADD
    assert set(LETTERS) <= {letter for config in configs for letter in config.sublayers}


@pytest.mark.parametrize(
    ("group", "kind"),
    [("depth", DepthConfig), ("optim", OptimConfig), ("objective", ObjectiveConfig)],
)
def test_every_value_of_depth_optimizer_and_objective_is_in_a_run(runs, group, kind):
    changes = [{"depth": {"sampler": name} | x} for name, x in runs.SAMPLERS.items()]
    changes += [*runs.RUNS.values(), *runs.DISTILLED.values()]
    values = [runs.n.merged(runs.RECIPE.get(group, {}), x.get(group, {})) for x in changes]
    found = {pair for x in values for pair in seen(kind.from_dict(x))}
    assert sorted(set(map(str, wanted(kind))) - set(map(str, found))) == [], ADD


@pytest.mark.parametrize("method", METHODS)
def test_every_choice_of_every_method_is_in_a_conversion(tool, method):
    kind, cases = METHODS[method].options, sys.modules["numerics_sections"].CONVERSIONS
    given = [x for name, _, x in cases if name == method]
    options = [{k: v for k, v in x.items() if k in kind.model_fields} for x in given]
    found = {pair for x in options for pair in seen(kind.from_dict(x))}
    choices = {(name, value) for name, value in wanted(kind) if value != "set"}
    assert choices - found == set(), ADD
