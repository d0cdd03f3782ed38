"""Intervals by resampling documents, and the words an interval allows.

Here live the bootstrap and the verdict rule. Losses are measured in
`eval/depth_sweep.py`; sentences are built in `report/findings.py`.

Tokens of one document are not independent, so whole documents are resampled
(cluster bootstrap) and the mean per token is a ratio of two sums over documents.
The intervals cover the choice of documents only: another training seed is
outside what they say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

Verdict = Literal["lower", "higher", "equal", "undecided"]

EQUAL_MARGIN_NATS = 0.01
"""Stated before anything is measured: differences per token inside it count as equal."""
BOOTSTRAP_SEED = 0
"""One seed for all tools, so that equal losses print equal intervals everywhere."""

# From here on the percentile interval and its widened form agree within 6 %.
FEW_DOCUMENTS = 30
# Bounds memory of one block of resamples: 4M indices, 32 MB.
_BLOCK_DRAWS = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A value with its percentile-bootstrap interval, in the unit of the value."""

    estimate: float
    low: float
    high: float
    level: float

    @property
    def excludes_zero(self) -> bool:
        """Whether every value of the interval has the same sign."""
        return self.low > 0 or self.high < 0


def paired_bootstrap(
    nll_a: np.ndarray,
    nll_b: np.ndarray,
    tokens: np.ndarray,
    *,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Difference a - b of the mean loss per token, both measured on the same documents.

    Pairing removes what the two share, the difficulty of each document, which is
    usually far larger than the difference itself. Equal inputs give exactly 0.

    Args:
        nll_a, nll_b: SUMS of negative log-likelihood per document, in nats.
        tokens: predicted tokens per document, at least 1 each.
        seed: of the resampling; equal seeds draw equal documents.
        resamples: bootstrap samples, at least 100.
        level: coverage aimed at, between 0 and 1.

    Raises: ValueError for fewer than 2 documents, unequal lengths, or values
        that are not finite. Below FEW_DOCUMENTS the interval is widened.
    """
    tokens = _vector(tokens, "tokens")
    difference = _vector(nll_a, "nll_a", like=tokens) - _vector(nll_b, "nll_b", like=tokens)
    return _ratio_interval(difference, tokens, seed=seed, resamples=resamples, level=level)


def mean_interval(
    nll: np.ndarray, tokens: np.ndarray, *, seed: int, resamples: int = 2000, level: float = 0.95
) -> Interval:
    """Mean loss per token of one model; arguments and errors as in `paired_bootstrap`."""
    tokens = _vector(tokens, "tokens")
    nll = _vector(nll, "nll", like=tokens)
    return _ratio_interval(nll, tokens, seed=seed, resamples=resamples, level=level)


def proportion_interval(
    correct: np.ndarray, total: np.ndarray, *, seed: int, resamples: int = 2000, level: float = 0.95
) -> Interval:
    """Share of correct answers, e.g. at one dependency depth, resampling documents.

    Documents without such an answer (`total` 0) say nothing about the share and
    are left out. If all answers are right, or all wrong, resampling shows no
    spread; the open side is then the exact binomial bound with documents as
    trials, 1 - alpha**(1/n) for alpha = (1 - level) / 2.

    Args:
        correct, total: counts per document, 0 <= correct <= total.

    Raises: ValueError if fewer than 2 documents have an answer, or for
        impossible counts.
    """
    correct, total = np.asarray(correct), np.asarray(total)
    if correct.shape != total.shape or correct.ndim != 1:
        raise ValueError(
            f"correct and total need one count per document; got shapes {correct.shape} and "
            f"{total.shape}."
        )
    if np.any(correct < 0) or np.any(correct > total):
        raise ValueError("each document needs 0 <= correct <= total; some counts break this.")
    answered = total > 0
    correct = _vector(correct[answered], "correct")
    total = _vector(total[answered], "total")
    interval = _ratio_interval(correct, total, seed=seed, resamples=resamples, level=level)
    reach = 1 - ((1 - level) / 2) ** (1 / len(total))
    if interval.estimate == 1:
        return Interval(1.0, 1 - reach, 1.0, level)
    if interval.estimate == 0:
        return Interval(0.0, 0.0, reach, level)
    return Interval(interval.estimate, max(0.0, interval.low), min(1.0, interval.high), level)


def compare(interval: Interval, *, margin: float) -> Verdict:
    """What an interval of a difference a - b allows one to say about a.

    equal: the whole interval lies inside [-margin, +margin]. This comes first:
        a difference can be resolved from zero and still be too small to matter;
        `interval.excludes_zero` tells the two apart.
    lower, higher: the whole interval lies on that side of zero.
    undecided: everything else. An interval that contains zero is never by
        itself evidence of equality.

    Raises: ValueError for a negative margin or a bound that is not a number.
    """
    if not margin >= 0:
        raise ValueError(f"margin={margin} must be at least 0, in the unit of the difference.")
    if math.isnan(interval.low) or math.isnan(interval.high):
        raise ValueError(f"interval [{interval.low}, {interval.high}] is not a pair of numbers.")
    if -margin <= interval.low and interval.high <= margin:
        return "equal"
    if interval.high < 0:
        return "lower"
    if interval.low > 0:
        return "higher"
    return "undecided"


def _ratio_interval(
    numerator: np.ndarray, denominator: np.ndarray, *, seed: int, resamples: int, level: float
) -> Interval:
    """sum(numerator) / sum(denominator) with a percentile interval over documents.

    Below FEW_DOCUMENTS it is widened about the estimate by sqrt(n / (n - 1)) * t / z, what the
    interval of a mean lacks when n values stand for a normal population (the expanded percentile
    interval of Hesterberg, arXiv 1411.5279); with 2 documents it would cover half of the time.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, e.g. 0.95.")
    if resamples < 100:
        raise ValueError(f"resamples={resamples} is too few for a quantile; give at least 100.")
    rng = np.random.default_rng(seed)
    count = len(numerator)
    rows = max(1, _BLOCK_DRAWS // count)
    ratios = np.empty(resamples)
    for start in range(0, resamples, rows):
        drawn = rng.integers(0, count, size=(min(rows, resamples - start), count))
        sums = numerator[drawn].sum(axis=1)
        ratios[start : start + len(drawn)] = sums / denominator[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    estimate = numerator.sum() / denominator.sum()
    if count < FEW_DOCUMENTS:
        wider = math.sqrt(count / (count - 1)) * _t_over_z((1 + level) / 2, count - 1)
        low, high = (estimate + wider * (bound - estimate) for bound in (low, high))
    return Interval(float(estimate), float(low), float(high), level)


def _t_over_z(probability: float, degrees: int) -> float:
    """Quantile of Student's t over that of the normal distribution, probability > 1/2."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return middle / NormalDist().inv_cdf(probability)


def _t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0 and whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0 if degrees == 1 else term
    for power in range(3 if is_odd else 2, degrees - 1, 2):
        term *= (power - 1) / power * cosine**2
        total += term
    if is_odd:
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2


def _vector(values: np.ndarray, name: str, *, like: np.ndarray | None = None) -> np.ndarray:
    """One finite float64 per document; token and answer counts at least 1."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) < 2:
        raise ValueError(
            f"{name} has shape {vector.shape}; an interval over documents needs one value for "
            "each of at least 2 documents."
        )
    if like is not None and vector.shape != like.shape:
        raise ValueError(f"{name} has {len(vector)} documents, the token counts {len(like)}.")
    if not np.all(np.isfinite(vector)):
        bad = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise ValueError(f"{name}[{bad}] is {vector[bad]}; every document needs a finite value.")
    if name in ("tokens", "total") and np.any(vector < 1):
        bad = int(np.argmin(vector))
        raise ValueError(f"{name}[{bad}] is {vector[bad]:g}; leave out documents without tokens.")
    return vector
