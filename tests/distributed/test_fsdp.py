"""FSDP2 around the loss module alone: two processes compute what one does, in float64.

Each case runs the same two slices of a global batch: in one process one after the other, in two
processes one each. Gradients, losses and terms must agree to 1e-10.
"""

import copy
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from depthdial.config import (
    LoopConfig,
    LoopLoraConfig,
    ModelConfig,
    ModulationConfig,
    TimeModulationConfig,
)
from depthdial.config.recipe import DistillConfig, ObjectiveConfig, TrajectoryConfig
from depthdial.data.packing import IGNORE, Batch, take_rows
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.objective import step_share, step_totals
from depthdial.training.parallel import share_gradients
from depthdial.training.step import LossModule, RowPlan, StepPlan, plan_rows
from depthdial.training.teacher import Teacher

WORLD, ROWS, CONTEXT, VOCAB = 2, 4, 8, 23
CPU = torch.device("cpu")
ELR = ModulationConfig(d_cond=8, rank=2, embed_dim=8)
TIME = TimeModulationConfig(kind="time_step", embed_dim=8)
LORA = LoopLoraConfig(rank=2, sets_by_loop=(-1, 0, 1, 1))
PATHS = ((3, 1), (), (1, 2), (2,))


def model_of(seed: int = 0, **changes) -> LoopedLM:
    """A toy whose every parameter is random, in float64."""
    fields = {
        "vocab_size": VOCAB, "d_model": 16, "split": (2, 2, 2), "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 8, "d_ff": 16, "max_context": CONTEXT, "max_loops": 4, "init_std": 0.2,
        "loop": LoopConfig(update="adaptive_delta", injection="add"),
    }  # fmt: skip
    model = LoopedLM(ModelConfig(**fields | changes), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def global_batch() -> Batch:
    """Rows with unequal numbers of targets, packed documents and token weights."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :6] = IGNORE
    documents = (torch.arange(CONTEXT) > 3).long().expand(ROWS, -1)
    weights = torch.rand(ROWS, CONTEXT, generator=generator, dtype=torch.float64)
    return Batch(tokens[:, :-1], targets, documents, weights_BT=weights)


OBJECTIVE = ObjectiveConfig(
    distill=DistillConfig(weight=0.5, rows="one_loop"), trajectory=TrajectoryConfig()
)
CASES = {
    "mixed depth": ({"modulation": ELR}, StepPlan.of_loops((4, 1, 3, 2)), ObjectiveConfig()),
    "one process at one loop": ({"loop_lora": LORA}, StepPlan.of_loops((1, 1, 4, 3)),
                                ObjectiveConfig()),
    "distillation and short paths": ({}, StepPlan((4, 1, 3, 2), (1, 0, 0, 0), PATHS, (0,) * 4),
                                     OBJECTIVE),
    "told step sizes": ({"modulation": TIME}, StepPlan((4, 1, 3, 2), (0,) * 4, PATHS, (0,) * 4),
                        ObjectiveConfig(trajectory=TrajectoryConfig())),
}  # fmt: skip
"""Name -> changes of the model, plan of four slices, objective."""


def loss_module_of(changes, objective: ObjectiveConfig) -> LossModule:
    teacher = Teacher(model_of(seed=5), num_loops=2) if objective.distill else None
    return LossModule(model_of(**changes), teacher=teacher)


def run_slices(module: LossModule, name: str, slices: slice) -> dict[str, float]:
    """Forward and backward of some slices; returns their summed terms."""
    changes, plan, objective = CASES[name]
    batch = global_batch()
    part = take_rows(batch, slices.start, slices.stop, device=CPU)
    rows = plan_rows(
        plan, slices, rows_per_slice=1, is_conditioned=changes.get("modulation") is TIME,
        distill=objective.distill,
    )  # fmt: skip
    terms = module(part, rows)
    step_share(terms, part, objective, step_totals(batch)).backward()
    named = terms._asdict().items()
    return {key: float(x.detach().sum()) for key, x in named if x is not None}


def validate(module: LossModule, rows: slice) -> dict[str, float]:
    part = take_rows(global_batch(), rows.start, rows.stop, device=CPU)
    with torch.no_grad():
        return {f"val k={k}": float(module(part, RowPlan(k)).nll_BT.sum()) for k in (1, 4)}


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    found = {}
    for name, (changes, _, objective) in CASES.items():
        module = loss_module_of(changes, objective)
        share_gradients(module)
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        sums = run_slices(module, name, slice(2 * rank, 2 * rank + 2))
        grads = {n: p.grad for n, p in module.model.named_parameters()}
        whole = {n: g.full_tensor() for n, g in grads.items() if g is not None}
        sums |= validate(module, slice(2 * rank, 2 * rank + 2))
        gathered = [None] * WORLD
        dist.all_gather_object(gathered, sums)
        found[name] = (whole, gathered)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, str(folder)), nprocs=WORLD, join=True)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(sharded, name):
    changes, _, objective = CASES[name]
    module = loss_module_of(changes, objective)
    expected = run_slices(module, name, slice(0, 2)), run_slices(module, name, slice(2, 4))
    grads, gathered = sharded[name]
    for rank, sums in enumerate(expected):
        wanted = sums | validate(module, slice(2 * rank, 2 * rank + 2))
        assert gathered[rank] == pytest.approx(wanted, abs=1e-10, rel=0)
    alone = {n: p.grad for n, p in module.model.named_parameters() if p.grad is not None}
    assert alone.keys() <= grads.keys()
    for parameter, grad in grads.items():
        wanted = alone.get(parameter, torch.zeros_like(grad))
        assert (grad - wanted).abs().max() <= 1e-10, parameter


def test_parameters_that_only_later_loops_use_get_a_gradient_in_every_process():
    """One process runs one loop only: without it the processes would wait for each other."""
    module = loss_module_of({"loop_lora": LORA}, ObjectiveConfig())
    share_gradients(module)
    run_slices(module, "one process at one loop", slice(0, 2))
    names = [n for n, p in module.model.named_parameters() if p.grad is None]
    assert names == []
    plain = copy.deepcopy(loss_module_of({"loop_lora": LORA}, ObjectiveConfig()))
    run_slices(plain, "one process at one loop", slice(0, 2))
    assert any(p.grad is None for p in plain.model.parameters())
    for (name, p), q in zip(module.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p.grad, torch.zeros_like(p) if q.grad is None else q.grad), name
