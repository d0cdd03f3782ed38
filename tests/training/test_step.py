"""The training step: compiled equals eager, and one compilation serves every loop count."""

import shutil

import pytest
import torch

from depthdial.config import ModelConfig, ModulationConfig, OptimConfig
from depthdial.config.recipe import DistillConfig, ObjectiveConfig, TrajectoryConfig
from depthdial.data.packing import IGNORE, Batch
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.objective import compared_rows, step_share, step_totals
from depthdial.training.optim import Optimizers
from depthdial.training.parallel import compile_blocks
from depthdial.training.step import (
    LossModule,
    RowPlan,
    ShortRows,
    per_row,
    train_step,
)
from depthdial.training.teacher import Teacher
from depthdial.training.validation import mean_loss

VOCAB, CONTEXT, ROWS = 31, 12, 8


def small_module(*, modulated: bool = True, teacher: Teacher | None = None) -> LossModule:
    config = ModelConfig(
        vocab_size=VOCAB, d_model=16, split=(1, 2, 1), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=16, max_context=CONTEXT, max_loops=4, init_std=0.2,
        modulation=ModulationConfig(d_cond=8, rank=2, embed_dim=8) if modulated else None,
    )  # fmt: skip
    module = LossModule(LoopedLM(config), teacher=teacher)
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            if "modulation" in name or "state_update" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=GENERATOR))
    return module


GENERATOR = torch.Generator().manual_seed(0)


def small_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, 5] = IGNORE
    documents = (torch.arange(CONTEXT) > 5).long().expand(ROWS, -1)
    return Batch(tokens[:, :-1], targets, documents)


def gradients(module: LossModule, loops) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    nll = module(small_batch(), RowPlan(loops)).nll_BT
    nll.sum().backward()
    return nll.detach(), {
        n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
    }


@pytest.fixture(scope="module")
def compiled() -> LossModule:
    module = small_module()
    assert compile_blocks(module)
    return module


MIXED = torch.tensor([4, 4, 4, 4, 4, 4, 1, 1])


def test_compiled_equals_eager_and_new_loop_counts_compile_nothing(compiled):
    """One pass of the core is one graph; warm up with all rows and with some of them."""
    blocks, eager = compiled.compiled, {}
    cases = {
        "warm": MIXED,
        "deep": torch.tensor([3, 3, 3, 3, 3, 3, 1, 1]),
        "other share": torch.tensor([2, 2, 2, 2, 1, 1, 1, 1]),
    }
    compiled.compiled = None
    for name, loops in cases.items():
        eager[name] = gradients(compiled, loops)
    compiled.compiled = blocks
    for name, loops in cases.items():
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        nll, grads = gradients(compiled, loops)
        torch.testing.assert_close(nll, eager[name][0], rtol=1e-4, atol=1e-5)
        assert grads.keys() == eager[name][1].keys()
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, eager[name][1][parameter], rtol=1e-3, atol=1e-4)
        if name == "other share":
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("compared", ["all", "one_loop"])
def test_comparisons_with_teacher_and_shorter_path_are_compiled_too(monkeypatch, compared):
    """No part of the objective but the teacher runs eagerly, and none breaks its graph."""
    compile_block, called = torch.compile, set()

    def recording(block):
        compiled = compile_block(block, backend="eager", fullgraph=True)

        def call(*args, **kwargs):
            called.add(block.__name__)
            return compiled(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", recording)
    torch._dynamo.reset()
    teacher = Teacher(small_module(modulated=False).model, num_loops=1)
    module = small_module(modulated=False, teacher=teacher)
    config = ObjectiveConfig(
        distill=DistillConfig(weight=0.5, rows=compared), trajectory=TrajectoryConfig()
    )
    loops, batch = torch.tensor([4, 3, 2, 1] * 2), small_batch()
    short = ShortRows(torch.tensor([0, 1, 4, 5]), torch.tensor([2, 1, 3, 2]), None, 0)
    plan, results = RowPlan(loops, 0, short, compared_rows(config.distill, loops)), []
    for is_compiled in (False, True):
        if is_compiled:
            compile_blocks(module)
        module.zero_grad()
        terms = module(batch, plan)
        step_share(terms, batch, config, step_totals(batch)).backward()
        results.append((terms, [p.grad.clone() for p in module.model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    readouts = {"_nll", "_nll_and_divergence", "_distance"}
    assert called == {"prelude", "loop", "coda"} | readouts


def test_without_gradients_the_blocks_are_eager(compiled, monkeypatch):
    """Validation would compile every block a second time."""

    def refuse(*args, **kwargs):
        raise AssertionError("a compiled block ran")

    blocks = compiled.compiled[0]._replace(loop=refuse)
    monkeypatch.setattr(compiled, "compiled", (blocks, compiled.compiled[1]))
    with torch.no_grad():
        compiled(small_batch(), RowPlan(2))
    with pytest.raises(AssertionError, match="a compiled block ran"):
        compiled(small_batch(), RowPlan(2))


def test_without_a_compiler_training_is_eager_and_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="needs a C\\+\\+ compiler"):
        module = small_module()
        assert not compile_blocks(module)
    assert module.compiled is None


def test_rows_get_the_loop_count_of_their_slice():
    assert per_row((3, 1), 2, is_mixed=True).tolist() == [3, 3, 1, 1]
    assert per_row((3, 3), 2, is_mixed=False) == 3
    assert per_row((3, 3), 2, is_mixed=True).tolist() == [3, 3, 3, 3]


def test_a_step_lowers_the_loss_and_reports_it_per_loop_count():
    module = small_module()
    optimizers = Optimizers(module.model, OptimConfig(lr=1e-2))
    loops = (4, 1, 4, 4)

    def step():
        return train_step(
            module, small_batch(), optimizers, loops_per_slice=loops, is_mixed=True,
            micro_batch_size=4, precision="fp32",
        )  # fmt: skip

    first = step()
    assert set(first.loss_by_loops) == {1, 4}
    assert first.num_targets == ROWS * (CONTEXT - 1)
    assert first.loss == pytest.approx(
        0.25 * first.loss_by_loops[1] + 0.75 * first.loss_by_loops[4], rel=1e-6
    )
    for _ in range(20):
        last = step()
    assert last.loss < first.loss - 0.2


def test_bf16_step_is_close_to_fp32():
    losses = {
        precision: mean_loss(
            small_module(modulated=False), small_batch(), num_loops=3, rows_per_forward=4,
            precision=precision,
        )
        for precision in ("fp32", "bf16")
    }  # fmt: skip
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=5e-3)
    assert losses["bf16"] != losses["fp32"]


def test_validation_does_not_depend_on_rows_per_forward():
    module, batch = small_module(), small_batch()
    losses = [
        mean_loss(module, batch, num_loops=2, rows_per_forward=n, precision="fp32")
        for n in (1, 3, 8)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
