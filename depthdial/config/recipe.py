"""A recipe: a complete training run, new or from a model directory, and rules between its parts.

The parts are in `config/training.py`, the model in `config/model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from depthdial.config.base import StrictConfig, set_dotted
from depthdial.config.effects import RECIPE_EFFECTS, check_effects, slices_differ
from depthdial.config.model import ModelConfig, from_version_1, without_code
from depthdial.config.policies import named_rule
from depthdial.config.text import read_mapping
from depthdial.config.training import (
    DataConfig,
    DepthConfig,
    DistillConfig,
    ObjectiveConfig,
    OptimConfig,
    SamplerName,
    TrainConfig,
    TrajectoryConfig,
)

__all__ = [
    "DataConfig",
    "DepthConfig",
    "DistillConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "Recipe",
    "SamplerName",
    "TrainConfig",
    "TrajectoryConfig",
]


WRITTEN_BY_TRAINING = {"trained_loops": None, "exit_gate_stale": False}
"""Keys of a model that say what training has done, and their values before any."""


class Recipe(StrictConfig):
    """A complete training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its folder."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """Training rows."""
    depth: DepthConfig = DepthConfig()
    """Loop counts during training."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Terms of the loss beside cross entropy."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    train: TrainConfig
    """Steps, batch, output."""

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        init: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read a recipe.

        Args: init: becomes train.init, whose model replaces a model section; changes: dotted keys
            that replace those of the file before it is checked.
        Raises: FileNotFoundError or ValueError.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no config file at {path}")
        values = read_mapping(path)
        try:
            if init is not None:
                values = _started_from(values, init)
            return cls.from_dict(_changed(values, changes or {}))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON types; without `model`, that of the folder train.init.

        Raises: ValueError as for every config; FileNotFoundError if that folder has no config.
        """
        train = values.get("train")
        init = train.get("init") if isinstance(train, dict) else None
        if isinstance(init, str) and values.get("model") is None:
            values = values | {"model": _model_values(init)}
        if isinstance(values.get("model"), dict):
            values = values | {"model": from_version_1(values["model"])}
        return super().from_dict(values)

    def replace(self, **changes: Any) -> Self:
        """Copy with some keys changed. Naming train.init takes the model of that folder in place
        of this recipe's; changes of `model` keys then apply to it."""
        init = changes.get("train.init")
        if init is None:
            return super().replace(**changes)
        return type(self).from_dict(_changed(_started_from(self.to_dict(), init), changes))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_effects(self, RECIPE_EFFECTS)
        self._check_batch()
        _check_loops(self.model.max_loops, self.depth)
        _check_truncation(self.model, self.depth)
        _check_switch(self)
        _check_init(self.train.init, self.data, self.objective.distill)
        for key, unwritten in WRITTEN_BY_TRAINING.items():
            given = getattr(self.model, key)
            if given != unwritten:
                raise ValueError(
                    f"model.{key}={given!r} is written by training, into its checkpoints; leave it "
                    "out of a recipe."
                )
        return self

    @property
    def num_slices(self) -> int:
        """Slices of the global batch."""
        is_named = self.depth.num_depth_slices is not None
        if is_named or slices_differ(self.depth, self.model.max_loops):
            return self.depth.slices
        return self.train.batch_size // (self.train.micro_batch_size or self.train.batch_size)

    def _check_batch(self) -> None:
        """Batch, slices and context fit each other."""
        batch = self.train.batch_size
        micro = self.train.micro_batch_size or batch
        if batch % micro:
            raise ValueError(
                f"train.micro_batch_size={micro} does not divide train.batch_size={batch}."
            )
        slices = self.num_slices
        if batch % slices:
            raise ValueError(
                f"train.batch_size={batch} is not a multiple of depth.num_depth_slices={slices}."
            )
        if micro % (batch // slices):
            raise ValueError(
                f"train.micro_batch_size={micro} must hold whole slices of {batch // slices} rows."
            )
        if self.data.context > self.model.max_context:
            raise ValueError(
                f"data.context={self.data.context} exceeds model.max_context="
                f"{self.model.max_context}."
            )


def _started_from(values: dict[str, Any], init: str) -> dict[str, Any]:
    """A recipe's values with the folder's model, and without a tokenizer of their own."""
    values = values | {"model": _model_values(init)}
    set_dotted(values, "train.init", init)
    if isinstance(values.get("data"), dict):
        values["data"] = values["data"] | {"tokenizer_vocab": None}
    return values


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with dotted keys replaced."""
    for key, value in changes.items():
        set_dotted(values, key, value.to_dict() if isinstance(value, StrictConfig) else value)
    return values


def _model_values(folder: str) -> dict[str, Any]:
    """config.json of a model directory, as plain values."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"train.init='{folder}' is no model directory: it has no config.json. Give the folder "
            "that `depthdial import`, `depthdial convert` or a checkpoint of `depthdial train` "
            "wrote."
        )
    values = read_mapping(path)
    # What was trained stays with the weights; a recipe says what is to be done.
    values = {key: value for key, value in values.items() if key not in WRITTEN_BY_TRAINING}
    if "model_type" not in values:
        raise ValueError(
            f"{path} is not the config of a model (it has no model_type). Of a run, give a folder "
            "below its checkpoints/."
        )
    return without_code(values)


def _check_loops(max_loops: int, depth: DepthConfig) -> None:
    """Depth draws that the model allows."""
    for name, given in (
        ("fixed_loops", depth.fixed_loops),
        ("mean_loops", depth.mean_loops),
        ("listed_loops", max(depth.listed_loops or (0,))),
    ):
        if given is not None and given > max_loops:
            raise ValueError(f"depth.{name}={given} exceeds model.max_loops={max_loops}.")


def _check_truncation(model: ModelConfig, depth: DepthConfig) -> None:
    """Truncated backpropagation leaves every part of the model something to learn from."""
    if depth.backprop_loops is None:
        return
    if model.segments:
        raise ValueError(
            f"depth.backprop_loops={depth.backprop_loops} would cut off the gradient of every "
            "segment of the core but the last. Set it to null."
        )
    if named_rule(model.loop.cache_policy).shares_first:
        raise ValueError(
            f"depth.backprop_loops={depth.backprop_loops} with loop.cache_policy="
            f"'{model.loop.cache_policy}' would never train the core's keys and values in deep "
            "rows: they are made in the first loop. Set it to null."
        )


def _check_switch(recipe: Recipe) -> None:
    """A modulation that comes with a late switch is added without a change of the function."""
    modulation, switch_frac = recipe.model.modulation, recipe.depth.switch_frac
    is_added = modulation is not None and recipe.train.init is None
    if is_added and switch_frac and modulation.kind != "elr":
        raise ValueError(
            f"depth.switch_frac={switch_frac} would add model.modulation.kind='{modulation.kind}' "
            "to a model in training, and its closed gates would undo what was learned. Set "
            "depth.switch_frac to 0.0, so that the modulation is there from the first step, or use "
            "kind 'elr'."
        )


def _check_init(init: str | None, data: DataConfig, distill: DistillConfig | None) -> None:
    """A tokenizer and a teacher come from somewhere."""
    if data.corpus is not None and (init is None) != (data.tokenizer_vocab is not None):
        raise ValueError(
            "data.tokenizer_vocab goes with data.corpus, and corpus needs it."
            if init is None
            else f"data.tokenizer_vocab={data.tokenizer_vocab} has no effect with train.init: text "
            "is prepared with the tokenizer of that folder."
        )
    if distill is not None and distill.teacher is None and init is None:
        raise ValueError(
            "objective.distill needs a teacher: give objective.distill.teacher, or train.init, "
            "whose model then is the teacher."
        )
