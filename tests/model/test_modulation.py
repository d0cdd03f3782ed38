"""Conditioning from progress and budget; tables, rows, and what the first loop is spared."""

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.model.modulation import (
    ELRModulation,
    LoopConditioning,
    SinusoidalEmbedding,
    make_conditioning,
)
from depthdial.model.update import enter

K, D = 4, 8
LOOPS = [(i, k) for k in range(1, K + 1) for i in range(k)]


def config(**changes):
    base = ModelConfig(
        vocab_size=7, d_model=D, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=4,
        d_ff=12, max_context=16, max_loops=K,
        modulation=ModulationConfig(d_cond=6, rank=3, embed_dim=4),
    )  # fmt: skip
    return base.replace(**changes) if changes else base


def random_modulation(**changes):
    """Every parameter random, so that each value depends on loop and budget."""
    modulation = make_conditioning(config(**changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in modulation.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return modulation


def leaves(modulation):
    return [leaf for leaf in tree_leaves(modulation) if leaf is not None]


def assert_same(first, second, *, tolerance=0.0):
    firsts, seconds = leaves(first), leaves(second)
    assert len(firsts) == len(seconds) > 0
    for a, b in zip(firsts, seconds, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# ---- embedding and condition


def test_embedding_is_cosines_then_sines_of_a_geometric_ladder():
    values = torch.tensor([0.25, 1.0])
    embedded = SinusoidalEmbedding(4, 1000.0)(values)
    for row, value in zip(embedded.tolist(), values.tolist(), strict=True):
        angles = [1000 * value, 1000 * value * 10_000 ** (-1 / 2)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert row == pytest.approx(expected, abs=1e-4)


def test_condition_is_an_mlp_of_progress_then_budget():
    modulation = random_modulation()
    progress, budget = torch.tensor([0.5]), torch.tensor([0.75])
    both = torch.cat([modulation.ladder(progress), modulation.ladder(budget)], dim=-1)
    hidden = torch.nn.functional.silu(modulation.mlp_in(both))
    assert torch.equal(modulation.condition(progress, budget), modulation.mlp_out(hidden))


@pytest.mark.parametrize(("loop_idx", "num_loops"), LOOPS)
def test_pass_i_of_k_reads_progress_i_over_k_and_budget_k_over_max(loop_idx, num_loops):
    modulation = random_modulation()
    condition = modulation.condition(
        torch.tensor([(loop_idx + 1) / num_loops]), torch.tensor([num_loops / K])
    )
    expected = modulation.loops_from_condition(condition, [(loop_idx, num_loops)])
    assert_same(modulation.for_loop(loop_idx, num_loops), expected)


@pytest.mark.parametrize("num_loops", range(1, K + 1))
def test_coda_reads_progress_one_and_its_budget(num_loops):
    modulation = random_modulation()
    condition = modulation.condition(torch.ones(1), torch.tensor([num_loops / K]))
    assert_same(modulation.for_coda(num_loops), modulation.codas_from_condition(condition))


def test_the_first_loop_depends_on_the_budget():
    """Why states and caches of different k are not interchangeable."""
    modulation = random_modulation()
    first, second = (modulation.for_loop(0, k).sublayers[0].scale for k in (1, 2))
    assert not torch.equal(first, second)


def test_scale_and_gain_are_stored_whole():
    modulation = random_modulation()
    with torch.no_grad():
        modulation.core[0].heads.weight.zero_()
        modulation.core[0].heads.bias.fill_(0.5)
    sublayer = modulation.for_loop(0, 1).sublayers[0]
    for value, expected in (
        (sublayer.scale, 1.5), (sublayer.shift, 0.5), (sublayer.gain, 1.5),
        (sublayer.low_rank_gain, 0.5),
    ):  # fmt: skip
        assert torch.equal(value, torch.full_like(value, expected))


# ---- first-loop exceptions


@pytest.mark.parametrize("num_loops", range(1, K + 1))
def test_the_first_loop_enters_bit_equal(num_loops):
    modulation = random_modulation()
    state, h_in = torch.randn(2, 1, 5, D)
    entered = enter(state, h_in, modulation.for_loop(0, num_loops).entry, eps=1e-6)
    assert torch.equal(entered, state)


def test_later_loops_enter_normalised_without_the_raw_state():
    entry = random_modulation().for_loop(1, 2).entry
    assert entry.raw_gain.count_nonzero() == 0
    assert entry.norm_gain.count_nonzero() == entry.eta.count_nonzero() == D


def test_exit_gain_is_one_plus_head_in_the_first_loop_and_the_head_alone_later():
    modulation = random_modulation()
    with torch.no_grad():
        modulation.exit.weight.zero_()
        modulation.exit.bias.fill_(0.25)
    gains = [modulation.for_loop(i, 3).update.exit_gain.detach() for i in range(3)]
    assert [float(gain.unique()) for gain in gains] == [1.25, 0.25, 0.25]


@pytest.mark.parametrize("has_modulation", [True, False])
def test_first_only_bypass_is_one_in_the_first_loop_and_zero_later(has_modulation):
    changes = {"loop": LoopConfig(gate_bypass="first_only")}
    if not has_modulation:
        changes["modulation"] = None
    conditioning = make_conditioning(config(**changes))
    bypass = [float(conditioning.for_loop(i, 3).update.gate_bypass) for i in range(3)]
    assert bypass == [1.0, 0.0, 0.0]


def test_a_plain_model_is_conditioned_by_nothing():
    conditioning = make_conditioning(config(modulation=None))
    assert type(conditioning) is LoopConditioning
    assert list(conditioning.parameters()) == []
    assert leaves(conditioning.for_loop(1, 2)) == []
    assert conditioning.for_coda(2) is None


# ---- rows


@pytest.mark.parametrize("loop_idx", range(K))
def test_each_row_gets_the_values_of_its_own_budget(loop_idx):
    modulation = random_modulation()
    depths = [k for k in (4, 2, 3, 4, 1, 2) if k > loop_idx]
    mixed = modulation.for_loop(loop_idx, torch.tensor(depths))
    for row, depth in enumerate(depths):
        alone = modulation.for_loop(loop_idx, depth)
        for mixed_leaf, alone_leaf in zip(leaves(mixed), leaves(alone), strict=True):
            if mixed_leaf.ndim == 3:
                assert mixed_leaf.shape[0] == len(depths)
                mixed_leaf = mixed_leaf[row : row + 1]
            torch.testing.assert_close(mixed_leaf, alone_leaf, rtol=0, atol=1e-6)


def test_low_rank_factors_are_shared_by_all_rows_and_loops():
    modulation = random_modulation()
    sublayer = modulation.for_loop(1, torch.tensor([2, 3, 2])).sublayers[0]
    assert sublayer.low_rank.down is modulation.core[0].down
    assert sublayer.low_rank.up is modulation.core[0].up


def test_autocast_does_not_round_the_conditioning():
    modulation = random_modulation()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = modulation.for_loop(1, 3)
    assert_same(under_autocast, modulation.for_loop(1, 3))


# ---- tables


@pytest.mark.parametrize("num_loops", range(1, K + 1))
def test_tabulated_values_equal_computed_ones_bit_for_bit(num_loops):
    modulation = random_modulation()
    table = modulation.table(num_loops)
    for loop_idx in range(num_loops):
        expected = modulation.for_loop(loop_idx, num_loops)
        assert_same(table.for_loop(loop_idx, num_loops), expected)
    assert_same(table.for_coda(num_loops), modulation.for_coda(num_loops))


@pytest.mark.parametrize("loop_idx", range(K))
def test_tabulated_values_of_mixed_rows_equal_computed_ones(loop_idx):
    modulation = random_modulation()
    depths = torch.tensor([k for k in (4, 2, 3, 4, 1) if k > loop_idx])
    table = modulation.table(depths)
    # Entries of a table are computed one by one, those of a pass together: equal up to fp32.
    loop, coda = modulation.for_loop(loop_idx, depths), modulation.for_coda(depths)
    assert_same(table.for_loop(loop_idx, depths), loop, tolerance=1e-6)
    assert_same(table.for_coda(depths), coda, tolerance=1e-6)


def test_a_tabulated_row_does_not_depend_on_what_else_is_in_the_table():
    modulation = random_modulation()
    alone, beside = modulation.table(3), modulation.table(torch.tensor([1, 3, 4, 2]))
    assert_same(alone.for_loop(1, 3), beside.for_loop(1, 3))
    mixed = beside.for_loop(torch.tensor([0, 1]), torch.tensor([4, 3]))
    assert torch.equal(mixed.entry.eta[1:], alone.for_loop(1, 3).entry.eta)


def test_a_table_is_computed_once_per_pass_and_budget(monkeypatch):
    modulation, computed = random_modulation(), []
    original = ELRModulation.loops_at

    def counting(self, points, *, device=None):
        computed.extend(points)
        return original(self, points, device=device)

    monkeypatch.setattr(ELRModulation, "loops_at", counting)
    table = modulation.table(torch.tensor([2, 4, 2]))
    for _ in range(3):
        table.for_loop(1, 4)
        table.for_loop(0, torch.tensor([4, 2, 2]))
    assert computed == [(0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("has_modulation", [True, False])
def test_a_table_has_no_gradient_and_leaves_the_gradient_mode_alone(has_modulation):
    plain = make_conditioning(config(modulation=None))
    table = (random_modulation() if has_modulation else plain).table(2)
    assert torch.is_grad_enabled()
    update = table.for_loop(1, 2).update
    assert not any(t.requires_grad for t in leaves(update))


def test_a_table_does_not_outlive_what_it_was_made_for():
    """A loop count that the table was not made for is no reason to compute it silently."""
    with pytest.raises(AssertionError, match=r"no \(0, 3\)"):
        random_modulation().table(2).for_loop(0, 3)
