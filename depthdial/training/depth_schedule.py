"""How many loops each depth slice runs at each optimizer step, as a pure function.

Here live the samplers, the rotating override, the late switch, the rise of a curriculum, the
loops without gradient, the marginals they promise, and the random bits of all draws. No random
state exists anywhere: a draw depends on (seed, step, slice) alone, so any process can compute any
other's and a resumed run repeats them. `loops` below is k, `max_loops` is K.

    poisson_lognormal   1 + Poisson(exp(mu + sigma z)),  mu = ln r - sigma^2 / 2,  sigma = 1/2
    poisson_truncated   max(1, Poisson(r))

r is the mean of the rate, so the first has mean r + 1 (as its source does). Every draw above
`max_loops` runs `max_loops`: no model is run deeper than its config says it was trained. With
`max_loops` of three times r = 32 that concerns 8 in 1,000 draws of the first, none of the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import isqrt
from statistics import NormalDist
from typing import Literal, Self

import numpy as np

from depthdial.config import DepthConfig, SamplerName
from depthdial.config.effects import (
    FRACTION_SAMPLERS,
    INDEPENDENT_SAMPLERS,
    POISSON_SAMPLERS,
    SHARED_DRAW_SAMPLERS,
    whole_steps,
)

WEIGHTED_SAMPLERS = ("sync_weighted", "independent_weighted")
Curriculum = Literal["none", "linear", "one_minus_sqrt"]
PoissonSampler = Literal["poisson_lognormal", "poisson_truncated"]
SIGMA = 0.5
"""Standard deviation of the log of the rate (arXiv 2502.05171)."""
BITS_PER_DRAW = 2
"""Integers of random bits that one draw takes: of the Poisson number, of its rate."""
# Nodes of the integral over z; the trapezoid rule is exact to rounding for a smooth integrand
# that vanishes at both ends.
QUADRATURE_POINTS, QUADRATURE_END = 2001, 9.0
# High key words of the counter-based generator: keep the kinds of draws apart from each other
# and from anything else that takes the same seed.
DEPTH_STREAM = 0xDE97
PATH_STREAM = 0x9A78
RANDOM_BITS = 64


@dataclass(frozen=True, kw_only=True)
class DepthSchedule:
    """Everything a depth draw depends on, apart from the step and the slice.

    Fields as in `DepthConfig`; `max_loops` is the largest loop count drawn, `switch_step` the
    first step with mixed depth (every earlier step runs one loop), `curriculum_steps` the length
    of the rise that begins there.
    Raises: ValueError for a value out of range or an option that has no effect.
    """

    sampler: SamplerName
    max_loops: int
    fixed_loops: int | None = None
    listed_loops: tuple[int, ...] | None = None
    override_frac: float = 0.0
    seed: int = 0
    switch_step: int = 0
    depth_scope: Literal["step", "slice_group"] = "step"
    slices_per_draw: int | None = None
    mean_loops: int | None = None
    backprop_loops: int | None = None
    curriculum: Curriculum = "none"
    curriculum_steps: int = 0

    @classmethod
    def from_config(
        cls, config: DepthConfig, *, max_loops: int, seed: int, total_steps: int
    ) -> Self:
        """Resolve the fractions into steps; half a step is rounded down.

        A rise of no whole step is none: the full depth holds from the switch on.
        """
        return cls(
            sampler=config.sampler,
            max_loops=max_loops,
            fixed_loops=config.fixed_loops,
            listed_loops=config.listed_loops,
            override_frac=config.override_frac,
            seed=seed,
            switch_step=whole_steps(config.switch_frac, total_steps),
            depth_scope=config.depth_scope,
            slices_per_draw=config.slices_per_draw,
            mean_loops=config.mean_loops,
            backprop_loops=config.backprop_loops,
            curriculum=config.curriculum,
            curriculum_steps=whole_steps(config.curriculum_frac, total_steps),
        )

    def __post_init__(self) -> None:
        if self.max_loops < 1:
            raise ValueError(f"max_loops={self.max_loops} must be at least 1.")
        if not 0.0 <= self.override_frac <= 1.0:
            raise ValueError(f"override_frac={self.override_frac} must lie in [0, 1].")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} must lie in [0, 2**64).")
        if self.switch_step < 0:
            raise ValueError(f"switch_step={self.switch_step} must not be negative.")
        if (self.sampler == "fixed") != (self.fixed_loops is not None):
            raise ValueError("fixed_loops goes with sampler='fixed', and that sampler needs it.")
        if self.fixed_loops is not None and not 1 <= self.fixed_loops <= self.max_loops:
            raise ValueError(
                f"fixed_loops={self.fixed_loops} must lie in 1..max_loops={self.max_loops}."
            )
        if (self.sampler == "listed") != (self.listed_loops is not None):
            raise ValueError("listed_loops goes with sampler='listed', and that sampler needs it.")
        if self.listed_loops is not None and not all(
            1 <= k <= self.max_loops for k in self.listed_loops or (0,)
        ):
            raise ValueError(
                f"listed_loops={list(self.listed_loops)} must name loop counts in "
                f"1..max_loops={self.max_loops}."
            )
        if self.override_frac and self.sampler not in FRACTION_SAMPLERS:
            raise ValueError(
                f"override_frac={self.override_frac} has no effect with "
                f"sampler='{self.sampler}'; it goes with {', '.join(FRACTION_SAMPLERS)}."
            )
        if (self.depth_scope == "slice_group") != (self.slices_per_draw is not None):
            raise ValueError("slices_per_draw goes with depth_scope='slice_group', which needs it.")
        if self.slices_per_draw is not None and self.slices_per_draw < 1:
            raise ValueError(f"slices_per_draw={self.slices_per_draw} must be at least 1.")
        if (self.poisson_sampler is None) != (self.mean_loops is None):
            raise ValueError("mean_loops goes with the Poisson samplers, and they need it.")
        for name, given in (
            ("mean_loops", self.mean_loops),
            ("backprop_loops", self.backprop_loops),
        ):
            if given is not None and given < 1:
                raise ValueError(f"{name}={given} must be at least 1.")
        if self.depth_scope == "slice_group" and self.sampler not in SHARED_DRAW_SAMPLERS:
            raise ValueError(
                f"depth_scope='slice_group' has no effect with sampler='{self.sampler}', which "
                "makes no draw that slices share. Use depth_scope='step'."
            )

    @property
    def poisson_sampler(self) -> PoissonSampler | None:
        """The sampler if it is one of the Poisson samplers."""
        return self.sampler if self.sampler in POISSON_SAMPLERS else None

    @cached_property
    def exact_frac(self) -> Fraction:
        """`override_frac` as the decimal number that was typed."""
        return _decimal(self.override_frac)


def num_loops_at(schedule: DepthSchedule, *, step: int, slice_idx: int, num_slices: int) -> int:
    """Loop count of one depth slice at one optimizer step (0-based).

    Args:
        step: index of the optimizer step from the start of the run, not from the switch.
        slice_idx: which of the `num_slices` fixed slices of the global batch.

    Raises: ValueError if the step is negative, the slice is out of range, or the slices do not
        divide into draw groups.
    Source: ELR section 4; the rotation of the override is this project's rule.
    """
    if slice_idx < 0 or slice_idx >= num_slices:
        raise ValueError(f"slice_idx={slice_idx} must lie in 0..{num_slices - 1}.")
    _check_step_and_slices(schedule, step=step, num_slices=num_slices)
    if step < schedule.switch_step:
        return 1
    risen = risen_loops_at(schedule, step=step)
    if schedule.fixed_loops is not None:
        return risen
    if schedule.sampler == "override" and _is_overridden(schedule, step, slice_idx, num_slices):
        return 1
    forced_share = schedule.exact_frac if schedule.sampler in WEIGHTED_SAMPLERS else Fraction(0)
    bits = random_bits(
        schedule.seed,
        stream=DEPTH_STREAM,
        step=step,
        draw_idx=draw_idx(schedule, slice_idx),
        count=BITS_PER_DRAW,
    )
    if schedule.listed_loops is not None:
        choice = _loops_from_bits(
            bits[0], max_loops=len(schedule.listed_loops), forced_share=Fraction(0)
        )
        return schedule.listed_loops[choice - 1]
    if schedule.poisson_sampler is not None:
        return poisson_loops(
            bits,
            sampler=schedule.poisson_sampler,
            mean_loops=risen,
            max_loops=schedule.max_loops,
        )
    return _loops_from_bits(bits[0], max_loops=risen, forced_share=forced_share)


def risen_loops_at(schedule: DepthSchedule, *, step: int) -> int:
    """Mean (Poisson), fixed count or largest draw at a step from the switch on."""
    full_loops = schedule.fixed_loops or schedule.mean_loops or schedule.max_loops
    return risen_loops(
        schedule.curriculum,
        full_loops,
        step=step - schedule.switch_step,
        num_steps=schedule.curriculum_steps,
    )


def no_grad_loops_at(schedule: DepthSchedule, *, step: int, num_loops: int) -> int:
    """Loops, from the first, that a row of `num_loops` runs without gradient at a step.

        n = max(0, k - b): the gradient goes through the last b of all k loops.

    During the rise of a Poisson mean r(t), b is at most r(t) (arXiv 2511.07384).
    """
    if schedule.backprop_loops is None:
        return 0
    window = schedule.backprop_loops
    if schedule.poisson_sampler is not None and step >= schedule.switch_step:
        window = min(window, risen_loops_at(schedule, step=step))
    return max(0, num_loops - window)


def loops_for_step(schedule: DepthSchedule, *, step: int, num_slices: int) -> tuple[int, ...]:
    """Loop counts of all slices at one step, in slice order."""
    return tuple(
        num_loops_at(schedule, step=step, slice_idx=slice_idx, num_slices=num_slices)
        for slice_idx in range(num_slices)
    )


def overridden_slices(schedule: DepthSchedule, *, step: int, num_slices: int) -> tuple[int, ...]:
    """Slices that the override forces to one loop at this step; none before the switch.

    The schedule hands out places round the ring of slices without a gap, so after any number
    of steps no two slices differ by more than one turn.
    """
    _check_step_and_slices(schedule, step=step, num_slices=num_slices)
    if schedule.sampler != "override" or step < schedule.switch_step:
        return ()
    return tuple(s for s in range(num_slices) if _is_overridden(schedule, step, s, num_slices))


def depth_probabilities(schedule: DepthSchedule) -> tuple[float, ...]:
    """Long-run share of slices at k = 1..max_loops after switch and rise; element k - 1 is p_k.

        p_1 = 1/K + (1 - 1/K) f,  p_k = (1 - f)/K for k > 1

    with f = 0 for the uniform samplers; see `poisson_depth.py` for the Poisson samplers.
    Source: ELR section 4.
    """
    if schedule.fixed_loops is not None:
        return tuple(float(k == schedule.fixed_loops) for k in range(1, schedule.max_loops + 1))
    if schedule.poisson_sampler is not None:
        assert schedule.mean_loops is not None, "checked when the schedule was made"
        return poisson_probabilities(
            schedule.poisson_sampler,
            mean_loops=schedule.mean_loops,
            max_loops=schedule.max_loops,
        )
    return tuple(float(p) for p in _drawn_probabilities(schedule))


def mean_loops(schedule: DepthSchedule) -> float:
    """Mean k after switch and rise: f + (1 - f)(K + 1)/2, `fixed_loops`, or of the Poisson."""
    if schedule.fixed_loops is not None:
        return float(schedule.fixed_loops)
    return float(sum(k * p for k, p in enumerate(_probabilities(schedule), start=1)))


def executed_loop_shares(schedule: DepthSchedule) -> tuple[float, ...]:
    """Share of slices that execute loop i = 1..max_loops: the sum of p_k over k >= i."""
    if schedule.fixed_loops is not None:
        return tuple(float(i <= schedule.fixed_loops) for i in range(1, schedule.max_loops + 1))
    probabilities = _probabilities(schedule)
    return tuple(float(sum(probabilities[i:])) for i in range(schedule.max_loops))


def _probabilities(schedule: DepthSchedule) -> Sequence[Fraction] | Sequence[float]:
    """p_k of a sampler that draws, exact where it is a fraction."""
    if schedule.poisson_sampler is not None:
        return depth_probabilities(schedule)
    return _drawn_probabilities(schedule)


def _drawn_probabilities(schedule: DepthSchedule) -> list[Fraction]:
    """Exact p_k of the drawing samplers."""
    if (listed := schedule.listed_loops) is not None:
        return [Fraction(listed.count(k), len(listed)) for k in range(1, schedule.max_loops + 1)]
    forced_share, num_choices = schedule.exact_frac, schedule.max_loops
    drawn = (1 - forced_share) / num_choices
    return [drawn + forced_share] + [drawn] * (num_choices - 1)


def _check_step_and_slices(schedule: DepthSchedule, *, step: int, num_slices: int) -> None:
    if step < 0:
        raise ValueError(f"step={step} must not be negative.")
    if num_slices < 1:
        raise ValueError(f"num_slices={num_slices} must be at least 1.")
    if schedule.slices_per_draw is not None and num_slices % schedule.slices_per_draw:
        raise ValueError(
            f"num_slices={num_slices} is not a multiple of "
            f"slices_per_draw={schedule.slices_per_draw}."
        )


def _is_overridden(schedule: DepthSchedule, step: int, slice_idx: int, num_slices: int) -> bool:
    """Whether this slice holds one of the places handed out at this step.

    Before s steps since the switch, floor(s f R) places of the ring were handed out; this step
    hands out the next n = floor((s+1) f R) - floor(s f R).
    """
    numerator, denominator = schedule.exact_frac.as_integer_ratio()
    steps_since_switch = step - schedule.switch_step
    first = steps_since_switch * numerator * num_slices // denominator
    num_forced = (steps_since_switch + 1) * numerator * num_slices // denominator - first
    return (slice_idx - first) % num_slices < num_forced


def draw_idx(schedule: DepthSchedule, slice_idx: int) -> int:
    """Number of the draw, within its step, that this slice takes part in."""
    if schedule.sampler in INDEPENDENT_SAMPLERS:
        return slice_idx
    if schedule.slices_per_draw is not None:
        return slice_idx // schedule.slices_per_draw
    return 0


def _loops_from_bits(bits: int, *, max_loops: int, forced_share: Fraction) -> int:
    """Map u = bits / 2**64: u < forced_share gives 1, the rest is cut into K equal parts."""
    numerator, denominator = forced_share.as_integer_ratio()
    rest = bits * denominator - (numerator << RANDOM_BITS)
    if rest < 0:
        return 1
    return 1 + rest * max_loops // ((denominator - numerator) << RANDOM_BITS)


def _decimal(value: float) -> Fraction:
    """The decimal number that was typed, exactly.

    As a binary double 0.3 is a little less than 3/10, and floor(10 * s * 0.3) would then lose
    a slice.
    """
    return Fraction(str(float(value)))


def risen_loops(curriculum: Curriculum, full_loops: int, *, step: int, num_steps: int) -> int:
    """Loop count after `step` of the rise's `num_steps` steps.

        r(t) = max(1, ceil(r_max f(t / T))),  f(u) = u  or  1 - sqrt(1 - u)

    Args:
        full_loops: r_max, reached at step T = `num_steps` and kept from there on.
        step: 0-based step since the rise began.

    Source: arXiv 2511.07384; it calls the second form "1-sqrt", which starts slowly.
    """
    if curriculum == "none" or step >= num_steps:
        return full_loops
    if curriculum == "linear":
        return max(1, -(-full_loops * step // num_steps))
    # ceil(r - r sqrt(q)) = r - floor(sqrt(r^2 q)), and the square root of a fraction rounds
    # down to that of its floor.
    left = full_loops**2 * (num_steps - step) // num_steps
    return max(1, full_loops - isqrt(left))


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


def random_bits(seed: int, *, stream: int, step: int, draw_idx: int, count: int) -> list[int]:
    """`count` independent integers of 64 random bits.

    Raw bits, because numpy promises a fixed stream for a bit generator but not for the
    distributions drawn from it. The lowest 64 bits of the counter are the generator's own.
    """
    key = seed | stream << 64
    counter = draw_idx << 64 | step << 128
    return [int(bits) for bits in np.random.Philox(key=key, counter=counter).random_raw(count)]


def open_uniform(bits: int) -> float:
    """A number in (0, 1), both ends excluded, from 64 bits."""
    # 52 bits and the half are exact in a double; with 53 the largest value would round to 1.
    return ((bits >> 12) + 0.5) * 2.0**-52
