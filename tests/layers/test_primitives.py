"""Norms, rotary positions and MLPs against scalar formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from depthdial.config import RopeScaling
from depthdial.layers.feed_forward import PlainMLP, SwiGLU
from depthdial.layers.primitives import (
    RMSNorm,
    rms_normalise,
    rotary_frequencies,
    rotary_table,
    rotate,
)

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


def scalar_llama3(frequency, scaling):
    """One frequency as Llama 3.1 slows it down, and the band of its wavelength.

    Below context / high: kept; above context / low: divided by the factor; between: a blend whose
    share of the kept one grows from 0 to 1 with context / wavelength from low to high.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / high:
        return frequency, "kept"
    if wavelength > scaling.original_context / low:
        return frequency / scaling.factor, "divided"
    smooth = (scaling.original_context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency, "blended"


def scalar_frequencies(rotary_dim, theta):
    return [theta ** (-2 * j / rotary_dim) for j in range(rotary_dim // 2)]


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


# ---- scaled rotation


def llama3(factor, low, high, context):
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=context,
    )


LLAMA3 = [
    pytest.param(128, 500_000.0, llama3(8.0, 1.0, 4.0, 8192), id="Llama 3.1 8B"),
    pytest.param(64, 500_000.0, llama3(32.0, 1.0, 4.0, 8192), id="Llama 3.2 1B"),
    pytest.param(16, 10_000.0, llama3(3.0, 1.5, 9.0, 500), id="other factors"),
]
LINEAR = [
    pytest.param(128, 10_000.0, RopeScaling(kind="linear", factor=4.0), id="factor 4"),
    pytest.param(8, 500_000.0, RopeScaling(kind="linear", factor=2.5), id="factor 2.5"),
]
RELATIVE = {"rtol": 2e-6, "atol": 0}
"""float32 against float64, of frequencies between 1 and 1e-6."""


@pytest.mark.parametrize(("rotary_dim", "theta", "scaling"), LLAMA3)
def test_llama3_scaling_equals_the_scalar_formula_in_each_band(rotary_dim, theta, scaling):
    pairs = [scalar_llama3(x, scaling) for x in scalar_frequencies(rotary_dim, theta)]
    assert {band for _, band in pairs} == {"kept", "blended", "divided"}
    expected = torch.tensor([frequency for frequency, _ in pairs], dtype=torch.float64)
    actual = rotary_frequencies(rotary_dim, theta, scaling=scaling)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, **RELATIVE)


@pytest.mark.parametrize(("rotary_dim", "theta", "scaling"), LLAMA3)
def test_llama3_scaling_leaves_short_waves_as_they_are(rotary_dim, theta, scaling):
    bands = [scalar_llama3(x, scaling)[1] for x in scalar_frequencies(rotary_dim, theta)]
    is_kept = torch.tensor([band == "kept" for band in bands])
    scaled, plain = (rotary_frequencies(rotary_dim, theta, scaling=x) for x in (scaling, None))
    # One rounding of float32.
    torch.testing.assert_close(scaled[is_kept], plain[is_kept], rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("context", [32, 64])
def test_llama3_scaling_is_continuous_where_its_bands_meet(context):
    """Channel 0 has the wavelength 2 pi: the context puts it on an edge of the blend."""
    edge = context / (2 * math.pi)
    at_low, at_high = llama3(8.0, edge, 2 * edge, context), llama3(8.0, edge / 2, edge, context)
    divided, kept = (float(rotary_frequencies(2, 1e4, scaling=x)[0]) for x in (at_low, at_high))
    assert divided == pytest.approx(1 / 8, rel=1e-6)
    assert kept == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("rotary_dim", "theta", "scaling"), LINEAR)
def test_linear_scaling_divides_every_frequency(rotary_dim, theta, scaling):
    expected = [x / scaling.factor for x in scalar_frequencies(rotary_dim, theta)]
    actual = rotary_frequencies(rotary_dim, theta, scaling=scaling)
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), **RELATIVE
    )


@pytest.mark.parametrize(("rotary_dim", "theta", "scaling"), [*LLAMA3, *LINEAR])
def test_scaled_frequencies_are_those_of_transformers(rotary_dim, theta, scaling):
    transformers = pytest.importorskip("transformers", reason="pip install 'depthdial[hf]'")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": scaling.kind, "factor": scaling.factor, "rope_theta": theta}
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    config = transformers.LlamaConfig(
        hidden_size=rotary_dim,
        num_attention_heads=1,
        head_dim=rotary_dim,
        max_position_embeddings=131_072,
        rope_parameters=parameters,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    assert factor == 1.0
    actual = rotary_frequencies(rotary_dim, theta, scaling=scaling)
    torch.testing.assert_close(actual, expected, **RELATIVE)


@pytest.mark.parametrize(("rotary_dim", "theta", "scaling"), [LLAMA3[2], LINEAR[1]])
def test_a_scaled_table_turns_positions_at_the_scaled_frequencies(rotary_dim, theta, scaling):
    frequencies = scalar_frequencies(rotary_dim, theta)
    if scaling.kind == "llama3":
        slowed = [scalar_llama3(x, scaling)[0] for x in frequencies]
    else:
        slowed = [x / scaling.factor for x in frequencies]
    table = rotary_table(
        torch.tensor([[0, 3, 700]]),
        rotary_dim=rotary_dim,
        theta=theta,
        dtype=torch.float32,
        scaling=scaling,
    )
    for t, position in enumerate((0, 3, 700)):
        for j, frequency in enumerate(slowed):
            angle = position * frequency
            assert float(table.cos[0, t, 0, j]) == pytest.approx(math.cos(angle), abs=1e-4)
            assert float(table.sin[0, t, 0, j]) == pytest.approx(math.sin(angle), abs=1e-4)


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


def test_swiglu_with_biases_equals_its_formula():
    mlp = SwiGLU(3, 5, bias=True).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    gate = x @ mlp.gate_proj.weight.T + mlp.gate_proj.bias
    up = x @ mlp.up_proj.weight.T + mlp.up_proj.bias
    expected = (F.silu(gate) * up) @ mlp.down_proj.weight.T + mlp.down_proj.bias
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)


# ---- MLPs of two matrices


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "scalar"),
    [
        ("relu_squared", lambda x: max(x, 0.0) ** 2),
        ("half_relu_squared", lambda x: max(x, 0.0) ** 2 / 2),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    ],
)
def test_a_plain_mlp_equals_its_formula(activation, scalar, bias):
    mlp = PlainMLP(3, 5, activation=activation, bias=bias).double()
    x = 2 * torch.randn(2, 4, 3, dtype=torch.float64)
    up = F.linear(x, mlp.up_proj.weight, mlp.up_proj.bias)
    assert (up > 0).any() and (up < 0).any()
    expected = F.linear(
        up.detach().clone().apply_(scalar), mlp.down_proj.weight, mlp.down_proj.bias
    )
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)
    assert (mlp.up_proj.bias is None, mlp.down_proj.bias is None) == (not bias, not bias)
