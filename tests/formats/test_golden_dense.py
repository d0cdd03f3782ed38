"""Dense Llama and Qwen3 against transformers, and their middle layers looped without change."""

import pytest
import torch
from goldens import close, open_golden, states_of

from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 1e-4
NUM_LAYERS = 6


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def case(request):
    return open_golden(request.param)


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def looped(case, first, last):
    """Layers [first, last) as the core."""
    split = [2 * first, 2 * (last - first), 2 * (NUM_LAYERS - last)]
    return case.model(split=split, max_loops=3)


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


def test_logits_and_losses(case, model):
    tokens = case.vectors["input_ids"]
    logits = model(tokens, num_loops=1)
    close(logits, case.vectors["logits"], TOLERANCE)
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    close(nll, case.vectors["nll"], TOLERANCE)


def test_embeddings_every_layer_and_the_final_norm(case, model):
    tokens, outputs = case.vectors["input_ids"], []
    close(model.embed(tokens), case.vectors["embeddings"], TOLERANCE)
    hooks = [
        model.core_stack[2 * layer + 1].register_forward_hook(
            lambda module, inputs, output: outputs.append(output)
        )
        for layer in range(NUM_LAYERS)
    ]
    hidden = model.final_norm(model.hidden_states(Call(tokens, num_loops=1)))
    for hook in hooks:
        hook.remove()
    close(torch.stack(outputs), case.vectors["layer_outputs"], TOLERANCE)
    close(hidden, case.vectors["final_hidden"], TOLERANCE)


@pytest.mark.parametrize("window", [(1, 3), (2, 5)])
@pytest.mark.parametrize("k", [2, 3])
def test_rigid_middle_loops(case, window, k):
    first, last = window
    logits = looped(case, first, last)(case.vectors["input_ids"], num_loops=k)
    close(logits, case.vectors[f"mid{first}_{last}_logits_k{k}"], TOLERANCE)


@pytest.mark.parametrize("window", [(1, 3), (2, 5)])
def test_one_rigid_loop_is_the_dense_model(case, model, window):
    tokens = case.vectors["input_ids"]
    assert torch.equal(looped(case, *window)(tokens, num_loops=1), model(tokens, num_loops=1))


@pytest.mark.parametrize("window", [(1, 3), (2, 5)])
def test_states_of_every_rigid_loop(case, window):
    first, last = window
    states = states_of(looped(case, first, last), case.vectors["input_ids"], 3)
    close(torch.stack(states), case.vectors[f"mid{first}_{last}_states"], TOLERANCE)
