"""Loop counts of the two Poisson samplers: one draw from random bits, and exact marginals.

    poisson_lognormal   1 + Poisson(exp(mu + sigma z)),  mu = ln r - sigma^2 / 2,  sigma = 1/2
    poisson_truncated   max(1, Poisson(r))

r is the mean of the rate, so the first has mean r + 1 (as its source does). Every draw above
`max_loops` runs `max_loops`: no model is run deeper than its config says it was trained. With
`max_loops` of three times r = 32 that concerns 8 in 1,000 draws of the first, none of the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np

from depthdial.training.random_bits import open_uniform

PoissonSampler = Literal["poisson_lognormal", "poisson_truncated"]
SIGMA = 0.5
"""Standard deviation of the log of the rate (arXiv 2502.05171)."""
BITS_PER_DRAW = 2
"""Integers of random bits that one draw takes: of the Poisson number, of its rate."""
# Nodes of the integral over z; the trapezoid rule is exact to rounding for a smooth integrand
# that vanishes at both ends.
QUADRATURE_POINTS, QUADRATURE_END = 2001, 9.0


def poisson_loops(
    bits: Sequence[int], *, sampler: PoissonSampler, mean_loops: int, max_loops: int
) -> int:
    """Loop count in 1..max_loops from `BITS_PER_DRAW` integers of 64 random bits."""
    uniform = open_uniform(bits[0])
    if sampler == "poisson_truncated":
        return max(1, _poisson(uniform, rate=mean_loops, limit=max_loops))
    log_rate = math.log(mean_loops) - SIGMA**2 / 2 + SIGMA * _normal(open_uniform(bits[1]))
    return 1 + _poisson(uniform, rate=math.exp(log_rate), limit=max_loops - 1)


def poisson_probabilities(
    sampler: PoissonSampler, *, mean_loops: int, max_loops: int
) -> tuple[float, ...]:
    """Share of draws at k = 1..max_loops; the last holds everything above it too."""
    counts = np.arange(max_loops)
    if sampler == "poisson_truncated":
        shares = _pmf(counts, float(mean_loops))
        below = np.concatenate([[shares[0] + shares[1]], shares[2:]]) if max_loops > 1 else []
    else:
        z = np.linspace(-QUADRATURE_END, QUADRATURE_END, QUADRATURE_POINTS)
        weights = np.exp(-(z**2) / 2)
        rates = np.exp(math.log(mean_loops) - SIGMA**2 / 2 + SIGMA * z)
        below = _pmf(counts[: max_loops - 1, None], rates) @ (weights / weights.sum())
    return (*(float(share) for share in below), max(0.0, 1.0 - float(np.sum(below))))


def _poisson(uniform: float, *, rate: float, limit: int) -> int:
    """Smallest n whose distribution function exceeds `uniform`, or `limit` if that is larger."""
    log_rate, cumulative = math.log(rate), 0.0
    for n in range(limit):
        cumulative += math.exp(n * log_rate - rate - math.lgamma(n + 1))
        if uniform < cumulative:
            return n
    return limit


def _normal(uniform: float) -> float:
    """Standard normal value with this distribution function."""
    return NormalDist().inv_cdf(uniform)


def _pmf(counts: np.ndarray, rate: np.ndarray | float) -> np.ndarray:
    """Probability of each count at each rate; log space, as a large rate's e^-rate is 0."""
    log_factorials = np.vectorize(math.lgamma, otypes=[float])(counts + 1)
    return np.exp(counts * np.log(rate) - rate - log_factorials)
