"""The transformers face on every published family: done-when 2 of the importers.

The reference logits of each golden case are compared in tests/convert; here the wrapped model must
be that model, through files, caches, padding and beams.
"""

import pytest
import torch
from goldens import open_golden
from transformers import AutoModelForCausalLM

from depthdial.hf_model import DepthdialForCausalLM
from depthdial.model.checkpoint import save_model
from depthdial.model.looped_lm import LoopedLM

CASES = (
    "dory",
    "huginn",
    "iquest-loop",
    "llama",
    "loopformer",
    "loopus",
    "nanbeige",
    "ouro",
    "parcae",
    "qwen3",
    "rrt-lora",
)
PADS = (4, 0, 1)
NEW_TOKENS = 6


class Case:
    """One family's model in a folder, opened with transformers."""

    def __init__(self, name, folder):
        golden = open_golden(name)
        self.folder, self.ours = folder, golden.model().eval()
        save_model(self.ours, folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        generator = torch.Generator().manual_seed(5)
        config = golden.config
        self.tokens = torch.randint(0, config.vocab_size, (3, 9), generator=generator)
        self.mask = (torch.arange(9) >= torch.tensor(PADS)[:, None]).long()
        self.loops = sorted({1, min(config.num_loops, 4)})
        # Only these keep every entry that the whole text would read at once.
        exact = config.loop.cache_policy == "share_first"
        self.policy = config.loop.cache_policy if exact else "per_loop"

    def greedy(self, tokens, mask, *, use_cache=True, **arguments):
        """New token ids."""
        policy = {"cache_policy": self.policy} if use_cache else {}
        ids = self.model.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
            use_cache=use_cache, **policy, **arguments,
        )  # fmt: skip
        return ids[:, tokens.shape[1] :]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    with torch.no_grad():
        return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_the_wrapped_model_is_the_one_looped_lm(case):
    assert type(case.model) is DepthdialForCausalLM
    assert type(case.model.model) is LoopedLM
    assert case.model.config.looped == case.ours.config
    for num_loops in case.loops:
        actual = case.model(case.tokens, case.mask, num_loops=num_loops).logits
        expected = case.ours(case.tokens, num_loops=num_loops, padding_mask_BT=case.mask)
        assert torch.allclose(actual, expected, atol=1e-5)


def test_generation_with_cache_is_without(case):
    for num_loops in case.loops:
        with_cache, without = (
            case.greedy(case.tokens, case.mask, num_loops=num_loops, use_cache=use_cache)
            for use_cache in (True, False)
        )
        assert torch.equal(with_cache, without)


def test_left_padded_rows_are_the_rows_alone(case):
    num_loops = case.loops[-1]
    batch = case.greedy(case.tokens, case.mask, num_loops=num_loops)
    for row, pads in enumerate(PADS):
        tokens = case.tokens[row : row + 1, pads:]
        solo = case.greedy(tokens, torch.ones_like(tokens), num_loops=num_loops)
        assert torch.equal(batch[row], solo[0])


def test_left_padded_logits_are_those_of_the_rows_alone(case):
    num_loops = case.loops[-1]
    batch = case.model(case.tokens, case.mask, num_loops=num_loops).logits
    for row, pads in enumerate(PADS):
        solo = case.model(case.tokens[row : row + 1, pads:], num_loops=num_loops).logits
        assert torch.allclose(batch[row, pads:], solo[0], atol=1e-4)


def test_beams_with_cache_are_beams_without(case):
    beams = [
        case.greedy(case.tokens, case.mask, num_beams=3, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


def test_b36_three_rounds_leave_config_and_weights_byte_for_byte(case, tmp_path):
    names = ("config.json", "model.safetensors")
    first = [(case.folder / name).read_bytes() for name in names]
    wrapped = case.model
    for round_ in ("1", "2", "3"):
        wrapped.save_pretrained(tmp_path / round_)
        wrapped = AutoModelForCausalLM.from_pretrained(tmp_path / round_)
        assert [(tmp_path / round_ / name).read_bytes() for name in names] == first


def test_b49_states_of_every_loop_and_the_last_gives_the_logits(case):
    for num_loops in case.loops:
        out = case.model(case.tokens, num_loops=num_loops, output_hidden_states=True)
        assert len(out.hidden_states) == num_loops + 2
        assert torch.equal(case.ours.head(out.hidden_states[-1]), out.logits)
