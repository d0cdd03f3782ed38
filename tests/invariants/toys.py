"""The toy models of the invariants."""

from __future__ import annotations

import torch
from torch import Tensor

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.model.looped_lm import LoopedLM

VOCAB = 61
MAX_LOOPS = 4


def toy_config(**changes) -> ModelConfig:
    """Two attention layers in each block, grouped heads, partial rotary, re-injection."""
    config = ModelConfig(
        vocab_size=VOCAB, d_model=32, split=(4, 4, 4), num_heads=4, num_kv_heads=2, head_dim=12,
        d_ff=48, max_context=128, rotary_frac=0.5, qk_norm="rms", num_loops=2, max_loops=MAX_LOOPS,
        loop=LoopConfig(injection="add"),
        modulation=ModulationConfig(d_cond=16, rank=4, embed_dim=16), init_std=0.15,
    )  # fmt: skip
    return config.replace(**changes) if changes else config


def toy_model(*, seed: int = 0, **changes) -> LoopedLM:
    """A toy whose every parameter is random, so that every path matters."""
    model = LoopedLM(toy_config(**changes), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("state_update", "modulation")):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise)
    return model.eval()


def toy_tokens(batch: int, length: int, *, seed: int = 7) -> Tensor:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)
