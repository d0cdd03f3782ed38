"""Configuration models: strict, frozen, read from JSON or YAML dictionaries.

Here live the fields, their ranges and the rules between them. Derived numbers
(parameters, FLOPs, cache bytes) are functions in `model/count.py`; reading YAML and JSON is in
`config_text.py`.
An unknown key is an error that names the nearest known key.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from depthdial.config_text import check_plain, read_mapping

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]

UpdateName = Literal["replace", "residual", "delta", "adaptive_delta"]
CachePolicy = Literal["per_loop", "collapse_last", "last_step"]
SamplerName = Literal[
    "fixed",
    "sync_uniform",
    "sync_weighted",
    "independent_uniform",
    "independent_weighted",
    "override",
]

ATTENTION = "A"
SWIGLU = "F"
SUBLAYER_LETTERS = {ATTENTION: "grouped-query attention", SWIGLU: "SwiGLU MLP"}


class StrictConfig(BaseModel):
    """Base of all configs: no unknown keys, no silent conversion, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON types.

        Raises: ValueError listing every problem with its key; an unknown key
        comes with the nearest known one.
        """
        check_plain(values)
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            raise ValueError(_explain(cls, error)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read `.json`, `.yaml` or `.yml`. Raises FileNotFoundError or ValueError."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no config file at {path}")
        values = read_mapping(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field present."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Stable text: two-space indent, fields in declaration order."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed, validated again. Dotted keys reach nested configs."""
        values = self.to_dict()
        for key, value in changes.items():
            set_dotted(values, key, value.to_dict() if isinstance(value, StrictConfig) else value)
        return type(self).from_dict(values)


class LoopConfig(StrictConfig):
    """What happens to the state between two passes of the core."""

    update: UpdateName = "adaptive_delta"
    """State update after each loop (ELR section 3); replace at one loop is the plain network."""
    reinject: bool = False
    """Add the prelude output to the state before each loop."""
    delta_init: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Initial per-channel rate of the `delta` update; no effect on the others."""
    gate_bypass: Literal["never", "first_only"] = "never"
    """first_only: the first loop replaces the state exactly, without the gate."""
    cache_policy: CachePolicy = "per_loop"
    """Which keys and values persist between calls; per_loop is exact."""
    beyond_max_loops: Literal["refuse", "extrapolate"] = "refuse"
    """What generation does beyond max_loops; sweeps always extrapolate, and mark it."""

    @model_validator(mode="after")
    def _delta_init_has_effect(self) -> Self:
        if self.update != "delta" and self.delta_init != 0.05:
            raise ValueError(
                f"delta_init={self.delta_init} has no effect with update='{self.update}'. "
                "Remove it or choose update='delta'."
            )
        return self


class ModulationConfig(StrictConfig):
    """ELR loop-conditioned modulation of core and coda (ELR section 3.4)."""

    d_cond: PositiveInt = 256
    """Width of the condition vector."""
    rank: PositiveInt = 256
    """Rank of the low-rank path of each modulated sublayer."""
    embed_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 256
    """Width of each of the two sinusoidal embeddings (progress and budget)."""
    embed_scale: PositiveFloat = 1000.0
    """Progress and budget, in (0, 1], are multiplied by this before the sine ladder."""


class ModelConfig(StrictConfig):
    """One looped language model; the same fields stand in a model directory's config.json."""

    model_type: Literal["depthdial"] = "depthdial"
    """Name of the format."""
    architectures: tuple[Literal["LoopedLM"]] = ("LoopedLM",)
    """Model class; one class expresses every family."""
    format_version: Literal[1] = 1
    """Version of the directory format."""
    vocab_size: PositiveInt
    """Number of token ids."""
    d_model: PositiveInt
    """Width of the residual stream, in channels."""
    layout: Annotated[str, Field(min_length=1)] = "AF"
    """Sublayer letters from bottom to top, A attention and F SwiGLU; repeated to fill the split."""
    split: tuple[Annotated[int, Field(ge=0)], PositiveInt, Annotated[int, Field(ge=0)]]
    """Sublayers in prelude, core and coda."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key and value heads; divides num_heads."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    """Channels per head; free of d_model / num_heads."""
    d_ff: PositiveInt
    """Hidden width of the SwiGLU MLP."""
    max_context: PositiveInt
    """Longest sequence the model is meant for, in tokens."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    rotary_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of each head's channels that rotate."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head before rotation."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the mean square inside every RMSNorm."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of new matrices; output projections are scaled down by depth."""
    num_loops: PositiveInt = 1
    """Loops that tools use when a request names none."""
    max_loops: PositiveInt = 1
    """Largest loop count seen in training."""
    loop: LoopConfig = LoopConfig()
    """State update, injection, cache policy."""
    modulation: ModulationConfig | None = None
    """Loop-conditioned modulation; null for none."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unknown = sorted(set(self.layout) - set(SUBLAYER_LETTERS))
        if unknown:
            raise ValueError(
                f"layout '{self.layout}' has unknown letters {unknown}; known: {SUBLAYER_LETTERS}."
            )
        total, period = sum(self.split), len(self.layout)
        if total % period:
            raise ValueError(
                f"split {list(self.split)} adds up to {total} sublayers, but layout "
                f"'{self.layout}' has {period}. Choose a split whose sum is a multiple of "
                f"{period}, or change `layout`."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}."
            )
        if self.num_loops > self.max_loops:
            raise ValueError(
                f"num_loops={self.num_loops} exceeds max_loops={self.max_loops}; the default must "
                "be a trained depth."
            )
        rotating = round(self.head_dim * self.rotary_frac)
        if rotating % 2 or rotating < 2:
            raise ValueError(
                f"rotary_frac={self.rotary_frac} of head_dim={self.head_dim} gives {rotating} "
                "rotating channels; choose a fraction that gives an even number of at least 2."
            )
        return self

    @property
    def sublayers(self) -> str:
        """Letters of all physical sublayers, bottom to top."""
        return self.layout * (sum(self.split) // len(self.layout))

    @property
    def prelude_layout(self) -> str:
        """Letters of the prelude."""
        return self.sublayers[: self.split[0]]

    @property
    def core_layout(self) -> str:
        """Letters of the core."""
        return self.sublayers[self.split[0] : self.split[0] + self.split[1]]

    @property
    def coda_layout(self) -> str:
        """Letters of the coda."""
        return self.sublayers[self.split[0] + self.split[1] :]


class DataConfig(StrictConfig):
    """Where training rows come from: exactly one of path, corpus and task."""

    path: str | None = None
    """Folder written by `depthdial prepare`."""
    corpus: str | None = None
    """Name of a built-in corpus; it is prepared once into `cache_dir`."""
    task: Literal["pointer_program"] | None = None
    """Name of a synthetic task."""
    context: PositiveInt
    """Tokens per row."""
    tokenizer_vocab: PositiveInt | None = None
    """Size of the byte-level BPE trained on a named corpus; only with `corpus`."""
    isolate_documents: bool = True
    """Documents packed into one row do not attend to each other."""
    cache_dir: str = "data"
    """Folder for prepared corpora."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "corpus", "task") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"data needs exactly one of path, corpus, task; got {given or 'none of them'}."
            )
        if (self.corpus is None) != (self.tokenizer_vocab is None):
            raise ValueError("tokenizer_vocab goes with corpus, and corpus needs it.")
        if self.task is not None and not self.isolate_documents:
            raise ValueError(f"isolate_documents has no effect with task='{self.task}'.")
        return self


class DepthConfig(StrictConfig):
    """How loop counts are drawn in training (ELR section 4)."""

    sampler: SamplerName = "override"
    """fixed; sync_*: one draw for all slices; independent_*: one per slice; override: one majority
    draw, and a rotating fraction of the slices runs one loop."""
    fixed_loops: PositiveInt | None = None
    """Loop count of the fixed sampler; only with it."""
    override_frac: Fraction = 0.0
    """Fraction of slices forced to one loop; the weighted samplers take their marginals from it."""
    num_depth_slices: PositiveInt = 8
    """Fixed slices of the global batch; each runs one loop count."""
    depth_scope: Literal["step", "slice_group"] = "step"
    """step: one majority draw per optimizer step; slice_group: one per `slices_per_draw` slices
    (sync_* and override only). The override rotates over all slices of the step either way."""
    slices_per_draw: PositiveInt | None = None
    """Slices that share one majority draw; only with slice_group."""
    switch_frac: Fraction = 0.0
    """Fraction of the steps that run one loop before mixed depth (and modulation) starts."""

    @model_validator(mode="after")
    def _options_have_effect(self) -> Self:
        if (self.sampler == "fixed") != (self.fixed_loops is not None):
            raise ValueError("fixed_loops goes with sampler='fixed', and that sampler needs it.")
        uses_frac = self.sampler in ("override", "sync_weighted", "independent_weighted")
        if self.override_frac and not uses_frac:
            raise ValueError(
                f"override_frac={self.override_frac} has no effect with sampler='{self.sampler}'."
            )
        if (self.depth_scope == "slice_group") != (self.slices_per_draw is not None):
            raise ValueError("slices_per_draw goes with depth_scope='slice_group', which needs it.")
        if self.depth_scope == "slice_group" and not self.sampler.startswith(("sync", "over")):
            raise ValueError(
                f"depth_scope='slice_group' has no effect with sampler='{self.sampler}'; it goes "
                "with sync_uniform, sync_weighted and override."
            )
        if self.slices_per_draw and self.num_depth_slices % self.slices_per_draw:
            raise ValueError(
                f"num_depth_slices={self.num_depth_slices} is not a multiple of "
                f"slices_per_draw={self.slices_per_draw}."
            )
        return self


class OptimConfig(StrictConfig):
    """Optimizer and learning-rate schedule (warmup, stable, decay)."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: block matrices by Muon, everything else by AdamW; adamw: everything by AdamW."""
    lr: PositiveFloat = 4e-3
    """Peak learning rate of the block matrices."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of all other parameters; null for the same as lr."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW momentum factors."""
    eps: PositiveFloat = 1e-8
    """AdamW denominator term."""
    momentum: Fraction = 0.95
    """Muon momentum factor."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled decay; norms, biases and gates have none."""
    warmup_frac: Fraction = 0.03
    """Fraction of the steps with a linear rise from zero."""
    decay_frac: Fraction = 0.15
    """Fraction of the steps, at the end, with a linear fall."""
    min_lr_frac: Fraction = 0.0
    """Learning rate at the last step, as a fraction of the peak."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_frac + self.decay_frac > 1:
            raise ValueError(
                f"warmup_frac={self.warmup_frac} and decay_frac={self.decay_frac} add up to more "
                "than 1; the rise must end before the fall begins."
            )
        if self.min_lr_frac and not self.decay_frac:
            raise ValueError(f"min_lr_frac={self.min_lr_frac} has no effect with decay_frac=0.")
        if self.optimizer == "adamw" and self.momentum != 0.95:
            raise ValueError(f"momentum={self.momentum} has no effect with optimizer='adamw'.")
        return self


class TrainConfig(StrictConfig):
    """Length, batch, precision, and what is written down."""

    steps: PositiveInt
    """Optimizer steps."""
    batch_size: PositiveInt
    """Rows per optimizer step; a multiple of the depth slices."""
    micro_batch_size: PositiveInt | None = None
    """Rows per forward, whole slices; null for the whole batch. Changes memory, not results."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of initial weights, data order and depth draws."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: matrix products in bfloat16 by autocast, weights and state in float32."""
    compile: bool = False
    """Compile prelude, one core pass, coda and head; costs some minutes at the start."""
    device: str = "cpu"
    """Torch device name, e.g. cpu, cuda, mps."""
    val_every: PositiveInt = 200
    """Steps between validations at every loop count."""
    val_rows: PositiveInt = 64
    """Validation rows during training."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept."""
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Second place for metrics; metrics.jsonl is always written."""


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
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    train: TrainConfig
    """Steps, batch, output."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        slices, batch = self.depth.num_depth_slices, self.train.batch_size
        if batch % slices:
            raise ValueError(
                f"train.batch_size={batch} is not a multiple of depth.num_depth_slices={slices}."
            )
        micro, rows_per_slice = self.train.micro_batch_size or batch, batch // slices
        if micro % rows_per_slice or batch % micro:
            raise ValueError(
                f"train.micro_batch_size={micro} must hold whole slices of {rows_per_slice} rows "
                f"and divide train.batch_size={batch}."
            )
        if self.data.context > self.model.max_context:
            raise ValueError(
                f"data.context={self.data.context} exceeds model.max_context="
                f"{self.model.max_context}."
            )
        if self.model.max_loops == 1 and self.depth.override_frac:
            raise ValueError(
                f"depth.override_frac={self.depth.override_frac} has no effect with "
                "model.max_loops=1: every slice runs one loop."
            )
        fixed = self.depth.fixed_loops
        if fixed is not None and fixed > self.model.max_loops:
            raise ValueError(
                f"depth.fixed_loops={fixed} exceeds model.max_loops={self.model.max_loops}."
            )
        return self


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` inside nested dictionaries, creating a level that is absent or null."""
    *parents, last = key.split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ValueError(f"'{key}': '{parent}' is a value, not a group of keys.")
    values[last] = value


def nearest_name(name: str, known: list[str]) -> str:
    """' Did you mean ...?' or the list of known names, for an error message."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else f" Known: {', '.join(sorted(known))}."


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    """One line per problem: dotted key, what was given, what is allowed."""
    lines = []
    for item in error.errors():
        path = [part for part in item["loc"] if isinstance(part, str)]
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(cls, path[:-1])
            lines.append(f"unknown key '{where}'.{nearest_name(path[-1], known)}")
        elif item["type"] == "value_error":
            lines.append((f"{where}: " if where else "") + str(item["ctx"]["error"]))
        elif item["type"] == "missing":
            lines.append(f"missing key '{where}'.")
        else:
            lines.append(f"{where}={item['input']!r}: {item['msg']}.")
    return "\n".join(lines)


def _known_keys(cls: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the nested config that `path` leads to."""
    for part in path:
        annotation = cls.model_fields[part].annotation
        options = get_args(annotation) or (annotation,)
        cls = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(cls.model_fields)
