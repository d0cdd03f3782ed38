"""Whatever is wrapped around a module acts on all that is computed with it.

Adapters as peft makes them: a module takes the place of a linear map or an embedding, calls it, and
adds a low-rank product. Merged into the weights, they must give the same function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import toy_config, toy_tokens

import depthdial
from depthdial.cache.contiguous import ContiguousCache
from depthdial.model.looped_lm import LoopedLM

TRAINS = True
RANK = 2


class Adapter(nn.Module):
    """W x + up down x around a linear map, or its counterpart around an embedding."""

    def __init__(self, base: nn.Linear | nn.Embedding, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        outputs, inputs = base.weight.shape
        self.is_embedding = isinstance(base, nn.Embedding)

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.2 * torch.randn(shape, generator=generator, dtype=torch.float64))

        self.down, self.up = random(RANK, inputs), random(outputs, RANK)
        if not self.is_embedding:
            self.in_features = inputs

    @property
    def weight(self) -> Tensor:
        """As peft's: that of the wrapped module, without the adapter."""
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.is_embedding:
            return self.base_layer(x) + F.embedding(x, self.up) @ self.down
        return self.base_layer(x) + F.linear(F.linear(x, self.down), self.up)

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """The wrapped module with the adapter in its weight."""
        self.base_layer.weight += self.up @ self.down
        return self.base_layer


def wrapped(model: LoopedLM, names: list[str]) -> dict[str, Adapter]:
    """Put an adapter around each of these modules."""
    generator = torch.Generator().manual_seed(3)
    adapters = {name: Adapter(model.get_submodule(name), generator) for name in names}
    for name, adapter in adapters.items():
        model.set_submodule(name, adapter)
    return adapters


def adaptable(model: LoopedLM) -> list[str]:
    """Names of all linear maps and embeddings."""
    kinds = (nn.Linear, nn.Embedding)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def outputs(model: LoopedLM, num_loops: int = 3) -> Iterator[Tensor]:
    """Logits without a cache and with one, and the exit gate's logits of every loop."""
    tokens_BT, gates = toy_tokens(2, 7), []

    def read_gate(loop_idx: int, state_BTD: Tensor, rows: Tensor | None) -> None:
        if model.exit_gate is not None:
            gates.append(model.exit_gate(state_BTD))

    yield model(tokens_BT, num_loops=num_loops, on_loop=read_gate)
    yield from gates
    cache = ContiguousCache(model.config, batch_size=2, capacity=7)
    for part in (tokens_BT[:, :4], tokens_BT[:, 4:5], tokens_BT[:, 5:]):
        yield model(part, num_loops=num_loops, cache=cache)


PLAIN = {"modulation": None}
MECHANISMS = {
    "elr, adaptive delta": {},
    "tied head": PLAIN | {"tie_embeddings": True},
    "decay gate, concat": PLAIN | {"loop": {"update": "decay_gate", "gate_rank": 3,
                                            "injection": "concat"}},
    "diagonal, windows, exit gate": PLAIN | {
        "loop": {"injection": "diagonal", "state_projection": True, "local_window": 3},
        "value_embeddings": [1, 3], "exit_gate": "norm_linear", "output_gate": True,
        "attention_bias": "qkvo", "ff_bias": True, "prelude_norm": True,
    },
    "time": {"modulation": {"kind": "time_step", "embed_dim": 8}, "positions": "learned",
             "rotary_frac": 1.0, "ff": "gelu"},
    "unit lengths": PLAIN | {"norm": "ngpt", "ngpt": {"alpha_init": 0.3, "scale_std": 0.2},
                             "qk_norm": "none", "output_gate": True},
    "low-rank differences": PLAIN | {"loop_lora": {"rank": 2, "sets_by_loop": [-1, 0, 1]},
                                     "tie_embeddings": True},
    "segments": PLAIN | {"segments": [2, 2], "loop": {"update": "replace"}},
}  # fmt: skip


def random_model(changes: dict) -> LoopedLM:
    """A model whose every parameter is random, so that every path matters."""
    model = LoopedLM(toy_config(**changes), seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return model.eval()


@pytest.mark.parametrize("changes", MECHANISMS.values(), ids=MECHANISMS)
def test_f26_adapters_of_every_module_act_and_train_and_merge(changes):
    """Those of the gate and the head never trained, and merging them moved logits by up to 3."""
    model = random_model(changes)
    plain = [x.detach() for x in outputs(model)]
    adapters = wrapped(model, adaptable(model))
    adapted = list(outputs(model))
    sum(x.square().mean() for x in adapted).backward()
    for name, adapter in adapters.items():
        assert adapter.down.grad is not None and adapter.down.grad.any(), name
        assert adapter.up.grad is not None and adapter.up.grad.any(), name
    for name, adapter in adapters.items():
        model.set_submodule(name, adapter.merge())
    for before, with_adapters, merged in zip(plain, adapted, outputs(model), strict=True):
        assert (before - with_adapters).abs().max() > 1e-3
        torch.testing.assert_close(merged, with_adapters, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("mechanism", "name"),
    [
        ("elr, adaptive delta", "state_update.gate"),
        ("elr, adaptive delta", "lm_head"),
        ("elr, adaptive delta", "embedding"),
        ("elr, adaptive delta", "modulation.exit"),
        ("decay gate, concat", "state_update.up"),
        ("decay gate, concat", "state_update.down"),
        ("decay gate, concat", "injection.adapter"),
        ("tied head", "embedding"),
        ("unit lengths", "lm_head"),
        ("diagonal, windows, exit gate", "core_stack.0.mixer.value_gate"),
    ],
)
def test_f26_one_adapter_alone_acts_and_merges(mechanism, name):
    model = random_model(MECHANISMS[mechanism])
    if name.endswith("value_gate"):
        model = random_model(MECHANISMS[mechanism] | {"value_embeddings": [2]})
    plain = next(outputs(model)).detach()
    [adapter] = wrapped(model, [name]).values()
    adapted = next(outputs(model)).detach()
    model.set_submodule(name, adapter.merge())
    assert (plain - adapted).abs().max() > 1e-3
    torch.testing.assert_close(next(outputs(model)).detach(), adapted, rtol=0, atol=1e-9)


def test_f26_a_tied_head_reads_what_its_embedding_gives():
    """The head's logits, with the embedding wrapped: the adapter is in them, not its base alone."""
    model = random_model(MECHANISMS["tied head"])
    [adapter] = wrapped(model, ["embedding"]).values()
    x_BTD = torch.randn(1, 2, model.config.d_model, dtype=torch.float64)
    weight = adapter.weight + adapter.up @ adapter.down
    torch.testing.assert_close(model.head(x_BTD), F.linear(model.final_norm(x_BTD), weight))


def test_f26_no_code_multiplies_with_the_weight_of_another_module():
    """`F.linear(x, module.weight)` reads past whatever wraps the module."""
    root = Path(depthdial.__file__).parent
    found = []
    for path in [*root.glob("model/**/*.py"), *root.glob("layers/*.py"), *root.glob("hf/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("linear", "embedding", "matmul", "bilinear", "addmm"):
                continue
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(argument, ast.Attribute) and argument.attr == "weight":
                    found.append(f"{path.name}: {ast.unparse(argument)}")
    assert sorted(found) == ["primitives.py: self.weight"] * 2
