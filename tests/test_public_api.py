"""The front door stays what it is: names, signatures, and what importing it costs."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import depthdial
from depthdial.api.model import Completion, Model

ROOT = Path(__file__).parents[1]
NAMES = {
    "Completion",
    "DepthSweep",
    "Model",
    "ModelConfig",
    "Recipe",
    "TrainResult",
    "__version__",
    "load",
    "resume",
    "sweep",
    "train",
}


def parameters(function: object) -> str:
    """Parameter names; `*` before those that must be named, `=` after those with a default."""
    shown, named = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            shown.append("*")
            named = True
        prefix = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        suffix = "" if parameter.default is parameter.empty else "="
        shown.append(f"{prefix}{parameter.name}{suffix}")
    return ", ".join(shown)


def test_the_public_names_are_frozen() -> None:
    assert set(depthdial.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_can_be_reached(name: str) -> None:
    assert getattr(depthdial, name) is not None


def test_signature_of_load() -> None:
    assert parameters(depthdial.load) == "path_or_id, *, device="


def test_signature_of_generate() -> None:
    assert parameters(Model.generate) == (
        "self, prompts, *, num_loops=, max_new_tokens=, temperature=, top_k=, top_p=, min_p=, "
        "seed=, stop=, cache_policy=, exit_rule=, exit_threshold=, step_sizes=, logprobs="
    )


def test_signature_of_train() -> None:
    from depthdial.api.model import train

    assert parameters(train) == "recipe, *, root=, observer=, **overrides"
    assert parameters(depthdial.train) == parameters(train)


def test_signature_of_resume() -> None:
    assert parameters(depthdial.resume) == "run, *, observer=, **overrides"


def test_signature_of_sweep() -> None:
    assert parameters(depthdial.sweep) == (
        "model, data, *, loops=, context=, stride=, rows_per_forward=, precision=, trained_loops="
    )


def test_fields_of_a_model_and_a_completion() -> None:
    assert [field.name for field in dataclasses.fields(Model)] == ["looped_lm", "tokenizer"]
    assert [field.name for field in dataclasses.fields(Completion)] == [
        "text",
        "num_loops",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "mean_loops",
        "logprobs",
    ]
    assert isinstance(Model.config, property)


def test_b60_train_stays_a_function_after_training_was_imported() -> None:
    """A package of that name would hide the documented function from its first import on."""
    import depthdial.training.pretrain as pretrain

    with pytest.raises(ValueError, match="'tiny-txt' is neither"):
        depthdial.train("tiny-txt")
    assert depthdial.training.pretrain is pretrain


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sweeep'"):
        _ = depthdial.sweeep


def test_importing_the_package_and_reading_a_recipe_needs_no_torch() -> None:
    program = (
        "import sys; from depthdial.api.recipes import load_recipe; load_recipe('tiny-text'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
