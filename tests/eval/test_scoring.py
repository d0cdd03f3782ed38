"""Log-probabilities of tokens against one plain forward per row."""

import pytest
import torch

from depthdial.config import LoopConfig, ModelConfig
from depthdial.eval import scoring
from depthdial.eval.scoring import CACHED_PREFIX_TOKENS, ScoredRow, token_logprobs
from depthdial.model.looped_lm import LoopedLM

VOCAB = 31
LONG = list(range(1, CACHED_PREFIX_TOKENS + 4))
ROWS = [
    ScoredRow([3], [4, 5, 6, 7, 8]),
    ScoredRow([1, 2, 3, 4], [9]),
    ScoredRow(LONG, [1, 2, 3]),
    ScoredRow(LONG, [7]),
    ScoredRow(list(LONG), [7, 7]),
    ScoredRow([5, 6], [7]),
    ScoredRow([5, 6], [8]),
]
"""Single rows, three of one long prefix, two of a short one."""


def small_model(policy: str = "per_loop") -> LoopedLM:
    return LoopedLM(
        ModelConfig(
            vocab_size=VOCAB,
            d_model=16,
            split=(2, 2, 2),
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            d_ff=16,
            max_context=64,
            max_loops=4,
            init_std=0.3,
            loop=LoopConfig(update="adaptive_delta", cache_policy=policy),
        )  # fmt: skip
    )


def one_by_one(model, rows, num_loops):
    found = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([[*row.prefix_ids, *row.target_ids[:-1]]])
            logp_TV = model(tokens, num_loops=num_loops)[0, len(row.prefix_ids) - 1 :].log_softmax(
                -1
            )
            found.append(logp_TV.gather(1, torch.tensor(row.target_ids)[:, None])[:, 0])
    return found


@pytest.fixture
def calls(monkeypatch):
    """The ways in which rows were read: `whole` or `prefix`, and how many rows."""
    seen = []
    for name, word in (("_whole_rows", "whole"), ("_after_common_prefix", "prefix")):
        read = getattr(scoring, name)

        def record(model, rows, *rest, read=read, word=word):
            seen.append((word, len(rows)))
            return read(model, rows, *rest)

        monkeypatch.setattr(scoring, name, record)
    return seen


@pytest.mark.parametrize("policy", ["per_loop", "share_first", "last_step", "collapse_mean"])
@pytest.mark.parametrize("num_loops", [1, 3])
def test_batched_rows_equal_one_forward_each(policy, num_loops):
    model = small_model(policy)
    expected = one_by_one(model, ROWS, num_loops)
    for rows_per_forward in (1, 2, 16):
        found = token_logprobs(model, ROWS, num_loops, rows_per_forward=rows_per_forward)
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


def test_a_long_common_prefix_is_read_once(calls):
    token_logprobs(small_model(), ROWS, 2)
    assert calls == [("whole", 2), ("prefix", 3), ("whole", 2)]


def test_a_policy_that_forgets_loops_reads_every_prefix_again(calls):
    token_logprobs(small_model("last_step"), ROWS, 2)
    assert calls == [("whole", 7)]


def test_bf16_is_another_precision():
    model = small_model()
    wide, narrow = (token_logprobs(model, ROWS, 3, precision=p) for p in ("fp32", "bf16"))
    gap = max(float((a - b).abs().max()) for a, b in zip(wide, narrow, strict=True))
    assert 1e-5 < gap < 0.3


@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "no rows"), ([ScoredRow([], [1])], "row 0 has 0"), ([ScoredRow([1], [])], "0 to score")],
)
def test_rows_without_tokens_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        token_logprobs(small_model(), rows, 1)
