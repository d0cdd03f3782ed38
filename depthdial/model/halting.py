"""When to stop looping: exit gates, exit distributions, stopping rules.

Running a model until a rule says stop is in `engine/adaptive.py`.
Letters: B batch, T query tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn


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
        logits_BT = self.linear(x_BTD)[..., 0]
        # fp32: cumulative products of exit probabilities lose the small ones in bf16.
        return logits_BT if logits_BT.element_size() >= 4 else logits_BT.float()
