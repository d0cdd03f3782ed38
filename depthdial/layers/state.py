"""What a layer sees: of a cache its slot, of the call a view. Protocols alone.

A slot is bound to one layer, one loop, and the rows and positions of one call; it never advances.
Slots that store nothing are in `cache/uncached.py`, those of a cache in `cache/slots.py`.
Letters: B batch, T query tokens, S source tokens, H query heads, G key/value heads,
C channels per head, N experts of a token, E experts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from depthdial.layers.attention_ops import AttentionSpec, narrow_rows
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
        is_token_BT: False at padding, which must change neither a state nor a sum over tokens; None
            where every token is real.
        starts_BT: True at the first token of each document, before which a state is empty again;
            None where the rows hold one document, that of earlier calls on a cache.
    """

    is_token_BT: Tensor | None
    starts_BT: Tensor | None

    def narrow(self, rows: Tensor | slice) -> TokenView:
        """Keep some rows of the batch."""
        return TokenView(narrow_rows(self.is_token_BT, rows), narrow_rows(self.starts_BT, rows))


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


State = tuple[Tensor, ...]
"""Everything that a recurrent layer knows of the tokens behind it, [B, ...] each. All zeros is the
state before the first token."""


class RecurrentSlot(Protocol):
    """The state of one recurrent layer in one loop.

    The layer starts from `get()`, reads the call's tokens, and gives the result to `set`, once per
    pass. Padding leaves a row's state as it is; `TokenView.starts_BT` says before which tokens a
    state is zero again.
    """

    def get(self) -> State | None:
        """The state behind the last stored token of each row; None where no row has one."""
        ...

    def set(self, state: State) -> None:
        """Keep the state behind this call's last token."""
        ...


class Routes(NamedTuple):
    """What a router decided for the tokens of one pass.

    Fields:
        experts_BTN: numbers of the chosen experts, int64.
        weights_BTN: weight of each.
        balance_B: auxiliary loss of each row (sequence-level), for losses that ask for it.
        load_BE: tokens of each row that go to each expert.
    """

    experts_BTN: Tensor
    weights_BTN: Tensor
    balance_B: Tensor
    load_BE: Tensor


class RouteSlot(Protocol):
    """Expert choices of one routed layer in one loop.

        routes = slot.replay()
        if routes is None:
            routes = slot.record(route(x))

    Later loops then send a token to the experts of its first loop. A layer that routes anew in
    every loop records in each.
    """

    def replay(self) -> Routes | None:
        """What was recorded for these tokens in an earlier loop of this call; None where none."""
        ...

    def record(self, routes: Routes) -> Routes:
        """Keep the routes of this pass. Returns: those to use, for every row."""
        ...


Slot = KVSlot | RecurrentSlot | RouteSlot
