"""How many loops each depth slice runs at each optimizer step, as a pure function.

Here live the samplers, the rotating override, the late switch, the rise of a curriculum, the
loops without gradient, and the marginals they promise. No random state exists anywhere: a draw
depends on (seed, step, slice) alone, so any process can compute any other's and a resumed run
repeats them. What the drawn loop count costs is in `model/count/costs.py`. `loops` below is k,
`max_loops` is K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, Self

from depthdial.config import DepthConfig, SamplerName
from depthdial.config.training import (
    FRACTION_SAMPLERS,
    POISSON_SAMPLERS,
    SHARED_DRAW_SAMPLERS,
)
from depthdial.training.curriculum import Curriculum, risen_loops
from depthdial.training.poisson_depth import (
    BITS_PER_DRAW,
    PoissonSampler,
    poisson_loops,
    poisson_probabilities,
)
from depthdial.training.random_bits import DEPTH_STREAM, RANDOM_BITS, random_bits

INDEPENDENT_SAMPLERS = ("independent_uniform", "independent_weighted", "poisson_truncated")
WEIGHTED_SAMPLERS = ("sync_weighted", "independent_weighted")


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
            switch_step=int(_decimal(config.switch_frac) * total_steps),
            depth_scope=config.depth_scope,
            slices_per_draw=config.slices_per_draw,
            mean_loops=config.mean_loops,
            backprop_loops=config.backprop_loops,
            curriculum=config.curriculum,
            curriculum_steps=int(_decimal(config.curriculum_frac) * total_steps),
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
