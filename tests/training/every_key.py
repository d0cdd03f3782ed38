"""What a tiny run does, several base recipes, and other values of every key of a recipe.

Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import Recipe, set_dotted
from depthdial.engine.generate import generate
from depthdial.model.checkpoint import load_model
from depthdial.training.pretrain import train

TOLERANCE = 1e-5
"""Relative to the largest number beside it: far above what another order of a sum does to float32,
far below what the values of VARIANTS do."""
WEIGHTS = "model.safetensors"


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Values with dotted keys replaced."""
    values = json.loads(json.dumps(values))
    for key, value in changes.items():
        set_dotted(values, key, value)
    return values


COMMON: dict[str, Any] = {
    "name": "run",
    "model": {
        "vocab_size": 32, "d_model": 8, "split": [2, 2, 2], "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 4, "d_ff": 8, "max_context": 48, "num_loops": 2, "max_loops": 3,
        "init_std": 0.3,
    },
    "data": {"task": "pointer_program", "context": 16},
    "depth": {"sampler": "override", "override_frac": 0.25, "num_depth_slices": 4},
    "optim": {"lr": 0.02, "weight_decay": 0.5, "grad_clip": 0.05},
    "train": {
        "steps": 8, "batch_size": 8, "val_every": 4, "val_rows": 4, "checkpoint_every": 4,
        "precision": "fp32",
    },
}  # fmt: skip
ONE_LOOP = {"model.max_loops": 1, "model.num_loops": 1, "model.loop": {"update": "replace"}}
NO_HEADS = {"model.num_heads": None, "model.num_kv_heads": None, "model.head_dim": None}
BASES: dict[str, dict[str, Any]] = {
    "elr": {
        "depth.switch_frac": 0.25,
        "model.modulation": {"d_cond": 4, "rank": 2, "embed_dim": 4},
    },
    "dense": {**ONE_LOOP, "depth": {"sampler": "fixed", "fixed_loops": 1}},
    "dense, depth left out": {**ONE_LOOP, "depth": {}},
    "poisson, decay gate": {
        "model.max_loops": 4,
        "model.prelude_norm": True,
        "model.loop": {
            "update": "decay_gate", "gate_rank": 2, "injection": "diagonal",
            "initial_state": "random", "random_state_std": 0.5, "state_projection": True,
        },
        "depth": {
            "sampler": "poisson_truncated", "mean_loops": 3, "num_depth_slices": 4,
            "backprop_loops": 1, "curriculum": "linear", "curriculum_frac": 0.5,
        },
        "optim.optimizer": "adamw",
    },
    "windows, text": {
        "model.vocab_size": 300,
        "model.layout": "SFAF",
        "model.split": [2, 4, 2],
        "model.sliding": {"window": 3, "rope_theta": 50.0},
        "model.qk_norm": "rms",
        "model.rope_scaling": {
            "kind": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_context": 16,
        },
        "model.norm": "sandwich",
        "model.output_gate": True,
        "model.attention_bias": "qkvo",
        "model.value_embeddings": [1],
        "model.core_d_ff": 12,
        "model.loop": {
            "update": "delta", "cache_policy": "collapse_mean", "beyond_max_loops": "extrapolate",
        },
        "data.task": None,
        "data.path": "TEXT",
        "depth": {
            "sampler": "sync_weighted", "override_frac": 0.25, "num_depth_slices": 4,
            "depth_scope": "slice_group", "slices_per_draw": 2,
        },
    },
    "corpus": {
        "model.vocab_size": 300,
        "data.task": None,
        "data.corpus": "annual-messages",
        "data.tokenizer_vocab": 300,
        "data.cache_dir": "CACHE",
    },
    "unit lengths": {
        "model.norm": "ngpt",
        "model.ngpt": {"alpha_init": 0.3, "scale_std": 0.2, "gate_scale_init": 2.0},
        "model.output_gate": True,
        "model.final_norm": "none",
        "depth": {"sampler": "listed", "listed_loops": [1, 2]},
        "optim.decay_frac": 0.5,
        "optim.min_lr_frac": 0.3,
    },
    "learned positions, time": {
        "model.positions": "learned",
        "model.norm": "post_sum",
        "model.ff": "gelu",
        "model.ff_bias": True,
        "model.modulation": {"kind": "time_step", "embed_dim": 4},
        "model.loop": {"update": "residual", "gate_bypass": "first_only"},
        "depth": {"sampler": "listed", "listed_loops": [1, 3]},
        "objective": {"trajectory": {"short_weight": 0.5, "consistency_weight": 0.5}},
    },
    "attention alone": {
        "model.layout": "A",
        "model.d_ff": None,
        "model.positions": "none",
        "model.loop": {"update": "anchored", "anchor": 0.3, "cache_policy": "share_first"},
        "model.loop_lora": {"rank": 2, "sets_by_loop": [-1, 0, 1]},
        "depth": {"sampler": "independent_uniform", "num_depth_slices": 4},
    },
    "feed-forward alone": {
        "model.layout": "F",
        **NO_HEADS,
        "model.ff": "relu_squared",
        "model.loop": {"update": "residual", "injection": "add"},
        "depth": {
            "sampler": "fixed", "fixed_loops": 2, "curriculum": "linear", "curriculum_frac": 0.75,
        },
    },
    "segments": {
        "model.split": [2, 4, 2],
        "model.segments": [2, 2],
        "model.tie_embeddings": True,
        "model.loop": {"update": "replace", "cache_policy": "last_step"},
        "depth": {"sampler": "sync_uniform"},
    },
    "local window": {
        "model.loop": {
            "update": "damped", "injection": "concat", "initial_state": "zero", "local_window": 3,
        },
        "depth": {"sampler": "poisson_lognormal", "mean_loops": 2},
    },
    "healing": {
        "model": None,
        "data": {"task": "pointer_chain", "num_chains": 2, "chain_length": 3, "context": 42},
        "depth": {"sampler": "listed", "listed_loops": [1, 2]},
        "objective": {"distill": {"weight": 1.0, "rows": "one_loop"}},
        "optim.freeze": ["embedding.*", "prelude_stack.*", "coda_stack.*"],
        "optim.lr_by_pattern": {"state_update.*": 0.02},
        "optim.adamw_lr": 0.005,
        "train.init": "FOLDER",
    },
    "gate alone": {
        "optim.freeze": ["embedding.*", "lm_head.*", "*_stack.*", "final_norm.*"],
        "optim.weight_decay": 0.1,
    },
}  # fmt: skip
"""Name -> changes of COMMON; TEXT is a prepared folder, FOLDER and OTHER are model directories."""


class With(NamedTuple):
    """A value that goes only with other changes."""

    value: Any
    also: dict[str, Any]


ELR = {"d_cond": 4, "rank": 2, "embed_dim": 4}
SCALING = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 16,
    "kind": "llama3", "factor": 4.0,
}  # fmt: skip
VARIANTS: dict[str, list[Any]] = {
    "name": ["another"],
    "model.vocab_size": [40, With(290, {"data.tokenizer_vocab": 290})],
    "model.d_model": [12],
    "model.layout": ["AF", "FA", "A", "F", "SF"],
    "model.split": [[4, 2, 2], [2, 4, 2], [0, 2, 2]],
    "model.segments": [[], [1, 1], [1, 3]],
    "model.num_heads": [1, 4, None],
    "model.num_kv_heads": [2, None],
    "model.head_dim": [8, None],
    "model.core_d_model": [None, 12],
    "model.core_num_heads": [None, 4],
    "model.core_num_kv_heads": [None, 2],
    "model.d_ff": [12, None],
    "model.core_d_ff": [20, None],
    "model.ff": ["swiglu", "gelu", "relu_squared", "half_relu_squared"],
    "model.ff_bias": [True, False],
    "model.max_context": [64],
    "model.positions": ["rotary", "learned", "none"],
    "model.rope_theta": [5.0],
    "model.rotary_frac": [0.5],
    "model.rotary_pairs": ["half_split", "interleaved"],
    "model.rope_scaling": [None, SCALING, {"kind": "linear", "factor": 3.0}],
    "model.rope_scaling.kind": ["linear", "llama3"],
    "model.rope_scaling.factor": [20.0],
    "model.rope_scaling.low_freq_factor": [0.1],
    "model.rope_scaling.high_freq_factor": [40.0],
    "model.rope_scaling.original_context": [4],
    "model.sliding": [None, {"window": 2}],
    "model.sliding.window": [2],
    "model.sliding.rope_theta": [5.0],
    "model.sliding.rotary_frac": [0.5],
    "model.qk_norm": ["none", "rms", "rms_after_rotary"],
    "model.qk_norm_eps": [None, 0.5],
    "model.attention_bias": ["none", "qk", "qkv", "qkvo"],
    "model.output_gate": [True, False],
    "model.value_embeddings": [[], [0], [0, 1]],
    "model.tie_embeddings": [True, False],
    "model.embed_scale": [7.0],
    "model.logit_soft_cap": [None, 0.5],
    "model.norm": ["pre", "sandwich", "post_sum", "ngpt"],
    "model.norm_gain": [True, False],
    "model.norm_eps": [0.5],
    "model.prelude_norm": [True, False],
    "model.final_norm": ["head", "coda_and_head", "loop", "none"],
    "model.ngpt": [None, {"alpha_init": 0.3, "scale_std": 0.2}],
    "model.ngpt.alpha_init": [0.9],
    "model.ngpt.scale_std": [0.7],
    "model.ngpt.gate_scale_init": [None, 9.0],
    "model.init_std": [0.1],
    "model.num_loops": [1, 3],
    "model.max_loops": [1, 2, 4],
    "model.trained_loops": [[1], []],
    "model.loop": [{"update": "residual", "injection": "add"}],
    "model.loop.update": [
        "replace", "residual", "delta", "adaptive_delta", "decay_gate", "damped", "anchored",
    ],
    "model.loop.injection": ["none", "add", "concat", "diagonal"],
    "model.loop.initial_state": ["prelude", "zero", "random"],
    "model.loop.random_state_std": [None, 3.0],
    "model.loop.random_state_seed": [7],
    "model.loop.unit_norm": [True, False],
    "model.loop.state_projection": [True, False],
    "model.loop.delta_init": [0.9],
    "model.loop.gamma_init": [2.0],
    "model.loop.gate_rank": [None, 3],
    "model.loop.anchor": [0.9],
    "model.loop.gate_bypass": ["never", "first_only"],
    "model.loop.local_window": [None, 2],
    "model.loop.cache_policy": [
        "per_loop", "collapse_last", "collapse_first", "collapse_mean", "last_step",
        "share_first", "stash_first", "stash_last", "huginn:compress-anchor", "parcae:compress-s1",
    ],
    "model.loop.beyond_max_loops": ["refuse", "extrapolate"],
    "model.modulation": [None, ELR, {"kind": "time_step", "embed_dim": 4}],
    "model.modulation.kind": ["elr", "time_step"],
    "model.modulation.d_cond": [6],
    "model.modulation.rank": [3],
    "model.modulation.embed_dim": [6],
    "model.modulation.embed_scale": [3.0],
    "model.modulation.neutral": ["one_loop", "every_loop"],
    "model.loop_lora": [None, {"rank": 2, "sets_by_loop": [0, 1]}],
    "model.loop_lora.rank": [0, 3],
    "model.loop_lora.sets_by_loop": [[0, 1, 2], [0], [0, 1, 2, 3, 4, 5]],
    "model.loop_lora.norms": [True, False],
    "model.exit_gate": ["none", "linear", "norm_linear"],
    "model.exit_gate_stale": [True],
    "data.path": [None, With("TEXT", {"data.task": None, "model.vocab_size": 300})],
    "data.corpus": [
        None,
        With(
            "annual-messages",
            {
                "data.task": None, "data.tokenizer_vocab": 300, "model.vocab_size": 300,
                "data.cache_dir": "CACHE",
            },
        ),
    ],
    "data.task": [
        None,
        With("pointer_program", {"data.path": None, "model.vocab_size": 32}),
        "pointer_chain",
    ],
    "data.num_chains": [None, With(1, {"data.context": 21})],
    "data.chain_length": [None, With(2, {"data.context": 28})],
    "data.context": [12],
    "data.tokenizer_vocab": [None, With(290, {"model.vocab_size": 290})],
    "data.isolate_documents": [True, False],
    "data.cache_dir": ["ANOTHER CACHE"],
    "depth.sampler": [
        "fixed", "sync_uniform", "sync_weighted", "independent_uniform", "independent_weighted",
        "override", "poisson_lognormal", "poisson_truncated", "listed",
    ],
    "depth.listed_loops": [None, [2], [1, 3]],
    "depth.fixed_loops": [None, 1, 3],
    "depth.mean_loops": [None, 1, 3],
    "depth.override_frac": [0.0, 0.75, 1.0],
    "depth.num_depth_slices": [None, 1, 2],
    "depth.depth_scope": ["step", "slice_group"],
    "depth.slices_per_draw": [None, 1, 4],
    "depth.backprop_loops": [None, 1, 2, 9],
    "depth.curriculum": ["none", "linear", "one_minus_sqrt"],
    "depth.curriculum_frac": [0.0, 0.01, 0.7],
    "depth.switch_frac": [0.0, 0.01, 0.5, 1.0],
    "objective.distill": [None, {"weight": 0.5}],
    "objective.distill.weight": [3.0],
    "objective.distill.teacher": [None, "OTHER"],
    "objective.distill.teacher_loops": [3],
    "objective.distill.rows": ["all", "one_loop"],
    "objective.trajectory": [None, {}],
    "objective.trajectory.short_weight": [0.0, 2.0],
    "objective.trajectory.consistency_weight": [0.0, 2.0],
    "optim.optimizer": ["muon", "adamw"],
    "optim.lr": [0.005],
    "optim.adamw_lr": [None, 0.0005],
    "optim.betas": [[0.5, 0.95], [0.9, 0.5]],
    "optim.eps": [1.0],
    "optim.momentum": [0.5],
    "optim.weight_decay": [0.0, 3.0],
    "optim.warmup_frac": [0.0, 0.5],
    "optim.decay_frac": [0.0, 0.25],
    "optim.min_lr_frac": [0.0, 0.9],
    "optim.grad_clip": [0.01],
    "optim.freeze": [[], ["core_stack.*"], ["core_stack.*", "core_stack.0.*"]],
    "optim.lr_by_pattern": [{}, {"core_stack.*": 0.2}, {"*": 0.01}],
    "train.steps": [4],
    "train.batch_size": [16],
    "train.micro_batch_size": [None, 2, 4],
    "train.seed": [5],
    "train.init": [None, "OTHER"],
    "train.precision": ["fp32", "bf16"],
    "train.compile": [],
    "train.device": ["cpu:0"],
    "train.val_every": [2],
    "train.val_rows": [2],
    "train.checkpoint_every": [2],
    "train.keep_checkpoints": [1],
    "train.tracker": ["none", "tensorboard"],
}  # fmt: skip
"""Dotted key -> values to try; each does far more than rounding where it does anything."""


def base_values(name: str, places: dict[str, str]) -> dict[str, Any]:
    """Values of a base recipe. Args: places: name of a folder -> its path."""
    return placed(merged(COMMON, BASES[name]), places)


def placed(value: Any, places: dict[str, str]) -> Any:
    """A value with the names of folders replaced by their paths."""
    if isinstance(value, dict):
        return {key: placed(inner, places) for key, inner in value.items()}
    return places.get(value, value) if isinstance(value, str) else value


def change(key: str, value: Any) -> dict[str, Any]:
    """Dotted keys of one of VARIANTS."""
    return {key: value.value, **value.also} if isinstance(value, With) else {key: value}


def outcome(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Everything that a run of this recipe leaves and its model says, by name.

    Metrics of every step, files, weights, optimizer state, logits of every loop count up to two
    beyond the largest (as a sweep measures them), cached logits with the model's own policy, and
    what generation does beyond the largest loop count.
    """
    run = train(recipe, root=folder).path
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    found: dict[str, Any] = {
        f"metrics {i} {key}": value
        for i, record in enumerate(records)
        for key, value in record.items()
        if key != "train/tok_per_sec"
    }
    newest = max(run.glob("checkpoints/*/" + WEIGHTS), key=lambda path: path.parent.name).parent
    found["files"] = sorted(path.name for path in [*run.iterdir(), *newest.parent.iterdir()])
    model = load_model(newest).float().eval()
    found |= {f"weight {name}": tensor for name, tensor in model.state_dict().items()}
    tokens_BT = torch.arange(12).reshape(2, 6) * 5 % recipe.model.vocab_size
    with torch.no_grad():
        for k in range(1, recipe.model.max_loops + 3):
            found[f"logits at {k}"] = model(tokens_BT, num_loops=k)
        k = recipe.model.num_loops
        cache = ContiguousCache(model.config, batch_size=2, capacity=6)
        # A prompt in two calls: some policies differ in what the second one reads alone.
        parts = [model(part, num_loops=k, cache=cache) for part in tokens_BT[:, :4].split(2, dim=1)]
        cache.end_prompt()
        parts += [model(tokens_BT[:, i, None], num_loops=k, cache=cache) for i in range(4, 6)]
        found["cached logits"] = torch.cat(parts, dim=1)
    try:
        beyond = recipe.model.max_loops + 1
        found["beyond"] = [
            row.finish_reason for row in generate(model, [[1]], num_loops=beyond, max_new_tokens=2)
        ]
    except ValueError:
        found["beyond"] = "refused"
    shutil.rmtree(run)
    return found


def differs(first: Any, second: Any) -> bool:
    """Whether two values of an outcome differ by more than rounding."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape:
            return True
        size = max(float(first.abs().max()), float(second.abs().max()), 1e-9)
        return not float((first - second).abs().max()) <= TOLERANCE * size
    if isinstance(first, float) and isinstance(second, float):
        return not math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=1e-12)
    return first != second


def changed(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names of what two outcomes do not have in common."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or differs(first[name], second[name])
    )
