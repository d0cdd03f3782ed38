"""Exit gates, and the distributions over loops that they give.

Rules that stop a run are in `stopping_rules.py`.
Letters: B batch, T query tokens, D model width, V vocabulary, L stacked loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthdial.config import ModelConfig
from depthdial.layers.primitives import wide


class ExitGate(nn.Module):
    """Logit of stopping after a loop, read from the state.

    Args: d_model: D; has_norm: read LayerNorm(state), not the state.
    """

    def __init__(self, d_model: int, *, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model) if has_norm else None
        self.linear = nn.Linear(d_model, 1)

    def forward(self, state_BTD: Tensor) -> Tensor:
        """Returns: logits [B, T], at least float32."""
        x_BTD = state_BTD if self.norm is None else self.norm(state_BTD)
        return wide(self.linear(x_BTD)[..., 0])


def stale_gate(config: ModelConfig) -> tuple[str, ...]:
    """In one sentence, that the exit gate does not belong to the other weights; empty if it does.

    What it reads has moved since it was trained.
    """
    if not config.exit_gate_stale:
        return ()
    return (
        "The exit gate is stale: the other weights were trained since, without it, so that rules "
        "which read it (threshold, cdf, q_exit) stop at numbers that mean little. Rules that "
        "compare states or readouts, such as kl, go on working.",
    )


def exit_distribution(gate_logits_BTL: Tensor) -> Tensor:
    """Probability of stopping after each loop, [B, T, L], at least float32.

        p_i = lambda_i * prod_{j < i} (1 - lambda_j),  lambda = sigmoid(gate logit)

    The last loop takes the remaining mass; its own gate has no effect.
    Source: arXiv 2510.25741, section 3; i is loop_idx + 1.
    """
    gates_BTL = wide(gate_logits_BTL)
    # sigmoid(-x), because 1 - sigmoid(x) of a sure gate rounds to 0.
    going_BTL = torch.cumprod(torch.sigmoid(-gates_BTL[..., :-1]), dim=-1)
    reached_BTL = torch.cat([torch.ones_like(gates_BTL[..., :1]), going_BTL], dim=-1)
    p_BTL = reached_BTL[..., :-1] * torch.sigmoid(gates_BTL[..., :-1])
    return torch.cat([p_BTL, reached_BTL[..., -1:]], dim=-1)


def cumulative_exit(p_BTL: Tensor) -> Tensor:
    """Probability of having stopped after each loop at the latest, [B, T, L]."""
    return torch.cumsum(wide(p_BTL), dim=-1)


def q_exit(p_BTL: Tensor, q: float) -> Tensor:
    """Loops used by the first cumulative probability >= q, [B, T] int64, counted from 1.

    q = 0 stops after the first loop. q >= 1 never stops before the last one, also where rounding
    lets the sum reach 1 early.
    """
    num_loops = p_BTL.shape[-1]
    if q >= 1:
        return p_BTL.new_full(p_BTL.shape[:-1], num_loops, dtype=torch.int64)
    return 1 + (cumulative_exit(p_BTL)[..., :-1] < q).sum(dim=-1)


def select_by_loop(logits_by_loop: Sequence[Tensor], loops_BT: Tensor) -> Tensor:
    """For each token the logits after its own number of loops, [B, T, V].

    Args: logits_by_loop: [B, T, V] after loop 1, 2, ...; loops_BT: counted from 1.
    Raises: ValueError if a count is not among the given loops.
    """
    lowest, highest = int(loops_BT.min()), int(loops_BT.max())
    if lowest < 1 or highest > len(logits_by_loop):
        raise ValueError(
            f"loop counts {lowest}..{highest} ask for logits that are not given; there are those "
            f"after 1..{len(logits_by_loop)} loops."
        )
    chosen_BTV = logits_by_loop[0]
    for loop_idx, logits_BTV in enumerate(logits_by_loop):
        chosen_BTV = torch.where((loops_BT == loop_idx + 1)[..., None], logits_BTV, chosen_BTV)
    return chosen_BTV


def mix_by_distribution(logits_by_loop: Sequence[Tensor], p_BTL: Tensor) -> Tensor:
    """Logits of all loops, weighted by their exit probability, [B, T, V], at least float32.

    A mixture of logits, not of probabilities: the published loss with labels reads this one.
    Raises: ValueError if the counts of loops differ.
    """
    if len(logits_by_loop) != p_BTL.shape[-1]:
        raise ValueError(
            f"{len(logits_by_loop)} loops of logits, but {p_BTL.shape[-1]} exit probabilities; "
            "both must agree."
        )
    parts = [p_BTL[..., i, None] * wide(x_BTV) for i, x_BTV in enumerate(logits_by_loop)]
    return torch.stack(parts).sum(dim=0)
