"""The letters of a layout, and what a config and a cache must know of their layers.

How a layer computes is in `layers/`; `model/sublayer.py: LAYERS` says how it is built, counted and
trained, and adds letters from outside the package here. Configs arrive untyped, because this file
is below theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

SlotKind = Literal["none", "keys", "state", "routes"]
"""What a layer writes in one pass for later tokens or later loops.

`none`: nothing. `keys`: a key and a value of each token. `state`: one recurrent state per row.
`routes`: the experts of each token, for later loops of the same call.
"""
Conditioning = Literal["loop_lora", "head_gains"]
"""What a mixer itself may be conditioned by; scale, shift and gain act around every mixer.

`loop_lora`: low-rank differences of its linear maps. `head_gains`: gains of its query and key
norms.
"""


class AttentionKeys(NamedTuple):
    """Keys of the config, dotted, that say what the queries of a layer reach and how they turn.

    window: None for a layer that sees every earlier token.
    """

    rope_theta: str = "rope_theta"
    rotary_frac: str = "rotary_frac"
    window: str | None = None


class Reach(NamedTuple):
    """What the queries of a layer reach, and how they turn.

    window: tokens, the query's own included; None for all. rope_theta and rotary_frac: base of the
    rotary frequencies, and the fraction of each head's channels that rotate.
    """

    window: int | None
    rope_theta: float
    rotary_frac: float


@dataclass(frozen=True)
class LayerFacts:
    """What a config and a cache must know of the layers of one letter.

    Fields:
        summary: what the layer is, for people.
        slot: see `SlotKind`.
        reads: keys of the model's config that the layer reads; a key that no layer of a layout
            reads has no effect.
        options: a group of the config with options of this layer alone; the letter needs it and
            it needs the letter. None for none.
        attention: None for a layer without attention.
        conditioned_by: see `Conditioning`.
        has_unit_form: the layer can be built with norm='ngpt'.
    """

    summary: str
    slot: SlotKind = "none"
    reads: frozenset[str] = frozenset()
    options: str | None = None
    attention: AttentionKeys | None = None
    conditioned_by: frozenset[Conditioning] = frozenset()
    has_unit_form: bool = False

    @property
    def mixes_tokens(self) -> bool:
        """Whether a token's output depends on earlier tokens."""
        return self.slot in ("keys", "state")

    @property
    def slides(self) -> bool:
        """Whether the layer's queries reach a window of tokens alone."""
        return self.attention is not None and self.attention.window is not None

    def reach(self, config: Any) -> Reach | None:
        """What the layer's queries reach in a model of this config; None without attention."""
        if self.attention is None:
            return None
        window, theta, frac = self.attention.window, *self.attention[:2]
        return Reach(
            window=None if window is None else _value(config, window),
            rope_theta=_value(config, theta),
            rotary_frac=_value(config, frac),
        )


_EVERY_ATTENTION = frozenset(
    {
        "num_heads",
        "num_kv_heads",
        "core_num_heads",
        "core_num_kv_heads",
        "head_dim",
        "rotary_pairs",
        "rope_scaling",
        "qk_norm",
        "qk_norm_eps",
        "attention_bias",
        "output_gate",
        "value_embeddings",
    }
)
LETTERS: dict[str, LayerFacts] = {
    "A": LayerFacts(
        "grouped-query attention",
        slot="keys",
        reads=_EVERY_ATTENTION | {"rope_theta", "rotary_frac"},
        attention=AttentionKeys(),
        conditioned_by=frozenset({"loop_lora", "head_gains"}),
        has_unit_form=True,
    ),
    "S": LayerFacts(
        "grouped-query attention over a sliding window",
        slot="keys",
        reads=_EVERY_ATTENTION,
        options="sliding",
        attention=AttentionKeys("sliding.rope_theta", "sliding.rotary_frac", "sliding.window"),
        conditioned_by=frozenset({"loop_lora", "head_gains"}),
        has_unit_form=True,
    ),
    "F": LayerFacts(
        "feed-forward MLP",
        reads=frozenset({"d_ff", "core_d_ff", "ff", "ff_bias"}),
        conditioned_by=frozenset({"loop_lora"}),
        has_unit_form=True,
    ),
}
"""Every known letter; `model/sublayer.py: register_layer` adds one from outside the package."""


def is_read(layout: str, key: str) -> bool:
    """Whether some layer of the layout reads a key of the config."""
    return any(key in LETTERS[letter].reads for letter in layout)


def reads_outer_width(config: Any) -> bool:
    """Whether some feed-forward layer has the width `d_ff`."""
    in_core = config.core_d_ff is None and is_read(config.core_layout, "d_ff")
    return in_core or is_read(config.prelude_layout + config.coda_layout, "d_ff")


def count_slots(layout: str, kind: SlotKind) -> int:
    """Layers of the layout that have a slot of this kind."""
    return sum(LETTERS[letter].slot == kind for letter in layout)


def slot_kinds(layout: str) -> tuple[SlotKind, ...]:
    """The slots that one pass over the layout needs, bottom to top."""
    kinds = (LETTERS[letter].slot for letter in layout)
    return tuple(kind for kind in kinds if kind != "none")


def check_letters(config: Any) -> None:
    """The letters of a layout are known, have their options, and fit the model's norms.

    Raises: ValueError.
    """
    unknown = sorted(set(config.layout) - set(LETTERS))
    if unknown:
        known = ", ".join(f"{letter} ({facts.summary})" for letter, facts in LETTERS.items())
        raise ValueError(
            f"layout '{config.layout}' has unknown letters {unknown}; known: {known}. A layer from "
            "outside the package must be registered (depthdial.model.sublayer.register_layer) "
            "before a config that names it is read."
        )
    for letter, facts in LETTERS.items():
        if config.norm == "ngpt" and letter in config.layout and not facts.has_unit_form:
            raise ValueError(
                f"the layout letter {letter} ({facts.summary}) has no form for norm='ngpt'."
            )
    groups = {facts.options for facts in LETTERS.values() if facts.options is not None}
    for group in sorted(groups):
        owners = [letter for letter, facts in LETTERS.items() if facts.options == group]
        is_used = any(letter in config.layout for letter in owners)
        if is_used != (_value(config, group) is not None):
            raise ValueError(
                f"the layout letter {' or '.join(owners)} goes with `{group}`, and needs it."
            )


def _value(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)
