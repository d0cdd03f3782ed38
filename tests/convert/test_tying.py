"""Windows looped as they are, and layers tied to fewer ones; weights never change unseen."""

import pytest
import torch
from goldens import close, open_golden, states_of

from depthdial.config import LoopConfig, ModelConfig
from depthdial.convert.base_model import BaseModel, CoreRange, block_places, read_core_range
from depthdial.convert.convert import convert_model
from depthdial.convert.methods import read_options
from depthdial.convert.tying import select, stepwise_layers, tied_groups
from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def golden(request):
    return open_golden(request.param)


def convert(base, tokens, method, core_range, **options):
    return convert_model(
        base,
        tokens,
        method=method,
        core_range=CoreRange(*core_range),
        options=read_options(method, options),
    )


def dense(layers=6, **changes):
    config = ModelConfig(
        vocab_size=23, d_model=16, split=(0, 2 * layers, 0), num_heads=2, num_kv_heads=1,
        head_dim=6, d_ff=24, max_context=32, init_std=0.2, loop=LoopConfig(update="replace"),
    )  # fmt: skip
    return LoopedLM(config.replace(**changes)).eval()


def tokens(batch=2, length=7):
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(0))


# ---- loop-window, damped, anchored


@pytest.mark.parametrize("core_range", [(1, 3), (2, 5)])
def test_a_looped_window_gives_the_reference_logits_and_states(golden, core_range):
    vectors, (a, b) = golden.vectors, core_range
    model = convert(golden.model(), vectors["input_ids"], "loop-window", core_range).model
    assert type(model) is LoopedLM
    for k in (2, 3):
        close(model(vectors["input_ids"], num_loops=k), vectors[f"mid{a}_{b}_logits_k{k}"], 1e-4)
    states = torch.stack(states_of(model, vectors["input_ids"], 3))
    close(states, vectors[f"mid{a}_{b}_states"], TOLERANCE)


def test_damped_takes_one_kth_of_every_candidate():
    base = dense()
    model = convert(base, tokens(), "damped", (2, 4)).model
    core_range = convert(base, tokens(), "loop-window", (2, 4)).model
    [h_in] = states_of(convert(base, tokens(), "loop-window", (1, 2)).model, tokens(), 1)
    state = h_in
    for _ in range(3):
        [candidate] = states_of(core_range, tokens(), 1, initial_state_BTD=state)
        state = 2 / 3 * state + candidate / 3
    close(states_of(model, tokens(), 3)[-1], state, 1e-5)


def test_anchored_keeps_its_share_of_the_plain_pass():
    base = dense()
    damped = states_of(convert(base, tokens(), "damped", (2, 4)).model, tokens(), 2)[-1]
    [plain] = states_of(convert(base, tokens(), "loop-window", (2, 4)).model, tokens(), 1)
    for share in (0.5, 0.2):
        model = convert(base, tokens(), "anchored", (2, 4), anchor=share).model
        close(states_of(model, tokens(), 2)[-1], share * plain + (1 - share) * damped, 1e-5)


def test_training_free_methods_stash_and_a_policy_can_be_chosen():
    base = dense()
    for method in ("damped", "anchored"):
        config = convert(base, tokens(), method, (2, 4)).model.config
        assert config.loop.cache_policy == "stash_first"
        other = convert(base, tokens(), method, (2, 4), cache_policy="stash_last").model.config
        assert other.loop.cache_policy == "stash_last"
    core_range = convert(base, tokens(), "loop-window", (2, 4), cache_policy="last_step")
    assert core_range.model.config.loop.cache_policy == "last_step"


def test_max_loops_is_what_the_result_is_meant_for():
    config = convert(dense(), tokens(), "loop-window", (2, 4), max_loops=6).model.config
    assert (config.num_loops, config.max_loops) == (1, 6)


# ---- tie-layers


def unrolled_sequence(model, num_loops):
    """Each core layer num_loops times before the next, written out."""
    layers = len(model.core_stack) // 2
    plain = dense(layers * num_loops)
    for layer in range(layers):
        for loop_idx in range(num_loops):
            for part in (0, 1):
                place = 2 * (layer * num_loops + loop_idx) + part
                theirs = model.core_stack[2 * layer + part].state_dict()
                plain.core_stack[place].load_state_dict(theirs)
    for name in ("embedding", "final_norm", "lm_head"):
        plain.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    return plain


def test_sequence_runs_each_tied_layer_before_the_next():
    result = convert(dense(), tokens(), "tie-layers", (0, 6), num_loops=3, order="sequence")
    assert result.model.config.segments == (2, 2)
    expected = unrolled_sequence(result.model, 3)(tokens(), num_loops=1)
    close(result.model(tokens(), num_loops=3), expected, 1e-5)


def test_one_tied_layer_is_one_segment():
    result = convert(dense(), tokens(), "tie-layers", (2, 4), order="sequence")
    assert result.model.config.segments == ()
    assert result.model.config.split == (4, 2, 4)


def test_tying_equal_layers_keeps_the_function():
    base = dense(4)
    for i in (0, 1):
        base.core_stack[4 + i].load_state_dict(base.core_stack[i].state_dict())
        base.core_stack[6 + i].load_state_dict(base.core_stack[2 + i].state_dict())
    for selection in ("average", "lower"):
        result = convert(base, tokens(), "tie-layers", (0, 4), selection=selection)
        assert result.comparisons[0].max_abs < 1e-6


def test_a_middle_window_keeps_the_outer_layers():
    base = dense()
    model = convert(base, tokens(), "tie-layers", (1, 5)).model
    assert model.config.split == (2, 4, 2)
    for mine, theirs in (
        (model.prelude_stack[0], base.core_stack[0]),
        (model.core_stack[0], base.core_stack[2]),
        (model.core_stack[3], base.core_stack[9]),
        (model.coda_stack[1], base.core_stack[11]),
    ):
        for name, tensor in mine.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name])


def test_groups_of_both_orders():
    assert tied_groups(2, 3, order="cycle") == [[0, 2, 4], [1, 3, 5]]
    assert tied_groups(2, 3, order="sequence") == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("layers", "count", "expected"), [(8, 4, [0, 2, 5, 7]), (6, 1, [0]), (5, 5, [0, 1, 2, 3, 4])]
)
def test_stepwise_keeps_the_first_and_the_last(layers, count, expected):
    assert stepwise_layers(layers, count) == expected


def test_the_mean_is_taken_over_what_is_tied_together():
    base = dense(4)
    blocks = BaseModel(base.config, base.state_dict()).blocks()
    for order, (first, second) in (("cycle", (0, 2)), ("sequence", (0, 1))):
        [tied, _] = select(blocks, tied_groups(2, 2, order=order), "average")
        pair = [blocks[i].sublayers[1]["mixer.up_proj.weight"] for i in (first, second)]
        expected = (pair[0] + pair[1]) / 2
        close(tied.sublayers[1]["mixer.up_proj.weight"], expected, 1e-7)


def test_passes_that_do_not_divide_the_window_are_refused():
    with pytest.raises(ValueError, match="core 0:5 has 5 layers, which 2 passes do not divide"):
        convert(dense(), tokens(), "tie-layers", (0, 5))


def test_layers_of_different_kinds_do_not_share():
    base = dense(6, layout="AFSF", **{"sliding": {"window": 3}})
    with pytest.raises(ValueError, match=r"layers 0 \(AF\) and 1 \(SF\)"):
        convert(base, tokens(), "tie-layers", (0, 4))


# ---- cores and bases


def test_a_layout_that_the_window_leaves_intact_still_loops():
    base = dense(6, layout="AFSF", **{"sliding": {"window": 3}})
    result = convert(base, tokens(), "loop-window", (1, 3))
    assert result.model.config.core_layout == "SFAF"


def test_a_block_is_a_token_mixer_and_what_follows():
    config = dense().config.replace(layout="AFF", split=[0, 12, 0])
    assert block_places(config) == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]


def test_a_base_that_is_split_already_but_runs_once_is_dense():
    base = dense(6, split=(4, 4, 4))
    result = convert(base, tokens(), "loop-window", (0, 2))
    assert result.model.config.split == (0, 4, 8)
    assert result.comparisons[0].is_identical


def test_value_embeddings_are_counted_anew_where_layers_go():
    base = dense(6, value_embeddings=(1, 5))
    options = {"prelude": 0}
    model = convert(base, tokens(), "retrofitted-recurrence", (3, 5), **options).model
    assert model.config.value_embeddings == (2,)


def test_widths_of_a_core_of_its_own_move_with_the_window():
    base = dense(6, split=(4, 4, 4), core_d_ff=40)
    config = convert(base, tokens(), "loop-window", (2, 4)).model.config
    assert (config.d_ff, config.core_d_ff) == (24, 40)
    with pytest.raises(ValueError, match=r"widths \[24, 40\]"):
        convert(base, tokens(), "loop-window", (1, 4))


@pytest.mark.parametrize("text", ["3", "3:3", "4:2", "0:7", "a:b", "-1:3", "1:2:3", ""])
def test_what_is_no_window_is_told_what_is(text):
    with pytest.raises(ValueError, match=r"give a:b|Give a:b"):
        read_core_range(text, 6)


def test_a_window_is_read():
    assert read_core_range(" 2:6", 6) == CoreRange(2, 6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_loops": 3}, "max_loops=3 instead of 1"),
        ({"loop.update": "delta"}, "loop.update='delta'"),
        ({"loop.injection": "add"}, "loop.injection='add'"),
        ({"prelude_norm": True}, "prelude_norm=True"),
        ({"final_norm": "loop"}, "final_norm='loop' instead of 'head'"),
    ],
)
def test_a_window_of_a_model_that_loops_is_refused(changes, named):
    with pytest.raises(ValueError, match="a core is chosen in a dense model") as error:
        convert(dense(**changes), tokens(), "loop-window", (2, 4))
    assert named in str(error.value)
    assert "elastic-fixed" in str(error.value)
