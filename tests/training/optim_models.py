"""A model of plain parameters under the names of a looped one, and how it is trained."""

import torch
from torch import nn

from depthdial.config import ModelConfig, OptimConfig
from depthdial.training.optim import Optimizers

D_MODEL, VOCAB, RANK = 8, 16, 4
CONFIG = ModelConfig(
    vocab_size=VOCAB, d_model=D_MODEL, split=(2, 2, 2), num_heads=2, num_kv_heads=2, head_dim=4,
    d_ff=D_MODEL, max_context=8,
)  # fmt: skip
MUON = OptimConfig(lr=1e-2, adamw_lr=3e-3, weight_decay=0.2)


class Norm(nn.Module):
    """One gain vector."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Sublayer(nn.Module):
    """Norm and a mixer with the named matrices."""

    def __init__(self, matrices, *, qk_norm):
        super().__init__()
        self.norm = Norm(D_MODEL)
        self.mixer = nn.Module()
        for name in matrices:
            self.mixer.add_module(name, nn.Linear(D_MODEL, D_MODEL, bias=False))
        if qk_norm:
            self.mixer.q_norm, self.mixer.k_norm = Norm(4), Norm(4)


class Modulation(nn.Module):
    """A biased head and two low-rank factors."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(6, D_MODEL)
        self.down = nn.Parameter(torch.randn(RANK, D_MODEL))
        self.up = nn.Parameter(torch.randn(D_MODEL, RANK))


class StandIn(nn.Module):
    """Parameter names of a looped model; every parameter enters `loss`."""

    config = CONFIG

    def __init__(self, *, tied=False, modulation=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        for stack in ("prelude_stack", "core_stack", "coda_stack"):
            attention = Sublayer(("q_proj", "k_proj", "v_proj", "o_proj"), qk_norm=True)
            mlp = Sublayer(("gate_proj", "up_proj", "down_proj"), qk_norm=False)
            self.add_module(stack, nn.ModuleList([attention, mlp]))
        self.state_update = nn.Module()
        self.state_update.gate = nn.Linear(D_MODEL, D_MODEL)
        self.state_update.gamma = nn.Parameter(torch.zeros(D_MODEL))
        self.final_norm = Norm(D_MODEL)
        self.lm_head = nn.Linear(D_MODEL, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight
        if modulation:
            self.modulation = Modulation()

    def loss(self, *, seed, num_loops=1):
        """Random linear and quadratic terms; a looped core enters once per loop."""
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            weight = torch.randn(parameter.shape, generator=generator)
            uses = num_loops if name.startswith("core_stack") else 1
            total = total + uses * ((parameter * weight).sum() + 0.1 * parameter.square().sum())
        return total


def build(*, config=MUON, seed=0, **kind):
    """Model and its optimizers."""
    torch.manual_seed(seed)
    model = StandIn(**kind)
    return model, Optimizers(model, config)


def train(model, optimizers, steps, *, num_loops=1):
    """Run steps with step-numbered losses."""
    for step in steps:
        model.loss(seed=step, num_loops=num_loops).backward()
        optimizers.clip_gradients()
        optimizers.step()
        optimizers.zero_grad()


def assert_equal_weights(first, second):
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
