"""What may attend to what, and the products that obey it: explicit, sdpa, flex.

A layer hands an `AttentionSpec` to its slot; only a product that needs a table over pairs of
tokens makes one, for a few queries at a time, so that memory grows with the length of a row and
not with its square. Small tables are kept for all layers of the call.
Letters: B batch, T query tokens, S source tokens, H query heads, G key/value heads,
C channels per head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

AttentionImpl = Literal["explicit", "sdpa", "flex"]

# In bf16 on a CPU two matrix products and a softmax beat the fused kernel on short rows; at this
# length the two are near even, beyond it the fused one wins (docs/results/attention.md).
EXPLICIT_MAX_SOURCE_TOKENS = 512
# Pairs (query, source) of one row, 4 MB in fp32: a table of at most so many is made once and kept
# for the call; a larger one is made for so many pairs at a time and never kept.
CHUNK_PAIRS = 2**20


class AttentionTable(NamedTuple):
    """Pairs of tokens as a product adds them to its scores.

    bias_BTS: [1 or B, 1, T, S], 0 where allowed and a large negative number elsewhere.
    has_key_BT: [1 or B, T], False where a query may attend to nothing (its output is 0); None
    where every query has a key.
    """

    bias_BTS: Tensor
    has_key_BT: Tensor | None

    def narrow(self, rows: Tensor | slice) -> AttentionTable:
        """Keep some rows of the batch."""
        bias_BTS = narrow_rows(self.bias_BTS, rows)
        assert bias_BTS is not None
        return AttentionTable(bias_BTS, narrow_rows(self.has_key_BT, rows))


@dataclass(frozen=True)
class AttentionSpec:
    """What each query of one call may attend to; built once per call, never a table of all pairs.

    A query attends to a source token that stands at its own place or before it, is real, of the
    same document, not left out, and fewer than `window` tokens away.

    Fields:
        num_queries, num_sources: T and S.
        dtype: of the products; impl: which product computes it.
        place_BT: source column at which each query stands, [1 or B, T]; None for query t at
            column t (a call without a cache).
        is_token_BT: queries that are no padding; None for all. Padding attends to nothing.
        source_is_token_BS: source tokens that are no padding; None for all.
        document_ids_BT, source_document_ids_BS: of queries and source tokens; None for both where
            documents are not apart.
        window: most tokens that a query sees, itself included; None for all.
        missing_BS: source tokens that are left out; None for none.
        table: the table of all pairs where it is small; None where it is made in chunks, or not
            needed.
    """

    num_queries: int
    num_sources: int
    dtype: torch.dtype
    impl: AttentionImpl = "sdpa"
    place_BT: Tensor | None = None
    is_token_BT: Tensor | None = None
    source_is_token_BS: Tensor | None = None
    document_ids_BT: Tensor | None = None
    source_document_ids_BS: Tensor | None = None
    window: int | None = None
    missing_BS: Tensor | None = None
    table: AttentionTable | None = field(default=None, repr=False)

    @property
    def is_plain(self) -> bool:
        """Plain causal attention over this call's own tokens: no product needs a table."""
        return all(
            x is None
            for x in (
                self.place_BT,
                self.is_token_BT,
                self.source_is_token_BS,
                self.document_ids_BT,
                self.window,
                self.missing_BS,
            )
        )

    def for_layer(self, window: int | None, *, device: torch.device) -> AttentionSpec:
        """What layers that see `window` tokens attend to, by the product that is fastest there."""
        spec = replace(self, window=window)
        impl = choose_attention(
            self.dtype,
            num_source_tokens=self.num_sources,
            device_type=device.type,
            is_plain=spec.is_plain,
        )
        return replace(spec, impl=impl).ready(device)

    def ready(self, device: torch.device) -> AttentionSpec:
        """With the table of all pairs where a product wants one and it is small."""
        wants = not self.is_plain or self.impl == "explicit"
        is_small = self.num_queries * self.num_sources <= CHUNK_PAIRS
        if not wants or not is_small or self.impl == "flex":
            return self
        return replace(self, table=self.table_of(0, self.num_queries, device=device))

    def narrow(self, rows: Tensor | slice) -> AttentionSpec:
        """Keep some rows of the batch."""
        return replace(
            self,
            **{name: narrow_rows(getattr(self, name), rows) for name in _ROW_FIELDS},
            table=None if self.table is None else self.table.narrow(rows),
        )

    def without(self, missing_BS: Tensor) -> AttentionSpec:
        """Leave out the source tokens that are True, for every query of their row.

        Each query must keep a key: which queries have one stays as it is.
        """
        table = self.table
        if table is not None:
            blocked = blocked_score(table.bias_BTS.dtype)
            bias_BTS = table.bias_BTS.masked_fill(missing_BS[:, None, None, :], blocked)
            table = AttentionTable(bias_BTS, table.has_key_BT)
        return replace(self, missing_BS=missing_BS, table=table)

    def sources_of(self, start: int, stop: int) -> tuple[int, int]:
        """Columns [first, last) outside which no query of [start, stop) sees a token."""
        if self.place_BT is not None:
            if self.place_BT.device.type != "cpu" or torch.compiler.is_compiling():
                # Reading the last place would wait for the device.
                return 0, self.num_sources
            last = int(self.place_BT[:, start:stop].max()) + 1
            return 0, min(last, self.num_sources)
        # Padding between two tokens lets a window reach further back than its columns.
        has_padding = self.source_is_token_BS is not None
        if self.window is None or has_padding:
            return 0, stop
        return max(0, start - self.window + 1), stop

    def allowed(
        self,
        start: int,
        stop: int,
        *,
        first: int = 0,
        last: int | None = None,
        device: torch.device,
    ) -> Tensor:
        """Whether queries [start, stop) attend to source columns [first, last), [1 or B, T, S]."""
        last = self.num_sources if last is None else last
        column_S = torch.arange(first, last, device=device)
        if self.place_BT is None:
            place_BT = torch.arange(start, stop, device=device)[None]
        else:
            place_BT = self.place_BT[:, start:stop]
        allowed_BTS = column_S <= place_BT[..., None]
        if self.is_token_BT is not None:
            allowed_BTS = allowed_BTS & self.is_token_BT[:, start:stop, None]
        if self.source_is_token_BS is not None:
            allowed_BTS = allowed_BTS & self.source_is_token_BS[:, None, first:last]
        if self.document_ids_BT is not None:
            assert self.source_document_ids_BS is not None, "documents are apart on both sides"
            source_ids_BS = self.source_document_ids_BS[:, first:last]
            ids_BT = self.document_ids_BT[:, start:stop]
            allowed_BTS = allowed_BTS & (source_ids_BS[:, None, :] == ids_BT[..., None])
        if self.window is not None:
            order_BT, order_BS = place_BT, column_S[None]
            if self.source_is_token_BS is not None:
                # Distance counts real tokens, so that padding does not use up the window.
                order_BS = self.source_is_token_BS.long().cumsum(dim=1)
                order_BT = order_BS.gather(1, place_BT.expand(len(order_BS), -1))
                order_BS = order_BS[:, first:last]
            distance_BTS = order_BT[:, :, None] - order_BS[:, None, :]
            allowed_BTS = allowed_BTS & (distance_BTS < self.window)
        if self.missing_BS is not None:
            allowed_BTS = allowed_BTS & ~self.missing_BS[:, None, first:last]
        return allowed_BTS

    def table_of(
        self,
        start: int,
        stop: int,
        *,
        first: int = 0,
        last: int | None = None,
        device: torch.device,
    ) -> AttentionTable:
        """The table of queries [start, stop) and source columns [first, last)."""
        allowed_BTS = self.allowed(start, stop, first=first, last=last, device=device)
        bias_BTS = torch.zeros(allowed_BTS.shape, dtype=self.dtype, device=device)
        bias_BTS = bias_BTS.masked_fill(~allowed_BTS, blocked_score(self.dtype))[:, None]
        if self.is_plain:
            return AttentionTable(bias_BTS, None)
        return AttentionTable(bias_BTS, allowed_BTS.any(dim=-1))

    def default_positions(self, device: torch.device) -> Tensor:
        """Position of each query, [1 or B, T]: the number of earlier tokens it may attend to.

        Windows and left-out tokens do not count. It starts at 0 with the first real token of a
        document, whatever stands before it in the row. Linear memory: ranks instead of pairs.
        """
        if self.place_BT is None:
            place_BT = torch.arange(self.num_queries, device=device)[None]
        else:
            place_BT = self.place_BT
        has_places = self.source_is_token_BS is None and self.source_document_ids_BS is None
        if has_places:
            rank_BT = place_BT
        else:
            rank_BS = self._ranks(device)
            # A padding query stands at no column; its position is never read.
            columns_BT = place_BT.clamp(max=self.num_sources - 1).expand(len(rank_BS), -1)
            rank_BT = rank_BS.gather(1, columns_BT)
        if self.is_token_BT is not None:
            rank_BT = rank_BT * self.is_token_BT
        return rank_BT

    def _ranks(self, device: torch.device) -> Tensor:
        """Number of earlier real source tokens of the same document, [1 or B, S]."""
        if self.source_document_ids_BS is None:
            assert self.source_is_token_BS is not None
            return (self.source_is_token_BS.long().cumsum(dim=1) - 1).clamp(min=0)
        ids_BS = self.source_document_ids_BS
        if self.source_is_token_BS is None:
            is_token_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        else:
            is_token_BS = self.source_is_token_BS.expand(len(ids_BS), -1)
        # Equal ids side by side, in their order: a token's rank is its distance from their first.
        order_BS = ids_BS.argsort(dim=1, stable=True)
        sorted_ids_BS, sorted_is_token_BS = (
            ids_BS.gather(1, order_BS),
            is_token_BS.gather(1, order_BS),
        )
        counts_BS = sorted_is_token_BS.long().cumsum(dim=1)
        starts_BS = torch.ones_like(sorted_is_token_BS)
        starts_BS[:, 1:] = sorted_ids_BS[:, 1:] != sorted_ids_BS[:, :-1]
        before_BS = torch.where(starts_BS, counts_BS - sorted_is_token_BS.long(), 0).cummax(dim=1)[
            0
        ]
        ranks_BS = (counts_BS - before_BS - 1).clamp(min=0)
        return torch.empty_like(ranks_BS).scatter(1, order_BS, ranks_BS)


_ROW_FIELDS = tuple(f.name for f in fields(AttentionSpec) if f.name.endswith(("_BT", "_BS")))


def blocked_score(dtype: torch.dtype) -> float:
    """What stands in a table where a query may not attend."""
    # Finite, so that a fully masked row softmaxes to finite numbers; has_key_BT zeroes it after.
    return torch.finfo(dtype).min / 2


def narrow_rows(tensor: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    """Select rows of dimension 0; a tensor shared by the whole batch (size 1) stays."""
    if tensor is None or tensor.shape[0] == 1:
        return tensor
    if isinstance(rows, slice):
        return tensor[rows]
    return tensor.index_select(0, rows.to(tensor.device))


def choose_attention(
    dtype: torch.dtype, *, num_source_tokens: int, device_type: str, is_plain: bool = True
) -> AttentionImpl:
    """The faster product for this dtype, length, device and kind of spec.

    On CUDA a spec that is not plain goes to flex attention, if it can be compiled there.
    """
    if device_type == "cuda" and not is_plain and has_flex():
        return "flex"
    short_bf16 = dtype == torch.bfloat16 and num_source_tokens <= EXPLICIT_MAX_SOURCE_TOKENS
    return "explicit" if short_bf16 and device_type == "cpu" else "sdpa"


def has_flex() -> bool:
    """Whether flex attention can be compiled for the GPU of this process."""
    if not torch.cuda.is_available():
        return False
    from torch.utils._triton import has_triton

    # Triton kernels; older cards lack what they need.
    return torch.cuda.get_device_capability() >= (8, 0) and has_triton()


def attention(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, *, spec: AttentionSpec, scale: float
) -> Tensor:
    """softmax(q k^T * scale + bias) v with H / G query heads per key head.

    Returns: y [B, T, H, C]; 0 where the spec leaves a query without keys.
    """
    if spec.impl == "flex" and not spec.is_plain:
        return _flex_attention(q_BTHC, k_BSGC, v_BSGC, spec, scale)
    if spec.table is not None:
        return _with_table(q_BTHC, k_BSGC, v_BSGC, spec.table, spec.impl, scale)
    if spec.is_plain:
        return _sdpa(q_BTHC, k_BSGC, v_BSGC, None, scale)
    return _in_chunks(q_BTHC, k_BSGC, v_BSGC, spec, scale)


def _in_chunks(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, spec: AttentionSpec, scale: float
) -> Tensor:
    """A few queries at a time, each with a table of its own that nothing keeps."""

    def chunk(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, int, int, int]) -> Tensor:
        start, stop, first, last = bounds
        table = spec.table_of(start, stop, first=first, last=last, device=q.device)
        return _with_table(q, k, v, table, "sdpa", scale)

    step = max(1, CHUNK_PAIRS // spec.num_sources)
    parts = []
    for start in range(0, spec.num_queries, step):
        stop = min(start + step, spec.num_queries)
        first, last = spec.sources_of(start, stop)
        inputs = q_BTHC[:, start:stop], k_BSGC[:, first:last], v_BSGC[:, first:last]
        bounds = (start, stop, first, last)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            # A backward would keep every chunk's table, for every layer: it makes them again.
            parts.append(checkpoint(chunk, *inputs, bounds, use_reentrant=False))
        else:
            parts.append(chunk(*inputs, bounds))
    return torch.cat(parts, dim=1)


def _with_table(
    q_BTHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    table: AttentionTable,
    impl: AttentionImpl,
    scale: float,
) -> Tensor:
    if impl == "explicit":
        y_BTHC = _explicit(q_BTHC, k_BSGC, v_BSGC, table.bias_BTS, scale)
    else:
        y_BTHC = _sdpa(q_BTHC, k_BSGC, v_BSGC, table.bias_BTS, scale)
    if table.has_key_BT is None:
        return y_BTHC
    return y_BTHC * table.has_key_BT[..., None, None].to(y_BTHC.dtype)


def _sdpa(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, bias_BTS: Tensor | None, scale: float
) -> Tensor:
    """torch's fused product; plain causal without a bias."""
    return F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BSGC.transpose(1, 2),
        v_BSGC.transpose(1, 2),
        attn_mask=bias_BTS,
        is_causal=bias_BTS is None,
        scale=scale,
        enable_gqa=q_BTHC.shape[2] != k_BSGC.shape[2],
    ).transpose(1, 2)


def _explicit(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, bias_BTS: Tensor, scale: float
) -> Tensor:
    """Two batched matrix products around a softmax."""
    batch, num_tokens, num_heads, head_dim = q_BTHC.shape
    num_groups = k_BSGC.shape[2]
    per_group = num_heads // num_groups
    # Query heads of one group are stacked along the token dimension, so that one batched matrix
    # product per key head serves them all and keys are never copied per query head.
    q = (q_BTHC * scale).view(batch, num_tokens, num_groups, per_group, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_groups, per_group * num_tokens, head_dim)
    scores = q @ k_BSGC.permute(0, 2, 3, 1)
    by_head = scores.view(batch, num_groups, per_group, num_tokens, -1)
    scores = (by_head + bias_BTS[:, :, None]).view(scores.shape)
    y = scores.softmax(dim=-1).to(v_BSGC.dtype) @ v_BSGC.permute(0, 2, 1, 3)
    y = y.view(batch, num_groups, per_group, num_tokens, head_dim).permute(0, 3, 1, 2, 4)
    return y.reshape(batch, num_tokens, num_heads, head_dim)


def _flex_attention(
    q_BTHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, spec: AttentionSpec, scale: float
) -> Tensor:
    """torch's flex attention: the spec becomes a block mask, blocks without a pair are skipped."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = q_BTHC.device
    allowed = _pair_function(spec, device=device)
    block_mask = create_block_mask(
        allowed, q_BTHC.shape[0], None, spec.num_queries, spec.num_sources, device=str(device)
    )
    run: Any = flex_attention
    if device.type == "cuda":
        run = torch.compile(flex_attention, dynamic=True)
    y_BHTC = run(
        *(x.transpose(1, 2) for x in (q_BTHC, k_BSGC, v_BSGC)),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_BTHC.shape[2] != k_BSGC.shape[2],
    )
    # Queries without a key: flex gives 0 for them already.
    return y_BHTC.transpose(1, 2)


def _pair_function(spec: AttentionSpec, *, device: torch.device) -> Any:
    """(b, head, query, column) -> whether the query attends to that column."""

    def row_of(tensor: Tensor, b: Tensor) -> Tensor | int:
        return 0 if tensor.shape[0] == 1 else b

    order_BS = None
    if spec.window is not None and spec.source_is_token_BS is not None:
        order_BS = spec.source_is_token_BS.long().cumsum(dim=1)

    def allowed(b: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        place = query
        if spec.place_BT is not None:
            place = spec.place_BT[row_of(spec.place_BT, b), query]
        pair = column <= place
        if spec.is_token_BT is not None:
            pair = pair & spec.is_token_BT[row_of(spec.is_token_BT, b), query]
        if spec.source_is_token_BS is not None:
            pair = pair & spec.source_is_token_BS[row_of(spec.source_is_token_BS, b), column]
        if spec.document_ids_BT is not None and spec.source_document_ids_BS is not None:
            of_query = spec.document_ids_BT[row_of(spec.document_ids_BT, b), query]
            ids_BS = spec.source_document_ids_BS
            pair = pair & (ids_BS[row_of(ids_BS, b), column] == of_query)
        if spec.window is not None:
            here, there = place, column
            if order_BS is not None:
                row = row_of(order_BS, b)
                here, there = order_BS[row, place], order_BS[row, column]
            pair = pair & (here - there < spec.window)
        if spec.missing_BS is not None:
            pair = pair & ~spec.missing_BS[row_of(spec.missing_BS, b), column]
        return pair

    return allowed
