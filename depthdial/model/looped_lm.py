"""LoopedLM: embed, prelude, loop, coda, head, and the one generator that runs the loops.

The model knows nothing of sampling, depth schedules, losses or exits: `num_loops` is an argument
of every forward, and observers read (or replace) the state between passes.
Letters: B batch, T query tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.config import ModelConfig, ModulationConfig
from depthdial.layers.primitives import RMSNorm, rms_normalise
from depthdial.layers.state import KVSlot, UncachedSlot
from depthdial.model.context import ForwardContext, build_context, compute_dtype
from depthdial.model.loop_cache import Block, CacheCall, LoopCache
from depthdial.model.modulation import (
    EntryModulation,
    LoopModulation,
    SublayerModulation,
    make_conditioning,
)
from depthdial.model.schedule import NumLoops, check_num_loops, visits
from depthdial.model.sublayer import Stack, num_slots
from depthdial.model.update import StateUpdate, initial_state, inject


class LoopCarry(NamedTuple):
    """Tensors that one pass hands to the next besides the state; this model needs none."""


class LoopPass(NamedTuple):
    """What `iterate` yields after each pass.

    rows: user-order indices of the rows in `state_BTD`, deepest first; None for the whole batch.
    num_leaving: rows at the end of `state_BTD` whose last pass this was.
    """

    loop_idx: int
    state_BTD: Tensor
    rows: Tensor | None
    num_leaving: int


LoopObserver = Callable[[int, Tensor, Tensor | None], Tensor | None]
"""(loop_idx, state_BTD, rows) -> None, or a replacement for the state."""


class LoopedLM(nn.Module):
    """Decoder-only language model whose core runs `num_loops` times.

    Args: config: see `ModelConfig`; seed: of the initial weights, keyed by parameter name.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.prelude_stack = Stack(config.prelude_layout, config)
        self.core_stack = Stack(config.core_layout, config)
        self.coda_stack = Stack(config.coda_layout, config)
        self.state_update = StateUpdate(config.d_model, config.loop)
        self.modulation = make_conditioning(config)
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        tied = config.tie_embeddings
        self.lm_head = None if tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.num_slots: dict[Block, int] = {
            "prelude": num_slots(config.prelude_layout),
            "core": num_slots(config.core_layout),
            "coda": num_slots(config.coda_layout),
        }
        init_weights(self, seed=seed)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        num_loops: NumLoops,
        cache: LoopCache | None = None,
        positions_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        initial_state_BTD: Tensor | None = None,
        on_loop: LoopObserver | None = None,
    ) -> Tensor:
        """Logits after `num_loops` passes of the core.

        Args:
            tokens_BT: token ids.
            num_loops: an int, or a CPU LongTensor [B] with one count per row.
            cache: keys and values of earlier calls; advanced by the call's real tokens.
            positions_BT: rotary positions; default: 0.. per document, padding not counted.
            padding_mask_BT: 1 at real tokens, 0 at padding, on any side; bool, int or float.
            document_ids_BT: tokens attend within equal ids only.
            initial_state_BTD: s_0; default the prelude output.
            on_loop: called after each pass; may return a replacement for the state.

        Returns: logits [B, T, V], rows in the order given.
        Raises: ValueError for a loop count, mask, or cache use that is not allowed.
        """
        x_BTD = self.trunk(
            tokens_BT,
            num_loops=num_loops,
            cache=cache,
            positions_BT=positions_BT,
            padding_mask_BT=padding_mask_BT,
            document_ids_BT=document_ids_BT,
            initial_state_BTD=initial_state_BTD,
            on_loop=on_loop,
        )
        return self.head(x_BTD)

    def trunk(
        self,
        tokens_BT: Tensor,
        *,
        num_loops: NumLoops,
        cache: LoopCache | None = None,
        positions_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        initial_state_BTD: Tensor | None = None,
        on_loop: LoopObserver | None = None,
    ) -> Tensor:
        """`forward` without the head: [B, T, D]. Advances the cache."""
        if tokens_BT.ndim != 2 or tokens_BT.shape[0] == 0 or tokens_BT.shape[1] == 0:
            raise ValueError(
                f"tokens_BT has shape {tuple(tokens_BT.shape)}; give [B, T] with at least one "
                "row and one token."
            )
        check_num_loops(num_loops, batch_size=tokens_BT.shape[0])
        if cache is not None:
            cache.bind_loops(num_loops)
        weight = self.embedding.weight
        ctx, call = build_context(
            tokens_BT,
            self.config,
            dtype=compute_dtype(weight.device, weight.dtype),
            cache=cache,
            positions_BT=positions_BT,
            padding_mask_BT=padding_mask_BT,
            document_ids_BT=document_ids_BT,
        )
        binding = SlotBinding(cache, call, self.num_slots)
        h_in_BTD = self.prelude(self.embed(tokens_BT), slots=binding.slots("prelude"), ctx=ctx)
        if initial_state_BTD is not None and initial_state_BTD.shape != h_in_BTD.shape:
            raise ValueError(
                f"initial_state_BTD has shape {tuple(initial_state_BTD.shape)}, but the prelude "
                f"output has {tuple(h_in_BTD.shape)}; both must agree."
            )
        state_BTD = self.final_state(
            h_in_BTD,
            num_loops=num_loops,
            ctx=ctx,
            binding=binding,
            initial_state_BTD=initial_state_BTD,
            on_loop=on_loop,
        )
        mods = self.modulation.for_coda(num_loops)
        x_BTD = self.coda(state_BTD, mods=mods, slots=binding.slots("coda"), ctx=ctx)
        if cache is not None and call is not None:
            cache.advance(call)
        return x_BTD

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Token embeddings [B, T, D]."""
        return self.embedding(tokens_BT)

    def prelude(self, x_BTD: Tensor, *, slots: tuple[KVSlot, ...], ctx: ForwardContext) -> Tensor:
        """h_in [B, T, D]."""
        return self.prelude_stack(x_BTD, mods=None, slots=slots, ctx=ctx)

    def loop(
        self,
        state_BTD: Tensor,
        h_in_BTD: Tensor,
        *,
        mod: LoopModulation,
        slots: tuple[KVSlot, ...],
        carry: LoopCarry,
        ctx: ForwardContext,
    ) -> tuple[Tensor, LoopCarry]:
        """One pass of the core and the state update; it knows neither loop index nor count."""
        injected_BTD = inject(state_BTD, h_in_BTD, reinject=self.config.loop.reinject)
        entered_BTD = injected_BTD
        if mod.entry is not None:
            entered_BTD = enter(injected_BTD, h_in_BTD, mod.entry, eps=self.config.norm_eps)
        candidate_BTD = self.core_stack(entered_BTD, mods=mod.sublayers, slots=slots, ctx=ctx)
        return self.state_update(state_BTD, candidate_BTD, injected_BTD, mod.update), carry

    def coda(
        self,
        state_BTD: Tensor,
        *,
        mods: tuple[SublayerModulation, ...] | None,
        slots: tuple[KVSlot, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """Coda output [B, T, D], before the final norm."""
        return self.coda_stack(state_BTD, mods=mods, slots=slots, ctx=ctx)

    def head(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        weight = self.embedding.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(self.final_norm(x_BTD), weight)

    def iterate(
        self,
        h_in_BTD: Tensor,
        *,
        num_loops: NumLoops,
        ctx: ForwardContext,
        binding: SlotBinding,
        initial_state_BTD: Tensor | None = None,
        on_loop: LoopObserver | None = None,
    ) -> Iterator[LoopPass]:
        """Run the core and yield after each pass; never advances a cache.

        Rows of a mixed batch run deepest first, and rows that are done are narrowed off together
        with their context, conditioning and prelude output.
        """
        state_BTD = initial_state(h_in_BTD) if initial_state_BTD is None else initial_state_BTD
        carry = LoopCarry()
        num_active = h_in_BTD.shape[0]
        for visit in visits(num_loops, h_in_BTD.shape[0]):
            if visit.rows is not None and visit.loop_idx == 0:
                h_in_BTD, state_BTD = h_in_BTD[visit.rows], state_BTD[visit.rows]
                ctx = ctx.narrow(visit.rows)
            elif visit.rows is not None and len(visit.rows) < num_active:
                prefix = torch.arange(len(visit.rows), device=h_in_BTD.device)
                h_in_BTD, state_BTD = h_in_BTD[: len(prefix)], state_BTD[: len(prefix)]
                ctx = ctx.narrow(prefix)
            num_active = state_BTD.shape[0]
            state_BTD, carry = self.loop(
                state_BTD,
                h_in_BTD,
                mod=self.modulation.for_loop(visit.loop_idx, visit.num_loops),
                slots=binding.slots("core", loop_idx=visit.loop_idx, rows=visit.rows),
                carry=carry,
                ctx=ctx,
            )
            if on_loop is not None:
                replacement_BTD = on_loop(visit.loop_idx, state_BTD, visit.rows)
                state_BTD = state_BTD if replacement_BTD is None else replacement_BTD
            yield LoopPass(visit.loop_idx, state_BTD, visit.rows, visit.num_leaving)

    def final_state(
        self,
        h_in_BTD: Tensor,
        *,
        num_loops: NumLoops,
        ctx: ForwardContext,
        binding: SlotBinding,
        initial_state_BTD: Tensor | None = None,
        on_loop: LoopObserver | None = None,
    ) -> Tensor:
        """The state of every row after its own last pass, rows in the order given."""
        leaving_parts, order = [], None
        for done in self.iterate(
            h_in_BTD,
            num_loops=num_loops,
            ctx=ctx,
            binding=binding,
            initial_state_BTD=initial_state_BTD,
            on_loop=on_loop,
        ):
            order = done.rows if done.loop_idx == 0 else order
            if done.num_leaving:
                leaving_parts.append(done.state_BTD[done.state_BTD.shape[0] - done.num_leaving :])
        if order is None:
            return leaving_parts[0]
        # The shallowest rows left first, so the parts stand in reverse of the deepest-first order.
        return torch.cat(leaving_parts[::-1])[torch.argsort(order)]

    def graft_modulation(self, config: ModulationConfig, *, seed: int = 0) -> None:
        """Add loop-conditioned modulation without changing the one-loop function.

        Raises: ValueError if the model has it already.
        """
        if self.config.modulation is not None:
            raise ValueError("this model has a modulation already; it can be grafted once.")
        grafted = self.config.replace(modulation=config)
        modulation = make_conditioning(grafted).to(self.embedding.weight)
        _init_module(modulation, "modulation", grafted, seed=seed)
        self.config, self.modulation = grafted, modulation


class SlotBinding:
    """The slots of one call: the cache's, or storeless ones without a cache.

    Args: num_slots: token mixers in each block.
    """

    def __init__(
        self, cache: LoopCache | None, call: CacheCall | None, num_slots: dict[Block, int]
    ) -> None:
        self.cache = cache
        self.call = call
        self.num_slots = num_slots

    def slots(
        self, block: Block, *, loop_idx: int = 0, rows: Tensor | None = None
    ) -> tuple[KVSlot, ...]:
        """One slot per token mixer of the block."""
        count = self.num_slots[block]
        if self.cache is None or self.call is None:
            return (UncachedSlot(),) * count
        return self.cache.slots(block, count, loop_idx=loop_idx, rows=rows, call=self.call)


def enter(injected_BTD: Tensor, h_in_BTD: Tensor, entry: EntryModulation, *, eps: float) -> Tensor:
    """Loop entry z_i (ELR section 3.4); the norm has no gain of its own."""
    normed_BTD = rms_normalise(injected_BTD, eps)
    return (
        entry.raw_gain * injected_BTD
        + entry.norm_gain * normed_BTD
        + entry.shift
        + entry.eta * h_in_BTD
    )


def init_weights(model: LoopedLM, *, seed: int) -> None:
    """Initial values, each drawn from a generator keyed by (seed, parameter name).

    | parameter                         | value                                             |
    | embedding, head, input matrices   | N(0, init_std)                                    |
    | o_proj, down_proj                 | N(0, init_std / sqrt(physical sublayers))         |
    | norm gains                        | 1                                                 |
    | gate W, b, gamma                  | 0, so beta = 0.5 ln 2 (ELR section 3.1)           |
    | delta rate                        | loop.delta_init                                   |
    | modulation MLP                    | N(0, 1 / fan-in), biases 0                        |
    | modulation heads                  | 0; low-rank B N(0, 1 / D), A N(0, 1 / R)          |

    Keying by name gives models that differ in one part the same values everywhere else.
    """
    _init_module(model, "", model.config, seed=seed)


def _init_module(module: nn.Module, prefix: str, config: ModelConfig, *, seed: int) -> None:
    for name, parameter in module.named_parameters(prefix=prefix):
        if parameter.device.type != "meta":
            _init_parameter(parameter, name, config, seed=seed)


@torch.no_grad()
def _init_parameter(parameter: nn.Parameter, name: str, config: ModelConfig, *, seed: int) -> None:
    parts = name.split(".")
    if parts[0] == "state_update":
        parameter.fill_(config.loop.delta_init if parts[1] == "rate" else 0.0)
        return
    if parameter.ndim == 1:
        parameter.fill_(0.0 if parts[-1] == "bias" else 1.0)
        return
    if parts[0] == "modulation" and ("heads" in parts or parts[1] in ("entry", "exit")):
        parameter.zero_()
        return
    if parts[0] == "modulation":
        std = parameter.shape[1] ** -0.5
    elif parts[-2] in ("o_proj", "down_proj"):
        std = config.init_std / math.sqrt(sum(config.split))
    else:
        std = config.init_std
    # Hashed, because torch's CPU generator reads only 32 bits of a seed.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
    parameter.copy_(values)
