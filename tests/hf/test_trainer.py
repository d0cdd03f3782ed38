"""Training through transformers: losses and gradients of trainers that accumulate."""

import copy

import pytest
import torch
from toys import toy_config, toy_model, toy_tokens
from transformers import Trainer, TrainingArguments

from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import DepthdialForCausalLM

TRAINS = True
TOKENS = toy_tokens(8, 32)
NUM_TARGETS = (31, 2, 2, 31, 2, 31, 31, 2)
LABELS = TOKENS.masked_fill(torch.arange(32) <= 31 - torch.tensor(NUM_TARGETS)[:, None], -100)
ROWS = [{"input_ids": ids, "labels": row} for ids, row in zip(TOKENS, LABELS, strict=True)]


@pytest.fixture(scope="module")
def source():
    """A toy that no test changes."""
    wrapped = DepthdialForCausalLM(DepthdialConfig(**toy_config().to_dict()))
    wrapped.model.load_state_dict(toy_model().state_dict())
    return wrapped


def gradients(model, row_groups, **arguments):
    """Gradients of one optimizer step whose rows come in these groups."""
    model.zero_grad()
    for rows in row_groups:
        model(TOKENS[rows], labels=LABELS[rows], num_loops=3, **arguments).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def largest_difference(first, second):
    return max(float((a - b).detach().abs().max()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_f07_rows_of_31_or_2_targets_at_once_or_one_by_one_give_one_gradient(source, kind):
    """A mean of each row's mean gave rows of 2 targets the weight of 31."""
    at_once = gradients(source, [list(range(8))])
    one_by_one = gradients(
        source, [[row] for row in range(8)], num_items_in_batch=kind(sum(NUM_TARGETS))
    )
    assert largest_difference(at_once, one_by_one) <= 1e-6
    assert max(float(g.abs().max()) for g in at_once) > 1e-2


def step_of_trainer(source, folder, *, batch_size, rows=ROWS, **arguments):
    """Weights after one step of plain gradient descent over the 8 rows."""
    model = copy.deepcopy(source)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size,
        max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, **arguments,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train()
    return list(model.parameters())


def test_f07_the_trainer_steps_alike_however_it_accumulates(source, tmp_path):
    """Trainer passed no count of items, because `forward` did not say that it takes one."""
    steps = [step_of_trainer(source, tmp_path, batch_size=size) for size in (8, 2, 1)]
    assert largest_difference(steps[0], steps[1]) <= 1e-6
    assert largest_difference(steps[0], steps[2]) <= 1e-6
    assert largest_difference(steps[0], list(source.parameters())) > 1e-2


def test_f07_smoothed_labels_are_those_of_the_next_token(source, tmp_path):
    """Trainer smoothed the labels of the tokens themselves: it did not know the class."""
    whole = copy.deepcopy(source)
    smoothing = 0.1
    loss = whole(TOKENS, labels=LABELS).loss
    logits = whole(TOKENS).logits[:, :-1].log_softmax(dim=-1)
    is_target = LABELS[:, 1:] != -100
    loss = (1 - smoothing) * loss - smoothing * logits[is_target].mean()
    loss.backward()
    expected = [p if p.grad is None else p - p.grad for p in whole.parameters()]
    actual = step_of_trainer(source, tmp_path, batch_size=4, label_smoothing_factor=smoothing)
    assert largest_difference(actual, expected) <= 1e-5


def test_f07_without_a_count_the_loss_is_the_mean_over_the_calls_targets(source):
    logits = source(TOKENS).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), LABELS[:, 1:].flatten())
    assert source(TOKENS, labels=LABELS).loss.item() == pytest.approx(expected.item(), abs=1e-6)
    counted = source(TOKENS, labels=LABELS, num_items_in_batch=1).loss.item()
    assert counted == pytest.approx(expected.item() * sum(NUM_TARGETS), rel=1e-6)


def test_f07_a_call_without_targets_has_loss_0_and_no_gradient(source):
    """Without targets the mean is 0 / 0, and one such batch made every weight NaN."""
    for arguments in ({}, {"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(0)}):
        source.zero_grad()
        loss = source(TOKENS, labels=torch.full_like(TOKENS, -100), **arguments).loss
        loss.backward()
        assert loss.item() == 0
        assert all(
            float(p.grad.abs().max()) == 0 for p in source.parameters() if p.grad is not None
        )


def test_f07_a_count_below_0_is_refused(source):
    with pytest.raises(ValueError, match="num_items_in_batch=-1; give the number of targets"):
        source(TOKENS, labels=LABELS, num_items_in_batch=-1)


def test_a_column_of_the_rows_gives_their_loop_counts(source, tmp_path):
    counts = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1])
    rows = [row | {"num_loops": int(count)} for row, count in zip(ROWS, counts, strict=True)]
    whole = copy.deepcopy(source)
    whole(TOKENS, labels=LABELS, num_loops=counts).loss.backward()
    expected = [p if p.grad is None else p - p.grad for p in whole.parameters()]
    actual = step_of_trainer(source, tmp_path, batch_size=4, rows=rows)
    assert largest_difference(actual, expected) <= 1e-5
