"""States after the prelude, every loop and the coda, compared with a named reference."""

import pytest
import torch
from goldens import close, open_golden
from parity import compare_states, state_labels, trace_states

REFERENCE = "seal-rg/recurrent-pretraining, commit 59e0b69, float32"
K = 4


@pytest.fixture(scope="module")
def case():
    return open_golden("huginn")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


@pytest.fixture(scope="module")
def start(case):
    """Tokens and the zero state that the reference starts from."""
    tokens = case.vectors["input_ids"]
    return tokens, torch.zeros_like(case.vectors["prelude_out"])


@pytest.fixture(scope="module")
def expected(case):
    states = {f"loop {k}": case.vectors[f"state_k{k}"] for k in (1, 2, 4)}
    return states | {
        "prelude": case.vectors["prelude_out"],
        "logits": case.vectors[f"logits_k{K}"],
    }


@pytest.mark.parametrize("name", ["huginn", "ouro", "dory", "loopformer", "parcae", "llama"])
@pytest.mark.parametrize("num_loops", [1, 3])
def test_b49_there_are_k_plus_2_entries_and_the_last_gives_the_logits(name, num_loops):
    case = open_golden(name)
    model, tokens = case.model(), case.vectors["input_ids"]
    states = trace_states(model, tokens, num_loops)
    assert len(states) == num_loops + 2 == len(state_labels(num_loops))
    assert torch.equal(model.head(states[-1]), model(tokens, num_loops=num_loops))


@pytest.mark.parametrize(
    ("name", "prelude", "loops", "tolerances"),
    [
        ("huginn", "prelude_out", (1, 2, 4), (1e-4, 2e-4)),
        ("dory", "input_h", (1, 2, 3, 4), (1e-5, 5e-5)),
        ("ouro", None, (1, 2, 3, 4), (1e-4, 1e-4)),
        ("parcae", "prelude_out", (1, 2, 3, 4), (2e-4, 2e-4)),
    ],
)
def test_b49_the_entries_are_those_of_the_published_code(name, prelude, loops, tolerances):
    """The prelude and every loop, within the tolerance of states; the coda by its logits."""
    case = open_golden(name)
    model, vectors = case.model(), case.vectors
    start = vectors.get("initial_state")
    if name == "huginn":
        start = torch.zeros_like(start)
    states = trace_states(model, vectors["input_ids"], K, initial_state_BTD=start)
    if prelude is not None:
        close(states[0], vectors[prelude], tolerances[0])
    for k in loops:
        close(states[k], vectors[f"state_k{k}"], tolerances[0])
    close(model.head(states[-1]), vectors[f"logits_k{K}"], tolerances[1])


def test_b49_a_report_names_its_reference_and_prints_a_cosine_for_every_loop(
    model, start, expected
):
    report = compare_states(
        model, start[0], K, expected=expected, reference=REFERENCE, initial_state_BTD=start[1]
    )
    text = report.to_text()
    assert text.startswith(f"reference: {REFERENCE}\n4 loops\n")
    assert [row.label for row in report.rows] == ["prelude", "loop 1", "loop 2", "loop 4", "logits"]
    assert all(row.cosine > 1 - 1e-6 for row in report.rows)
    assert report.max_difference < 2e-4
    assert text.endswith("not in the reference: loop 3, coda")
    assert all(f"{row.cosine:.8f}" in text for row in report.rows)


def test_b49_a_wrong_loop_is_seen_although_all_tensors_have_the_right_shape(model, start, expected):
    swapped = expected | {"loop 1": expected["loop 2"], "loop 2": expected["loop 1"]}
    report = compare_states(
        model, start[0], K, expected=swapped, reference=REFERENCE, initial_state_BTD=start[1]
    )
    cosines = {row.label: row.cosine for row in report.rows}
    assert cosines["loop 1"] < 0.99 and cosines["loop 2"] < 0.99 and cosines["loop 4"] > 0.9999


def test_the_cosine_is_that_of_the_worst_token(model, start, expected):
    one_wrong = expected["logits"].clone()
    one_wrong[1, 3] *= -1
    report = compare_states(
        model,
        start[0],
        K,
        expected={"logits": one_wrong},
        reference=REFERENCE,
        initial_state_BTD=start[1],
    )
    assert report.rows[0].cosine == pytest.approx(-1, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"reference": " "}, "needs a named reference"),
        ({"expected": {}}, "proves nothing"),
        ({"expected": {"loop 5": torch.zeros(1)}}, r"unknown labels \['loop 5'\]"),
        ({"expected": {"loop 1": torch.zeros(2, 1, 40)}}, "must be of the same tokens"),
    ],
)
def test_a_comparison_that_proves_nothing_is_refused(model, start, expected, changes, match):
    arguments = {"expected": expected, "reference": REFERENCE} | changes
    with pytest.raises(ValueError, match=match):
        compare_states(model, start[0], K, **arguments)


def test_states_of_a_step_schedule_are_traced_too():
    case = open_golden("loopformer")
    model, tokens = case.model(), case.vectors["input_ids"]
    steps = torch.tensor([0.5, 0.25, 0.25])
    states = trace_states(model, tokens, 3, step_sizes=steps)
    assert torch.equal(model.head(states[-1]), model(tokens, num_loops=3, step_sizes=steps))
