"""The dense model that the first pass of an elastic one is: `merge-first-pass`.

Training may begin at one loop with stored differences and go on from their sum with the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthdial.config import LoopConfig, LoopLoraConfig
from depthdial.convert.base_model import BaseModel, Converted, CoreRange, LoopPair, check_dense
from depthdial.convert.methods import MergeOptions
from depthdial.model.checkpoint import used_formats

PREFIX = "loop_lora."


def merge_first_pass(
    base: BaseModel, core_range: CoreRange | None, options: MergeOptions
) -> Converted:
    """W + up down and the norms of the first pass's set in place of the core's own.

    Raises: ValueError for a model without stored differences, or whose first pass is more than
        the plain core.
    """
    deltas, loop = base.config.loop_lora, base.config.loop
    if deltas is None:
        raise ValueError(
            "merge-first-pass is for a model that stores differences by loop, and this base has no "
            "loop_lora: its first pass needs no merging."
        )
    if base.config.modulation is not None or base.config.segments:
        what = "modulation" if base.config.modulation is not None else "segments"
        raise ValueError(
            f"the first pass of this base has {what}, so no dense model with other weights alone "
            "equals it. merge-first-pass is for models that store differences by loop and nothing "
            "else."
        )
    if loop.update != "replace" and loop.gate_bypass != "first_only":
        raise ValueError(
            f"the first pass of this base goes through its gate (loop.update='{loop.update}'), so "
            "no dense model equals it. Only models with loop.gate_bypass='first_only' are merged."
        )
    kept = {
        name: getattr(loop, name) for name in ("injection", "initial_state", "state_projection")
    }
    config = base.config.replace(
        loop_lora=None,
        loop=LoopConfig(update="replace", unit_norm=loop.unit_norm, **kept),
        num_loops=1,
        max_loops=1,
        trained_loops=None,
    )
    check_dense(config)
    own = ("loop_lora.", "state_update.")
    tensors = {name: t for name, t in base.tensors.items() if not name.startswith(own)}
    first_set = deltas.set_at(0)
    if first_set >= 0:
        tensors |= _merged(base, deltas, first_set)
        # Matrices that meet the same states share a format.
        formats = used_formats(tensors)
        tensors = {name: t.to(formats[name]) for name, t in tensors.items()}
    return Converted(config, tensors, (LoopPair(1, 1),), "close")


def _merged(base: BaseModel, deltas: LoopLoraConfig, set_idx: int) -> dict[str, Tensor]:
    """Core tensors with one stored set folded in.

    A sum that narrow weights cannot hold is kept in float32: rounded, it would be another model.
    """
    merged = {}
    for name, stored in base.tensors.items():
        if not name.startswith(PREFIX):
            continue
        _, _, place, module, *rest = name.split(".")
        if rest == ["up"]:
            target = f"core_stack.{place}.mixer.{module}.weight"
            weight, down = base.tensors[target], base.tensors[name.removesuffix("up") + "down"]
            # float64: the sum is rounded once.
            difference = stored[set_idx].to(torch.float64) @ down[set_idx].to(torch.float64)
            total = (weight.to(torch.float64) + difference).to(torch.float32)
            narrow = total.to(weight.dtype)
            merged[target] = narrow if torch.equal(narrow.to(torch.float32), total) else total
        elif not rest:
            owner = f"mixer.{module}" if module in ("q_norm", "k_norm") else module
            merged[f"core_stack.{place}.{owner}.weight"] = stored[set_idx].clone()
    return merged
