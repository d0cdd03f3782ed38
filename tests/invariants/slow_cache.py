"""Cache policies written out from their definitions: one row, one query, one token at a time.

Every entry of every loop of every token is kept for ever, and each rule says in a line which of
them a loop reads. Nothing here uses the caches of the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from depthdial.cache.uncached import LoopCarry
from depthdial.model.call import Call, build_context
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.update import initial_state

Entry = tuple[Tensor, Tensor]
"""Key and value of one token, [G, C] each."""


class SlowToken:
    """What one token wrote in one attention layer.

    Fields:
        by_loop: its entry of each loop it ran; stashed: that of the extra pass, if there was one.
    """

    def __init__(self) -> None:
        self.by_loop: list[Entry] = []
        self.stashed: Entry | None = None

    def mean(self) -> Entry:
        keys, values = zip(*self.by_loop, strict=True)
        return torch.stack(keys).mean(0), torch.stack(values).mean(0)

    def slots(self, slot_of) -> dict[int, Entry]:
        """Slots after its last loop, where loop j writes slot_of(j) and the last writer wins."""
        return {slot_of(j): entry for j, entry in enumerate(self.by_loop)}


def earlier_entries(
    policy: str,
    tokens: list[SlowToken],
    *,
    loop: int,
    num_loops: int,
    num_layers: int,
    is_prompt: bool,
) -> list[Entry | None]:
    """What loop `loop` of `num_loops` reads of earlier calls' tokens; None leaves a token out."""
    if policy == "per_loop" or (policy.startswith("collapse") and is_prompt):
        return [token.by_loop[loop] for token in tokens]
    if policy in ("last_step", "collapse_last"):
        return [token.by_loop[-1] for token in tokens]
    if policy in ("collapse_first", "share_first", "stash_first"):
        return [token.by_loop[0] for token in tokens]
    if policy == "collapse_mean":
        return [token.mean() for token in tokens]
    if policy == "stash_last":
        return [token.stashed for token in tokens]
    family, name = policy.split(":")
    if family == "parcae":
        return [parcae_entry(name, token, loop, num_loops) for token in tokens]
    if not any(len(token.by_loop) <= loop for token in tokens) and "compress" not in name:
        return [token.by_loop[loop] for token in tokens]
    if name == "skip":
        return [t.by_loop[loop] if loop < len(t.by_loop) else None for t in tokens]
    if name.startswith("always-last"):
        return [token.by_loop[-1] for token in tokens]
    if "compress" not in name:
        return [token.by_loop[min(loop, len(token.by_loop) - 1)] for token in tokens]
    entries: list[Entry | None] = []
    for token in tokens:
        slots = token.slots(lambda j: huginn_slot(name, j, num_layers))
        own = huginn_slot(name, loop, num_layers)
        entries.append(slots[max(s for s in slots if s <= own)])
    return entries


def huginn_slot(name: str, loop: int, num_layers: int) -> int:
    """Eight loops are anchors; the other compression counts layers."""
    if name.endswith("anchor"):
        return min(loop, 8)
    return loop % (int(name.split("compress-s")[1]) // num_layers)


def parcae_entry(name: str, token: SlowToken, loop: int, num_loops: int) -> Entry | None:
    """Under `last`, loops are counted from the last one of their own call."""
    kind, number = re.fullmatch(r"compress-([a-z]+)(\d+)", name).groups()
    n, ran = int(number), len(token.by_loop)
    if kind == "last":
        from_end = num_loops - loop
        if from_end <= n:
            return token.by_loop[ran - from_end] if from_end <= ran else None
        shared = token.by_loop[: max(ran - n, 0)]
        return shared[-1] if shared else None
    slot_of = {"s": lambda j: j % n, "stride": lambda j: j // n, "first": lambda j: min(j, n)}
    return token.slots(slot_of[kind]).get(slot_of[kind](loop))


class SlowSlot:
    """Query by query: entries of earlier tokens by the rule, then the call's own up to itself."""

    shared = None

    def __init__(self, earlier: list[Entry | None], call: list[SlowToken], mode: str) -> None:
        self.earlier = earlier
        self.call = call
        self.mode = mode
        self.is_read_only = mode == "read"

    def attend(self, q_BTHC, k_BTGC, v_BTGC, *, spec, scale):
        y = torch.zeros_like(q_BTHC)
        for t, token in enumerate(self.call):
            if self.mode == "write":
                token.by_loop.append((k_BTGC[0, t], v_BTGC[0, t]))
            elif self.mode == "stash":
                token.stashed = (k_BTGC[0, t], v_BTGC[0, t])
            own = [self._own(token) for token in self.call[: t + 1]]
            entries = [entry for entry in self.earlier + own if entry is not None]
            keys = torch.stack([k for k, _ in entries])
            values = torch.stack([v for _, v in entries])
            per_group = q_BTHC.shape[2] // keys.shape[1]
            for head in range(q_BTHC.shape[2]):
                group = head // per_group
                weights = (keys[:, group] @ q_BTHC[0, t, head] * scale).softmax(dim=0)
                y[0, t, head] = weights @ values[:, group]
        return y

    def _own(self, token: SlowToken) -> Entry:
        if self.mode == "stash":
            assert token.stashed is not None
            return token.stashed
        return token.by_loop[0] if self.mode == "read" else token.by_loop[-1]


class SlowDecoder:
    """One row, call by call, under one policy.

    Args: rule: what a loop reads of earlier calls' tokens in the core.
    """

    def __init__(self, model: LoopedLM, policy: str, *, rule: Callable = earlier_entries) -> None:
        self.model, self.policy, self.rule = model, policy, rule
        self.is_prompt = True
        self.length = 0
        self.stored: dict[tuple[str, int], list[SlowToken]] = {
            (block, i): [] for block, kinds in model.slot_kinds.items() for i in range(len(kinds))
        }

    def __call__(self, tokens_1T: Tensor, *, num_loops: int) -> Tensor:
        """Logits [1, T, V] of the next tokens."""
        model, count = self.model, tokens_1T.shape[1]
        positions = self.length + torch.arange(count)[None]
        given = Call(tokens_1T, num_loops=num_loops, positions_BT=positions)
        ctx, _ = build_context(given, model.config, dtype=torch.float32)
        call = {key: [SlowToken() for _ in range(count)] for key in self.stored}
        h_in = model.prelude(model.embed(tokens_1T), slots=self._slots("prelude", call), ctx=ctx)
        width = model.config.core_config.d_model
        state = initial_state(h_in, positions, model.config.loop, width=width)
        for loop in range(num_loops):
            mode = "read" if self.policy == "share_first" and loop else "write"
            slots = self._slots("core", call, loop=loop, num_loops=num_loops, mode=mode)
            mod = model.loop_modulation(loop, num_loops)
            state, _ = model.loop(state, h_in, mod=mod, slots=slots, carry=LoopCarry(), ctx=ctx)
        if self.policy == "stash_last":
            slots = self._slots("core", call, mode="stash")
            mod = model.loop_modulation(0, num_loops)
            model.loop(state, h_in, mod=mod, slots=slots, carry=LoopCarry(), ctx=ctx)
        mods = model.modulation.for_coda(num_loops)
        x = model.coda(state, mods=mods, slots=self._slots("coda", call), ctx=ctx)
        for key, tokens in call.items():
            self.stored[key] += tokens
        self.length += count
        return model.head(x)

    def end_prompt(self) -> None:
        """The collapsing rules hold from here on."""
        self.is_prompt = False

    def _slots(
        self, block: str, call, *, loop: int = 0, num_loops: int = 1, mode: str = "write"
    ) -> tuple[SlowSlot, ...]:
        count = len(self.model.slot_kinds[block])
        policy = self.policy if block == "core" else "per_loop"
        slots = []
        for i in range(count):
            rule = self.rule if block == "core" else earlier_entries
            earlier = rule(
                policy,
                self.stored[block, i],
                loop=loop,
                num_loops=num_loops,
                num_layers=count,
                is_prompt=self.is_prompt,
            )
            slots.append(SlowSlot(earlier, call[block, i], mode))
        return tuple(slots)
