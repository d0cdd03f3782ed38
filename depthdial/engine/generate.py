"""Batched, cached, seeded generation from token ids, with a loop count per row or per token.

Token ids only: text and tokenizers belong to `api/model.py`.
Letters: B rows, T tokens of one call, D model width, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.loop_counts import NumLoops, allowed_num_loops, check_num_loops
from depthdial.config import CachePolicy
from depthdial.engine.adaptive import check_can_stop, run_until, warn_if_conditioned, warn_if_stale
from depthdial.engine.sampling import Sampling, chosen_logprobs, sample
from depthdial.model.call import Call, check_finite_logits
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.stopping_rules import StoppingRule


@dataclass(frozen=True)
class Generation:
    """One row's result.

    Fields:
        token_ids: the new tokens, without the stop token.
        num_loops: passes of the core; the most for a token where a rule stops them.
        prompt_tokens: tokens read.
        finish_reason: `stop` (a stop token, or `is_complete`) or `length`.
        mean_loops: passes per new token, a stop token included; None without a stopping rule.
        logprobs: log-probability of each new token in nats, of the model's own distribution: before
            temperature and filters. None unless asked for.
    """

    token_ids: list[int]
    num_loops: int
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    mean_loops: float | None = None
    logprobs: list[float] | None = None


@torch.no_grad()
def generate(
    model: LoopedLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_loops: NumLoops | Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    is_complete: Callable[[Sequence[int]], bool] | None = None,
    cache_policy: CachePolicy | None = None,
    prefill_chunk: int | None = None,
    stop_rule: StoppingRule | None = None,
    step_sizes: Tensor | None = None,
    logprobs: bool = False,
) -> list[Generation]:
    """Continue every prompt by up to `max_new_tokens`.

    Args:
        prompts: token ids, one non-empty list per row; lengths may differ.
        num_loops: for all rows, or one per row.
        sampling: None is greedy.
        stop_ids: tokens that end a row.
        is_complete: is asked after every token of a row with all its new ones; True ends the row.
        cache_policy: None for the model's own.
        prefill_chunk: tokens per prompt call; None for the whole prompt at once. It changes the
            text under last_step, stash_first, stash_last and the rules of Huginn and Parcae by
            which loops share entries (docs/exactness.md).
        stop_rule: ends the loops of each new token; `num_loops` is the most it may run. The
            prompt, and with it the first new token, always runs all of them. None runs all.
        step_sizes: of the loops, for a model conditioned on time; as in `LoopedLM.forward`.
        logprobs: also return the log-probability of each new token. In bf16 they move with the
            batch by up to 1.6e-2, more where logits are large (docs/exactness.md).

    Returns: one `Generation` per prompt, in order.
    Raises: ValueError for an empty prompt, an unknown id, a loop count or step sizes that the model
        refuses, a prompt and limit beyond `max_context`, a rule that does not go with model or
        cache, or logits that are no finite numbers.
    """
    if prefill_chunk is not None:
        _check_whole("prefill_chunk", prefill_chunk)
    _check_ids(stop_ids, "stop_ids", vocab_size=model.config.vocab_size)
    _check_prompts(model, prompts, max_new_tokens=max_new_tokens)
    batch_size = len(prompts)
    loops = allowed_num_loops(model.config, _per_row(num_loops), batch_size=batch_size)
    cache = ContiguousCache(
        model.config,
        batch_size=batch_size,
        capacity=max(map(len, prompts)) + max_new_tokens,
        policy=cache_policy,
        device=model.embedding.weight.device,
    )
    if stop_rule is not None:
        check_can_stop(model.config, stop_rule, cache=cache)
        warn_if_conditioned(model.config)
        warn_if_stale(model.config, stop_rule)
    # What all calls share. The table lives here, not on the model: other threads may generate with
    # other settings, and weights may change afterwards.
    table = model.conditioning_table(loops)
    make_call = partial(Call, num_loops=loops, cache=cache, step_sizes=step_sizes, table=table)
    logits_BV = _prefill(model, prompts, make_call, chunk=prefill_chunk)
    cache.end_prompt()
    decoded = _decode(
        model,
        logits_BV,
        loops,
        make_call,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        stop_ids=stop_ids,
        is_complete=is_complete,
        stop_rule=stop_rule,
        logprobs=logprobs,
    )
    most_loops = torch.as_tensor(loops).expand(batch_size).tolist()
    return [
        decoded.row(row, prompt, num_loops=most_loops[row], has_rule=stop_rule is not None)
        for row, prompt in enumerate(prompts)
    ]


class _Decoded(NamedTuple):
    """New ids of each row, passes that each of its tokens took, and which rows met no stop.

    logprobs: of the new ids; None unless asked for.
    """

    new_ids: list[list[int]]
    loops_of_tokens: list[list[int]]
    is_open_B: Tensor
    logprobs: list[list[float]] | None

    def row(self, row: int, prompt: Sequence[int], *, num_loops: int, has_rule: bool) -> Generation:
        """What became of one prompt."""
        return Generation(
            self.new_ids[row],
            num_loops,
            len(prompt),
            "length" if bool(self.is_open_B[row]) else "stop",
            statistics.fmean(self.loops_of_tokens[row]) if has_rule else None,
            None if self.logprobs is None else self.logprobs[row],
        )


def _decode(
    model: LoopedLM,
    logits_BV: Tensor,
    loops: NumLoops,
    make_call: Callable[..., Call],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    is_complete: Callable[[Sequence[int]], bool] | None,
    stop_rule: StoppingRule | None,
    logprobs: bool,
) -> _Decoded:
    """One token per call."""
    device = logits_BV.device
    generators = sampling.generators(len(logits_BV))
    new_ids: list[list[int]] = [[] for _ in logits_BV]
    loops_of_tokens: list[list[int]] = [[] for _ in logits_BV]
    logprobs_of_tokens: list[list[float]] = [[] for _ in logits_BV]
    loops_B = torch.as_tensor(loops).expand(len(logits_BV))
    is_open_B = torch.ones(len(logits_BV), dtype=torch.bool)
    for new_tokens in range(1, max_new_tokens + 1):
        check_finite_logits(logits_BV[is_open_B.to(device)])
        next_B = sample(logits_BV, sampling, generators).cpu()
        logprobs_B = chosen_logprobs(logits_BV, next_B) if logprobs else None
        for row in is_open_B.nonzero()[:, 0].tolist():
            token = int(next_B[row])
            loops_of_tokens[row].append(int(loops_B[row]))
            if token in stop_ids:
                is_open_B[row] = False
                continue
            new_ids[row].append(token)
            if logprobs_B is not None:
                logprobs_of_tokens[row].append(float(logprobs_B[row]))
            if is_complete is not None and is_complete(new_ids[row]):
                is_open_B[row] = False
        if new_tokens == max_new_tokens or not bool(is_open_B.any()):
            break
        # A finished row brings padding from here on: nothing of it is stored or attended.
        tokens_BT, is_token_BT = next_B[:, None].to(device), is_open_B[:, None].to(device)
        call = make_call(tokens_BT, padding_mask_BT=is_token_BT)
        if stop_rule is None:
            logits_BTV = model.head(model.hidden_states(call))
        else:
            logits_BTV, loops_B, _, _ = run_until(model, call, rule=stop_rule)
        logits_BV = logits_BTV[:, 0]
    return _Decoded(new_ids, loops_of_tokens, is_open_B, logprobs_of_tokens if logprobs else None)


def _per_row(num_loops: NumLoops | Sequence[int]) -> NumLoops:
    """A sequence becomes one entry per row; all else is left for the model's rule to judge."""
    if not isinstance(num_loops, Sequence) or isinstance(num_loops, str):
        return num_loops
    for depth in num_loops:
        check_num_loops(depth)
    return torch.tensor(num_loops, dtype=torch.int64)


def _prefill(
    model: LoopedLM,
    prompts: Sequence[Sequence[int]],
    make_call: Callable[..., Call],
    *,
    chunk: int | None,
) -> Tensor:
    """Store all prompts and return the logits after each one's last token, [B, V]."""
    device = model.embedding.weight.device
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths_B.max())
    tokens_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
    is_token_BT = torch.arange(longest) < lengths_B[:, None]
    last_BD = torch.zeros(
        len(prompts), model.config.d_model, device=device, dtype=model.embedding.weight.dtype
    )
    for start in range(0, longest, chunk or longest):
        end = min(start + (chunk or longest), longest)
        call = make_call(
            tokens_BT[:, start:end].to(device), padding_mask_BT=is_token_BT[:, start:end].to(device)
        )
        x_BTD = model.hidden_states(call)
        ends_here = ((lengths_B > start) & (lengths_B <= end)).nonzero()[:, 0]
        last_BD[ends_here] = x_BTD[ends_here, lengths_B[ends_here] - 1 - start]
    return model.head(last_BD)


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}; give a whole number of at least 1.")


def _check_ids(ids: Sequence[int], what: str, *, vocab_size: int) -> None:
    for token in ids:
        if not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{what} has token id {token!r}; the model knows 0..{vocab_size - 1}. Was it made "
                "with another tokenizer?"
            )


def _check_prompts(
    model: LoopedLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> None:
    config = model.config
    _check_whole("max_new_tokens", max_new_tokens)
    if not prompts:
        raise ValueError("no prompts were given; give at least one.")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; give at least one token.")
        _check_ids(prompt, f"prompt {row}", vocab_size=config.vocab_size)
        if len(prompt) + max_new_tokens > config.max_context:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and asks for {max_new_tokens} more; the "
                f"model's context is {config.max_context}. Shorten one of them."
            )
