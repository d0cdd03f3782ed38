"""LoopFormer against its released code; the golden case's README says what the tensors mean."""

import pytest
import torch
from goldens import close, open_golden, states_of

from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

LOGITS, STATES = 5e-4, 5e-4
PATHS = ["coarse_first", "fine_first", "mixed", "one", "seven", "two"]


@pytest.fixture(scope="module")
def case():
    return open_golden("loopformer")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", range(1, 9))
def test_logits_and_hidden_of_uniform_paths(case, model, k):
    hidden = model.final_norm(model.hidden_states(Call(case.vectors["input_ids"], num_loops=k)))
    close(hidden, case.vectors[f"hidden_k{k}"], STATES)
    close(model(case.vectors["input_ids"], num_loops=k), case.vectors[f"logits_k{k}"], LOGITS)


def test_states_of_every_loop_of_the_longest_path(case, model):
    for k, state in enumerate(states_of(model, case.vectors["input_ids"], 8), start=1):
        close(state, case.vectors[f"state_k{k}"], STATES)


@pytest.mark.parametrize("path", PATHS)
def test_logits_of_any_path(case, model, path):
    steps = case.vectors[f"steps_{path}"]
    logits = model(case.vectors["input_ids"], num_loops=len(steps), step_sizes=steps)
    close(logits, case.vectors[f"logits_{path}"], LOGITS)
    targets = case.vectors["targets"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(loss[None], case.vectors[f"loss_{path}"], 2e-5)
