"""A core in segments: each run of layers loops before the next one."""

import pytest
import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import LoopConfig, LoopLoraConfig, ModelConfig, ModulationConfig
from depthdial.engine.generate import generate
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

VOCAB, D, K = 23, 16, 3


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def config(**changes):
    base = ModelConfig(
        vocab_size=VOCAB, d_model=D, split=(2, 6, 2), segments=(2, 2, 2), num_heads=2,
        num_kv_heads=1, head_dim=6, d_ff=24, max_context=32, max_loops=K, init_std=0.2,
        loop=LoopConfig(update="replace"),
    )  # fmt: skip
    return base.replace(**changes)


def tokens(batch=2, length=7):
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def unrolled(model, num_loops):
    """The same sublayers in the order AABBCC, each loop written out."""
    plain = LoopedLM(config(segments=(), split=(0, 4 + 6 * num_loops, 0), max_loops=1))
    order = [model.prelude_stack[0], model.prelude_stack[1]]
    for first in (0, 2, 4):
        order += [model.core_stack[first], model.core_stack[first + 1]] * num_loops
    order += [model.coda_stack[0], model.coda_stack[1]]
    for mine, theirs in zip(plain.core_stack, order, strict=True):
        mine.load_state_dict(theirs.state_dict())
    for name in ("embedding", "final_norm", "lm_head"):
        getattr(plain, name).load_state_dict(getattr(model, name).state_dict())
    return plain


@pytest.mark.parametrize("num_loops", [1, 2, 3])
def test_each_segment_runs_all_its_loops_before_the_next(num_loops):
    model = LoopedLM(config())
    expected = unrolled(model, num_loops)(tokens(), num_loops=1)
    torch.testing.assert_close(model(tokens(), num_loops=num_loops), expected, rtol=0, atol=1e-5)


def test_the_order_differs_from_a_core_that_loops_as_a_whole():
    model, whole = LoopedLM(config()), LoopedLM(config(segments=()))
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert (model(tokens(), num_loops=2) - whole(tokens(), num_loops=2)).abs().max() > 0.01
    assert torch.equal(model(tokens(), num_loops=1), whole(tokens(), num_loops=1))


def test_a_batch_of_mixed_depths_equals_each_row_alone():
    model, x, depths = LoopedLM(config()), tokens(4), torch.tensor([2, 1, 3, 1])
    mixed = model(x, num_loops=depths)
    for row, k in enumerate(depths.tolist()):
        alone = model(x[row : row + 1], num_loops=k)[0]
        torch.testing.assert_close(mixed[row], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("depths", [3, torch.tensor([1, 3])])
def test_the_per_loop_cache_equals_no_cache(depths):
    model, x = LoopedLM(config()), tokens()
    cache = ContiguousCache(model.config, batch_size=2, capacity=7)
    pieces = [model(part, num_loops=depths, cache=cache) for part in x.split([3, 1, 1, 2], dim=1)]
    expected = model(x, num_loops=depths)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)


def test_sharing_the_first_loops_keys_needs_no_cache():
    model, x = LoopedLM(config(**{"loop.cache_policy": "share_first"})), tokens()
    cache = ContiguousCache(model.config, batch_size=2, capacity=7)
    pieces = [model(part, num_loops=3, cache=cache) for part in (x[:, :4], x[:, 4:])]
    expected = model(x, num_loops=3)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)


def test_stored_differences_follow_the_loop_within_each_segment():
    deltas = LoopLoraConfig(rank=2, sets_by_loop=(0, 1, 2))
    model = LoopedLM(config(loop_lora=deltas))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.loop_lora.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.loop_lora.sublayers[5].down_proj.up[1:] = 0.0
    changed = model(tokens(), num_loops=2)
    # The last segment's second loop stores nothing for this matrix, its third is not run.
    model.loop_lora.sublayers[5].down_proj.down[1:] = 9.0
    assert torch.equal(model(tokens(), num_loops=2), changed)
    model.loop_lora.sublayers[1].down_proj.up[1] = 0.0
    assert not torch.equal(model(tokens(), num_loops=2), changed)


def test_greedy_generation_runs():
    model = LoopedLM(config())
    [result] = generate(model, [[1, 2, 3]], num_loops=2, max_new_tokens=3)
    x = torch.tensor([[1, 2, 3]])
    for expected in result.token_ids:
        assert int(model(x, num_loops=2)[0, -1].argmax()) == expected
        x = torch.cat([x, torch.tensor([[expected]])], dim=1)


def test_observers_see_the_last_segments_passes():
    seen = []
    model = LoopedLM(config())
    model(tokens(), num_loops=3, on_loop=lambda idx, state, rows: seen.append(idx))
    assert seen == [0, 1, 2]


def test_a_row_cannot_stop_between_the_loops():
    model = LoopedLM(config())
    passes = model.iterate(model.begin(Call(tokens(), num_loops=2)))
    next(passes)
    with pytest.raises(ValueError, match="cannot stop between the loops of a core in segments"):
        passes.send(torch.tensor([True, False]))


def test_passes_without_gradient_are_refused():
    with pytest.raises(ValueError, match="no_grad_loops would cut off"):
        LoopedLM(config()).hidden_states(Call(tokens(), num_loops=2, no_grad_loops=1))


@pytest.mark.parametrize("segments", [(6,), (2, 2), (2, 2, 4)])
def test_segments_that_do_not_fill_the_core_are_refused(segments):
    with pytest.raises(ValueError, match="at least two counts of sublayers that add up"):
        config(segments=segments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop.update": "delta"}, "loop.update='delta' acts after each loop"),
        ({"loop.injection": "add"}, "loop.injection='add' acts after each loop"),
        ({"exit_gate": "linear"}, "exit_gate='linear' acts after each loop"),
        ({"modulation": ModulationConfig(d_cond=8, rank=2, embed_dim=8)}, "modulation="),
        ({"final_norm": "loop", "split": [4, 6, 0]}, "final_norm='loop' goes with"),
    ],
)
def test_what_acts_between_loops_of_the_whole_core_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
