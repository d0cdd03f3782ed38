"""Pointer chains as text: the answer of every question follows from the lines before it."""

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from depthdial.data.packing import IGNORE
from depthdial.data.pointer_chains import PointerChains
from depthdial.data.tokenizer import Tokenizer

CHARS = [*"abcdefghijklmnopqrstuvwxyz0123456789=\n"]


class Letters:
    """One token per character, as PointerChains asks of a tokenizer."""

    vocab_size = len(CHARS)

    @staticmethod
    def encode(text):
        return [CHARS.index(char) for char in text]


def chains(seed=0, *, num=2, length=4, split="train"):
    return PointerChains(Letters(), seed, num_chains=num, chain_length=length, split=split)


def text_of(row):
    return "".join(CHARS[i] for i in row.tolist())


def solve(text):
    """(answer, look-ups) of each question in order, by following the lines."""
    lines = text.splitlines()
    told = dict(line.split("=") for line in lines if not line.endswith("="))
    solved = []
    for letter in (line[:-1] for line in lines if line.endswith("=")):
        hops = 0
        while not letter.isdigit():
            letter, hops = told[letter], hops + 1
        solved.append((letter, hops))
    return solved


@pytest.mark.parametrize(("num", "length"), [(2, 7), (3, 4), (1, 1), (1, 26)])
def test_targets_and_depths_follow_from_the_lines(num, length):
    source = chains(num=num, length=length)
    batch, depths = source.rows(5, 20), source.depths(5, 20)
    for row in range(20):
        solved = solve(text_of(batch.tokens_BT[row]))
        scored = batch.targets_BT[row] != IGNORE
        answers = [CHARS[i] for i in batch.targets_BT[row][scored].tolist()]
        assert list(zip(answers, depths[row][scored].tolist(), strict=True)) == solved
        assert sorted(h for _, h in solved) == sorted(list(range(1, length + 1)) * num)


def test_targets_stand_at_the_equals_sign_of_questions():
    batch = chains().rows(0, 4)
    scored = batch.targets_BT != IGNORE
    assert (batch.tokens_BT[scored] == CHARS.index("=")).all()
    following = batch.tokens_BT.roll(-1, dims=1)[scored]
    assert (following == CHARS.index("\n")).all()


def test_rows_are_a_function_of_their_number():
    source = chains()
    whole, part = source.rows(0, 9).tokens_BT, source.rows(4, 3).tokens_BT
    assert torch.equal(whole[4:7], part)


def test_splits_and_seeds_differ():
    train = chains().rows(0, 8).tokens_BT
    assert not torch.equal(train, chains(split="valid").rows(0, 8).tokens_BT)
    assert not torch.equal(train, chains(1).rows(0, 8).tokens_BT)


def test_every_row_has_the_stated_length():
    source = chains(num=2, length=7)
    assert source.rows(0, 1).tokens_BT.shape == (1, source.context) == (1, 98)


def test_digits_are_about_uniform():
    targets = chains(num=1, length=1).rows(0, 4000).targets_BT
    counts = torch.bincount(targets[targets != IGNORE], minlength=len(CHARS))[26:36]
    assert counts.min() > 320 and counts.max() < 480


@pytest.mark.parametrize(("num", "length"), [(0, 3), (2, 0), (3, 9)])
def test_more_letters_than_there_are_and_none_are_refused(num, length):
    with pytest.raises(ValueError, match="letters"):
        chains(num=num, length=length)


def test_a_tokenizer_without_single_letters_is_refused():
    backend = Backend(models.WordLevel({"abc": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="single tokens|cannot encode"):
        PointerChains(Tokenizer(backend, eos_token=None), 0, num_chains=1, chain_length=2)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_chance_level_is_that_of_naming_the_digit_of_any_chain(num):
    """Chains may end at equal digits, so it is more than one over their number."""
    batch = (source := chains(num=num, length=1)).rows(0, 20_000)
    answers = batch.targets_BT[batch.targets_BT != IGNORE].view(20_000, num)
    same = (answers[:, :, None] == answers[:, None, :]).float().mean()
    assert float(same) == pytest.approx(source.chance_accuracy, abs=5e-3)
    assert source.chance_accuracy == pytest.approx({1: 1.0, 2: 0.55, 3: 0.4}[num])
