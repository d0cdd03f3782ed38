"""Milliseconds per generated token at every loop count, all of them interleaved in one process.

Losses are in `depth_sweep.py`.
Letters: B rows, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.eval.depth_sweep import check_swept_loops
from depthdial.model.call import Call
from depthdial.model.conditioning import ConditioningTable
from depthdial.model.looped_lm import LoopedLM


class Latency(NamedTuple):
    """Milliseconds per generated token, batch 1, cached: fastest and median repeat."""

    min_ms: float
    median_ms: float


def measure_latency(
    model: LoopedLM, *, loops: Sequence[int], prompt_tokens: int, new_tokens: int, rounds: int = 9
) -> dict[int, Latency]:
    """Times of one model at each loop count; see `measure_latencies`."""
    loops = check_swept_loops(loops)
    times = measure_latencies(
        [(model, num_loops) for num_loops in loops],
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
    )
    return dict(zip(loops, times, strict=True))


@torch.no_grad()
def measure_latencies(
    sides: Sequence[tuple[LoopedLM, int]],
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int = 9,
) -> list[Latency]:
    """Time cached decoding of several (model, loop count) pairs.

    Each round runs every pair, so that whatever else the machine does hits all alike.
    """
    times: list[list[float]] = [[] for _ in sides]
    tables = [model.conditioning_table(num_loops) for model, num_loops in sides]
    for _ in range(rounds):
        for (model, num_loops), table, side_times in zip(sides, tables, times, strict=True):
            seconds = _decode_seconds(
                model, num_loops, table, prompt_tokens=prompt_tokens, new_tokens=new_tokens
            )
            side_times.append(seconds / new_tokens * 1e3)
    return [Latency(min(values), median(values)) for values in times]


def _decode_seconds(
    model: LoopedLM,
    num_loops: int,
    table: ConditioningTable,
    *,
    prompt_tokens: int,
    new_tokens: int,
) -> float:
    """Wall-clock of `new_tokens` greedy tokens after a prompt, which is not timed."""
    device = model.embedding.weight.device
    prompt_BT = torch.zeros(1, prompt_tokens, dtype=torch.int64, device=device)
    capacity = prompt_tokens + new_tokens
    cache = ContiguousCache(model.config, batch_size=1, capacity=capacity, device=device)
    make_call = partial(Call, num_loops=num_loops, cache=cache, table=table)
    model.hidden_states(make_call(prompt_BT))
    cache.end_prompt()
    started = time.perf_counter()
    for _ in range(new_tokens):
        x_BTD = model.hidden_states(make_call(prompt_BT[:, :1]))
        model.head(x_BTD)[0, -1].argmax().item()
    return time.perf_counter() - started
