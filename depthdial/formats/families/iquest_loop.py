"""IQuest-Coder Loop: the whole stack loops; later loops mix two kinds of attention by a gate.

Loop 1 is plain attention. A later loop attends with its own queries to loop 1's keys over all
tokens, and to its own keys over the last w tokens; a gate per head weighs the two.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig
from depthdial.formats.families.decoder_layers import (
    Defaults,
    decoder_rules,
    read_decoder,
    sublayer_name,
    write_decoder,
)
from depthdial.formats.families.family import Family
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import Rename, TensorRule

DEFAULTS = Defaults(
    max_context=8192, rope_theta=500_000.0, norm_eps=1e-5, head_dim=128, num_kv_heads=8
)


def read(source: SourceConfig) -> ModelConfig:
    """The released model is trained at its own loop count only."""
    num_loops = source.loops("loop_num", 2)
    config = ModelConfig.from_dict(
        {
            **read_decoder(source, DEFAULTS),
            "num_loops": num_loops,
            "max_loops": num_loops,
            "loop": {"update": "replace", "local_window": source.window("loop_window_size", 64)},
        }
    )
    return config.with_trained([num_loops])


def rules(config: ModelConfig, source: dict[str, Any]) -> list[TensorRule]:
    """Released files call the gates `gate_projections`; the released code renames them on loading,
    and files saved by it carry the other name."""
    found = decoder_rules(config)
    for block in range(sum(config.split) // 2):
        ours = f"{sublayer_name(config, 2 * block)}.mixer.mix_gate"
        released = f"model.gate_projections.{block}"
        renamed = f"model.layers.{block}.gate_projection"
        for part in ("weight", "bias"):
            found.append(Rename(f"{released}.{part}", f"{ours}.{part}"))
            found.append(Rename(f"{renamed}.{part}", f"{ours}.{part}", is_exported=False))
    return found


def to_source(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["IQuestLoopCoderForCausalLM"],
        "model_type": "iquestloopcoder",
        **write_decoder(config),
        "loop_num": config.num_loops,
        "loop_window_size": config.loop.local_window,
    }


def limits(config: ModelConfig) -> list[str]:
    return [
        "The published model is trained at one loop count; other counts are extrapolation.",
        "The released code's cached generation stores wrong local keys and does not cut them to "
        "the window; here cached generation equals the full pass, so its texts differ from those "
        "of the released code.",
    ]


IQUEST_LOOP = Family(
    name="iquest-loop",
    summary="IQuest-Coder Loop: the whole stack loops, mixing global and local attention.",
    matches=lambda values: values.get("model_type") == "iquestloopcoder",
    read=read,
    rules=rules,
    to_source=to_source,
    limits=limits,
)
