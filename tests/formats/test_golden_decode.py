"""Incremental decoding of every golden case under every policy that its file contains."""

import pytest
import torch
from goldens import close, open_golden

from depthdial.cache.contiguous import ContiguousCache

NUM_STEPS = 4


def decode(model, tokens, *, policy, loops, start=None, on_loop=None, cuts=()):
    """Logits of a prompt (in pieces that end at `cuts`) and of single tokens after it, one tensor.

    Args:
        loops: loop counts of the prompt and of each step.
        start: initial state of all tokens.
    """
    length = tokens.shape[1]
    prompt = length - NUM_STEPS
    cache = ContiguousCache(model.config, batch_size=len(tokens), capacity=length, policy=policy)
    edges = [0, *cuts, *range(prompt, length + 1)]
    logits = []
    for first, last in zip(edges, edges[1:], strict=False):
        if first == prompt:
            cache.end_prompt()
        logits.append(
            model(
                tokens[:, first:last],
                num_loops=loops[max(last - prompt, 0)],
                cache=cache,
                initial_state_BTD=None if start is None else start[:, first:last],
                on_loop=on_loop,
            )
        )
    return torch.cat(logits, dim=1)


def steady(num_loops):
    return [num_loops] * (NUM_STEPS + 1)


@pytest.fixture(scope="module")
def opened():
    """Case and model by name, opened once."""
    known = {}

    def get(name):
        if name not in known:
            case = open_golden(name)
            known[name] = (case, case.model())
        return known[name]

    return get


@pytest.mark.parametrize(
    ("name", "vector", "policy", "num_loops", "tolerance"),
    [
        ("llama", "decode", "per_loop", 1, 1e-4),
        ("qwen3", "decode", "per_loop", 1, 1e-4),
        ("dory", "decode_per_loop", "per_loop", 4, 5e-5),
        ("dory", "decode_last_loop", "last_step", 4, 5e-5),
        ("nanbeige", "decode_per_loop", "per_loop", 2, 1e-4),
        ("nanbeige", "decode_last_loop", "collapse_last", 2, 1e-4),
        ("iquest-loop", "decode", "per_loop", 2, 1e-4),
    ],
)
def test_single_tokens_after_a_prompt(opened, name, vector, policy, num_loops, tolerance):
    case, model = opened(name)
    logits = decode(model, case.vectors["input_ids"], policy=policy, loops=steady(num_loops))
    close(logits[:, -NUM_STEPS:], case.vectors[vector], tolerance)


@pytest.mark.parametrize(
    ("vector", "policy"),
    [
        ("per_loop", "per_loop"),
        ("last_loop", "collapse_last"),
        ("first_loop", "collapse_first"),
        ("mean_loop", "collapse_mean"),
    ],
)
def test_ouro_reads_out_every_loop_of_every_step(opened, vector, policy):
    case, model = opened("ouro")
    by_loop = [[], [], [], []]

    def read_out(loop_idx, state_BTD, rows):
        by_loop[loop_idx].append(model.head(state_BTD))

    tokens = case.vectors["input_ids"]
    decode(model, tokens, policy=policy, loops=steady(4), on_loop=read_out)
    logits = torch.stack([torch.cat(calls, dim=1)[:, -NUM_STEPS:] for calls in by_loop])
    close(logits, case.vectors[f"decode_{vector}"], 1e-4)


HUGINN_VARIED = ("latest-m4", "available-m4", "always-last-m4", "skip")
HUGINN_BOTH = ("latest-m4-compress-s4", "latest-m4-compress-s8")


@pytest.mark.parametrize("rule", ["full", "compress-s4", "compress-s8", "compress-s16"])
def test_huginn_at_one_loop_count(opened, rule):
    case, model = opened("huginn")
    policy = "per_loop" if rule == "full" else f"huginn:{rule}"
    tokens, start = case.vectors["input_ids"], torch.zeros_like(case.vectors["initial_state"])
    loops = case.vectors["decode_steps"].tolist()
    logits = decode(model, tokens, policy=policy, loops=loops, start=start)
    close(logits[:, -NUM_STEPS:], case.vectors[f"decode_{rule}"], 2e-4)


@pytest.mark.parametrize("rule", [*HUGINN_VARIED, *HUGINN_BOTH])
def test_huginn_when_loop_counts_vary(opened, rule):
    case, model = opened("huginn")
    tokens, start = case.vectors["input_ids"], torch.zeros_like(case.vectors["initial_state"])
    loops = case.vectors["varied_steps"].tolist()
    logits = decode(model, tokens, policy=f"huginn:{rule}", loops=loops, start=start)
    close(logits[:, -NUM_STEPS:], case.vectors[f"varied_{rule}"], 2e-4)


@pytest.mark.parametrize(
    "rule",
    ["full", "compress-s1", "compress-s2", "compress-stride2", "compress-first1", "compress-last1"],
)
def test_parcae(opened, rule):
    case, model = opened("parcae")
    policy = "per_loop" if rule == "full" else f"parcae:{rule}"
    tokens, start = case.vectors["input_ids"], case.vectors["initial_state"]
    logits = decode(model, tokens, policy=policy, loops=steady(4), start=start)
    close(logits, case.vectors[f"logits_decode_{rule}"], 2e-4)


def test_parcae_at_one_loop(opened):
    case, model = opened("parcae")
    tokens, start = case.vectors["input_ids"], case.vectors["initial_state"]
    logits = decode(model, tokens, policy="parcae:compress-s1", loops=steady(1), start=start)
    close(logits, case.vectors["logits_decode_k1_compress-s1"], 2e-4)


@pytest.mark.parametrize(
    ("policy", "golden", "rule"),
    [
        ("last_step", "parcae", "compress-s1"),
        ("parcae:compress-s2", "huginn", "compress-s8"),
        ("last_step", "huginn", "compress-s4"),
    ],
)
def test_names_of_one_rule_agree(opened, policy, golden, rule):
    """Where the published names of two families mean one rule, both give its golden output."""
    case, model = opened(golden)
    start = torch.zeros_like(case.vectors["initial_state"])
    loops, vector = steady(6), f"decode_{rule}"
    if golden == "parcae":
        start, loops, vector = case.vectors["initial_state"], steady(4), f"logits_decode_{rule}"
    logits = decode(model, case.vectors["input_ids"], policy=policy, loops=loops, start=start)
    close(logits[:, -NUM_STEPS:], case.vectors[vector][:, -NUM_STEPS:], 2e-4)


def test_loopus_with_one_cache_per_loop(opened):
    case, model = opened("loopus")
    logits = decode(model, case.vectors["input_ids"], policy="per_loop", loops=steady(6))
    close(logits, case.vectors["logits_decode"], 5e-5)


def test_loopus_prompt_in_pieces(opened):
    """The released code masks a second call of several tokens wrongly."""
    case, model = opened("loopus")
    tokens = case.vectors["input_ids"]
    logits = decode(model, tokens, policy="per_loop", loops=steady(6), cuts=(3, 4))
    close(logits, case.vectors["logits_k6"], 5e-5)


def test_iquest_prompt_in_pieces_longer_than_its_window(opened):
    case, model = opened("iquest-loop")
    tokens = case.vectors["input_ids"]
    logits = decode(model, tokens, policy="per_loop", loops=steady(2), cuts=(7, 8))
    close(logits, case.vectors["logits_k2"], 1e-4)


def test_loopformer_on_a_mixed_path(opened):
    """The released code has no cache; its full forward is the reference."""
    case, model = opened("loopformer")
    tokens, steps = case.vectors["input_ids"], case.vectors["steps_mixed"]
    cache = ContiguousCache(model.config, batch_size=len(tokens), capacity=tokens.shape[1])
    logits = [
        model(tokens[:, a:b], num_loops=len(steps), step_sizes=steps, cache=cache)
        for a, b in ((0, 5), (5, 9), (9, 10), (10, 11), (11, 12))
    ]
    close(torch.cat(logits, dim=1), case.vectors["logits_mixed"], 5e-4)
