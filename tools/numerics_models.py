"""What the numbers of `tools/numerics.py` are taken from: every import, name and tiny model.

The only file of the tool that knows where things are in the package. A part that moved or a
config key with another name gets its line in `_first` or `RENAMED`; the record does not change.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import depthdial
from depthdial.config import POLICIES, ModelConfig, Recipe
from depthdial.convert.methods import METHODS
from depthdial.engine.adaptive import run_until
from depthdial.engine.generate import generate
from depthdial.engine.sampling import Sampling
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.presets import preset, preset_names
from depthdial.model.stopping_rules import STOPPING_RULES, stopping_rule
from depthdial.recipes import recipe_names

__all__ = [
    "POLICIES",
    "METHODS",
    "STOPPING_RULES",
    "LoopCache",
    "LoopedLM",
    "ModelConfig",
    "Recipe",
    "Sampling",
    "depthdial",
    "generate",
    "preset_names",
    "recipe_names",
    "stopping_rule",
]


def _first(*names: str) -> Any:
    """The first of some objects, `module:name`, that exists; None in code that lacks them."""
    for name in names:
        module, _, part = name.partition(":")
        try:
            return getattr(importlib.import_module(module), part)
        except (ModuleNotFoundError, AttributeError):
            continue
    return None


LoopCache = _first(
    "depthdial.cache.contiguous:ContiguousCache",
    "depthdial.cache.contiguous:LoopCache",
    "depthdial.model.loop_cache:LoopCache",
)
Call = _first("depthdial.model.call:Call")
RENAMED = {"visit_deltas": "loop_lora"}
"""Config key, option value or part of a tensor's name -> its present name. The record holds the
present one; the first one is used where the code still has it."""

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"


def canonical(name: str) -> str:
    """A tensor's name with renamed parts as they are called now."""
    return ".".join(RENAMED.get(part, part) for part in name.split("."))


def known(values: Any) -> Any:
    """Config values or options in the words of the code that is imported."""
    old = {new: old for old, new in RENAMED.items() if new not in ModelConfig.model_fields}
    if isinstance(values, dict):
        return {old.get(key, key): known(value) for key, value in values.items()}
    if isinstance(values, list):
        return [known(value) for value in values]
    return old.get(values, values) if isinstance(values, str) else values


def truncated(model: LoopedLM, ids: Tensor, num_loops: int, no_grad_loops: Tensor) -> Tensor:
    """Logits whose gradient does not go through the first loops of each row."""
    arguments: dict[str, Any] = {"num_loops": num_loops, "no_grad_loops": no_grad_loops}
    if Call is None:
        return model.head(model.trunk(ids, **arguments))
    return model.head(model.hidden_states(Call(ids, **arguments)))


def until(model: LoopedLM, ids: Tensor, rule: Any, max_loops: int) -> tuple[Tensor, ...]:
    """Logits [B, T, V], loops [B] and measures [B, L] of rows that a rule stops."""
    if "max_loops" in inspect.signature(run_until).parameters:
        return run_until(model, ids, rule=rule, max_loops=max_loops)[:3]
    return run_until(model, Call(ids, num_loops=max_loops), rule=rule)[:3]


def command(*arguments: str | Path) -> str:
    """What `depthdial ARGUMENTS` prints on standard output. Raises: RuntimeError if it fails."""
    out, err, argv = StringIO(), StringIO(), sys.argv
    sys.argv = ["depthdial", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_module("depthdial", run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"depthdial {' '.join(sys.argv[1:])}: {err.getvalue()}") from None
    finally:
        sys.argv = argv
    return out.getvalue()


def read_json(path: Path) -> Any:
    """Plain values of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


# ---- models


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Values with those of nested groups replaced one by one."""
    values = dict(base)
    for key, value in changes.items():
        inner = values.get(key)
        is_group = isinstance(value, dict) and isinstance(inner, dict)
        values[key] = merged(inner, value) if is_group else value
    return values


def uniform(key: str, count: int) -> Tensor:
    """[count] float64 of mean 0 and variance 1, the same on every machine."""
    generator = random.Random(key)
    draws = torch.tensor([generator.random() for _ in range(count)], dtype=torch.float64)
    return (draws - 0.5) * 12**0.5


@torch.no_grad()
def set_weights(model: LoopedLM) -> LoopedLM:
    """Values by the names of the parameters, so that every path matters; vectors stay near their
    initial values."""
    for name, parameter in model.named_parameters():
        noise = uniform(canonical(name), parameter.numel()).reshape(parameter.shape)
        if parameter.ndim == 1:
            parameter.add_(0.15 * noise)
        elif "embedding" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * 0.7 * parameter.shape[-1] ** -0.5)
    return model.eval()


def new_model(values: dict[str, Any]) -> LoopedLM:
    """A float64 model of config values with its initial weights."""
    return LoopedLM(ModelConfig.from_dict(known(values)), seed=0).double()


def tiny_model(name: str) -> LoopedLM:
    """A tiny model whose weights are set."""
    return set_weights(new_model(tiny_values(name)))


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """The stored weights of a model directory."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def folder_model(folder: Path) -> LoopedLM:
    """A model directory in float64."""
    model = LoopedLM(ModelConfig.from_dict(read_json(folder / "config.json"))).double()
    model.load_state_dict({name: t.double() for name, t in folder_tensors(folder).items()})
    return model.eval()


def save_folder(model: LoopedLM, folder: Path) -> Path:
    """A model directory in float32."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(model.config.to_json(), encoding="utf-8")
    tensors = {name: t.detach().float().contiguous() for name, t in model.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- tiny configurations: each value of each mechanism at least once

BASE: dict[str, Any] = {
    "vocab_size": 41, "d_model": 16, "layout": "AF", "split": [2, 4, 2], "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 6, "d_ff": 20, "max_context": 32, "num_loops": 2,
    "max_loops": 4,
}  # fmt: skip
ELR = {"d_cond": 6, "rank": 3, "embed_dim": 4}
TIME = {"kind": "time_step", "embed_dim": 4}
PLAIN = {"update": "replace"}
NGPT = {"norm": "ngpt", "ngpt": {"alpha_init": 0.25, "scale_std": 0.2}}


def _loop(**values: Any) -> dict[str, Any]:
    return {"loop": values}


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": _loop(**PLAIN),
    "one loop": {"max_loops": 1, "num_loops": 1, **_loop(**PLAIN)},
    "update residual": _loop(update="residual"),
    "update delta": _loop(update="delta", delta_init=0.3),
    "update adaptive_delta": _loop(update="adaptive_delta", gamma_init=0.4),
    "update decay_gate": _loop(update="decay_gate", gate_rank=3),
    "update damped": _loop(update="damped"),
    "update anchored": _loop(update="anchored", anchor=0.3),
    "bypass adaptive_delta": _loop(update="adaptive_delta", gate_bypass="first_only"),
    "bypass residual": _loop(update="residual", gate_bypass="first_only"),
    "bypass decay_gate": _loop(update="decay_gate", gate_rank=2, gate_bypass="first_only"),
    "bypass delta": _loop(update="delta", gate_bypass="first_only"),
    "elr replace": {"modulation": ELR, **_loop(**PLAIN)},
    "elr residual": {"modulation": ELR, **_loop(update="residual")},
    "elr delta": {"modulation": ELR, **_loop(update="delta")},
    "elr adaptive_delta": {"modulation": ELR},
    "elr adaptive_delta add": {"modulation": ELR, **_loop(injection="add")},
    "elr decay_gate": {"modulation": ELR, **_loop(update="decay_gate", gate_rank=3)},
    "elr damped": {"modulation": ELR, **_loop(update="damped")},
    "elr anchored": {"modulation": ELR, **_loop(update="anchored")},
    "elr bypass": {"modulation": ELR, **_loop(gate_bypass="first_only")},
    "elr every_loop": {"modulation": {**ELR, "kind": "elr", "neutral": "every_loop"}},
    "elr every_loop add": {
        "modulation": {**ELR, "neutral": "every_loop", "embed_scale": 10.0},
        **_loop(injection="add"),
    },
    "elr sandwich": {"modulation": ELR, "norm": "sandwich"},
    "elr post_sum": {"modulation": ELR, "norm": "post_sum"},
    "elr zero concat": {"modulation": ELR, **_loop(initial_state="zero", injection="concat")},
    "time_step": {"modulation": TIME, **_loop(**PLAIN)},
    "time_step adaptive_delta": {"modulation": TIME, "norm": "sandwich"},
    "injection add": _loop(injection="add"),
    "injection concat": _loop(injection="concat", **PLAIN),
    "injection diagonal": _loop(injection="diagonal", **PLAIN),
    "injection diagonal adaptive_delta": _loop(injection="diagonal"),
    "state zero": _loop(initial_state="zero", injection="add"),
    "state random": _loop(
        initial_state="random", random_state_std=0.7, random_state_seed=5, injection="concat"
    ),
    "state random diagonal": {
        "prelude_norm": True,
        **_loop(
            initial_state="random",
            random_state_std=0.4,
            injection="diagonal",
            state_projection=True,
            **PLAIN,
        ),
    },
    "unit_norm": _loop(unit_norm=True, injection="add"),
    "state_projection": _loop(state_projection=True),
    "local_window": {"num_kv_heads": 4, **_loop(local_window=3, **PLAIN)},
    "local_window rms": {"qk_norm": "rms", **_loop(local_window=2)},
    "share_first": _loop(cache_policy="share_first"),
    "share_first elr": {"modulation": ELR, **_loop(cache_policy="share_first")},
    "extrapolates": _loop(beyond_max_loops="extrapolate"),
    "norm sandwich": {"norm": "sandwich"},
    "norm post_sum": {"norm": "post_sum"},
    "norm without gain": {"norm_gain": False, "norm_eps": 1e-3},
    "sandwich without gain": {"norm": "sandwich", "norm_gain": False},
    "prelude_norm": {"prelude_norm": True},
    "final_norm coda_and_head": {"final_norm": "coda_and_head"},
    "final_norm loop": {"final_norm": "loop", "split": [2, 6, 0]},
    "final_norm loop plain": {"final_norm": "loop", "split": [0, 4, 0], **_loop(**PLAIN)},
    "final_norm none": {"final_norm": "none"},
    "ngpt": {**NGPT, **_loop(unit_norm=True, **PLAIN)},
    "ngpt gated": {
        **merged(NGPT, {"ngpt": {"gate_scale_init": 3.0}}),
        "output_gate": True,
        "tie_embeddings": True,
    },
    "ngpt sliding": {**NGPT, "layout": "SFAF", "sliding": {"window": 3}, **_loop(unit_norm=True)},
    "qk_norm rms": {"qk_norm": "rms", "qk_norm_eps": 1e-4},
    "qk_norm rms_after_rotary": {"qk_norm": "rms_after_rotary"},
    "layout SFAF": {
        "layout": "SFAF",
        "split": [4, 4, 4],
        "sliding": {"window": 3, "rotary_frac": 1 / 3},
    },
    "layout SF, slow rotation": {"layout": "SF", "sliding": {"window": 3, "rope_theta": 100.0}},
    "layout SF elr": {"layout": "SF", "sliding": {"window": 2}, "modulation": ELR},
    "layout S local_window": {
        "layout": "SF",
        "sliding": {"window": 4},
        **_loop(local_window=3, **PLAIN),
    },
    "layout A": {"layout": "A", "split": [1, 2, 1], "d_ff": None},
    "layout F": {
        "layout": "F",
        "num_heads": None,
        "num_kv_heads": None,
        "head_dim": None,
        **_loop(injection="add"),
    },
    "layout AFF": {"layout": "AFF", "split": [3, 6, 3], "modulation": ELR},
    "layout FA": {"layout": "FA", "split": [1, 3, 2], "core_d_ff": 12},
    "no prelude": {"split": [0, 4, 2]},
    "no coda": {"split": [2, 4, 0], "modulation": ELR},
    "core alone": {"split": [0, 4, 0], **_loop(injection="add")},
    "core F": {"split": [3, 1, 2], "layout": "AF"},
    "core_d_ff": {"core_d_ff": 28},
    "segments": {"segments": [2, 2], **_loop(**PLAIN)},
    "segments 3": {"split": [2, 6, 0], "segments": [1, 2, 3], **_loop(**PLAIN)},
    "segments share_first": {"segments": [2, 2], **_loop(cache_policy="share_first", **PLAIN)},
    "lora": {"loop_lora": {"rank": 2, "sets_by_loop": [0, 1, 2]}, **_loop(**PLAIN)},
    "lora later": {"loop_lora": {"rank": 2, "sets_by_loop": [-1, 0]}, **_loop(update="delta")},
    "lora norms": {
        "loop_lora": {"rank": 3, "sets_by_loop": [0, 1, 0], "norms": True},
        "qk_norm": "rms",
        "norm": "sandwich",
    },
    "lora norms alone": {
        "loop_lora": {"rank": 0, "sets_by_loop": [1, 0], "norms": True},
        "norm": "post_sum",
    },
    "lora elr": {"loop_lora": {"rank": 1, "sets_by_loop": [0, -1, 1]}, "modulation": ELR},
    "lora segments": {
        "loop_lora": {"rank": 2, "sets_by_loop": [0, 1], "norms": True},
        "segments": [2, 2],
        **_loop(**PLAIN),
    },
    "lora biases": {
        "loop_lora": {"rank": 2, "sets_by_loop": [0, 1]},
        "attention_bias": "qkvo",
        "ff_bias": True,
        "output_gate": True,
    },
    "lora ngpt": {**NGPT, "loop_lora": {"rank": 2, "sets_by_loop": [0, 1]}},
    "lora local_window": {
        "loop_lora": {"rank": 2, "sets_by_loop": [0, 1, 2]},
        **_loop(local_window=3, **PLAIN),
    },
    "exit_gate linear": {"exit_gate": "linear", **_loop(**PLAIN)},
    "exit_gate norm_linear": {"exit_gate": "norm_linear", "modulation": ELR},
    "value_embeddings": {"value_embeddings": [0, 2]},
    "value_embeddings all": {
        "value_embeddings": [0, 1, 2, 3],
        "tie_embeddings": True,
        "qk_norm": "rms_after_rotary",
        "modulation": ELR,
    },
    "positions learned": {"positions": "learned"},
    "positions none": {"positions": "none"},
    "interleaved": {"rotary_pairs": "interleaved", "rope_theta": 50.0},
    "rotary_frac": {"rotary_frac": 2 / 3, "qk_norm": "rms"},
    "rope linear": {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    "rope llama3": {
        "rope_scaling": {
            "kind": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_context": 16,
        },
        "rope_theta": 100.0,
    },
    "bias qk": {"attention_bias": "qk", "qk_norm": "rms"},
    "bias qkv": {"attention_bias": "qkv", "num_kv_heads": 1},
    "bias qkvo": {"attention_bias": "qkvo", "ff_bias": True, "modulation": ELR},
    "ff gelu": {"ff": "gelu", "ff_bias": True, "positions": "learned"},
    "ff relu_squared": {"ff": "relu_squared"},
    "ff half_relu_squared": {"ff": "half_relu_squared", "rotary_pairs": "interleaved"},
    "output_gate": {"output_gate": True, "num_kv_heads": 4},
    "init_std": {"init_std": 0.3, "modulation": ELR},
    "core narrower": {
        "core_d_model": 12,
        "core_num_heads": 2,
        "core_num_kv_heads": 1,
        "prelude_norm": True,
        "value_embeddings": [0, 1, 2],
        **_loop(
            initial_state="random",
            random_state_std=0.4,
            injection="diagonal",
            state_projection=True,
            **PLAIN,
        ),
    },
    "core wider": {
        "core_d_model": 20,
        "core_num_kv_heads": 4,
        "exit_gate": "norm_linear",
        "final_norm": "none",
        "modulation": TIME,
        "qk_norm": "rms",
        "loop_lora": {"rank": 2, "sets_by_loop": [0, -1, 1], "norms": True},
        **_loop(initial_state="zero", injection="concat", state_projection=True),
    },
    "core heads": {"core_num_heads": 6, "modulation": ELR},
    "logit_soft_cap": {"logit_soft_cap": 1.5},
    "logit_soft_cap ngpt": {**NGPT, "logit_soft_cap": 3.0, **_loop(unit_norm=True)},
    "tied and scaled": {"tie_embeddings": True, "embed_scale": 4.0},
}
"""Name -> changes of BASE."""


def tiny_names() -> Iterator[str]:
    """Every tiny configuration: those above, and each preset's mechanisms in tiny widths."""
    yield from CONFIGS
    yield from (f"preset {name}" for name in preset_names())


def tiny_values(name: str) -> dict[str, Any]:
    """Config values of one of `tiny_names`."""
    if not name.startswith("preset "):
        return merged(BASE, CONFIGS[name])
    values = preset(name.removeprefix("preset ")).to_dict()
    heads = max(values["num_heads"] // values["num_kv_heads"], 1)
    widths = {key: BASE[key] for key in ("vocab_size", "d_model", "head_dim", "d_ff")}
    values |= widths | {"max_context": 32, "num_heads": 2 * heads, "num_kv_heads": 2}
    if values["modulation"] is not None:
        values["modulation"] |= {key: ELR[key] for key in ELR if key in values["modulation"]}
    return values


def golden_configs() -> list[tuple[str, str]]:
    """(case, config file) of every golden folder that holds a model."""
    return [
        (path.parent.name, path.name)
        for path in sorted(GOLDEN.glob("*/config*.json"))
        if (path.parent / "model.safetensors").is_file()
    ]


def policy_names() -> list[str]:
    """Every named cache policy, and the published rules for a core of two attention layers."""
    lookups = [f"huginn:{x}" for x in ("latest-m2", "available-m2", "always-last-m2", "skip")]
    sizes = ("s2", "s4", "anchor")
    compressed = [f"huginn:{p}compress-{x}" for p in ("", "latest-m2-") for x in sizes]
    counts = ("s1", "s2", "s3", "stride2", "first1", "last1", "last2")
    return [*POLICIES, *lookups, *compressed, *(f"parcae:compress-{x}" for x in counts)]


def file_name(name: str) -> str:
    """A name that a folder may have."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)
