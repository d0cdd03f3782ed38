"""LoopedLM: embed, prelude, loop, coda, head, and the one generator that runs the loops.

The model knows nothing of sampling, depth schedules, losses or exits: `num_loops` is an argument
of every forward, and observers read (or replace) the state between passes.
Letters: B batch, T query tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.cache.contiguous import LoopCache
from depthdial.cache.loop_counts import NumLoops, check_num_loops
from depthdial.cache.state import Block
from depthdial.config import ModelConfig, ModulationConfig, TimeModulationConfig
from depthdial.layers.normalised import unit_length
from depthdial.layers.primitives import RMSNorm, wide_dtype
from depthdial.layers.state import KVSlot
from depthdial.model.call import ForwardContext, build_context, compute_dtype
from depthdial.model.carry import (
    LoopCarry,
    anchor,
    first_carry,
    slots_from_carry,
    with_first_candidate,
    with_first_keys,
)
from depthdial.model.halting import ExitGate
from depthdial.model.init_weights import init_weights
from depthdial.model.loop_lora import LoopLora
from depthdial.model.modulation import (
    LoopModulation,
    SublayerModulation,
    check_step_sizes,
    make_conditioning,
)
from depthdial.model.passes import (
    Begun,
    LoopObserver,
    LoopPass,
    SlotBinding,
    enter,
    last_states,
)
from depthdial.model.segment_passes import segment_passes
from depthdial.model.sublayer import Stack, build_stack, core_segments, num_slots
from depthdial.model.update import Injection, StateUpdate, initial_state


class LoopedLM(nn.Module):
    """Decoder-only language model whose core runs `num_loops` times.

    Args: config: see `ModelConfig`; seed: of the initial weights, keyed by parameter name.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        d_model, vocab_size = config.d_model, config.vocab_size
        self.num_slots: dict[Block, int] = {
            "prelude": num_slots(config.prelude_layout),
            "core": num_slots(config.core_layout),
            "coda": num_slots(config.coda_layout),
        }
        self.segments = core_segments(config)
        below_core = self.num_slots["prelude"]
        below_coda = below_core + self.num_slots["core"]
        self.embedding = nn.Embedding(vocab_size, d_model)
        is_learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_context, d_model) if is_learned else None
        self.prelude_stack = build_stack(config.prelude_layout, config)
        self.prelude_norm = RMSNorm(d_model, config.norm_eps) if config.prelude_norm else None
        self.core_stack = build_stack(
            config.core_layout, config, is_core=True, first_attention=below_core
        )
        # A tuple, so that what the segments share with the core is registered once.
        self.segment_stacks = tuple(
            self.core_stack[segment.sublayers] if len(self.segments) > 1 else None
            for segment in self.segments
        )
        self.coda_stack = build_stack(config.coda_layout, config, first_attention=below_coda)
        self.injection = Injection(d_model, config.loop)
        self.state_update = StateUpdate(d_model, config.loop)
        projects = config.loop.state_projection
        self.state_projection = nn.Linear(d_model, d_model, bias=False) if projects else None
        self.modulation = make_conditioning(config)
        deltas = config.loop_lora
        self.loop_lora = None if deltas is None else LoopLora(self.core_stack, deltas)
        has_final = config.final_norm != "none"
        self.final_norm = RMSNorm(d_model, config.norm_eps) if has_final else None
        tied = config.tie_embeddings
        self.lm_head = None if tied else nn.Linear(d_model, vocab_size, bias=False)
        self.logit_scale = nn.Parameter(torch.ones(vocab_size)) if config.ngpt else None
        has_norm, has_gate = config.exit_gate == "norm_linear", config.exit_gate != "none"
        self.exit_gate = ExitGate(d_model, has_norm=has_norm) if has_gate else None
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
            initial_state_BTD: s_0; default what the config's `initial_state` says.
            step_sizes: of the loops, [loops] or [B, most loops], for a model conditioned on time.
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
            step_sizes=step_sizes,
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
        step_sizes: Tensor | None = None,
        no_grad_loops: int | Tensor = 0,
        on_loop: LoopObserver | None = None,
    ) -> Tensor:
        """`forward` without the head: [B, T, D]. Advances the cache.

        Args: no_grad_loops: first passes, of all rows or per row [B], that no gradient enters.
        """
        begun = self.begin(
            tokens_BT,
            num_loops=num_loops,
            cache=cache,
            positions_BT=positions_BT,
            padding_mask_BT=padding_mask_BT,
            document_ids_BT=document_ids_BT,
            initial_state_BTD=initial_state_BTD,
        )
        state_BTD = self.final_state(
            begun,
            num_loops=num_loops,
            step_sizes=step_sizes,
            no_grad_loops=no_grad_loops,
            on_loop=on_loop,
        )
        return self.finish(state_BTD, begun, num_loops=num_loops)

    def begin(
        self,
        tokens_BT: Tensor,
        *,
        num_loops: NumLoops,
        cache: LoopCache | None = None,
        positions_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        initial_state_BTD: Tensor | None = None,
    ) -> Begun:
        """Check the call, build its context and run the prelude; arguments as in `forward`."""
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
        longest = tokens_BT.shape[1] if call is None else call.place.num_source_tokens
        x_BTD = self.embed(
            tokens_BT,
            positions_BT=ctx.positions_BT,
            most_positions=longest if positions_BT is None else None,
        )
        h_in_BTD = self.prelude(x_BTD, slots=binding.slots("prelude"), ctx=ctx)
        if initial_state_BTD is None:
            initial_state_BTD = initial_state(h_in_BTD, ctx.positions_BT, self.config.loop)
        elif initial_state_BTD.shape != h_in_BTD.shape:
            raise ValueError(
                f"initial_state_BTD has shape {tuple(initial_state_BTD.shape)}, but the prelude "
                f"output has {tuple(h_in_BTD.shape)}; both must agree."
            )
        return Begun(h_in_BTD, initial_state_BTD, ctx, binding)

    def finish(self, state_BTD: Tensor, begun: Begun, *, num_loops: NumLoops) -> Tensor:
        """Coda output [B, T, D] of the last states in user order; advances the cache."""
        cache, call = begun.binding.cache, begun.binding.call
        if cache is not None and cache.needs_stash_pass:
            # The entry that persists is that of the final state: one more pass, its result unused.
            self.loop(
                state_BTD,
                begun.h_in_BTD,
                mod=self.loop_modulation(0, num_loops),
                slots=begun.binding.stash_slots(),
                carry=LoopCarry(),
                ctx=begun.ctx,
            )
        mods = self.modulation.for_coda(num_loops)
        slots = begun.binding.slots("coda")
        x_BTD = self.coda(state_BTD, mods=mods, slots=slots, ctx=begun.ctx)
        if cache is not None and call is not None:
            cache.advance(call)
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

    def prelude(self, x_BTD: Tensor, *, slots: tuple[KVSlot, ...], ctx: ForwardContext) -> Tensor:
        """h_in [B, T, D]."""
        h_in_BTD = self.prelude_stack(x_BTD, mods=None, slots=slots, ctx=ctx)
        return h_in_BTD if self.prelude_norm is None else self.prelude_norm(h_in_BTD)

    def loop(
        self,
        state_BTD: Tensor,
        h_in_BTD: Tensor,
        *,
        mod: LoopModulation,
        slots: tuple[KVSlot, ...],
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
        carry = with_first_keys(carry, slots)
        next_BTD = self.state_update(state_BTD, candidate_BTD, injected_BTD, mod.update)
        if mod.update.anchor is not None:
            carry = with_first_candidate(carry, candidate_BTD)
            next_BTD = anchor(next_BTD, carry.first_candidate, mod.update.anchor)
        return next_BTD, carry

    def coda(
        self,
        state_BTD: Tensor,
        *,
        mods: tuple[SublayerModulation, ...] | None,
        slots: tuple[KVSlot, ...],
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
        weight = self.embedding.weight if self.lm_head is None else self.lm_head.weight
        if self.final_norm is not None and self.config.final_norm != "loop":
            x_BTD = self.final_norm(x_BTD)
        logits_BTV = F.linear(x_BTD, weight)
        if self.logit_scale is None or self.config.ngpt is None:
            return logits_BTV
        # fp32: the scale is large where the logits of unit vectors are small.
        wide = wide_dtype(logits_BTV.dtype)
        return logits_BTV.to(wide) * (self.logit_scale.to(wide) / self.config.ngpt.scale_std)

    def loop_modulation(
        self, loop_idx: int, num_loops: NumLoops, step_sizes: Tensor | None = None
    ) -> LoopModulation:
        """Conditioning of one pass, this loop's stored differences included."""
        device = self.embedding.weight.device
        mod = self.modulation.for_loop(loop_idx, num_loops, step_sizes, device=device)
        if self.loop_lora is None:
            return mod
        return mod._replace(sublayers=self.loop_lora.for_loop(loop_idx, mod.sublayers))

    def iterate(
        self,
        begun: Begun,
        *,
        num_loops: NumLoops,
        step_sizes: Tensor | None = None,
        no_grad_loops: int | Tensor = 0,
        on_loop: LoopObserver | None = None,
    ) -> Generator[LoopPass, Tensor | None, None]:
        """Run the core and yield after each pass; never advances a cache.

        Rows of a mixed batch run deepest first, and rows that are done are narrowed off together
        with their context, conditioning and prelude output. `send(keep)`, a bool per row of the
        yielded state, narrows off rows that stop early. Of several segments, the last one's
        passes are seen; a row cannot stop between them.

        Raises: ValueError for step sizes without effect or of another number than the loops, and
            for what several segments cannot do.
        """
        steps = self._steps(step_sizes, num_loops, begun.h_in_BTD.shape[0])
        last = len(self.segments) - 1
        if last and bool((torch.as_tensor(no_grad_loops) > 0).any()):
            raise ValueError(
                "no_grad_loops would cut off the gradient of every segment but the last; a model "
                "whose core has segments is trained through all its loops."
            )
        for idx, (segment, part) in enumerate(zip(self.segments, self.segment_stacks, strict=True)):
            passes = segment_passes(
                partial(self.loop, part=part),
                begun,
                segment,
                conditioning=self.loop_modulation,
                carry=first_carry(self.config, is_cached=begun.binding.cache is not None),
                rows_may_stop=not last,
                num_loops=num_loops,
                steps=steps,
                no_grad_loops=no_grad_loops,
                on_loop=on_loop if idx == last else None,
            )
            if idx == last:
                yield from passes
            else:
                begun = begun._replace(initial_state_BTD=last_states(passes))

    def final_state(
        self,
        begun: Begun,
        *,
        num_loops: NumLoops,
        step_sizes: Tensor | None = None,
        no_grad_loops: int | Tensor = 0,
        on_loop: LoopObserver | None = None,
    ) -> Tensor:
        """The state of every row after its own last pass, rows in the order given."""
        return last_states(
            self.iterate(
                begun,
                num_loops=num_loops,
                step_sizes=step_sizes,
                no_grad_loops=no_grad_loops,
                on_loop=on_loop,
            )
        )

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

    def _steps(
        self, step_sizes: Tensor | None, num_loops: NumLoops, batch_size: int
    ) -> Tensor | None:
        if step_sizes is None:
            return None
        if not isinstance(self.config.modulation, TimeModulationConfig):
            raise ValueError(
                "step_sizes has no effect: this model is not conditioned on time and step size. "
                "Leave it out."
            )
        return check_step_sizes(step_sizes, num_loops, batch_size=batch_size)
