"""Ouro against its released code; the golden case's README says what the tensors mean."""

import pytest
import torch
from goldens import close, open_golden, states_of

from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def case():
    return open_golden("ouro")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_logits_at_every_loop_count(case, model, k):
    logits = model(case.vectors["input_ids"], num_loops=k)
    close(logits, case.vectors[f"logits_k{k}"], TOLERANCE)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_nll_of_every_next_token_in_nats(case, model, k):
    tokens = case.vectors["input_ids"]
    logits = model(tokens, num_loops=k)
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    close(nll, case.vectors[f"nll_k{k}"], TOLERANCE)


def test_states_end_every_loop_with_the_final_norm(case, model):
    for k, state in enumerate(states_of(model, case.vectors["input_ids"], 4), start=1):
        close(state, case.vectors[f"state_k{k}"], TOLERANCE)


def test_the_default_loop_count_gives_the_released_default_output(case, model):
    logits = model(case.vectors["input_ids"], num_loops=case.config.num_loops)
    close(logits, case.vectors["logits_default"], TOLERANCE)


def test_gate_logits_of_every_loop(case, model):
    for k, state in enumerate(states_of(model, case.vectors["input_ids"], 4)):
        close(model.exit_gate(state), case.vectors["gate_logits"][..., k], TOLERANCE)
