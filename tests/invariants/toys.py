"""The toy models of the invariants, and slow references of the cache rules."""

from __future__ import annotations

import torch
from torch import Tensor

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.model.context import build_context
from depthdial.model.looped_lm import LoopCarry, LoopedLM

VOCAB = 61
MAX_LOOPS = 4


def toy_config(**changes) -> ModelConfig:
    """Two attention layers in each block, grouped heads, partial rotary, re-injection."""
    config = ModelConfig(
        vocab_size=VOCAB, d_model=32, split=(4, 4, 4), num_heads=4, num_kv_heads=2, head_dim=12,
        d_ff=48, max_context=128, rotary_frac=0.5, qk_norm=True, num_loops=2, max_loops=MAX_LOOPS,
        loop=LoopConfig(reinject=True),
        modulation=ModulationConfig(d_cond=16, rank=4, embed_dim=16), init_std=0.15,
    )  # fmt: skip
    return config.replace(**changes) if changes else config


def toy_model(*, seed: int = 0, **changes) -> LoopedLM:
    """A toy whose every parameter is random, so that every path matters."""
    model = LoopedLM(toy_config(**changes), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("state_update", "modulation")):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise)
    return model.eval()


def toy_tokens(batch: int, length: int, *, seed: int = 7) -> Tensor:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


class ReferenceSlot:
    """Query by query attention over stored entries followed by the call's own, no mask."""

    def __init__(self, past: tuple[Tensor, Tensor] | None) -> None:
        self.past = past
        self.own: tuple[Tensor, Tensor] | None = None

    def attend(self, q_BTHC, k_BTGC, v_BTGC, *, mask, scale):
        self.own = (k_BTGC, v_BTGC)
        k, v = self.everything()
        offset = k.shape[1] - k_BTGC.shape[1]
        per_group = q_BTHC.shape[2] // k.shape[2]
        y = torch.zeros_like(q_BTHC)
        for t in range(q_BTHC.shape[1]):
            for head in range(q_BTHC.shape[2]):
                keys = k[0, : offset + t + 1, head // per_group]
                weights = (keys @ q_BTHC[0, t, head] * scale).softmax(dim=0)
                y[0, t, head] = weights @ v[0, : offset + t + 1, head // per_group]
        return y

    def everything(self) -> tuple[Tensor, Tensor]:
        """Stored entries and the call's own."""
        assert self.own is not None
        if self.past is None:
            return self.own
        return tuple(torch.cat(pair, dim=1) for pair in zip(self.past, self.own, strict=True))


class ReferenceDecoder:
    """One row, call by call, under a cache rule written out from its definition.

    `persist` says which loop's entries of a call outlive it: `own` (each loop keeps its own,
    per_loop) or `last` (the last loop's serve every loop later).
    """

    def __init__(self, model: LoopedLM, num_loops: int) -> None:
        self.model, self.num_loops = model, num_loops
        self.stored: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self.length = 0

    def call(self, tokens: Tensor, *, persist: str) -> Tensor:
        """Logits [1, T, V] of the next tokens."""
        model = self.model
        positions = self.length + torch.arange(tokens.shape[1])[None]
        ctx, _ = build_context(tokens, model.config, dtype=torch.float32, positions_BT=positions)
        prelude = self._slots("prelude", 0)
        h_in = model.prelude(model.embed(tokens), slots=prelude, ctx=ctx)
        state, core = h_in, {}
        for loop_idx in range(self.num_loops):
            core[loop_idx] = self._slots("core", loop_idx)
            mod = model.modulation.for_loop(loop_idx, self.num_loops)
            state, _ = model.loop(
                state, h_in, mod=mod, slots=core[loop_idx], carry=LoopCarry(), ctx=ctx
            )
        coda = self._slots("coda", 0)
        x = model.coda(state, mods=model.modulation.for_coda(self.num_loops), slots=coda, ctx=ctx)
        self._store("prelude", 0, prelude)
        self._store("coda", 0, coda)
        for loop_idx, slots in core.items():
            kept = slots if persist == "own" else core[self.num_loops - 1]
            past = self._slots("core", loop_idx)
            for slot_idx, slot in enumerate(kept):
                past[slot_idx].own = slot.own
                self.stored["core", loop_idx, slot_idx] = past[slot_idx].everything()
        self.length += tokens.shape[1]
        return model.head(x)

    def end_prompt(self) -> None:
        """collapse_last: the last loop's entries of the prompt serve every loop."""
        for slot_idx in range(2):
            last = self.stored["core", self.num_loops - 1, slot_idx]
            for loop_idx in range(self.num_loops):
                self.stored["core", loop_idx, slot_idx] = last

    def _slots(self, block: str, loop_idx: int) -> tuple[ReferenceSlot, ...]:
        return tuple(ReferenceSlot(self.stored.get((block, loop_idx, i))) for i in range(2))

    def _store(self, block: str, loop_idx: int, slots) -> None:
        for i, slot in enumerate(slots):
            self.stored[block, loop_idx, i] = slot.everything()
