"""What a layer sees of a cache: slots. The mask and the attention product live here too.

A slot writes one call's keys and values at the current positions and attends; it never
advances. Slots that store nothing are here, those over stored tensors in `cache/slots.py`. Which
slot serves which loop is decided in `cache/contiguous.py`.
Letters: B batch, T query tokens, S source tokens, H query heads, G key/value heads,
C channels per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from depthdial.layers.primitives import RotaryTable

AttentionImpl = Literal["explicit", "sdpa"]

# In bf16 on a CPU two matrix products and a softmax beat the fused kernel on short rows; at this
# length the two are near even, beyond it the fused one wins (docs/results/attention.md).
EXPLICIT_MAX_SOURCE_TOKENS = 512


@dataclass(frozen=True)
class AttentionMask:
    """Who may attend to whom, built once per forward.

    Fields:
        bias_BTS: [1 or B, 1, T, S], 0 where allowed and a large negative number elsewhere;
            None for plain causal attention over this call's own tokens.
        has_key_BT: [B, T] False where a query may attend to nothing (its output is 0);
            None when every query has a key.
        impl: `explicit` matrix products with a softmax, or torch's fused `sdpa`.
    """

    bias_BTS: Tensor | None
    has_key_BT: Tensor | None
    impl: AttentionImpl

    def narrow(self, rows: Tensor | slice) -> AttentionMask:
        """Keep some rows of the batch."""
        return AttentionMask(
            narrow_rows(self.bias_BTS, rows), narrow_rows(self.has_key_BT, rows), self.impl
        )

    def without(self, missing_BS: Tensor) -> AttentionMask:
        """Block the source tokens that are True, for every query of their row.

        Each query must keep a key: `has_key_BT` stays as it is.
        """
        assert self.bias_BTS is not None, "the mask of a cached call has a bias"
        blocked = _blocked(self.bias_BTS.dtype)
        bias_BTS = self.bias_BTS.masked_fill(missing_BS[:, None, None, :], blocked)
        return AttentionMask(bias_BTS, self.has_key_BT, self.impl)


class AttentionView(NamedTuple):
    """What one kind of attention layer knows of this call's tokens.

    Fields:
        mask: who may attend to whom, this layer's window included.
        rotary: None where nothing rotates.
        local_mask: of a slot's own keys where it also shares the first loop's; else None.
        tokens_BT: ids, for value embeddings.
    """

    mask: AttentionMask
    rotary: RotaryTable | None
    local_mask: AttentionMask | None
    tokens_BT: Tensor

    def narrow(self, rows: Tensor | slice) -> AttentionView:
        """Keep some rows of the batch."""
        rotary = self.rotary
        if rotary is not None:
            rotary = RotaryTable(*(narrow_rows(table, rows) for table in rotary))
        local_mask = None if self.local_mask is None else self.local_mask.narrow(rows)
        return AttentionView(self.mask.narrow(rows), rotary, local_mask, self.tokens_BT[rows])


class TokenView(NamedTuple):
    """What a layer without attention knows of this call's tokens.

    Fields:
        real_BT: False at padding, which must change neither a state nor a sum over tokens; None
            where every token is real.
        starts_BT: True at the first token of each document, before which a state is empty again;
            None where the rows hold one document, that of earlier calls on a cache.
    """

    real_BT: Tensor | None
    starts_BT: Tensor | None

    def narrow(self, rows: Tensor | slice) -> TokenView:
        """Keep some rows of the batch."""
        return TokenView(narrow_rows(self.real_BT, rows), narrow_rows(self.starts_BT, rows))


def narrow_rows(tensor: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    """Select rows of dimension 0; a tensor shared by the whole batch (size 1) stays."""
    if tensor is None or tensor.shape[0] == 1:
        return tensor
    if isinstance(rows, slice):
        return tensor[rows]
    return tensor.index_select(0, rows.to(tensor.device))


def choose_attention(
    dtype: torch.dtype, *, num_source_tokens: int, device_type: str
) -> AttentionImpl:
    """The faster product for this dtype, length and device."""
    short_bf16 = dtype == torch.bfloat16 and num_source_tokens <= EXPLICIT_MAX_SOURCE_TOKENS
    return "explicit" if short_bf16 and device_type == "cpu" else "sdpa"


def causal_mask(
    num_tokens: int, *, impl: AttentionImpl, dtype: torch.dtype, device: torch.device
) -> AttentionMask:
    """Plain causal attention over this call's tokens."""
    if impl == "sdpa":
        return AttentionMask(None, None, impl)
    allowed = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    return AttentionMask(_bias(allowed[None], dtype), None, impl)


def mask_from_allowed(
    allowed_BTS: Tensor, *, impl: AttentionImpl, dtype: torch.dtype
) -> AttentionMask:
    """From a boolean table; a query with no allowed key gets 0, not NaN."""
    return AttentionMask(_bias(allowed_BTS, dtype), allowed_BTS.any(dim=-1), impl)


def _bias(allowed_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(allowed_BTS.shape, dtype=dtype, device=allowed_BTS.device)
    return bias.masked_fill(~allowed_BTS, _blocked(dtype))[:, None]


def _blocked(dtype: torch.dtype) -> float:
    # Finite, so that a fully masked row softmaxes to finite numbers; has_key_BT zeroes it after.
    return torch.finfo(dtype).min / 2


class SharedKV(Protocol):
    """Keys and values that another loop wrote, as a later loop of the same layer sees them."""

    def attend(self, q_BTHC: Tensor, *, mask: AttentionMask, scale: float) -> Tensor:
        """Attend without storing. Returns y [B, T, H, C]."""
        ...


class KVSlot(Protocol):
    """Keys and values of one (layer, loop) as a layer sees them.

    Fields:
        is_read_only: the layer computes no keys and values and passes None for both.
        shared: the first loop's, where a layer mixes them with its own; else None.
    """

    @property
    def is_read_only(self) -> bool: ...

    @property
    def shared(self) -> SharedKV | None: ...

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        mask: AttentionMask,
        scale: float,
    ) -> Tensor:
        """Store k and v at the current positions and attend. Returns y [B, T, H, C]."""
        ...


class UncachedSlot:
    """Stores nothing: attention over this call's own tokens (training, scoring)."""

    is_read_only = False

    def __init__(self, shared: SharedKV | None = None) -> None:
        self.shared = shared

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        mask: AttentionMask,
        scale: float,
    ) -> Tensor:
        k_BTGC, v_BTGC = written(k_BTGC, v_BTGC)
        return attention(q_BTHC, k_BTGC, v_BTGC, mask=mask, scale=scale)


class RecordingSlot:
    """An uncached slot that keeps this call's keys and values, for a later loop to share.

    Fields:
        k, v: [B, T, G, C] each; None before the first `attend`.
    """

    is_read_only = False
    shared = None

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        mask: AttentionMask,
        scale: float,
    ) -> Tensor:
        self.k, self.v = written(k_BTGC, v_BTGC)
        return attention(q_BTHC, self.k, self.v, mask=mask, scale=scale)


class GivenKV:
    """Keys and values [B, S, G, C] given as tensors; a `SharedKV` without a cache."""

    def __init__(self, k_BSGC: Tensor, v_BSGC: Tensor) -> None:
        self.k, self.v = k_BSGC, v_BSGC

    def attend(self, q_BTHC: Tensor, *, mask: AttentionMask, scale: float) -> Tensor:
        return attention(q_BTHC, self.k, self.v, mask=mask, scale=scale)


class ReadOnlySlot:
    """Reads what another loop wrote, this call's tokens included."""

    is_read_only = True
    shared = None

    def __init__(self, entries: SharedKV) -> None:
        self.entries = entries

    def attend(
        self,
        q_BTHC: Tensor,
        k_BTGC: Tensor | None,
        v_BTGC: Tensor | None,
        *,
        mask: AttentionMask,
        scale: float,
    ) -> Tensor:
        assert k_BTGC is None and v_BTGC is None, "a read-only slot takes no keys and values"
        return self.entries.attend(q_BTHC, mask=mask, scale=scale)


def written(k_BTGC: Tensor | None, v_BTGC: Tensor | None) -> tuple[Tensor, Tensor]:
    """The keys and values of a slot that stores."""
    assert k_BTGC is not None and v_BTGC is not None, "this slot stores keys and values"
    return k_BTGC, v_BTGC


def attention(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, *, mask: AttentionMask, scale: float
) -> Tensor:
    """softmax(q k^T * scale + bias) v with H / G query heads per key head.

    Returns: y [B, T, H, C]; 0 where the mask leaves a query without keys.
    """
    if mask.impl == "explicit":
        y_BTHC = _explicit_attention(q_BTHC, k_BSGC, v_BSGC, mask=mask, scale=scale)
    else:
        y_BTHC = F.scaled_dot_product_attention(
            q_BTHC.transpose(1, 2),
            k_BSGC.transpose(1, 2),
            v_BSGC.transpose(1, 2),
            attn_mask=mask.bias_BTS,
            is_causal=mask.bias_BTS is None,
            scale=scale,
            enable_gqa=q_BTHC.shape[2] != k_BSGC.shape[2],
        ).transpose(1, 2)
    if mask.has_key_BT is None:
        return y_BTHC
    return y_BTHC * mask.has_key_BT[..., None, None].to(y_BTHC.dtype)


def _explicit_attention(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, *, mask: AttentionMask, scale: float
) -> Tensor:
    batch, num_tokens, num_heads, head_dim = q_BTHC.shape
    num_groups = k_BSGC.shape[2]
    per_group = num_heads // num_groups
    # Query heads of one group are stacked along the token dimension, so that one batched matrix
    # product per key head serves them all and keys are never copied per query head.
    q = (q_BTHC * scale).view(batch, num_tokens, num_groups, per_group, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_groups, per_group * num_tokens, head_dim)
    scores = q @ k_BSGC.permute(0, 2, 3, 1)
    if mask.bias_BTS is not None:
        by_head = scores.view(batch, num_groups, per_group, num_tokens, -1)
        scores = (by_head + mask.bias_BTS[:, :, None]).view(scores.shape)
    y = scores.softmax(dim=-1).to(v_BSGC.dtype) @ v_BSGC.permute(0, 2, 1, 3)
    y = y.view(batch, num_groups, per_group, num_tokens, head_dim).permute(0, 3, 1, 2, 4)
    return y.reshape(batch, num_tokens, num_heads, head_dim)
