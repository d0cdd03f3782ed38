"""Golden cases opened in memory: published names and config mapped, weights loaded strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from depthdial.config import ModelConfig
from depthdial.formats.families.registry import Family, map_config, select_rules
from depthdial.model.looped_lm import LoopedLM

GOLDEN = Path(__file__).parents[1] / "golden"


class Golden(NamedTuple):
    """One golden case; `vectors` are the reference's outputs, named in the case's README."""

    family: Family
    values: dict[str, Any]
    config: ModelConfig
    source: dict[str, Tensor]
    tensors: dict[str, Tensor]
    vectors: dict[str, Tensor]

    def model(self, **changes: Any) -> LoopedLM:
        """The model, with some config fields changed."""
        model = LoopedLM(self.config.replace(**changes))
        model.load_state_dict(self.with_split(model))
        return model

    def with_split(self, model: LoopedLM) -> dict[str, Tensor]:
        """The tensors under the names that they have where another split cuts the stack."""
        names = [
            f"{part}_stack.{i}."
            for part, count in zip(("prelude", "core", "coda"), model.config.split, strict=True)
            for i in range(count)
        ]
        renamed = {}
        for name, tensor in self.tensors.items():
            if name.startswith("core_stack.") and model.config.split != self.config.split:
                assert self.config.split[0] == 0 and self.config.split[2] == 0
                _, idx, rest = name.split(".", 2)
                name = names[int(idx)] + rest
            renamed[name] = tensor
        return renamed


def published(name: str, config_file: str = "config.json", **changes: Any) -> dict[str, Any]:
    """The config of a golden case, with some keys changed."""
    return json.loads((GOLDEN / name / config_file).read_text()) | changes


def open_golden(name: str, config_file: str = "config.json", **changes: Any) -> Golden:
    """Map one case. changes: keys of the published config."""
    values = published(name, config_file, **changes)
    family, config = map_config(values)
    source = safetensors.torch.load_file(GOLDEN / name / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for rule in select_rules(family.rules(config, values), source):
        tensors |= rule.to_ours(source.__getitem__)
    vectors = safetensors.torch.load_file(GOLDEN / name / "vectors.safetensors")
    return Golden(family, values, config, source, tensors, vectors)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal within an absolute tolerance, in shape too."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def states_of(model: LoopedLM, tokens_BT: Tensor, num_loops: int, **arguments: Any) -> list[Tensor]:
    """The state after each loop."""
    states: list[Tensor] = []
    model(
        tokens_BT,
        num_loops=num_loops,
        on_loop=lambda loop_idx, state_BTD, rows: states.append(state_BTD),
        **arguments,
    )
    # A comparison that walks the states would pass if some were missing.
    assert len(states) == num_loops, f"{len(states)} states of {num_loops} loops"
    return states
