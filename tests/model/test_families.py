"""Every mechanism of the looped families as a toy: counted, deterministic, alone as in a batch.

What the published models compute is compared with their own outputs in `tests/convert`.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import (
    LoopConfig,
    LoopLoraConfig,
    ModelConfig,
    NGPTConfig,
    RopeScaling,
    SlidingConfig,
    TimeModulationConfig,
)
from depthdial.model import looped_lm
from depthdial.model.call import Call
from depthdial.model.count import count_parameters
from depthdial.model.looped_lm import LoopedLM

VOCAB, D, K = 41, 24, 3
RANDOM_STATE = {"loop.initial_state": "random", "loop.random_state_std": 0.6}
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
)
VARIANTS = {
    "plain": {},
    "sandwich, norm in the loop, exit gate": {
        "norm": "sandwich", "final_norm": "loop", "split": (0, 6, 0), "exit_gate": "linear",
    },
    "norm of the sum, concat adapter, noise": {
        "norm": "post_sum", "final_norm": "coda_and_head", "loop.injection": "concat",
        "attention_bias": "qk", "rotary_pairs": "interleaved", "tie_embeddings": True,
        "embed_scale": 4.9, **RANDOM_STATE,
    },
    "unit lengths, windows, output gate": {
        "norm": "ngpt", "final_norm": "none", "output_gate": True, "layout": "SFAF",
        "split": (2, 4, 2), "ngpt": NGPTConfig(alpha_init=0.05, scale_std=0.02),
        "sliding": SlidingConfig(window=3, rope_theta=500.0, rotary_frac=0.5),
        "loop.injection": "add", "loop.unit_norm": True,
    },
    "diagonal injection, value embeddings": {
        "qk_norm": "rms_after_rotary", "qk_norm_eps": 1e-7, "ff": "half_relu_squared",
        "core_d_ff": 20, "value_embeddings": (1, 2), "prelude_norm": True,
        "loop.injection": "diagonal", "loop.state_projection": True, **RANDOM_STATE,
    },
    "time steps, learned positions, no gains": {
        "positions": "learned", "norm_gain": False, "ff": "gelu", "split": (0, 6, 0),
        "modulation": TimeModulationConfig(kind="time_step", embed_dim=8),
    },
    "decay gate": {
        "loop.update": "decay_gate", "loop.gate_rank": 2, "exit_gate": "norm_linear",
        "qk_norm": "rms",
    },
    "mix of first and own keys": {"split": (0, 6, 0), "loop.local_window": 3},
    "first loop's keys for all": {"loop.cache_policy": "share_first"},
    "damped": {"loop.update": "damped"},
    "anchored": {"loop.update": "anchored"},
    "differences by loop": {
        "loop_lora": LoopLoraConfig(rank=2, sets_by_loop=(-1, 0, 1), norms=True),
    },
    "norms by loop, sandwich": {
        "norm": "sandwich",
        "loop_lora": LoopLoraConfig(rank=0, sets_by_loop=(0, 1), norms=True),
    },
    "all norms by loop": {
        "qk_norm": "rms",
        "loop_lora": LoopLoraConfig(rank=1, sets_by_loop=(0, 1), norms=True),
    },
    "biases everywhere": {"attention_bias": "qkvo", "ff_bias": True, "ff": "relu_squared"},
    "stretched rotation": {"rope_scaling": LLAMA3},
}  # fmt: skip


def config_of(name):
    base = ModelConfig(
        vocab_size=VOCAB, d_model=D, split=(2, 2, 2), num_heads=4, num_kv_heads=2, head_dim=8,
        d_ff=28, max_context=32, num_loops=2, max_loops=K, loop=LoopConfig(update="replace"),
        init_std=0.3,
    )  # fmt: skip
    return base.replace(**VARIANTS[name])


def model_of(name):
    """Every parameter random, so that every path matters."""
    model = LoopedLM(config_of(name))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    # float64: unit vectors times large scales amplify the rounding of float32.
    return model.double().eval()


def tokens(rows, length, *, seed=0):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_config_survives_json(name):
    config = config_of(name)
    assert ModelConfig.from_dict(config.to_dict()) == config


@every_variant
def test_parameters_are_counted_without_building_the_model(name):
    config = config_of(name)
    actual = sum(p.numel() for p in LoopedLM(config).parameters())
    assert count_parameters(config).total == actual


@every_variant
def test_a_fresh_model_gives_finite_logits_and_gradients(name):
    model = LoopedLM(config_of(name))
    logits = model(tokens(2, 7), num_loops=K)
    logits.square().mean().backward()
    assert torch.isfinite(logits).all()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(torch.isfinite(g).all() for g in grads)


@every_variant
def test_rows_of_mixed_depth_equal_each_alone(name):
    model, x, depths = model_of(name), tokens(4, 9), torch.tensor([2, 3, 1, 2])
    with torch.no_grad():
        mixed = model(x, num_loops=depths)
        for row, depth in enumerate(depths.tolist()):
            alone = model(x[row : row + 1], num_loops=depth)
            torch.testing.assert_close(mixed[row : row + 1], alone, rtol=0, atol=1e-9)


@every_variant
def test_left_padded_rows_equal_each_alone(name):
    model, x = model_of(name), tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), x], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        alone = model(x, num_loops=K)
        inside = model(padded, num_loops=K, padding_mask_BT=mask)[:, 3:]
    torch.testing.assert_close(inside, alone, rtol=0, atol=1e-9)


@every_variant
def test_decoding_token_by_token_equals_one_pass(name):
    model, x = model_of(name), tokens(2, 9)
    cache = ContiguousCache(model.config, batch_size=2, capacity=9)
    with torch.no_grad():
        parts = [model(x[:, :4], num_loops=K, cache=cache)]
        parts += [model(x[:, t : t + 1], num_loops=K, cache=cache) for t in range(4, 9)]
        whole = model(x, num_loops=K)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-9)


@every_variant
def test_a_token_does_not_see_later_ones(name):
    model, x = model_of(name), tokens(1, 8)
    changed = x.clone()
    changed[0, 5] = (x[0, 5] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(x, num_loops=K), model(changed, num_loops=K)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_window_hides_older_tokens_from_sliding_layers_only():
    """One sliding layer of three tokens and no loop: the fourth token back has no effect."""
    windowed = model_of("unit lengths, windows, output gate").config.replace(
        layout="SF", split=(0, 2, 0), num_loops=1, max_loops=1
    )
    model, x = LoopedLM(windowed).double().eval(), tokens(1, 8)
    for back, is_seen in ((2, True), (3, False)):
        changed = x.clone()
        changed[0, 7 - back] = (x[0, 7 - back] + 1) % VOCAB
        with torch.no_grad():
            same = torch.equal(model(x, num_loops=1)[0, 7], model(changed, num_loops=1)[0, 7])
        assert same != is_seen, back


def test_an_anchored_loop_mixes_the_first_candidate_into_the_last_state():
    model, x = model_of("anchored"), tokens(2, 6)
    damped = model_of("damped")
    damped.load_state_dict(model.state_dict())
    states, first = {}, {}
    with torch.no_grad():
        damped(x, num_loops=3, on_loop=lambda i, s, rows: states.update({i: s}))
        damped(x, num_loops=1, on_loop=lambda i, s, rows: first.update({i: s}))
        anchored = {}
        model(x, num_loops=3, on_loop=lambda i, s, rows: anchored.update({i: s}))
    torch.testing.assert_close(anchored[1], states[1], rtol=0, atol=1e-6)
    expected = 0.5 * first[0] + 0.5 * states[2]
    torch.testing.assert_close(anchored[2], expected, rtol=0, atol=1e-6)


def test_uneven_steps_change_a_model_conditioned_on_time():
    model, x = model_of("time steps, learned positions, no gains"), tokens(2, 6)
    with torch.no_grad():
        even = model(x, num_loops=2)
        given = model(x, num_loops=2, step_sizes=torch.tensor([0.5, 0.5]))
        uneven = model(x, num_loops=2, step_sizes=torch.tensor([0.75, 0.25]))
        by_row = model(x, num_loops=2, step_sizes=torch.tensor([[0.5, 0.5], [0.75, 0.25]]))
    torch.testing.assert_close(given, even, rtol=0, atol=1e-6)
    assert not torch.allclose(uneven, even, atol=1e-3)
    torch.testing.assert_close(by_row[:1], even[:1], rtol=0, atol=1e-6)
    torch.testing.assert_close(by_row[1:], uneven[1:], rtol=0, atol=1e-6)


def test_step_sizes_of_a_mixed_batch_follow_their_rows():
    model, x = model_of("time steps, learned positions, no gains"), tokens(2, 6)
    steps = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]])
    with torch.no_grad():
        mixed = model(x, num_loops=torch.tensor([1, 3]), step_sizes=steps)
        deep = model(x[1:], num_loops=3, step_sizes=steps[1])
    torch.testing.assert_close(mixed[1:], deep, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "loops"), [([0.5, 0.5], 3), ([0.5, 0.6], 2), ([1.5, -0.5], 2), ([[0.5, 0.5]] * 3, 2)]
)
def test_steps_that_do_not_fit_the_loops_are_refused(steps, loops):
    model = model_of("time steps, learned positions, no gains")
    with pytest.raises(ValueError, match="step_sizes"):
        model(tokens(2, 4), num_loops=loops, step_sizes=torch.tensor(steps))


def test_steps_without_a_model_that_reads_them_are_refused():
    with pytest.raises(ValueError, match="step_sizes has no effect"):
        model_of("plain")(tokens(1, 4), num_loops=2, step_sizes=torch.tensor([0.5, 0.5]))


@every_variant
@pytest.mark.parametrize("num_loops", [3, torch.tensor([2, 3])], ids=["one count", "mixed"])
def test_a_call_stays_on_its_device_and_waits_for_no_number_of_it(monkeypatch, name, num_loops):
    """The meta device has no numbers to ask for, and takes no tensor of the CPU."""
    monkeypatch.setattr(looped_lm, "compute_dtype", lambda device, dtype: dtype)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())
    with torch.device("meta"):
        model = LoopedLM(config_of(name))
    x = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    cache = ContiguousCache(model.config, batch_size=2, capacity=8, device="meta")
    assert model(x, num_loops=num_loops).device == x.device
    for new in (x, x[:, :1]):
        assert model(new, num_loops=num_loops, cache=cache).device == x.device


def test_a_position_without_a_learned_vector_is_refused():
    model = model_of("time steps, learned positions, no gains")
    with pytest.raises(ValueError, match="position 32 has no learned vector"):
        model(tokens(1, 33), num_loops=1)
    positions_BT = torch.tensor([[0, 32]])
    with pytest.raises(ValueError, match="position 32 has no learned vector"):
        model(tokens(1, 2), num_loops=1, positions_BT=positions_BT)
    cache = ContiguousCache(model.config, batch_size=1, capacity=40)
    model(tokens(1, 32), num_loops=1, cache=cache)
    with pytest.raises(ValueError, match="position 32 has no learned vector"):
        model(tokens(1, 1), num_loops=1, cache=cache)


def test_zero_differences_are_the_tied_model_bit_for_bit():
    model, x = LoopedLM(config_of("differences by loop")), tokens(2, 6)
    tied = LoopedLM(config_of("plain"))
    assert torch.equal(model(x, num_loops=3), tied(x, num_loops=3))


def test_a_loop_without_a_set_ignores_the_differences():
    model, x = model_of("differences by loop"), tokens(2, 6)
    tied = LoopedLM(config_of("plain")).double()
    own = {n: p for n, p in model.state_dict().items() if not n.startswith("loop_lora")}
    tied.load_state_dict(own)
    assert torch.equal(model(x, num_loops=1), tied(x, num_loops=1))
    assert not torch.allclose(model(x, num_loops=2), tied(x, num_loops=2), atol=1e-3)


# ---- passes without gradient


def gradients(model, **how):
    model.zero_grad()
    model.hidden_states(Call(tokens(2, 6), **how)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["plain", "norm of the sum, concat adapter, noise", "anchored"])
def test_no_passes_without_gradient_is_full_backpropagation(name):
    full = gradients(model_of(name), num_loops=3)
    none = gradients(model_of(name), num_loops=3, no_grad_loops=0)
    assert all(torch.equal(full[n], none[n]) for n in full)


def test_passes_without_gradient_equal_a_detached_state():
    name = "norm of the sum, concat adapter, noise"
    model = model_of(name)
    cut = gradients(model, num_loops=3, no_grad_loops=2)
    detached = model_of(name)
    detached.zero_grad()
    observer = lambda i, s, rows: s.detach() if i == 1 else None  # noqa: E731
    detached.hidden_states(
        Call(tokens(2, 6), num_loops=3, on_loop=observer)
    ).square().mean().backward()
    expected = {n: p.grad for n, p in detached.named_parameters() if p.grad is not None}
    assert set(cut) == set(expected)
    for n in cut:
        torch.testing.assert_close(cut[n], expected[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "norm of the sum, concat adapter, noise",
        "anchored",
        "mix of first and own keys",
        "first loop's keys for all",
    ],
)
def test_passes_without_gradient_by_row_equal_each_row_alone(name):
    """What a pass hands on besides the state must be cut off in the same rows."""
    model, x = model_of(name), tokens(2, 6)
    loops, cut = torch.tensor([3, 2]), torch.tensor([2, 0])
    model.hidden_states(Call(x, num_loops=loops, no_grad_loops=cut)).square().sum().backward()
    together = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for row in range(2):
        out = model.hidden_states(
            Call(x[row : row + 1], num_loops=int(loops[row]), no_grad_loops=int(cut[row]))
        )
        out.square().sum().backward()
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(together[n], p.grad, rtol=1e-9, atol=1e-9)


# ---- rows that stop early


def test_rows_that_are_sent_away_leave_the_others_unchanged():
    model, x = model_of("decay gate"), tokens(3, 6)
    with torch.no_grad():
        begun = model.begin(Call(x, num_loops=3))
        passes, states = model.iterate(begun), {}
        done = next(passes)
        keep = [None, torch.tensor([True, False, True]), torch.tensor([False, True])]
        while True:
            rows = range(3) if done.rows is None else done.rows.tolist()
            states.update({(done.loop_idx, row): done.state_BTD[i] for i, row in enumerate(rows)})
            try:
                done = passes.send(keep[done.loop_idx])
            except StopIteration:
                break
        reference = {}
        model(x, num_loops=3, on_loop=lambda i, s, rows: reference.update({i: s}))
    assert sorted(states) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 2)]
    for (loop_idx, row), state in states.items():
        torch.testing.assert_close(state, reference[loop_idx][row], rtol=0, atol=1e-6)


# ---- options without effect are refused


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("unit lengths, windows, output gate", {"attention_bias": "qk"}, "attention_bias='qk' has"),
        ("unit lengths, windows, output gate", {"loop.local_window": 3}, "local_window=3 has no"),
        ("unit lengths, windows, output gate", {"value_embeddings": (0,)}, "value_embeddings"),
        ("unit lengths, windows, output gate", {"norm_gain": False}, "norm_gain=false has no"),
        ("plain", {"loop.gate_bypass": "first_only"}, "there is no gate"),
        ("plain", {"loop.initial_state": "zero"}, "cuts the loops off from the tokens"),
        ("plain", {"layout": "A", "core_d_ff": 8}, "core_d_ff=8 has no effect"),
        ("plain", {"positions": "none", "rope_theta": 5.0}, "rope_theta=5.0 has no effect"),
        ("plain", {"qk_norm_eps": 1e-3}, "qk_norm_eps=0.001 has no effect"),
        ("plain", {"loop.anchor": 0.2}, "anchor=0.2 has no effect"),
        ("decay gate", {"loop.gate_rank": None}, "needs gate_rank"),
        ("plain", {"layout": "SF"}, "the layout letter S goes with `sliding`"),
        ("plain", {"final_norm": "loop"}, "has a coda after the loops"),
    ],
)
def test_a_field_without_effect_or_need_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(name).replace(**changes)


# ---- where parameters are read


def keep_away(model):
    """Put the parameters of each module on the meta device but during the module's own call."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            away = {name: nn.Parameter(p.to("meta")) for name, p in own.items()}
            module._parameters.update(away)
            module.register_forward_pre_hook(lambda m, _, own=own: m._parameters.update(own))
            module.register_forward_hook(lambda m, _, y, away=away: m._parameters.update(away))


@every_variant
def test_f08_every_parameter_is_read_inside_the_call_of_its_own_module(name):
    """Offloaded weights, adapters and quantised modules take effect only there: a gate, the tied
    head and stored differences were read from outside.
    """
    model, ids = model_of(name), tokens(3, 5)
    counts = [1, K, torch.tensor([2, K, 1])]
    with torch.no_grad():
        expected = [model(ids, num_loops=count) for count in counts]
        keep_away(model)
        for count, logits in zip(counts, expected, strict=True):
            assert torch.equal(model(ids, num_loops=count), logits)


def test_f08_rows_that_need_a_gain_from_outside_its_norm_say_so():
    model = model_of("differences by loop")
    keep_away(model)
    with torch.no_grad(), pytest.raises(ValueError, match="rows of one loop at a time"):
        model.loop_modulation(torch.tensor([0, 1]), torch.tensor([K, K]))
