"""Layers and a cache policy as somebody outside the package would write them.

R is a recurrence over tokens with one number of state per channel, M a router over four small
experts, `last_8_and_first` a policy that drops tokens. Nothing here reaches into the package.
Letters: B batch, T tokens, D model width, E experts, N experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthdial.cache.buffers import KVBuffer
from depthdial.cache.entries import Entries, write_place
from depthdial.cache.policies import MECHANISMS, register_policy
from depthdial.config import LETTERS, POLICIES, CacheRule, LayerFacts
from depthdial.layers.attention_ops import attention
from depthdial.layers.layer_type import LayerType
from depthdial.layers.primitives import project
from depthdial.layers.state import Routes
from depthdial.model.sublayer import LAYERS, register_layer

NUM_EXPERTS, PER_TOKEN = 4, 2


class Recurrence(nn.Module):
    """h_t = a_t h_{t-1} + (1 - a_t) v_t, y = W h, with a and v linear maps of x."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.decay = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.rate = nn.Parameter(torch.zeros(d_model))

    def forward(self, x_BTD: Tensor, *, slot, view, deltas=None) -> Tensor:
        deltas = deltas or {}
        decay_BTD = torch.sigmoid(project(self.decay, x_BTD, deltas.get("decay")) + self.rate)
        value_BTD = project(self.value, x_BTD, deltas.get("value"))
        state, hidden = slot.get(), []
        h_BD = torch.zeros_like(x_BTD[:, 0]) if state is None else state[0]
        for t in range(x_BTD.shape[1]):
            if view.starts_BT is not None:
                h_BD = torch.where(view.starts_BT[:, t, None], 0, h_BD)
            next_BD = torch.lerp(value_BTD[:, t], h_BD, decay_BTD[:, t])
            if view.is_token_BT is not None:
                next_BD = torch.where(view.is_token_BT[:, t, None], next_BD, h_BD)
            h_BD = next_BD
            hidden.append(h_BD)
        slot.set((h_BD,))
        return project(self.out, torch.stack(hidden, dim=1), deltas.get("out"))


class Experts(nn.Module):
    """The two best of four square matrices, by a router whose choice later loops may replay."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, NUM_EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.zeros(NUM_EXPERTS, d_model, d_model))

    def forward(self, x_BTD: Tensor, *, slot, view) -> Tensor:
        routes = slot.replay()
        if routes is None:
            routes = slot.record(self.route(x_BTD, view.is_token_BT))
        chosen_BTNDD = self.experts[routes.experts_BTN]
        y_BTND = torch.einsum("btnij,btj->btni", chosen_BTNDD, x_BTD)
        return (routes.weights_BTN[..., None] * y_BTND).sum(dim=2)

    def route(self, x_BTD: Tensor, is_token_BT: Tensor | None) -> Routes:
        probability_BTE = self.router(x_BTD).softmax(dim=-1)
        weights_BTN, experts_BTN = probability_BTE.topk(PER_TOKEN, dim=-1)
        is_token_BT = (
            probability_BTE.new_ones(x_BTD.shape[:2]) if is_token_BT is None else is_token_BT
        )
        real_BT1 = is_token_BT[..., None].to(probability_BTE.dtype).expand(*x_BTD.shape[:2], 1)
        load_BE = (F.one_hot(experts_BTN, NUM_EXPERTS).sum(dim=2) * real_BT1).sum(dim=1)
        share_BE = (probability_BTE * real_BT1).sum(dim=1)
        num_real_B = real_BT1.sum(dim=(1, 2)).clamp(min=1)
        balance_B = NUM_EXPERTS / PER_TOKEN * (share_BE * load_BE).sum(dim=1) / num_real_B**2
        return Routes(experts_BTN, weights_BTN, balance_B, load_BE)


def _expert_values(name: str, shape: torch.Size, config, generator) -> Tensor | None:
    if name != "experts":
        return None
    return torch.randn(shape, generator=generator) * config.d_model**-0.5


RECURRENCE = LayerType(
    facts=LayerFacts("toy recurrence", slot="state", conditioned_by=frozenset({"loop_lora"})),
    build=lambda config, place: Recurrence(config.d_model),
    linear_shapes=lambda config, place: dict.fromkeys(
        ("decay", "value", "out"), (config.d_model, config.d_model)
    ),
    other_parameters=lambda config, place: config.d_model,
    output_maps=frozenset({"out"}),
    flops_per_token=lambda config: 3 * config.d_model,
    state_size=lambda config: config.d_model,
)
EXPERTS = LayerType(
    facts=LayerFacts("toy experts", slot="routes"),
    build=lambda config, place: Experts(config.d_model),
    linear_shapes=lambda config, place: {},
    other_parameters=lambda config, place: NUM_EXPERTS * (config.d_model + config.d_model**2),
    weights_per_token=lambda config, place: (
        NUM_EXPERTS * config.d_model + PER_TOKEN * config.d_model**2
    ),
    initial_values=_expert_values,
    groups={"router.weight": "undecayed", "experts": "decayed"},
)
TOY_LAYERS = {"R": RECURRENCE, "M": EXPERTS}


@contextmanager
def registered_layers() -> Iterator[None]:
    """The toy layers are known inside the block."""
    for letter, layer in TOY_LAYERS.items():
        register_layer(letter, layer)
    try:
        yield
    finally:
        for letter in TOY_LAYERS:
            del LAYERS[letter], LETTERS[letter]


# ---- a policy that drops tokens

LAST = 8
POLICY = "last_8_and_first"


class LastTokens(Entries):
    """Each loop keeps the last tokens and the first one: place 0, and a ring behind it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.loops_B = torch.zeros_like(self.lengths_B)

    def bind_loops(self, num_loops_B: Tensor) -> None:
        if bool(((self.lengths_B > 0) & (num_loops_B != self.loops_B)).any()):
            raise ValueError(f"a row of this {self.policy} cache ran another loop count so far.")
        self.loops_B = num_loops_B.clone()

    def slots(self, layers, *, loop_idx, rows, call):
        place = write_place(call, rows)
        every_row = torch.arange(len(self.lengths_B)) if rows is None else rows
        of_rows = (self.lengths_B[every_row], call.ends_B[every_row], call.is_token_BT[every_row])
        return [LastTokensSlot(self.buffer(layer, loop_idx), place, *of_rows) for layer in layers]

    def select(self, rows: Tensor):
        selected = super().select(rows)
        selected.loops_B = self.loops_B[rows]
        return selected

    def buffer(self, layer: int, group: int) -> KVBuffer:
        if (layer, group) not in self.buffers:
            self.buffers[layer, group] = KVBuffer(len(self.lengths_B), LAST + 1)
        return self.buffers[layer, group]


class LastTokensSlot:
    """Attends over what is kept and the call's own tokens, then keeps the newest."""

    is_read_only = False
    shared = None

    def __init__(self, buffer, place, starts_B, ends_B, is_token_BT) -> None:
        self.buffer, self.place = buffer, place
        self.starts_B, self.ends_B, self.is_token_BT = starts_B, ends_B, is_token_BT

    def attend(self, q_BTHC, k_BTGC, v_BTGC, *, spec, scale):
        self.buffer.reserve(k_BTGC, v_BTGC)
        rows, index_BT = self.place.rows, self.place.index_BT
        num_source = self.place.num_source_tokens
        positions_S = torch.arange(num_source + 1)
        batch_B1 = torch.arange(len(rows))[:, None]
        k_BSGC, v_BSGC = self.buffer.entries(rows[:, None], ring(positions_S)[None])
        own_BT = index_BT.clamp(max=num_source)
        k_BSGC[batch_B1, own_BT], v_BSGC[batch_B1, own_BT] = k_BTGC, v_BTGC
        missing_BS = is_dropped(positions_S[None, :-1], self.starts_B[:, None])
        y_BTHC = attention(
            q_BTHC,
            k_BSGC[:, :num_source],
            v_BSGC[:, :num_source],
            spec=spec.without(missing_BS),
            scale=scale,
        )
        goes_BT = is_dropped(index_BT, self.ends_B[:, None]) | ~self.is_token_BT
        target_BT = torch.where(goes_BT, LAST + 1, ring(index_BT))
        self.buffer.put(rows[:, None], target_BT, k=k_BTGC, v=v_BTGC)
        return y_BTHC


def ring(position: Tensor) -> Tensor:
    """Place of a kept token."""
    return torch.where(position == 0, 0, 1 + (position - 1) % LAST)


def is_dropped(position: Tensor, length: Tensor) -> Tensor:
    """Whether a row of this many tokens has dropped the token at a position."""
    return (position > 0) & (position < length - LAST)


@contextmanager
def registered_policy() -> Iterator[None]:
    """The toy policy is known inside the block."""
    rule = CacheRule(
        "each loop's last 8 tokens and the first", mechanism="last_tokens", stored_tokens=LAST + 1
    )
    register_policy(POLICY, rule, entries=LastTokens)
    try:
        yield
    finally:
        del POLICIES[POLICY], MECHANISMS["last_tokens"]
