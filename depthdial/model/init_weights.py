"""Initial values of every parameter, drawn from a generator keyed by (seed, parameter name).

Letters: D model width, R low rank.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from depthdial.config import ModelConfig
from depthdial.config.model import OLD_LOOP_LORA
from depthdial.model.sublayer import Placed, placed_layers, split_mixer_name

DIAGONAL_DECAY = math.sqrt(0.2)
"""Decay per loop of a diagonal injection at the start (arXiv 2604.12946)."""
DECAY_GATE_START = 0.95
"""Share of the candidate that a decay gate takes at the start."""


def init_weights(model: nn.Module, config: ModelConfig, *, seed: int, prefix: str = "") -> None:
    """Initial values, each drawn from a generator keyed by (seed, parameter name).

    | parameter                          | value                                             |
    | embeddings, head, input matrices   | N(0, init_std)                                    |
    | output maps of the mixers          | N(0, init_std / sqrt(physical sublayers))         |
    | norm gains                         | 1                                                 |
    | biases                             | 0                                                 |
    | gate W, b; gamma                   | 0; loop.gamma_init: beta = 0.5 ln 2 at 0 (ELR 3.1) |
    | delta rate                         | loop.delta_init                                   |
    | decay gate                         | up 0, log_decay 0, bias for alpha = 0.95          |
    | diagonal injection                 | input = I, decay sqrt(0.2); state projection = I; |
    |   of another width                 |   both orthogonal, not I (arXiv 2604.12946)       |
    | scales of norm='ngpt'              | scale_std, so that they act as 1                  |
    | of mixers                          | as their `LayerType.initial_values` says first    |
    | modulation MLP                     | N(0, 1 / fan-in), biases 0                        |
    | modulation heads                   | 0; low-rank B N(0, 1 / D), A N(0, 1 / R)          |
    | loop_lora                          | up 0, down N(0, 1 / inputs); norms as the sublayer's |

    Keying by name gives models that differ in one part the same values everywhere else.
    """
    placed = placed_layers(config)
    for name, parameter in model.named_parameters(prefix=prefix):
        if parameter.device.type != "meta":
            _init_parameter(parameter, name, config, seed=seed, placed=placed)


@torch.no_grad()
def _init_parameter(
    parameter: nn.Parameter,
    name: str,
    config: ModelConfig,
    *,
    seed: int,
    placed: Placed,
) -> None:
    generator, std = _generator(name, seed=seed), config.init_std
    of_mixer = split_mixer_name(name, placed)
    if of_mixer is not None:
        (layer, _, layer_config), inner = of_mixer
        own = layer.initial_values(inner, parameter.shape, layer_config, generator)
        if own is not None:
            parameter.copy_(torch.as_tensor(own))
            return
        if inner.rpartition(".")[0] in layer.output_maps:
            std = std / math.sqrt(sum(config.split))
    constant = _constant(parameter, name, config)
    if constant is not None:
        parameter.fill_(constant)
        return
    parts = name.split(".")
    if name in ("injection.input.weight", "state_projection.weight"):
        if parameter.shape[0] == parameter.shape[1]:
            nn.init.eye_(parameter)
        else:
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(nn.init.orthogonal_(drawn, generator=generator))
        return
    if parts[0] in ("modulation", "loop_lora"):
        std = parameter.shape[-1] ** -0.5
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
    parameter.copy_(values)


def _generator(name: str, *, seed: int) -> torch.Generator:
    """The generator of one parameter."""
    # Hashed, because torch's CPU generator reads only 32 bits of a seed.
    # The seed of a tensor is its name in format_version 1, so that new models keep their values.
    seed_name = name.replace("loop_lora.", f"{OLD_LOOP_LORA}.")
    digest = hashlib.sha256(f"{seed}:{seed_name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4]))


def _constant(parameter: nn.Parameter, name: str, config: ModelConfig) -> float | None:
    """The one value that fills a parameter; None for a random or structured one."""
    parts = name.split(".")
    owner, last = parts[0], parts[-1]
    if owner == "state_update":
        return _update_constant(parts, config)
    if owner == "loop_lora":
        return 0.0 if last == "up" else 1.0 if last.endswith("norm") else None
    if owner == "modulation" and ("heads" in parts or parts[1] in ("entry", "exit")):
        return 0.0
    if last == "bias":
        return 0.0
    if name == "injection.step_bias":
        return _inverse_softplus(-math.log(DIAGONAL_DECAY))
    if name == "injection.log_decay":
        return 0.0
    if config.ngpt is not None and last in ("alpha", "logit_scale"):
        return config.ngpt.scale_std
    return 1.0 if parameter.ndim == 1 else None


def _update_constant(parts: list[str], config: ModelConfig) -> float | None:
    """Initial value of a parameter of the state update; None for the decay gate's `down`."""
    if parts[1] == "up":
        # alpha = exp(-softplus(b)) where the thin matrices give 0 and log_decay is 0.
        start = _inverse_softplus(-math.log(DECAY_GATE_START))
        return start if parts[-1] == "bias" else 0.0
    return {
        "rate": config.loop.delta_init,
        "gamma": config.loop.gamma_init,
        "gate": 0.0,
        "log_decay": 0.0,
        "down": None,
    }[parts[1]]


def _inverse_softplus(value: float) -> float:
    """x with log(1 + e^x) = value."""
    return math.log(math.expm1(value))
