"""Nanbeige4.2 and its switches against the released code, with correct rotary frequencies."""

import pytest
from goldens import close, open_golden, states_of

from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 1e-4
LOOP_SPLIT = {"enable_double_loop_split": True, "loop_middle_layers": 2}


@pytest.fixture(scope="module")
def case():
    return open_golden("nanbeige")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", [1, 2])
def test_logits_at_every_loop_count(case, model, k):
    logits = model(case.vectors["input_ids"], num_loops=k)
    close(logits, case.vectors[f"logits_k{k}"], TOLERANCE)


def test_states_end_every_pass_with_the_final_norm(case, model):
    for k, state in enumerate(states_of(model, case.vectors["input_ids"], 2), start=1):
        close(state, case.vectors[f"state_k{k}"], TOLERANCE)


@pytest.mark.parametrize(
    ("switches", "vector"),
    [
        ({"skip_loop_final_norm": True}, "skip_norm_logits"),
        (LOOP_SPLIT, "loopsplit_m2_logits"),
        ({**LOOP_SPLIT, "loop_share_kv": True}, "loopsplit_m2_sharekv_logits"),
    ],
)
def test_switches_of_the_released_code(switches, vector):
    case = open_golden("nanbeige", **switches)
    logits = case.model()(case.vectors["input_ids"], num_loops=case.config.num_loops)
    close(logits, case.vectors[vector], TOLERANCE)
