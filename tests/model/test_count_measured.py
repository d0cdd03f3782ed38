"""count.py against the model itself: tensors, executed matrix products, filled cache."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import POLICIES, ModelConfig
from depthdial.model.call import Call
from depthdial.model.count import count_parameters, flops_per_token
from depthdial.model.count.cache import cache_bytes, cache_slots
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.presets import preset, preset_names

MODULATION = {"d_cond": 10, "rank": 3, "embed_dim": 6}


def variant(**changes: object) -> ModelConfig:
    """The toy, with some fields changed."""
    return preset("toy").replace(**changes)


VARIANTS = {
    **{name: preset(name) for name in preset_names()},
    "tied": variant(tie_embeddings=True),
    "qk_norm": variant(qk_norm="rms"),
    "no prelude or coda": variant(split=(0, 12, 0)),
    "modulated": variant(modulation=MODULATION),
    **{name: variant(loop={"update": name}) for name in ("replace", "residual", "delta")},
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_counted_parameters_equal_the_tensors_of_the_model(config):
    with torch.device("meta"):
        model = LoopedLM(config)
    counted = count_parameters(config)
    parts = {
        "embedding": model.embedding,
        "prelude": model.prelude_stack,
        "core": model.core_stack,
        "coda": model.coda_stack,
        "state_update": model.state_update,
        "modulation": model.modulation,
        "final_norm": model.final_norm,
    }
    for name, module in parts.items():
        assert vars(counted)[name] == sum(p.numel() for p in module.parameters()), name
    assert counted.total == sum(p.numel() for p in model.parameters())


def executed_flops(
    config: ModelConfig, num_loops: int, num_tokens: int, *, policy: str | None = None
) -> int:
    """FLOPs of the matrix products that one forward of `num_tokens` tokens dispatches.

    In bfloat16, where short contexts take explicit products; the counter does not see into
    torch's fused attention on a CPU.
    """
    torch.manual_seed(0)
    model = LoopedLM(config)
    tokens_BT = torch.randint(config.vocab_size, (1, num_tokens))
    bf16 = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), bf16:
        table, cache = model.conditioning_table(num_loops), None
        if policy is not None:
            cache = ContiguousCache(config, batch_size=1, capacity=num_tokens, policy=policy)
        with FlopCounterMode(display=False) as counter:
            call = Call(tokens_BT, num_loops=num_loops, cache=cache, table=table)
            model.head(model.hidden_states(call))
    return counter.get_total_flops()


OWN_CORES = {
    "narrower": {
        "core_d_model": 40,
        "core_num_heads": 2,
        "core_num_kv_heads": 1,
        "exit_gate": "norm_linear",
        "loop": {
            "injection": "diagonal",
            "initial_state": "zero",
            "state_projection": True,
            "update": "decay_gate",
            "gate_rank": 3,
        },
    },
    "wider": {
        "core_d_model": 72,
        "modulation": {"kind": "time_step", "embed_dim": 6},
        "qk_norm": "rms",
        "loop_lora": {"rank": 2, "sets_by_loop": [0, 1], "norms": True},
        "loop": {"injection": "concat", "initial_state": "zero", "state_projection": True},
    },
    "normed in the loop": {
        "core_d_model": 40,
        "split": [4, 8, 0],
        "final_norm": "loop",
        "loop": {
            "injection": "concat",
            "initial_state": "zero",
            "state_projection": True,
            "update": "delta",
        },
    },
    "other heads": {"core_num_heads": 6, "core_num_kv_heads": 3},
}
"""Cores with a width or heads of their own."""


@pytest.mark.parametrize("changes", OWN_CORES.values(), ids=OWN_CORES)
def test_f02_parameters_flops_and_cache_of_a_core_of_its_own_are_counted(changes):
    config, num_tokens = variant(**changes), 7
    with torch.device("meta"):
        model = LoopedLM(config)
    parts = {"core": model.core_stack, "injection": model.injection, "exit_gate": model.exit_gate}
    counted = count_parameters(config)
    assert counted.total == sum(p.numel() for p in model.parameters())
    for name, module in parts.items():
        numbers = 0 if module is None else sum(p.numel() for p in module.parameters())
        assert vars(counted)[name] == numbers
    flops = flops_per_token(config, 3, context=num_tokens, position="last")
    assert executed_flops(config, 3, num_tokens) == num_tokens * flops.total
    # Their tables have the width of the core's values; their gates count no FLOPs.
    embedded = config.replace(value_embeddings=[0, 1, 3])
    with torch.device("meta"):
        tensors = LoopedLM(embedded).parameters()
    assert count_parameters(embedded).total == sum(p.numel() for p in tensors)
    cache = ContiguousCache(config, batch_size=2, capacity=num_tokens, policy="per_loop")
    with torch.no_grad():
        LoopedLM(config)(torch.zeros(2, num_tokens, dtype=torch.long), num_loops=3, cache=cache)
    sizes = {"context": num_tokens + 1, "bytes_per_value": 4, "batch_size": 2}
    assert cache.num_bytes() == cache_bytes(config, 3, policy="per_loop", **sizes)


@pytest.mark.parametrize("num_loops", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loop": {"update": "replace"}},
        {"loop": {"update": "adaptive_delta", "gate_bypass": "first_only"}},
        {"modulation": MODULATION, "tie_embeddings": True},
        {"loop": {"cache_policy": "share_first"}},
        {"loop_lora": {"rank": 2, "sets_by_loop": [-1, 0]}},
        {"loop": {"local_window": 7}},
        {"layout": "AFSF", "sliding": {"window": 7}},
    ],
    ids=[
        "adaptive_delta",
        "replace",
        "gate_bypass",
        "modulated",
        "shared keys",
        "differences",
        "mixed keys",
        "windows",
    ],
)
def test_counted_flops_equal_the_executed_matrix_products(changes, num_loops):
    """An unfused causal forward computes all T x T scores, as if each query attended to T."""
    config, num_tokens = variant(**changes), 7
    counted = flops_per_token(config, num_loops, context=num_tokens, position="last")
    assert executed_flops(config, num_loops, num_tokens) == num_tokens * counted.total


@pytest.mark.parametrize("policy", ["share_first", "stash_last"])
def test_counted_flops_of_a_cached_call_equal_the_executed_matrix_products(policy):
    config, num_tokens = variant(), 7
    counted = flops_per_token(config, 3, context=num_tokens, position="last", policy=policy)
    assert executed_flops(config, 3, num_tokens, policy=policy) == num_tokens * counted.total


PUBLISHED = (
    "huginn:latest-m2",
    "huginn:compress-s4",
    "huginn:latest-m2-compress-s2",
    "parcae:compress-s2",
    "parcae:compress-stride2",
    "parcae:compress-first1",
    "parcae:compress-last1",
)


@pytest.mark.parametrize("policy", [*POLICIES, *PUBLISHED])
@pytest.mark.parametrize("num_loops", [1, 3])
def test_counted_cache_equals_the_filled_cache_of_the_model(policy, num_loops):
    config, num_tokens = variant(), 6
    model = LoopedLM(config)
    cache = ContiguousCache(config, batch_size=2, capacity=num_tokens, policy=policy)

    def counted(phase: str) -> tuple[int, int]:
        # The cache keeps one more position per row, the bin for padding.
        held = cache_bytes(
            config,
            num_loops,
            context=num_tokens + 1,
            policy=policy,
            bytes_per_value=4,
            batch_size=2,
            phase=phase,
        )
        return cache_slots(config, num_loops, policy=policy, phase=phase), held

    with torch.no_grad():
        model(torch.zeros(2, num_tokens, dtype=torch.long), num_loops=num_loops, cache=cache)
    assert (cache.num_slots(), cache.num_bytes()) == counted("prompt_peak")
    cache.end_prompt()
    assert (cache.num_slots(), cache.num_bytes()) == counted("steady")
