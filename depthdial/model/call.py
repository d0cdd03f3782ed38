"""What one call of the model carries: its arguments, its context, its slots.

`Call` is what a caller says, `ForwardContext` what every sublayer of every loop reads (positions,
masks, rotary tables, built once per call), `Begun` a call whose prelude has run.
Letters: B batch, T query tokens, S source tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthdial.cache.loop_counts import NumLoops, check_num_loops
from depthdial.cache.protocol import Block, CacheCall, LoopCache
from depthdial.cache.uncached import uncached_slots
from depthdial.config import LETTERS, ModelConfig, Reach, SlotKind, TimeModulationConfig
from depthdial.layers.attention_ops import AttentionSpec, narrow_rows
from depthdial.layers.primitives import RotaryTable, rotary_table
from depthdial.layers.state import AttentionView, Slot, TokenView
from depthdial.model.conditioning import ConditioningTable

LoopObserver = Callable[[int, Tensor, Tensor | None], Tensor | None]
"""(loop_idx, state_BTD, rows) -> None, or a replacement for the state; rows: see `LoopPass`."""


class Blocks(NamedTuple):
    """Compiled forms of `LoopedLM.prelude`, `.loop` and `.coda`, with their arguments."""

    prelude: Callable[..., Tensor]
    loop: Callable[..., Any]
    coda: Callable[..., Tensor]


@dataclass(frozen=True)
class Call:
    """What a caller says about one call of the model; all rows in the caller's order.

    Fields:
        tokens_BT: token ids.
        num_loops: an int, or a CPU LongTensor [B] with one count per row.
        cache: keys and values of earlier calls; advanced by the call's real tokens.
        positions_BT: positions; default: 0.. per document, padding not counted.
        padding_mask_BT: 1 at real tokens, 0 at padding, on any side; bool, int or float.
        document_ids_BT: tokens attend within equal ids only.
        initial_state_BTD: s_0; default what the config's `initial_state` says.
        step_sizes: of the loops, [loops] or [B, most loops], for a model conditioned on time.
        no_grad_loops: first passes, of all rows or per row [B], that no gradient enters.
        on_loop: called after each pass; may return a replacement for the state.
        blocks: run in place of the model's own prelude, loop and coda; None for those.
        table: conditioning that calls of the same loop counts share; None computes it in each
            pass, and so do loops of given step sizes.

    Raises: ValueError for tokens of a useless shape, or a loop count that is not allowed.
    """

    tokens_BT: Tensor
    _: KW_ONLY
    num_loops: NumLoops
    cache: LoopCache | None = None
    positions_BT: Tensor | None = None
    padding_mask_BT: Tensor | None = None
    document_ids_BT: Tensor | None = None
    initial_state_BTD: Tensor | None = None
    step_sizes: Tensor | None = None
    no_grad_loops: int | Tensor = 0
    on_loop: LoopObserver | None = None
    blocks: Blocks | None = None
    table: ConditioningTable | None = None

    def __post_init__(self) -> None:
        tokens_BT = self.tokens_BT
        if tokens_BT.ndim != 2 or tokens_BT.shape[0] == 0 or tokens_BT.shape[1] == 0:
            raise ValueError(
                f"tokens_BT has shape {tuple(tokens_BT.shape)}; give [B, T] with at least one "
                "row and one token."
            )
        check_num_loops(self.num_loops, batch_size=tokens_BT.shape[0])

    def checked(self, config: ModelConfig) -> Call:
        """The call as this model takes it: step sizes [1 or B, loops], if there are any.

        Raises: ValueError for step sizes without effect or of another number than the loops, and
            for passes without gradient where the core has segments.
        """
        if config.segments and bool((torch.as_tensor(self.no_grad_loops) > 0).any()):
            raise ValueError(
                "no_grad_loops would cut off the gradient of every segment but the last; a model "
                "whose core has segments is trained through all its loops."
            )
        if self.step_sizes is None:
            return self
        if not isinstance(config.modulation, TimeModulationConfig):
            raise ValueError(
                "step_sizes has no effect: this model is not conditioned on time and step size. "
                "Leave it out."
            )
        steps = check_step_sizes(
            self.step_sizes, self.num_loops, batch_size=self.tokens_BT.shape[0]
        )
        return replace(self, step_sizes=steps)


def check_step_sizes(step_sizes: Tensor, num_loops: NumLoops, *, batch_size: int) -> Tensor:
    """Step sizes as [1 or B, loops].

    Args: step_sizes: [loops], or [B, most loops] with zeros after each row's last step.
    Raises: ValueError unless each row has as many positive steps as loops, adding up to 1.
    """
    steps = step_sizes[None] if step_sizes.ndim == 1 else step_sizes
    loops = torch.as_tensor(num_loops).reshape(-1)
    if steps.ndim != 2 or len(steps) not in (1, batch_size) or steps.shape[1] < int(loops.max()):
        raise ValueError(
            f"step_sizes has shape {tuple(step_sizes.shape)} for {batch_size} rows of up to "
            f"{int(loops.max())} loops; give [loops], or [rows, most loops]."
        )
    steps = steps.to("cpu", torch.float64)
    loops = loops.expand(max(len(steps), len(loops)))
    steps = steps.expand(len(loops), -1)
    expected = torch.arange(steps.shape[1]) < loops[:, None]
    wrong = ((steps > 0) != expected).any(dim=1) | ((steps.sum(dim=1) - 1).abs() > 1e-4)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"step_sizes of row {row} are {steps[row].tolist()} for {int(loops[row])} loops; give "
            "one positive step per loop, zeros after them, adding up to 1."
        )
    return steps


@dataclass(frozen=True)
class ForwardContext:
    """Tensors of one call, [1 or B, ...].

    Fields:
        tokens_BT: ids.
        positions_BT: restarting at 0 in each document unless given.
        views: what the layers of a letter know of the call: an `AttentionView` of those with
            attention, a `TokenView` of others that have a slot.
        dtype: of matrix products; the state itself keeps its own.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    views: dict[str, AttentionView | TokenView]
    dtype: torch.dtype

    def narrow(self, rows: Tensor | slice) -> ForwardContext:
        """Keep some rows of the batch."""
        positions_BT = narrow_rows(self.positions_BT, rows)
        assert positions_BT is not None
        return replace(
            self,
            tokens_BT=self.tokens_BT[rows],
            positions_BT=positions_BT,
            views={letter: view.narrow(rows) for letter, view in self.views.items()},
        )


class SlotBinding:
    """The slots of one call: the cache's, or storeless ones without a cache.

    Args: slot_kinds: the slots of each block, bottom to top.
    """

    def __init__(
        self,
        cache: LoopCache | None,
        cache_call: CacheCall | None,
        slot_kinds: Mapping[Block, tuple[SlotKind, ...]],
    ) -> None:
        self.cache = cache
        self.cache_call = cache_call
        self.slot_kinds = slot_kinds

    def slots(
        self, block: Block, *, loop_idx: int = 0, rows: Tensor | None = None
    ) -> tuple[Slot, ...]:
        """One slot per layer of the block that has one."""
        if self.cache is None or self.cache_call is None:
            return uncached_slots(self.slot_kinds[block])
        return self.cache.slots(block, loop_idx=loop_idx, rows=rows, call=self.cache_call)

    def extra_slots(self) -> tuple[Slot, ...]:
        """Slots of the pass after the last loop that writes what persists."""
        assert self.cache is not None and self.cache_call is not None, "only a cache has them"
        return self.cache.extra_slots(call=self.cache_call)


class Begun(NamedTuple):
    """A call whose prelude has run: what `iterate` and `finish` need."""

    call: Call
    h_in_BTD: Tensor
    initial_state_BTD: Tensor
    ctx: ForwardContext
    binding: SlotBinding


def compute_dtype(device: torch.device, weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, else the weights'."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return weight_dtype


def build_context(
    call: Call, config: ModelConfig, *, dtype: torch.dtype
) -> tuple[ForwardContext, CacheCall | None]:
    """Positions, masks and rotary tables of one call.

    Args: dtype: of matrix products; see `compute_dtype`.
    Returns: the context, and the cache's write plan (None without cache).
    Raises: ValueError for a wrong shape, or a padding mask with values besides 0 and 1.
    """
    tokens_BT, positions_BT = call.tokens_BT, call.positions_BT
    document_ids_BT = call.document_ids_BT
    shape = (tokens_BT.shape[0], tokens_BT.shape[1])
    _check_shape("positions_BT", positions_BT, shape)
    _check_shape("document_ids_BT", document_ids_BT, shape)
    is_token_BT = _real_tokens(call.padding_mask_BT, shape)
    cache_call = None
    if call.cache is None:
        spec = _spec_in_call(tokens_BT, is_token_BT, document_ids_BT, dtype=dtype)
    else:
        cache_call = call.cache.open_call(
            shape, is_token_BT=is_token_BT, document_ids_BT=document_ids_BT
        )
        spec = _spec_in_cache(cache_call, dtype=dtype)
    if positions_BT is None:
        positions_BT = spec.default_positions(tokens_BT.device)
    token_view = TokenView(is_token_BT, _document_starts(is_token_BT, document_ids_BT, cache_call))
    views = _views(tokens_BT, positions_BT, config, spec=spec, token_view=token_view)
    return ForwardContext(tokens_BT, positions_BT, views, spec.dtype), cache_call


def _views(
    tokens_BT: Tensor,
    positions_BT: Tensor,
    config: ModelConfig,
    *,
    spec: AttentionSpec,
    token_view: TokenView,
) -> dict[str, AttentionView | TokenView]:
    """One view per letter whose layers have a slot; letters of equal reach share theirs."""
    local_window = config.loop.local_window
    made: dict[Reach | None, AttentionView | TokenView] = {None: token_view}
    views = {}
    for letter in sorted(set(config.layout)):
        if LETTERS[letter].slot == "none":
            continue
        own = LETTERS[letter].reach(config)
        if own is not None and own not in made:
            local_spec = None
            if local_window is not None:
                local_spec = spec.for_layer(
                    min(local_window, own.window or local_window), device=tokens_BT.device
                )
            made[own] = AttentionView(
                spec=spec.for_layer(own.window, device=tokens_BT.device),
                rotary=_rotary(positions_BT, config, own, dtype=spec.dtype),
                local_spec=local_spec,
                tokens_BT=tokens_BT,
            )
        views[letter] = made[own]
    return views


def _rotary(
    positions_BT: Tensor, config: ModelConfig, reach: Reach, *, dtype: torch.dtype
) -> RotaryTable | None:
    if config.positions != "rotary" or config.head_dim is None:
        return None
    return rotary_table(
        positions_BT,
        rotary_dim=round(config.head_dim * reach.rotary_frac),
        theta=reach.rope_theta,
        dtype=dtype,
        scaling=config.rope_scaling,
    )


def _document_starts(
    is_token_BT: Tensor | None, document_ids_BT: Tensor | None, cache_call: CacheCall | None
) -> Tensor | None:
    """True at real tokens whose document is another than that of the real token before them."""
    if document_ids_BT is None:
        return None
    if cache_call is not None:
        assert cache_call.source_document_ids_BS is not None, "documents are stored with tokens"
        index_BT, ids_BS = cache_call.index_BT, cache_call.source_document_ids_BS
        before_BT, is_token_BT = index_BT - 1, cache_call.is_token_BT
    else:
        ids_BS = document_ids_BT
        if is_token_BT is None:
            is_token_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
        order_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
        newest_BT = torch.where(is_token_BT, order_T, -1).cummax(dim=1).values
        before_BT = F.pad(newest_BT[:, :-1], (1, 0), value=-1)
    ids_before_BT = ids_BS.gather(1, before_BT.clamp(min=0))
    return is_token_BT & ((before_BT < 0) | (ids_before_BT != document_ids_BT))


def _spec_in_call(
    tokens_BT: Tensor,
    is_token_BT: Tensor | None,
    document_ids_BT: Tensor | None,
    *,
    dtype: torch.dtype,
) -> AttentionSpec:
    """Without cache: over this call's tokens alone."""
    num_tokens = tokens_BT.shape[1]
    return AttentionSpec(
        num_tokens,
        num_tokens,
        dtype,
        is_token_BT=is_token_BT,
        source_is_token_BS=is_token_BT,
        document_ids_BT=document_ids_BT,
        source_document_ids_BS=document_ids_BT,
    )


def _spec_in_cache(call: CacheCall, *, dtype: torch.dtype) -> AttentionSpec:
    """Over cached positions and this call's."""
    index_BT, num_source = call.index_BT, call.num_source_tokens
    ids_BS = call.source_document_ids_BS
    return AttentionSpec(
        index_BT.shape[1],
        num_source,
        dtype,
        place_BT=index_BT,
        is_token_BT=call.is_token_BT,
        document_ids_BT=call.document_ids_BT,
        source_document_ids_BS=None if ids_BS is None else ids_BS[:, :num_source],
    )


def _real_tokens(padding_mask_BT: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if padding_mask_BT is None:
        return None
    _check_shape("padding_mask_BT", padding_mask_BT, shape)
    if padding_mask_BT.dtype == torch.bool:
        return padding_mask_BT
    is_token_BT = padding_mask_BT == 1
    if not bool((is_token_BT | (padding_mask_BT == 0)).all()):
        raise ValueError(
            "padding_mask_BT has values besides 0 and 1; give 1 (or True) at real tokens and "
            "0 (or False) at padding. Additive masks are not taken."
        )
    return is_token_BT


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, int]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but tokens_BT has {shape}; both must agree."
        )


def check_finite_logits(logits: Tensor) -> None:
    """Refuse to draw from what is no distribution: argmax would take NaN for the largest.

    Raises: ValueError if any value is NaN or infinite.
    """
    if not bool(logits.isfinite().all()):
        raise ValueError(
            "the model gives next-token scores that are no finite numbers: its weights are "
            "damaged, its training diverged, or the loop count is too far beyond training. Use an "
            "earlier checkpoint, copy the weights again, or ask for fewer loops."
        )
