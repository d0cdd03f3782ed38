"""The command generate: the continuation of a text, at one loop count or at all of them.

Flags and values are in `cli/options.py`, layout in `cli/tables.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jsonargparse

from depthdial.cli.console import remark, result_console, styled, write
from depthdial.cli.options import Options, UsageError, loop_counts, new_parser, number
from depthdial.cli.tables import loop_range, table
from depthdial.config import POLICIES, ModelConfig, check_cache_policy

if TYPE_CHECKING:
    from depthdial.api.model import Completion


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
        help="passes of the core, from 1 to what the model is made for (the model's default); with "
        "--compare a list such as 1,2,4 (all of these)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="continue at several loop counts, one below another"
    )
    _add_sampling(parser)
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
        help=f"cached keys and values: {', '.join(POLICIES)}, or a published model's rule "
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
    parser.add_argument(
        "--step-sizes",
        metavar="X,X",
        help="one per loop, adding up to 1, of a model conditioned on time (equal steps)",
    )
    parser.add_argument("--device", default="cpu", help="torch device, e.g. cpu, cuda, mps (cpu)")
    return parser


def _add_sampling(parser: jsonargparse.ArgumentParser) -> None:
    """Flags of how many tokens are drawn, and how."""
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
    steps = _step_sizes(options.step_sizes)
    if steps is not None and options.compare:
        raise UsageError("--step-sizes are of one loop count; leave --compare out.")
    if options.cache_policy is not None:
        try:
            check_cache_policy(options.cache_policy)
        except ValueError as error:
            raise UsageError(f"--cache-policy: {error}") from error
    from depthdial.api.model import load

    model = load(options.model, device=options.device)
    _check_loops(model.config, asked or [])
    default = range(1, model.config.max_loops + 1) if options.compare else [None]
    results = []
    for num_loops in default if asked is None else asked:
        started = time.perf_counter()
        [completion] = model.generate(
            options.prompt,
            num_loops=num_loops,
            stop=options.stop,
            cache_policy=options.cache_policy,
            exit_rule=options.exit_rule,
            step_sizes=steps,
            **numbers,
        )
        results.append((completion, time.perf_counter() - started))
    if options.compare:
        _print_comparison(options.prompt, results, model.config)
    else:
        [(completion, seconds)] = results
        write(completion.text)
        remark(f"{_depth(model.config, completion)}: {_spent(completion, seconds)}")
    return 0


def _step_sizes(text: str | None) -> list[float] | None:
    """Numbers from `0.5,0.25,0.25`. Raises: UsageError."""
    if text is None:
        return None
    return [number(part.strip(), "--step-sizes", whole=False) for part in text.split(",")]


def _check_loops(config: ModelConfig, loops: Sequence[int]) -> None:
    """Refuse loop counts that the model does not generate at. Raises: ValueError."""
    beyond = [k for k in loops if k > config.max_loops]
    if beyond and config.loop.beyond_max_loops == "refuse":
        raise ValueError(
            f"--num-loops {beyond[0]}: this model is made for 1 to {config.max_loops} loops "
            f"(training ran {loop_range(config.trained_at)}) and refuses to generate beyond. "
            "`depthdial sweep` measures what more loops do."
        )


def _print_comparison(
    prompt: str, results: list[tuple[Completion, float]], config: ModelConfig
) -> None:
    """One row per loop count; the prompt once."""
    console = result_console()
    console.print(styled("prompt  ", "dim") + styled(prompt))
    rows = [(f"k = {c.num_loops}", c.text.strip("\n")) for c, _ in results]
    console.print(table("", ("", ""), rows, left=(0, 1)))
    for completion, seconds in results:
        remark(f"{_depth(config, completion)}: {_spent(completion, seconds)}")


def _depth(config: ModelConfig, completion: Completion) -> str:
    """Loop count of a continuation; training may have run others only."""
    depth, trained = f"k = {completion.num_loops}", config.trained_at
    if completion.num_loops in trained:
        return depth
    return f"{depth}, outside training, which ran {loop_range(trained)}"


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
