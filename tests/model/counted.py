"""The model that the counting tests count by hand."""

from depthdial.config import ModelConfig


def small(**changes: object) -> ModelConfig:
    """One attention layer in prelude and coda, two in the core; no two widths alike."""
    fields = {
        "vocab_size": 50, "d_model": 12, "layout": "AF", "split": (2, 4, 2), "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 6, "d_ff": 20, "max_context": 32, "num_loops": 4,
        "max_loops": 4,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))
