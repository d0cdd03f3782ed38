"""How many loops each depth slice runs at each optimizer step, as a pure function.

Here live the samplers, the rotating override, the late switch, and the marginals they
promise. No random state exists anywhere: a draw depends on (seed, step, slice) alone, so any
process can compute any other's and a resumed run repeats them. What the drawn loop count
costs is in `model/count.py`. `loops` below is k, `max_loops` is K.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, Self

import numpy as np

from depthdial.config import DepthConfig, SamplerName

# High key word of the counter-based generator: keeps depth draws apart from any other
# stream that takes the same seed.
DEPTH_STREAM = 0xDE97
RANDOM_BITS = 64

INDEPENDENT_SAMPLERS = ("independent_uniform", "independent_weighted")
WEIGHTED_SAMPLERS = ("sync_weighted", "independent_weighted")
FRACTION_SAMPLERS = (*WEIGHTED_SAMPLERS, "override")


@dataclass(frozen=True, kw_only=True)
class DepthSchedule:
    """Everything a depth draw depends on, apart from the step and the slice.

    Fields as in `DepthConfig`; `max_loops` is the largest loop count drawn, `switch_step` the
    first step with mixed depth (every earlier step runs one loop).
    Raises: ValueError for a value out of range or an option that has no effect.
    """

    sampler: SamplerName
    max_loops: int
    fixed_loops: int | None = None
    override_frac: float = 0.0
    seed: int = 0
    switch_step: int = 0
    depth_scope: Literal["step", "slice_group"] = "step"
    slices_per_draw: int | None = None

    @classmethod
    def from_config(
        cls, config: DepthConfig, *, max_loops: int, seed: int, total_steps: int
    ) -> Self:
        """Resolve the switch fraction into a step; half a step is rounded down."""
        return cls(
            sampler=config.sampler,
            max_loops=max_loops,
            fixed_loops=config.fixed_loops,
            override_frac=config.override_frac,
            seed=seed,
            switch_step=int(_decimal(config.switch_frac) * total_steps),
            depth_scope=config.depth_scope,
            slices_per_draw=config.slices_per_draw,
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
        if self.override_frac and self.sampler not in FRACTION_SAMPLERS:
            raise ValueError(
                f"override_frac={self.override_frac} has no effect with "
                f"sampler='{self.sampler}'; it goes with {', '.join(FRACTION_SAMPLERS)}."
            )
        if (self.depth_scope == "slice_group") != (self.slices_per_draw is not None):
            raise ValueError("slices_per_draw goes with depth_scope='slice_group', which needs it.")
        if self.slices_per_draw is not None and self.slices_per_draw < 1:
            raise ValueError(f"slices_per_draw={self.slices_per_draw} must be at least 1.")
        if self.depth_scope == "slice_group" and self.sampler in ("fixed", *INDEPENDENT_SAMPLERS):
            raise ValueError(
                f"depth_scope='slice_group' has no effect with sampler='{self.sampler}', which "
                "makes no draw that slices share. Use depth_scope='step'."
            )

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
    if schedule.fixed_loops is not None:
        return schedule.fixed_loops
    if schedule.sampler == "override" and _is_overridden(schedule, step, slice_idx, num_slices):
        return 1
    forced_share = schedule.exact_frac if schedule.sampler in WEIGHTED_SAMPLERS else Fraction(0)
    bits = _random_bits(schedule.seed, step=step, draw_idx=_draw_idx(schedule, slice_idx))
    return _loops_from_bits(bits, max_loops=schedule.max_loops, forced_share=forced_share)


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
    """Long-run share of slices at k = 1..max_loops after the switch; element k - 1 is p_k.

        p_1 = 1/K + (1 - 1/K) f,  p_k = (1 - f)/K for k > 1

    with f = 0 for the uniform samplers. Source: ELR section 4.
    """
    if schedule.fixed_loops is not None:
        return tuple(float(k == schedule.fixed_loops) for k in range(1, schedule.max_loops + 1))
    return tuple(float(p) for p in _drawn_probabilities(schedule))


def mean_loops(schedule: DepthSchedule) -> float:
    """Mean k after the switch: f + (1 - f)(K + 1)/2, or `fixed_loops`."""
    if schedule.fixed_loops is not None:
        return float(schedule.fixed_loops)
    probabilities = _drawn_probabilities(schedule)
    return float(sum(k * p for k, p in enumerate(probabilities, start=1)))


def executed_loop_shares(schedule: DepthSchedule) -> tuple[float, ...]:
    """Share of slices that execute loop i = 1..max_loops: the sum of p_k over k >= i."""
    if schedule.fixed_loops is not None:
        return tuple(float(i <= schedule.fixed_loops) for i in range(1, schedule.max_loops + 1))
    probabilities = _drawn_probabilities(schedule)
    return tuple(float(sum(probabilities[i:])) for i in range(schedule.max_loops))


def _drawn_probabilities(schedule: DepthSchedule) -> list[Fraction]:
    """Exact p_k of the drawing samplers."""
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


def _draw_idx(schedule: DepthSchedule, slice_idx: int) -> int:
    """Number of the draw, within its step, that this slice takes part in."""
    if schedule.sampler in INDEPENDENT_SAMPLERS:
        return slice_idx
    if schedule.slices_per_draw is not None:
        return slice_idx // schedule.slices_per_draw
    return 0


def _random_bits(seed: int, *, step: int, draw_idx: int) -> int:
    """64 random bits of one position.

    Raw bits, because numpy promises a fixed stream for a bit generator but not for the
    distributions drawn from it. The lowest 64 bits of the counter are the
    generator's own.
    """
    key = seed | DEPTH_STREAM << 64
    counter = draw_idx << 64 | step << 128
    return int(np.random.Philox(key=key, counter=counter).random_raw())


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
