"""Unique parameters of a model, by part, from its config alone.

FLOPs and cache bytes are in `count.py`.
D model width, H query heads, G key/value heads, C channels per head, F feed-forward width,
V vocabulary, R low rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from depthdial.config import (
    ATTENTION_LETTERS,
    VALUE_GATE_CHANNELS,
    ModelConfig,
    ModulationConfig,
    TimeModulationConfig,
)


@dataclass(frozen=True)
class ParameterCount:
    """Unique parameters by part; a shared core counts once, whatever the loop count."""

    embedding: int
    prelude: int
    core: int
    coda: int
    injection: int
    """What brings the prelude output into each loop."""
    state_update: int
    """Projection of the state included."""
    modulation: int
    final_norm: int
    head: int
    """0 when the embedding matrix is the head."""
    loop_lora: int = 0
    """Stored low-rank differences between the loops of the core."""
    exit_gate: int = 0

    @property
    def total(self) -> int:
        """All unique parameters."""
        return sum(dataclasses.astuple(self))

    @property
    def non_embedding(self) -> int:
        """All but the vocabulary matrices and learned positions."""
        return self.total - self.embedding - self.head

    @property
    def backbone(self) -> int:
        """All but the modulation: what ELR calls the backbone, gate included."""
        return self.total - self.modulation


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Unique parameters of the model that `config` describes."""
    d_model, vocabulary = config.d_model, config.vocab_size * config.d_model
    prelude_attention = num_attention(config.prelude_layout)
    core_attention = num_attention(config.core_layout)
    below = {
        "prelude": 0,
        "core": prelude_attention,
        "coda": prelude_attention + core_attention,
    }
    prelude_norm = d_model if config.prelude_norm else 0
    head = 0 if config.tie_embeddings else vocabulary
    is_learned = config.positions == "learned"
    return ParameterCount(
        embedding=vocabulary + (config.max_context * d_model if is_learned else 0),
        prelude=_block(config, config.prelude_layout, below["prelude"]) + prelude_norm,
        core=_block(config, config.core_layout, below["core"], is_core=True),
        coda=_block(config, config.coda_layout, below["coda"]),
        injection=_injection(config),
        state_update=_state_update(config) + state_projection(config),
        modulation=_modulation(config),
        final_norm=0 if config.final_norm == "none" else d_model,
        head=head + (config.vocab_size if config.ngpt is not None else 0),
        loop_lora=_loop_lora(config),
        exit_gate=_exit_gate(config),
    )


def num_attention(layout: str) -> int:
    """Attention sublayers of a layout."""
    return sum(letter in ATTENTION_LETTERS for letter in layout)


def linear_shapes(config: ModelConfig, letter: str, *, is_core: bool) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the mixer's linear maps, by name."""
    d_model = config.d_model
    if letter in ATTENTION_LETTERS:
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = {
            "q_proj": (d_model, query),
            "k_proj": (d_model, key),
            "v_proj": (d_model, key),
            "o_proj": (query, d_model),
        }
        return {**shapes, "g_proj": (d_model, query)} if config.output_gate else shapes
    d_ff = (config.core_d_ff if is_core else None) or config.d_ff
    shapes = {"up_proj": (d_model, d_ff), "down_proj": (d_ff, d_model)}
    return {"gate_proj": (d_model, d_ff), **shapes} if config.ff == "swiglu" else shapes


def block_matrices(config: ModelConfig, layout: str, *, is_core: bool = False) -> int:
    """Weights of the matrices of a block's mixers."""
    return sum(
        inputs * outputs
        for letter in layout
        for inputs, outputs in linear_shapes(config, letter, is_core=is_core).values()
    )


def gate_matrices(config: ModelConfig) -> int:
    """Weights of the matrices of the state update."""
    if config.loop.update == "adaptive_delta":
        return config.d_model**2
    if config.loop.update == "decay_gate":
        return 2 * config.d_model * (config.loop.gate_rank or 0)
    return 0


def injection_matrices(config: ModelConfig) -> int:
    """Weights of the matrices that bring the prelude output into a loop."""
    return {"concat": 2, "diagonal": 1}.get(config.loop.injection, 0) * config.d_model**2


def state_projection(config: ModelConfig) -> int:
    """Weights of the matrix between last state and coda."""
    return config.d_model**2 if config.loop.state_projection else 0


def low_rank_set(config: ModelConfig) -> int:
    """Weights of one set of low-rank differences of the core."""
    assert config.loop_lora is not None
    return config.loop_lora.rank * sum(
        inputs + outputs
        for letter in config.core_layout
        for inputs, outputs in linear_shapes(config, letter, is_core=True).values()
    )


def _block(config: ModelConfig, layout: str, first_attention: int, *, is_core: bool = False) -> int:
    """All parameters of a block."""
    total, attention_idx = block_matrices(config, layout, is_core=is_core), first_attention
    for letter in layout:
        total += _norms(config) + _vectors(config, letter, is_core=is_core)
        if letter in ATTENTION_LETTERS:
            if attention_idx in config.value_embeddings:
                total += _value_embedding(config)
            attention_idx += 1
    return total


def _norms(config: ModelConfig) -> int:
    """Norm gains of one sublayer; the step sizes of a normalised one."""
    if config.ngpt is not None:
        return config.d_model
    num_norms = 1 if config.norm == "pre" else 2
    return num_norms * config.d_model if config.norm_gain else 0


def _vectors(config: ModelConfig, letter: str, *, is_core: bool) -> int:
    """Biases, scales and head norms of one mixer."""
    shapes = linear_shapes(config, letter, is_core=is_core)
    if letter not in ATTENTION_LETTERS:
        scales = 2 * shapes["up_proj"][1] if config.ngpt is not None else 0
        return scales + (sum(out for _, out in shapes.values()) if config.ff_bias else 0)
    biased = {"none": "", "qk": "qk", "qkv": "qkv", "qkvo": "qkvo"}[config.attention_bias]
    total = sum(shapes[f"{projection}_proj"][1] for projection in biased)
    if config.qk_norm == "rms":
        total += 2 * config.head_dim
    if config.ngpt is not None:
        total += shapes["q_proj"][1] * (2 if config.output_gate else 1)
    if is_core and config.loop.local_window is not None:
        total += config.num_heads * (config.head_dim + 1)
    return total


def _value_embedding(config: ModelConfig) -> int:
    gate = min(VALUE_GATE_CHANNELS, config.d_model) * config.num_kv_heads
    return config.vocab_size * config.num_kv_heads * config.head_dim + gate


def _state_update(config: ModelConfig) -> int:
    """adaptive_delta: W, bias, gamma; delta: rate; decay_gate: two thin matrices, bias, decay."""
    vectors = {"adaptive_delta": 2, "delta": 1, "decay_gate": 2}
    return gate_matrices(config) + vectors.get(config.loop.update, 0) * config.d_model


def _injection(config: ModelConfig) -> int:
    vectors = 2 * config.d_model if config.loop.injection == "diagonal" else 0
    return injection_matrices(config) + vectors


def _exit_gate(config: ModelConfig) -> int:
    norm = 2 * config.d_model if config.exit_gate == "norm_linear" else 0
    return 0 if config.exit_gate == "none" else norm + config.d_model + 1


def _loop_lora(config: ModelConfig) -> int:
    """Low-rank pairs and norm gains of every set."""
    if config.loop_lora is None:
        return 0
    has_gains = config.loop_lora.norms and config.ngpt is None
    gains = len(config.core_layout) * _norms(config) if has_gains else 0
    if has_gains and config.qk_norm == "rms":
        gains += num_attention(config.core_layout) * 2 * config.head_dim
    return config.loop_lora.num_sets * (low_rank_set(config) + gains)


def _modulation(config: ModelConfig) -> int:
    """Everything that conditions on the loop; every Linear has a bias."""

    def linear(inputs: int, outputs: int) -> int:
        return (inputs + 1) * outputs

    d_model, method = config.d_model, config.modulation
    if isinstance(method, TimeModulationConfig):
        embedder = linear(method.embed_dim, d_model) + linear(d_model, d_model)
        return 2 * embedder + len(config.core_layout) * linear(d_model, 2 * d_model)
    if not isinstance(method, ModulationConfig):
        return 0
    # Condition MLP, heads and low-rank pairs of core and coda, entry and exit heads; source: ELR
    # section 3.4.
    rank, d_cond = method.rank, method.d_cond
    mlp = linear(2 * method.embed_dim, d_cond) + linear(d_cond, d_cond)
    scale_shift_gain, low_rank_gain = linear(d_cond, 3 * d_model), linear(d_cond, rank)
    per_sublayer = scale_shift_gain + low_rank_gain + 2 * rank * d_model
    entry, exit_gain = linear(d_cond, 3 * d_model), linear(d_cond, d_model)
    return mlp + sum(config.split[1:]) * per_sublayer + entry + exit_gain
