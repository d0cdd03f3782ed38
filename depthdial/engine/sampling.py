"""From next-token logits to a token: temperature, top-k, top-p, min-p, seeded per row.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-6
"""Smallest temperature above 0: at less, logits divided by it leave the range of fp32."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Fields:
        temperature: 0 is greedy, and then nothing below but the seed may be set; else at least
            MIN_TEMPERATURE, larger is flatter.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: of what top_k keeps, renormalised, keep the most likely tokens until their
            probability reaches this, in (0, 1].
        min_p: drop tokens below this fraction of the most likely one's probability, in [0, 1].
        seed: row i of a batch draws from a stream of its own, that of (seed, i): its tokens do
            not depend on its neighbours, and equal prompts in one batch differ. No effect at
            temperature 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            f"temperature 0 or {MIN_TEMPERATURE:g} <= temperature < inf": self.temperature == 0
            or MIN_TEMPERATURE <= self.temperature < math.inf,
            "a whole top_k >= 0": _is_whole(self.top_k) and self.top_k >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "0 <= min_p <= 1": 0 <= self.min_p <= 1,
            "a whole seed, 0 <= seed < 2^63": _is_whole(self.seed) and 0 <= self.seed < 2**63,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"{self}: needs {', '.join(broken)}.")
        filters = {"top_k": self.top_k != 0, "top_p": self.top_p != 1, "min_p": self.min_p != 0}
        idle = [name for name, is_set in filters.items() if is_set]
        if self.temperature == 0 and idle:
            raise ValueError(
                f"{', '.join(idle)}: no effect at temperature=0, which always takes the most "
                "likely token. Leave it out, or set a temperature above 0."
            )

    def generators(self, num_rows: int) -> list[torch.Generator]:
        """One random stream per row."""
        return [
            torch.Generator().manual_seed(_stream_seed(self.seed, row)) for row in range(num_rows)
        ]


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from, fp32 [B, V]; greedy is a point mass."""
    if sampling.temperature == 0:
        best_B = logits_BV.argmax(dim=-1)
        return torch.nn.functional.one_hot(best_B, logits_BV.shape[-1]).float()
    # fp32: the tail that top-p cuts is lost in bf16 cumulative sums.
    probs_BV = (logits_BV.float() / sampling.temperature).softmax(dim=-1)
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.ones_like(sorted_BV, dtype=torch.bool)
    if sampling.top_k > 0:
        keep_BV[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        left_BV = _renormalised(sorted_BV, keep_BV)
        keep_BV &= left_BV.cumsum(dim=-1) - left_BV < sampling.top_p
    if sampling.min_p > 0:
        keep_BV &= sorted_BV >= sampling.min_p * sorted_BV[:, :1]
    return torch.zeros_like(probs_BV).scatter(1, order_BV, _renormalised(sorted_BV, keep_BV))


def sample(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """One token id per row, [B] int64."""
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    probs_BV = probabilities(logits_BV, sampling).cpu()
    drawn = [
        torch.multinomial(probs_V, 1, generator=generator)
        for probs_V, generator in zip(probs_BV, generators, strict=True)
    ]
    return torch.cat(drawn).to(logits_BV.device)


def chosen_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """Log-probability of one token per row in nats, before temperature and filters, fp32 [B]."""
    # fp32: a log of a sum over V bf16 exponentials keeps two digits.
    logprobs_BV = logits_BV.float().log_softmax(dim=-1)
    return logprobs_BV.gather(1, tokens_B.to(logits_BV.device)[:, None])[:, 0].cpu()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _renormalised(probs_BV: Tensor, keep_BV: Tensor) -> Tensor:
    kept_BV = probs_BV.masked_fill(~keep_BV, 0.0)
    return kept_BV / kept_BV.sum(dim=-1, keepdim=True)


def _stream_seed(seed: int, row: int) -> int:
    # A hash: torch's CPU generator reads 32 bits only, so seeds 2^32 apart would share a stream.
    digest = hashlib.sha256(f"{seed}:{row}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
