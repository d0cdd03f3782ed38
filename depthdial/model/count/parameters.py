"""Unique parameters of a model, by part, from its config alone.

FLOPs and cache bytes are in `count.py`.
D model width, H query heads, G key/value heads, C channels per head, F feed-forward width,
V vocabulary, R low rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from depthdial.config import LETTERS, ModelConfig, ModulationConfig, TimeModulationConfig
from depthdial.layers.layer_type import PlacedLayer
from depthdial.model.sublayer import placed_layers


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
    blocks = {name: _block(layers) for name, layers in placed_layers(config).items()}
    normed = config.core_config.d_model if config.final_norm == "loop" else d_model
    prelude_norm = d_model if config.prelude_norm else 0
    head = 0 if config.tie_embeddings else vocabulary
    is_learned = config.positions == "learned"
    return ParameterCount(
        embedding=vocabulary + (config.max_context * d_model if is_learned else 0),
        prelude=blocks["prelude"] + prelude_norm,
        core=blocks["core"],
        coda=blocks["coda"],
        injection=_injection(config),
        state_update=_state_update(config) + state_projection(config),
        modulation=_modulation(config),
        final_norm=0 if config.final_norm == "none" else normed,
        head=head + (config.vocab_size if config.ngpt is not None else 0),
        loop_lora=_loop_lora(config),
        exit_gate=_exit_gate(config),
    )


def gate_matrices(config: ModelConfig) -> int:
    """Weights of the matrices of the state update."""
    width = config.core_config.d_model
    if config.loop.update == "adaptive_delta":
        return width**2
    if config.loop.update == "decay_gate":
        return 2 * width * (config.loop.gate_rank or 0)
    return 0


def injection_matrices(config: ModelConfig) -> int:
    """Weights of the matrices that bring the prelude output into a loop."""
    width = config.core_config.d_model
    inputs = {"concat": width + config.d_model, "diagonal": config.d_model}
    return inputs.get(config.loop.injection, 0) * width


def state_projection(config: ModelConfig) -> int:
    """Weights of the matrix between last state and coda."""
    return config.core_config.d_model * config.d_model if config.loop.state_projection else 0


def low_rank_set(config: ModelConfig) -> int:
    """Weights of one set of low-rank differences of the core."""
    assert config.loop_lora is not None
    return config.loop_lora.rank * sum(
        inputs + outputs
        for layer in placed_layers(config)["core"]
        if "loop_lora" in layer.facts.conditioned_by
        for inputs, outputs in layer.linear_shapes().values()
    )


def _block(layers: Sequence[PlacedLayer]) -> int:
    """All parameters of a block."""
    return sum(layer.num_parameters() + _norms(layer.config) for layer in layers)


def _norms(config: ModelConfig) -> int:
    """Norm gains of one sublayer; the step sizes of a normalised one.

    Args: config: of the sublayer's layer.
    """
    if config.ngpt is not None:
        return config.d_model
    num_norms = 1 if config.norm == "pre" else 2
    return num_norms * config.d_model if config.norm_gain else 0


def _state_update(config: ModelConfig) -> int:
    """adaptive_delta: W, bias, gamma; delta: rate; decay_gate: two thin matrices, bias, decay."""
    vectors = {"adaptive_delta": 2, "delta": 1, "decay_gate": 2}
    width = config.core_config.d_model
    return gate_matrices(config) + vectors.get(config.loop.update, 0) * width


def _injection(config: ModelConfig) -> int:
    vectors = 2 * config.core_config.d_model if config.loop.injection == "diagonal" else 0
    return injection_matrices(config) + vectors


def _exit_gate(config: ModelConfig) -> int:
    width = config.core_config.d_model
    norm = 2 * width if config.exit_gate == "norm_linear" else 0
    return 0 if config.exit_gate == "none" else norm + width + 1


def _loop_lora(config: ModelConfig) -> int:
    """Low-rank pairs and norm gains of every set."""
    if config.loop_lora is None:
        return 0
    has_gains = config.loop_lora.norms and config.ngpt is None
    gains = len(config.core_layout) * _norms(config.core_config) if has_gains else 0
    if has_gains and config.qk_norm == "rms":
        takes = ["head_gains" in LETTERS[letter].conditioned_by for letter in config.core_layout]
        gains += sum(takes) * 2 * config.head_dim
    return config.loop_lora.num_sets * (low_rank_set(config) + gains)


def _modulation(config: ModelConfig) -> int:
    """Everything that conditions on the loop; every Linear has a bias."""

    def linear(inputs: int, outputs: int) -> int:
        return (inputs + 1) * outputs

    d_model, method = config.d_model, config.modulation
    if isinstance(method, TimeModulationConfig):
        d_model = config.core_config.d_model
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
