"""IQuest-Coder Loop against its public runtimes; the README says what the tensors mean."""

import pytest
import torch
from goldens import close, open_golden, states_of

from depthdial.model.looped_lm import LoopedLM

TOLERANCE, GATES = 1e-4, 1e-5


@pytest.fixture(scope="module")
def case():
    return open_golden("iquest-loop")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", [1, 2])
def test_logits_at_every_loop_count(case, model, k):
    logits = model(case.vectors["input_ids"], num_loops=k)
    close(logits, case.vectors[f"logits_k{k}"], TOLERANCE)


def test_states_of_every_loop(case, model):
    for k, state in enumerate(states_of(model, case.vectors["input_ids"], 2), start=1):
        close(state, case.vectors[f"state_k{k}"], TOLERANCE)


def test_the_gate_between_global_and_local_attention(case, model):
    gates = {}

    def record(layer):
        # A hook that returns something replaces the output, so this one returns nothing.
        return lambda module, inputs, output: gates.update({layer: output[..., 0]})

    hooks = [
        model.core_stack[2 * layer].mixer.mix_gate.register_forward_hook(record(layer))
        for layer in range(3)
    ]
    model(case.vectors["input_ids"], num_loops=2)
    for hook in hooks:
        hook.remove()
    # [B, loops after the first, layers, heads, T] of the reference.
    found = torch.stack([gates[layer].transpose(1, 2) for layer in range(3)], dim=1)[:, None]
    close(found, case.vectors["gates"], GATES)
