"""The README.md of an exported model: what it is, how deep it can loop, how to load it.

Numbers come from the config and, where a sweep was saved beside the model, from that file;
nothing is measured here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from depthdial import __version__
from depthdial.config import ModelConfig, named_rule
from depthdial.model.count.parameters import count_parameters
from depthdial.model.folder import Origin

CARD_FILE = "README.md"
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class CurvePoint:
    """Mean loss at one loop count, in nats per token, and whether it counts as trained."""

    num_loops: int
    loss: float
    is_trained: bool


def write_card(
    path: Path,
    *,
    folder: Path,
    config: ModelConfig,
    format_name: str,
    loading: str,
    limits: Sequence[str],
    origin: Origin | None,
) -> None:
    """Write the card of one export.

    Args:
        folder: model folder that was exported; its sweep.json gives the curve.
        format_name: of the export. loading: Python that opens it.
        limits: sentences for people. origin: of an imported model.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["depthdial", "looped-transformer", format_name],
    )
    parts = [
        f"# {folder.resolve().name}",
        _opening(config, format_name, origin),
        _table(("part", "value"), _facts(config)),
        "## Depth",
        _depth(config),
        _training(config),
        _curve(read_curve(folder)),
        "## Cache",
        f"Keys and values are kept by the policy `{config.loop.cache_policy}`"
        + (", which is exact." if named_rule(config.loop.cache_policy).is_exact else "."),
        "## Known limits",
        "\n".join(f"- {limit}" for limit in limits) or "None beyond those of the base model.",
        "## Loading",
        f"```python\n{loading}\n```",
    ]
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part)
    ModelCard(text + "\n").save(path)


def read_curve(folder: Path) -> list[CurvePoint]:
    """The loss curve of a model folder, ascending; empty where no sweep was saved.

    Raises: ValueError if the file is no sweep.
    """
    path = folder / SWEEP_FILE
    if not path.is_file():
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        tokens = sum(values["tokens_N"])
        points = [
            CurvePoint(num_loops, math.fsum(nll_N) / tokens, num_loops in values["trained_loops"])
            for num_loops, nll_N in zip(values["loops"], values["nll_KN"], strict=True)
        ]
        return sorted(points, key=lambda point: point.num_loops)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} is no saved sweep ({error}). Write it again with `depthdial sweep --save`, or "
            "remove it."
        ) from None


def loading_code(format_name: str, folder_name: str) -> str:
    """Python that opens an export in a published format with this project's tools."""
    return (
        "# pip install depthdial\n"
        "import depthdial\n"
        "from depthdial.formats.import_export import import_checkpoint\n\n"
        f'import_checkpoint("{folder_name}", "model")  # format: {format_name}\n'
        'model = depthdial.load("model")\n'
        'print(model.generate("Once upon a time")[0].text)'
    )


def _opening(config: ModelConfig, format_name: str, origin: Origin | None) -> str:
    shape = "a looped language model: its core runs once per loop, with the same weights"
    if config.max_loops == 1:
        shape = "a language model whose core runs once"
    source = f" It was imported from `{origin.source}` ({origin.family})." if origin else ""
    return f"This is {shape}. Format: `{format_name}`, written by depthdial {__version__}.{source}"


def _facts(config: ModelConfig) -> list[tuple[str, str]]:
    parameters = count_parameters(config)
    prelude, core, coda = config.split
    looped = config.core_config
    own_core = [
        (
            "the same in the core",
            f"{looped.d_model}, {looped.num_heads}, {looped.num_kv_heads} of {looped.head_dim}",
        )
    ]
    return [
        ("parameters", f"{parameters.total:,}"),
        ("sublayers in prelude / core / coda", f"{prelude} / {core} / {coda}"),
        ("layout", f"`{config.prelude_layout} | {config.core_layout} | {config.coda_layout}`"),
        (
            "width, heads, key/value heads",
            f"{config.d_model}, {config.num_heads}, {config.num_kv_heads} of {config.head_dim}",
        ),
        *(own_core if looped is not config else []),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.max_context:,} tokens"),
    ]


def _depth(config: ModelConfig) -> str:
    if config.max_loops == 1:
        return "Made for one loop, and for no more than one."
    beyond = {
        "refuse": "more are refused in generation",
        "extrapolate": "more are run, outside of that range",
    }[config.loop.beyond_max_loops]
    return (
        f"Made for 1 to {config.max_loops} loops; {beyond}. Where a request names no loop "
        f"count, {config.num_loops} run."
    )


def _training(config: ModelConfig) -> str:
    """Which of these loop counts training has run."""
    if config.max_loops == 1:
        return ""
    if not config.trained_at:
        return "No training has run any of them yet."
    return f"Training has run k = {_counts(config.trained_at)}."


def _counts(loops: Sequence[int]) -> str:
    """`1 to 4`, `1, 2 and 4`."""
    *most, last = sorted(loops)
    if most and last - most[0] == len(most) > 1:
        return f"{most[0]} to {last}"
    return f"{', '.join(map(str, most))} and {last}" if most else f"{last}"


def _curve(points: Sequence[CurvePoint]) -> str:
    if not points:
        return "No loss curve was saved with this model."
    rows = [
        (f"{point.num_loops}", f"{point.loss:.4f}", "yes" if point.is_trained else "no")
        for point in points
    ]
    return _table(("loops", "loss (nats per token)", "trained"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
