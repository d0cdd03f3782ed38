"""The attention layer: heads, widths, biases, rotation, normalised queries and keys."""

import pytest
import torch

from depthdial.cache.uncached import UncachedSlot
from depthdial.layers.attention import Attention
from depthdial.layers.attention_ops import AttentionSpec
from depthdial.layers.primitives import rms_normalise, rotary_table, rotate
from depthdial.layers.state import AttentionView

D, T = 10, 5
EPS = 1e-6


def layer(*, heads=4, groups=2, width=6, qk_norm="none", bias="none"):
    torch.manual_seed(0)
    return Attention(
        D,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=width,
        qk_norm=qk_norm,
        qk_norm_eps=EPS,
        bias=bias,
    )


def surroundings(width, *, rotary_dim=None, start=0):
    rotary_dim = width if rotary_dim is None else rotary_dim
    spec = AttentionSpec(T, T, torch.float32)
    rotary = rotary_table(
        start + torch.arange(T)[None], rotary_dim=rotary_dim, theta=100.0, dtype=torch.float32
    )
    view = AttentionView(spec, rotary, None, torch.zeros(1, T, dtype=torch.int64))
    return {"slot": UncachedSlot(), "view": view}


def head_by_head(attention, x, *, rotary):
    """Each query head alone, against the keys of its group."""
    heads, groups, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    q = attention.q_proj(x).view(T, heads, width)
    k = attention.k_proj(x).view(T, groups, width)
    v = attention.v_proj(x).view(T, groups, width)
    if attention.q_norm is not None:
        q = rms_normalise(q, EPS) * attention.q_norm.weight
        k = rms_normalise(k, EPS) * attention.k_norm.weight
    q, k = rotate(q[None], rotary)[0], rotate(k[None], rotary)[0]
    outputs = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = q[:, head] @ k[:, group].T / width**0.5
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
        outputs.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(outputs, dim=-1) @ attention.o_proj.weight.T


@pytest.mark.parametrize("qk_norm", ["none", "rms"])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 6), (2, 2, 8), (3, 1, 2)])
def test_layer_equals_head_by_head_attention(heads, groups, width, qk_norm):
    attention = layer(heads=heads, groups=groups, width=width, qk_norm=qk_norm)
    if qk_norm == "rms":
        with torch.no_grad():
            attention.q_norm.weight.copy_(torch.randn(width))
            attention.k_norm.weight.copy_(torch.randn(width))
    x = torch.randn(T, D)
    around = surroundings(width)
    y = attention(x[None], **around)[0]
    expected = head_by_head(attention, x, rotary=around["view"].rotary)
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-6)


BIASES = ("none", "qk", "qkv", "qkvo")


def projected(linear, x):
    """x W^T + b, written out."""
    y = torch.nn.functional.linear(x, linear.weight)
    return y if linear.bias is None else y + linear.bias


@pytest.mark.parametrize("bias", BIASES)
def test_biases_are_added_to_their_projections(bias):
    """Queries and keys before they turn, values before they are mixed, the output last."""
    heads, groups, width = 4, 2, 6
    attention, x = layer(bias=bias), torch.randn(T, D)
    around = surroundings(width, start=3)
    q, k, v = (
        projected(linear, x).view(T, -1, width)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = (rotate(y[None], around["view"].rotary)[0] for y in (q, k))
    # One key and value head for each query head of its group; the heads in front, as torch wants.
    k, v = (y.repeat_interleave(heads // groups, dim=1) for y in (k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        *(y.transpose(0, 1) for y in (q, k, v)), is_causal=True
    )
    expected = projected(attention.o_proj, mixed.transpose(0, 1).reshape(T, heads * width))
    torch.testing.assert_close(attention(x[None], **around)[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", BIASES)
def test_only_the_named_projections_have_a_bias_and_each_one_acts(bias):
    attention, x = layer(bias=bias), torch.randn(1, T, D)
    names = {name for name, _ in attention.named_parameters() if name.endswith("bias")}
    assert names == {f"{letter}_proj.bias" for letter in bias.replace("none", "")}
    for name in names:
        before = attention(x, **surroundings(6))
        with torch.no_grad():
            attention.get_parameter(name).add_(torch.randn_like(attention.get_parameter(name)))
        assert not torch.allclose(attention(x, **surroundings(6)), before, atol=1e-3), name


def test_head_dim_is_free_of_width_and_heads():
    attention = layer(heads=3, groups=1, width=8)
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes == {
        "q_proj.weight": (24, D),
        "k_proj.weight": (8, D),
        "v_proj.weight": (8, D),
        "o_proj.weight": (D, 24),
    }


def test_qk_norm_makes_the_output_free_of_the_scale_of_queries_and_keys():
    attention = layer(qk_norm="rms")
    x = torch.randn(1, T, D)
    before = attention(x, **surroundings(6))
    with torch.no_grad():
        attention.q_proj.weight.mul_(50)
        attention.k_proj.weight.mul_(50)
    torch.testing.assert_close(attention(x, **surroundings(6)), before, rtol=0, atol=1e-4)


def test_shifting_all_positions_changes_nothing():
    attention = layer()
    x = torch.randn(1, T, D)
    near, far = (attention(x, **surroundings(6, start=start)) for start in (0, 40))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)


def test_positions_matter():
    """Without rotation a permutation of earlier tokens would not reach the last one."""
    attention = layer()
    x = torch.randn(1, T, D)
    swapped = x[:, [1, 0, 2, 3, 4]]
    last = attention(x, **surroundings(6))[0, -1]
    assert (attention(swapped, **surroundings(6))[0, -1] - last).abs().max() > 1e-4


def test_layer_is_causal():
    attention = layer()
    x = torch.randn(1, T, D)
    before = attention(x, **surroundings(6))
    x[0, 3] += 1.0
    after = attention(x, **surroundings(6))
    assert torch.equal(after[:, :3], before[:, :3])
    assert not torch.equal(after[:, 3:], before[:, 3:])
