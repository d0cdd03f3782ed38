"""What one forward call knows about its tokens: positions, mask, rotary table.

Built once per call from tokens, padding, documents and the cache's lengths; read by every
sublayer of every loop.
Letters: B batch, T query tokens, S source tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from depthdial.config import ModelConfig
from depthdial.layers.primitives import RotaryTable, rotary_table
from depthdial.layers.state import (
    AttentionMask,
    causal_mask,
    choose_attention,
    mask_from_allowed,
    narrow_rows,
)
from depthdial.model.loop_cache import CacheCall, LoopCache


@dataclass(frozen=True)
class ForwardContext:
    """Tensors of one call, [1 or B, ...].

    Fields:
        positions_BT: rotary positions, restarting at 0 in each document unless given.
        mask: causality, padding and documents.
        rotary: cosines and sines of the positions.
        dtype: of matrix products; the state itself keeps its own.
    """

    positions_BT: Tensor
    mask: AttentionMask
    rotary: RotaryTable
    dtype: torch.dtype

    def narrow(self, rows: Tensor) -> ForwardContext:
        """Keep some rows of the batch."""
        cos, sin = narrow_rows(self.rotary.cos, rows), narrow_rows(self.rotary.sin, rows)
        positions_BT = narrow_rows(self.positions_BT, rows)
        assert cos is not None and sin is not None and positions_BT is not None
        return replace(
            self,
            positions_BT=positions_BT,
            mask=self.mask.narrow(rows),
            rotary=RotaryTable(cos, sin),
        )


def compute_dtype(device: torch.device, weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, else the weights'."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return weight_dtype


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
    """Positions, mask and rotary table of one call.

    Args:
        tokens_BT: ids; only the shape and device are read.
        padding_mask_BT: 1 or True at real tokens, 0 or False at padding, any side.
        document_ids_BT: tokens attend within equal ids only.

    Returns: the context, and the cache's write plan (None without cache).
    Raises: ValueError for a wrong shape, or a padding mask with values besides 0 and 1.
    """
    shape = (tokens_BT.shape[0], tokens_BT.shape[1])
    _check_shape("positions_BT", positions_BT, shape)
    _check_shape("document_ids_BT", document_ids_BT, shape)
    real_BT = _real_tokens(padding_mask_BT, shape)
    num_tokens, device = shape[1], tokens_BT.device
    if cache is None:
        call = None
        source_tokens = num_tokens
        allowed_BTS = _allowed_in_call(num_tokens, real_BT, document_ids_BT, device)
    else:
        call = cache.open_call(shape, real_BT=real_BT, document_ids_BT=document_ids_BT)
        source_tokens = call.num_source_tokens
        allowed_BTS = _allowed_in_cache(call)
    impl = choose_attention(dtype, num_source_tokens=source_tokens, device_type=device.type)
    if allowed_BTS is None:
        mask = causal_mask(num_tokens, impl=impl, dtype=dtype, device=device)
        default_positions_BT = torch.arange(num_tokens, device=device)[None]
    else:
        mask = mask_from_allowed(allowed_BTS, impl=impl, dtype=dtype)
        # A token's position is the number of earlier tokens it may attend to: it counts from the
        # first real token of its own document, whatever stands before it in the buffer.
        default_positions_BT = (allowed_BTS.sum(dim=-1) - 1).clamp(min=0)
    positions_BT = default_positions_BT if positions_BT is None else positions_BT
    rotary = rotary_table(
        positions_BT,
        rotary_dim=round(config.head_dim * config.rotary_frac),
        theta=config.rope_theta,
        dtype=dtype,
    )
    return ForwardContext(positions_BT, mask, rotary, dtype), call


def _allowed_in_call(
    num_tokens: int, real_BT: Tensor | None, document_ids_BT: Tensor | None, device: torch.device
) -> Tensor | None:
    """Boolean [1 or B, T, T] without cache; None for plain causal attention."""
    if real_BT is None and document_ids_BT is None:
        return None
    allowed_BTS = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if real_BT is not None:
        allowed_BTS = allowed_BTS & real_BT[:, None, :] & real_BT[:, :, None]
    if document_ids_BT is not None:
        allowed_BTS = allowed_BTS & (document_ids_BT[:, None, :] == document_ids_BT[:, :, None])
    return allowed_BTS


def _allowed_in_cache(call: CacheCall) -> Tensor:
    """Boolean [B, T, S] over cached positions and this call's."""
    source_S = torch.arange(call.num_source_tokens, device=call.index_BT.device)
    allowed_BTS = (source_S <= call.index_BT[..., None]) & call.real_BT[..., None]
    if call.source_document_ids_BS is not None and call.document_ids_BT is not None:
        source_ids_BS = call.source_document_ids_BS[:, : call.num_source_tokens]
        same_document = source_ids_BS[:, None, :] == call.document_ids_BT[..., None]
        allowed_BTS = allowed_BTS & same_document
    return allowed_BTS


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
