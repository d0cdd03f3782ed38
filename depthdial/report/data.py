"""What a report is made of: strict, frozen models of plain JSON data.

Here live the fields and the rules between them; `report/page.py` turns them into a
page. Producers (sweeps, studies) write dictionaries of this shape and need not
import anything from here. Losses are nats per token unless `unit` says
otherwise; differences are "this model minus the other", so negative is lower loss. One document
alone has no interval: `low` and `high` are null then, and nothing is claimed.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class ReportModel(BaseModel):
    """No unknown keys, no conversion, immutable, finite numbers only."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class WithInterval(ReportModel):
    """Something with an interval at the section's `level`."""

    low: float | None = None
    """Null, as `high`, for a single document."""
    high: float | None = None

    @property
    def has_interval(self) -> bool:
        """Whether there were enough documents for one."""
        return self.low is not None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low={self.low} and high={self.high} go together.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low={self.low} exceeds high={self.high}.")
        return self


class Difference(WithInterval):
    """A paired difference."""

    estimate: float


class DepthAccuracy(WithInterval):
    """Share of right answers at one dependency depth."""

    dependency_depth: Annotated[int, Field(ge=0)]
    """Look-ups in a row that the answer needs."""
    accuracy: Share
    low: Share | None = None
    high: Share | None = None
    positions: Count
    """Answers measured."""


class Measured(WithInterval):
    """Loss and cost of one model at one loop count."""

    loss: float
    """Mean over all tokens."""
    executed_sublayers: Count
    flops_per_token: Annotated[float, Field(gt=0.0)]
    """Forward only."""
    ms_per_token_min: NotNegative | None = None
    """Fastest repeat; null where no time was taken."""
    ms_per_token_median: NotNegative | None = None
    """Median repeat."""
    accuracy_by_depth: Annotated[list[DepthAccuracy], Field(min_length=1)] | None = None
    """Shallowest dependency first; null for text."""


class Depth(Measured):
    """The looped model at one loop count."""

    num_loops: Count
    trained: bool
    """Whether training ran this loop count; false is drawn hollow, never a gain."""
    vs_baseline: Difference | None = None
    """This loop count minus the baseline; null exactly if the section has no baseline."""
    vs_previous: Difference | None = None
    """This loop count minus the previous listed one; null exactly for the first."""


class SampleOutput(ReportModel):
    """Text generated at one loop count."""

    num_loops: Count
    text: str


class Sample(ReportModel):
    """One prompt with its continuations."""

    prompt: str
    baseline: str | None = None
    """Continuation by the baseline."""
    outputs: Annotated[list[SampleOutput], Field(min_length=1)]


class RunCost(ReportModel):
    """What training one side took."""

    params: Count
    steps: Count
    tokens: Count
    flops: NotNegative
    """Forward and backward of all optimizer steps."""
    seconds: NotNegative
    """Wall-clock of the optimizer steps, without validation and checkpoints."""


class Training(ReportModel):
    """Cost of both sides."""

    looped: RunCost
    baseline: RunCost | None = None


class CurvePoint(ReportModel):
    """One loss measured during training."""

    model: Literal["looped", "baseline"]
    step: Annotated[int, Field(ge=0)]
    num_loops: Count
    """1 for the baseline."""
    loss: float


class Section(ReportModel):
    """One model, its baseline, and one evaluation set."""

    name: Annotated[str, Field(min_length=1)]
    kind: Literal["text", "pointer_program", "pointer_chain"]
    what: Annotated[str, Field(min_length=1)]
    """One neutral sentence on the task and the evaluation set."""
    unit: str = "nats per token"
    margin: NotNegative
    """Differences inside +-margin count as equal; in `unit`, stated before measuring."""
    level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Of every interval of the section."""
    documents: Count
    """Evaluated documents, or rows of a task: what intervals are resampled over."""
    tokens: Count
    """Evaluated tokens, or answers."""
    num_seeds: Count
    """Independent trainings behind the section."""
    chance_accuracy: Share | None = None
    """Accuracy of guessing; only for tasks with dependency depths."""
    baseline: Measured | None = None
    """The matched model without loops."""
    depths: Annotated[list[Depth], Field(min_length=1)]
    """Ascending loop counts, those outside training last or in between, marked."""
    samples: list[Sample] = []
    training: Training | None = None
    training_curve: list[CurvePoint] = []
    timing_note: str | None = None
    """How the milliseconds were measured; required if there are any."""
    settings: dict[str, JsonValue] = {}
    """Resolved configuration."""
    hardware: str
    """Machines and threads that trained and measured, saying which did what."""

    @property
    def has_depths(self) -> bool:
        """Whether answers are counted by dependency depth."""
        return self.kind != "text"

    @property
    def row_word(self) -> str:
        """What one of `documents` is."""
        words = {"text": "document", "pointer_program": "program", "pointer_chain": "row"}
        return words[self.kind]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counts = [depth.num_loops for depth in self.depths]
        if any(later <= earlier for earlier, later in pairwise(counts)):
            raise ValueError(f"depths must ascend in num_loops without repeats; got {counts}.")
        self._check_intervals()
        for depth in self.depths:
            where = f"num_loops={depth.num_loops}"
            if (depth.vs_baseline is None) != (self.baseline is None):
                raise ValueError(f"{where}: vs_baseline goes with a baseline, and needs one.")
            if (depth.vs_previous is None) != (depth is self.depths[0]):
                raise ValueError(f"{where}: every loop count but the first needs vs_previous.")
            if (depth.accuracy_by_depth is not None) != self.has_depths:
                raise ValueError(f"{where}: accuracy_by_depth goes with every kind but 'text'.")
        if not any(depth.trained for depth in self.depths):
            raise ValueError("no loop count is marked as trained; a report needs at least one.")
        timed = [d for d in self.depths if d.ms_per_token_min is not None]
        if timed and self.timing_note is None:
            raise ValueError("milliseconds need timing_note: say how they were measured.")
        return self

    def _check_intervals(self) -> None:
        """Intervals are resampled over documents: two or more have them, one has none."""
        measured: list[WithInterval | None] = [self.baseline, *self.depths]
        measured += [d for depth in self.depths for d in (depth.vs_baseline, depth.vs_previous)]
        for item in measured:
            if item is not None and item.has_interval != (self.documents >= 2):
                rule = "a single document has none" if item.has_interval else "low and high go here"
                raise ValueError(
                    f"documents={self.documents}, but low={item.low} and high={item.high}: {rule}."
                )


class ReportData(ReportModel):
    """A whole report."""

    title: Annotated[str, Field(min_length=1)]
    created: str
    """Date as text; printed as given, so that equal data gives an equal page."""
    sections: Annotated[list[Section], Field(min_length=1)]
    provenance: dict[str, dict[str, JsonValue]] = {}
    """By run name: commit, versions, hardware, cost; what is equal everywhere is printed once."""


def read_report_data(data: dict[str, Any]) -> ReportData:
    """Check plain JSON data. Raises: ValueError with one line per problem."""
    try:
        return ReportData.model_validate_json(json.dumps(data))
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            given = "" if item["type"] in ("missing", "value_error") else f"={item['input']!r:.60}"
            lines.append(f"{where}{given}: {item['msg']}.")
        raise ValueError("report data:\n" + "\n".join(lines)) from None
