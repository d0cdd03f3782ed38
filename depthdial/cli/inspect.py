"""The command inspect: what a model is, before anything of its weights is loaded.

The facts come from `formats/inspection.py`; here is how a person reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jsonargparse

from depthdial.cli.console import remark, result_console
from depthdial.cli.options import Options, loop_counts, new_parser
from depthdial.cli.tables import (
    bullets,
    facts,
    loop_range,
    short_count,
    shown_loops,
    size,
    table,
    tables_by_loops,
)
from depthdial.config import ModelConfig, count_slots, shortest_pattern

if TYPE_CHECKING:
    from rich.table import Table

    from depthdial.formats.inspection import Inspection, TextFacts

BYTES_PER_VALUE = 2
MOST_LOOPS_SHOWN = 8


def inspect_parser() -> jsonargparse.ArgumentParser:
    """Flags of `inspect`."""
    parser = new_parser(
        "inspect",
        usage="PATH [--num-loops K ...]",
        description="What a model is: partition, loops, parameters, cache, text, and what is in\n"
        "the way of importing it. Weights are not loaded.\n\n"
        "  depthdial inspect checkpoints/looped-1.4b\n"
        "  depthdial inspect runs/tiny-text",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="published checkpoint, .gguf file, hub id org/name, model folder, or run",
    )
    parser.add_argument(
        "--num-loops",
        nargs="+",
        metavar="K",
        help="loop counts of the cache table (those it is made for)",
    )
    return parser


def run_inspect(options: Options) -> int:
    """Print the facts; 1 where the model cannot be opened here."""
    loops = None if options.num_loops is None else loop_counts(options.num_loops)
    found = _inspect(options.path)
    console = result_console()
    # A path may be longer than the line, and is then not cut.
    console.print(options.path, style="bold", soft_wrap=True)
    console.print(facts("", _identity(found)))
    if found.config is not None:
        for part in _model_parts(found.config, loops):
            console.print("", part)
    if found.text is not None:
        console.print("", facts("Text", _text_rows(found.text)))
    for title, sentences in (
        ("It cannot be imported", found.problems),
        ("Warnings", found.warnings),
        ("Notes", found.notes),
    ):
        if sentences:
            console.print("", bullets(title, sentences))
    if found.kind in ("published checkpoint", "GGUF file") and not found.problems:
        remark(f"Open it: depthdial import {options.path} DST")
    return 1 if found.problems else 0


def _inspect(path: str) -> Inspection:
    """A run or model folder of ours, or a published checkpoint."""
    from depthdial.api.paths import model_folder
    from depthdial.formats.inspection import inspect_model_folder, inspect_source
    from depthdial.model.folder import local_source

    found = local_source(path)
    if (found / "checkpoints").is_dir():
        found = model_folder(found)
    elif not _is_ours(found):
        return inspect_source(found)
    return inspect_model_folder(found)


def _is_ours(folder: Path) -> bool:
    """Whether a folder's config.json is of this project's format."""
    from depthdial.formats.source_folder import read_source_config

    if not (folder / "config.json").is_file():
        return False
    return read_source_config(folder).get("model_type") == "depthdial"


def _identity(found: Inspection) -> list[tuple[str, str]]:
    rows = [("what", found.kind)]
    if found.family is not None:
        rows.append(("family", found.family))
    if found.summary:
        rows.append(("", found.summary))
    if found.formats:
        stored = "" if found.num_bytes is None else f", {size(found.num_bytes)}"
        rows.append(("stored as", ", ".join(found.formats) + stored))
    return rows


def _model_parts(config: ModelConfig, loops: Sequence[int] | None) -> list[Table]:
    return [
        facts("Structure", _structure(config)),
        _partition_table(config),
        *_cache_parts(config, loops or shown_loops(config.max_loops, MOST_LOOPS_SHOWN)),
    ]


def _structure(config: ModelConfig) -> list[tuple[str, str]]:
    loop = config.loop
    beyond = {"refuse": "refused", "extrapolate": "allowed"}[loop.beyond_max_loops]
    loops = f"{config.num_loops} by default, made for 1 to {config.max_loops}, beyond: {beyond}"
    core, width = config.core_config, f"{config.d_model:,}"
    heads = (
        f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values"
    )
    if core is not config:
        width += f", in the core {core.d_model:,}"
        heads += f"; in the core {core.num_heads} and {core.num_kv_heads}"
    if config.sliding is not None:
        heads += f"; letter S sees {config.sliding.window} tokens"
    vocabulary = f"{config.vocab_size:,}{', tied' if config.tie_embeddings else ''}"
    if config.logit_soft_cap is not None:
        vocabulary += f"; logits within {config.logit_soft_cap:g}"
    rows = [
        ("loops", loops if config.max_loops > 1 else "1: a dense model"),
        *(_loop_rows(config) if config.max_loops > 1 else []),
        ("width", f"{width}; {_feed_forward(config)}"),
        ("attention", heads if config.num_heads is not None else "none"),
        ("positions", _positions(config)),
        ("norms", f"{config.norm}; final norm: {config.final_norm}"),
        ("vocabulary", vocabulary),
        ("context", f"{config.max_context:,} tokens"),
        ("cache policy", loop.cache_policy),
    ]
    if count_slots(config.sublayers, "state"):
        rows.append(("recurrent states", _states(config)))
    if config.exit_gate != "none":
        rows.append(("exit gate", config.exit_gate + (", stale" if config.exit_gate_stale else "")))
    return rows


def _states(config: ModelConfig) -> str:
    """Bytes per sequence, whatever its length."""
    from depthdial.model.count.cache import state_bytes

    one, most = (
        size(state_bytes(config, k, bytes_per_value=BYTES_PER_VALUE)) for k in (1, config.max_loops)
    )
    return f"{one} per sequence in bf16 at one loop, {most} at {config.max_loops}"


def _feed_forward(config: ModelConfig) -> str:
    widths = dict.fromkeys(width for width in (config.d_ff, config.core_d_ff) if width is not None)
    shown = " and in the core ".join(f"{width:,}" for width in widths)
    return f"feed-forward {shown} ({config.ff})" if shown else "no feed-forward"


def _loop_rows(config: ModelConfig) -> list[tuple[str, str]]:
    return [
        ("training ran", loop_range(config.trained_at)),
        ("between loops", _between_loops(config)),
    ]


def _between_loops(config: ModelConfig) -> str:
    """State update, injection and start in words."""
    loop = config.loop
    parts = [f"update {loop.update}"]
    if loop.injection != "none":
        parts.append(f"injection {loop.injection}")
    parts.append(f"starts from {loop.initial_state}")
    if config.modulation is not None:
        parts.append(f"modulation {config.modulation.kind}")
    return ", ".join(parts)


def _positions(config: ModelConfig) -> str:
    if config.positions != "rotary":
        return config.positions
    scaling = "" if config.rope_scaling is None else f", {config.rope_scaling.kind} scaling"
    return f"rotary, base {config.rope_theta:,.0f}, {config.rotary_pairs}{scaling}"


def _partition_table(config: ModelConfig) -> Table:
    """Sublayers and parameters of every part that has some."""
    from depthdial.model.count.parameters import count_parameters

    counts = count_parameters(config)
    rows = []
    for name, count in vars(counts).items():
        layout = config.layouts.get(name, "")
        if not count and not layout:
            continue
        blocks = f"{len(layout) / 2:g}" if layout else ""
        rows.append(
            (
                name.replace("_", " "),
                _runs(layout),
                str(len(layout) or ""),
                blocks,
                short_count(count),
                f"{count / counts.total:.1%}" if count / counts.total >= 0.001 else "< 0.1%",
            )
        )
    rows.append(("total", "", str(sum(config.split)), "", short_count(counts.total), ""))
    columns = ("part", "layout", "sublayers", "blocks", "parameters", "share")
    return table("Partition", columns, rows, left=(0, 1))


def _runs(layout: str) -> str:
    """`AF x 24`: the layout with its repetitions counted."""
    unit = shortest_pattern(layout)
    return layout if unit == layout else f"{unit} x {len(layout) // len(unit)}"


def _cache_parts(config: ModelConfig, loops: Sequence[int]) -> list[Table]:
    """Bytes per token that persist: a row per policy, a column per loop count."""
    from depthdial.model.count.cache import cache_bytes, planned_policies, state_bytes

    def per_token(policy: str, num_loops: int) -> int:
        states = state_bytes(config, num_loops, bytes_per_value=BYTES_PER_VALUE)
        held = cache_bytes(
            config, num_loops, context=1, policy=policy, bytes_per_value=BYTES_PER_VALUE
        )
        return held - states

    policies = planned_policies(config)
    rows = {policy: [size(per_token(policy, k)) for k in loops] for policy in policies}
    layers = count_slots(config.sublayers, "keys")
    title = f"Cached keys and values per token in bf16, {layers} attention layers"
    return tables_by_loops(title, "policy", rows, [f"k = {k}" for k in loops])


def _text_rows(text: TextFacts) -> list[tuple[str, str]]:
    stops = ("generation stops at", ", ".join(text.stops) or "nothing")
    if text.num_tokens is None:
        return [("tokenizer", "none: token ids only"), stops]
    return [
        ("tokenizer", f"{text.num_tokens:,} tokens"),
        ("a text opens with", ", ".join(text.opens) or "nothing"),
        stops,
        ("chat template", text.template_in or "none"),
    ]
