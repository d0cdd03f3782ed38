"""The model and its cross entropy as one module.

Readouts are here, each one graph when compiled; which rows have which is decided in
`objective.py`, compilation and the optimizer step in `step.py`.
Letters: B rows, T tokens, D model width, V vocabulary, N rows that are compared.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthdial.cache.loop_counts import NumLoops
from depthdial.data.packing import Batch
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.losses import squared_distance, token_divergences, token_losses


class LossModule(nn.Module):
    """Rows and loop counts in, token losses out."""

    def __init__(self, model: LoopedLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, num_loops: NumLoops, no_grad_loops: NumLoops = 0) -> Tensor:
        """Negative log-likelihood of every target in nats, 0 where none is scored, [B, T] fp32.

        Args: no_grad_loops: first passes, of all rows or per row, that no gradient enters.
        """
        return self.read_out(self.hidden_states(batch, num_loops, no_grad_loops), batch.targets_BT)

    def hidden_states(
        self,
        batch: Batch,
        num_loops: NumLoops,
        no_grad_loops: NumLoops = 0,
        *,
        step_sizes: Tensor | None = None,
    ) -> Tensor:
        """The model without its head, [B, T, D]."""
        call = Call(
            batch.tokens_BT,
            num_loops=num_loops,
            padding_mask_BT=batch.padding_mask_BT,
            document_ids_BT=batch.document_ids_BT,
            step_sizes=step_sizes,
            no_grad_loops=no_grad_loops,
        )
        return self.model.hidden_states(call)

    def read_out(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Head and loss together, [B, T] fp32."""
        return token_losses(self.model.head(x_BTD), targets_BT)

    def read_out_compared(
        self, x_BTD: Tensor, targets_BT: Tensor, teacher_NTV: Tensor, rows_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`read_out`, and the divergences of some rows from a teacher, [N, T] fp32.

        Args: rows_N: those that are compared; None for all.
        """
        logits_BTV = self.model.head(x_BTD)
        nll_BT = token_losses(logits_BTV, targets_BT)
        if rows_N is not None:
            logits_BTV, targets_BT = logits_BTV[rows_N], targets_BT[rows_N]
        return nll_BT, token_divergences(logits_BTV, teacher_NTV, targets_BT)

    def distance(self, long_BTD: Tensor, short_BTD: Tensor) -> Tensor:
        """How far what the head's matrix reads is from the longer path's, [B, T] fp32."""
        return squared_distance(self._normed(long_BTD), self._normed(short_BTD))

    def _normed(self, x_BTD: Tensor) -> Tensor:
        """The output after the final norm, where one acts there."""
        model = self.model
        if model.final_norm is None or model.config.final_norm == "loop":
            return x_BTD
        return model.final_norm(x_BTD)
