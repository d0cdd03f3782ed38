"""Layers and a cache policy from outside the package, without an edit to it.

A recurrent layer, a routed layer and a policy that drops tokens are registered here
(`toy_layers.py`), then built by layout, trained, saved, opened, generated from and planned.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from slow_cache import SlowDecoder
from torch.utils.checkpoint import checkpoint
from toy_layers import (
    LAST,
    NUM_EXPERTS,
    PER_TOKEN,
    POLICY,
    Experts,
    registered_layers,
    registered_policy,
)
from toys import toy_config, toy_model, toy_tokens

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.policies import register_policy
from depthdial.cli.main import main
from depthdial.config import (
    CacheRule,
    DataConfig,
    DepthConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    TrainConfig,
)
from depthdial.engine.adaptive import run_until
from depthdial.engine.generate import generate
from depthdial.model.call import Call
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.count import (
    cache_bytes,
    cache_slots,
    count_parameters,
    flops_per_token,
    plan,
)
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.stopping_rules import stopping_rule
from depthdial.training.pretrain import train
from depthdial.training.run_dir import RunDir

TRAINS = True
TOLERANCE = 1e-6
K = 3
FIELDS = {
    "vocab_size": 32, "d_model": 16, "layout": "ARMF", "split": [4, 4, 4], "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 8, "d_ff": 16, "max_context": 48, "num_loops": 2, "max_loops": K,
    "init_std": 0.3, "loop": {"injection": "add", "update": "delta", "delta_init": 0.7},
    "modulation": {"d_cond": 8, "rank": 2, "embed_dim": 8},
    "loop_lora": {"rank": 2, "sets_by_loop": [-1, 0, 1]},
}  # fmt: skip
"""Both toy layers in every block, under everything that conditions a layer."""


@pytest.fixture(scope="module", autouse=True)
def extension():
    with registered_layers(), registered_policy():
        yield


@pytest.fixture(scope="module")
def model(extension):
    """Every parameter random, in float64."""
    model = LoopedLM(ModelConfig.from_dict(FIELDS)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return model


@pytest.fixture
def inference():
    with torch.no_grad():
        yield


def tokens(batch: int, length: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32, (batch, length), generator=generator)


def new_cache(model, *, batch_size=1, capacity=24, policy=None):
    return ContiguousCache(model.config, batch_size=batch_size, capacity=capacity, policy=policy)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


# ---- trained, saved, opened


@pytest.fixture(scope="module")
def run(extension, tmp_path_factory):
    """Five steps of mixed depth, the modulation grafted on the way."""
    recipe = Recipe(
        name="toys",
        model=ModelConfig.from_dict(FIELDS | {"init_std": 0.02}),
        data=DataConfig(task="pointer_program", context=16),
        depth=DepthConfig(sampler="override", override_frac=0.25, num_depth_slices=4),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(
            steps=5, batch_size=8, val_every=5, val_rows=8, checkpoint_every=5, precision="fp32"
        ),
    )
    return RunDir.open(train(recipe, root=tmp_path_factory.mktemp("runs")).path)


def test_toy_layers_are_trained_and_every_parameter_of_theirs_moves(run):
    losses = [r["train/loss"] for r in run.read_metrics() if "train/loss" in r]
    assert len(losses) == 5 and losses[-1] < losses[0]
    trained = load_model(run.latest_checkpoint().path)
    fresh = LoopedLM(trained.config, seed=Recipe.from_file(run.config_path).train.seed)
    before = dict(fresh.named_parameters())
    toys = {name: p for name, p in trained.named_parameters() if toy_part(name)}
    assert {name.split(".")[0] for name in toys} == {"prelude_stack", "core_stack", "coda_stack"}
    assert [name for name, p in toys.items() if torch.equal(p, before[name])] == []


def toy_part(name: str) -> bool:
    """Whether a parameter is of the mixers at places 1 and 2 of a stack."""
    parts = name.split(".")
    return parts[0].endswith("_stack") and parts[1] in "12" and parts[2] == "mixer"


def test_a_saved_model_of_toy_layers_opens_as_it_was(model, tmp_path, inference):
    save_model(model, tmp_path / "model")
    opened = load_model(tmp_path / "model")
    assert opened.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.get_parameter(name), parameter)
    same(opened(tokens(2, 6), num_loops=3), model(tokens(2, 6), num_loops=3))


# ---- cached = uncached, padded rows = solo rows


@pytest.mark.parametrize("num_loops", [1, 2, K])
def test_calls_on_a_cache_equal_one_call_without(model, num_loops, inference):
    x, cache = tokens(2, 12), new_cache(model, batch_size=2)
    edges = [0, 5, 6, 7, 9, 10, 11, 12]
    parts = [
        model(x[:, a:b], num_loops=num_loops, cache=cache)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    same(torch.cat(parts, dim=1), model(x, num_loops=num_loops))


def test_padded_rows_of_mixed_depths_equal_their_solo_runs(model, inference):
    """Padding on both sides, documents, and calls in which a row brings nothing."""
    lengths = [(4, 1, 2, 1), (2, 3, 0, 1), (1, 1, 4, 0)]
    loops = torch.tensor([2, K, 1])
    documents = torch.tensor([[0] * 5 + [1] * 3, [0] * 2 + [1] * 6, [3] * 8])
    cache = new_cache(model, batch_size=3)
    read = [[] for _ in lengths]
    solo_tokens = [tokens(1, sum(row), seed=i)[0] for i, row in enumerate(lengths)]
    done = [0, 0, 0]
    for call in range(4):
        widest = max(row[call] for row in lengths) + 1
        batch = tokens(3, widest, seed=9)
        ids = torch.zeros_like(batch)
        real = torch.zeros(3, widest, dtype=torch.bool)
        for row, counts in enumerate(lengths):
            start = (0, 1, widest - counts[call])[row]
            here = slice(start, start + counts[call])
            real[row, here] = True
            batch[row, here] = solo_tokens[row][done[row] : done[row] + counts[call]]
            ids[row, here] = documents[row, done[row] : done[row] + counts[call]]
            done[row] += counts[call]
        logits = model(
            batch, num_loops=loops, cache=cache, padding_mask_BT=real, document_ids_BT=ids
        )
        for row in range(3):
            read[row].append(logits[row, real[row]])
    for row, parts in enumerate(read):
        x, ids = solo_tokens[row][None], documents[row : row + 1, : done[row]]
        for document in ids.unique():
            alone = model(x[ids == document][None], num_loops=int(loops[row]))[0]
            same(torch.cat(parts)[ids[0] == document], alone)


def test_packed_and_padded_rows_without_a_cache_equal_their_solo_runs(model, inference):
    x = tokens(2, 9)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    real = torch.tensor([[1] * 9, [0, 0, 1, 1, 0, 1, 1, 0, 0]], dtype=torch.bool)
    logits = model(x, num_loops=2, padding_mask_BT=real, document_ids_BT=ids)
    for document in range(3):
        here = ids[0] == document
        same(logits[0, here], model(x[:1, here], num_loops=2)[0])
    same(logits[1, real[1]], model(x[1:, real[1]], num_loops=2)[0])


@pytest.mark.parametrize("is_trained", [False, True])
def test_generated_ids_are_those_of_full_forwards(model, run, is_trained, inference):
    if is_trained:
        model = load_model(run.latest_checkpoint().path).double()
    prompts, loops = [tokens(1, n, seed=n)[0].tolist() for n in (3, 7)], [2, K]
    rows = generate(model, prompts, num_loops=loops, max_new_tokens=5)
    for prompt, num_loops, row in zip(prompts, loops, rows, strict=True):
        ids = list(prompt)
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids]), num_loops=num_loops)[0, -1].argmax()))
        assert row.token_ids == ids[len(prompt) :]


# ---- what a recurrent state allows and what not


def fed(model, cache, x, *, num_loops=2):
    model(x, num_loops=num_loops, cache=cache)
    return cache


def test_a_state_goes_back_only_to_nothing_or_to_a_snapshot(model, inference):
    x, new = tokens(2, 6), tokens(2, 1, seed=5)
    cache = fed(model, new_cache(model, batch_size=2), x)
    assert not cache.can_roll_back
    snapshot = cache.snapshot()
    expected = model(new, num_loops=2, cache=cache)
    with pytest.raises(ValueError, match="a recurrent layer's state cannot go back"):
        cache.crop(torch.tensor([6, 7]))
    cache.restore(snapshot)
    assert torch.equal(model(new, num_loops=2, cache=cache), expected)
    cache.crop(torch.tensor([7, 0]))
    same(model(new, num_loops=2, cache=cache)[1], model(new[1:], num_loops=2)[0])
    cache.crop(0)
    same(model(x, num_loops=K, cache=cache), model(x, num_loops=K))


def test_reordered_rows_take_their_states_along(model, inference):
    x, rows = tokens(3, 5), torch.tensor([2, 0, 2, 1])
    cache, again = new_cache(model, batch_size=3), new_cache(model, batch_size=4)
    fed(model, cache, x).reorder(rows)
    fed(model, again, x[rows])
    new = tokens(4, 1, seed=3)
    same(model(new, num_loops=2, cache=cache), model(new, num_loops=2, cache=again))


@pytest.mark.parametrize("policy", ["last_step", "collapse_mean", "stash_first", "huginn:skip"])
def test_a_recurrent_core_keeps_its_loop_count_under_every_policy(model, policy, inference):
    """One state of each loop: the policies are about keys and values."""
    cache = fed(model, new_cache(model, policy=policy), tokens(1, 4))
    with pytest.raises(ValueError, match="row 0 ran 2 loops so far and now asks for 3; recurrent"):
        model(tokens(1, 1), num_loops=3, cache=cache)


def test_a_row_of_a_recurrent_core_does_not_stop_early_on_a_cache(model, inference):
    rule = stopping_rule("latent_diff", 0.5)
    assert run_until(model, Call(tokens(1, 4), num_loops=K), rule=rule).logits_BTV.isfinite().all()
    call = Call(tokens(1, 4), num_loops=K, cache=new_cache(model))
    with pytest.raises(ValueError, match="recurrent layers, whose states of the deeper loops"):
        run_until(model, call, rule=rule)


def test_an_extra_pass_would_read_every_token_twice_and_is_refused(model):
    with pytest.raises(ValueError, match="stash_last.*recurrent layers in the core"):
        model.config.replace(**{"loop.cache_policy": "stash_last"})


def test_a_layer_that_is_not_registered_is_refused_by_name(model, tmp_path, extension):
    values = model.config.to_dict() | {"layout": "AXMF"}
    with pytest.raises(ValueError, match=r"unknown letters \['X'\].*register_layer"):
        ModelConfig.from_dict(values)


# ---- routes


class Routed:
    """Counts calls of the router of the core's layer, and may let every loop route anew."""

    def __init__(self, model: LoopedLM, monkeypatch, *, replays: bool = True) -> None:
        self.calls = 0
        core = model.core_stack[2].mixer
        assert isinstance(core, Experts)
        route, forward = core.route, core.forward

        def counting(x_BTD, is_token_BT):
            self.calls += 1
            return route(x_BTD, is_token_BT)

        def routing_anew(x_BTD, *, slot, view):
            return forward(x_BTD, slot=Anew(slot), view=view)

        monkeypatch.setattr(core, "route", counting)
        if not replays:
            monkeypatch.setattr(core, "forward", routing_anew)


class Anew:
    """A slot that never replays."""

    def __init__(self, slot) -> None:
        self.record = slot.record

    def replay(self) -> None:
        return None


@pytest.mark.parametrize("is_cached", [False, True])
def test_routes_of_the_first_loop_are_replayed_in_later_ones(
    model, monkeypatch, is_cached, inference
):
    x, loops = tokens(3, 5), torch.tensor([1, 3, 2])
    routed = Routed(model, monkeypatch)
    cache = new_cache(model, batch_size=3) if is_cached else None
    logits = model(x, num_loops=loops, cache=cache)
    assert routed.calls == 1
    if is_cached:
        more = model(tokens(3, 1, seed=4), num_loops=loops, cache=cache)
        assert routed.calls == 2, "nothing of the routes outlives a call"
        assert more.isfinite().all()
    Routed(model, monkeypatch, replays=False)
    anew = model(x, num_loops=loops)
    same(logits[0], anew[0])
    assert (logits[1:] - anew[1:]).abs().amax(dim=(1, 2)).min() > 100 * TOLERANCE


def carries(model, x, num_loops):
    """The carry after every pass."""
    begun = model.begin(Call(x, num_loops=num_loops))
    return [done.carry for done in model.iterate(begun)]


def test_losses_and_loads_of_a_replayed_route_count_in_every_loop(model):
    x = tokens(2, 6)
    first, *_, last = carries(model, x, K)
    (load_BE,), (balance_B,) = first.loads, first.balance
    assert load_BE.shape == (2, NUM_EXPERTS)
    assert load_BE.sum(dim=1).tolist() == [6 * PER_TOKEN] * 2
    same(last.loads[0], K * load_BE)
    same(last.balance[0], K * balance_B)
    assert balance_B.requires_grad


def test_leaving_rows_take_their_losses_with_them(model, inference):
    x, loops = tokens(2, 6), torch.tensor([1, K])
    *_, last = carries(model, x, loops)
    *_, alone = carries(model, x[1:], K)
    same(last.loads[0], alone.loads[0])
    same(last.balance[0], alone.balance[0])


def test_recomputation_counts_nothing_twice_and_gives_the_same_gradient(model):
    """Each pass runs again in the backward, routes and sums included."""
    x, found = tokens(2, 5), {}
    for name in ("kept", "recomputed"):
        copied = copy.deepcopy(model)
        if name == "recomputed":
            copied.loop = partial(checkpoint, copied.loop, use_reentrant=False)
        begun = copied.begin(Call(x, num_loops=K))
        passes = list(copied.iterate(begun))
        total = passes[-1].state_BTD.square().mean() + passes[-1].carry.balance[0].sum()
        total.backward()
        gradients = {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}
        found[name] = total.detach(), passes[-1].carry.loads[0], gradients
    (total, loads, gradients), (again, loads_again, of_again) = found.values()
    assert torch.equal(total, again) and torch.equal(loads, loads_again)
    assert gradients.keys() == of_again.keys()
    assert all(torch.equal(gradients[name], of_again[name]) for name in gradients)


def test_rows_of_the_first_loop_and_later_ones_do_not_mix_in_a_routed_core(model):
    with pytest.raises(ValueError, match="later loops read routes that the first loop writes"):
        model.loop_modulation(torch.tensor([0, 1]), torch.tensor([2, 2]))


# ---- planned by count


def test_counted_parameters_are_those_of_the_model(model):
    counted = count_parameters(model.config)
    assert counted.total == sum(p.numel() for p in model.parameters())
    assert counted.core == sum(p.numel() for p in model.core_stack.parameters())


@pytest.mark.parametrize("policy", ["per_loop", "last_step", POLICY])
def test_counted_bytes_are_those_of_the_filled_cache(model, policy, inference):
    """A buffer has one place more than tokens, the bin for padding."""
    capacity = 12
    cache = fed(model, new_cache(model, policy=policy, capacity=capacity), tokens(1, capacity))
    bins = cache_slots(model.config, 2, policy=policy) * 2 * model.config.key_width * 8
    count = partial(cache_bytes, model.config, 2, policy=policy, bytes_per_value=8)
    assert cache.num_bytes() == count(context=capacity) + bins


def test_counted_flops_follow_the_layer_types(model):
    """One loop more costs the core once more; the routed layer two experts of four."""
    config, d = model.config, model.config.d_model
    one, two = (flops_per_token(config, k, context=1).core for k in (1, 2))
    attention = 2 * d * 16 + 2 * d * 8
    recurrence, experts, mlp = 3 * d * d, NUM_EXPERTS * d + PER_TOKEN * d * d, 3 * d * 16
    assert one == 2 * (attention + recurrence + experts + mlp)
    pairs = 2 * (2 * (d + 16) + 2 * (d + 8) + 3 * 2 * d + 3 * (d + 16))
    assert two - one == one + 2 * pairs
    extra = flops_per_token(config, 2, context=1).attention - 4 * 16 * 4
    assert extra == 4 * 3 * d


def test_plan_knows_states_and_the_registered_policy(model, tmp_path, capsys):
    planned = plan(model.config, num_loops=[1, K], context=40, policy=POLICY)
    peaks = [row.cache_peak_bytes for row in planned.rows]
    per_entry, state = 2 * 8 * 2, 16 * 2
    assert peaks[1] - peaks[0] == 2 * ((LAST + 1) * per_entry + state)
    path = tmp_path / "config.json"
    path.write_text(model.config.to_json(), encoding="utf-8")
    assert main(["plan", str(path), "--context", "40"]) == 0
    out = capsys.readouterr().out
    assert "Cached keys, values and states" in out
    assert any(line.startswith(f"{POLICY} ") for line in out.splitlines())
    save_model(model, tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "recurrent states" in out and POLICY in out


# ---- a policy of a new kind


def last_8_and_first(policy, tokens, *, loop, num_loops, num_layers, is_prompt):
    """What a loop reads of earlier calls' tokens, from the words of the rule."""
    kept = {0, *range(len(tokens) - LAST, len(tokens))}
    return [token.by_loop[loop] if i in kept else None for i, token in enumerate(tokens)]


@pytest.mark.parametrize("num_loops", [1, 4])
def test_the_registered_policy_equals_its_slow_reference(num_loops, inference):
    toy, x = toy_model(), toy_tokens(1, 26)
    cache = new_cache(toy, policy=POLICY, capacity=26)
    slow, differs = SlowDecoder(toy, POLICY, rule=last_8_and_first), 0.0
    whole = toy(x, num_loops=num_loops)
    edges = [0, 6, 10, 11, 12, 20, *range(21, 27)]
    for a, b in zip(edges, edges[1:], strict=False):
        logits = toy(x[:, a:b], num_loops=num_loops, cache=cache)
        expected = slow(x[:, a:b], num_loops=num_loops)
        assert (logits - expected).abs().max() <= 1e-4
        differs = max(differs, float((logits - whole[:, a:b]).abs().max()))
    assert differs > 1e-2, "the rule must change what is read"


def test_padded_rows_of_the_registered_policy_equal_their_solo_runs(inference):
    toy, loops = toy_model(), torch.tensor([3, 1, 4])
    together = new_cache(toy, policy=POLICY, batch_size=3)
    alone = [new_cache(toy, policy=POLICY) for _ in range(3)]
    for call, counts in enumerate([(9, 3, 6), (1, 8, 0), (2, 2, 7), (1, 1, 1)]):
        x = toy_tokens(3, max(counts), seed=call)
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        logits = toy(x, num_loops=loops, cache=together, padding_mask_BT=real)
        for row, count in enumerate(counts):
            if count:
                own = toy(x[row : row + 1, :count], num_loops=int(loops[row]), cache=alone[row])
                assert (logits[row, :count] - own[0]).abs().max() <= 1e-4


def test_the_registered_policy_is_a_choice_of_the_config_and_of_generation(inference):
    config = toy_config(**{"loop.cache_policy": POLICY})
    assert ModelConfig.from_dict(config.to_dict()) == config
    toy = toy_model(**{"loop.cache_policy": POLICY})
    prompts = [toy_tokens(1, n, seed=n)[0].tolist() for n in (12, 3)]
    rows = generate(toy, prompts, num_loops=[2, 3], max_new_tokens=6)
    for prompt, num_loops, row in zip(prompts, (2, 3), rows, strict=True):
        assert [row] == generate(toy, [prompt], num_loops=num_loops, max_new_tokens=6)


def test_dropped_tokens_cannot_come_back(inference):
    toy = toy_model()
    cache = new_cache(toy, policy=POLICY)
    toy(toy_tokens(1, 12), num_loops=2, cache=cache)
    with pytest.raises(ValueError, match=f"'{POLICY}' has dropped earlier tokens"):
        cache.crop(11)
    assert not cache.can_roll_back


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("per_loop", CacheRule(""), "'per_loop' is taken"),
        ("huginn:skip", CacheRule(""), "'huginn:skip' is taken"),
        ("new", CacheRule("", mechanism="paged"), "mechanism 'paged' is unknown"),
    ],
)
def test_a_policy_that_cannot_be_registered_is_refused(name, rule, message):
    with pytest.raises(ValueError, match=message):
        register_policy(name, rule)
