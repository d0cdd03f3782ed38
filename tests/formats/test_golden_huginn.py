"""Huginn against its released code; the golden case's README says what the tensors mean."""

import pytest
import torch
from goldens import close, open_golden, states_of

from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

LOGITS, STATES = 2e-4, 1e-4
LOOPS = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def case():
    return open_golden("huginn")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


@pytest.fixture(params=["", "rand_"])
def start(request, case):
    """(prefix of the vectors' names, initial state)."""
    state = case.vectors["initial_state"]
    return request.param, state if request.param else torch.zeros_like(state)


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", LOOPS)
def test_logits_from_a_zero_and_from_a_drawn_state(case, model, start, k):
    prefix, state = start
    logits = model(case.vectors["input_ids"], num_loops=k, initial_state_BTD=state)
    close(logits, case.vectors[f"{prefix}logits_k{k}"], LOGITS)


def test_states_and_normed_states_of_every_loop(case, model, start):
    prefix, state = start
    states = states_of(model, case.vectors["input_ids"], 8, initial_state_BTD=state)
    for k in LOOPS:
        close(states[k - 1], case.vectors[f"{prefix}state_k{k}"], STATES)
        close(model.final_norm(states[k - 1]), case.vectors[f"{prefix}latent_k{k}"], STATES)


def test_zero_is_the_state_of_a_model_imported_with_a_zero_start(case):
    zero = {"loop.initial_state": "zero", "loop.random_state_std": None}
    logits = case.model(**zero)(case.vectors["input_ids"], num_loops=4)
    close(logits, case.vectors["logits_k4"], LOGITS)


def test_prelude_output(case, model):
    begun = model.begin(Call(case.vectors["input_ids"], num_loops=1))
    close(begun.h_in_BTD, case.vectors["prelude_out"], STATES)


def test_the_drawn_state_has_the_spread_of_the_released_one(case, model):
    """Truncated normal of sqrt(2 / (5 d)) sqrt(d) = sqrt(2 / 5), cut at three of them."""
    tokens = torch.zeros(64, 64, dtype=torch.long)
    drawn = model.begin(Call(tokens, num_loops=1)).initial_state_BTD
    assert case.config.loop.random_state_std == pytest.approx((2 / 5) ** 0.5)
    assert drawn[0].std() == pytest.approx((2 / 5) ** 0.5, rel=0.03)
    assert drawn.abs().max() <= 3 * (2 / 5) ** 0.5


def test_loss_in_nats(case, model):
    zero = torch.zeros_like(case.vectors["initial_state"])
    tokens = case.vectors["input_ids"]
    logits = model(tokens, num_loops=8, initial_state_BTD=zero)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    close(loss[None], case.vectors["loss_k8"], LOGITS)
