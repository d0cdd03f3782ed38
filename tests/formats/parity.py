"""How close a model of ours comes to a reference, after the prelude, every loop and the coda.

A port is verified against outputs of the published code, never against a second writing of our
own; so every report names where its reference comes from, and compares states, not logits alone.
Letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM, last_states

PRELUDE, CODA, LOGITS = "prelude", "coda", "logits"


def trace_states(
    model: LoopedLM,
    tokens_BT: Tensor,
    num_loops: int,
    *,
    initial_state_BTD: Tensor | None = None,
    step_sizes: Tensor | None = None,
) -> list[Tensor]:
    """The residual stream [B, T, D] after the prelude, after each loop, and after the coda.

    Returns: num_loops + 2 entries, in the order of `state_labels`; `model.head` of the last one
        is exactly what `model.forward` returns.
    """
    states: list[Tensor] = []

    def record(loop_idx: int, state_BTD: Tensor, rows: Tensor | None) -> None:
        states.append(state_BTD.clone())

    with torch.no_grad():
        call = Call(
            tokens_BT,
            num_loops=num_loops,
            initial_state_BTD=initial_state_BTD,
            step_sizes=step_sizes,
            on_loop=record,
        )
        begun = model.begin(call)
        coda_BTD = model.finish(last_states(model.iterate(begun)), begun)
    return [begun.h_in_BTD, *states, coda_BTD]


def state_labels(num_loops: int) -> list[str]:
    """Names of the entries of `trace_states`."""
    return [PRELUDE, *(f"loop {number}" for number in range(1, num_loops + 1)), CODA]


@dataclass(frozen=True)
class ParityRow:
    """One compared tensor.

    Fields:
        label: of `state_labels`, or `logits`.
        cosine: of the worst token, 1 for equal directions.
        max_difference: largest absolute difference.
    """

    label: str
    cosine: float
    max_difference: float


@dataclass(frozen=True)
class ParityReport:
    """A comparison with a named reference.

    Fields:
        reference: where the expected tensors come from. num_loops: k.
        rows: compared tensors in the order of computation.
        not_given: labels that the reference has no tensor for.
    """

    reference: str
    num_loops: int
    rows: tuple[ParityRow, ...]
    not_given: tuple[str, ...]

    @property
    def max_difference(self) -> float:
        """Largest absolute difference of all compared tensors."""
        return max(row.max_difference for row in self.rows)

    def to_text(self) -> str:
        """One line per compared tensor, under a line that names the reference."""
        lines = [
            f"reference: {self.reference}",
            f"{self.num_loops} loops",
            f"{'':<10}{'cosine':>12}{'difference':>14}",
        ]
        lines += [
            f"{row.label:<10}{row.cosine:>12.8f}{row.max_difference:>14.2e}" for row in self.rows
        ]
        if self.not_given:
            lines.append(f"not in the reference: {', '.join(self.not_given)}")
        return "\n".join(lines)


def compare_states(
    model: LoopedLM,
    tokens_BT: Tensor,
    num_loops: int,
    *,
    expected: Mapping[str, Tensor],
    reference: str,
    initial_state_BTD: Tensor | None = None,
    step_sizes: Tensor | None = None,
) -> ParityReport:
    """Run the model and compare it with a reference.

    Args:
        expected: label -> tensor of the reference; labels of `state_labels`, and `logits`.
        reference: what made them: code, version, commit.

    Raises: ValueError for a reference without a name or without tensors, an unknown label, or a
        shape that differs.
    """
    labels = state_labels(num_loops)
    known = [*labels, LOGITS]
    if not reference.strip() or not expected:
        raise ValueError(
            "a parity report needs a named reference with at least one tensor; a model compared "
            "with itself proves nothing."
        )
    unknown = [label for label in expected if label not in known]
    if unknown:
        raise ValueError(f"unknown labels {unknown}; known at {num_loops} loops: {known}.")
    states = trace_states(
        model,
        tokens_BT,
        num_loops,
        initial_state_BTD=initial_state_BTD,
        step_sizes=step_sizes,
    )
    with torch.no_grad():
        ours = dict(zip(known, [*states, model.head(states[-1])], strict=True))
    rows = [_compare(label, ours[label], expected[label]) for label in known if label in expected]
    return ParityReport(
        reference=reference,
        num_loops=num_loops,
        rows=tuple(rows),
        not_given=tuple(label for label in known if label not in expected),
    )


def _compare(label: str, ours: Tensor, expected: Tensor) -> ParityRow:
    if ours.shape != expected.shape:
        raise ValueError(
            f"'{label}' has shape {tuple(ours.shape)} here and {tuple(expected.shape)} in the "
            "reference; both must be of the same tokens."
        )
    # fp64: the cosine of nearly equal vectors differs from 1 by less than fp32 resolves.
    ours, expected = ours.double(), expected.double()
    return ParityRow(
        label=label,
        cosine=float(F.cosine_similarity(ours, expected, dim=-1).min()),
        max_difference=float((ours - expected).abs().max()),
    )
