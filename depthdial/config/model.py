"""Fields of a model: its loops, its conditioning, its sublayers.

Rules between the fields are in `config/model_checks.py`, the base class in `config/base.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from depthdial.config.base import Fraction, PositiveFloat, StrictConfig
from depthdial.config.effects import LOOP_EFFECTS, MODEL_EFFECTS, check_effects
from depthdial.config.limits import (
    MAX_LOOPS,
    MAX_SIZE,
    MAX_SUBLAYERS,
    LoopCount,
    PositiveInt,
    Sublayers,
    Tokens,
)
from depthdial.config.model_checks import (
    check_attention,
    check_core,
    check_loop,
    check_model_options,
    check_segments,
    check_sublayers,
    check_trained_loops,
)
from depthdial.config.policies import check_cache_policy

CachePolicy = Annotated[str, AfterValidator(check_cache_policy)]
"""Name of a rule about stored keys and values; `POLICIES` and `PUBLISHED_POLICY`."""
UpdateName = Literal[
    "replace", "residual", "delta", "adaptive_delta", "decay_gate", "damped", "anchored"
]
InjectionName = Literal["none", "add", "concat", "diagonal"]


class LoopConfig(StrictConfig):
    """What happens to the state before, between and after the passes of the core."""

    update: UpdateName = "adaptive_delta"
    """State update after each loop; replace at one loop is the plain network. residual, delta,
    adaptive_delta: ELR section 3; decay_gate: LoopUS; damped, anchored: training-free looping."""
    injection: InjectionName = "none"
    """How the prelude output enters each loop: add (ELR), concat (Huginn: W [s; h]), diagonal
    (Parcae: exp(-dt A) s + dt B h)."""
    initial_state: Literal["prelude", "zero", "random"] = "prelude"
    """State before the first loop: the prelude output, zeros, or counter-based noise."""
    random_state_std: PositiveFloat | None = None
    """Standard deviation of the random initial state, cut at three of them; only with random."""
    random_state_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the random initial state, a function of (seed, position, channel); only with random."""
    unit_norm: bool = False
    """Scale the core's input and every candidate state to length 1 (nGPT)."""
    state_projection: bool = False
    """A learned matrix between the last state and the coda (Parcae)."""
    delta_init: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Initial per-channel rate of the `delta` update; no effect on the others."""
    gamma_init: float = 0.0
    """Initial gamma of `adaptive_delta`; 1.8546 gives beta = 1 at a zero gate."""
    gate_rank: PositiveInt | None = None
    """Low rank of the gate of `decay_gate`, which needs it; no other update has one."""
    anchor: Fraction = 0.5
    """Weight of the first loop's candidate in the result of `anchored`."""
    gate_bypass: Literal["never", "first_only"] = "never"
    """first_only: the first loop replaces the state exactly, without the gate."""
    local_window: Tokens | None = None
    """Later loops mix attention over the first loop's keys with attention over their own last
    so many tokens (this one included), by a learned gate; null for plain attention."""
    cache_policy: CachePolicy = "per_loop"
    """Which keys and values persist between calls; per_loop is exact. share_first holds without
    a cache too."""
    beyond_max_loops: Literal["refuse", "extrapolate"] = "refuse"
    """What generation does beyond max_loops; sweeps always extrapolate, and mark it."""

    @model_validator(mode="after")
    def _options_have_effect(self) -> Self:
        check_effects(self, LOOP_EFFECTS)
        check_loop(self)
        return self


class ModulationConfig(StrictConfig):
    """ELR loop-conditioned modulation of core and coda (ELR section 3.4)."""

    kind: Literal["elr"] = "elr"
    """Name of the method."""
    d_cond: PositiveInt = 256
    """Width of the condition vector."""
    rank: PositiveInt = 256
    """Rank of the low-rank path of each modulated sublayer."""
    embed_dim: Annotated[int, Field(ge=2, multiple_of=2, le=MAX_SIZE)] = 256
    """Width of each of the two sinusoidal embeddings (progress and budget)."""
    embed_scale: PositiveFloat = 1000.0
    """Progress and budget, in (0, 1], are multiplied by this before the sine ladder."""
    neutral: Literal["one_loop", "every_loop"] = "one_loop"
    """What heads of zero leave unchanged. one_loop: the function of one loop; later loops enter
    through an RMSNorm and do not move the state (ELR). every_loop: a model that loops already."""


class TimeModulationConfig(StrictConfig):
    """Conditioning of core sublayers on the time and the step size of a loop (LoopFormer)."""

    kind: Literal["time_step"]
    """Name of the method."""
    embed_dim: Annotated[int, Field(ge=2, multiple_of=2, le=MAX_SIZE)] = 256
    """Width of each of the two sinusoidal embeddings."""


def _modulation_kind(value: Any) -> str:
    """Method of a modulation config; elr where none is named."""
    return value.get("kind", "elr") if isinstance(value, dict) else value.kind


AnyModulation = Annotated[
    Annotated[ModulationConfig, Tag("elr")] | Annotated[TimeModulationConfig, Tag("time_step")],
    Discriminator(_modulation_kind),
]
"""Any method of conditioning; `kind` says which, elr where it is left out."""


class LoopLoraConfig(StrictConfig):
    """Stored low-rank differences of the core's matrices, chosen by loop (arXiv 2410.20672)."""

    rank: Annotated[int, Field(ge=0, le=MAX_SIZE)]
    """Rank of each difference; 0 stores none, which leaves the norms alone."""
    sets_by_loop: Annotated[
        tuple[Annotated[int, Field(ge=-1, lt=MAX_LOOPS)], ...],
        Field(min_length=1, max_length=MAX_LOOPS),
    ]
    """Stored set that each loop uses, -1 for none; loops beyond the list use its last entry."""
    norms: bool = False
    """Each set has its own gains of all norms too, those of queries and keys included."""

    @model_validator(mode="after")
    def _sets_are_used(self) -> Self:
        used = sorted(set(self.sets_by_loop) - {-1})
        if used != list(range(len(used))) or not used:
            raise ValueError(
                f"sets_by_loop={list(self.sets_by_loop)} must name the sets 0, 1, ... without a "
                "gap, and at least one of them."
            )
        if not self.rank and not self.norms:
            raise ValueError("rank=0 without norms stores nothing; give a rank, or norms=true.")
        return self

    @property
    def num_sets(self) -> int:
        """Stored sets."""
        return max(self.sets_by_loop) + 1

    def set_at(self, loop_idx: int) -> int:
        """Set of one loop; -1 for none."""
        return self.sets_by_loop[min(loop_idx, len(self.sets_by_loop) - 1)]


class RopeScaling(StrictConfig):
    """Longer context by slower rotation."""

    kind: Literal["linear", "llama3"]
    """linear: all frequencies divided by factor; llama3: low ones divided, a ramp between."""
    factor: PositiveFloat
    """Divisor of the frequencies."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: waves longer than original_context / this are divided; only with it."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: waves shorter than original_context / this are kept; only with it."""
    original_context: Tokens | None = None
    """llama3: context before scaling, in tokens; only with it."""

    @model_validator(mode="after")
    def _kind_has_its_fields(self) -> Self:
        ramp = (self.low_freq_factor, self.high_freq_factor, self.original_context)
        if (self.kind == "llama3") != all(x is not None for x in ramp) or (
            self.kind == "linear" and any(x is not None for x in ramp)
        ):
            raise ValueError(
                "low_freq_factor, high_freq_factor and original_context go with kind='llama3', "
                "which needs all three."
            )
        return self


class SlidingConfig(StrictConfig):
    """Attention of the layout letter S."""

    window: Tokens
    """Tokens that a query sees, itself included."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies of these layers."""
    rotary_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of each head's channels that rotate in these layers."""


class NGPTConfig(StrictConfig):
    """Constants of the normalised transformer; its scales are stored as trained."""

    alpha_init: PositiveFloat
    """Residual step sizes are |alpha| * alpha_init / scale_std."""
    scale_std: PositiveFloat
    """Every stored scale is divided by this."""
    gate_scale_init: PositiveFloat | None = None
    """Square of the output gate's scale at the start; null for sqrt(d_model)."""


OLD_LOOP_LORA = "visit_deltas"
"""Name of the field `loop_lora` and of its tensors in format_version 1."""


def current_tensor_name(name: str) -> str:
    """The name of a tensor that may have been written in format_version 1."""
    return name.replace(f"{OLD_LOOP_LORA}.", "loop_lora.")


def from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config of format_version 1 as version 2 spells them; others unchanged.

    Raises: ValueError if a config of version 2 uses the old name.
    """
    is_old = values.get("format_version") == 1
    if OLD_LOOP_LORA in values and not is_old:
        raise ValueError(f"'{OLD_LOOP_LORA}' is called 'loop_lora' since format_version 2.")
    if not is_old:
        return values
    warnings.warn(
        f"this model was written in format_version 1: `{OLD_LOOP_LORA}` is called `loop_lora` "
        "since version 2 and was read as that. Saving the model writes version 2.",
        stacklevel=2,
    )
    renamed = {"loop_lora" if key == OLD_LOOP_LORA else key: v for key, v in values.items()}
    return renamed | {"format_version": 2}


def without_code(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json without `auto_map`: code for transformers, not a property."""
    return {key: value for key, value in values.items() if key != "auto_map"}


class ModelConfig(StrictConfig):
    """One looped language model; the same fields stand in a model directory's config.json."""

    model_type: Literal["depthdial"] = "depthdial"
    """Name of the format."""
    architectures: tuple[Literal["LoopedLM"]] = ("LoopedLM",)
    """Model class; one class expresses every family."""
    format_version: Literal[2] = 2
    """Version of the directory format; files of version 1 are read too."""
    vocab_size: PositiveInt
    """Number of token ids."""
    d_model: PositiveInt
    """Width of the residual stream, in channels."""
    layout: Annotated[str, Field(min_length=1, max_length=MAX_SUBLAYERS)] = "AF"
    """Sublayer letters from bottom to top: A attention, S attention over a sliding window, F
    feed-forward; repeated to fill the split."""
    split: tuple[Sublayers, Annotated[Sublayers, Field(ge=1)], Sublayers]
    """Sublayers in prelude, core and coda."""
    segments: Annotated[tuple[PositiveInt, ...], Field(max_length=MAX_SUBLAYERS)] = ()
    """Sublayers of the runs that the core is cut into, each looped before the next; empty where
    the core loops as a whole."""
    num_heads: PositiveInt | None = None
    """Query heads; attention layers need it, and it is null without one."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads, as num_heads, which it divides."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2, le=MAX_SIZE)] | None = None
    """Channels per head, as num_heads; free of d_model / num_heads."""
    core_d_model: PositiveInt | None = None
    """Width of the state and of the core's layers, in channels; null for d_model. The injection
    maps the prelude output into it, the state projection maps the last state back."""
    core_num_heads: PositiveInt | None = None
    """Query heads inside the core; null for num_heads."""
    core_num_kv_heads: PositiveInt | None = None
    """Key and value heads inside the core, dividing its query heads; null for num_kv_heads."""
    d_ff: PositiveInt | None = None
    """Hidden width of the feed-forward MLP; null where no MLP has this width."""
    core_d_ff: PositiveInt | None = None
    """Hidden width inside the core; null for d_ff."""
    ff: Literal["swiglu", "gelu", "relu_squared", "half_relu_squared"] = "swiglu"
    """Feed-forward kind: gated by SiLU, or two matrices around GELU, relu(x)^2, relu(x)^2 / 2."""
    ff_bias: bool = False
    """Feed-forward matrices have biases."""
    max_context: Tokens
    """Longest sequence the model is meant for, in tokens."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """rotary: queries and keys turn; learned: a vector per position is added to the embedding."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    rotary_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of each head's channels that rotate."""
    rotary_pairs: Literal["half_split", "interleaved"] = "half_split"
    """Channels that turn together: j with j + n/2, or 2j with 2j + 1."""
    rope_scaling: RopeScaling | None = None
    """Slower rotation for longer context; null for none."""
    sliding: SlidingConfig | None = None
    """Window and rotation of the letter S, which needs it."""
    qk_norm: Literal["none", "rms", "rms_after_rotary"] = "none"
    """RMS norm of each query and key head: before rotation with a gain, or after it without."""
    qk_norm_eps: PositiveFloat | None = None
    """Added to the mean square of the query and key norms; null for norm_eps."""
    attention_bias: Literal["none", "qk", "qkv", "qkvo"] = "none"
    """Attention projections that have biases."""
    output_gate: bool = False
    """Multiply the heads' output by sigmoid(g_proj x) before o_proj."""
    value_embeddings: Annotated[tuple[Sublayers, ...], Field(max_length=MAX_SUBLAYERS)] = ()
    """Attention layers, counted from the bottom, that add a gated embedding of the token to their
    values."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    embed_scale: PositiveFloat = 1.0
    """Embeddings are multiplied by this."""
    logit_soft_cap: PositiveFloat | None = None
    """c of c * tanh(logits / c), which keeps logits between -c and c; null for none."""
    norm: Literal["pre", "sandwich", "post_sum", "ngpt"] = "pre"
    """Norms of a sublayer: before the mixer; also on its output; also on the sum; or unit lengths
    with a step towards the mixer's output (`ngpt`)."""
    norm_gain: bool = True
    """Sublayer norms have a gain per channel."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the mean square inside every RMSNorm."""
    prelude_norm: bool = False
    """RMSNorm of the prelude output before the loops."""
    final_norm: Literal["head", "coda_and_head", "loop", "none"] = "head"
    """Where the final RMSNorm acts: before the head; before coda and head; on the core's output in
    every loop, and then not before the head; nowhere."""
    ngpt: NGPTConfig | None = None
    """Constants of norm='ngpt', which needs them."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of new matrices; output projections are scaled down by depth."""
    num_loops: LoopCount = 1
    """Loops that tools use when a request names none."""
    max_loops: LoopCount = 1
    """Largest loop count that the model is made for; see loop.beyond_max_loops."""
    trained_loops: Annotated[tuple[LoopCount, ...], Field(max_length=MAX_LOOPS)] | None = None
    """Loop counts that training has run, ascending; null for every one up to max_loops."""
    loop: LoopConfig = LoopConfig()
    """State update, injection, cache policy."""
    modulation: AnyModulation | None = None
    """Loop-conditioned modulation; null for none."""
    loop_lora: LoopLoraConfig | None = None
    """Low-rank differences of the core's matrices by loop; null for none."""
    exit_gate: Literal["none", "linear", "norm_linear"] = "none"
    """Readout of when to stop looping: a linear map of the state, or of its LayerNorm."""
    exit_gate_stale: bool = False
    """The other weights were trained after the exit gate, without it; training writes it."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain JSON types, without the names of code files that an export adds."""
        return super().from_dict(from_version_1(without_code(values)))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_sublayers(self)
        check_effects(self, MODEL_EFFECTS)
        check_segments(self)
        check_attention(self)
        check_core(self)
        check_model_options(self)
        check_trained_loops(self)
        return self

    @property
    def trained_at(self) -> tuple[int, ...]:
        """`trained_loops` written out."""
        if self.trained_loops is None:
            return tuple(range(1, self.max_loops + 1))
        return self.trained_loops

    def with_trained(self, loops: Iterable[int]) -> Self:
        """Copy whose `trained_loops` are these, as far as max_loops; null where they are all."""
        kept = sorted({k for k in loops if k <= self.max_loops})
        return self.replace(trained_loops=None if len(kept) == self.max_loops else kept)

    @property
    def query_width(self) -> int:
        """Channels of all query heads; 0 without attention."""
        return (self.num_heads or 0) * (self.head_dim or 0)

    @property
    def key_width(self) -> int:
        """Channels of all key heads; 0 without attention."""
        return (self.num_kv_heads or 0) * (self.head_dim or 0)

    @property
    def core_config(self) -> Self:
        """The config that the core's layers are built from: its own width and heads in the place
        of the model's. Its `d_model` is the width of the state."""
        own = {
            "d_model": self.core_d_model,
            "num_heads": self.core_num_heads,
            "num_kv_heads": self.core_num_kv_heads,
        }
        changes = {name: value for name, value in own.items() if value is not None}
        # The rules between fields have been checked for the whole model.
        return self.model_copy(update=changes) if changes else self

    @property
    def sublayers(self) -> str:
        """Letters of all physical sublayers, bottom to top."""
        return self.layout * (sum(self.split) // len(self.layout))

    @property
    def layouts(self) -> dict[str, str]:
        """Letters of prelude, core and coda, bottom to top."""
        return {
            "prelude": self.prelude_layout,
            "core": self.core_layout,
            "coda": self.coda_layout,
        }

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
