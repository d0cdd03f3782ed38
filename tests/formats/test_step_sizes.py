"""Step sizes of a model conditioned on time, from the engine, Python, transformers, the shell."""

import pytest
import torch
from goldens import open_golden
from transformers import AutoModelForCausalLM

import depthdial.hf  # noqa: F401  registers the classes
from depthdial.api.model import Model
from depthdial.data.tokenizer import train_bpe
from depthdial.engine.adaptive import run_until
from depthdial.engine.generate import generate
from depthdial.model.call import Call
from depthdial.model.checkpoint import save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.stopping_rules import stopping_rule

STEPS = torch.tensor([0.5, 0.25, 0.25])
TEXT = "The ship sailed past the island, and the island saw the ship no more. "


@pytest.fixture(scope="module")
def model():
    return open_golden("loopformer").model().eval()


def continued(model, prompt, count, **arguments):
    """Greedy tokens of full forward passes."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        with torch.no_grad():
            best = model(tokens, num_loops=3, **arguments)[:, -1].argmax(dim=-1)
        tokens = torch.cat([tokens, best[:, None]], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def prompt(model):
    """One whose continuation depends on the steps."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (6,), generator=generator).tolist()
        if continued(model, ids, 5, step_sizes=STEPS) != continued(model, ids, 5):
            return ids
    raise AssertionError("step sizes change no continuation")


@pytest.mark.parametrize("chunk", [None, 2])
def test_cached_generation_equals_full_forwards(model, prompt, chunk):
    [result] = generate(
        model, [prompt], num_loops=3, max_new_tokens=5, step_sizes=STEPS, prefill_chunk=chunk
    )
    assert result.token_ids == continued(model, prompt, 5, step_sizes=STEPS)


def test_rows_may_have_steps_of_their_own(model, prompt):
    steps = torch.tensor([[0.5, 0.25, 0.25], [0.7, 0.3, 0.0]])
    both = generate(
        model, [prompt, prompt[:4]], num_loops=[3, 2], max_new_tokens=4, step_sizes=steps
    )
    [first] = generate(model, [prompt], num_loops=3, max_new_tokens=4, step_sizes=steps[0])
    [second] = generate(model, [prompt[:4]], num_loops=2, max_new_tokens=4, step_sizes=steps[1, :2])
    assert [row.token_ids for row in both] == [first.token_ids, second.token_ids]


def test_a_rule_that_never_stops_leaves_the_steps_as_they_are(model, prompt):
    rule = stopping_rule("latent_diff", threshold=1e-30)
    run = run_until(model, Call(torch.tensor([prompt]), num_loops=3, step_sizes=STEPS), rule=rule)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), num_loops=3, step_sizes=STEPS)
    assert torch.allclose(run.logits_BTV[:, -1], expected[:, -1], atol=1e-5)


def test_from_python_they_say_how_many_loops_run():
    config = open_golden("loopformer").config.replace(vocab_size=257, max_context=48)
    opened = Model(LoopedLM(config, seed=3).eval(), train_bpe([TEXT], 257))
    [steps] = opened.generate("The ship", step_sizes=[0.5, 0.25, 0.25], max_new_tokens=2)
    assert steps.num_loops == 3
    with pytest.raises(ValueError, match="for 2 loops; give one positive step per loop"):
        opened.generate("The ship", num_loops=2, step_sizes=[0.5, 0.25, 0.25], max_new_tokens=2)


def test_transformers_generates_with_them(model, prompt, tmp_path):
    save_model(model, tmp_path)
    face = AutoModelForCausalLM.from_pretrained(tmp_path)
    arguments = {"num_loops": 3, "max_new_tokens": 5, "do_sample": False}
    for steps in (STEPS, STEPS.tolist()):
        tokens = face.generate(torch.tensor([prompt]), step_sizes=steps, **arguments)
        assert tokens[0, len(prompt) :].tolist() == continued(model, prompt, 5, step_sizes=STEPS)
    beams = face.generate(
        torch.tensor([prompt]), step_sizes=STEPS.tolist(), num_beams=2, **arguments
    )
    rows = face.generate(torch.tensor([prompt]), step_sizes=STEPS[None], num_beams=2, **arguments)
    assert torch.equal(beams, rows)
