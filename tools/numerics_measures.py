"""Numbers of one model for `tools/numerics.py`, and how tensors are put together.

Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numerics_models as n
import torch
import torch.nn.functional as F
from torch import Tensor

Entries = dict[str, Any]
"""Name -> a tensor, or plain values that are kept whole."""
Section = Callable[[Path], Iterator[tuple[str, Callable[[], Entries]]]]
"""Cases by name, each to be run on its own; given is an empty folder."""
ROWS, LENGTH = 3, 8
MIXED_LOOPS = (1, 4, 2)


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


def first_state(model: Any, ids: Tensor) -> Tensor:
    """States that a call can start from, in the width of the core."""
    state = 0.3 * model.embedding(ids.flip(1))
    width = dict(model.config).get("core_d_model") or model.config.d_model
    return F.pad(state, (0, width - state.shape[-1]))


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
            ids, num_loops=2, initial_state_BTD=first_state(model, ids)
        )
        if "embed_dim" in dict(config.modulation or ()) and config.modulation.kind == "time_step":
            steps = torch.tensor([[0.5, 0.3, 0.2], [0.75, 0.25, 0.0], [1.0, 0.0, 0.0]])
            entries["logits, step sizes"] = model(ids, num_loops=3, step_sizes=steps[0])
            loops = torch.tensor([3, 2, 1])
            entries["logits, steps by row"] = model(ids, num_loops=loops, step_sizes=steps)
        entries["logits, cached"] = cached(model, ids)
    if has_gradients:
        entries |= gradients(model, ids)
        # Last: the weights are rounded by it.
        entries |= narrow(model.float(), ids)
    return entries


@torch.no_grad()
def narrow(model: Any, ids: Tensor) -> Entries:
    """Logits in float32, and in bfloat16 by autocast, of padded rows of several depths."""
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    real[1, 4:] = False
    loops = torch.tensor(MIXED_LOOPS)
    logits = model(ids, num_loops=loops, padding_mask_BT=real)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = model(ids, num_loops=loops, padding_mask_BT=real)
    return {"float32: logits": logits[real], "bfloat16: logits": short[real].float()}


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
    cut = loss_entries(
        "first loops cut off",
        model,
        ids,
        is_scored=real,
        run=lambda: n.truncated(model, ids, 3, torch.tensor([2, 0, 1])),
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


def plan_of(root: Path, folder: Path, *flags: str) -> list[str]:
    """The lines that `plan` prints of a folder, but for the one that says which."""
    lines = n.command("plan", folder, *flags).splitlines()
    return [line.rstrip() for line in lines if str(root) not in line]
