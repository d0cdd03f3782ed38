"""The sections of the record: what is run, and which numbers are kept of it.

Everything is in float64 except training, stored weights, and what says otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numerics_models as n
import torch
from numerics_measures import (
    LENGTH,
    ROWS,
    Entries,
    Section,
    by_part,
    joined,
    measured,
    plan_of,
    tokens,
)
from numerics_training import RECIPE, SAMPLERS, text_run, train
from torch import Tensor

Cases = Iterator[tuple[str, Callable[[], Entries]]]


def golden(root: Path) -> Cases:
    """Every golden checkpoint, imported."""

    def imported(case: str, config_file: str) -> Entries:
        folder = root / n.file_name(f"{case} {config_file}")
        source, model = folder / "source", folder / "model"
        source.mkdir(parents=True)
        shutil.copyfile(n.GOLDEN / case / config_file, source / "config.json")
        shutil.copyfile(n.GOLDEN / case / "model.safetensors", source / "model.safetensors")
        n.command("import", source, model)
        entries = by_part(n.folder_tensors(model), "weights of")
        return entries | measured(n.folder_model(model)) | {"plan": plan_of(root, model)}

    for case, config_file in n.golden_configs():
        name = case if config_file == "config.json" else f"{case} {config_file}"
        yield name, partial(imported, case, config_file)


def tiny(root: Path) -> Cases:
    """Every mechanism in a tiny model, and the presets' tiny forms."""

    def one(name: str) -> Entries:
        model = n.new_model(n.tiny_values(name))
        initial = joined(model.state_dict())
        folder = n.save_folder(n.set_weights(model), root / n.file_name(name))
        plan_lines = {"plan": plan_of(root, folder)}
        return {"initial weights": initial} | measured(model) | plan_lines

    for name in n.tiny_names():
        yield name, partial(one, name)


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
    ("decay-gate", "sliding", {"core": "2:4"}),
    ("decay-gate-ungated-first", "dense with extras", {}),
    *(
        ("elr-graft", "dense", {"start": start, "d_cond": 6, "rank": 3})
        for start in ("ungated_first", "beta_one", "plain")
    ),
    ("later-deltas", "dense with extras", {"rank": 2, "max_loops": 3}),
    ("later-deltas", "dense", {"rank": 2, "norms": "tied", "rate": 0.3}),
    ("joint-deltas", "dense", {"rank": 2, "norms": "tied"}),
    ("joint-deltas", "dense with extras", {"rank": 3, "rate": 0.2}),
    ("elastic-fixed", "fixed loops", {}),
    ("elastic-fixed", "fixed loops", {"d_cond": 6, "rank": 3}),
    ("elastic-fixed", "fixed loops", {"conditioning": "modulation", "rank": 2, "d_cond": 4}),
    ("elastic-fixed", "fixed loops, ngpt", {"max_loops": 4, "rank": 2}),
    ("elastic-fixed", "fixed loops", {"conditioning": "loop_lora", "rank": 2}),
]
"""(method, base, options)."""


def convert(root: Path) -> Cases:
    """Every method, on bases that loop and bases that do not."""
    for base, changes in BASES.items():
        model = n.set_weights(n.new_model(n.merged(n.BASE, changes)))
        n.save_folder(model, root / n.file_name(base))
    folders: dict[str, Path] = {}
    for method, base, options in CONVERSIONS:
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        name = f"{method} of {base}" + (f": {shown}" if shown else "")
        given = ({"core": "1:5"} if n.METHODS[method].takes_core else {}) | options
        folders[name] = root / n.file_name(name)
        yield name, partial(converted, root / n.file_name(base), folders[name], method, given)
    joint = [folder for name, folder in folders.items() if name.startswith("joint-deltas")]
    for number, folder in enumerate(joint, start=1):
        name = "merge-first-pass of joint-deltas" + (f" {number}" if number > 1 else "")
        yield name, partial(converted, folder, root / f"merged-{number}", "merge-first-pass", {})
    yield "core proposed from text", partial(proposed, root, {})
    yield "core of four layers proposed from text", partial(proposed, root, {"core_layers": 4})


def proposed(root: Path, options: dict[str, Any]) -> Entries:
    """A conversion whose core is found on text."""
    run = root / "dense-runs" / "dense"
    if not run.is_dir():
        text_run(root, DENSE | {"vocab_size": 300}, name="dense")
    folder = root / f"proposed-{len(options)}"
    entries = converted(run, folder, "elr-graft", {"d_cond": 6, "rank": 3} | options)
    return entries | {"core": n.read_json(folder / "core_choice.json")}


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


# ---- caches, exits, plans

CACHED: dict[str, Any] = {
    "split": [2, 4, 2], "modulation": n.ELR, "qk_norm": "rms", "loop": {"injection": "add"},
}  # fmt: skip
PROMPT_LENGTHS = (3, 9, 6)
OTHER_MODELS = ("segments", "update anchored", "layout SFAF", "value_embeddings", "lora norms")
"""Tiny models that generate under policies of several kinds."""
OTHER_POLICIES = ("collapse_mean", "last_step", "share_first", "stash_last", "huginn:skip")


def cache(root: Path) -> Cases:
    """Ids and logits under every cache policy."""
    model = n.set_weights(n.new_model(n.merged(n.BASE, CACHED)))
    for policy in n.policy_names():
        yield policy, partial(policy_entries, model, policy)
    for name in OTHER_MODELS:
        yield f"{name}, several policies", partial(other_model, name)
    yield "time_step, step sizes", timed


def ids_of(model: Any, **options: Any) -> list[list[int]]:
    """New ids of prompts of several lengths; each row may stop on its own."""
    prompts = [
        tokens(model.config.vocab_size, x, key=f"prompt {x}").tolist() for x in PROMPT_LENGTHS
    ]
    rows = n.generate(model, prompts, max_new_tokens=8, stop_ids=[7], **options)
    return [row.token_ids for row in rows]


def policy_entries(model: Any, policy: str) -> Entries:
    """What one policy gives for prompts, and in single calls."""
    ids = partial(ids_of, model, cache_policy=policy)
    sampling = n.Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=3)
    entries: Entries = {
        "ids": ids(num_loops=3),
        "ids, mixed loops": ids(num_loops=[2, 4, 1]),
        "ids, prompt in chunks": ids(num_loops=3, prefill_chunk=4),
        "ids, one loop": ids(num_loops=1),
        "ids, sampled": ids(num_loops=3, sampling=sampling),
        "ids, sampled by min_p": ids(num_loops=3, sampling=n.Sampling(temperature=1.0, min_p=0.05)),
    }
    with torch.no_grad():
        for what, is_varied in (("", False), (", loops vary", True)):
            entries |= walked(model, policy, what, is_varied=is_varied)
        entries["documents"] = with_documents(model, policy)
    return entries


def other_model(name: str) -> Entries:
    """Greedy ids of another kind of model, or that a policy does not go with it."""
    model = n.tiny_model(name)
    entries: Entries = {}
    for policy in OTHER_POLICIES:
        try:
            entries[policy] = ids_of(model, cache_policy=policy, num_loops=[2, 4, 3])
        except ValueError:
            entries[policy] = "refused"
    return entries


def timed() -> Entries:
    """Greedy ids of a model that is told its step sizes."""
    steps = torch.tensor([0.5, 0.3, 0.2])
    return {"ids": ids_of(n.tiny_model("time_step"), num_loops=3, step_sizes=steps)}


def with_documents(model: Any, policy: str) -> Tensor:
    """Logits of packed documents in a prompt, and of the next token of the last one."""
    ids = tokens(model.config.vocab_size, ROWS, 7, key="documents")
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0] * 7, [0, 1, 1, 2, 2, 2, 2]])
    store = n.LoopCache(model.config, batch_size=ROWS, capacity=7, policy=policy)
    calls = []
    for first, last in ((0, 6), (6, 7)):
        if first:
            store.end_prompt()
        part = slice(first, last)
        calls.append(
            model(ids[:, part], num_loops=3, cache=store, document_ids_BT=documents[:, part])
        )
    return torch.cat(calls, dim=1)


def walked(model: Any, policy: str, what: str, *, is_varied: bool) -> Entries:
    """A padded prompt in two calls, single tokens, and what a cache can be asked to do."""
    config = model.config
    store = n.LoopCache(config, batch_size=ROWS, capacity=20, policy=policy)
    calls: list[Tensor] = []
    entries: Entries = {}

    def call(real: list[list[int]], **more: Any) -> None:
        is_token_BT = torch.tensor(real, dtype=torch.bool)
        shift = len(calls) if is_varied else 0
        loops = torch.tensor([(k - 1 + shift) % 4 + 1 for k in (3, 2, 4)])
        ids = tokens(config.vocab_size, *is_token_BT.shape, key=f"call {len(calls)}")
        logits = model(ids, num_loops=loops, cache=store, padding_mask_BT=is_token_BT, **more)
        calls.append(logits[is_token_BT])

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


def exits(root: Path) -> Cases:
    """Depths, measures and ids of every stopping rule, at thresholds that stop some rows early."""
    for config in ("exit_gate linear", "exit_gate norm_linear"):
        for name in n.STOPPING_RULES:
            for kind in ("default", "middle"):
                yield f"{config}, {name}, {kind}", partial(stopped, config, name, kind)


def stopped(config: str, name: str, kind: str) -> Entries:
    """One rule on one model, at its default threshold or in the middle of what it measures."""
    model = n.tiny_model(config)
    ids = tokens(model.config.vocab_size, 5, LENGTH, key="exits")
    default = n.STOPPING_RULES[name].default_threshold
    threshold = 0.5 if default is None else default
    if kind == "middle":
        patient = n.stopping_rule(name, threshold, min_loops=8)
        threshold = float(n.until(model, ids, patient, 8)[2].nanmedian())
    try:
        rule = n.stopping_rule(name, threshold)
    except ValueError:
        return {"refused": threshold}
    logits, loops_B, values_BL = n.until(model, ids, rule, 8)
    entries: Entries = {
        "logits": logits,
        "loops": loops_B.tolist(),
        "measures": values_BL.nan_to_num(-1.0),
    }
    prompts = [row[: 3 + i].tolist() for i, row in enumerate(ids)]
    for policy in ("per_loop", "last_step", "huginn:latest-m2"):
        rows = n.generate(
            model, prompts, num_loops=4, max_new_tokens=6, stop_rule=rule, cache_policy=policy
        )
        entries[f"ids {policy}"] = [row.token_ids for row in rows]
        entries[f"mean loops {policy}"] = [row.mean_loops for row in rows]
    return entries


def plan(root: Path) -> Cases:
    """Tables of every preset and of every recipe that has a model of its own."""
    for name in (*n.preset_names(), *n.recipe_names()):
        yield name, partial(planned, name)
    for sampler, depth in SAMPLERS.items():
        yield f"sampler {sampler}", partial(planned_draws, root, {"sampler": sampler} | depth)


def planned(name: str) -> Entries:
    """What `plan` prints."""
    try:
        entries = {"plan": n.command("plan", name).splitlines()}
    except RuntimeError as error:
        if "has no model of its own" not in str(error):
            raise
        return {"refused": True}
    flags = ["--num-loops", "1", "3", "7", "--context", "333", "--batch", "2"]
    if name in n.preset_names():
        flags += ["--override-frac", "0.3", "--switch-frac", "0.25", "--dtype", "fp32"]
    return entries | {"plan, flags": n.command("plan", name, *flags).splitlines()}


def planned_draws(root: Path, depth: dict[str, Any]) -> Entries:
    """What training costs with one sampler."""
    path = root / f"{depth['sampler']}.json"
    recipe = RECIPE | {"depth": RECIPE["depth"] | depth | {"switch_frac": 0.25}}
    path.write_text(n.json.dumps(recipe), encoding="utf-8")
    return {"plan": plan_of(root, path)[-3:]}


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
