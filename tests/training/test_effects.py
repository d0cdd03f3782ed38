"""No option is accepted without effect: what each refusal is about, and that every key counts."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from every_key import (
    BASES,
    COMMON,
    VARIANTS,
    base_values,
    change,
    changed,
    merged,
    outcome,
    placed,
)

from depthdial.cli.options import recipe_keys
from depthdial.config import (
    DataConfig,
    DepthConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    effects,
)
from depthdial.data import corpora
from depthdial.data.documents import Document
from depthdial.model.checkpoint import read_config, save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.training import pretrain
from depthdial.training.init_model import check_optim_options, first_model

TABLES = {
    LoopConfig: effects.LOOP_EFFECTS,
    ModelConfig: effects.MODEL_EFFECTS,
    DataConfig: effects.DATA_EFFECTS,
    DepthConfig: effects.DEPTH_EFFECTS,
    OptimConfig: effects.OPTIM_EFFECTS,
    Recipe: effects.RECIPE_EFFECTS,
}
OPTIONS_PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def recipe(base: str | None = None, **changes: Any) -> Recipe:
    """COMMON or one of the bases with changes; `model__d_ff=3` for model.d_ff."""
    values = merged(COMMON, {} if base is None else BASES[base])
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return Recipe.from_dict(merged(values, dotted))


# What the issue names, one by one.

TIME = {"kind": "time_step", "embed_dim": 4}
REPLACE = {"update": "replace"}
ONE = {"model__max_loops": 1, "model__num_loops": 1, "model__loop": REPLACE}
FIXED_1 = {"sampler": "fixed", "fixed_loops": 1}
F_ALONE = {"model__layout": "F", "model__num_heads": None, "model__num_kv_heads": None,
           "model__head_dim": None}  # fmt: skip
NGPT = {"model__norm": "ngpt", "model__ngpt": {"alpha_init": 0.3, "scale_std": 0.2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Everything after a switch that never comes.
        ({"depth__switch_frac": 1.0}, "switch_frac=1.0 never switches"),
        ({"depth__switch_frac": 0.1}, "depth.switch_frac=0.1 has no effect with train.steps=8"),
        # One loop.
        ({**ONE, "depth": {"sampler": "sync_uniform"}}, "depth.sampler='sync_uniform' has no ef"),
        ({**ONE, "depth": {"sampler": "listed", "listed_loops": [1]}}, "depth.sampler='listed'"),
        ({**ONE, "depth": {"num_depth_slices": 4}}, "depth.num_depth_slices=4 has no effect with"),
        ({**ONE, "depth": {"override_frac": 0.25}}, "depth.override_frac=0.25 has no effect with"),
        ({**ONE, "depth": {"switch_frac": 0.5}}, "depth.switch_frac=0.5 has no effect because"),
        (
            {**ONE, "depth": {"depth_scope": "slice_group", "slices_per_draw": 2}},
            "depth.depth_scope='slice_group' has no effect",
        ),
        # Rows of one loop.
        ({"depth": FIXED_1 | {"backprop_loops": 1}}, "depth.backprop_loops=1 has no effect"),
        (
            {"depth": FIXED_1 | {"curriculum": "linear", "curriculum_frac": 0.5}},
            "curriculum='linear' has no effect with fixed_loops or mean_loops of 1",
        ),
        (
            {
                "depth": {
                    "sampler": "poisson_truncated",
                    "mean_loops": 1,
                    "curriculum": "linear",
                    "curriculum_frac": 0.5,
                }
            },
            "curriculum='linear' has no effect with fixed_loops or mean_loops of 1",
        ),
        ({"depth": FIXED_1 | {"switch_frac": 0.5}}, "depth.switch_frac=0.5 has no effect because"),
        # Samplers that are another one under a longer name.
        ({"depth": {"sampler": "sync_weighted"}}, "the same as 'sync_uniform'"),
        ({"depth": {"sampler": "independent_weighted"}}, "the same as 'independent_uniform'"),
        ({"depth__override_frac": 1.0}, "the same as 'fixed' with fixed_loops=1"),
        (
            {"depth": {"sampler": "independent_uniform", "num_depth_slices": 1}},
            "the same as 'sync_uniform'",
        ),
        (
            {"depth": {"depth_scope": "slice_group", "slices_per_draw": 8}},
            "depth_scope='slice_group' has no effect where all 8 slices share one draw",
        ),
        # A gate that is not there.
        ({"model__loop": REPLACE | {"gate_bypass": "first_only"}}, "there is no gate"),
        (
            {"model__loop": REPLACE | {"gate_bypass": "first_only"}, "model__modulation": TIME},
            "there is no gate",
        ),
        (
            NGPT | {"model__ngpt__gate_scale_init": 2.0},
            "ngpt.gate_scale_init=2.0 has no effect without output_gate",
        ),
        # Keys that no layer reads.
        (NGPT | {"model__final_norm": "none", "model__norm_eps": 0.1}, "norm_eps=0.1 has no effe"),
        (
            {"model__layout": "SF", "model__sliding": {"window": 2}, "model__rope_theta": 5.0},
            "rope_theta=5.0 has no effect because no layer of the layout 'SF' reads it",
        ),
        (F_ALONE | {"model__rope_theta": 5.0}, "rope_theta=5.0 has no effect because no layer"),
        (F_ALONE | {"model__positions": "none"}, "positions='none' has no effect because no lay"),
        (F_ALONE | {"model__num_heads": 2}, "num_heads=2 has no effect because no layer"),
        (F_ALONE | {"model__qk_norm": "rms"}, "qk_norm='rms' has no effect because no layer"),
        ({"model__rotary_frac": 0.5, "model__rope_theta": 5.0}, "where two channels of a head tu"),
        ({"model__layout": "A"}, "d_ff=8 has no effect because no layer of the layout 'A'"),
        (
            {"model__layout": "A", "model__d_ff": None, "model__ff": "gelu"},
            "ff='gelu' has no effect because no layer of the layout 'A'",
        ),
        ({"model__split": [0, 2, 0], "model__core_d_ff": 4}, "d_ff=8 has no effect because every"),
        (
            {"model__split": [1, 1, 2], "model__loop": {"cache_policy": "last_step"}},
            "loop.cache_policy='last_step' has no effect because no layer of the core 'F'",
        ),
        (
            {"model__split": [1, 1, 2], "model__loop": {"local_window": 2}},
            "loop.local_window=2 has no effect because no layer of the core 'F'",
        ),
        (
            {**ONE, "depth": FIXED_1, "model__loop": REPLACE | {"cache_policy": "collapse_mean"}},
            "loop.cache_policy='collapse_mean' has no effect with max_loops=1",
        ),
        (
            {"model__loop_lora": {"rank": 2, "sets_by_loop": [0, 1, 2, 3]}},
            r"sets_by_loop=\[0, 1, 2, 3\] names the sets of 4 loops, but .* max_loops=3",
        ),
        # Parts of a schedule that round to nothing.
        (
            {"train__steps": 5, "optim__min_lr_frac": 0.1},
            "optim.min_lr_frac=0.1 has no effect with train.steps=5 and optim.decay_frac=0.15",
        ),
        (
            {"depth": {"sampler": "fixed", "fixed_loops": 3, "curriculum": "linear",
                       "curriculum_frac": 0.1}},
            "depth.curriculum_frac=0.1 has no effect with train.steps=8",
        ),
        # Data.
        ({"data__cache_dir": "x"}, "cache_dir='x' has no effect without data.corpus"),
        (
            {"data": {"path": "prepared", "context": 16, "cache_dir": "x"}},
            "cache_dir='x' has no effect without data.corpus",
        ),
    ],
)  # fmt: skip
def test_f18_an_option_without_effect_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__lr_by_pattern": {"*": 0.01}}, "optim.lr=0.02 has no effect: every trained"),
        (
            {"optim__adamw_lr": 0.1, "optim__freeze": ["*_proj.weight"]},
            "optim.lr=0.02 has no effect: .* from optim.lr_by_pattern or optim.adamw_lr",
        ),
        (
            {"optim__adamw_lr": 0.1, "optim__lr_by_pattern": {"[!cp]*": 0.1, "[cp]*norm.*": 0.2}},
            "optim.adamw_lr=0.1 has no effect because no trained parameter takes it",
        ),
        (
            {"optim__momentum": 0.5, "optim__freeze": ["*_proj.weight"]},
            "optim.momentum=0.5 has no effect because no block matrix is trained",
        ),
        (
            {"optim__eps": 0.1, "optim__weight_decay": 0.1, "optim__freeze": ["[!cp]*", "*norm*"]},
            "optim.eps=0.1 has no effect because only block matrices are trained",
        ),
        (
            {"optim__freeze": ["embedding.*", "lm_head.*", "*_proj.weight"]},
            "optim.weight_decay=0.5 has no effect because no trained parameter has weight decay",
        ),
        (
            {"optim__freeze": ["embedding.*", "core_stack.*", "core_stack.0.*"]},
            "'core_stack.0.*' has no effect: other patterns freeze all that it matches",
        ),
    ],
)
def test_f18_an_option_of_the_optimizer_that_no_parameter_takes_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_optim_options(recipe(**changes))


def test_f18_a_late_switch_of_one_loop_runs_needs_a_modulation_to_add(tmp_path):
    start = recipe("elr", depth__switch_frac=0.0)
    save_model(first_model(start, starts_late=False), tmp_path / "start")
    late = {"sampler": "fixed", "fixed_loops": 1, "switch_frac": 0.5}
    again = recipe(model=None, train__init=str(tmp_path / "start"), depth=late)
    with pytest.raises(ValueError, match="depth.switch_frac=0.5 has no effect: .* already"):
        first_model(again, starts_late=True)


def test_f18_a_rise_too_short_to_be_one_is_said_not_refused(tmp_path):
    class Recorder:
        def __init__(self) -> None:
            self.notices: list[str] = []

        def record(self, record: dict[str, Any]) -> None:
            return None

        def notice(self, text: str) -> None:
            self.notices.append(text)

    observer = Recorder()
    short = recipe(optim__warmup_frac=0.1, optim__decay_frac=0.1, train__steps=2)
    pretrain.train(short, root=tmp_path, observer=observer)
    assert [text.partition(" ")[0] for text in observer.notices] == [
        "optim.warmup_frac=0.1", "optim.decay_frac=0.1",
    ]  # fmt: skip


# ---- every key counts


def test_f18_the_tables_name_real_keys_with_defaults():
    for config, table in TABLES.items():
        for rule in table:
            for key in rule.keys:
                assert _default_exists(config, key), f"{config.__name__}: {key}"


def _default_exists(config: Any, key: str) -> bool:
    *groups, name = key.split(".")
    for group in groups:
        found = _configs_in(config.model_fields[group].annotation)
        config = next(kind for kind in found if name in kind.model_fields or len(found) == 1)
    return not config.model_fields[name].is_required()


def _configs_in(annotation: Any) -> list[Any]:
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _configs_in(part)]


def test_f18_every_key_of_a_recipe_has_other_values_to_try():
    assert sorted(VARIANTS) == sorted(key.name for key in recipe_keys())


def test_f18_the_page_of_silent_keys_names_real_keys():
    assert documented().keys() <= VARIANTS.keys()


def test_f18_every_named_value_of_a_key_is_tried():
    def literals(annotation: Any) -> Iterator[str]:
        if get_origin(annotation) is Literal:
            yield from (value for value in get_args(annotation) if isinstance(value, str))
        for part in get_args(annotation):
            yield from literals(part)

    def walk(config: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for name, field in config.model_fields.items():
            for kind in _configs_in(field.annotation):
                yield from walk(kind, f"{prefix}{name}.")
            yield from ((f"{prefix}{name}", value) for value in literals(field.annotation))

    tried = {key: set(map(str, values)) for key, values in VARIANTS.items()}
    tried["data.task"].add("pointer_program")
    tried["train.tracker"].add("wandb")
    untried = {
        (key, value) for key, value in walk(Recipe, "") if value not in tried.get(key, {value})
    }
    assert not untried, "data.task is tried with other keys; wandb is no part of the dev extra"


@pytest.fixture(scope="module")
def places(
    tiny_folder: Path, byte_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Real folders of the base recipes."""
    root = tmp_path_factory.mktemp("every-key")
    other = shutil.copytree(byte_base, root / "other")
    save_model(LoopedLM(read_config(other), seed=9), other)
    return {
        "TEXT": str(tiny_folder / "data"),
        "FOLDER": str(byte_base),
        "OTHER": str(other),
        "CACHE": str(root / "cache"),
        "ANOTHER CACHE": str(root / "another-cache"),
    }


def documented() -> dict[str, str]:
    """Keys that may change no result, and why, from the table of docs/options.md."""
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", OPTIONS_PAGE.read_text("utf-8"), re.M)
    return {key: why for keys, why in rows for key in re.findall(r"`([\w.]+)`", keys)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tiny_texts: list[str]) -> None:
    """Hundreds of runs need no look at git, and a corpus of nine documents will do."""
    documents = [Document(f"{1881 + i}", text) for i, text in enumerate(tiny_texts)]
    monkeypatch.setattr(pretrain, "collect_provenance", lambda **_: {})
    monkeypatch.setattr(corpora, "_read_annual_messages", lambda: iter(documents))


def vary(base: str, places: dict[str, str], root: Path, *, share: int = 1) -> dict[str, set[str]]:
    """What became of the changes of one base: keys by `changed`, `refused` and `silent`.

    Args: share: one of so many changes is tried, chosen by a hash of its name.
    """
    start = Recipe.from_dict(base_values(base, places))
    before = outcome(start, root)
    found: dict[str, set[str]] = {"changed": set(), "refused": set(), "silent": set()}
    for key, values in VARIANTS.items():
        for value in values:
            name = f"{base} {key} {value}"
            if int(hashlib.sha256(name.encode()).hexdigest(), 16) % share:
                continue
            changes = placed(change(key, value), places)
            try:
                other = Recipe.from_dict(merged(start.to_dict(), changes))
                if other == start:
                    continue
                after = outcome(other, root)
            except (ValueError, FileNotFoundError):
                found["refused"].add(key)
                continue
            except FloatingPointError:
                # A run that diverges is another result.
                found["changed"].add(key)
                shutil.rmtree(root / other.name)
                continue
            found["changed" if changed(before, after) else "silent"].add(key)
    return found


def test_f18_a_sample_of_all_keys_changes_the_result_or_is_refused(places, tmp_path):
    allowed = documented()
    for base in ("elr", "windows, text", "healing"):
        silent = vary(base, places, tmp_path, share=60)["silent"]
        assert silent <= allowed.keys(), base


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_f18_every_key_changes_the_result_or_is_refused_in_every_base(places, tmp_path):
    allowed, found = documented(), {}
    for base in BASES:
        found[base] = vary(base, places, tmp_path)
        silent = found[base]["silent"]
        assert silent <= allowed.keys(), f"{base}: {sorted(silent - allowed.keys())}"
    matters = set().union(*(outcomes["changed"] for outcomes in found.values()))
    never = {key for key, why in allowed.items() if why.startswith("never")}
    assert VARIANTS.keys() - matters == never


# ---- modulation that comes late


def test_f27_a_late_switch_to_time_steps_is_refused_at_the_start():
    with pytest.raises(ValueError, match="depth.switch_frac=0.5 would add .*kind='time_step'"):
        recipe("learned positions, time", depth__switch_frac=0.5)


def test_f27_time_steps_without_a_switch_and_of_a_trained_folder_with_one_run(tmp_path):
    base = "learned positions, time"
    first = pretrain.train(recipe(base, train__steps=2, objective={}), root=tmp_path)
    start = str(first.path / "checkpoints" / "step_2")
    again = recipe(
        base, model=None, train__init=start, depth__switch_frac=0.5, objective={}, name="again"
    )
    assert pretrain.train(again, root=tmp_path).status == "finished"
