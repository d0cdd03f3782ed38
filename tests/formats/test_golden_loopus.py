"""LoopUS against its released code; the golden case's README says what the tensors mean."""

import pytest
from goldens import close, open_golden, states_of

from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.update import decay_rate

LOGITS, STATES, GATE = 5e-5, 2e-4, 1e-5


@pytest.fixture(scope="module")
def case():
    return open_golden("loopus")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


@pytest.fixture(scope="module")
def states(case, model):
    return states_of(model, case.vectors["input_ids"], 6)


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_logits_at_every_loop_count(case, model, k):
    logits = model(case.vectors["input_ids"], num_loops=k)
    close(logits, case.vectors[f"logits_k{k}"], LOGITS)


def test_states_of_every_loop(case, states):
    for k, state in enumerate(states, start=1):
        close(state, case.vectors[f"state_k{k}"], STATES)


def test_the_loop_starts_from_the_encoder_output(case, model):
    begun = model.begin(Call(case.vectors["input_ids"], num_loops=1))
    close(begun.initial_state_BTD, case.vectors["state_k0"], STATES)


@pytest.fixture(scope="module")
def updates(case, model):
    """(state before, candidate, state after) of each of the six updates of one run."""
    seen = []
    hook = model.state_update.register_forward_hook(
        lambda module, inputs, output: seen.append((inputs[0], inputs[1], output))
    )
    model(case.vectors["input_ids"], num_loops=6)
    hook.remove()
    assert len(seen) == 6
    return seen


def test_candidates_of_every_loop(case, updates):
    for k, (_, candidate, _) in enumerate(updates, start=1):
        close(candidate, case.vectors[f"cand_k{k}"], STATES)


def test_the_weight_of_the_candidate_in_every_channel(case, model, updates):
    for k, (before, candidate, _) in enumerate(updates, start=1):
        alpha = decay_rate(before, candidate, model.state_update.params())
        close(alpha, case.vectors[f"alpha_k{k}"], GATE)


def test_the_next_state_is_the_candidate_with_that_weight(case, updates):
    """s' = alpha r + (1 - alpha) s, with the reference's alpha."""
    for k, (before, candidate, after) in enumerate(updates, start=1):
        alpha = case.vectors[f"alpha_k{k}"]
        close(after, alpha * candidate + (1 - alpha) * before, STATES)
        # Where the step is large, the weight that was used can be read back from the states.
        moved = (candidate - before).abs() > 1
        assert moved.any()
        found = ((after - before) / (candidate - before))[moved]
        close(found, alpha[moved], GATE)


def test_confidence_of_the_stopping_head_at_the_last_position(case, model, states):
    for k, state in enumerate(states, start=1):
        confidence = model.exit_gate(state)[:, -1].sigmoid()
        close(confidence, case.vectors[f"conf_k{k}"], GATE)
