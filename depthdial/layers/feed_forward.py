"""Feed-forward MLPs; they know neither loops nor caches.

Letters: B batch, T query tokens, D model width, F hidden width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import LETTERS, ModelConfig
from depthdial.layers.layer_type import LayerType, Place, Shapes
from depthdial.layers.normalised import NormalisedSwiGLU
from depthdial.layers.primitives import Deltas, project


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTD: Tensor, *, deltas: Deltas | None = None) -> Tensor:
        deltas = deltas or {}
        gate_BTF = project(self.gate_proj, x_BTD, deltas.get("gate_proj"))
        up_BTF = project(self.up_proj, x_BTD, deltas.get("up_proj"))
        return project(self.down_proj, F.silu(gate_BTF) * up_BTF, deltas.get("down_proj"))


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv 2109.08668)."""
    return F.relu(x).square()


def half_relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 / 2."""
    return 0.5 * F.relu(x).square()


ACTIVATIONS = {
    "gelu": F.gelu,
    "relu_squared": relu_squared,
    "half_relu_squared": half_relu_squared,
}


class PlainMLP(nn.Module):
    """down(act(up(x))), with an activation of `ACTIVATIONS`."""

    def __init__(self, d_model: int, d_ff: int, *, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTD: Tensor, *, deltas: Deltas | None = None) -> Tensor:
        deltas = deltas or {}
        hidden_BTF = ACTIVATIONS[self.activation](
            project(self.up_proj, x_BTD, deltas.get("up_proj"))
        )
        return project(self.down_proj, hidden_BTF, deltas.get("down_proj"))


def _width(config: ModelConfig, place: Place) -> int:
    return (config.core_d_ff if place.is_core else None) or config.d_ff


def _build(config: ModelConfig, place: Place) -> nn.Module:
    d_ff = _width(config, place)
    if config.ngpt is not None:
        return NormalisedSwiGLU(config.d_model, d_ff)
    if config.ff == "swiglu":
        return SwiGLU(config.d_model, d_ff, bias=config.ff_bias)
    return PlainMLP(config.d_model, d_ff, activation=config.ff, bias=config.ff_bias)


def _linear_shapes(config: ModelConfig, place: Place) -> Shapes:
    d_model, d_ff = config.d_model, _width(config, place)
    shapes = {"up_proj": (d_model, d_ff), "down_proj": (d_ff, d_model)}
    return {"gate_proj": (d_model, d_ff), **shapes} if config.ff == "swiglu" else shapes


def _other_parameters(config: ModelConfig, place: Place) -> int:
    """Biases, and the scales of a normalised MLP."""
    scales = 2 * _width(config, place) if config.ngpt is not None else 0
    outputs = [out for _, out in _linear_shapes(config, place).values()]
    return scales + (sum(outputs) if config.ff_bias else 0)


FEED_FORWARD = LayerType(
    facts=LETTERS["F"],
    build=_build,
    linear_shapes=_linear_shapes,
    other_parameters=_other_parameters,
    output_maps=frozenset({"down_proj"}),
)
