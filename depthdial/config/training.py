"""Parts of a recipe: data, depth draws, objective, optimizer, length.

They are put together, and their rules with each other checked, in `config/recipe.py`; the base
class is in `config/base.py`, the model in `config/model.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from depthdial.config.base import BelowOne, Fraction, PositiveFloat, StrictConfig
from depthdial.config.effects import (
    DATA_EFFECTS,
    DEPTH_EFFECTS,
    OPTIM_EFFECTS,
    POISSON_SAMPLERS,
    check_effects,
)
from depthdial.config.limits import MAX_SLICES, MAX_SUBLAYERS, LoopCount, PositiveInt, Tokens

SamplerName = Literal[
    "fixed",
    "sync_uniform",
    "sync_weighted",
    "independent_uniform",
    "independent_weighted",
    "override",
    "poisson_lognormal",
    "poisson_truncated",
    "listed",
]

DEFAULT_SLICES = 8


class DataConfig(StrictConfig):
    """Where training rows come from: exactly one of path, corpus and task."""

    path: str | None = None
    """Folder written by `depthdial prepare`."""
    corpus: str | None = None
    """Name of a built-in corpus; it is prepared once into `cache_dir`."""
    task: Literal["pointer_program", "pointer_chain"] | None = None
    """Name of a synthetic task: programs of its own words, or chains in the letters of the
    tokenizer that train.init brings."""
    num_chains: PositiveInt | None = None
    """Chains of a row; only with pointer_chain, which needs it."""
    chain_length: PositiveInt | None = None
    """Letters of a chain; only with pointer_chain, which needs it."""
    context: Tokens
    """Tokens per row."""
    tokenizer_vocab: PositiveInt | None = None
    """Size of the byte-level BPE trained on a named corpus, which needs it unless train.init
    brings a tokenizer; only with `corpus`."""
    isolate_documents: bool = True
    """Documents packed into one row do not attend to each other."""
    cache_dir: str = "data"
    """Folder for prepared corpora; only with `corpus`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "corpus", "task") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"data needs exactly one of path, corpus, task; got {given or 'none of them'}."
            )
        if self.corpus is None and self.tokenizer_vocab is not None:
            raise ValueError("tokenizer_vocab goes with corpus, and corpus needs it.")
        for name, value in (("num_chains", self.num_chains), ("chain_length", self.chain_length)):
            if (self.task == "pointer_chain") != (value is not None):
                raise ValueError(f"{name} goes with task='pointer_chain', which needs it.")
        check_effects(self, DATA_EFFECTS)
        return self


class DepthConfig(StrictConfig):
    """How loop counts are drawn in training, and how far back the gradient goes."""

    sampler: SamplerName = "override"
    """fixed; sync_*: one draw for all slices; independent_*: one per slice; override: one majority
    draw, and a rotating fraction of the slices runs one loop (ELR section 4). poisson_lognormal:
    1 + Poisson(LogNormal), one draw for all slices (arXiv 2502.05171); poisson_truncated: at
    least 1 of Poisson, one draw per slice (arXiv 2604.12946). Both stop at model.max_loops.
    listed: an entry of listed_loops, one draw for all slices."""
    listed_loops: (
        Annotated[tuple[LoopCount, ...], Field(min_length=1, max_length=MAX_SUBLAYERS)] | None
    ) = None
    """Loop counts of the listed sampler, one as likely as another, repeats allowed: 2, 2, 3, 4
    runs two loops half of the time. Only with it."""
    fixed_loops: LoopCount | None = None
    """Loop count of the fixed sampler; only with it."""
    mean_loops: LoopCount | None = None
    """Mean of the Poisson rate; only with the two Poisson samplers, which need it."""
    override_frac: Fraction = 0.0
    """Fraction of slices forced to one loop, below 1; only with override, and with the weighted
    samplers, which take their marginals from it and need more than 0."""
    num_depth_slices: Annotated[int, Field(ge=1, le=MAX_SLICES)] | None = None
    """Fixed slices of the global batch; each runs one loop count. null for 8 where slices of one
    step may differ; elsewhere for one slice in each micro-batch."""
    depth_scope: Literal["step", "slice_group"] = "step"
    """step: one majority draw per optimizer step; slice_group: one per `slices_per_draw` slices
    (sync_*, override, poisson_lognormal, listed). The override rotates over all of the step."""
    slices_per_draw: PositiveInt | None = None
    """Slices that share one majority draw; only with slice_group."""
    backprop_loops: LoopCount | None = None
    """The gradient goes back through the last so many loops; earlier ones run without one. null
    for all loops. During a curriculum of a Poisson sampler at most its present mean."""
    curriculum: Literal["none", "linear", "one_minus_sqrt"] = "none"
    """How mean_loops (Poisson), fixed_loops or the largest draw rises from 1 to its full value
    after the switch: u, or 1 - sqrt(1 - u) of it, rounded up, with u the finished fraction of the
    rise."""
    curriculum_frac: Fraction = 0.0
    """Fraction of the steps that the rise takes; only with a curriculum, which needs it."""
    switch_frac: Fraction = 0.0
    """Fraction of the steps that run one loop before mixed depth (and modulation) starts."""

    @model_validator(mode="after")
    def _options_have_effect(self) -> Self:
        check_effects(self, DEPTH_EFFECTS)
        _check_depth(self)
        return self

    @property
    def slices(self) -> int:
        """`num_depth_slices` written out; it means something only where slices may differ."""
        return self.num_depth_slices or DEFAULT_SLICES


class DistillConfig(StrictConfig):
    """Forward divergence from a frozen teacher, KL(teacher || student), beside cross entropy."""

    weight: PositiveFloat
    """Weight of the divergence in nats per token; cross entropy has weight 1."""
    teacher: str | None = None
    """Model directory of the teacher, of the same token ids; null for that of train.init."""
    teacher_loops: LoopCount = 1
    """Loops that the teacher runs."""
    rows: Literal["all", "one_loop"] = "all"
    """Rows that are compared: all at their own loop count, or those that run one loop (which
    keeps the shallow model near the teacher and leaves the deep one free)."""


class TrajectoryConfig(StrictConfig):
    """A second, shorter path of random steps beside the drawn one (arXiv 2602.11451).

    A path of L loops has steps of 1/L; its short path has 1 to L - 1 loops, each of a random
    multiple of 1/L, which add up to 1. Models without time_step modulation see the fewer loops.
    """

    short_weight: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the short path's cross entropy."""
    consistency_weight: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the mean squared difference between the outputs of both paths, after the final
    norm; the long path's is the fixed target."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if not self.short_weight and not self.consistency_weight:
            raise ValueError(
                "short_weight=0 with consistency_weight=0 has no effect; give one of them a "
                "weight, or set trajectory to null."
            )
        return self


class ObjectiveConfig(StrictConfig):
    """What is minimised beside the cross entropy of every row at its loop count."""

    distill: DistillConfig | None = None
    """Divergence from a teacher; null for none."""
    trajectory: TrajectoryConfig | None = None
    """Consistency with a shorter path; null for none."""


class OptimConfig(StrictConfig):
    """Optimizer and learning-rate schedule (warmup, stable, decay)."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: block matrices by Muon, everything else by AdamW; adamw: everything by AdamW."""
    lr: PositiveFloat = 4e-3
    """Peak learning rate of the block matrices."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of all other parameters; null for the same as lr."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW momentum factors; at 1 the gradient would never enter."""
    eps: PositiveFloat = 1e-8
    """AdamW denominator term."""
    momentum: BelowOne = 0.95
    """Muon momentum factor; at 1 the gradient would never enter."""
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
    freeze: tuple[str, ...] = ()
    """What is not trained: `base` for all that a model without loops has too, or patterns (`*`,
    `?`, `[...]`) of parameter names."""
    lr_by_pattern: dict[str, PositiveFloat] = {}
    """Pattern of parameter names -> peak learning rate in place of lr or adamw_lr; no parameter
    may match two of them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_frac + self.decay_frac > 1:
            raise ValueError(
                f"warmup_frac={self.warmup_frac} and decay_frac={self.decay_frac} add up to more "
                "than 1; the rise must end before the fall begins."
            )
        check_effects(self, OPTIM_EFFECTS)
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
    init: str | None = None
    """Model directory to start from: its weights, its config as the recipe's model, and its
    tokenizer for the text; null for new weights."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: matrix products in bfloat16 by autocast, weights and state in float32."""
    compile: bool = False
    """Compile prelude, one core pass, coda and head; costs some minutes at the start."""
    device: str = "cpu"
    """Torch device name, e.g. cpu, cuda, mps."""
    val_every: PositiveInt = 200
    """Steps between validations at every loop count; of more than 16, at powers of two, num_loops
    and the largest."""
    val_rows: PositiveInt = 64
    """Validation rows during training, at most those of the validation split."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept."""
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Second place for metrics; metrics.jsonl is always written."""


def _check_depth(depth: DepthConfig) -> None:
    """Every option of the draws has an effect, and what it needs."""
    sampler = depth.sampler
    if (sampler == "fixed") != (depth.fixed_loops is not None):
        raise ValueError("fixed_loops goes with sampler='fixed', and that sampler needs it.")
    if (sampler == "listed") != (depth.listed_loops is not None):
        raise ValueError("listed_loops goes with sampler='listed', and that sampler needs it.")
    if (sampler in POISSON_SAMPLERS) != (depth.mean_loops is not None):
        raise ValueError(
            f"mean_loops goes with the samplers {' and '.join(POISSON_SAMPLERS)}, and they need it."
        )
    if depth.override_frac == 1:
        raise ValueError(
            f"override_frac=1.0 makes sampler='{sampler}' the same as 'fixed' with fixed_loops=1. "
            "Give a fraction below 1, or name that sampler."
        )
    if sampler.endswith("_weighted") and not depth.override_frac:
        raise ValueError(
            f"override_frac=0.0 makes sampler='{sampler}' the same as "
            f"'{sampler.replace('weighted', 'uniform')}'. Give a fraction above 0, or name that "
            "sampler."
        )
    if sampler in ("independent_uniform", "independent_weighted") and depth.slices == 1:
        raise ValueError(
            f"num_depth_slices=1 makes sampler='{sampler}' the same as "
            f"'{sampler.replace('independent', 'sync')}'. Give more slices, or name that sampler."
        )
    if (depth.depth_scope == "slice_group") != (depth.slices_per_draw is not None):
        raise ValueError("slices_per_draw goes with depth_scope='slice_group', which needs it.")
    if depth.slices_per_draw and depth.slices % depth.slices_per_draw:
        raise ValueError(
            f"num_depth_slices={depth.slices} is not a multiple of "
            f"slices_per_draw={depth.slices_per_draw}."
        )
    if (depth.curriculum == "none") != (depth.curriculum_frac == 0.0):
        raise ValueError(
            f"curriculum='{depth.curriculum}' with curriculum_frac={depth.curriculum_frac}: a "
            "curriculum needs a positive fraction of the steps, and only a curriculum has one."
        )
    if depth.switch_frac == 1:
        raise ValueError(
            "switch_frac=1.0 never switches: every step runs one loop, and nothing else of `depth` "
            "has an effect. Give less than 1, or sampler='fixed' with fixed_loops=1."
        )
    if depth.switch_frac + depth.curriculum_frac > 1:
        raise ValueError(
            f"switch_frac={depth.switch_frac} and curriculum_frac={depth.curriculum_frac} add up "
            "to more than 1; the rise starts at the switch and must end within the run."
        )
