"""Commands that train: train, resume.

Flags and values are in `cli/options.py`. Torch is imported when a command runs, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jsonargparse
import yaml

from depthdial.cli.console import progress_console, remark, write
from depthdial.cli.options import (
    Options,
    UsageError,
    add_recipe_flags,
    new_parser,
    recipe_overrides,
)
from depthdial.cli.tables import short_count
from depthdial.report.terms import duration

if TYPE_CHECKING:
    from depthdial.config import Recipe
    from depthdial.training.pretrain import TrainResult

EXIT_CODES = {"finished": 0, "interrupted": 130, "terminated": 75}


def train_parser() -> jsonargparse.ArgumentParser:
    """Flags of `train`."""
    parser = new_parser(
        "train",
        usage="RECIPE [--init MODEL] [--root DIR] [--KEY VALUE ...]",
        description="Train a recipe into the folder ROOT/NAME. Ctrl-C saves and stops.\n\n"
        "  depthdial train tiny-text\n"
        "  depthdial train tiny-text --name wide --model.d_model 128 --train.steps 2000\n"
        "  depthdial train tiny-text --data.path my-data --model.vocab_size 4096\n"
        "  depthdial train heal-text --init models/elastic --train.steps 500",
    )
    parser.add_argument("recipe", help="a shipped recipe (`depthdial list`) or a YAML or JSON file")
    parser.add_argument(
        "--init",
        metavar="MODEL",
        help="start from this model directory, checkpoint or run, in place of the recipe's model; "
        "its tokenizer reads the text",
    )
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder of runs (runs)")
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole recipe as YAML and stop"
    )
    add_recipe_flags(parser)
    return parser


def run_train(options: Options) -> int:
    """Train, and say what came out and what can be done with it."""
    recipe = _recipe(options)
    if options.print_config:
        write(yaml.safe_dump(recipe.to_dict(), sort_keys=False), end="")
        return 0
    from depthdial.training import pretrain

    def start(observer: Any) -> TrainResult:
        return pretrain.train(recipe, root=options.root, observer=observer)

    return _train(recipe, start, first_step=0)


def resume_parser() -> jsonargparse.ArgumentParser:
    """Flags of `resume`."""
    # Brings torch, which the command needs anyway.
    from depthdial.training.session import RESUME_KEYS

    parser = new_parser(
        "resume",
        usage="RUN [--checkpoint step_N] [--KEY VALUE ...]",
        description="Continue a run from its newest intact checkpoint, as if it had never "
        "stopped.\nThe keys below may change from there on and are written to its config.json.\n\n"
        "  depthdial resume runs/tiny-text\n"
        "  depthdial resume runs/tiny-text --optim.lr 2e-3\n"
        "  depthdial resume runs/tiny-text --checkpoint step_500 --optim.lr 2e-3",
    )
    parser.add_argument("run", help="folder of the run, e.g. runs/tiny-text")
    parser.add_argument(
        "--checkpoint",
        metavar="step_N",
        help="go on from this older checkpoint, e.g. after a run diverged; later ones are renamed",
    )
    add_recipe_flags(parser, only=RESUME_KEYS)
    return parser


def run_resume(options: Options) -> int:
    """Continue, and report as `train` does."""
    from depthdial.api.paths import check_is_run
    from depthdial.config import Recipe
    from depthdial.training import pretrain
    from depthdial.training.run_dir import RunDir

    check_is_run(options.run, flag="--checkpoint")
    run = RunDir.open(options.run)
    recipe = Recipe.from_file(run.config_path)
    name = options.checkpoint
    steps = [s.step for s in run.checkpoints() if name in (None, s.path.name)]

    def start(observer: Any) -> TrainResult:
        return pretrain.resume(
            options.run, checkpoint=name, overrides=recipe_overrides(options), observer=observer
        )

    return _train(recipe, start, first_step=max(steps, default=0))


def _recipe(options: Options) -> Recipe:
    """The recipe of `train` with its flags.

    Raises: UsageError; ValueError or FileNotFoundError as `load_recipe`.
    """
    from depthdial.api.recipes import load_recipe

    overrides = recipe_overrides(options)
    if options.init is not None:
        if overrides.setdefault("train.init", options.init) != options.init:
            raise UsageError("--init and --train.init name two models; give one of them.")
    return load_recipe(options.recipe, overrides)


def _train(recipe: Recipe, start: Callable[[Any], TrainResult], *, first_step: int) -> int:
    """Run with a progress display on standard error; the result goes to standard output."""
    from depthdial.training.progress import RichObserver

    console = progress_console()
    steps = recipe.train.steps
    with RichObserver(recipe.name, steps=steps, first_step=first_step, console=console) as observer:
        result = start(observer)
    _print_result(result, recipe)
    return EXIT_CODES[result.status]


def _print_result(result: TrainResult, recipe: Recipe) -> None:
    """Where the run is, how far, at what cost, and its last validation losses."""
    from depthdial.training.run_dir import RunDir

    run = RunDir.open(result.path)
    training = run.read_provenance()["training"]
    write(
        f"{result.path}: {result.status} after {result.step:,} of {recipe.train.steps:,} steps, "
        f"{short_count(training['tokens'])} tokens, {duration(training['seconds'])}"
    )
    validations = [record for record in run.read_metrics() if "val/loss_k1" in record]
    if validations:
        last = validations[-1]
        losses = [
            f"k={k} {loss:.4f}"
            for k in range(1, recipe.model.max_loops + 1)
            if (loss := last.get(f"val/loss_k{k}")) is not None
        ]
        write(f"validation loss at step {last['step']:,}: {'  '.join(losses)} nats per token")
    if result.status == "finished":
        remark(f"next: depthdial sweep {result.path}")
