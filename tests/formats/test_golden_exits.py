"""Exit gates, stopping rules and halting against the published implementations.

The README of each golden case says what its tensors mean.
"""

import pytest
import torch
import torch.nn.functional as F
from goldens import close, open_golden, states_of

from depthdial.cache.contiguous import ContiguousCache
from depthdial.engine.adaptive import run_until
from depthdial.model.call import Call
from depthdial.model.halting import (
    exit_distribution,
    mix_by_distribution,
    q_exit,
    select_by_loop,
)
from depthdial.model.stopping_rules import ExitPoint, stopping_rule

ZERO_STATE = {"loop.initial_state": "zero", "loop.random_state_std": None}


# ---- a distribution over loops, and a threshold q on its sums


@pytest.fixture(scope="module")
def ouro():
    return open_golden("ouro").vectors


@pytest.fixture(scope="module")
def ouro_logits(ouro):
    return [ouro[f"logits_k{k}"] for k in range(1, 5)]


def test_the_exit_distribution(ouro):
    close(exit_distribution(ouro["gate_logits"]), ouro["exit_pdf"], 1e-5)


def test_loops_and_logits_at_every_q(ouro, ouro_logits):
    p_BTL = exit_distribution(ouro["gate_logits"])
    for i, q in enumerate(ouro["q_values"].tolist()):
        loops_BT = q_exit(p_BTL, q)
        assert torch.equal(loops_BT, ouro["qexit_loops"][i])
        close(select_by_loop(ouro_logits, loops_BT), ouro["qexit_logits"][i], 1e-4)


def test_the_default_threshold_of_one_never_exits(ouro, ouro_logits):
    loops_BT = q_exit(exit_distribution(ouro["gate_logits"]), 1.0)
    close(select_by_loop(ouro_logits, loops_BT), ouro["logits_default"], 1e-4)


def test_logits_weighted_by_the_distribution_and_their_loss(ouro, ouro_logits):
    mixed_BTV = mix_by_distribution(ouro_logits, exit_distribution(ouro["gate_logits"]))
    close(mixed_BTV, ouro["logits_weighted"], 1e-4)
    loss = F.cross_entropy(mixed_BTV[:, :-1].flatten(0, 1), ouro["input_ids"][:, 1:].flatten())
    close(loss[None], ouro["loss_with_labels"], 1e-4)


def followed(rule, points, *, before):
    """Loops used [N] and values [N, L] of a rule that sees the same rows after every pass."""
    memory = rule.begin(before)
    loops_N = torch.full((len(before.last_N),), len(points))
    values = []
    for loop_idx, point in enumerate(points):
        value_N, memory = rule.measure(point, memory)
        is_first_N = rule.stops(value_N) & (loops_N == len(points))
        loops_N[is_first_N] = loop_idx + 1
        values.append(value_N)
    return loops_N, torch.stack(values, dim=-1)


def point_at(state_NTD, *, gate_logit_N=None):
    """After a pass, no padding."""
    num_rows, num_tokens = state_NTD.shape[:2]
    return ExitPoint(
        state_NTD=state_NTD,
        is_token_NT=torch.ones(num_rows, num_tokens, dtype=torch.bool),
        last_N=torch.full((num_rows,), num_tokens - 1),
        logits_NV=None,
        gate_logit_N=gate_logit_N,
        vocab_size=96,
    )


def test_the_rule_for_generation_takes_the_same_decisions(ouro):
    """Pass by pass and without knowing the later gates, as token by token generation has to."""
    gates_NL = ouro["gate_logits"].flatten(0, 1)
    no_state = torch.zeros(len(gates_NL), 1, 1)
    points = [point_at(no_state, gate_logit_N=gate_N) for gate_N in gates_NL.T]
    for i, q in enumerate(ouro["q_values"].tolist()):
        loops_N, _ = followed(stopping_rule("q_exit", q), points, before=points[0])
        assert torch.equal(loops_N, ouro["qexit_loops"][i].flatten())


# ---- confidence, cumulative confidence, convergence


@pytest.fixture(scope="module")
def loopus():
    return open_golden("loopus").vectors


@pytest.fixture(scope="module")
def loopus_gate():
    return open_golden("loopus").model().exit_gate.requires_grad_(False)


@pytest.fixture(scope="module")
def loopus_points(loopus, loopus_gate):
    """Before the first pass and after each of the six."""
    states = [loopus[f"state_k{k}"] for k in range(7)]
    return [point_at(s, gate_logit_N=loopus_gate(s[:, -1:])[:, 0]) for s in states]


def test_the_confidence_reads_the_state_after_the_update(loopus, loopus_points):
    for k in range(1, 7):
        close(torch.sigmoid(loopus_points[k].gate_logit_N), loopus[f"conf_k{k}"], 1e-5)


def test_training_reads_the_difference_before_the_update(loopus, loopus_gate):
    """Both are published, and are different functions."""
    for k in range(1, 7):
        difference_BD = loopus[f"cand_k{k}"][:, -1:] - loopus[f"state_k{k - 1}"][:, -1:]
        close(loopus_gate(difference_BD)[:, 0], loopus[f"q_train_logit_k{k}"], 1e-5)


def test_the_distance_of_the_convergence_rule(loopus, loopus_points):
    _, values_NL = followed(
        stopping_rule("convergence"), loopus_points[1:], before=loopus_points[0]
    )
    expected_NL = torch.stack([loopus[f"delta_last_k{k}"] for k in range(1, 7)], dim=-1)
    close(values_NL, expected_NL, 2e-4)


@pytest.mark.parametrize("name", ["threshold", "cdf", "convergence"])
def test_halting_depths_and_logits(loopus, loopus_points, name):
    rule = stopping_rule(name, float(loopus[f"halt_param_{name}"]))
    loops_N, _ = followed(rule, loopus_points[1:], before=loopus_points[0])
    assert torch.equal(loops_N, loopus[f"halt_step_{name}"])
    by_loop = [loopus[f"logits_k{k}"] for k in range(1, 7)]
    halted_BTV = select_by_loop(by_loop, loops_N[:, None].expand(-1, 12))
    close(halted_BTV, loopus[f"logits_halt_{name}"], 5e-5)


# ---- the same decisions by running the model


@pytest.fixture(scope="module")
def ouro_run():
    """(exit distribution, logits of every loop) of one run of the model over all tokens."""
    case = open_golden("ouro")
    model = case.model()
    with torch.no_grad():
        states = states_of(model, case.vectors["input_ids"], 4)
        gates_BTL = torch.stack([model.exit_gate(state) for state in states], dim=-1)
        return exit_distribution(gates_BTL), [model.head(state) for state in states]


def test_the_exit_distribution_of_the_model(ouro, ouro_run):
    close(ouro_run[0], ouro["exit_pdf"], 1e-5)


def test_loops_and_logits_of_the_model_at_every_q(ouro, ouro_run):
    p_BTL, logits = ouro_run
    for i, q in enumerate(ouro["q_values"].tolist()):
        loops_BT = q_exit(p_BTL, q)
        assert torch.equal(loops_BT, ouro["qexit_loops"][i])
        close(select_by_loop(logits, loops_BT), ouro["qexit_logits"][i], 1e-4)


def test_weighted_logits_of_the_model_and_their_loss(ouro, ouro_run):
    p_BTL, logits = ouro_run
    mixed_BTV = mix_by_distribution(logits, p_BTL)
    close(mixed_BTV, ouro["logits_weighted"], 1e-4)
    loss = F.cross_entropy(mixed_BTV[:, :-1].flatten(0, 1), ouro["input_ids"][:, 1:].flatten())
    close(loss[None], ouro["loss_with_labels"], 1e-4)


def test_q_exit_of_single_tokens_takes_the_published_depths():
    """Against the gates of the full pass, at the first token: it has no others to attend to."""
    case = open_golden("ouro")
    model, v = case.model(), case.vectors
    for i, q in enumerate(v["q_values"].tolist()):
        run = run_until(
            model, Call(v["input_ids"][:, :1], num_loops=4), rule=stopping_rule("q_exit", q)
        )
        assert torch.equal(run.loops_B, v["qexit_loops"][i, :, 0])
        close(run.logits_BTV, v["qexit_logits"][i, :, :1], 1e-4)


HUGINN_THRESHOLDS = {
    "kl": 0.02, "latent-diff": 0.25, "entropy-diff": 0.02, "minp-kl": 0.05,
    "argmax-stability": 2, "cosine": 0.03,
}  # fmt: skip


@pytest.mark.parametrize("criterion", HUGINN_THRESHOLDS)
def test_six_criteria_token_by_token_on_a_cache_with_gaps(criterion):
    """Zero initial state; tokens with fewer loops leave gaps, which the newest entry fills."""
    case = open_golden("huginn")
    model, v = case.model(**ZERO_STATE), case.vectors
    rule = stopping_rule(criterion.replace("-", "_"), HUGINN_THRESHOLDS[criterion])
    tokens_BT = v["input_ids"]
    cache = ContiguousCache(model.config, batch_size=2, capacity=14, policy="huginn:latest-m4")
    runs = [
        run_until(model, Call(tokens_BT[:, t : t + 1], num_loops=8, cache=cache), rule=rule)
        for t in range(14)
    ]
    loops_BT = torch.stack([run.loops_B for run in runs], dim=1)
    assert torch.equal(loops_BT, v[f"exit_loops_{criterion}"])
    logits_BTV = torch.cat([run.logits_BTV for run in runs], dim=1)
    close(logits_BTV, v[f"exit_logits_{criterion}"], 2e-4)
    values_BTL = torch.stack([run.values_BL for run in runs], dim=1)
    close(values_BTL.nan_to_num(-1.0), v[f"exit_values_{criterion}"], 1e-4)


@pytest.mark.parametrize("name", ["threshold", "cdf", "convergence"])
def test_three_rules_halt_whole_sequences_without_a_cache(name):
    case = open_golden("loopus")
    model, v = case.model(), case.vectors
    rule = stopping_rule(name, float(v[f"halt_param_{name}"]))
    run = run_until(model, Call(v["input_ids"], num_loops=6), rule=rule)
    assert torch.equal(run.loops_B, v[f"halt_step_{name}"])
    close(run.logits_BTV, v[f"logits_halt_{name}"], 5e-5)
    assert not run.is_causal
