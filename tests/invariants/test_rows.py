"""Rows of different loops and budgets stand in one call of `loop` and equal their solo passes.

The kinds are read from the config's own literals, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from depthdial.config import LETTERS, LoopConfig, ModelConfig
from depthdial.config.model import AnyModulation
from depthdial.layers.primitives import LowRankPair
from depthdial.model.call import Call
from depthdial.model.conditioning import join_rows
from depthdial.model.looped_lm import LoopedLM

POINTS = ((0, 1), (0, 3), (2, 3), (1, 2), (3, 4))
"""(loop index, loop count) of each row of the call."""
LATER_POINTS = ((1, 2), (2, 3), (3, 4), (1, 4))
STEPS = {1: [1.0], 2: [0.3, 0.7], 3: [0.2, 0.5, 0.3], 4: [0.4, 0.1, 0.2, 0.3]}
TOKENS = torch.arange(20).reshape(5, 4) % 11
TOLERANCE = 1e-10


def kinds(config: type[BaseModel], prefix: str = "") -> list[tuple[str, object]]:
    """(path, value) of every value of every field that is one of several literals."""
    found = []
    for name, field in config.model_fields.items():
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        found += [(prefix + name, value) for value in values if len(values) > 1]
    return found


def modulations() -> dict[str, dict]:
    """Every method of conditioning with every value of its literals, in a small size."""
    small, found = {"d_cond": 6, "rank": 2, "embed_dim": 4}, {}
    union = get_args(AnyModulation)[0] if get_origin(AnyModulation) is Annotated else AnyModulation
    for tagged in get_args(union):
        method = get_args(tagged)[0]
        (kind,) = get_args(method.model_fields["kind"].annotation)
        sizes = {name: size for name, size in small.items() if name in method.model_fields}
        for name, value in kinds(method) or [("kind", kind)]:
            found[f"{kind} {value}"] = {"kind": kind, name: value} | sizes
    return found


LORA = {"rank": 2, "sets_by_loop": [-1, 0, 1], "norms": True}
CONDITIONINGS = (
    {"unconditioned": {}, "loop_lora": {"loop_lora": LORA}}
    | {name: {"modulation": fields} for name, fields in modulations().items()}
    | {
        f"{name}, loop_lora": {"modulation": fields, "loop_lora": LORA}
        for name, fields in modulations().items()
    }
)
NEEDS = {
    "decay_gate": {"loop.gate_rank": 2},
    "zero": {"loop.injection": "add"},
    "random": {"loop.injection": "add", "loop.random_state_std": 0.5},
    "ngpt": {"ngpt": {"alpha_init": 0.5, "scale_std": 0.3}},
    "SF": {"sliding": {"window": 2}},
    "FF": {"num_heads": None, "num_kv_heads": None, "head_dim": None},
}
"""What a kind cannot be without."""
FLAGS = [("loop.unit_norm", True)]
"""What acts on the state in every loop and is no literal."""


def model_of(changes: dict) -> LoopedLM:
    """Every parameter random, in float64."""
    fields = {
        "vocab_size": 11, "d_model": 8, "split": (2, 2, 0), "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 4, "d_ff": 12, "max_context": 16, "max_loops": 4, "init_std": 0.3, "loop": {},
    }  # fmt: skip
    for path, value in changes.items():
        at = fields
        *above, name = path.split(".")
        for part in above:
            at = at.setdefault(part, {})
        at[name] = value
    model = LoopedLM(ModelConfig.from_dict(fields)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.2 * noise)
    return model


def solo_pass(model, row, loop_idx, num_loops, steps):
    """States and carries before and after one pass of a row by itself, in a run from the start."""
    begun = model.begin(Call(TOKENS[row : row + 1], num_loops=num_loops, step_sizes=steps))
    state = begun.initial_state_BTD
    carry = model.first_carry(state, is_cached=False)
    for i in range(loop_idx + 1):
        before = state, carry
        state, carry = model.loop(
            state,
            begun.h_in_BTD,
            mod=model.loop_modulation(i, num_loops, begun.call.step_sizes),
            slots=begun.binding.slots("core"),
            carry=carry,
            ctx=begun.ctx,
        )
    return before, (state, carry)


class JoinedPass:
    """One call of `loop` for all rows, each at its own point; solo: what each gives by itself."""

    def __init__(self, model, points=POINTS, *, has_steps=False):
        self.model, budgets = model, torch.tensor([k for _, k in points])
        solo_steps = [torch.tensor(STEPS[k]) if has_steps else None for _, k in points]
        rows = [solo_pass(model, row, i, k, solo_steps[row]) for row, (i, k) in enumerate(points)]
        steps = None
        if has_steps:
            steps = torch.tensor([STEPS[k] + [0.0] * (4 - k) for _, k in points])
        call = Call(TOKENS[: len(points)], num_loops=budgets, step_sizes=steps)
        self.begun = model.begin(call)
        (self.state, self.carry), self.solo = (
            join_rows([row[side] for row in rows]) for side in (0, 1)
        )
        loops = torch.tensor([i for i, _ in points])
        self.mod = model.loop_modulation(loops, budgets, self.begun.call.step_sizes)

    def run(self, mod):
        return self.model.loop(
            self.state,
            self.begun.h_in_BTD,
            mod=mod,
            slots=self.begun.binding.slots("core"),
            carry=self.carry,
            ctx=self.begun.ctx,
        )

    def assert_equals_solo(self):
        leaves = zip(tree_leaves(self.run(self.mod)), tree_leaves(self.solo), strict=True)
        for joined, alone in leaves:
            assert (joined is None) == (alone is None)
            if joined is not None:
                torch.testing.assert_close(joined, alone, rtol=0, atol=TOLERANCE)


def contradicts(conditioning: str, changes: dict) -> bool:
    """Combinations that the config itself refuses."""
    has_no_gate = not conditioning.startswith("elr")
    is_replaced = changes.get("loop.update") == "replace"
    return is_replaced and has_no_gate and changes.get("loop.gate_bypass") == "first_only"


def cases():
    """Everything about loops under every conditioning, everything else under one of each kind."""
    of_loop = kinds(LoopConfig, "loop.")
    updates = [value for path, value in of_loop if path == "loop.update"]
    bypasses = [value for path, value in of_loop if path == "loop.gate_bypass"]
    for update, bypass, conditioning in itertools.product(updates, bypasses, CONDITIONINGS):
        changes = {"loop.update": update, "loop.gate_bypass": bypass}
        if not contradicts(conditioning, changes):
            yield f"{update}, bypass {bypass}, {conditioning}", changes, conditioning
    others = [pair for pair in of_loop if pair[0] not in ("loop.update", "loop.gate_bypass")]
    for (path, value), conditioning in itertools.product(others + FLAGS, CONDITIONINGS):
        yield f"{path}={value}, {conditioning}", {path: value}, conditioning
    layouts = [("layout", letter + "F") for letter in LETTERS]
    for path, value in kinds(ModelConfig) + layouts:
        conditioning = "loop_lora" if value == "ngpt" else "elr one_loop, loop_lora"
        yield f"{path}={value}", {path: value}, conditioning


CASES = {name: (changes, conditioning) for name, changes, conditioning in cases()}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_different_loops_and_budgets_equal_their_solo_passes(name):
    changes, conditioning = CASES[name]
    needs = {}
    for value in changes.values():
        needs |= NEEDS.get(value, {})
    fields = CONDITIONINGS[conditioning]
    if changes.get("norm") == "ngpt":
        fields = {"loop_lora": {**LORA, "norms": False}}
    model = model_of(needs | changes | fields)
    JoinedPass(model, has_steps=False).assert_equals_solo()
    if "time_step" in conditioning:
        JoinedPass(model, has_steps=True).assert_equals_solo()


@pytest.mark.parametrize(
    "changes", [{"loop.cache_policy": "share_first"}, {"loop.local_window": 2}], ids=str
)
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_rows_that_read_the_first_loops_keys_mix_in_all_later_loops(changes, conditioning):
    model = model_of(changes | CONDITIONINGS[conditioning])
    JoinedPass(model, LATER_POINTS).assert_equals_solo()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loop.cache_policy": "share_first"}, "loop.cache_policy='share_first': later loops read"),
        ({"loop.local_window": 2}, "loop.local_window=2: later loops read"),
        (
            {"segments": (1, 1), "loop.update": "replace"},
            r"segments=\[1, 1\]: each part of the core runs all its loops",
        ),
    ],
)
def test_rows_that_cannot_mix_are_refused_by_name_before_anything_is_computed(
    changes, reason, monkeypatch
):
    model = model_of(changes)

    def nothing(*args, **more):
        raise AssertionError("computed")

    monkeypatch.setattr(model.modulation, "for_loop", nothing)
    with pytest.raises(ValueError, match=reason):
        model.loop_modulation(torch.tensor([0, 1]), torch.tensor([2, 2]))


@pytest.mark.parametrize("loop_idx", [-1, 2])
def test_a_loop_that_a_row_does_not_have_is_refused(loop_idx):
    model = model_of(CONDITIONINGS["elr one_loop"])
    with pytest.raises(ValueError, match=f"row 1 has loop_idx={loop_idx} of num_loops=2"):
        model.loop_modulation(torch.tensor([0, loop_idx]), torch.tensor([3, 2]))


# ---- every row has its own conditioning


def rows_of(mod):
    """Every tensor of the conditioning with a row for each row of the batch."""

    def expand(leaf):
        if isinstance(leaf, LowRankPair):
            return LowRankPair(*(m.expand(len(POINTS), *m.shape[-2:]).clone() for m in leaf))
        return None if leaf is None else leaf.expand(len(POINTS), *leaf.shape[1:]).clone()

    return tree_map(expand, mod, is_leaf=lambda node: isinstance(node, LowRankPair))


@pytest.fixture(scope="module", params=["elr one_loop, loop_lora", "time_step time_step"])
def joined(request):
    return JoinedPass(model_of({"loop.update": "anchored"} | CONDITIONINGS[request.param]))


def test_conditioning_has_one_row_or_one_per_row_of_the_batch(joined):
    leaves = tree_leaves(joined.mod, is_leaf=lambda node: isinstance(node, LowRankPair))
    for leaf in leaves:
        if isinstance(leaf, LowRankPair):
            assert leaf.down.ndim == leaf.up.ndim
            assert leaf.down.ndim == 2 or len(leaf.down) == len(leaf.up) == len(POINTS)
        elif leaf is not None:
            assert leaf.ndim >= 3 and leaf.shape[0] == len(POINTS) and leaf.shape[1] == 1


def test_a_pair_for_each_row_equals_the_pair_that_all_rows_share(joined):
    together, _ = joined.run(joined.mod)
    apart, _ = joined.run(rows_of(joined.mod))
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-12)


def changed(leaf, row, amount):
    """The leaf with other values in one row."""
    if leaf is None:
        return None
    leaf = leaf.clone()
    leaf[row] = ~leaf[row] if leaf.dtype == torch.bool else leaf[row] + amount
    return leaf


@given(
    row=st.integers(0, len(POINTS) - 1),
    which=st.integers(0, 10_000),
    amount=st.sampled_from([-3.0, 0.5, 1e3]),
)
@settings(max_examples=40, deadline=None)
def test_changing_any_conditioning_of_a_row_changes_that_row_alone(joined, row, which, amount):
    mod = rows_of(joined.mod)
    before = joined.run(mod)
    leaves, tree = tree_flatten(mod)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]
    place = places[which % len(places)]
    one = [*leaves[:place], changed(leaves[place], row, amount), *leaves[place + 1 :]]
    every = [changed(leaf, row, amount) for leaf in leaves]
    others = [r for r in range(len(POINTS)) if r != row]
    for change in (one, every):
        after = joined.run(tree_unflatten(change, tree))
        for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
            assert old is new is None or torch.equal(new[others], old[others])
    assert not torch.equal(after[0][row], before[0][row])
