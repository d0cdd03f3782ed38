"""The `plan` command: memory, FLOPs and cache of a model from its configuration alone.

The numbers come from `model/count/costs.py`; here are flags, what a name stands for, and tables.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import jsonargparse

from depthdial.cli.console import result_console
from depthdial.cli.options import Options, UsageError, loop_counts, new_parser, number
from depthdial.cli.tables import (
    flops,
    loop_range,
    separated,
    short_count,
    shown_loops,
    size,
    table,
    tables_by_loops,
)
from depthdial.config import (
    CachePolicy,
    DepthConfig,
    ModelConfig,
    Recipe,
    count_slots,
    nearest_name,
)
from depthdial.config.limits import MAX_CONTEXT
from depthdial.config.text import read_mapping

if TYPE_CHECKING:
    from depthdial.model.count import Plan

MOST_LOOPS_SHOWN = 16
MOST_LOOPS_IN_MEMORY = 8
"""Columns of the table of memory; the powers of two and the largest beyond so many."""
BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}


def plan_parser() -> jsonargparse.ArgumentParser:
    """Flags of `plan`."""
    parser = new_parser(
        "plan",
        usage="NAME [--num-loops K ...] [--context N] [--batch N] ...",
        description="Memory, FLOPs and cache of a model at several loop counts, and what training\n"
        "it costs, from its configuration alone.\n\n"
        "  depthdial plan gpt-0.5b --num-loops 1 2 4 --context 131072\n"
        "  depthdial plan elr-0.5b --switch-frac 0.75",
    )
    parser.add_argument(
        "model",
        metavar="NAME",
        help="preset or recipe (`depthdial list`), recipe file, config.json, run, model directory",
    )
    parser.add_argument(
        "--num-loops",
        nargs="+",
        metavar="K",
        help="loop counts, each at least 1, e.g. 1 2 4 (those it is made for)",
    )
    parser.add_argument("--context", metavar="N", help="tokens per sequence (the model's context)")
    parser.add_argument("--batch", default="1", metavar="N", help="sequences at a time (1)")
    parser.add_argument(
        "--dtype", choices=list(BYTES_PER_VALUE), default="bf16", help="weights and cache (bf16)"
    )
    parser.add_argument(
        "--override-frac",
        metavar="X",
        help="share of training slices kept at one loop, in [0, 1] (the recipe's, or 0)",
    )
    parser.add_argument(
        "--switch-frac",
        metavar="X",
        help="share of training before mixed depth starts, in [0, 1] (the recipe's, or 0)",
    )
    return parser


def run_plan(options: Options) -> int:
    """Print what a model costs."""
    from depthdial.model.count import plan
    from depthdial.model.count.cache import planned_policies
    from depthdial.training.depth_schedule import DepthSchedule, mean_loops

    config, depth, source = _described(options.model)
    context = number(options.context, "--context", whole=True)
    if context is not None and context > MAX_CONTEXT:
        raise UsageError(f"--context {context} is beyond {MAX_CONTEXT:,}, the most of any model.")
    batch_size = number(options.batch, "--batch", whole=True)
    fractions = {
        "override_frac": number(options.override_frac, "--override-frac", whole=False),
        "switch_frac": number(options.switch_frac, "--switch-frac", whole=False),
    }
    depth = depth.replace(**{name: x for name, x in fractions.items() if x is not None})
    if options.num_loops is None:
        loops = shown_loops(config.max_loops, MOST_LOOPS_SHOWN)
        in_memory = shown_loops(config.max_loops, MOST_LOOPS_IN_MEMORY)
    else:
        loops = in_memory = loop_counts(options.num_loops)
    # Of the schedule, only its distribution matters here: neither seed nor length.
    schedule = DepthSchedule.from_config(depth, max_loops=config.max_loops, seed=0, total_steps=1)
    plans = {
        policy: plan(
            config,
            num_loops=loops,
            context=config.max_context if context is None else context,
            batch_size=batch_size,
            bytes_per_value=BYTES_PER_VALUE[options.dtype],
            policy=policy,
            mean_loops=mean_loops(schedule),
            mixed_frac=1 - depth.switch_frac,
        )
        for policy in planned_policies(config)
    }
    _print_plan(plans, config, source=source, dtype=options.dtype, in_memory=in_memory)
    _print_training(plans[config.loop.cache_policy], config, depth)
    _print_guesses(options.model)
    return 0


def _described(name: str) -> tuple[ModelConfig, DepthConfig, str]:
    """Model and depth settings behind a name, and what kind of name it is.

    Raises: ValueError or FileNotFoundError.
    """
    from depthdial.model.presets import preset, preset_names
    from depthdial.recipes import recipe_file, recipe_names

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        if not _is_recipe(path):
            return ModelConfig.from_file(path), DepthConfig(), f"model {path}"
        recipe = _complete_recipe(path, f"recipe {path}")
        return _as_trained(recipe.model, path.parent), recipe.depth, f"recipe {path}"
    if name in recipe_names():
        recipe = _complete_recipe(recipe_file(name), f"recipe {name}")
        return recipe.model, recipe.depth, f"recipe {name}"
    if path.suffix in (".yaml", ".yml", ".json") or path.parent != Path("."):
        raise FileNotFoundError(f"no configuration at {path}")
    if name not in preset_names():
        known = [*preset_names(), *recipe_names()]
        raise ValueError(f"'{name}' is no preset, recipe or file.{nearest_name(name, known)}")
    return preset(name), DepthConfig(), f"preset {name}"


def _as_trained(config: ModelConfig, folder: Path) -> ModelConfig:
    """The model of a recipe; of a run's recipe, with the loop counts that the run has trained."""
    from depthdial.api.paths import model_folder

    if not (folder / "checkpoints").is_dir():
        return config
    newest = ModelConfig.from_file(model_folder(folder) / "config.json")
    return config.with_trained(newest.trained_at)


def _complete_recipe(path: Path, source: str) -> Recipe:
    """A recipe with a model of its own. Raises: ValueError for one that starts from a folder."""
    from depthdial.recipes import needs_init

    if needs_init(path):
        raise ValueError(
            f"{source} has no model of its own: it starts from a model directory (`depthdial train "
            "... --init MODEL`). Plan that model: depthdial plan MODEL"
        )
    return Recipe.from_file(path)


def _is_recipe(path: Path) -> bool:
    """Whether a config file is of a whole run, not of a model alone. Damaged ones count as such:
    reading them says what is wrong.
    """
    try:
        values = read_mapping(path)
    except ValueError:
        return True
    return "model" in values or "model_type" not in values


def _print_plan(
    plans: dict[CachePolicy, Plan],
    config: ModelConfig,
    *,
    source: str,
    dtype: str,
    in_memory: Collection[int],
) -> None:
    """Compute per loop count, and memory at those in `in_memory`."""
    console, own = result_console(), plans[config.loop.cache_policy]
    parameters, split = own.parameters, "/".join(map(str, config.split))
    extra = f" ({short_count(parameters.modulation)} modulation)" if config.modulation else ""
    console.print(
        f"{source}\n"
        f"{short_count(parameters.total)} parameters{extra}, {size(own.weight_bytes)} in {dtype}\n"
        f"{split} sublayers in prelude/core/coda, {_loops_text(config)}\n",
        soft_wrap=True,
    )
    trained = config.trained_at
    marks = {row.num_loops: "" if row.num_loops in trained else "*" for row in own.rows}
    compute = [
        (
            f"{row.num_loops}{marks[row.num_loops]}",
            f"{row.executed_sublayers}",
            f"{row.depth_ratio:.2f}",
            flops(row.prompt_flops_per_token),
            flops(row.decode_flops_per_token),
        )
        for row in own.rows
    ]
    columns = ("k", "sublayers", "x k=1", "prompt, per token", "decode, per token")
    title = f"Compute at {own.context:,} tokens of context"
    console.print(table(title, columns, compute), "")
    shown = {k: f"k = {k}{mark}" for k, mark in marks.items() if k in in_memory}
    has_states = count_slots(config.sublayers, "state") > 0
    what = "keys, values and states" if has_states else "keys and values"
    title = f"Cached {what}, batch {own.batch_size}, {dtype}, by cache policy"
    parts = tables_by_loops(title, "policy", _memory_rows(plans, own, shown), shown.values())
    console.print(*separated(parts))
    if any(marks.values()):
        console.print(f"* {_mark_text(config)}")
    if own.is_beyond_max_context:
        console.print(f"longer than the context the model is meant for ({config.max_context:,})")


def _loops_text(config: ModelConfig) -> str:
    made_for = f"made for 1 to {config.max_loops} loops"
    if config.trained_loops is None:
        return made_for
    return f"{made_for}; training ran {loop_range(config.trained_loops)}"


def _mark_text(config: ModelConfig) -> str:
    """What a marked loop count is."""
    if config.trained_loops is None:
        return f"more loops than the max_loops = {config.max_loops} that the model is made for"
    return f"outside training, which ran {loop_range(config.trained_loops)}"


def _memory_rows(
    plans: dict[CachePolicy, Plan], own: Plan, loops: Collection[int]
) -> dict[str, list[str]]:
    """Bytes at each loop count: a row per policy, two where a prompt needs another size."""

    def cells(plan: Plan, field: str) -> list[str]:
        return [size(getattr(row, field)) for row in plan.rows if row.num_loops in loops]

    rows: dict[str, list[str]] = {}
    for policy, plan in plans.items():
        peak, steady = cells(plan, "cache_peak_bytes"), cells(plan, "cache_steady_bytes")
        if peak == steady:
            rows[policy] = steady
        else:
            rows |= {f"{policy}, prompt": peak, f"{policy}, after it": steady}
    rows[f"weights and {own.cache_policy}"] = cells(own, "memory_peak_bytes")
    return rows


def _print_training(plan: Plan, config: ModelConfig, depth: DepthConfig) -> None:
    """ELR's ratio of training cost, and the depth draws it holds for."""
    if depth.fixed_loops is not None:
        draws = f"always {depth.fixed_loops} loop{'s' if depth.fixed_loops > 1 else ''}"
    else:
        draws = f"{depth.sampler} draws from 1..{config.max_loops} loops"
    if depth.override_frac:
        draws += f", {depth.override_frac:g} kept at one loop"
    result_console().print(
        f"\nTraining: {plan.training_cost_ratio:.2f} times the executed sublayers of one-loop "
        f"training on the same\ntokens.\nDepth: {draws}, mean {plan.mean_training_loops:.2f}, "
        f"in {1 - depth.switch_frac:.0%} of the steps"
    )


def _print_guesses(name: str) -> None:
    """Which fields of a preset its source leaves open."""
    from depthdial.model.presets import GUESSED_FIELDS

    guessed = GUESSED_FIELDS.get(name.removesuffix("-modulated"))
    if guessed:
        result_console().print(f"\nGuessed, as not published: {', '.join(guessed)}")
