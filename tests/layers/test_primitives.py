"""Norms, rotary positions and SwiGLU against scalar formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthdial.layers.primitives import RMSNorm, SwiGLU, rms_normalise, rotary_table, rotate

EPS = 1e-6


def scalar_rms(row, eps):
    mean_square = sum(value * value for value in row) / len(row)
    return [value / math.sqrt(mean_square + eps) for value in row]


def scalar_rotation(channels, *, position, rotary_dim, theta):
    """Channel j and j + n/2 form a plane turned by position * theta^(-2j/n)."""
    half = rotary_dim // 2
    turned = list(channels)
    for j in range(half):
        angle = position * theta ** (-2 * j / rotary_dim)
        a, b = channels[j], channels[j + half]
        turned[j] = a * math.cos(angle) - b * math.sin(angle)
        turned[j + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


# ---- RMSNorm


def test_rms_norm_equals_the_scalar_formula():
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = torch.tensor([scalar_rms(row.tolist(), EPS) for row in x], dtype=torch.float64)
    torch.testing.assert_close(rms_normalise(x, EPS), expected, rtol=0, atol=1e-14)


def test_rms_norm_multiplies_by_the_gain_of_each_channel():
    norm = RMSNorm(3, EPS)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -3.0]))
    x = torch.randn(4, 3)
    assert torch.equal(norm(x), rms_normalise(x, EPS) * torch.tensor([1.0, 2.0, -3.0]))


def test_rms_norm_without_gain_has_no_parameters():
    norm = RMSNorm(3, EPS, has_gain=False)
    assert list(norm.parameters()) == []
    x = torch.randn(4, 3)
    assert torch.equal(norm(x), rms_normalise(x, EPS))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(RMSNorm(3, EPS)(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_keeps_the_dtype_of_its_input(dtype):
    assert RMSNorm(4, EPS)(torch.randn(2, 4).to(dtype)).dtype == dtype


def test_rms_norm_statistics_are_fp32_for_bf16_inputs():
    """In bf16 arithmetic 1024 squares of 1 / 256 would stop adding up."""
    x = torch.full((1, 1024), 1 / 16, dtype=torch.bfloat16)
    x[0, 0] = 16.0
    expected = rms_normalise(x.float(), EPS).to(torch.bfloat16)
    assert torch.equal(rms_normalise(x, EPS), expected)


# ---- rotary positions


@pytest.mark.parametrize("rotary_dim", [8, 4, 2])
def test_rotation_equals_the_scalar_formula(rotary_dim):
    positions = torch.tensor([[0, 1, 7], [3, 4, 100]])
    x = torch.randn(2, 3, 2, 8)
    table = rotary_table(positions, rotary_dim=rotary_dim, theta=100.0, dtype=torch.float32)
    turned = rotate(x, table)
    for b in range(2):
        for t in range(3):
            for head in range(2):
                expected = scalar_rotation(
                    x[b, t, head].tolist(),
                    position=int(positions[b, t]),
                    rotary_dim=rotary_dim,
                    theta=100.0,
                )
                torch.testing.assert_close(
                    turned[b, t, head], torch.tensor(expected), rtol=0, atol=2e-5
                )


def test_partial_rotary_leaves_the_last_channels_bit_equal():
    x = torch.randn(1, 3, 2, 8)
    table = rotary_table(torch.arange(3)[None], rotary_dim=4, theta=1e4, dtype=torch.float32)
    assert torch.equal(rotate(x, table)[..., 4:], x[..., 4:])


def test_position_zero_is_not_rotated():
    x = torch.randn(1, 1, 2, 8)
    table = rotary_table(torch.zeros(1, 1), rotary_dim=8, theta=1e4, dtype=torch.float32)
    assert torch.equal(rotate(x, table), x)


@given(shift=st.integers(0, 500), gap=st.integers(0, 50), theta=st.sampled_from([100.0, 1e4, 5e5]))
def test_scores_depend_on_the_distance_of_positions_only(shift, gap, theta):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator)

    def score(query_position, key_position):
        tables = [
            rotary_table(torch.tensor([[p]]), rotary_dim=8, theta=theta, dtype=torch.float32)
            for p in (query_position, key_position)
        ]
        return float((rotate(q, tables[0]) * rotate(k, tables[1])).sum())

    assert score(gap, 0) == pytest.approx(score(shift + gap, shift), abs=2e-3)


def test_angles_are_computed_in_fp32_before_the_cast():
    """bf16 has 8 bits: positions above 256 would merge if they were cast first."""
    positions = torch.tensor([[256, 257]])
    table = rotary_table(positions, rotary_dim=2, theta=1e4, dtype=torch.bfloat16)
    assert table.cos.dtype == torch.bfloat16
    assert float(table.cos[0, 1, 0, 0]) == pytest.approx(math.cos(257), abs=0.01)


# ---- SwiGLU


def test_swiglu_equals_its_formula():
    mlp = SwiGLU(3, 5).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    expected = (gate / (1 + (-gate).exp()) * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)


def test_swiglu_has_three_matrices_and_no_bias():
    shapes = {name: tuple(p.shape) for name, p in SwiGLU(3, 5).named_parameters()}
    assert shapes == {
        "gate_proj.weight": (5, 3),
        "up_proj.weight": (5, 3),
        "down_proj.weight": (3, 5),
    }
