"""What docs/exactness.md says of bf16 and of prompts in chunks is what a run shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from depthdial.config import ModelConfig
from depthdial.config.policies import POLICIES
from depthdial.engine.generate import generate
from depthdial.eval.scoring import ScoredRow, token_logprobs
from depthdial.model.looped_lm import LoopedLM

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
MEASURED = json.loads((ROOT / "docs" / "results" / "batch_rounding.json").read_text("utf-8"))
PROMPTS = [
    [(7 * i * i + 3 * i + length) % 29 for i in range(length)] for length in (11, 17, 9)
]  # fmt: skip


def small_model(max_loops: int, **changes: object) -> LoopedLM:
    config = ModelConfig(
        vocab_size=29, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=16, max_context=48, max_loops=max_loops, num_loops=max_loops, init_std=0.5, **changes,
    )  # fmt: skip
    return LoopedLM(config, seed=1).eval()


def policies_of(row: str) -> list[str]:
    """Names in a row of the table of policies; N fits a core of one layer and shares entries."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    names = re.findall(r"`([^`]+)`", line)
    return [re.sub("N$", "2" if "stride" in name else "1", name) for name in names]


def test_f20_every_policy_stands_in_the_table_once() -> None:
    named = policies_of("changes nothing") + policies_of("changes the text")
    assert len(named) == len(set(named)) and set(POLICIES) <= set(named)


@pytest.mark.parametrize("policy", policies_of("changes nothing"))
def test_f20_chunks_change_nothing_where_the_page_says_so(policy: str) -> None:
    assert chunked_differently(policy) == set()


@pytest.mark.parametrize("policy", policies_of("changes the text"))
def test_f20_chunks_change_the_text_where_the_page_says_so(policy: str) -> None:
    assert chunked_differently(policy)


def chunked_differently(policy: str) -> set[int]:
    """Chunk sizes at which some prompt is continued otherwise than after one call."""
    model = small_model(12 if policy.endswith("anchor") else 4)

    def continued(chunk: int | None) -> list[tuple[list[int], list[float]]]:
        settings = {"max_new_tokens": 8, "cache_policy": policy, "prefill_chunk": chunk}
        loops = model.config.max_loops
        rows = generate(model, PROMPTS, num_loops=loops, logprobs=True, **settings)
        return [(row.token_ids, row.logprobs) for row in rows]

    whole = continued(None)

    def is_other(chunk: int) -> bool:
        pairs = zip(continued(chunk), whole, strict=True)
        return any(a[0] != b[0] or a[1] != pytest.approx(b[1], abs=1e-4) for a, b in pairs)

    return {chunk for chunk in (1, 4) if is_other(chunk)}


def test_f20_the_figures_of_the_page_are_those_that_were_measured() -> None:
    for fp32, bf16 in zip(MEASURED[::2], MEASURED[1::2], strict=True):
        assert (fp32["precision"], bf16["precision"]) == ("fp32", "bf16")
        line = (
            f"| {fp32['largest_logit']:.1f} | {fp32['largest_change_nats']:.1e} "
            f"| {bf16['largest_change_nats']:.1e} | {fp32['bf16_step']:.2g} |"
        )
        assert line in PAGE
        assert fp32["largest_change_nats"] < 1e-5
        assert bf16["largest_change_nats"] < bf16["bf16_step"]
    middle, large = (f"{MEASURED[i]['largest_change_nats']:.1e}" for i in (3, 5))
    assert f"moves by up to {middle} nats where logits reach 6" in PAGE
    assert f"by up to {large} where they reach 11" in PAGE


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", None)])
def test_f20_a_row_moves_no_further_than_the_page_says(precision: str, bound: float | None) -> None:
    model = small_model(4)
    rows = [ScoredRow([1], prompt) for prompt in PROMPTS * 4]
    with torch.no_grad():
        largest = float(model(torch.tensor([PROMPTS[1]]), num_loops=4).abs().max())
    alone = token_logprobs(model, rows, 4, rows_per_forward=1, precision=precision)
    together = token_logprobs(model, rows, 4, rows_per_forward=12, precision=precision)
    moved = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
    # Two steps of bf16 at the largest logit: one of the token's own, one of all the others.
    assert moved <= (2 * largest / 128 if bound is None else bound)
