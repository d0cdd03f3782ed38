"""Parcae against its released code; the golden case's README says what the tensors mean."""

import pytest
from goldens import close, open_golden, states_of

from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def case():
    return open_golden("parcae")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", range(1, 9))
def test_logits_at_every_loop_count(case, model, k):
    start = case.vectors["initial_state"]
    logits = model(case.vectors["input_ids"], num_loops=k, initial_state_BTD=start)
    close(logits, case.vectors[f"logits_k{k}"], TOLERANCE)


def test_states_before_the_projection(case, model):
    start = case.vectors["initial_state"]
    states = states_of(model, case.vectors["input_ids"], 8, initial_state_BTD=start)
    for k, state in enumerate(states, start=1):
        close(state, case.vectors[f"state_k{k}"], TOLERANCE)


def test_the_injected_prelude_output_is_normed(case, model):
    begun = model.begin(Call(case.vectors["input_ids"], num_loops=1))
    close(begun.h_in_BTD, case.vectors["prelude_out"], TOLERANCE)
