"""Initial state, injection of the prelude output, and the state updates.

All updates share `update(prev, candidate, injected, params, mod)`; loop index and loop count
reach them only as tensors in `mod`.
Letters: B batch, T query tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import LoopConfig, UpdateName


class UpdateModulation(NamedTuple):
    """Conditioning of the update, [1 or B, 1, D] or broadcastable; None where there is none.

    exit_gain multiplies the rate (pi_i + g_exit of ELR); gate_bypass is 1 where the candidate
    replaces the state exactly and 0 elsewhere.
    """

    exit_gain: Tensor | None
    gate_bypass: Tensor | None


class GateParams(NamedTuple):
    """Parameters of the updates: W [D, D], b [D], gamma [D] or a rate alpha [D]; None if unused."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    gamma: Tensor | None = None
    rate: Tensor | None = None


def initial_state(h_in_BTD: Tensor) -> Tensor:
    """s_0 = h_in (ELR section 3.1)."""
    return h_in_BTD


def inject(state_BTD: Tensor, h_in_BTD: Tensor, *, reinject: bool) -> Tensor:
    """Core input before modulation: s + h_in with re-injection, else s (ELR Eq. 1)."""
    return state_BTD + h_in_BTD if reinject else state_BTD


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
    return torch.lerp(next_BTD, candidate_BTD.to(next_BTD.dtype), mod.gate_bypass)


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
        params: weight W [D, D], bias b [D], gamma [D]; at zero, beta = 0.5 ln 2.
        mod: exit gain multiplies beta.

    Returns: next state, dtype of `prev_BTD`. beta is not bounded by 1.
    Source: ELR Eq. (2), arXiv 2610.12582; i is loop_idx + 1.
    """
    return _move(prev_BTD, candidate_BTD, adaptive_rate(injected_BTD, params), mod)


def adaptive_rate(injected_BTD: Tensor, params: GateParams) -> Tensor:
    """beta = sigmoid(W z + b) * softplus(gamma), at least fp32, [B, T, D]."""
    assert params.weight is not None and params.bias is not None and params.gamma is not None
    logits_BTD = F.linear(injected_BTD, params.weight)
    # fp32: near saturation the sigmoid of a bf16 logit moves in steps of half a percent.
    wide = torch.promote_types(logits_BTD.dtype, torch.float32)
    gate_BTD = torch.sigmoid(logits_BTD.to(wide) + params.bias.to(wide))
    return gate_BTD * F.softplus(params.gamma.to(wide))


def _move(prev_BTD: Tensor, candidate_BTD: Tensor, rate: Tensor, mod: UpdateModulation) -> Tensor:
    """prev + rate * (candidate - prev), exact where the rate is 0 or 1."""
    if mod.exit_gain is not None:
        rate = rate * mod.exit_gain
    if mod.gate_bypass is not None:
        rate = rate * (1 - mod.gate_bypass) + mod.gate_bypass
    # fp32: the difference of two close bf16 states keeps few correct bits (ELR Eq. 2).
    wide = torch.promote_types(prev_BTD.dtype, torch.float32)
    moved_BTD = torch.lerp(prev_BTD.to(wide), candidate_BTD.to(wide), rate.to(wide))
    return moved_BTD.to(prev_BTD.dtype)


StateUpdateFunction = Callable[[Tensor, Tensor, Tensor, GateParams, UpdateModulation], Tensor]
UPDATES: dict[UpdateName, StateUpdateFunction] = {
    "replace": replace,
    "residual": residual,
    "delta": delta,
    "adaptive_delta": adaptive_delta,
}


class StateUpdate(nn.Module):
    """The parameters of the configured update, and the call to it."""

    def __init__(self, d_model: int, config: LoopConfig) -> None:
        super().__init__()
        self.name = config.update
        is_adaptive, is_delta = config.update == "adaptive_delta", config.update == "delta"
        self.gate = nn.Linear(d_model, d_model) if is_adaptive else None
        self.gamma = nn.Parameter(torch.zeros(d_model)) if is_adaptive else None
        self.rate = nn.Parameter(torch.full((d_model,), config.delta_init)) if is_delta else None

    def params(self) -> GateParams:
        """The parameters as the update functions take them."""
        weight, bias = (None, None) if self.gate is None else (self.gate.weight, self.gate.bias)
        return GateParams(weight, bias, self.gamma, self.rate)

    def forward(
        self, prev_BTD: Tensor, candidate_BTD: Tensor, injected_BTD: Tensor, mod: UpdateModulation
    ) -> Tensor:
        update = UPDATES[self.name]
        return update(prev_BTD, candidate_BTD, injected_BTD, self.params(), mod)
