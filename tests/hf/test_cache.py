"""The cache between transformers' columns and our compact rows."""

import pytest
import torch
from toys import toy_config, toy_model, toy_tokens

from depthdial.hf.cache import DepthdialCache
from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import DepthdialForCausalLM

MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
TOKENS = toy_tokens(2, 6)
MORE = toy_tokens(2, 3, seed=3)


@pytest.fixture(scope="module")
def model():
    """A toy with random conditioning."""
    wrapped = DepthdialForCausalLM(DepthdialConfig(**toy_config().to_dict())).eval()
    wrapped.model.load_state_dict(toy_model().state_dict())
    return wrapped


@pytest.fixture
def cache(model):
    """A cache with six columns of two rows, padding on both sides of the first."""
    filled = DepthdialCache(model.config.looped, capacity=12)
    model(TOKENS, MASK, cache=filled)
    return filled


def with_more(mask=MASK, columns=3):
    """The mask with more real columns."""
    return torch.cat([mask, torch.ones(len(mask), columns, dtype=torch.int64)], dim=1)


def solo(model, row, num_kept=6):
    """Logits of MORE behind the real tokens of one row's first columns, alone."""
    real = TOKENS[row, :num_kept][MASK[row, :num_kept] == 1]
    return model(torch.cat([real, MORE[row]])[None]).logits[0, -3:]


def test_columns_are_counted_with_padding_and_rows_without(cache):
    assert cache.get_seq_length() == 6
    assert cache.loop_cache.lengths_B.tolist() == [3, 6]
    assert cache.batch_size == 2 and cache.get_max_length() == 12
    assert cache.get_mask_sizes(2) == (8, 0)


def test_a_continuation_is_that_of_each_row_alone(model, cache):
    actual = model(MORE, with_more(), cache=cache).logits
    for row in range(2):
        assert torch.allclose(actual[row], solo(model, row), atol=1e-5)


def test_a_mask_that_changes_the_past_is_refused(model, cache):
    with pytest.raises(ValueError, match="in the cache already"):
        model(MORE, with_more(torch.ones_like(MASK)), cache=cache)


def test_a_mask_of_the_call_alone_is_refused(model, cache):
    with pytest.raises(ValueError, match="6 columns in the cache and 3 in this call"):
        model(MORE, torch.ones(2, 3), cache=cache)


def test_rows_are_reordered_with_their_padding(model, cache):
    cache.reorder_cache(torch.tensor([1, 1]))
    actual = model(MORE[[0, 0]], cache=cache).logits
    expected = model(torch.cat([TOKENS[1], MORE[0]])[None]).logits[0, -3:]
    assert torch.allclose(actual, expected.expand(2, -1, -1), atol=1e-5)


def test_rows_are_repeated_beside_each_other(model, cache):
    cache.batch_repeat_interleave(2)
    assert cache.loop_cache.lengths_B.tolist() == [3, 3, 6, 6]
    actual = model(MORE[[0, 0, 1, 1]], cache=cache).logits
    assert torch.allclose(actual[1], solo(model, 0), atol=1e-5)
    assert torch.allclose(actual[2], solo(model, 1), atol=1e-5)


def test_cropping_takes_back_columns_whatever_they_held(model, cache):
    cache.crop(-2)
    assert cache.loop_cache.lengths_B.tolist() == [2, 4]
    actual = model(MORE, with_more(MASK[:, :4]), cache=cache).logits
    for row in range(2):
        assert torch.allclose(actual[row], solo(model, row, num_kept=4), atol=1e-5)


def test_cropping_nothing_changes_nothing(cache):
    cache.crop(0)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("columns", [1, -7])
def test_a_crop_that_cannot_be_is_refused(cache, columns):
    with pytest.raises(ValueError, match="this cache has 6"):
        cache.crop(columns)


def test_a_reset_cache_takes_another_batch(model, cache):
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    model(TOKENS[:1], cache=cache)
    assert cache.batch_size == 1


def test_what_does_not_fit_is_refused(model):
    small = DepthdialCache(model.config.looped, capacity=4)
    with pytest.raises(ValueError, match="a row would hold 6 tokens"):
        model(TOKENS, cache=small)


def test_a_wrong_policy_is_refused_when_the_cache_is_made(model):
    with pytest.raises(ValueError, match="last_stepp"):
        DepthdialCache(model.config.looped, policy="last_stepp")


def test_layers_of_transformers_cannot_write_to_it(cache):
    with pytest.raises(ValueError, match="written by the looped model alone"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
