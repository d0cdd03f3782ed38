"""What a layer sees of a cache: slots; and of its call: a view.

A slot writes one call's keys and values at the current positions and attends; it never
advances. Slots that store nothing are here, those over stored tensors in `cache/slots.py`. Which
slot serves which loop is decided in `cache/contiguous.py`.
Letters: B batch, T query tokens, S source tokens, H query heads, G key/value heads,
C channels per head.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from depthdial.layers.attention_ops import AttentionSpec, attention, narrow_rows
from depthdial.layers.primitives import RotaryTable


class AttentionView(NamedTuple):
    """What one kind of attention layer knows of this call's tokens.

    Fields:
        spec: what may attend to what, this layer's window included.
        rotary: None where nothing rotates.
        local_spec: of a slot's own keys where it also shares the first loop's; else None.
        tokens_BT: ids, for value embeddings.
    """

    spec: AttentionSpec
    rotary: RotaryTable | None
    local_spec: AttentionSpec | None
    tokens_BT: Tensor

    def narrow(self, rows: Tensor | slice) -> AttentionView:
        """Keep some rows of the batch."""
        rotary = self.rotary
        if rotary is not None:
            rotary = RotaryTable(*(narrow_rows(table, rows) for table in rotary))
        local_spec = None if self.local_spec is None else self.local_spec.narrow(rows)
        return AttentionView(self.spec.narrow(rows), rotary, local_spec, self.tokens_BT[rows])


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


class SharedKV(Protocol):
    """Keys and values that another loop wrote, as a later loop of the same layer sees them."""

    def attend(self, q_BTHC: Tensor, *, spec: AttentionSpec, scale: float) -> Tensor:
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
        spec: AttentionSpec,
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
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        k_BTGC, v_BTGC = written(k_BTGC, v_BTGC)
        return attention(q_BTHC, k_BTGC, v_BTGC, spec=spec, scale=scale)


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
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        self.k, self.v = written(k_BTGC, v_BTGC)
        return attention(q_BTHC, self.k, self.v, spec=spec, scale=scale)


class GivenKV:
    """Keys and values [B, S, G, C] given as tensors; a `SharedKV` without a cache."""

    def __init__(self, k_BSGC: Tensor, v_BSGC: Tensor) -> None:
        self.k, self.v = k_BSGC, v_BSGC

    def attend(self, q_BTHC: Tensor, *, spec: AttentionSpec, scale: float) -> Tensor:
        return attention(q_BTHC, self.k, self.v, spec=spec, scale=scale)


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
        spec: AttentionSpec,
        scale: float,
    ) -> Tensor:
        assert k_BTGC is None and v_BTGC is None, "a read-only slot takes no keys and values"
        return self.entries.attend(q_BTHC, spec=spec, scale=scale)


def written(k_BTGC: Tensor | None, v_BTGC: Tensor | None) -> tuple[Tensor, Tensor]:
    """The keys and values of a slot that stores."""
    assert k_BTGC is not None and v_BTGC is not None, "this slot stores keys and values"
    return k_BTGC, v_BTGC
