"""The whole model: configurations, observers, initial values, precision."""

import itertools

import pytest
import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.uncached import UncachedSlot
from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.model.call import Call, SlotBinding, build_context
from depthdial.model.looped_lm import LoopedLM

VOCAB, D, K = 23, 16, 4
UPDATES = ("replace", "residual", "delta", "adaptive_delta")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def config(**changes):
    base = ModelConfig(
        vocab_size=VOCAB, d_model=D, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=6,
        d_ff=24, max_context=32, max_loops=K, init_std=0.2,
    )  # fmt: skip
    return base.replace(**changes) if changes else base


def model_of(**changes):
    """Non-zero gate and modulation, so that every loop matters."""
    model = LoopedLM(config(**changes))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.startswith(("state_update", "modulation")):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch=2, length=7, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


MODULATED = {"modulation": ModulationConfig(d_cond=8, rank=2, embed_dim=8)}

# ---- shapes and splits


@pytest.mark.parametrize(
    "split", [(0, 4, 2), (2, 4, 0), (0, 4, 0), (3, 2, 1), (1, 1, 0), (0, 1, 5)]
)
def test_any_split_cached_equals_uncached(split):
    model = model_of(split=split, **MODULATED)
    x = tokens()
    depths = torch.tensor([1, 3])
    cache = ContiguousCache(model.config, batch_size=2, capacity=7)
    pieces = [model(part, num_loops=depths, cache=cache) for part in (x[:, :4], x[:, 4:])]
    torch.testing.assert_close(
        torch.cat(pieces, dim=1), model(x, num_loops=depths), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("layout", ["AF", "A", "F", "AFF"])
def test_any_layout_of_known_letters_runs(layout):
    unread = ["d_ff"] if "F" not in layout else []
    unread += ["num_heads", "num_kv_heads", "head_dim"] if "A" not in layout else []
    model = model_of(layout=layout, split=(2, 2, 2), **dict.fromkeys(unread))
    letters = "".join("A" if sublayer.takes_slot else "F" for sublayer in model.core_stack)
    assert letters == model.config.core_layout
    assert model(tokens(), num_loops=2).shape == (2, 7, VOCAB)


def test_head_dim_is_free_of_width_and_heads():
    model = model_of(num_heads=3, num_kv_heads=3, head_dim=10)
    mixer = model.core_stack[0].mixer
    assert mixer.q_proj.weight.shape == (30, D)
    assert model(tokens(), num_loops=2).shape == (2, 7, VOCAB)


def test_qk_norm_adds_one_gain_per_head_channel_and_changes_the_logits():
    plain, normed = model_of(), model_of(qk_norm="rms")
    added = set(normed.state_dict()) - set(plain.state_dict())
    assert added == {
        f"{block}_stack.0.mixer.{which}_norm.weight"
        for block in ("prelude", "core", "coda")
        for which in "qk"
    }
    assert not torch.allclose(plain(tokens(), num_loops=1), normed(tokens(), num_loops=1))


@pytest.mark.parametrize(
    "change", [{"rotary_frac": 1 / 3}, {"rope_theta": 10.0}, {"norm_eps": 0.1}]
)
def test_a_config_number_reaches_the_logits(change):
    x = tokens()
    difference = model_of()(x, num_loops=2) - model_of(**change)(x, num_loops=2)
    assert difference.abs().max() > 1e-5


def test_tied_embeddings_are_the_head():
    model = model_of(tie_embeddings=True)
    assert model.lm_head is None
    x = torch.randn(1, 3, D)
    assert torch.equal(model.head(x), model.final_norm(x) @ model.embedding.weight.T)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (3,)])
def test_tokens_of_a_useless_shape_are_refused(shape):
    with pytest.raises(ValueError, match="at least one row and one token"):
        model_of()(torch.zeros(shape, dtype=torch.int64), num_loops=1)


@pytest.mark.parametrize("bad", [0, 2.0, True, torch.tensor([1, 2, 3])])
def test_a_wrong_loop_count_is_refused_before_anything_runs(bad):
    with pytest.raises(ValueError, match="num_loops"):
        model_of()(tokens(), num_loops=bad)


# ---- loops


@pytest.mark.parametrize("update", [update for update in UPDATES if update != "replace"])
def test_first_only_bypass_makes_one_loop_bit_equal_to_replace(update):
    bypassed = model_of(loop=LoopConfig(update=update, gate_bypass="first_only"))
    replaced = model_of(loop=LoopConfig(update="replace"))
    assert torch.equal(bypassed(tokens(), num_loops=1), replaced(tokens(), num_loops=1))
    assert not torch.equal(bypassed(tokens(), num_loops=2), replaced(tokens(), num_loops=2))


def test_reinjection_changes_the_first_loop_too():
    """With injection the core's first input is twice the prelude output."""
    x = tokens()
    plain, injected = model_of(), model_of(**{"loop.injection": "add"})
    assert not torch.allclose(plain(x, num_loops=1), injected(x, num_loops=1))


def test_one_replace_loop_is_the_plain_stack():
    """The non-looped network of the same weights, sublayer after sublayer."""
    model = model_of(**{"loop.update": "replace"})
    ctx, _ = build_context(Call(tokens(), num_loops=1), model.config, dtype=torch.float32)
    x = model.embedding(tokens())
    for sublayer in itertools.chain(model.prelude_stack, model.core_stack, model.coda_stack):
        x = sublayer(x, mod=None, slot=UncachedSlot(), ctx=ctx)
    assert torch.equal(model(tokens(), num_loops=1), model.head(x))


def test_initial_state_replaces_the_prelude_output_as_first_state():
    model = model_of()
    x, states = tokens(), []
    state = torch.randn(2, 7, D)
    model(x, num_loops=1, initial_state_BTD=state, on_loop=lambda i, s, rows: states.append(s))
    default = model(x, num_loops=1)
    assert not torch.allclose(model(x, num_loops=1, initial_state_BTD=state), default)
    assert states[0].shape == state.shape


def test_the_prelude_output_as_initial_state_changes_nothing():
    model = model_of()
    ctx, _ = build_context(Call(tokens(), num_loops=1), model.config, dtype=torch.float32)
    slots = SlotBinding(None, None, model.slot_kinds).slots("prelude")
    h_in = model.prelude(model.embed(tokens()), slots=slots, ctx=ctx)
    given = model(tokens(), num_loops=3, initial_state_BTD=h_in)
    assert torch.equal(given, model(tokens(), num_loops=3))


def test_initial_state_of_each_row_follows_its_row_in_a_mixed_batch():
    model = model_of(**MODULATED)
    x, state = tokens(3), torch.randn(3, 7, D)
    depths = torch.tensor([1, 4, 2])
    mixed = model(x, num_loops=depths, initial_state_BTD=state)
    for row, depth in enumerate(depths.tolist()):
        one = slice(row, row + 1)
        alone = model(x[one], num_loops=depth, initial_state_BTD=state[one])
        torch.testing.assert_close(mixed[one], alone, rtol=0, atol=1e-5)


def test_initial_state_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"initial_state_BTD has shape \(1, 7, 16\)"):
        model_of()(tokens(), num_loops=1, initial_state_BTD=torch.zeros(1, 7, D))


# ---- observers


@pytest.mark.parametrize("num_loops", range(1, K + 1))
def test_an_observer_sees_one_state_per_loop_and_the_last_gives_the_logits(num_loops):
    model = model_of(split=(2, 4, 0))
    seen = []
    logits = model(
        tokens(), num_loops=num_loops, on_loop=lambda i, state, rows: seen.append((i, state, rows))
    )
    assert [i for i, _, _ in seen] == list(range(num_loops))
    assert all(rows is None for _, _, rows in seen)
    assert torch.equal(model.head(seen[-1][1]), logits)


def test_an_observer_changes_nothing_by_looking():
    model = model_of(**MODULATED)
    watched = model(tokens(), num_loops=3, on_loop=lambda i, state, rows: None)
    assert torch.equal(watched, model(tokens(), num_loops=3))


def test_an_observer_of_a_mixed_batch_sees_the_rows_that_still_loop():
    seen = []
    model_of()(
        tokens(3),
        num_loops=torch.tensor([1, 3, 2]),
        on_loop=lambda i, state, rows: seen.append((state.shape[0], rows.tolist())),
    )
    assert seen == [(3, [1, 2, 0]), (2, [1, 2]), (1, [1])]


def test_a_replaced_state_is_where_the_next_loop_starts():
    """Without conditioning or injection, the loops that follow know the state only."""
    model = model_of()
    replacement = torch.randn(2, 7, D)
    logits = model(
        tokens(), num_loops=3, on_loop=lambda i, state, rows: replacement if i == 0 else None
    )
    assert torch.equal(logits, model(tokens(), num_loops=2, initial_state_BTD=replacement))


def test_a_state_replaced_after_the_last_loop_is_read_out():
    model = model_of(split=(2, 4, 0))
    replacement = torch.randn(2, 7, D)
    logits = model(tokens(), num_loops=2, on_loop=lambda i, state, rows: replacement)
    assert torch.equal(logits, model.head(replacement))


# ---- initial values


def test_initial_values_are_a_pure_function_of_the_seed():
    torch.manual_seed(1)
    first = LoopedLM(config(), seed=3).state_dict()
    torch.manual_seed(2)
    again, other = LoopedLM(config(), seed=3).state_dict(), LoopedLM(config(), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("extra", [{}, MODULATED], ids=["plain", "modulated"])
def test_models_that_differ_in_one_part_share_all_other_values(update, extra):
    """The baseline and an elastic model of one seed start from the same network."""
    baseline = LoopedLM(config(max_loops=1, **{"loop.update": "replace"})).state_dict()
    elastic = LoopedLM(config(**{"loop.update": update}, **extra)).state_dict()
    assert set(baseline) <= set(elastic)
    assert all(torch.equal(elastic[name], values) for name, values in baseline.items())


def test_parameters_of_equal_shape_start_different():
    state = LoopedLM(config()).state_dict()
    assert not torch.equal(
        state["prelude_stack.0.mixer.q_proj.weight"], state["core_stack.0.mixer.q_proj.weight"]
    )


def expected_std(name, parameter):
    """The table of init_weights."""
    init_std, sublayers = 0.02, 6
    part = name.split(".")
    if part[0] == "modulation":
        return 0.0 if {"heads", "entry", "exit"} & set(part) else parameter.shape[1] ** -0.5
    if part[0] == "state_update":
        return 0.0
    return init_std / sublayers**0.5 if part[-2] in ("o_proj", "down_proj") else init_std


def test_matrices_start_with_the_standard_deviation_of_the_table():
    modulation = ModulationConfig(d_cond=64, rank=32, embed_dim=64)
    model = LoopedLM(config(vocab_size=300, d_model=64, d_ff=96, init_std=0.02,
                            head_dim=32, modulation=modulation))  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = expected_std(name, parameter)
            # The deviation of a sample of n normal values is off by 1 / sqrt(2 n): four sigma.
            tolerance = expected * 4 / (2 * parameter.numel()) ** 0.5
            assert float(parameter.std()) == pytest.approx(expected, abs=tolerance), name


def test_vectors_start_at_one_for_norms_and_zero_for_biases_and_gate():
    model = LoopedLM(config(qk_norm="rms", **MODULATED))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            is_norm = name.endswith("norm.weight")
            assert is_norm or name.endswith("bias") or name == "state_update.gamma"
            assert torch.equal(parameter, torch.full_like(parameter, float(is_norm))), name


def test_delta_rate_starts_at_delta_init():
    model = LoopedLM(config(loop=LoopConfig(update="delta", delta_init=0.3)))
    assert torch.equal(model.state_update.rate, torch.full((D,), 0.3))


def test_a_model_can_be_built_without_memory():
    with torch.device("meta"):
        model = LoopedLM(config(**MODULATED))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


# ---- precision


@pytest.mark.parametrize("num_loops", [1, 4])
def test_bf16_autocast_is_close_to_fp32(num_loops):
    model = model_of(**MODULATED)
    exact = model(tokens(4, 12), num_loops=num_loops)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(tokens(4, 12), num_loops=num_loops)
    assert cast.dtype == torch.bfloat16
    difference = (cast.float() - exact).norm() / exact.norm()
    assert 0 < difference < 0.03


def test_states_stay_in_fp32_under_autocast():
    dtypes = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model_of(**MODULATED)(
            tokens(), num_loops=3, on_loop=lambda i, state, rows: dtypes.append(state.dtype)
        )
    assert dtypes == [torch.float32] * 3


def test_bf16_weights_are_close_to_fp32():
    model = model_of(**MODULATED)
    exact = model(tokens(4, 12), num_loops=3)
    rounded = model.to(torch.bfloat16)(tokens(4, 12), num_loops=3)
    assert (rounded.float() - exact).norm() / exact.norm() < 0.06
