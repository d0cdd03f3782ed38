"""Published and built-in model configurations by name.

Here live shapes only; recipes (data, optimizer, length) are YAML files. Where a
source leaves a field open, the preset guesses it and `GUESSED_FIELDS` says so.
"""

from __future__ import annotations

from depthdial.config import ModelConfig, ModulationConfig, nearest_name

GUESSED_FIELDS = {
    "gpt-0.5b": {
        "num_heads": "not published; 16 heads of 64 channels fill d_model",
        "num_kv_heads": "not published; no grouping assumed",
        "head_dim": "not published; d_model / num_heads",
        "d_ff": "not published; gives the 498.4M backbone parameters that 31.6M being 6.34% imply",
        "max_context": "not published",
        "rope_theta": "not published; the position encoding itself is assumed to be rotary",
        "rotary_frac": "not published; all channels rotate",
        "qk_norm": "not published; none assumed",
        "norm_eps": "not published",
        "init_std": "not published",
    },
}
"""Preset -> field -> why it is a guess. A variant (`-modulated`) shares the guesses of its base."""


def preset_names() -> list[str]:
    """Names that `preset` knows, in the order of their definition."""
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """Configuration by name.

        gpt-0.5b            ELR's GPT-0.5B: 15 attention and 15 SwiGLU sublayers, K = 5;
                            heads, head width, d_ff, context, rotary position encoding, QK-norm,
                            norm_eps and init_std are guesses (GUESSED_FIELDS)
        gpt-0.5b-modulated  the same with loop-conditioned modulation (31.6M parameters more)
        tiny-text           0.3M parameters, for byte-level BPE text on a CPU
        tiny-pointer        0.5M parameters, for the pointer-program task
        toy                 the random model of the fault checks, 2 layers per block

    Raises: ValueError with the nearest known name.
    """
    if name not in _PRESETS:
        raise ValueError(f"unknown preset '{name}'.{nearest_name(name, preset_names())}")
    return _PRESETS[name]()


def _gpt_05b() -> ModelConfig:
    """Source: ELR Table 4 (sublayers, split, width, vocabulary, K); the rest is guessed."""
    return ModelConfig(
        vocab_size=131_072,
        d_model=1024,
        layout="AF",
        split=(8, 14, 8),
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        d_ff=3600,
        max_context=4096,
        num_loops=5,
        max_loops=5,
    )


def _gpt_05b_modulated() -> ModelConfig:
    return _gpt_05b().replace(modulation=ModulationConfig(d_cond=256, rank=256))


def _tiny_text() -> ModelConfig:
    return ModelConfig(
        vocab_size=1024,
        d_model=64,
        layout="AF",
        split=(2, 4, 2),
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        d_ff=176,
        max_context=128,
        num_loops=4,
        max_loops=4,
    )


def _tiny_pointer() -> ModelConfig:
    return ModelConfig(
        vocab_size=32,
        d_model=96,
        layout="AF",
        split=(2, 4, 2),
        num_heads=3,
        num_kv_heads=3,
        head_dim=32,
        d_ff=256,
        max_context=32,
        qk_norm="rms",
        num_loops=4,
        max_loops=4,
    )


def _toy() -> ModelConfig:
    return ModelConfig(
        vocab_size=128,
        d_model=64,
        layout="AF",
        split=(4, 4, 4),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=128,
        max_context=128,
        num_loops=4,
        max_loops=4,
    )


_PRESETS = {
    "gpt-0.5b": _gpt_05b,
    "gpt-0.5b-modulated": _gpt_05b_modulated,
    "tiny-text": _tiny_text,
    "tiny-pointer": _tiny_pointer,
    "toy": _toy,
}
