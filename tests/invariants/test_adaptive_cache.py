"""Rows that stop early on a cache equal slow references of every policy that allows it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from slow_cache import SlowDecoder
from test_cache_policies import ALL
from toys import MAX_LOOPS, toy_model, toy_tokens

from depthdial.cache.contiguous import ContiguousCache
from depthdial.engine.adaptive import run_until
from depthdial.engine.generate import generate
from depthdial.model.call import Call
from depthdial.model.stopping_rules import StoppingRule

TOLERANCE = 1e-4
FILLED = {"per_loop": MAX_LOOPS, "huginn:compress-s2": 1, "huginn:compress-s4": 2}
"""Policies under which entries that a token lacks become copies of its last, and how many it has
then."""
ALLOWED = [policy for policy in ALL if not policy.startswith("parcae:compress-last")]
DEPTHS = [(4, 4, 4), (1, 4, 2), (3, 1, 4), (2, 2, 1), (4, 3, 1), (1, 2, 3)]
"""Of three rows, call by call; the prompt runs all loops."""


@dataclass(frozen=True, kw_only=True)
class Scripted(StoppingRule):
    """Row i stops after depths[i] passes; the value is how many it is beyond them."""

    depths: tuple[int, ...]
    name = "scripted"

    def begin(self, start):
        return -torch.tensor(self.depths)

    def measure(self, point, memory):
        return (memory + 1).float(), memory + 1

    def stops(self, value_N):
        return value_N >= 0


class Checked(Scripted):
    """The same with a readout after every pass."""

    needs_logits = True


class SlowRow(SlowDecoder):
    """A slow reference whose tokens may stop early."""

    def __call__(self, tokens_1T, *, num_loops):
        logits = super().__call__(tokens_1T, num_loops=num_loops)
        for (block, _), tokens in self.stored.items():
            if block == "core" and self.policy in FILLED:
                for token in tokens:
                    missing = FILLED[self.policy] - len(token.by_loop)
                    token.by_loop += [token.by_loop[-1]] * missing
        return logits


@pytest.fixture(scope="module")
def model():
    """Not conditioned on the loop count, so that stopping after i loops is running i of them."""
    return toy_model(modulation=None)


def decoded(model, policy, rule_of, *, depths=DEPTHS):
    """Logits of every call [calls, B, T, V]: a prompt of four tokens, then single ones."""
    cache = ContiguousCache(model.config, batch_size=3, capacity=24, policy=policy)
    found, first = [], 0
    for call, of_rows in enumerate(depths):
        tokens = toy_tokens(3, 24)[:, first : first + (1 if call else 4)]
        run = run_until(
            model, Call(tokens, num_loops=MAX_LOOPS, cache=cache), rule=rule_of(of_rows)
        )
        assert run.loops_B.tolist() == list(of_rows)
        if not call:
            cache.end_prompt()
        first += tokens.shape[1]
        assert cache.lengths_B.tolist() == [first] * 3
        found.append(run.logits_BTV)
    return found


@pytest.mark.parametrize("policy", ALLOWED)
def test_rows_of_varied_depths_equal_their_slow_references(model, policy):
    found = decoded(model, policy, lambda depths: Scripted(threshold=1, depths=depths))
    for row in range(3):
        slow, first = SlowRow(model, policy), 0
        for call, depths in enumerate(DEPTHS):
            tokens = toy_tokens(3, 24)[row : row + 1, first : first + (1 if call else 4)]
            expected = slow(tokens, num_loops=depths[row])
            first += tokens.shape[1]
            if not call:
                slow.end_prompt()
            assert (found[call][row] - expected[0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("policy", ["per_loop", "last_step", "huginn:latest-m2"])
def test_a_prompt_may_stop_early_too(model, policy):
    depths = [(2, 1, 4), (4, 4, 4), (3, 4, 1)]
    found = decoded(
        model, policy, lambda of_rows: Scripted(threshold=1, depths=of_rows), depths=depths
    )
    for row in range(3):
        slow, first = SlowRow(model, policy), 0
        for call, of_rows in enumerate(depths):
            tokens = toy_tokens(3, 24)[row : row + 1, first : first + (1 if call else 4)]
            expected = slow(tokens, num_loops=of_rows[row])
            first += tokens.shape[1]
            assert (found[call][row] - expected[0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("policy", ["per_loop", "collapse_last", "huginn:latest-m2"])
def test_readouts_on_the_way_leave_nothing_in_the_cache(model, policy):
    """A check runs the coda, which writes: appending would shift every later token."""
    silent = decoded(model, policy, lambda depths: Scripted(threshold=1, depths=depths))
    checked = decoded(model, policy, lambda depths: Checked(threshold=1, depths=depths))
    for one, other in zip(silent, checked, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("policy", ["per_loop", "collapse_mean", "huginn:latest-m2", "stash_last"])
def test_generated_tokens_equal_the_slow_reference(model, policy):
    """Rows of one batch, each at its own depth; the prompt and its token run all loops."""
    prompts = [toy_tokens(1, n, seed=n)[0].tolist() for n in (3, 7, 5)]
    settings = {"num_loops": MAX_LOOPS, "max_new_tokens": 6, "cache_policy": policy}
    rule = Scripted(threshold=1, depths=(2, 4, 1))
    results = generate(model, prompts, stop_rule=rule, **settings)
    whole = generate(model, prompts, **settings)
    assert [a.token_ids == b.token_ids for a, b in zip(results, whole, strict=True)] == [
        False,
        True,
        False,
    ]
    for prompt, depth, result in zip(prompts, (2, 4, 1), results, strict=True):
        slow, expected = SlowRow(model, policy), []
        logits = slow(torch.tensor([prompt]), num_loops=MAX_LOOPS)
        slow.end_prompt()
        while len(expected) < 6:
            expected.append(int(logits[0, -1].argmax()))
            logits = slow(torch.tensor([expected[-1:]]), num_loops=depth)
        assert result.token_ids == expected
        assert result.mean_loops == pytest.approx((MAX_LOOPS + 5 * depth) / 6)
