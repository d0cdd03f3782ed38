"""Rules that stop looping: the published exit criteria, one protocol.

A rule looks at rows after a pass and says which stop; it never runs the model. Running a model
until a rule says stop is in `engine/adaptive.py`.
Letters: N rows that loop, T query tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthdial.config import nearest_name
from depthdial.layers.primitives import wide

MIN_P_FRAC = 0.1
"""`minp_kl` levels all tokens below this fraction of the most likely one's probability."""
INITIAL_ENTROPY = 100.0
"""What `entropy_diff` compares the first entropy with, in nats: no vocabulary reaches it."""


class ExitPoint(NamedTuple):
    """What a rule sees of N rows after a pass, or before the first one.

    Fields:
        state_NTD: state of the call's tokens.
        is_token_NT: False at padding; every row has a real token.
        last_N: place of each row's last real token.
        logits_NV: readout at that token; None unless the rule needs it, and before the first pass.
        gate_logit_N: exit gate at that token; None unless the rule needs it, and before the first.
        vocab_size: V.
    """

    state_NTD: Tensor
    is_token_NT: Tensor
    last_N: Tensor
    logits_NV: Tensor | None
    gate_logit_N: Tensor | None
    vocab_size: int

    @property
    def last_state_ND(self) -> Tensor:
        """State at each row's last real token, at least float32."""
        rows_N = torch.arange(len(self.last_N), device=self.state_NTD.device)
        return wide(self.state_NTD[rows_N, self.last_N])


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Decides after a pass which rows stop.

    A subclass says what it measures and how the threshold is read. What it must remember from one
    pass to the next is one tensor with a row per row of the batch, so that a caller can narrow it.

    Fields:
        threshold: see the subclass.
        min_loops: passes before the first check.
        check_every: passes from one check to the next; comparisons are between checks.

    Of the class:
        name: what users call it.
        needs_logits, needs_gate: which readouts `measure` wants.
        counts_every_pass: `measure` is called after passes that are not checked, too.
        default_threshold: the published one; None where there is none.
        is_allowed: thresholds in words, and as a test.
    """

    threshold: float
    min_loops: int = 1
    check_every: int = 1

    name: ClassVar[str]
    needs_logits: ClassVar[bool] = False
    needs_gate: ClassVar[bool] = False
    counts_every_pass: ClassVar[bool] = False
    default_threshold: ClassVar[float | None] = None
    is_allowed: ClassVar[tuple[str, Callable[[float], bool]]] = (
        "a positive number",
        lambda x: 0 < x < math.inf,
    )

    def __post_init__(self) -> None:
        text, allows = self.is_allowed
        if not allows(self.threshold):
            raise ValueError(f"exit threshold {self.threshold!r}: {self.name} takes {text}.")
        for name, count in (("min_loops", self.min_loops), ("check_every", self.check_every)):
            if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name}={count!r}; give a whole number of at least 1.")

    def is_due(self, loop_idx: int) -> bool:
        """Whether this pass is checked."""
        since = loop_idx + 1 - self.min_loops
        return since >= 0 and since % self.check_every == 0

    def begin(self, start: ExitPoint) -> Tensor:
        """What to remember before the first pass, [N, ...]."""
        raise NotImplementedError

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The measured value [N], and what to remember for the next check."""
        raise NotImplementedError

    def stops(self, value_N: Tensor) -> Tensor:
        """Which rows stop at this value; one that is no number never does."""
        return value_N < self.threshold


class KL(StoppingRule):
    """KL(previous readout || this one) in nats below the threshold; the first: uniform."""

    name = "kl"
    needs_logits = True
    default_threshold = 1e-3

    def begin(self, start: ExitPoint) -> Tensor:
        return _uniform(start)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        log_p_NV = _logits(point).log_softmax(dim=-1)
        return _kl(memory, log_p_NV), log_p_NV


class MinPKL(StoppingRule):
    """As `KL`, after unlikely tokens are given 1 / V each and all are renormalised."""

    name = "minp_kl"
    needs_logits = True
    default_threshold = 1e-5

    def begin(self, start: ExitPoint) -> Tensor:
        return _uniform(start)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        p_NV = _logits(point).softmax(dim=-1)
        is_unlikely_NV = p_NV < MIN_P_FRAC * p_NV.amax(dim=-1, keepdim=True)
        p_NV = p_NV.masked_fill(is_unlikely_NV, 1 / point.vocab_size)
        log_p_NV = (p_NV / p_NV.sum(dim=-1, keepdim=True)).log()
        return _kl(memory, log_p_NV), log_p_NV


class EntropyDiff(StoppingRule):
    """Change of the readout's entropy in nats below the threshold; the first: from 100."""

    name = "entropy_diff"
    needs_logits = True
    default_threshold = 1e-3

    def begin(self, start: ExitPoint) -> Tensor:
        return _per_row(start, INITIAL_ENTROPY)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        log_p_NV = _logits(point).log_softmax(dim=-1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=-1)
        return (entropy_N - memory).abs(), entropy_N


class ArgmaxStability(StoppingRule):
    """The most likely token stayed the same for so many checks in a row."""

    name = "argmax_stability"
    needs_logits = True
    default_threshold = 5
    is_allowed = ("a whole number of at least 1", lambda x: x >= 1 and x == int(x))

    def begin(self, start: ExitPoint) -> Tensor:
        no_token_N = _per_row(start, -1).long()
        return torch.stack([no_token_N, torch.zeros_like(no_token_N)], dim=-1)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        best_N = _logits(point).argmax(dim=-1)
        unchanged_N = torch.where(best_N == memory[:, 0], memory[:, 1] + 1, 0)
        return unchanged_N.float(), torch.stack([best_N, unchanged_N], dim=-1)

    def stops(self, value_N: Tensor) -> Tensor:
        return value_N >= self.threshold


class LatentDiff(StoppingRule):
    """|s_i - s_{i-1}| / |s_i|, mean over the call's tokens, below the threshold."""

    name = "latent_diff"
    default_threshold = 0.03

    def begin(self, start: ExitPoint) -> Tensor:
        return wide(start.state_NTD)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        state_NTD = wide(point.state_NTD)
        moved_NT = (state_NTD - memory).norm(dim=-1) / state_NTD.norm(dim=-1)
        return _mean_of_real(moved_NT, point.is_token_NT), state_NTD


class Cosine(StoppingRule):
    """1 - cos(s_i, s_{i-1}), cosine as mean over the call's tokens, below the threshold.

    From a zero state it is not defined, and the row goes on.
    """

    name = "cosine"
    default_threshold = 1e-3

    def begin(self, start: ExitPoint) -> Tensor:
        return wide(start.state_NTD)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        state_NTD = wide(point.state_NTD)
        norms_NT = state_NTD.norm(dim=-1) * memory.norm(dim=-1)
        cosine_NT = (state_NTD * memory).sum(dim=-1) / norms_NT
        return 1 - _mean_of_real(cosine_NT, point.is_token_NT), state_NTD


class Convergence(StoppingRule):
    """|s_i - s_{i-1}| at the last token below the threshold."""

    name = "convergence"
    default_threshold = 1e-2

    def begin(self, start: ExitPoint) -> Tensor:
        return start.last_state_ND

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        last_ND = point.last_state_ND
        return (last_ND - memory).norm(dim=-1), last_ND


UNIT_RANGE = ("a number of at least 0 and below 1", lambda x: 0 <= x < 1)


class Confidence(StoppingRule):
    """sigmoid(exit gate) at the last token above the threshold."""

    name = "threshold"
    needs_gate = True
    default_threshold = 0.6
    is_allowed = UNIT_RANGE

    def begin(self, start: ExitPoint) -> Tensor:
        return _per_row(start, 0.0)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(_gate(point)), memory

    def stops(self, value_N: Tensor) -> Tensor:
        return value_N > self.threshold


class CumulativeConfidence(StoppingRule):
    """1 - prod (1 - sigmoid(exit gate)) over the checks, at the last token, above the threshold."""

    name = "cdf"
    needs_gate = True
    default_threshold = 0.6
    is_allowed = UNIT_RANGE

    def begin(self, start: ExitPoint) -> Tensor:
        return _per_row(start, 0.0)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        return _stopped_by_now(point, memory)

    def stops(self, value_N: Tensor) -> Tensor:
        return value_N > self.threshold


class QExit(StoppingRule):
    """The distribution of `exit_distribution` at the last token has summed up to q, as `q_exit`.

    The gate of every pass counts, checked or not. The threshold is q; from 1 on it never stops.
    """

    name = "q_exit"
    needs_gate = True
    counts_every_pass = True
    is_allowed = ("q, a number of at least 0", lambda x: 0 <= x < math.inf)

    def begin(self, start: ExitPoint) -> Tensor:
        return _per_row(start, 0.0)

    def measure(self, point: ExitPoint, memory: Tensor) -> tuple[Tensor, Tensor]:
        return _stopped_by_now(point, memory)

    def stops(self, value_N: Tensor) -> Tensor:
        return (value_N >= self.threshold) & (self.threshold < 1)


STOPPING_RULES: dict[str, type[StoppingRule]] = {
    rule.name: rule
    for rule in (
        KL,
        LatentDiff,
        EntropyDiff,
        MinPKL,
        ArgmaxStability,
        Cosine,
        Confidence,
        CumulativeConfidence,
        Convergence,
        QExit,
    )
}
"""Rules by name: six of arXiv 2502.05171, three of arXiv 2605.11011, one of arXiv 2510.25741."""


def stopping_rule(
    name: str, threshold: float | None = None, *, min_loops: int = 1, check_every: int = 1
) -> StoppingRule:
    """The rule of this name.

    Args: threshold: None for the published default; q_exit has none.
    Raises: ValueError for an unknown name (with the nearest), or a number out of range.
    """
    if name not in STOPPING_RULES:
        raise ValueError(
            f"unknown stopping rule '{name}'.{nearest_name(name, list(STOPPING_RULES))}"
        )
    rule = STOPPING_RULES[name]
    threshold = rule.default_threshold if threshold is None else threshold
    if threshold is None:
        raise ValueError(
            f"{name} needs a threshold: the published default is to run all loops. Give a q "
            "between 0 (one loop) and 1 (all of them)."
        )
    return rule(threshold=threshold, min_loops=min_loops, check_every=check_every)


def _logits(point: ExitPoint) -> Tensor:
    assert point.logits_NV is not None, "this rule needs logits"
    return wide(point.logits_NV)


def _gate(point: ExitPoint) -> Tensor:
    assert point.gate_logit_N is not None, "this rule needs the exit gate"
    return wide(point.gate_logit_N)


def _per_row(start: ExitPoint, value: float) -> Tensor:
    """One number per row, at least float32."""
    return torch.full_like(wide(start.state_NTD[:, 0, 0]), value)


def _uniform(start: ExitPoint) -> Tensor:
    """Log probabilities of the uniform distribution, [N, V]."""
    return _per_row(start, -math.log(start.vocab_size))[:, None].expand(-1, start.vocab_size)


def _kl(prev_log_p_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    return (prev_log_p_NV.exp() * (prev_log_p_NV - log_p_NV)).sum(dim=-1)


def _mean_of_real(x_NT: Tensor, is_token_NT: Tensor) -> Tensor:
    return x_NT.masked_fill(~is_token_NT, 0.0).sum(dim=-1) / is_token_NT.sum(dim=-1)


def _stopped_by_now(point: ExitPoint, log_going_N: Tensor) -> tuple[Tensor, Tensor]:
    """1 - prod (1 - lambda), and the logarithm of the product."""
    # Logarithms: the product itself would round 1 - lambda to 0 long before a gate is sure.
    log_going_N = log_going_N + nn.functional.logsigmoid(-_gate(point))
    return -torch.expm1(log_going_N), log_going_N
