"""Reference vectors of ELR through the production update, modulation and sublayer code.

Only the mixer f(u) = tanh(u P^T) Q^T is the test's own; tests/golden/elr/README.md says what
every tensor means. Tolerance 1e-10 in float64.
"""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.layers.primitives import RMSNorm, WideLinear
from depthdial.model.modulation import ELRModulation
from depthdial.model.sublayer import Sublayer, low_rank_path
from depthdial.model.update import (
    UPDATES,
    GateParams,
    Injection,
    UpdateModulation,
    adaptive_rate,
    enter,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "elr"
TRAINS = True
K = 4
TOLERANCE = 1e-10
NO_MOD = UpdateModulation(None, None)
ADD = Injection(12, LoopConfig(injection="add"))


class ToyMixer(nn.Module):
    """f(u) = tanh(u P^T) Q^T."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(p), nn.Parameter(q)

    def forward(self, u: Tensor) -> Tensor:
        return torch.tanh(u @ self.p.T) @ self.q.T


def wide_linear(weight, bias):
    """A gate's linear map with these values."""
    linear = WideLinear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


class Toy:
    """The toy network of the golden case, assembled from production parts."""

    def __init__(self, vectors: dict[str, Tensor], *, zero_heads: bool = False) -> None:
        self.v = vectors
        self.h_in = vectors["h_in"]
        self.core = nn.ModuleList(self._sublayer(f"rec.{j}") for j in range(2))
        self.coda = nn.ModuleList([self._sublayer("out.0")])
        self.gate = GateParams(
            wide_linear(vectors["w.gate.W_beta"], vectors["w.gate.b_beta"]),
            gamma=nn.Parameter(vectors["w.gate.gamma"]),
        )
        config = ModelConfig(
            vocab_size=1, d_model=12, layout="F", split=(0, 2, 1), d_ff=1, max_context=1,
            max_loops=K, loop=LoopConfig(injection="add"),
            modulation=ModulationConfig(d_cond=6, rank=4, embed_dim=2),
        )  # fmt: skip
        self.modulation = ELRModulation(config, config.modulation).double()
        self._load_heads(zero_heads)

    def _sublayer(self, name: str) -> Sublayer:
        norm = RMSNorm(12, 1e-6)
        norm.weight = nn.Parameter(self.v[f"w.{name}.norm"])
        mixer = ToyMixer(self.v[f"w.{name}.P"], self.v[f"w.{name}.Q"])
        return Sublayer(norm, mixer, letter="F")

    def _load_heads(self, zero: bool) -> None:
        named = [(self.modulation.core[j], f"rec.{j}") for j in range(2)]
        named.append((self.modulation.coda[0], "out.0"))
        for module, name in named:
            heads = [f"w.{name}.{head}" for head in ("lambda", "mu", "omega", "g")]
            self._set(module.heads, heads, zero)
            module.down = nn.Parameter(self.v[f"w.{name}.B"])
            module.up = nn.Parameter(self.v[f"w.{name}.A"])
        entry = [f"w.entry.{head}" for head in ("lambda_e", "mu_e", "eta")]
        self._set(self.modulation.entry, entry, zero)
        self._set(self.modulation.exit, ["w.exit.g_exit"], zero)

    def _set(self, linear: nn.Linear, names: list[str], zero: bool) -> None:
        weight = torch.cat([self.v[f"{name}.weight"] for name in names])
        bias = torch.cat([self.v[f"{name}.bias"] for name in names])
        linear.weight = nn.Parameter(weight * (not zero))
        linear.bias = nn.Parameter(bias * (not zero))

    def run(self, k: int) -> tuple[list[dict[str, Tensor]], Tensor]:
        """All k conditioned loops and the coda; returns the named values of each loop."""
        state, trace = self.h_in, []
        for loop_idx in range(k):
            mod = self.modulation.loops_from_condition(
                self.v["c"][loop_idx + 1, k][None], [(loop_idx, k)]
            )
            s_tilde = ADD(state, self.h_in)
            z = enter(s_tilde, self.h_in, mod.entry, eps=1e-6)
            r = self._stack(self.core, z, mod.sublayers)
            state = UPDATES["adaptive_delta"](state, r, s_tilde, self.gate, mod.update)
            beta = adaptive_rate(s_tilde, self.gate)
            factor = mod.update.exit_gain[0, 0]
            trace.append(
                {"s_tilde": s_tilde, "z": z, "r": r, "beta": beta, "factor": factor, "s": state}
            )
        coda = self.modulation.codas_from_condition(self.v["c"][k, k][None])
        return trace, self._stack(self.coda, state, coda)

    @staticmethod
    def _stack(stack: nn.ModuleList, x: Tensor, mods) -> Tensor:
        for j, sublayer in enumerate(stack):
            x = sublayer(x, mod=None if mods is None else mods[j], slot=None, ctx=None)
        return x


@pytest.fixture(scope="module")
def vectors() -> dict[str, Tensor]:
    return safetensors.torch.load_file(GOLDEN / "vectors.safetensors")


def assert_close(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours, reference, rtol=0, atol=TOLERANCE)


def test_one_modulated_sublayer_matches(vectors):
    toy = Toy(vectors)
    mod = toy.modulation.loops_from_condition(vectors["c"][2, 3][None], [(1, 3)]).sublayers[0]
    x_tilde = toy.core[0].norm(vectors["sub.x"], scale=mod.scale) + mod.shift
    assert_close(x_tilde, vectors["sub.x_tilde"])
    x_hat = low_rank_path(x_tilde, mod)
    assert_close(x_hat, vectors["sub.x_hat"])
    assert_close(toy.core[0].mixer(x_hat), vectors["sub.f"])
    assert_close(toy.core[0](vectors["sub.x"], mod=mod, slot=None, ctx=None), vectors["sub.y"])


@pytest.mark.parametrize("k", range(1, K + 1))
def test_conditioned_loops_match_at_every_budget(vectors, k):
    trace, out = Toy(vectors).run(k)
    for loop_idx, values in enumerate(trace):
        for name, value in values.items():
            assert_close(value, vectors[f"cond.k{k}.i{loop_idx + 1}.{name}"])
    assert_close(out, vectors[f"cond.out_k{k}"])


def test_unconditioned_adaptive_delta_matches(vectors):
    toy = Toy(vectors)
    state = toy.h_in
    for i in range(1, K + 1):
        s_tilde = ADD(state, toy.h_in)
        r = toy._stack(toy.core, s_tilde, None)
        state = UPDATES["adaptive_delta"](state, r, s_tilde, toy.gate, NO_MOD)
        beta = adaptive_rate(s_tilde, toy.gate)
        for name, value in {"s_tilde": s_tilde, "r": r, "beta": beta, "s": state}.items():
            assert_close(value, vectors[f"plain.i{i}.{name}"])
        assert_close(toy._stack(toy.coda, state, None), vectors[f"plain.out_k{i}"])


@pytest.mark.parametrize("name", ["replace", "residual", "delta"])
def test_other_updates_match(vectors, name):
    toy = Toy(vectors)
    params = GateParams(rate=torch.full((12,), 0.05, dtype=torch.float64))
    state = toy.h_in
    for k in range(1, K + 1):
        s_tilde = ADD(state, toy.h_in)
        r = toy._stack(toy.core, s_tilde, None)
        state = UPDATES[name](state, r, s_tilde, params, NO_MOD)
        assert_close(state, vectors[f"{name}.s_k{k}"])


@pytest.mark.parametrize("k", range(1, K + 1))
def test_zero_heads_give_the_one_loop_result_bit_for_bit(vectors, k):
    toy = Toy(vectors, zero_heads=True)
    trace, out = toy.run(k)
    one_loop_trace, one_loop_out = toy.run(1)
    assert torch.equal(trace[-1]["s"], one_loop_trace[-1]["s"])
    assert torch.equal(out, one_loop_out)
    assert_close(trace[-1]["s"], vectors["zero_heads.s"])
    assert_close(out, vectors["zero_heads.out"])


def test_zero_gate_moves_by_half_ln_two(vectors):
    toy = Toy(vectors)
    weight, bias, gamma = (
        torch.zeros(shape, dtype=torch.float64) for shape in ((12, 12), (12,), (12,))
    )
    gate = GateParams(wide_linear(weight, bias), gamma)
    state = toy.h_in
    for _ in range(K):
        s_tilde = ADD(state, toy.h_in)
        assert_close(adaptive_rate(s_tilde, gate), vectors["zero_gate.beta"])
        r = toy._stack(toy.core, s_tilde, None)
        state = UPDATES["adaptive_delta"](state, r, s_tilde, gate, NO_MOD)
    assert_close(state, vectors["zero_gate.s"])


def test_gradients_at_insertion_match(vectors):
    """Exit heads move at once; entry heads and both low-rank factors get exactly none."""
    toy = Toy(vectors, zero_heads=True)
    _, out = toy.run(K)
    loss = out.square().sum()
    loss.backward()
    assert_close(loss[None], vectors["insertion.loss"])
    d = 12
    entry = toy.modulation.entry
    for part, name in enumerate(("lambda_e", "mu_e", "eta")):
        rows = slice(part * d, (part + 1) * d)
        assert_close(entry.weight.grad[rows], vectors[f"insertion.grad.entry.{name}.weight"])
        assert_close(entry.bias.grad[rows], vectors[f"insertion.grad.entry.{name}.bias"])
    assert torch.all(entry.weight.grad == 0)
    exit_head, first = toy.modulation.exit, toy.modulation.core[0]
    assert_close(exit_head.weight.grad, vectors["insertion.grad.exit.g_exit.weight"])
    assert_close(exit_head.bias.grad, vectors["insertion.grad.exit.g_exit.bias"])
    assert torch.any(exit_head.bias.grad != 0)
    assert_close(first.heads.weight.grad[3 * d :], vectors["insertion.grad.rec.0.g.weight"])
    assert_close(first.heads.bias.grad[3 * d :], vectors["insertion.grad.rec.0.g.bias"])
    assert_close(first.up.grad, vectors["insertion.grad.rec.0.A"])
    assert_close(first.down.grad, vectors["insertion.grad.rec.0.B"])
    assert torch.all(first.up.grad == 0) and torch.all(first.down.grad == 0)
    assert_close(toy.core[0].mixer.p.grad, vectors["insertion.grad.rec.0.P"])
    learned = (toy.gate.logits.weight, toy.gate.logits.bias, toy.gate.gamma)
    for tensor, name in zip(learned, ("W_beta", "b_beta", "gamma"), strict=True):
        assert_close(tensor.grad, vectors[f"insertion.grad.gate.{name}"])
