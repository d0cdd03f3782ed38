"""The section `train` of `tools/numerics.py`: short runs, in float32 as users train.

What depends on an earlier run of the section (a teacher, a start) names it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numerics_models as n
from numerics_measures import Entries, joined

TEXTS = [f"Chapter {i}. The ship sailed {i} days past the island of birds. " * 8 for i in range(9)]
SAMPLERS: dict[str, dict[str, Any]] = {
    "fixed": {"fixed_loops": 3},
    "sync_uniform": {},
    "sync_weighted": {"override_frac": 0.25},
    "independent_uniform": {},
    "independent_weighted": {"override_frac": 0.25},
    "override": {"override_frac": 0.25},
    "poisson_lognormal": {"mean_loops": 2},
    "poisson_truncated": {"mean_loops": 2},
    "listed": {"listed_loops": [1, 2, 2, 4]},
}
RUNS: dict[str, dict[str, Any]] = {
    "slice_group": {
        "depth": {"sampler": "sync_uniform", "depth_scope": "slice_group", "slices_per_draw": 2}
    },
    "truncated": {"depth": {"sampler": "independent_uniform", "backprop_loops": 2}},
    "truncated, rising": {
        "depth": {
            "sampler": "poisson_truncated",
            "mean_loops": 3,
            "backprop_loops": 2,
            "curriculum": "one_minus_sqrt",
            "curriculum_frac": 0.5,
        }
    },
    "rising": {
        "depth": {"sampler": "independent_uniform", "curriculum": "linear", "curriculum_frac": 0.5}
    },
    "late graft": {"model": {"modulation": n.ELR}, "depth": {"switch_frac": 0.5}},
    "modulation, adamw": {"model": {"modulation": n.ELR}, "optim": {"optimizer": "adamw"}},
    "bf16": {"train": {"precision": "bf16"}},
    "whole batch": {"train": {"micro_batch_size": None}},
    "frozen": {
        "optim": {
            "freeze": ["embedding.*"],
            "lr_by_pattern": {"core_stack.*": 1e-3},
            "min_lr_frac": 0.1,
        }
    },
    "optimizer options": {
        "optim": {
            "lr": 3e-3,
            "adamw_lr": 2e-3,
            "betas": [0.8, 0.9],
            "eps": 1e-6,
            "momentum": 0.9,
            "weight_decay": 0.3,
            "warmup_frac": 0.25,
            "decay_frac": 0.5,
            "grad_clip": 0.5,
        }
    },
    "trajectory": {"objective": {"trajectory": {}}},
    "trajectory by time": {
        "model": {"modulation": n.TIME, "loop": {"update": "replace"}},
        "depth": {"sampler": "independent_uniform"},
        "objective": {"trajectory": {"short_weight": 0.5, "consistency_weight": 0.3}},
    },
    "loop differences": {"model": {"loop_lora": {"rank": 2, "sets_by_loop": [0, 1]}}},
    "ngpt": {"model": {**n.NGPT, "loop": {"unit_norm": True}}},
    "one loop": {
        "model": {"max_loops": 1, "num_loops": 1},
        "depth": {"sampler": "fixed", "fixed_loops": 1, "num_depth_slices": None},
    },
}
"""Runs beside one of each sampler: changes of RECIPE."""
DISTILLED: dict[str, dict[str, Any]] = {
    "distilled all": {"objective": {"distill": {"weight": 0.5, "rows": "all"}}},
    "distilled one_loop": {"objective": {"distill": {"weight": 0.5, "rows": "one_loop"}}},
    "distilled one_loop, depths by slice": {
        "depth": {"sampler": "independent_uniform"},
        "objective": {"distill": {"weight": 0.5, "rows": "one_loop"}},
    },
    "distilled from another": {
        "objective": {"distill": {"weight": 0.5, "teacher": "s-fixed", "teacher_loops": 2}}
    },
}
"""Runs that start from a trained model, which is the teacher where none is named."""
RECIPE: dict[str, Any] = {
    "name": "run",
    "model": n.BASE | {"vocab_size": 32, "split": [2, 2, 2]},
    "data": {"task": "pointer_program", "context": 16},
    "depth": {"num_depth_slices": 4},
    "optim": {"lr": 4e-3},
    "train": {
        "steps": 12, "batch_size": 8, "micro_batch_size": 4, "val_every": 6, "val_rows": 4,
        "checkpoint_every": 6, "precision": "fp32", "seed": 3,
    },
}  # fmt: skip
NOT_NUMERIC = {"step", "tokens", "train/tok_per_sec"}


def train(root: Path) -> Iterator[tuple[str, Callable[[], Entries]]]:
    """Twelve steps with each sampler, objective and optimizer; and a sweep of a trained model."""
    for sampler, depth in SAMPLERS.items():
        changes = {"depth": {"sampler": sampler} | depth}
        yield f"sampler {sampler}", partial(trained, root / f"s-{sampler}", changes)
    for name, changes in RUNS.items():
        yield name, partial(trained, root / n.file_name(name), changes)
    for name, changes in DISTILLED.items():
        yield name, partial(distilled, root, name, changes)
    yield "text", partial(swept, root)
    yield "resumed text", partial(resumed, root)
    yield "chains from the text model", partial(chains, root)


def distilled(root: Path, name: str, changes: dict[str, Any]) -> Entries:
    """A run that starts from the model of the override sampler."""
    recipe = {key: value for key, value in RECIPE.items() if key != "model"}
    start = str(newest_model(root / "s-override"))
    changes = n.merged(changes, {"train": {"init": start, "seed": 4}})
    teacher = changes["objective"]["distill"].get("teacher")
    if teacher is not None:
        folder = str(newest_model(root / teacher))
        changes = n.merged(changes, {"objective": {"distill": {"teacher": folder}}})
    return trained(root / n.file_name(name), changes, recipe=recipe)


def swept(root: Path) -> Entries:
    """A run on packed documents, and its loss at every loop count."""
    run = text_run(root, {"vocab_size": 300, "max_context": 48}, name="text")
    sweep = n.depthdial.sweep(run, TEXTS[:3], context=16, stride=8).to_dict()
    return run_entries(run) | {"sweep": {key: sweep[key] for key in ("loops", "nll_KN")}}


def resumed(root: Path) -> Entries:
    """The run on text once more from its first checkpoint on, which leaves out the last one."""
    folder = root / "resumed"
    shutil.copytree(root / "text-runs" / "text", folder)
    shutil.rmtree(newest_model(folder))
    n.depthdial.resume(folder)
    return run_entries(folder)


def chains(root: Path) -> Entries:
    """Short paths beside long ones on chains, from the model that was trained on text."""
    recipe = {key: value for key, value in RECIPE.items() if key != "model"}
    recipe["data"] = {
        "task": "pointer_chain", "num_chains": 2, "chain_length": 3, "context": 42,
    }  # fmt: skip
    changes = {
        "train": {"init": str(newest_model(root / "text-runs"))},
        "objective": {"trajectory": {}},
        "depth": {"sampler": "independent_uniform"},
    }
    return trained(root / "chains", changes, recipe=recipe)


def trained(folder: Path, changes: dict[str, Any], *, recipe: dict[str, Any] = RECIPE) -> Entries:
    """What a run leaves behind."""
    values = n.merged(recipe, n.known(changes))
    result = n.depthdial.train(n.Recipe.from_dict(values), root=folder)
    return run_entries(Path(result.path))


def text_run(root: Path, model: dict[str, Any], *, name: str) -> Path:
    """The folder of a run on packed documents."""
    data, texts = root / f"{name}-data", root / f"{name}-texts"
    texts.mkdir(exist_ok=True)
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text, encoding="utf-8")
    n.command("prepare", texts, "--out", data, "--vocab-size", "300", "--valid-frac", "0.3")
    changes = {"name": name, "model": model, "data": {"path": str(data), "task": None}}
    if model.get("max_loops", n.BASE["max_loops"]) == 1:
        # Slices of equal depth draw nothing.
        changes["depth"] = {"num_depth_slices": None}
    values = n.merged(RECIPE, n.known(changes))
    return Path(n.depthdial.train(n.Recipe.from_dict(values), root=root / f"{name}-runs").path)


def newest_model(folder: Path) -> Path:
    """The model directory of a run's last checkpoint, which its name numbers."""
    folders = [path.parent for path in folder.rglob("model.safetensors")]
    return max(folders, key=lambda path: int(path.name.rpartition("_")[2]))


def run_entries(run: Path) -> Entries:
    """Metrics of every step, weights and optimizer state at the end."""
    entries: Entries = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for key, value in n.json.loads(line).items():
            if key not in NOT_NUMERIC:
                entries.setdefault(key, []).append(value)
    folder = newest_model(run)
    entries["weights"] = joined(n.folder_tensors(folder))
    state = n.safetensors.torch.load_file(folder / "optimizer.safetensors")
    entries["optimizer"] = joined({name: t.float() for name, t in state.items()})
    return entries
