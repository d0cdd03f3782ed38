"""Grouped-query attention over a key/value slot; it knows neither loops nor caches.

Letters: B batch, T query tokens, D model width, H query heads, G key/value heads,
C channels per head, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthdial.config import LETTERS, ModelConfig
from depthdial.layers.layer_type import LayerType, Place, Shapes
from depthdial.layers.normalised import NormalisedAttention
from depthdial.layers.primitives import (
    Deltas,
    RMSNorm,
    RotaryTable,
    project,
    rms_normalise,
    rotate,
    sigmoid_gate,
    wide_dtype,
)
from depthdial.layers.state import AttentionView, KVSlot

VALUE_GATE_CHANNELS = 32
"""Input channels that the gate of a value embedding reads, at most."""


class HeadGains(NamedTuple):
    """Gains of the query and key norms, [1 or B, 1, 1, C] each; None for the learned ones."""

    query: Tensor | None = None
    key: Tensor | None = None


NO_HEAD_GAINS = HeadGains()


class HeadGate(nn.Module):
    """sigmoid(w_h . q_h + b_h): one number per head and token."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads))

    def forward(self, q_BTHC: Tensor) -> Tensor:
        """Returns: [B, T, H, 1]."""
        # fp32: a gate near 0 or 1 must not move in steps of half a percent.
        wide = wide_dtype(q_BTHC.dtype)
        logits = (q_BTHC.to(wide) * self.weight.to(wide)).sum(dim=-1) + self.bias.to(wide)
        return torch.sigmoid(logits)[..., None].to(q_BTHC.dtype)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245).

    Args:
        d_model: D; num_heads: H; num_kv_heads: G, divides H; head_dim: C, free of D / H.
        qk_norm: `rms` before rotation with gains (arXiv 2010.04245), or `rms_after_rotary`
            without; qk_norm_eps: of those norms.
        bias: which projections have biases.
        interleaved: neighbouring channels rotate together.
        has_output_gate: multiply the heads' output by sigmoid(g_proj x).
        value_vocab: size of the value embedding added to v; None for none.
        mixes_loops: has the gate between the first loop's keys and the slot's own.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: Literal["none", "rms", "rms_after_rotary"] = "none",
        qk_norm_eps: float = 1e-6,
        bias: Literal["none", "qk", "qkv", "qkvo"] = "none",
        interleaved: bool = False,
        has_output_gate: bool = False,
        value_vocab: int | None = None,
        mixes_loops: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.qk_norm = qk_norm
        self.qk_norm_eps = qk_norm_eps
        self.interleaved = interleaved
        query_width, key_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(d_model, query_width, bias="q" in bias)
        self.k_proj = nn.Linear(d_model, key_width, bias="k" in bias)
        self.v_proj = nn.Linear(d_model, key_width, bias="v" in bias)
        self.o_proj = nn.Linear(query_width, d_model, bias="qkvo" == bias)
        self.g_proj = nn.Linear(d_model, query_width, bias=False) if has_output_gate else None
        has_gains = qk_norm == "rms"
        self.q_norm = RMSNorm(head_dim, qk_norm_eps) if has_gains else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps) if has_gains else None
        self.value_embedding = self.value_gate = None
        if value_vocab is not None:
            self.value_embedding = nn.Embedding(value_vocab, key_width)
            gate_width = min(VALUE_GATE_CHANNELS, d_model)
            self.value_gate = nn.Linear(gate_width, num_kv_heads, bias=False)
        self.mix_gate = HeadGate(num_heads, head_dim) if mixes_loops else None

    def forward(
        self,
        x_BTD: Tensor,
        *,
        slot: KVSlot,
        view: AttentionView,
        deltas: Deltas | None = None,
        head_gains: HeadGains = NO_HEAD_GAINS,
    ) -> Tensor:
        """Args: head_gains: in place of the learned gains of the query and key norms.

        Returns: the branch output [B, T, D], without the residual.
        """
        deltas = deltas or {}
        q_BTHC = project(self.q_proj, x_BTD, deltas.get("q_proj"))
        q_BTHC = q_BTHC.unflatten(-1, (self.num_heads, self.head_dim))
        q_BTHC = self._place(q_BTHC, self.q_norm, head_gains.query, view.rotary)
        k_BTGC = v_BTGC = None
        if not slot.is_read_only:
            k_BTGC = project(self.k_proj, x_BTD, deltas.get("k_proj"))
            k_BTGC = k_BTGC.unflatten(-1, (self.num_kv_heads, self.head_dim))
            k_BTGC = self._place(k_BTGC, self.k_norm, head_gains.key, view.rotary)
            v_BTGC = self._values(x_BTD, view.tokens_BT, deltas)
        y_BTHC = self._attend(q_BTHC, k_BTGC, v_BTGC, slot=slot, view=view)
        y_BTE = y_BTHC.flatten(2)
        if self.g_proj is not None:
            y_BTE = y_BTE * sigmoid_gate(project(self.g_proj, x_BTD, deltas.get("g_proj")))
        return project(self.o_proj, y_BTE, deltas.get("o_proj"))

    def _place(
        self,
        x_BTHC: Tensor,
        norm: RMSNorm | None,
        gain: Tensor | None,
        rotary: RotaryTable | None,
    ) -> Tensor:
        """Normalise and rotate queries or keys, in the configured order."""
        if norm is not None:
            x_BTHC = norm(x_BTHC, gain=gain)
        if rotary is not None:
            x_BTHC = rotate(x_BTHC, rotary, interleaved=self.interleaved)
        if self.qk_norm == "rms_after_rotary":
            x_BTHC = rms_normalise(x_BTHC, self.qk_norm_eps)
        return x_BTHC

    def _values(self, x_BTD: Tensor, tokens_BT: Tensor, deltas: Deltas) -> Tensor:
        v_BTGC = project(self.v_proj, x_BTD, deltas.get("v_proj"))
        v_BTGC = v_BTGC.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.value_embedding is None or self.value_gate is None:
            return v_BTGC
        embedded = self.value_embedding(tokens_BT).unflatten(-1, v_BTGC.shape[2:])
        gate_BTG = 2 * sigmoid_gate(self.value_gate(x_BTD[..., : self.value_gate.in_features]))
        return v_BTGC + gate_BTG[..., None] * embedded.to(v_BTGC.dtype)

    def _attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        slot: KVSlot,
        view: AttentionView,
    ) -> Tensor:
        if slot.shared is None:
            return slot.attend(q_BTHC, k_BTGC, v_BTGC, spec=view.spec, scale=self.scale)
        assert self.mix_gate is not None and view.local_spec is not None
        own = slot.attend(q_BTHC, k_BTGC, v_BTGC, spec=view.local_spec, scale=self.scale)
        first = slot.shared.attend(q_BTHC, spec=view.spec, scale=self.scale)
        return torch.lerp(own, first, self.mix_gate(q_BTHC))


def _has_value_embedding(config: ModelConfig, place: Place) -> bool:
    return place.num_below in config.value_embeddings


def _mixes_loops(config: ModelConfig, place: Place) -> bool:
    return place.is_core and config.loop.local_window is not None


def _build(config: ModelConfig, place: Place) -> nn.Module:
    heads = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "interleaved": config.rotary_pairs == "interleaved",
    }
    if config.ngpt is not None:
        gate_init = config.ngpt.gate_scale_init or math.sqrt(config.d_model)
        return NormalisedAttention(
            config.d_model,
            **heads,
            scale_std=config.ngpt.scale_std,
            gate_scale_init=gate_init if config.output_gate else None,
        )
    return Attention(
        config.d_model,
        **heads,
        qk_norm=config.qk_norm,
        qk_norm_eps=config.qk_norm_eps or config.norm_eps,
        bias=config.attention_bias,
        has_output_gate=config.output_gate,
        value_vocab=config.vocab_size if _has_value_embedding(config, place) else None,
        mixes_loops=_mixes_loops(config, place),
    )


def _linear_shapes(config: ModelConfig, place: Place) -> Shapes:
    d_model = config.d_model
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "q_proj": (d_model, query),
        "k_proj": (d_model, key),
        "v_proj": (d_model, key),
        "o_proj": (query, d_model),
    }
    return {**shapes, "g_proj": (d_model, query)} if config.output_gate else shapes


def _other_parameters(config: ModelConfig, place: Place) -> int:
    """Biases, scales, head norms, a value embedding, and the gate between loops."""
    shapes = _linear_shapes(config, place)
    biased = config.attention_bias.removeprefix("none")
    total = sum(shapes[f"{projection}_proj"][1] for projection in biased)
    if config.qk_norm == "rms":
        total += 2 * config.head_dim
    if config.ngpt is not None:
        total += shapes["q_proj"][1] * (2 if config.output_gate else 1)
    if _mixes_loops(config, place):
        total += config.num_heads * (config.head_dim + 1)
    if _has_value_embedding(config, place):
        total += config.vocab_size * shapes["v_proj"][1]
        total += min(VALUE_GATE_CHANNELS, config.d_model) * config.num_kv_heads
    return total


def _initial_values(
    name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator
) -> float | None:
    """Gates start at a half; the scales of a normalised layer so that they act as 1."""
    if name.startswith(("mix_gate.", "value_gate.")):
        return 0.0
    if config.ngpt is not None and name in ("q_scale", "gate_scale"):
        return config.ngpt.scale_std
    return None


ATTENTION = LayerType(
    facts=LETTERS["A"],
    build=_build,
    linear_shapes=_linear_shapes,
    other_parameters=_other_parameters,
    spared_maps=frozenset({"k_proj", "v_proj"}),
    output_maps=frozenset({"o_proj"}),
    # A product with a key, and one with a value, of every query head.
    flops_per_key=lambda config: 4 * config.num_heads * config.head_dim,
    initial_values=_initial_values,
    # Decay would pull a gate to a function that nobody chose: one half of each side.
    groups={
        "value_embedding.weight": "decayed",
        "value_gate.weight": "undecayed",
        "mix_gate.weight": "undecayed",
    },
)
SLIDING_ATTENTION = replace(ATTENTION, facts=LETTERS["S"])
"""Its window and rotation are those of its `AttentionView`."""
