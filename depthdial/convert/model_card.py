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
from typing import NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from depthdial import __version__
from depthdial.config import ModelConfig
from depthdial.convert.hf_maps import map_config
from depthdial.convert.origin import Origin
from depthdial.model.count_parameters import count_parameters

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
    trained_loops: Sequence[int] | None,
) -> None:
    """Write the card of one export.

    Args:
        folder: model folder that was exported; its sweep.json gives the curve.
        format_name: of the export. loading: Python that opens it.
        limits: sentences for people. origin: of an imported model.
        trained_loops: loop counts that its run's training ran; None outside a run.
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
        _training(config, folder, origin=origin, trained_loops=trained_loops),
        _curve(read_curve(folder)),
        "## Cache",
        f"Keys and values are kept by the policy `{config.loop.cache_policy}`"
        + (", which is exact." if config.loop.cache_policy == "per_loop" else "."),
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
    swept = _read_sweep(folder)
    return [] if swept is None else swept.points


class _Swept(NamedTuple):
    """What a card says of a saved sweep: its curve, ascending, and its trained loop counts."""

    points: list[CurvePoint]
    trained_loops: list[int]


def _read_sweep(folder: Path) -> _Swept | None:
    """The saved sweep of a model folder; None without one. Raises: as `read_curve`."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        tokens, trained_loops = sum(values["tokens_N"]), list(values["trained_loops"])
        points = [
            CurvePoint(num_loops, math.fsum(nll_N) / tokens, num_loops in trained_loops)
            for num_loops, nll_N in zip(values["loops"], values["nll_KN"], strict=True)
        ]
        return _Swept(sorted(points, key=lambda point: point.num_loops), sorted(trained_loops))
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
        "from depthdial.convert.hf_io import import_checkpoint\n\n"
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
    return [
        ("parameters", f"{parameters.total:,}"),
        ("sublayers in prelude / core / coda", f"{prelude} / {core} / {coda}"),
        ("layout", f"`{config.prelude_layout} | {config.core_layout} | {config.coda_layout}`"),
        (
            "width, heads, key/value heads",
            f"{config.d_model}, {config.num_heads}, {config.num_kv_heads} of {config.head_dim}",
        ),
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


def _training(
    config: ModelConfig,
    folder: Path,
    *,
    origin: Origin | None,
    trained_loops: Sequence[int] | None,
) -> str:
    """What is known of the loop counts that training ran, and from where."""
    if config.max_loops == 1:
        return ""
    if trained_loops is not None:
        return f"The run that it comes from trained it at {_counts(trained_loops)} loops."
    swept = _read_sweep(folder)
    if swept is not None:
        return f"The saved sweep counts {_counts(swept.trained_loops)} loops as trained."
    if origin is not None and map_config(origin.config)[1].max_loops == config.max_loops:
        return "That range follows from the config it was imported with."
    return "Which of these loop counts training ran is not recorded with this model."


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
