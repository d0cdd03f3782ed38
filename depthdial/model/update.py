"""Initial state, injection of the prelude output, entry of a loop, and the state updates.

All updates share `update(prev, candidate, injected, params, mod)`; loop index and loop count
reach them only as tensors in `mod`.
Letters: B batch, T query tokens, D model width, R low rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import LoopConfig, UpdateName
from depthdial.layers.primitives import WideLinear, rms_normalise, wide_dtype
from depthdial.model.conditioning import EntryModulation, UpdateModulation
from depthdial.model.noise import truncated_normal

MAX_LOG_DECAY = 20.0
"""Above log(width) of any model, whose published decays start at log(1), ..., log(width)."""


class GateParams(NamedTuple):
    """What the updates read beside the states; None if unused.

    Fields:
        logits: W z + b of the gate, or U V z + b of the decay gate, [B, T, D], at least fp32. A
            function of the modules, never their weights: whatever wraps a module (an adapter, a
            quantised product) acts on all that is computed with it.
        gamma: [D]; rate: alpha [D]; log_decay: a [D].
    """

    logits: Callable[[Tensor], Tensor] | None = None
    gamma: Tensor | None = None
    rate: Tensor | None = None
    log_decay: Tensor | None = None


def initial_state(
    h_in_BTD: Tensor, positions_BT: Tensor, config: LoopConfig, *, width: int | None = None
) -> Tensor:
    """s_0 [B, T, width]: h_in (ELR section 3.1), zeros, or noise that depends on (seed, position,
    channel) alone, so that batch, padding, chunks and cache do not change it (truncated normal as
    in arXiv 2502.05171). width: None for that of h_in.
    """
    width = h_in_BTD.shape[-1] if width is None else width
    if config.initial_state == "prelude":
        return h_in_BTD
    if config.initial_state == "zero":
        return h_in_BTD.new_zeros((*h_in_BTD.shape[:-1], width))
    assert config.random_state_std is not None
    noise_BTD = truncated_normal(
        positions_BT, width, seed=config.random_state_seed, std=config.random_state_std
    )
    return noise_BTD.to(h_in_BTD.dtype).expand(*h_in_BTD.shape[:-1], width)


def decay_speed(log_decay_D: Tensor) -> Tensor:
    """e^a, cut where a decay has long reached zero, so that no gradient is infinity times zero."""
    return log_decay_D.clamp(max=MAX_LOG_DECAY).exp()


class Injection(nn.Module):
    """How the prelude output enters a loop; one of

    | none      z = s                                                                       |
    | add       z = s + h_in                          (ELR Eq. 1)                           |
    | concat    z = W [s; h_in]                       (arXiv 2502.05171, 2511.07384)         |
    | diagonal  z = exp(-dt e^a) s + dt B h_in, dt = softplus(step_bias)  (arXiv 2604.12946) |

    Args: d_model: width of h_in; d_state: width of s and z, None for d_model; concat and diagonal
        may have another.
    """

    def __init__(self, d_model: int, config: LoopConfig, *, d_state: int | None = None) -> None:
        super().__init__()
        self.name = config.injection
        d_state = d_model if d_state is None else d_state
        is_diagonal = config.injection == "diagonal"
        self.adapter = (
            nn.Linear(d_state + d_model, d_state, bias=False)
            if config.injection == "concat"
            else None
        )
        self.log_decay = nn.Parameter(torch.zeros(d_state)) if is_diagonal else None
        self.step_bias = nn.Parameter(torch.zeros(d_state)) if is_diagonal else None
        self.input = nn.Linear(d_model, d_state, bias=False) if is_diagonal else None

    def forward(self, state_BTD: Tensor, h_in_BTD: Tensor) -> Tensor:
        """Core input before modulation [B, T, D]."""
        if self.name == "add":
            return state_BTD + h_in_BTD
        if self.adapter is not None:
            return self.adapter(torch.cat([state_BTD, h_in_BTD], dim=-1)).to(state_BTD.dtype)
        if self.input is None or self.log_decay is None or self.step_bias is None:
            return state_BTD
        # fp32: a decay near 1 is applied k times.
        wide = wide_dtype(self.step_bias.dtype)
        dt_D = F.softplus(self.step_bias.to(wide))
        decay_D = torch.exp(-dt_D * decay_speed(self.log_decay.to(wide)))
        kept_BTD = decay_D * state_BTD.to(wide)
        return (kept_BTD + dt_D * self.input(h_in_BTD).to(wide)).to(state_BTD.dtype)


def enter(injected_BTD: Tensor, h_in_BTD: Tensor, entry: EntryModulation, *, eps: float) -> Tensor:
    """Loop entry z_i (ELR section 3.4); the norm has no gain of its own."""
    normed_BTD = rms_normalise(injected_BTD, eps)
    return (
        entry.raw_gain * injected_BTD
        + entry.norm_gain * normed_BTD
        + entry.shift
        + entry.eta * h_in_BTD
    )


def replace(
    prev_BTD: Tensor,
    candidate_BTD: Tensor,
    injected_BTD: Tensor,
    params: GateParams,
    mod: UpdateModulation,
) -> Tensor:
    """s_i = r_i; with conditioning s_i = s_{i-1} + exit_gain * (r_i - s_{i-1})."""
    if mod.exit_gain is None:
        return candidate_BTD
    return _move(prev_BTD, candidate_BTD, torch.ones_like(mod.exit_gain), mod)


def residual(
    prev_BTD: Tensor,
    candidate_BTD: Tensor,
    injected_BTD: Tensor,
    params: GateParams,
    mod: UpdateModulation,
) -> Tensor:
    """s_i = s_{i-1} + r_i; the core output itself is added, not a difference."""
    added_BTD = candidate_BTD if mod.exit_gain is None else mod.exit_gain * candidate_BTD
    next_BTD = prev_BTD + added_BTD.to(prev_BTD.dtype)
    if mod.gate_bypass is None:
        return next_BTD
    bypass = mod.gate_bypass.to(next_BTD.dtype)
    return torch.lerp(next_BTD, candidate_BTD.to(next_BTD.dtype), bypass)


def delta(
    prev_BTD: Tensor,
    candidate_BTD: Tensor,
    injected_BTD: Tensor,
    params: GateParams,
    mod: UpdateModulation,
) -> Tensor:
    """s_i = s_{i-1} + alpha * (r_i - s_{i-1}), alpha [D] learned."""
    assert params.rate is not None
    return _move(prev_BTD, candidate_BTD, params.rate, mod)


def adaptive_delta(
    prev_BTD: Tensor,
    candidate_BTD: Tensor,
    injected_BTD: Tensor,
    params: GateParams,
    mod: UpdateModulation,
) -> Tensor:
    """Move each channel a learned fraction of the way to the candidate state.

        s_i = s_{i-1} + beta * (r_i - s_{i-1}),  beta = sigmoid(W z + b) * softplus(gamma)

    Args:
        prev_BTD: state before this loop; candidate_BTD: core output of this loop.
        injected_BTD: core input before modulation, un-normalised; the gate reads this one.
        params: logits W z + b, gamma [D]; at zero, beta = 0.5 ln 2.
        mod: exit gain multiplies beta.

    Returns: next state, dtype of `prev_BTD`. beta is not bounded by 1.
    Source: ELR Eq. (2), arXiv 2610.12582; i is loop_idx + 1.
    """
    return _move(prev_BTD, candidate_BTD, adaptive_rate(injected_BTD, params), mod)


def decay_gate(
    prev_BTD: Tensor,
    candidate_BTD: Tensor,
    injected_BTD: Tensor,
    params: GateParams,
    mod: UpdateModulation,
) -> Tensor:
    """s_i = s_{i-1} + alpha * (r_i - s_{i-1}), alpha in (0, 1) read from the difference itself.

        alpha = exp(-softplus(U V (r - s) + b) * e^a)

    params: logits U V d + b of a difference d, log_decay a [D]. Source: arXiv 2605.11011.
    """
    return _move(prev_BTD, candidate_BTD, decay_rate(prev_BTD, candidate_BTD, params), mod)


def decay_rate(prev_BTD: Tensor, candidate_BTD: Tensor, params: GateParams) -> Tensor:
    """alpha of `decay_gate`, at least fp32, [B, T, D]."""
    assert params.logits is not None and params.log_decay is not None
    # fp32: near alpha = 1 a bf16 exponent moves in steps of half a percent.
    dt_BTD = F.softplus(params.logits(candidate_BTD - prev_BTD))
    return torch.exp(-dt_BTD * decay_speed(params.log_decay.to(dt_BTD.dtype)))


def damped(
    prev_BTD: Tensor,
    candidate_BTD: Tensor,
    injected_BTD: Tensor,
    params: GateParams,
    mod: UpdateModulation,
) -> Tensor:
    """s_i = (1 - 1/k) s_{i-1} + r_i / k, without parameters (arXiv 2605.23872)."""
    assert mod.loop_share is not None
    return _move(prev_BTD, candidate_BTD, mod.loop_share, mod)


def adaptive_rate(injected_BTD: Tensor, params: GateParams) -> Tensor:
    """beta = sigmoid(W z + b) * softplus(gamma), at least fp32, [B, T, D]."""
    assert params.logits is not None and params.gamma is not None
    gate_BTD = torch.sigmoid(params.logits(injected_BTD))
    return gate_BTD * F.softplus(params.gamma.to(gate_BTD.dtype))


def _move(prev_BTD: Tensor, candidate_BTD: Tensor, rate: Tensor, mod: UpdateModulation) -> Tensor:
    """prev + rate * (candidate - prev), exact where the rate is 0 or 1."""
    if mod.exit_gain is not None:
        rate = rate * mod.exit_gain
    if mod.gate_bypass is not None:
        rate = rate * (1 - mod.gate_bypass) + mod.gate_bypass
    # fp32: the difference of two close bf16 states keeps few correct bits (ELR Eq. 2).
    wide = wide_dtype(prev_BTD.dtype)
    moved_BTD = torch.lerp(prev_BTD.to(wide), candidate_BTD.to(wide), rate.to(wide))
    return moved_BTD.to(prev_BTD.dtype)


def anchor(state_BTD: Tensor, first_candidate_BTD: Tensor | None, weight: Tensor) -> Tensor:
    """(1 - w) state + w first candidate, [B, T, D] (arXiv 2605.23872)."""
    assert first_candidate_BTD is not None
    # fp32: a bf16 weight moves in steps of half a percent.
    wide = wide_dtype(state_BTD.dtype)
    weight = weight.to(wide)
    return torch.lerp(state_BTD.to(wide), first_candidate_BTD.to(wide), weight).to(state_BTD.dtype)


StateUpdateFunction = Callable[[Tensor, Tensor, Tensor, GateParams, UpdateModulation], Tensor]
UPDATES: dict[UpdateName, StateUpdateFunction] = {
    "replace": replace,
    "residual": residual,
    "delta": delta,
    "adaptive_delta": adaptive_delta,
    "decay_gate": decay_gate,
    "damped": damped,
    "anchored": damped,
}


class StateUpdate(nn.Module):
    """The parameters of the configured update, and the call to it.

    Args: d_state: width of the state.
    """

    def __init__(self, d_state: int, config: LoopConfig) -> None:
        super().__init__()
        self.name = config.update
        is_adaptive, is_delta = config.update == "adaptive_delta", config.update == "delta"
        self.gate = WideLinear(d_state, d_state) if is_adaptive else None
        self.gamma = nn.Parameter(torch.zeros(d_state)) if is_adaptive else None
        self.rate = nn.Parameter(torch.full((d_state,), config.delta_init)) if is_delta else None
        self.down = self.up = self.log_decay = None
        if config.update == "decay_gate":
            assert config.gate_rank is not None
            self.down = nn.Linear(d_state, config.gate_rank, bias=False)
            self.up = WideLinear(config.gate_rank, d_state)
            self.log_decay = nn.Parameter(torch.zeros(d_state))

    def params(self) -> GateParams:
        """What the update functions read."""
        logits = self.gate if self.down is None else self._thin_logits
        return GateParams(logits, self.gamma, self.rate, self.log_decay)

    def _thin_logits(self, x_BTD: Tensor) -> Tensor:
        assert self.down is not None and self.up is not None
        return self.up(self.down(x_BTD))

    def forward(
        self, prev_BTD: Tensor, candidate_BTD: Tensor, injected_BTD: Tensor, mod: UpdateModulation
    ) -> Tensor:
        update = UPDATES[self.name]
        return update(prev_BTD, candidate_BTD, injected_BTD, self.params(), mod)
