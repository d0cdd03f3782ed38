"""What one forward call knows about its tokens: positions, masks, rotary tables.

Built once per call from tokens, padding, documents and the cache's lengths; read by every
sublayer of every loop.
Letters: B batch, T query tokens, S source tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from depthdial.cache.contiguous import LoopCache
from depthdial.cache.state import CacheCall
from depthdial.config import SLIDING, ModelConfig
from depthdial.layers.attention import AttentionView
from depthdial.layers.primitives import RotaryTable, rotary_table
from depthdial.layers.state import (
    AttentionImpl,
    AttentionMask,
    causal_mask,
    choose_attention,
    mask_from_allowed,
    narrow_rows,
)


@dataclass(frozen=True)
class ForwardContext:
    """Tensors of one call, [1 or B, ...].

    Fields:
        tokens_BT: ids.
        positions_BT: restarting at 0 in each document unless given.
        full: view of layers without a window: mask, rotation, and the local mask of models that
            mix loops.
        sliding: view of layers with a sliding window; None where the model has none.
        dtype: of matrix products; the state itself keeps its own.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    full: AttentionView
    sliding: AttentionView | None
    dtype: torch.dtype

    def view(self, letter: str) -> AttentionView:
        """The view of an attention layer of this layout letter."""
        if letter != SLIDING:
            return self.full
        assert self.sliding is not None, "a model with sliding layers has their view"
        return self.sliding

    def narrow(self, rows: Tensor | slice) -> ForwardContext:
        """Keep some rows of the batch."""
        positions_BT, tokens_BT = narrow_rows(self.positions_BT, rows), self.tokens_BT[rows]
        assert positions_BT is not None
        return replace(
            self,
            tokens_BT=tokens_BT,
            positions_BT=positions_BT,
            full=_narrow_view(self.full, rows, tokens_BT),
            sliding=None if self.sliding is None else _narrow_view(self.sliding, rows, tokens_BT),
        )


def _narrow_view(view: AttentionView, rows: Tensor | slice, tokens_BT: Tensor) -> AttentionView:
    rotary = view.rotary
    if rotary is not None:
        cos, sin = narrow_rows(rotary.cos, rows), narrow_rows(rotary.sin, rows)
        assert cos is not None and sin is not None
        rotary = RotaryTable(cos, sin)
    local_mask = None if view.local_mask is None else view.local_mask.narrow(rows)
    return AttentionView(view.mask.narrow(rows), rotary, local_mask, tokens_BT)


def compute_dtype(device: torch.device, weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, else the weights'."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return weight_dtype


@dataclass(frozen=True)
class _Reach:
    """Which source tokens each query may attend to, before any window.

    Fields:
        allowed_BTS: boolean [1 or B, T, S]; None for plain causal attention in this call.
        query_order_BT, source_order_BS: number of each real token in its row; their difference
            is the distance where attention is allowed.
    """

    allowed_BTS: Tensor | None
    query_order_BT: Tensor
    source_order_BS: Tensor
    impl: AttentionImpl
    dtype: torch.dtype

    def mask(self, window: int | None) -> AttentionMask:
        """The mask of layers that see `window` tokens, the query included; None for all."""
        allowed_BTS, order_BT = self.allowed_BTS, self.query_order_BT
        if allowed_BTS is None and window is None:
            num_tokens = order_BT.shape[1]
            return causal_mask(num_tokens, impl=self.impl, dtype=self.dtype, device=order_BT.device)
        # A table over all pairs of tokens, made only where something needs it.
        if window is not None:
            distance_BTS = order_BT[:, :, None] - self.source_order_BS[:, None, :]
            near_BTS = (distance_BTS >= 0) & (distance_BTS < window)
            allowed_BTS = near_BTS if allowed_BTS is None else allowed_BTS & near_BTS
        assert allowed_BTS is not None, "without a table there is a window"
        return mask_from_allowed(allowed_BTS, impl=self.impl, dtype=self.dtype)


def build_context(
    tokens_BT: Tensor,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    cache: LoopCache | None = None,
    positions_BT: Tensor | None = None,
    padding_mask_BT: Tensor | None = None,
    document_ids_BT: Tensor | None = None,
) -> tuple[ForwardContext, CacheCall | None]:
    """Positions, masks and rotary tables of one call.

    Args:
        tokens_BT: ids.
        padding_mask_BT: 1 or True at real tokens, 0 or False at padding, any side.
        document_ids_BT: tokens attend within equal ids only.

    Returns: the context, and the cache's write plan (None without cache).
    Raises: ValueError for a wrong shape, or a padding mask with values besides 0 and 1.
    """
    shape = (tokens_BT.shape[0], tokens_BT.shape[1])
    _check_shape("positions_BT", positions_BT, shape)
    _check_shape("document_ids_BT", document_ids_BT, shape)
    real_BT = _real_tokens(padding_mask_BT, shape)
    if cache is None:
        call = None
        reach = _reach_in_call(tokens_BT, real_BT, document_ids_BT, dtype=dtype)
    else:
        call = cache.open_call(shape, real_BT=real_BT, document_ids_BT=document_ids_BT)
        reach = _reach_in_cache(call, dtype=dtype)
    if positions_BT is None and reach.allowed_BTS is None:
        positions_BT = torch.arange(shape[1], device=tokens_BT.device)[None]
    elif positions_BT is None:
        # A token's position is the number of earlier tokens it may attend to: it counts from the
        # first real token of its own document, whatever stands before it in the buffer.
        positions_BT = (reach.allowed_BTS.sum(dim=-1) - 1).clamp(min=0)
    return _context(tokens_BT, positions_BT, config, reach=reach), call


def _context(
    tokens_BT: Tensor, positions_BT: Tensor, config: ModelConfig, *, reach: _Reach
) -> ForwardContext:
    local_window, sliding = config.loop.local_window, config.sliding
    full = AttentionView(
        mask=reach.mask(None),
        rotary=_rotary(
            positions_BT,
            config,
            frac=config.rotary_frac,
            theta=config.rope_theta,
            dtype=reach.dtype,
        ),
        local_mask=None if local_window is None else reach.mask(local_window),
        tokens_BT=tokens_BT,
    )
    sliding_view = None
    if sliding is not None:
        rotary = _rotary(
            positions_BT,
            config,
            frac=sliding.rotary_frac,
            theta=sliding.rope_theta,
            dtype=reach.dtype,
        )
        local_mask = None
        if local_window is not None:
            local_mask = reach.mask(min(local_window, sliding.window))
        sliding_view = AttentionView(reach.mask(sliding.window), rotary, local_mask, tokens_BT)
    return ForwardContext(tokens_BT, positions_BT, full, sliding_view, reach.dtype)


def _rotary(
    positions_BT: Tensor, config: ModelConfig, *, frac: float, theta: float, dtype: torch.dtype
) -> RotaryTable | None:
    if config.positions != "rotary":
        return None
    return rotary_table(
        positions_BT,
        rotary_dim=round(config.head_dim * frac),
        theta=theta,
        dtype=dtype,
        scaling=config.rope_scaling,
    )


def _reach_in_call(
    tokens_BT: Tensor,
    real_BT: Tensor | None,
    document_ids_BT: Tensor | None,
    *,
    dtype: torch.dtype,
) -> _Reach:
    """Without cache: this call's tokens alone."""
    num_tokens, device = tokens_BT.shape[1], tokens_BT.device
    impl = choose_attention(dtype, num_source_tokens=num_tokens, device_type=device.type)
    order_BT = torch.arange(num_tokens, device=device)[None]
    if real_BT is None and document_ids_BT is None:
        return _Reach(None, order_BT, order_BT, impl, dtype)
    allowed_BTS = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if real_BT is not None:
        allowed_BTS = allowed_BTS & real_BT[:, None, :] & real_BT[:, :, None]
        order_BT = real_BT.long().cumsum(dim=1)
    if document_ids_BT is not None:
        allowed_BTS = allowed_BTS & (document_ids_BT[:, None, :] == document_ids_BT[:, :, None])
    return _Reach(allowed_BTS, order_BT, order_BT, impl, dtype)


def _reach_in_cache(call: CacheCall, *, dtype: torch.dtype) -> _Reach:
    """Over cached positions and this call's."""
    index_BT, num_source = call.place.index_BT, call.place.num_source_tokens
    device = index_BT.device
    impl = choose_attention(dtype, num_source_tokens=num_source, device_type=device.type)
    source_S = torch.arange(num_source, device=device)
    allowed_BTS = (source_S <= index_BT[..., None]) & call.real_BT[..., None]
    if call.source_document_ids_BS is not None and call.document_ids_BT is not None:
        source_ids_BS = call.source_document_ids_BS[:, :num_source]
        same_document = source_ids_BS[:, None, :] == call.document_ids_BT[..., None]
        allowed_BTS = allowed_BTS & same_document
    return _Reach(allowed_BTS, index_BT, source_S[None], impl, dtype)


def _real_tokens(padding_mask_BT: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if padding_mask_BT is None:
        return None
    _check_shape("padding_mask_BT", padding_mask_BT, shape)
    if padding_mask_BT.dtype == torch.bool:
        return padding_mask_BT
    real_BT = padding_mask_BT == 1
    if not bool((real_BT | (padding_mask_BT == 0)).all()):
        raise ValueError(
            "padding_mask_BT has values besides 0 and 1; give 1 (or True) at real tokens and "
            "0 (or False) at padding. Additive masks are not taken."
        )
    return real_BT


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, int]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but tokens_BT has {shape}; both must agree."
        )
