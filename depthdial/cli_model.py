"""Commands that look at a model: generate, plan, list. `sweep` is in `cli_sweep.py`.

Flags and values are in `cli_options.py`, layout in `cli_tables.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jsonargparse
import yaml
from rich.text import Text

from depthdial.cli_options import Options, UsageError, loop_counts, new_parser, number
from depthdial.cli_sweep import run_sweep, sweep_parser
from depthdial.cli_tables import flops, remark, result_console, short_count, size, table
from depthdial.config import (
    CACHE_POLICIES,
    CachePolicy,
    DepthConfig,
    ModelConfig,
    Recipe,
    check_cache_policy,
    nearest_name,
)
from depthdial.config_text import load_yaml

if TYPE_CHECKING:
    from rich.table import Table

    from depthdial.api import Completion
    from depthdial.model.count import Plan

BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}


def generate_parser() -> jsonargparse.ArgumentParser:
    """Flags of `generate`."""
    parser = new_parser(
        "generate",
        usage='MODEL "PROMPT" [--num-loops K] [--compare] [...]',
        description="Continue a text. The continuation goes to standard output.\n\n"
        '  depthdial generate runs/tiny-text "Fellow citizens" --num-loops 2\n'
        '  depthdial generate runs/tiny-text "Fellow citizens" --compare',
    )
    parser.add_argument("model", help="run, checkpoint, model directory, or hub id org/name")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument(
        "--num-loops",
        metavar="K",
        help="passes of the core, from 1 to what the model was trained for (the model's default); "
        "with --compare a list such as 1,2,4 (all trained ones)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="continue at several loop counts, one below another"
    )
    options = (
        (
            "--max-new-tokens",
            "N",
            None,
            "most tokens to generate, at least 1 (64, or fewer where the context ends)",
        ),
        (
            "--temperature",
            "X",
            "0",
            "0 takes the most likely token; else at least 1e-6, larger is flatter (0). The next "
            "three go with a temperature above 0",
        ),
        ("--top-k", "N", "0", "keep the N most likely tokens; 0 keeps all (0)"),
        ("--top-p", "X", "1", "keep the most likely tokens up to this probability, in (0, 1] (1)"),
        ("--min-p", "X", "0", "drop tokens below this fraction of the likeliest, in [0, 1] (0)"),
        ("--seed", "N", "0", "equal seeds give equal text, at least 0 (0)"),
    )
    for flag, metavar, default, text in options:
        parser.add_argument(flag, metavar=metavar, default=default, help=text)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before it; may be repeated",
    )
    parser.add_argument(
        "--cache-policy",
        metavar="NAME",
        help=f"cached keys and values: {', '.join(CACHE_POLICIES)}, or a published model's rule "
        "(the model's)",
    )
    parser.add_argument(
        "--exit-rule",
        metavar="NAME",
        help="end the loops of each new token by a rule, such as kl, latent_diff, argmax_stability "
        "or, with an exit gate, q_exit; --num-loops is then the most (none)",
    )
    parser.add_argument(
        "--exit-threshold",
        metavar="X",
        help="of the rule (the published one; q_exit has none)",
    )
    parser.add_argument("--device", default="cpu", help="torch device, e.g. cpu, cuda, mps (cpu)")
    return parser


def run_generate(options: Options) -> int:
    """Print one continuation, or one per loop count."""
    numbers = {
        "max_new_tokens": number(options.max_new_tokens, "--max-new-tokens", whole=True),
        "temperature": number(options.temperature, "--temperature", whole=False),
        "top_k": number(options.top_k, "--top-k", whole=True),
        "top_p": number(options.top_p, "--top-p", whole=False),
        "min_p": number(options.min_p, "--min-p", whole=False),
        "seed": number(options.seed, "--seed", whole=True),
        "exit_threshold": number(options.exit_threshold, "--exit-threshold", whole=False),
    }
    asked = None if options.num_loops is None else loop_counts(options.num_loops)
    if asked is not None and len(asked) > 1 and not options.compare:
        raise UsageError("several loop counts go with --compare; without it give one.")
    if options.exit_threshold is not None and options.exit_rule is None:
        raise UsageError("--exit-threshold goes with --exit-rule; name the rule, or leave it out.")
    if options.cache_policy is not None:
        try:
            check_cache_policy(options.cache_policy)
        except ValueError as error:
            raise UsageError(f"--cache-policy: {error}") from error
    from depthdial.api import load

    model = load(options.model, device=options.device)
    _check_trained(model.config, asked or [])
    default = range(1, model.config.max_loops + 1) if options.compare else [model.config.num_loops]
    results = []
    for num_loops in default if asked is None else asked:
        started = time.perf_counter()
        [completion] = model.generate(
            options.prompt,
            num_loops=num_loops,
            stop=options.stop,
            cache_policy=options.cache_policy,
            exit_rule=options.exit_rule,
            **numbers,
        )
        results.append((completion, time.perf_counter() - started))
    if options.compare:
        _print_comparison(options.prompt, results)
    else:
        [(completion, seconds)] = results
        print(completion.text)
        remark(f"k = {completion.num_loops}: {_spent(completion, seconds)}")
    return 0


def _check_trained(config: ModelConfig, loops: Sequence[int]) -> None:
    """Refuse loop counts that the model does not generate at. Raises: ValueError."""
    beyond = [k for k in loops if k > config.max_loops]
    if beyond and config.loop.beyond_max_loops == "refuse":
        raise ValueError(
            f"--num-loops {beyond[0]}: this model was made for 1 to {config.max_loops} loops and "
            "refuses to generate beyond. `depthdial sweep` measures what more loops do."
        )


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
        help="loop counts, each at least 1, e.g. 1 2 4 (all trained ones)",
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
    from depthdial.model.count_cache import planned_policies
    from depthdial.train.depth_schedule import DepthSchedule, mean_loops

    config, depth, source = _described(options.model)
    context = number(options.context, "--context", whole=True)
    batch_size = number(options.batch, "--batch", whole=True)
    fractions = {
        "override_frac": number(options.override_frac, "--override-frac", whole=False),
        "switch_frac": number(options.switch_frac, "--switch-frac", whole=False),
    }
    depth = depth.replace(**{name: x for name, x in fractions.items() if x is not None})
    if options.num_loops is None:
        loops = list(range(1, config.max_loops + 1))
    else:
        loops = loop_counts(options.num_loops)
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
    _print_plan(plans, config, source=source, dtype=options.dtype)
    _print_training(plans[config.loop.cache_policy], config, depth)
    _print_guesses(options.model)
    return 0


def list_parser() -> jsonargparse.ArgumentParser:
    """`list` has no flags of its own."""
    return new_parser(
        "list", usage="", description="Names that commands know: recipes, presets, corpora."
    )


def run_list(options: Options) -> int:
    """Print recipes, presets and corpora, one per line."""
    from depthdial.data.corpora import corpus_names, describe_corpus
    from depthdial.model.count import count_parameters
    from depthdial.model.presets import preset, preset_names
    from depthdial.recipes import recipe_file, recipe_names

    recipes = []
    for name in recipe_names():
        first_line = recipe_file(name).read_text(encoding="utf-8").partition("\n")[0]
        recipes.append((name, first_line.lstrip("# ")))
    presets = []
    for name in preset_names():
        config = preset(name)
        split = "/".join(map(str, config.split))
        parameters = short_count(count_parameters(config).total)
        presets.append(
            (name, f"{parameters} parameters, {split} sublayers, K = {config.max_loops}")
        )
    corpora = [(name, describe_corpus(name)) for name in corpus_names()]
    console = result_console()
    for title, rows in (
        ("Recipes: depthdial train NAME", recipes),
        ("Presets: depthdial plan NAME", presets),
        ("Corpora: --data.corpus NAME", corpora),
    ):
        console.print(table(title, ("", ""), rows, left=(0, 1)), "")
    return 0


COMMANDS: dict[str, tuple[Callable[[], jsonargparse.ArgumentParser], Callable[[Options], int]]] = {
    "sweep": (sweep_parser, run_sweep),
    "generate": (generate_parser, run_generate),
    "plan": (plan_parser, run_plan),
    "list": (list_parser, run_list),
}


def _print_comparison(prompt: str, results: list[tuple[Completion, float]]) -> None:
    """One row per loop count; the prompt once."""
    console = result_console()
    console.print(Text.assemble(("prompt  ", "dim"), prompt))
    rows = [(f"k = {c.num_loops}", c.text.strip("\n")) for c, _ in results]
    console.print(table("", ("", ""), rows, left=(0, 1)))
    for completion, seconds in results:
        remark(f"k = {completion.num_loops}: {_spent(completion, seconds)}")


def _spent(completion: Completion, seconds: float) -> str:
    """Tokens, speed and why it ended."""
    ended = {"stop": "ended by itself or at a stop text", "length": "cut at the limit"}
    mean = completion.mean_loops
    depth = "" if mean is None else f" at {mean:.2f} loops per token"
    return (
        f"{completion.prompt_tokens} prompt tokens, {completion.completion_tokens} new{depth}, "
        f"{completion.completion_tokens / seconds:,.0f} tokens/s, "
        f"{ended[completion.finish_reason]}"
    )


def _described(name: str) -> tuple[ModelConfig, DepthConfig, str]:
    """Model and depth settings behind a name, and what kind of name it is.

    Raises: ValueError or FileNotFoundError.
    """
    from depthdial.api import load_recipe
    from depthdial.model.presets import preset, preset_names
    from depthdial.recipes import recipe_names

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        if not _is_recipe(path):
            return ModelConfig.from_file(path), DepthConfig(), f"model {path}"
        recipe = Recipe.from_file(path)
        return recipe.model, recipe.depth, f"recipe {path}"
    if name in recipe_names():
        recipe = load_recipe(name)
        return recipe.model, recipe.depth, f"recipe {name}"
    if path.suffix in (".yaml", ".yml", ".json") or path.parent != Path("."):
        raise FileNotFoundError(f"no configuration at {path}")
    if name not in preset_names():
        known = [*preset_names(), *recipe_names()]
        raise ValueError(f"'{name}' is no preset, recipe or file.{nearest_name(name, known)}")
    return preset(name), DepthConfig(), f"preset {name}"


def _is_recipe(path: Path) -> bool:
    """Whether a config file is of a whole run, not of a model alone. Damaged ones count as such:
    reading them says what is wrong.
    """
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError):
        return True
    return not isinstance(values, dict) or "model" in values or "model_type" not in values


def _print_plan(
    plans: dict[CachePolicy, Plan], config: ModelConfig, *, source: str, dtype: str
) -> None:
    """Compute and memory per loop count."""
    console, own = result_console(), plans[config.loop.cache_policy]
    parameters, split = own.parameters, "/".join(map(str, config.split))
    extra = f" ({short_count(parameters.modulation)} modulation)" if config.modulation else ""
    console.print(
        f"{source}\n"
        f"{short_count(parameters.total)} parameters{extra}, {size(own.weight_bytes)} in {dtype}\n"
        f"{split} sublayers in prelude/core/coda, trained with 1..{config.max_loops} loops\n",
        soft_wrap=True,
    )
    marks = {row.num_loops: "*" if row.is_beyond_max_loops else "" for row in own.rows}
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
    console.print(_memory_table(plans, own, marks=marks, dtype=dtype))
    if any(marks.values()):
        console.print(f"* outside training: more loops than max_loops = {config.max_loops}")
    if own.is_beyond_max_context:
        console.print(f"longer than the context the model is meant for ({config.max_context:,})")


def _memory_table(
    plans: dict[CachePolicy, Plan], own: Plan, *, marks: dict[int, str], dtype: str
) -> Table:
    """Bytes per loop count: a column for policies alike, two where a prompt needs another size."""
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for policy, plan in plans.items():
        sizes = tuple((row.cache_peak_bytes, row.cache_steady_bytes) for row in plan.rows)
        alike.setdefault(sizes, []).append(policy)
    columns: list[tuple[str, list[int]]] = []
    for sizes, policies in alike.items():
        names, peaks = "\n".join(policies), [peak for peak, _ in sizes]
        steady = [after for _, after in sizes]
        if peaks == steady:
            columns.append((names, steady))
        else:
            columns += [(f"{names}\nprompt", peaks), (f"{names}\nafter it", steady)]
    rows = []
    for idx, row in enumerate(own.rows):
        cells = [size(num_bytes[idx]) for _, num_bytes in columns]
        rows.append([f"{row.num_loops}{marks[row.num_loops]}", *cells, size(row.memory_peak_bytes)])
    headings = ["k", *(name for name, _ in columns), f"weights and\n{own.cache_policy}"]
    title = f"Cached keys and values, batch {own.batch_size}, {dtype}, by cache policy"
    return table(title, headings, rows)


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
