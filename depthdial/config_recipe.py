"""Fields of a training run: data, depth draws, optimizer, length.

The base class is in `config_base.py`, the model in `config_model.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from depthdial.config_base import Fraction, PositiveFloat, PositiveInt, StrictConfig
from depthdial.config_model import ModelConfig

SamplerName = Literal[
    "fixed",
    "sync_uniform",
    "sync_weighted",
    "independent_uniform",
    "independent_weighted",
    "override",
]


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
