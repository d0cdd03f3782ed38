"""The sections of the record: what is run, and which numbers are kept of it.

A section gives (case, entries) one by one; an entry is a tensor, or plain values that are kept
whole. Everything is in float64 except training and stored weights, which are in float32.
Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numerics_models as n
import torch
import torch.nn.functional as F
from torch import Tensor

Entries = dict[str, Any]
Section = Callable[[Path], Iterator[tuple[str, Entries]]]
ROWS, LENGTH = 3, 8
MIXED_LOOPS = (1, 4, 2)
TEXTS = [f"Chapter {i}. The ship sailed {i} days past the island of birds. " * 8 for i in range(9)]


def tokens(vocab_size: int, *shape: int, key: str = "tokens") -> Tensor:
    """Ids, the same on every machine."""
    size = int(torch.tensor(shape).prod())
    ids = ((n.uniform(key, size) / 12**0.5 + 0.5) * vocab_size).long()
    return ids.clamp(max=vocab_size - 1).reshape(shape)


def joined(tensors: Mapping[str, Tensor | None]) -> Tensor:
    """All numbers in the order of the present names; an absent gradient counts as zeros of none."""
    named = sorted((n.canonical(name), t) for name, t in tensors.items() if t is not None)
    return torch.cat([t.detach().reshape(-1) for _, t in named])


def by_part(tensors: Mapping[str, Tensor | None], what: str) -> Entries:
    """One entry for each part of the model."""
    parts: dict[str, dict[str, Tensor | None]] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            parts.setdefault(n.canonical(name).partition(".")[0], {})[name] = tensor
    return {f"{what} {part}": joined(group) for part, group in sorted(parts.items())}


# ---- one model, without a cache and with its own


def measured(model: Any, *, has_gradients: bool = True) -> Entries:
    """Logits, states, losses and gradients of a model in float64."""
    config = model.config
    ids = tokens(config.vocab_size, ROWS, LENGTH)
    entries: Entries = {}
    with torch.no_grad():
        deepest = max(config.max_loops, 3)
        for k in sorted({1, 2, config.num_loops, deepest, deepest + 1}):
            states: list[Tensor] = []

            def keep(*seen: Any, states: list[Tensor] = states) -> None:
                states.append(seen[1])

            entries[f"logits k={k}"] = model(ids, num_loops=k, on_loop=keep)
            if k == deepest:
                entries[f"states k={k}"] = torch.stack(states)
                if model.exit_gate is not None:
                    gates = [model.exit_gate(state) for state in states]
                    entries[f"exit gate k={k}"] = torch.stack(gates)
        entries["logits, other positions"] = model(
            ids, num_loops=2, positions_BT=torch.arange(LENGTH)[None].expand(ROWS, -1) + 5
        )
        entries["logits, given state"] = model(
            ids, num_loops=2, initial_state_BTD=0.3 * model.embedding(ids.flip(1))
        )
        if "embed_dim" in dict(config.modulation or ()) and config.modulation.kind == "time_step":
            steps = torch.tensor([[0.5, 0.3, 0.2], [0.75, 0.25, 0.0], [1.0, 0.0, 0.0]])
            entries["logits, step sizes"] = model(ids, num_loops=3, step_sizes=steps[0])
            loops = torch.tensor([3, 2, 1])
            entries["logits, steps by row"] = model(ids, num_loops=loops, step_sizes=steps)
        entries["logits, cached"] = cached(model, ids)
    return entries | (gradients(model, ids) if has_gradients else {})


def cached(model: Any, ids: Tensor) -> Tensor:
    """Logits [B, T, V] of a prompt in two calls and its last tokens one by one."""
    cache = n.LoopCache(model.config, batch_size=ROWS, capacity=LENGTH)
    calls = []
    for first, last in ((0, 3), (3, 5), (5, 6), (6, 7), (7, 8)):
        if first == 5:
            cache.end_prompt()
        calls.append(model(ids[:, first:last], num_loops=2, cache=cache))
    return torch.cat(calls, dim=1)


def gradients(model: Any, ids: Tensor) -> Entries:
    """Losses and gradients of padded rows of several depths, of packed documents, and of a loss
    whose first loops have no gradient."""
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    real[0, :2] = False
    real[2, 5:] = False
    document_ids = torch.tensor([[0] * 3 + [1] * 5, [0] * 8, [0] * 1 + [1] * 4 + [2] * 3])
    packed = torch.ones_like(real)
    packed[:, 1:] = document_ids[:, 1:] == document_ids[:, :-1]
    loops = torch.tensor(MIXED_LOOPS)
    entries = loss_entries(
        "padded, mixed loops",
        model,
        ids,
        is_scored=real,
        run=lambda: model(ids, num_loops=loops, padding_mask_BT=real),
    )
    entries |= loss_entries(
        "packed",
        model,
        ids,
        is_scored=packed,
        run=lambda: model(ids, num_loops=3, document_ids_BT=document_ids),
    )
    if model.config.segments:
        return entries
    hidden = n.hidden_states(model)
    cut = loss_entries(
        "first loops cut off",
        model,
        ids,
        is_scored=real,
        run=lambda: model.head(hidden(ids, num_loops=3, no_grad_loops=torch.tensor([2, 0, 1]))),
    )
    return entries | {name: value for name, value in cut.items() if "logits" not in name}


def loss_entries(
    what: str, model: Any, ids: Tensor, *, is_scored: Tensor, run: Callable[[], Tensor]
) -> Entries:
    """Logits, mean loss and gradients by part."""
    model.zero_grad(set_to_none=True)
    logits = run()
    scored = is_scored[:, 1:] & is_scored[:, :-1]
    loss = F.cross_entropy(logits[:, :-1][scored], ids[:, 1:][scored])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    entries = {f"{what}: logits": logits.detach()[is_scored], f"{what}: loss": loss.item()}
    return entries | by_part(grads, f"{what}: gradient of")


def golden(root: Path) -> Iterator[tuple[str, Entries]]:
    """Every golden checkpoint, imported."""
    for case, config_file in n.golden_configs():
        name = case if config_file == "config.json" else f"{case} {config_file}"
        source, model = root / n.file_name(name), root / "models" / n.file_name(name)
        source.mkdir()
        shutil.copyfile(n.GOLDEN / case / config_file, source / "config.json")
        shutil.copyfile(n.GOLDEN / case / "model.safetensors", source / "model.safetensors")
        n.command("import", source, model)
        entries = by_part(n.folder_tensors(model), "weights of")
        yield name, entries | measured(n.folder_model(model)) | {"plan": plan_of(root, model)}


def tiny(root: Path) -> Iterator[tuple[str, Entries]]:
    """Every mechanism in a tiny model, and the presets' tiny forms."""
    for name in n.tiny_names():
        model = n.new_model(n.tiny_values(name))
        initial = joined(model.state_dict())
        entries = {"initial weights": initial} | measured(n.set_weights(model))
        folder = n.save_folder(model, root / n.file_name(name))
        yield name, entries | {"plan": plan_of(root, folder)}


# ---- conversions

DENSE = {"split": [0, 12, 0], "max_loops": 1, "num_loops": 1, "loop": {"update": "replace"}}
BASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "dense with extras": DENSE
    | {"qk_norm": "rms", "attention_bias": "qkv", "tie_embeddings": True, "norm": "sandwich"},
    "sliding": DENSE | {"layout": "SFAF", "sliding": {"window": 3}, "value_embeddings": [0, 3]},
    "fixed loops": {"loop": {"update": "replace"}, "num_loops": 3, "max_loops": 3},
    "fixed loops, ngpt": {**n.NGPT, "num_loops": 3, "max_loops": 3, "loop": {"update": "replace"}},
}
CONVERSIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("loop-window", "dense", {}),
    ("loop-window", "sliding", {"cache_policy": "last_step", "core": "2:4"}),
    ("damped", "dense", {}),
    ("anchored", "dense with extras", {"anchor": 0.3, "cache_policy": "per_loop"}),
    *(("tie-layers", "dense", {"selection": s}) for s in ("stepwise", "average", "lower")),
    ("tie-layers", "dense with extras", {"order": "sequence", "core": "0:6", "num_loops": 3}),
    ("relaxed-recursive", "dense", {"rank": 2}),
    ("relaxed-recursive", "dense", {"rank": "full", "selection": "stepwise"}),
    ("relaxed-recursive", "dense with extras", {"rank": 3, "norms": "tied", "selection": "lower"}),
    ("relaxed-recursive", "dense with extras", {"rank": "full", "order": "sequence"}),
    ("retrofitted-recurrence", "dense", {}),
    ("retrofitted-recurrence", "dense", {"initial_state": "random", "prelude": 0, "coda": 1}),
    ("retrofitted-recurrence", "dense with extras", {"initial_state": "zero"}),
    ("decay-gate", "dense", {"gate_rank": 2}),
    ("decay-gate-ungated-first", "dense with extras", {}),
    *(
        ("elr-graft", "dense", {"start": start, "d_cond": 6, "rank": 3})
        for start in ("ungated_first", "beta_one", "plain")
    ),
    ("later-deltas", "dense with extras", {"rank": 2, "max_loops": 3}),
    ("joint-deltas", "dense", {"rank": 2, "norms": "tied"}),
    ("elastic-fixed", "fixed loops", {"d_cond": 6, "rank": 3}),
    ("elastic-fixed", "fixed loops, ngpt", {"max_loops": 4, "rank": 2}),
    ("elastic-fixed", "fixed loops", {"conditioning": "loop_lora", "rank": 2}),
]
"""(method, base, options)."""


def convert(root: Path) -> Iterator[tuple[str, Entries]]:
    """Every method, on bases that loop and bases that do not."""
    for base, changes in BASES.items():
        model = n.set_weights(n.new_model(n.merged(n.BASE, changes)))
        n.save_folder(model, root / n.file_name(base))
    for number, (method, base, options) in enumerate(CONVERSIONS):
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        name = f"{method} of {base}" + (f": {shown}" if shown else "")
        is_window = n.METHODS[method].takes_window
        given = ({"core": "1:5"} if is_window else {}) | options
        yield name, converted(root / n.file_name(base), root / f"{number}", method, given)
    pairs = [i for i, (method, _, _) in enumerate(CONVERSIONS) if method == "joint-deltas"]
    name = "merge-first-pass of joint-deltas"
    yield name, converted(root / f"{pairs[0]}", root / "merged", "merge-first-pass", {})
    run = text_run(root, {"split": [0, 8, 0], **DENSE, "vocab_size": 300}, name="dense")
    entries = converted(run, root / "proposed", "elr-graft", {"d_cond": 6, "rank": 3})
    yield "core proposed from text", entries | {"core": n.read_json(root / "proposed/window.json")}


def converted(base: Path, folder: Path, method: str, options: dict[str, Any]) -> Entries:
    """Weights and outputs of one conversion by the command."""
    flags = [
        text
        for key, value in options.items()
        for text in (f"--{key.replace('_', '-')}", str(n.known(value)))
    ]
    n.command("convert", base, folder, "--method", method, *flags)
    entries = by_part(n.folder_tensors(folder), "weights of")
    return entries | measured(n.folder_model(folder), has_gradients=False)


# ---- training

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
    "one loop": {"model": {"max_loops": 1, "num_loops": 1}, "depth": {"sampler": "sync_uniform"}},
}
"""Runs beside one of each sampler: changes of RECIPE."""
DISTILLED: dict[str, dict[str, Any]] = {
    "distilled all": {"objective": {"distill": {"weight": 0.5, "rows": "all"}}},
    "distilled one_loop": {"objective": {"distill": {"weight": 0.5, "rows": "one_loop"}}},
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
        "checkpoint_every": 12, "precision": "fp32", "seed": 3,
    },
}  # fmt: skip
NOT_NUMERIC = {"step", "tokens", "train/tok_per_sec"}


def train(root: Path) -> Iterator[tuple[str, Entries]]:
    """Twelve steps with each sampler, objective and optimizer; and a sweep of a trained model."""
    for sampler, depth in SAMPLERS.items():
        yield (
            f"sampler {sampler}",
            trained(root / f"s-{sampler}", {"depth": {"sampler": sampler} | depth}),
        )
    for name, changes in RUNS.items():
        yield name, trained(root / n.file_name(name), changes)
    start = newest_model(root / "s-override")
    without_model = {key: value for key, value in RECIPE.items() if key != "model"}
    for name, changes in DISTILLED.items():
        changes = n.merged(changes, {"train": {"init": str(start), "seed": 4}})
        teacher = changes["objective"]["distill"].get("teacher")
        if teacher is not None:
            folder = str(newest_model(root / teacher))
            changes = n.merged(changes, {"objective": {"distill": {"teacher": folder}}})
        yield name, trained(root / n.file_name(name), changes, recipe=without_model)
    run = text_run(root, {"vocab_size": 300}, name="text")
    swept = n.depthdial.sweep(run, TEXTS[:3], context=16, stride=8).to_dict()
    yield "text", run_entries(run) | {"sweep": {key: swept[key] for key in ("loops", "nll_KN")}}


def trained(folder: Path, changes: dict[str, Any], *, recipe: dict[str, Any] = RECIPE) -> Entries:
    """What a run leaves behind."""
    values = n.merged(recipe, n.known(changes))
    result = n.depthdial.train(n.Recipe.from_dict(values), root=folder)
    return run_entries(Path(result.path))


def text_run(root: Path, model: dict[str, Any], *, name: str) -> Path:
    """The folder of a run on packed documents."""
    data, texts = root / f"{name}-data", root / f"{name}-texts"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text, encoding="utf-8")
    n.command("prepare", texts, "--out", data, "--vocab-size", "300", "--valid-frac", "0.3")
    changes = {"name": name, "model": model, "data": {"path": str(data), "task": None}}
    values = n.merged(RECIPE, n.known(changes))
    return Path(n.depthdial.train(n.Recipe.from_dict(values), root=root / f"{name}-runs").path)


def newest_model(folder: Path) -> Path:
    """The model directory of a run's last checkpoint."""
    return max(folder.rglob("model.safetensors")).parent


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


# ---- caches, exits, plans

CACHED: dict[str, Any] = {
    "split": [2, 4, 2], "modulation": n.ELR, "qk_norm": "rms", "loop": {"injection": "add"},
}  # fmt: skip
PROMPT_LENGTHS = (3, 9, 6)


def cache(root: Path) -> Iterator[tuple[str, Entries]]:
    """Greedy ids and logits under every cache policy."""
    model = n.set_weights(n.new_model(n.merged(n.BASE, CACHED)))
    vocab_size = model.config.vocab_size
    prompts = [tokens(vocab_size, x, key=f"prompt {x}").tolist() for x in PROMPT_LENGTHS]
    for policy in n.policy_names():
        entries: Entries = {}
        for what, options in (
            ("ids", {"num_loops": 3}),
            ("ids, mixed loops", {"num_loops": [2, 4, 1]}),
            ("ids, prompt in chunks", {"num_loops": 3, "prefill_chunk": 4}),
            ("ids, one loop", {"num_loops": 1}),
        ):
            done = n.generate(
                model, prompts, max_new_tokens=8, stop_ids=[7], cache_policy=policy, **options
            )
            entries[what] = [row.token_ids for row in done]
        with torch.no_grad():
            for what, is_varied in (("", False), (", loops vary", True)):
                entries |= walked(model, policy, what, is_varied=is_varied)
        yield policy, entries


def walked(model: Any, policy: str, what: str, *, is_varied: bool) -> Entries:
    """A padded prompt in two calls, single tokens, and what a cache can be asked to do."""
    config = model.config
    store = n.LoopCache(config, batch_size=ROWS, capacity=20, policy=policy)
    calls: list[Tensor] = []
    entries: Entries = {}

    def call(real: list[list[int]], **more: Any) -> None:
        real_BT = torch.tensor(real, dtype=torch.bool)
        shift = len(calls) if is_varied else 0
        loops = torch.tensor([(k - 1 + shift) % 4 + 1 for k in (3, 2, 4)])
        ids = tokens(config.vocab_size, *real_BT.shape, key=f"call {len(calls)}")
        logits = model(ids, num_loops=loops, cache=store, padding_mask_BT=real_BT, **more)
        calls.append(logits[real_BT])

    def close(name: str, first: int) -> None:
        entries[f"{name}{what}"] = torch.cat(calls[first:])

    try:
        call([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
        call([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
        close("prompt", 0)
        store.end_prompt()
        call([[1], [1], [1]])
        call([[1], [0], [1]])
        close("decoded", 2)
        kept = store.snapshot()
        store.crop(store.lengths_B - torch.tensor([1, 0, 1]))
        call([[1], [1], [1]])
        close("after crop", 4)
        store.restore(kept)
        store.reorder(torch.tensor([2, 0, 0]))
        if not is_varied:
            store.bind_loops(torch.tensor([4, 3, 3]))
            raise_loops = torch.tensor([4, 3, 3])
            ids = tokens(config.vocab_size, ROWS, 1, key="reordered")
            calls.append(model(ids, num_loops=raise_loops, cache=store).flatten(0, 1))
        else:
            call([[1], [1], [1]])
        close("after restore and reorder", 5)
    except ValueError:
        entries[f"refused{what}"] = len(calls)
    entries[f"stored{what}"] = [store.num_slots(), store.num_bytes(), store.lengths_B.tolist()]
    return entries


def exits(root: Path) -> Iterator[tuple[str, Entries]]:
    """Depths, measures and ids of every stopping rule, at thresholds that stop some rows early."""
    for config in ("exit_gate linear", "exit_gate norm_linear"):
        model = n.tiny_model(config)
        ids = tokens(model.config.vocab_size, 5, LENGTH, key="exits")
        prompts = [row[: 3 + i].tolist() for i, row in enumerate(ids)]
        for name in n.STOPPING_RULES:
            start = n.STOPPING_RULES[name].default_threshold
            patient = n.stopping_rule(name, 0.5 if start is None else start, min_loops=8)
            values = n.run_until(model, ids, rule=patient, max_loops=8).values_BL
            middle = float(values.nanmedian())
            for threshold in sorted({0.5 if start is None else float(start), middle}):
                try:
                    rule = n.stopping_rule(name, threshold)
                except ValueError:
                    continue
                run = n.run_until(model, ids, rule=rule, max_loops=8)
                kinds = {
                    policy: n.generate(
                        model,
                        prompts,
                        num_loops=4,
                        max_new_tokens=6,
                        stop_rule=rule,
                        cache_policy=policy,
                    )
                    for policy in ("per_loop", "last_step", "huginn:latest-m2")
                }
                yield (
                    f"{config}, {name}, {'middle' if threshold == middle else 'default'}",
                    {
                        "logits": run.logits_BTV,
                        "loops": run.loops_B.tolist(),
                        "measures": run.values_BL.nan_to_num(-1.0),
                        **{f"ids {p}": [row.token_ids for row in x] for p, x in kinds.items()},
                        **{
                            f"mean loops {p}": [row.mean_loops for row in x]
                            for p, x in kinds.items()
                        },
                    },
                )


def plan_of(root: Path, folder: Path, *flags: str) -> list[str]:
    """The lines that `plan` prints of a folder, but for the one that says which."""
    lines = n.command("plan", folder, *flags).splitlines()
    return [line.rstrip() for line in lines if str(root) not in line]


def plan(root: Path) -> Iterator[tuple[str, Entries]]:
    """Tables of every preset and of every recipe that has a model of its own."""
    for name in (*n.preset_names(), *n.recipe_names()):
        try:
            entries = {"plan": n.command("plan", name).splitlines()}
        except RuntimeError as error:
            entries = {"refused": "has no model of its own" in str(error)}
            yield name, entries
            continue
        flags = ["--num-loops", "1", "3", "7", "--context", "333", "--batch", "2"]
        if name in n.preset_names():
            flags += ["--override-frac", "0.3", "--switch-frac", "0.25", "--dtype", "fp32"]
        entries["plan, flags"] = n.command("plan", name, *flags).splitlines()
        yield name, entries


SECTIONS: dict[str, Section] = {
    "golden": golden,
    "tiny": tiny,
    "convert": convert,
    "train": train,
    "cache": cache,
    "exits": exits,
    "plan": plan,
}
"""Name -> what is run; each is given an empty folder."""
