"""The model and its cross entropy as one module.

Terms beside cross entropy are in `objective.py`, compilation and the optimizer step in `step.py`.
Letters: B rows, T tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthdial.data.packing import Batch
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.schedule import NumLoops
from depthdial.train.losses import token_losses


class LossModule(nn.Module):
    """Rows and loop counts in, token losses out."""

    def __init__(self, model: LoopedLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, num_loops: NumLoops, no_grad_loops: NumLoops = 0) -> Tensor:
        """Negative log-likelihood of every target in nats, 0 where none is scored, [B, T] fp32.

        Args: no_grad_loops: first passes, of all rows or per row, that no gradient enters.
        """
        return self.read_out(self.trunk(batch, num_loops, no_grad_loops), batch.targets_BT)

    def trunk(
        self,
        batch: Batch,
        num_loops: NumLoops,
        no_grad_loops: NumLoops = 0,
        *,
        step_sizes: Tensor | None = None,
    ) -> Tensor:
        """The model without its head, [B, T, D]."""
        return self.model.trunk(
            batch.tokens_BT,
            num_loops=num_loops,
            padding_mask_BT=batch.padding_mask_BT,
            document_ids_BT=batch.document_ids_BT,
            step_sizes=step_sizes,
            no_grad_loops=no_grad_loops,
        )

    def read_out(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Head and loss together: one graph when compiled."""
        return token_losses(self.model.head(x_BTD), targets_BT)
