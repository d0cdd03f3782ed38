"""What one call of the transformers model is given and gives, apart from the model itself.

Letters: B batch, T tokens of one call, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from depthdial.config import CachePolicy
from depthdial.hf.cache import DepthdialCache

IGNORED = -100
"""Label of a position without a loss."""


def check_inputs(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    output_attentions: bool | None,
) -> Tensor:
    """The token ids; refuse what a looped model does not take or give."""
    if inputs_embeds is not None or input_ids is None:
        raise ValueError(
            "give input_ids: a looped model reads token ids; inputs_embeds is not taken."
        )
    if output_attentions:
        raise ValueError(
            "output_attentions=True: attention weights are not kept. Hidden states are "
            "(output_hidden_states=True)."
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; give the padding mask "
            "[rows, columns]. Masks of other kinds are not taken."
        )
    return input_ids


def check_given(cache: DepthdialCache | None, *, policy: CachePolicy | None, is_used: bool) -> None:
    """Refuse a cache of another kind, and a policy that would have no effect."""
    if cache is not None and not isinstance(cache, DepthdialCache):
        raise ValueError(
            f"the cache is a {type(cache).__name__}; a looped model needs one entry per loop: "
            "DepthdialCache(model.config.looped)."
        )
    if cache is not None and not is_used:
        raise ValueError("a cache and use_cache=False contradict each other; leave one out.")
    if policy is not None and not is_used:
        raise ValueError(f"cache_policy='{policy}' has no effect without a cache (use_cache=True).")
    if policy is not None and cache is not None and policy != cache.policy:
        raise ValueError(
            f"cache_policy='{policy}', but the cache that was given follows '{cache.policy}'."
        )


def check_labels(labels: Tensor, input_ids: Tensor, *, num_read_out: int) -> None:
    """Refuse labels of another shape, or fewer logits than labels."""
    if labels.shape != input_ids.shape or num_read_out != labels.shape[1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, input_ids {tuple(input_ids.shape)}, and "
            f"{num_read_out} positions are read out; the loss needs all of them "
            "(logits_to_keep=0)."
        )


def num_items(labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
    """What the summed loss of a call is divided by: at least 1, so that no targets give loss 0.

    Args: num_items_in_batch: as a trainer counts; None for the targets of `labels`.
    Raises: ValueError for a number below 0.
    """
    if num_items_in_batch is None:
        # The first label of a row is the target of no position.
        num_items_in_batch = (labels[:, 1:] != IGNORED).sum()
    # A tensor may be on another device, which a check would wait for.
    if not isinstance(num_items_in_batch, Tensor) and num_items_in_batch < 0:
        raise ValueError(
            f"num_items_in_batch={num_items_in_batch}; give the number of targets in all calls of "
            "the optimizer step, or leave it out for those of this call."
        )
    return torch.as_tensor(num_items_in_batch).clamp(min=1)


def document_numbers(position_ids: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Document number of each token [B, T], from positions that start again; None for one."""
    assert position_ids is not None, "documents are read from positions"
    starts_BT = position_ids[:, 1:] - position_ids[:, :-1] != 1
    if not bool(starts_BT.any()):
        return None
    numbers_BT = pad(starts_BT.long().cumsum(dim=1), (1, 0))
    return numbers_BT.expand(shape)


def kept_positions(x_BTD: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The positions to read out."""
    if isinstance(logits_to_keep, int):
        return x_BTD[:, -logits_to_keep:]
    return x_BTD[:, logits_to_keep]


class RecordedStates:
    """Observer of the loops that keeps every state, rows in user order."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def __call__(self, loop_idx: int, state_BTD: Tensor, rows: Tensor | None) -> None:
        if rows is not None:
            places = rows.to(state_BTD.device)
            # The first loop is that of all rows, so what stands here before it is never seen.
            before_BTD = self.states[-1] if self.states else torch.zeros_like(state_BTD)
            state_BTD = before_BTD.index_copy(0, places, state_BTD)
        self.states.append(state_BTD)
