"""Distillation, shorter paths and truncated gradients: what they are, and what they leave alone."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthdial.config import (
    LoopConfig,
    ModelConfig,
    ModulationConfig,
    OptimConfig,
    TimeModulationConfig,
)
from depthdial.config.recipe import DistillConfig, ObjectiveConfig, TrajectoryConfig
from depthdial.data.packing import IGNORE, Batch
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.cost import step_flops
from depthdial.training.depth_schedule import DepthSchedule
from depthdial.training.losses import count_targets, short_path, step_loss_share, token_divergences
from depthdial.training.objective import (
    compared_rows,
    count_positions,
    num_compared,
    step_share,
    step_totals,
)
from depthdial.training.optim import Optimizers
from depthdial.training.step import (
    LossModule,
    RowPlan,
    StepPlan,
    plan_rows,
    plan_step,
    train_step,
)
from depthdial.training.teacher import Teacher

VOCAB, CONTEXT, ROWS = 31, 10, 4
DISTILL = ObjectiveConfig(distill=DistillConfig(weight=0.5))
TRAJECTORY = ObjectiveConfig(trajectory=TrajectoryConfig(short_weight=0.3, consistency_weight=0.7))
TIME = TimeModulationConfig(kind="time_step", embed_dim=8)
ELR = ModulationConfig(d_cond=8, rank=2, embed_dim=8)


def model(*, modulation=None, update="adaptive_delta", seed=0) -> LoopedLM:
    """A toy whose every parameter is random, so that every path matters."""
    config = ModelConfig(
        vocab_size=VOCAB, d_model=16, split=(1, 2, 1), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=16, max_context=CONTEXT, max_loops=6, init_std=0.2, modulation=modulation,
        loop=LoopConfig(update=update, injection="add"),
    )  # fmt: skip
    made = LoopedLM(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, 4] = IGNORE
    targets[2] = IGNORE
    return Batch(tokens[:, :-1], targets)


def gradients(
    module: LossModule, plan: RowPlan, config: ObjectiveConfig | None = None
) -> dict[str, Tensor]:
    of, rows = module.model, batch()
    of.zero_grad()
    terms = module(rows, plan)
    step_share(terms, rows, config or ObjectiveConfig(), step_totals(rows)).backward()
    return {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}


def test_divergence_is_that_of_the_definition_and_zero_where_nothing_is_scored():
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 5, 7, generator=generator) for _ in range(2))
    targets = torch.ones(2, 5, dtype=torch.long)
    targets[0, 2] = IGNORE
    found = token_divergences(student, teacher, targets)
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1)
    expected[0, 2] = 0.0
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    assert (found >= 0).all() and found[0, 2] == 0


def test_distillation_of_a_model_against_itself_is_nothing():
    """Value 0, and no gradient beside that of cross entropy."""
    student = model()
    module = LossModule(student, teacher=Teacher(copy.deepcopy(student), num_loops=1))
    plan = RowPlan(1, compared=slice(None))
    terms = module(batch(), plan)
    assert float(terms.divergence_BT.detach().abs().max()) <= 1e-7
    with_teacher = gradients(module, plan, DISTILL)
    plain = gradients(LossModule(student), RowPlan(1))
    for name, grad in plain.items():
        assert (with_teacher[name] - grad).abs().max() <= 1e-7, name


def test_distillation_pulls_the_student_to_the_teacher_which_does_not_move():
    student, teacher = model(), model(seed=5)
    before = copy.deepcopy(teacher.state_dict())
    config = ObjectiveConfig(distill=DistillConfig(weight=5.0))
    module = LossModule(student, teacher=Teacher(teacher, num_loops=2))
    optimizers = Optimizers(student, OptimConfig(optimizer="adamw", lr=1e-2, weight_decay=0.0))
    values = [
        train_step(
            module, batch(), optimizers, loops_per_slice=StepPlan.of_loops((3, 1)),
            micro_batch_size=4, precision="fp32", objective=config,
        ).terms["distill"]
        for _ in range(30)
    ]  # fmt: skip
    assert values[-1] < 0.5 * values[0]
    assert all(torch.equal(t, before[n]) for n, t in teacher.state_dict().items())
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())


def test_only_one_loop_rows_are_compared_where_the_config_says_so():
    one_loop = DistillConfig(weight=0.5, rows="one_loop")
    module = LossModule(model(), teacher=Teacher(model(seed=5), num_loops=1))

    def terms_at(num_loops, distill=one_loop):
        return module(batch(), RowPlan(num_loops, compared=compared_rows(distill, num_loops)))

    terms = terms_at(torch.tensor([1, 3, 3, 1]))
    assert (terms.divergence_BT[[0, 3]].sum(dim=1) > 0).all()
    assert not terms.divergence_BT[[1, 2]].any()
    assert terms_at(torch.tensor([2, 3, 3, 2])).divergence_BT is None
    assert terms_at(3).divergence_BT is None
    everywhere = terms_at(torch.tensor([1, 3, 3, 1]), DISTILL.distill).divergence_BT
    torch.testing.assert_close(terms.divergence_BT[[0, 3]], everywhere[[0, 3]])


@pytest.mark.parametrize("modulation", [None, ELR])
def test_no_loop_without_gradient_is_the_full_gradient(modulation):
    of = model(modulation=modulation)
    module = LossModule(of)
    full = gradients(module, RowPlan(4))
    for zero in (0, torch.zeros(ROWS, dtype=torch.long)):
        same = gradients(module, RowPlan(torch.full((ROWS,), 4), zero))
        for name, grad in full.items():
            torch.testing.assert_close(same[name], grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("update", ["adaptive_delta", "replace", "residual"])
def test_truncated_gradients_are_those_of_an_explicit_detach(update):
    """The reference runs every loop with gradient and cuts the state by hand."""
    of = model(update=update)
    truncated = gradients(LossModule(of), RowPlan(5, 3))
    of.zero_grad()
    rows = batch()
    logits = of(
        rows.tokens_BT,
        num_loops=5,
        on_loop=lambda loop_idx, state, _: state.detach() if loop_idx == 2 else None,
    )
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), rows.targets_BT.flatten(), ignore_index=IGNORE
    )
    loss.backward()
    for name, parameter in of.named_parameters():
        torch.testing.assert_close(truncated[name], parameter.grad, atol=1e-7, rtol=1e-5)


def test_rows_of_different_truncation_are_each_as_alone():
    of = model()
    loss_module, rows = LossModule(of), batch()
    loops, no_grad = torch.tensor([5, 2, 6, 3]), torch.tensor([3, 0, 4, 1])
    together = gradients(loss_module, RowPlan(loops, no_grad))
    of.zero_grad()
    targets = count_targets(rows.targets_BT)
    for row in range(ROWS):
        part = Batch(rows.tokens_BT[row : row + 1], rows.targets_BT[row : row + 1])
        nll = loss_module(part, RowPlan(int(loops[row]), int(no_grad[row]))).nll_BT
        step_loss_share(nll, step_weight=targets).backward()
    for name, parameter in of.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-6, rtol=1e-4)


@given(st.integers(0, 2**63 - 1), st.integers(0, 5000), st.integers(1, 40))
def test_short_paths_are_shorter_and_cover_the_whole_time(seed, step, num_loops):
    path = short_path(seed, step=step, draw_idx=0, num_loops=num_loops)
    if num_loops == 1:
        assert path == ()
        return
    assert 1 <= len(path) < num_loops and sum(path) == num_loops and min(path) >= 1
    assert path == short_path(seed, step=step, draw_idx=0, num_loops=num_loops)


@pytest.mark.parametrize("modulation", [None, ELR, TIME])
def test_terms_of_the_shorter_path_are_those_of_a_second_forward(modulation):
    """Two slices with a path, one of a single loop that has none."""
    of = model(modulation=modulation)
    is_conditioned = modulation is TIME
    module = LossModule(of)
    plan = StepPlan((4, 1, 6, 4), (0,) * 4, ((3, 1), (), (1, 4, 1), (2, 2)), (0,) * 4)
    rows = batch()
    terms = module(
        rows, plan_rows(plan, slice(None), rows_per_slice=1, is_conditioned=is_conditioned)
    )
    for row, (loops, path) in enumerate(zip(plan.loops, plan.short_paths, strict=True)):
        tokens = rows.tokens_BT[row : row + 1]
        long = of.final_norm(of.hidden_states(Call(tokens, num_loops=loops)))[0]
        if not path:
            assert not terms.short_nll_BT[row].any() and not terms.distance_BT[row].any()
            continue
        steps = torch.tensor(path) / loops if is_conditioned else None
        short_x = of.hidden_states(Call(tokens, num_loops=len(path), step_sizes=steps))
        distance = (long - of.final_norm(short_x)[0]).square().mean(dim=-1)
        torch.testing.assert_close(terms.distance_BT[row], distance, atol=1e-5, rtol=1e-4)
        nll = torch.nn.functional.cross_entropy(
            of.head(short_x)[0], rows.targets_BT[row], ignore_index=IGNORE, reduction="none"
        )
        torch.testing.assert_close(terms.short_nll_BT[row], nll, atol=1e-5, rtol=1e-4)


def test_consistency_moves_the_short_path_only():
    """With nothing but the distance, the long path's loops beyond the short one get no gradient:
    the gradient equals that of a distance to a constant."""
    of = model(modulation=TIME)
    plan = StepPlan((4,) * 4, (0,) * 4, ((3, 1),) * 4, (0,) * 4, is_mixed=False)
    rows = batch()
    row_plan = plan_rows(plan, slice(None), rows_per_slice=1, is_conditioned=True)
    terms = LossModule(of)(rows, row_plan)
    terms.distance_BT.mean().backward()
    found = {n: p.grad.clone() for n, p in of.named_parameters() if p.grad is not None}
    of.zero_grad()
    with torch.no_grad():
        target = of.final_norm(of.hidden_states(Call(rows.tokens_BT, num_loops=4)))
    steps = torch.tensor([0.75, 0.25])
    short = of.final_norm(of.hidden_states(Call(rows.tokens_BT, num_loops=2, step_sizes=steps)))
    (short - target).square().mean().backward()
    for name, grad in found.items():
        torch.testing.assert_close(grad, of.get_parameter(name).grad, atol=1e-6, rtol=1e-4)


def test_b25_terms_do_not_depend_on_the_micro_batch_size():
    plan = StepPlan((4, 1, 6, 2), (1, 0, 3, 0), ((3, 1), (), (1, 5), (2,)), (0, 0, 1, 0))
    config = ObjectiveConfig(distill=DistillConfig(weight=0.5), trajectory=TRAJECTORY.trajectory)
    found = []
    for micro in (1, 2, 4):
        of = model(modulation=TIME)
        module = LossModule(of, teacher=Teacher(model(seed=5), num_loops=1))
        optimizers = Optimizers(of, OptimConfig(grad_clip=1e9))
        optimizers.set_lr_scale(0.0)
        result = train_step(
            module, batch(), optimizers, loops_per_slice=plan,
            micro_batch_size=micro, precision="fp32", objective=config,
        )  # fmt: skip
        found.append((result, {n: p.grad for n, p in of.named_parameters()}))
    for result, grads in found[1:]:
        assert result.terms == pytest.approx(found[0][0].terms, abs=1e-6)
        for name, grad in found[0][1].items():
            assert (grads[name] - grad).abs().max() <= 1e-6, name


def test_padding_is_no_part_of_the_consistency():
    of = model(modulation=TIME)
    plan = StepPlan((4,) * 4, (0,) * 4, ((3, 1),) * 4, (0,) * 4, is_mixed=False)
    row_plan = plan_rows(plan, slice(None), rows_per_slice=1, is_conditioned=True)
    mask = torch.ones(ROWS, CONTEXT, dtype=torch.bool)
    mask[1, 6:] = False
    rows = batch()._replace(padding_mask_BT=mask)
    terms = LossModule(of)(rows, row_plan)
    assert not terms.distance_BT[1, 6:].any() and terms.distance_BT[1, :6].all()
    assert count_positions(rows) == ROWS * CONTEXT - 4


def test_a_step_plan_is_drawn_from_the_step_alone():
    schedule = DepthSchedule(
        sampler="poisson_truncated", mean_loops=4, max_loops=12, backprop_loops=2, seed=3
    )
    made = [
        plan_step(schedule, step=9, num_slices=8, is_mixed=True, has_short_paths=True)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    plan = made[0]
    assert all(n == max(0, k - 2) for k, n in zip(plan.loops, plan.no_grad_loops, strict=True))
    lengths = [len(path) for path in plan.short_paths]
    assert all(m < k for k, m in zip(plan.loops, lengths, strict=True))
    assert list(plan.short_no_grad_loops) == [max(0, m - 2) for m in lengths]
    assert len({path for path in plan.short_paths if path}) > 1


def test_flops_count_the_truncated_loops_forward_only_and_every_second_forward():
    config = model().config

    def flops(plan: StepPlan, **teacher) -> float:
        return step_flops(config, plan.forwards, context=8, tokens_per_slice=1, **teacher)

    one, two, four = (flops(StepPlan.of_loops((k,))) for k in (1, 2, 4))
    core = (four - two) / 2
    assert flops(StepPlan((4,), (3,))) == pytest.approx(one + core)
    assert flops(StepPlan((4, 1), (0, 0), ((2, 2), ()), (0, 0))) == pytest.approx(four + one + two)
    plan, one_loop = StepPlan.of_loops((4, 1)), DistillConfig(weight=0.5, rows="one_loop")
    for distill, compared in ((None, 0), (one_loop, 1), (DISTILL.distill, 2)):
        assert num_compared(distill, plan.loops) == compared
        distilled = flops(plan, teacher=(config, 1), num_compared=compared)
        assert distilled == pytest.approx(four + one + compared * one / 3)
