"""LoopedLM: embed, prelude, loop, coda, head, and the one generator that runs the loops.

Read from the top: `forward` is `hidden_states` and `head`; `hidden_states` is `begin`, the passes
of `iterate`, and `finish`; one pass is `loop`. The model knows nothing of sampling, depth
schedules, losses or exits: `num_loops` is an argument of every call, and observers read (or
replace) the state between passes.
Letters: B batch, T query tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.cache.loop_counts import ActiveRows, NumLoops
from depthdial.cache.protocol import LoopCache
from depthdial.cache.uncached import LoopCarry, carry_of_pass, first_carry, slots_from_carry
from depthdial.config import ModelConfig, ModulationConfig, slot_kinds
from depthdial.layers.normalised import unit_length
from depthdial.layers.primitives import RMSNorm, TokenEmbedding, wide_dtype
from depthdial.layers.state import Slot
from depthdial.model.call import (
    Begun,
    Call,
    ForwardContext,
    LoopObserver,
    SlotBinding,
    build_context,
    compute_dtype,
)
from depthdial.model.conditioning import (
    ConditioningTable,
    LoopModulation,
    SublayerModulation,
    check_rows_mix,
)
from depthdial.model.halting import ExitGate
from depthdial.model.init_weights import init_weights
from depthdial.model.loop_lora import LoopLora
from depthdial.model.modulation import make_conditioning
from depthdial.model.sublayer import (
    Segment,
    Stack,
    build_stack,
    core_segments,
    placed_layers,
)
from depthdial.model.update import Injection, StateUpdate, anchor, enter, initial_state


class LoopPass(NamedTuple):
    """What `iterate` yields after each pass.

    rows: user-order indices of the rows in `state_BTD`, deepest first; None for the whole batch.
    num_leaving: rows at the end of `state_BTD` whose last pass this was.
    carry: what the pass hands on, its rows those of `state_BTD`: routes, balance losses, loads.
    """

    loop_idx: int
    state_BTD: Tensor
    rows: Tensor | None
    num_leaving: int
    carry: LoopCarry


class LoopedLM(nn.Module):
    """Decoder-only language model whose core runs `num_loops` times.

    Args: config: see `ModelConfig`; seed: of the initial weights, keyed by parameter name.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        d_model, vocab_size = config.d_model, config.vocab_size
        self.slot_kinds = {block: slot_kinds(layout) for block, layout in config.layouts.items()}
        self.segments = core_segments(config)
        self.embedding = TokenEmbedding(vocab_size, d_model)
        is_learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_context, d_model) if is_learned else None
        self.prelude_stack = build_stack(config, "prelude")
        self.prelude_norm = RMSNorm(d_model, config.norm_eps) if config.prelude_norm else None
        self.core_stack = build_stack(config, "core")
        # A tuple, so that what the segments share with the core is registered once.
        self.segment_stacks = tuple(
            self.core_stack[segment.sublayers] if len(self.segments) > 1 else None
            for segment in self.segments
        )
        self.coda_stack = build_stack(config, "coda")
        d_state = config.core_config.d_model
        self.injection = Injection(d_model, config.loop, d_state=d_state)
        self.state_update = StateUpdate(d_state, config.loop)
        projects = config.loop.state_projection
        self.state_projection = nn.Linear(d_state, d_model, bias=False) if projects else None
        self.modulation = make_conditioning(config)
        deltas = config.loop_lora
        layers = placed_layers(config)["core"]
        self.loop_lora = (
            None if deltas is None else LoopLora(self.core_stack, deltas, layers=layers)
        )
        has_final = config.final_norm != "none"
        normed = d_state if config.final_norm == "loop" else d_model
        self.final_norm = RMSNorm(normed, config.norm_eps) if has_final else None
        tied = config.tie_embeddings
        self.lm_head = None if tied else nn.Linear(d_model, vocab_size, bias=False)
        self.logit_scale = nn.Parameter(torch.ones(vocab_size)) if config.ngpt else None
        has_norm, has_gate = config.exit_gate == "norm_linear", config.exit_gate != "none"
        self.exit_gate = ExitGate(d_state, has_norm=has_norm) if has_gate else None
        init_weights(self, config, seed=seed)

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
        step_sizes: Tensor | None = None,
        on_loop: LoopObserver | None = None,
    ) -> Tensor:
        """Logits after `num_loops` passes of the core.

        Args:
            tokens_BT: token ids.
            num_loops: an int, or a CPU LongTensor [B] with one count per row.
            cache: keys and values of earlier calls; advanced by the call's real tokens.
            positions_BT: positions; default: 0.. per document, padding not counted.
            padding_mask_BT: 1 at real tokens, 0 at padding, on any side; bool, int or float.
            document_ids_BT: tokens attend within equal ids only.
            initial_state_BTD: s_0, in the core's width; default what the config's
                `initial_state` says.
            step_sizes: of the loops, [loops] or [B, most loops], for a model conditioned on time.
            on_loop: called after each pass; may return a replacement for the state.

        Returns: logits [B, T, V], rows in the order given.
        Raises: ValueError for a loop count, mask, or cache use that is not allowed.
        """
        call = Call(
            tokens_BT,
            num_loops=num_loops,
            cache=cache,
            positions_BT=positions_BT,
            padding_mask_BT=padding_mask_BT,
            document_ids_BT=document_ids_BT,
            initial_state_BTD=initial_state_BTD,
            step_sizes=step_sizes,
            on_loop=on_loop,
        )
        return self.head(self.hidden_states(call))

    def hidden_states(self, call: Call) -> Tensor:
        """`forward` without the head: [B, T, D]. Advances the cache."""
        begun = self.begin(call)
        return self.finish(last_states(self.iterate(begun)), begun)

    def begin(self, call: Call) -> Begun:
        """Check the call, build its context and run the prelude.

        Raises: ValueError for what `Call.checked` refuses, a mask or a cache use that is not
            allowed, or an initial state of another shape than the prelude output.
        """
        call = call.checked(self.config)
        if call.cache is not None:
            call.cache.bind_loops(call.num_loops)
        # The device is that of the input: weights may be elsewhere until their module is called.
        dtype = compute_dtype(call.tokens_BT.device, self.embedding.weight.dtype)
        ctx, cache_call = build_context(call, self.config, dtype=dtype)
        binding = SlotBinding(call.cache, cache_call, self.slot_kinds)
        longest = call.tokens_BT.shape[1]
        if cache_call is not None:
            longest = cache_call.num_source_tokens
        x_BTD = self.embed(
            call.tokens_BT,
            positions_BT=ctx.positions_BT,
            most_positions=longest if call.positions_BT is None else None,
        )
        prelude = self.prelude if call.blocks is None else call.blocks.prelude
        h_in_BTD = prelude(x_BTD, slots=binding.slots("prelude"), ctx=ctx)
        state_BTD, width = call.initial_state_BTD, self.config.core_config.d_model
        if state_BTD is None:
            loop = self.config.loop
            state_BTD = initial_state(h_in_BTD, ctx.positions_BT, loop, width=width)
        elif state_BTD.shape != (*h_in_BTD.shape[:-1], width):
            raise ValueError(
                f"initial_state_BTD has shape {tuple(state_BTD.shape)}, but the states of this "
                f"call have {(*h_in_BTD.shape[:-1], width)}; both must agree."
            )
        return Begun(call, h_in_BTD, state_BTD, ctx, binding)

    def iterate(self, begun: Begun) -> Generator[LoopPass, Tensor | None, None]:
        """Run the core and yield after each pass; never advances a cache.

        Rows of a mixed batch run deepest first, and rows that are done are narrowed off together
        with their context, conditioning and prelude output. `send(keep)`, a bool per row of the
        yielded state, narrows off rows that stop early. Of several segments, the last one's
        passes are seen; a row cannot stop between them.

        Raises: ValueError for a row that is sent to stop where the core has segments.
        """
        *lower, last = zip(self.segments, self.segment_stacks, strict=True)
        for segment, part in lower:
            passes = self._passes(begun, segment, part, on_loop=None)
            begun = begun._replace(initial_state_BTD=last_states(passes))
        yield from self._passes(begun, *last, on_loop=begun.call.on_loop)

    def _passes(
        self, begun: Begun, segment: Segment, part: Stack | None, *, on_loop: LoopObserver | None
    ) -> Generator[LoopPass, Tensor | None, None]:
        """All passes of one segment; part: None where it is the whole core."""
        call, ctx = begun.call, begun.ctx
        loop = self.loop if call.blocks is None else call.blocks.loop
        state_BTD, h_in_BTD = begun.initial_state_BTD, begun.h_in_BTD
        batch_size = h_in_BTD.shape[0]
        carry = self.first_carry(state_BTD, is_cached=call.cache is not None)
        active, loop_idx = ActiveRows(call.num_loops, batch_size), 0
        if active.rows is not None:
            places = active.rows.to(h_in_BTD.device)
            state_BTD, h_in_BTD, ctx = state_BTD[places], h_in_BTD[places], ctx.narrow(places)
        while active.num_rows:
            rows, steps = active.rows, call.step_sizes
            if steps is not None and len(steps) > 1 and rows is not None:
                steps = steps[rows]
            slots = begun.binding.slots("core", loop_idx=loop_idx, rows=rows)
            mod = self.loop_modulation(
                loop_idx, active.num_loops, steps, table=call.table, device=h_in_BTD.device
            )
            if mod.sublayers is not None:
                mod = mod._replace(sublayers=mod.sublayers[segment.sublayers])
            without_grad = rows_without_grad(call.no_grad_loops, loop_idx, rows)
            is_cut = without_grad is not None and bool(without_grad.all())
            with torch.no_grad() if is_cut else nullcontext():
                state_BTD, carry = loop(
                    state_BTD,
                    h_in_BTD,
                    mod=mod,
                    slots=slots[segment.slots],
                    carry=carry,
                    ctx=ctx,
                    part=part,
                )
            if without_grad is not None:
                state_BTD = detach_rows(state_BTD, without_grad)
                carry = carry.map(partial(detach_rows, without_grad=without_grad))
            if on_loop is not None:
                replacement_BTD = on_loop(loop_idx, state_BTD, rows)
                state_BTD = state_BTD if replacement_BTD is None else replacement_BTD
            keep = yield LoopPass(loop_idx, state_BTD, rows, active.num_leaving(loop_idx), carry)
            if keep is not None and part is not None:
                raise ValueError(
                    "a row cannot stop between the loops of a core in segments: earlier segments "
                    "have run all of theirs. Choose the number of loops beforehand."
                )
            places = active.after(loop_idx, keep)
            if places is not None:
                if isinstance(places, Tensor):
                    places = places.to(h_in_BTD.device)
                state_BTD, h_in_BTD = state_BTD[places], h_in_BTD[places]
                ctx, carry = ctx.narrow(places), carry.map(itemgetter(places))
            loop_idx += 1

    def finish(self, state_BTD: Tensor, begun: Begun) -> Tensor:
        """Coda output [B, T, D] of the last states in user order; advances the cache.

        Args: state_BTD: of every row after its own last pass; see `last_states`.
        """
        num_loops, cache = begun.call.num_loops, begun.call.cache
        if cache is not None and cache.rule.has_extra_pass:
            # The entry that persists is that of the final state: one more pass, its result unused.
            self.loop(
                state_BTD,
                begun.h_in_BTD,
                mod=self.loop_modulation(
                    0, num_loops, table=begun.call.table, device=state_BTD.device
                ),
                slots=begun.binding.extra_slots(),
                carry=self.first_carry(state_BTD, is_cached=True),
                ctx=begun.ctx,
            )
        device = state_BTD.device
        mods = self.coda_modulation(num_loops, table=begun.call.table, device=device)
        slots = begun.binding.slots("coda")
        coda = self.coda if begun.call.blocks is None else begun.call.blocks.coda
        x_BTD = coda(state_BTD, mods=mods, slots=slots, ctx=begun.ctx)
        if cache is not None and begun.binding.cache_call is not None:
            cache.advance(begun.binding.cache_call)
        return x_BTD

    def embed(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        most_positions: int | None = None,
    ) -> Tensor:
        """Token embeddings [B, T, D], scaled, with learned positions added where there are any.

        Args: most_positions: the positions are known to be below it; None where only they tell,
            which waits for their device.
        Raises: ValueError for a position beyond max_context, where positions are learned.
        """
        x_BTD = self.embedding(tokens_BT)
        if self.config.embed_scale != 1.0:
            x_BTD = x_BTD * self.config.embed_scale
        if self.position_embedding is None:
            return x_BTD
        assert positions_BT is not None, "a model with learned positions is given them"
        limit = self.config.max_context
        is_known = most_positions is not None and most_positions <= limit
        if not is_known and int(positions_BT.max()) >= limit:
            raise ValueError(
                f"position {int(positions_BT.max())} has no learned vector; this model reads at "
                f"most max_context={limit} tokens."
            )
        return x_BTD + self.position_embedding(positions_BT)

    def prelude(self, x_BTD: Tensor, *, slots: tuple[Slot, ...], ctx: ForwardContext) -> Tensor:
        """h_in [B, T, D]."""
        h_in_BTD = self.prelude_stack(x_BTD, mods=None, slots=slots, ctx=ctx)
        return h_in_BTD if self.prelude_norm is None else self.prelude_norm(h_in_BTD)

    def loop(
        self,
        state_BTD: Tensor,
        h_in_BTD: Tensor,
        *,
        mod: LoopModulation,
        slots: tuple[Slot, ...],
        carry: LoopCarry,
        ctx: ForwardContext,
        part: Stack | None = None,
    ) -> tuple[Tensor, LoopCarry]:
        """One pass of the core and the state update; it knows neither loop index nor count.

        Args: part: the segment that loops, whose conditioning and slots are given; None for the
            whole core.
        """
        slots = slots_from_carry(carry, slots, config=self.config)
        injected_BTD = self.injection(state_BTD, h_in_BTD)
        if self.config.loop.unit_norm:
            injected_BTD = unit_length(injected_BTD)
        entered_BTD = injected_BTD
        if mod.entry is not None:
            entered_BTD = enter(injected_BTD, h_in_BTD, mod.entry, eps=self.config.norm_eps)
        stack = self.core_stack if part is None else part
        candidate_BTD = stack(entered_BTD, mods=mod.sublayers, slots=slots, ctx=ctx)
        if self.config.final_norm == "loop" and self.final_norm is not None:
            candidate_BTD = self.final_norm(candidate_BTD)
        if self.config.loop.unit_norm:
            candidate_BTD = unit_length(candidate_BTD)
        carry = carry_of_pass(carry, slots)
        next_BTD = self.state_update(state_BTD, candidate_BTD, injected_BTD, mod.update)
        if mod.update.anchor is not None:
            assert mod.update.is_first is not None and carry.first_candidate is not None
            first_BTD = torch.where(mod.update.is_first, candidate_BTD, carry.first_candidate)
            carry = carry._replace(first_candidate=first_BTD)
            next_BTD = anchor(next_BTD, first_BTD, mod.update.anchor)
        return next_BTD, carry

    def first_carry(self, state_BTD: Tensor, *, is_cached: bool) -> LoopCarry:
        """The carry before the first loop of these rows."""
        is_anchored = self.config.loop.update == "anchored"
        # Of the same kind as a candidate, gradient included, so that all passes are one graph.
        first_candidate = state_BTD.clone() if is_anchored else None
        return first_carry(self.config, is_cached=is_cached, first_candidate=first_candidate)

    def coda(
        self,
        state_BTD: Tensor,
        *,
        mods: tuple[SublayerModulation, ...] | None,
        slots: tuple[Slot, ...],
        ctx: ForwardContext,
    ) -> Tensor:
        """Coda output [B, T, D], before the norm of the head."""
        if self.config.final_norm == "coda_and_head" and self.final_norm is not None:
            state_BTD = self.final_norm(state_BTD)
        if self.state_projection is not None:
            state_BTD = self.state_projection(state_BTD).to(state_BTD.dtype)
        return self.coda_stack(state_BTD, mods=mods, slots=slots, ctx=ctx)

    def head(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.scores(self.head_input(x_BTD))

    def head_input(self, x_BTD: Tensor) -> Tensor:
        """What the matrix of the head multiplies: the coda output after the final norm."""
        if self.final_norm is None or self.config.final_norm == "loop":
            return x_BTD
        return self.final_norm(x_BTD)

    def scores(self, head_input_BTD: Tensor) -> Tensor:
        """Logits [B, T, V] of what the head's matrix multiplies."""
        head = self._tied_head if self.lm_head is None else self.lm_head
        logits_BTV = head(head_input_BTD)
        wide, cap = wide_dtype(logits_BTV.dtype), self.config.logit_soft_cap
        if self.logit_scale is not None and self.config.ngpt is not None:
            # fp32: the scale is large where the logits of unit vectors are small.
            scale_V = self.logit_scale.to(wide) / self.config.ngpt.scale_std
            logits_BTV = logits_BTV.to(wide) * scale_V
        if cap is not None:
            # fp32: near the cap, neighbouring logits round to one.
            logits_BTV = cap * torch.tanh(logits_BTV.to(wide) / cap)
        return logits_BTV

    def _tied_head(self, x_BTD: Tensor) -> Tensor:
        """The product with the embedding of every token id."""
        if isinstance(self.embedding, TokenEmbedding):
            return self.embedding(x_BTD)
        # Whatever is wrapped around the embedding (an adapter) belongs to the head too.
        every_id = torch.arange(self.config.vocab_size, device=x_BTD.device)
        return F.linear(x_BTD, self.embedding(every_id))

    def loop_modulation(
        self,
        loop_idx: int | Tensor,
        num_loops: NumLoops,
        step_sizes: Tensor | None = None,
        *,
        table: ConditioningTable | None = None,
        device: torch.device | None = None,
    ) -> LoopModulation:
        """Conditioning of one pass, its stored differences included.

        Args:
            loop_idx, num_loops: of all rows, or one per row, int64 [B] on the CPU; rows of
                different loops and counts can stand in one call of `loop`.
            step_sizes: [1 or B, loops], for a model conditioned on time; None for equal steps.
            table: of the call, which then computes nothing; None to compute.
            device: of the result; None for that of the embedding.

        Returns: rows [1, 1, ...] where loop and count are ints, else [B, 1, ...].
        Raises: ValueError for rows whose loops cannot stand in one call.
        """
        if isinstance(loop_idx, Tensor):
            check_rows_mix(self.config, loop_idx, num_loops)
        if table is not None and step_sizes is None:
            mod = table.for_loop(loop_idx, num_loops)
        else:
            device = self.embedding.weight.device if device is None else device
            mod = self.modulation.for_loop(loop_idx, num_loops, step_sizes, device=device)
        if self.loop_lora is None:
            return mod
        sublayers = self.loop_lora.for_loop(loop_idx, mod.sublayers, core=self.core_stack)
        return mod._replace(sublayers=sublayers)

    def coda_modulation(
        self,
        num_loops: NumLoops,
        *,
        table: ConditioningTable | None = None,
        device: torch.device | None = None,
    ) -> tuple[SublayerModulation, ...] | None:
        """Conditioning of the coda; rows, table and device as in `loop_modulation`."""
        if table is not None:
            return table.for_coda(num_loops)
        return self.modulation.for_coda(num_loops, device=device)

    def conditioning_table(self, num_loops: NumLoops) -> ConditioningTable:
        """What calls of these loop counts are conditioned on, computed once for all of them."""
        return self.modulation.table(num_loops, device=self.embedding.weight.device)

    def graft_modulation(self, config: ModulationConfig, *, seed: int = 0) -> None:
        """Add loop-conditioned modulation without changing the one-loop function.

        Raises: ValueError if the model has it already.
        """
        if self.config.modulation is not None:
            raise ValueError("this model has a modulation already; it can be grafted once.")
        grafted = self.config.replace(modulation=config)
        modulation = make_conditioning(grafted).to(self.embedding.weight)
        init_weights(modulation, grafted, seed=seed, prefix="modulation")
        self.config, self.modulation = grafted, modulation


def last_states(passes: Iterable[LoopPass]) -> Tensor:
    """The state of every row after its own last pass, rows in the order given to the loops."""
    leaving_parts, order = [], None
    for done in passes:
        order = done.rows if done.loop_idx == 0 else order
        if done.num_leaving:
            leaving_parts.append(done.state_BTD[done.state_BTD.shape[0] - done.num_leaving :])
    if order is None:
        return leaving_parts[0]
    # The shallowest rows left first, so the parts stand in reverse of the deepest-first order.
    return torch.cat(leaving_parts[::-1])[torch.argsort(order)]


def rows_without_grad(
    no_grad_loops: int | Tensor, loop_idx: int, rows: Tensor | None
) -> Tensor | None:
    """Which rows no gradient enters in this pass: one mark for all or one per active row; None for
    no row."""
    if isinstance(no_grad_loops, int):
        return torch.tensor([True]) if loop_idx < no_grad_loops else None
    marks = loop_idx < (no_grad_loops if rows is None else no_grad_loops[rows])
    return marks if bool(marks.any()) else None


def detach_rows(x: Tensor, without_grad: Tensor) -> Tensor:
    """A tensor [B, ...], cut off from its history in the rows marked True; one mark is for all."""
    if len(without_grad) == 1:
        return x.detach()
    marks = without_grad.to(x.device).view(-1, *(1,) * (x.ndim - 1))
    return torch.where(marks, x.detach(), x)
