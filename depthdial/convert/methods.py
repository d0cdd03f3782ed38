"""The methods that make a pretrained model elastic: their names, options and promises.

What each does with the weights is in `tying.py`, `low_rank.py` and `grafts.py`; `convert.py`
runs them. Nothing here needs torch, so that the command line can list it at once.
K is the largest loop count that the result is meant for, L the layers of a core, B the passes
over tied layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from depthdial.config import CachePolicy, StrictConfig, nearest_name
from depthdial.config.base import Fraction
from depthdial.config.limits import LoopCount, PositiveInt

Selection = Literal["stepwise", "average", "lower"]
Order = Literal["cycle", "sequence"]
Norms = Literal["own", "tied"]


class ElasticOptions(StrictConfig):
    """Options of every method whose result runs any number of loops."""

    max_loops: Annotated[int, Field(ge=2)] = 4
    """Largest loop count that the result is meant for."""


class LoopCoreOptions(ElasticOptions):
    """Options of `loop-window` and `damped`."""

    cache_policy: CachePolicy = "per_loop"
    """Which keys and values persist between calls."""


class DampedOptions(LoopCoreOptions):
    """Options of `damped`."""

    cache_policy: CachePolicy = "stash_first"
    """Which keys and values persist between calls; stash_first keeps those of the plain pass,
    stash_last those of one more pass over the final state."""


class AnchoredOptions(DampedOptions):
    """Options of `anchored`."""

    anchor: Fraction = 0.5
    """Weight of the plain pass in the result."""


class TyingOptions(StrictConfig):
    """Options of `tie-layers`."""

    num_loops: Annotated[int, Field(ge=2)] = 2
    """Passes over the tied layers; divides the layers of the core."""
    selection: Selection = "stepwise"
    """Which layers the tied ones are: evenly spaced ones with the first and the last, the mean of
    those that are tied together, or the lowest."""
    order: Order = "cycle"
    """cycle: all tied layers, then again; sequence: each layer num_loops times before the next."""


class RelaxedOptions(TyingOptions):
    """Options of `relaxed-recursive`."""

    selection: Selection = "average"
    """Which layers the tied ones are: evenly spaced ones with the first and the last, the mean of
    those that are tied together, or the lowest."""
    rank: PositiveInt | Literal["full"] = 16
    """Rank of each loop's differences to the layer that it stands for; full keeps all of it."""
    norms: Norms = "own"
    """Gains of the norms: own to each stored set, or those of the layer."""


class DeltaOptions(ElasticOptions):
    """Options of `later-deltas`."""

    rank: PositiveInt = 16
    """Rank of the differences of each stored set."""
    norms: Norms = "own"
    """Gains of the norms: own to each stored set, or those of the layer."""
    rate: Fraction = 0.1
    """Initial share of the candidate that a later pass takes, per channel; trained."""


class JointDeltaOptions(DeltaOptions):
    """Options of `joint-deltas`."""

    rate: Fraction = 0.35
    """Initial share of the candidate that a later pass takes, per channel; trained."""


class RecurrenceOptions(ElasticOptions):
    """Options of `retrofitted-recurrence`."""

    prelude: Annotated[int, Field(ge=0)] | None = None
    """Lowest layers that are kept below the core; null for all. The others are dropped."""
    coda: Annotated[int, Field(ge=0)] | None = None
    """Highest layers that are kept above the core; null for all. The others are dropped."""
    initial_state: Literal["prelude", "zero", "random"] = "prelude"
    """State before the first loop. The adapter starts by ignoring it."""


class DecayGateOptions(ElasticOptions):
    """Options of `decay-gate` and `decay-gate-ungated-first`."""

    gate_rank: PositiveInt | None = None
    """Low rank of the gate; null for a sixteenth of the model width, rounded up."""


class ELROptions(ElasticOptions):
    """Options of `elr-graft`."""

    start: Literal["ungated_first", "beta_one", "plain"] = "ungated_first"
    """Where the gate starts: open by construction in the first pass; open in every pass
    (beta = 1); or at beta = 0.3466 as in training from scratch, which changes the model."""
    d_cond: PositiveInt = 256
    """Width of the condition vector."""
    rank: PositiveInt = 256
    """Rank of the low-rank path of each conditioned sublayer."""


class ElasticFixedOptions(StrictConfig):
    """Options of `elastic-fixed`."""

    max_loops: LoopCount | None = None
    """Largest loop count that the result is meant for; null for that of the base."""
    conditioning: Literal["modulation", "loop_lora"] | None = None
    """What tells the loops apart: ELR's modulation, or low-rank differences stored per loop; null
    for modulation where the sublayers take one."""
    rank: PositiveInt | None = None
    """Rank of either; null for 256 with modulation, 16 with loop_lora."""
    d_cond: PositiveInt | None = None
    """Width of the condition vector of modulation; null for 256."""

    @model_validator(mode="after")
    def _options_have_effect(self) -> ElasticFixedOptions:
        if self.conditioning == "loop_lora" and self.d_cond is not None:
            raise ValueError(
                f"d_cond={self.d_cond} has no effect with conditioning='loop_lora'; remove it."
            )
        return self


class MergeOptions(StrictConfig):
    """`merge-first-pass` has no options."""


@dataclass(frozen=True)
class Method:
    """One way to make a model elastic."""

    summary: str
    """What is done, in one line for people."""
    options: type[StrictConfig]
    setting: str
    """Where the result is to be compared with the base."""
    promise: str
    """What is equal there before any training; `none: ...` where nothing is, and why."""
    takes_core: bool = True
    """Works on a core of a dense model; otherwise on a model that loops already."""


METHODS: dict[str, Method] = {
    "loop-window": Method(
        "loop the core as it is, no training needed to run it",
        LoopCoreOptions,
        "k = 1",
        "bit for bit",
    ),
    "damped": Method(
        "training-free: each of k passes moves the state by 1/k",
        DampedOptions,
        "k = 1",
        "bit for bit",
    ),
    "anchored": Method(
        "training-free: damped, and the plain pass keeps a share of the result",
        AnchoredOptions,
        "k = 1",
        "bit for bit",
    ),
    "tie-layers": Method(
        "fewer layers, each used several times (rigid tying)",
        TyingOptions,
        "k = B",
        "none: distinct layers become one",
    ),
    "relaxed-recursive": Method(
        "tied layers plus low-rank differences per loop, by truncated SVD",
        RelaxedOptions,
        "k = B",
        "1e-4 at full rank with own norms; none below it or with tied norms",
    ),
    "retrofitted-recurrence": Method(
        "every loop reads the prelude through an adapter [0|I]; may drop layers",
        RecurrenceOptions,
        "every k",
        "1e-4; none where layers are dropped",
    ),
    "decay-gate": Method(
        "gate on the change of the state, initialised as published",
        DecayGateOptions,
        "k = 1",
        "none: the gate starts nearly closed in most channels",
    ),
    "decay-gate-ungated-first": Method(
        "the same gate, open in the first pass and nearly open in later ones",
        DecayGateOptions,
        "k = 1",
        "bit for bit",
    ),
    "elr-graft": Method(
        "gated state update and loop-conditioned modulation of core and coda",
        ELROptions,
        "every k",
        "bit for bit ungated_first, 1e-4 beta_one; none plain: the gate starts at 0.35",
    ),
    "later-deltas": Method(
        "a rate and low-rank differences that act on passes 2 and later only",
        DeltaOptions,
        "k = 1",
        "bit for bit",
    ),
    "joint-deltas": Method(
        "a rate, one set of differences for pass 1 and one for the later passes",
        JointDeltaOptions,
        "k = 1",
        "bit for bit",
    ),
    "elastic-fixed": Method(
        "for a model that loops: gate and conditioning that start as identity",
        ElasticFixedOptions,
        "the base's own k",
        "1e-4",
        takes_core=False,
    ),
    "merge-first-pass": Method(
        "the dense model that pass 1 is, its differences added to the weights",
        MergeOptions,
        "k = 1",
        "1e-4",
        takes_core=False,
    ),
}
"""Method by the name that the command line knows it by.

Sources: arXiv 2410.20672 (tie-layers, relaxed-recursive), 2511.07384 (retrofitted-recurrence),
2605.11011 (decay-gate), 2610.12582 (elr-graft), 2605.23872 (damped, anchored).
"""


def method_named(name: str) -> Method:
    """Raises: ValueError with the nearest known name."""
    if name not in METHODS:
        raise ValueError(f"unknown method '{name}'.{nearest_name(name, list(METHODS))}")
    return METHODS[name]


def read_options(name: str, values: dict[str, Any]) -> StrictConfig:
    """Options of a method from plain values.

    Raises: ValueError for a value out of range, or an option that the method does not have, with
        the methods that have it.
    """
    fields = method_named(name).options.model_fields
    for option in values:
        owners = [
            other for other, method in METHODS.items() if option in method.options.model_fields
        ]
        if option not in fields and owners:
            raise ValueError(
                f"{option}={values[option]!r} has no effect with the method '{name}'. Remove it, "
                f"or choose one of: {', '.join(owners)}."
            )
    return method_named(name).options.from_dict(values)
