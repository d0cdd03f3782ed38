"""What the model asks about a type of layer: how it is built, counted, started and trained.

The types themselves stand beside their layers; `model/sublayer.py: LAYERS` is their table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthdial.config import LayerFacts, ModelConfig

OptimizerGroup = Literal["matrices", "decayed", "undecayed"]
"""`matrices`: trained by Muon where the recipe has it. `decayed`, `undecayed`: trained by AdamW,
with and without weight decay."""


class Place(NamedTuple):
    """Where a layer stands in its model.

    is_core: in the block that loops. num_below: layers with the same kind of slot below it, over
    all blocks.
    """

    is_core: bool
    num_below: int


Shapes = dict[str, tuple[int, int]]
"""Name of a linear map inside a mixer -> (inputs, outputs)."""


def _no_parameters(config: ModelConfig, place: Place) -> int:
    return 0


def _no_state(config: ModelConfig) -> int:
    return 0


def _usual_values(name: str, shape: torch.Size, config: ModelConfig, generator: object) -> None:
    return None


@dataclass(frozen=True)
class LayerType:
    """One type of layer.

    Fields:
        facts: what a config and a cache must know.
        build: makes the mixer, a module. It is called with x [B, T, D], and with `slot` and `view`
            where `facts.slot` is not `none`: the view is an `AttentionView` for layers with
            attention, a `TokenView` for others. Where `facts.conditioned_by` has `loop_lora` it
            also takes `deltas`, and `head_gains` where it has that.
        linear_shapes: the linear maps of the mixer by the names of their modules; a gate that
            reads a part of x is none of them.
        other_parameters: how many parameters the mixer has besides the matrices of these.
        weights_per_token: weights that one token is multiplied with; None for those of all linear
            maps. A routed layer has more than one token uses.
        spared_maps: linear maps that a layer leaves out where its slot is read-only.
        output_maps: linear maps that write to the residual stream; they start smaller in a deeper
            model.
        flops_per_key: FLOPs per token for each token that it attends to.
        flops_per_token: further FLOPs per token, e.g. of a recurrence.
        state_size: numbers of one recurrent state of a row.
        initial_values: a constant, or the values that a parameter of this name (below the mixer)
            starts with; None for the usual ones (biases 0, vectors 1, matrices normal).
        groups: optimizer group of parameters by name (below the mixer); by default the weights of
            linear maps are `matrices`, and vectors `undecayed`.
    """

    facts: LayerFacts
    build: Callable[[ModelConfig, Place], nn.Module]
    linear_shapes: Callable[[ModelConfig, Place], Shapes]
    other_parameters: Callable[[ModelConfig, Place], int] = _no_parameters
    weights_per_token: Callable[[ModelConfig, Place], int] | None = None
    spared_maps: frozenset[str] = frozenset()
    output_maps: frozenset[str] = frozenset()
    flops_per_key: Callable[[ModelConfig], int] = _no_state
    flops_per_token: Callable[[ModelConfig], int] = _no_state
    state_size: Callable[[ModelConfig], int] = _no_state
    initial_values: Callable[
        [str, torch.Size, ModelConfig, torch.Generator], Tensor | float | None
    ] = _usual_values
    groups: Mapping[str, OptimizerGroup] = field(default_factory=dict)


class PlacedLayer(NamedTuple):
    """One layer of a model: its type, where it stands, and the config that it is built from.

    In the core that is `ModelConfig.core_config`, so that no layer knows of another width.
    """

    layer: LayerType
    place: Place
    config: ModelConfig

    @property
    def facts(self) -> LayerFacts:
        """What a config and a cache must know of it."""
        return self.layer.facts

    def build(self) -> nn.Module:
        """A new mixer."""
        return self.layer.build(self.config, self.place)

    def linear_shapes(self) -> Shapes:
        """Its linear maps."""
        return self.layer.linear_shapes(self.config, self.place)

    def weights_per_token(self) -> int:
        """Weights that one token is multiplied with."""
        if self.layer.weights_per_token is not None:
            return self.layer.weights_per_token(self.config, self.place)
        return self._num_weights()

    def num_parameters(self) -> int:
        """Parameters of the mixer."""
        return self._num_weights() + self.layer.other_parameters(self.config, self.place)

    def group_of(self, name: str, parameter: Tensor) -> OptimizerGroup | None:
        """Optimizer group of a parameter by its name below the mixer; None where nothing says."""
        if name in self.layer.groups:
            return self.layer.groups[name]
        if parameter.ndim == 1:
            return "undecayed"
        owner, _, last = name.rpartition(".")
        is_map = last == "weight" and parameter.ndim == 2 and owner in self.linear_shapes()
        return "matrices" if is_map else None

    def _num_weights(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linear_shapes().values())
