"""Our `LoopCache` as a transformers cache.

transformers counts the columns of a padded batch, ours the real tokens of each row; this file
translates between the two and decides nothing about keys and values.
Letters: B rows, T columns of one call, S columns so far.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.protocol import LoopCache
from depthdial.config import CachePolicy, ModelConfig

CACHE_FIELD = next(
    name
    for name in ("cache", "past_key_values")
    if name in {field.name for field in fields(CausalLMOutputWithPast)}
)
"""What this transformers calls a cache in outputs and in the arguments of `generate`."""


class DepthdialCache(Cache):
    """Keys and values of every loop, for `generate(cache=...)` and `forward(cache=...)`.

    Args:
        config: of the model (`model.config.looped`).
        capacity: most real tokens per row; None for the model's context.
        policy: cache policy; None for the model's own.

    Its batch size is that of the first call. Padding is not stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        capacity: int | None = None,
        policy: CachePolicy | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.config = config
        self.capacity = config.max_context if capacity is None else capacity
        # Made at once only to refuse a policy or a capacity before the first call.
        probe = ContiguousCache(config, batch_size=1, capacity=self.capacity, policy=policy)
        self.policy, self._can_roll_back = probe.policy, probe.can_roll_back
        self.loop_cache: LoopCache | None = None
        self.is_token_BS: Tensor | None = None

    def open(self, tokens_BT: Tensor, mask_BS: Tensor | None) -> tuple[LoopCache, Tensor | None]:
        """The loop cache of one call, and the part of the padding mask that belongs to the call.

        Args: mask_BS: of all columns so far and the call's; None for no padding in the call.
        Raises: ValueError for a mask of another length, or one that changes earlier columns.
        """
        batch_size, num_new = tokens_BT.shape
        if self.loop_cache is None:
            self.loop_cache = ContiguousCache(
                self.config,
                batch_size=batch_size,
                capacity=self.capacity,
                policy=self.policy,
                device=tokens_BT.device,
            )
            self.is_token_BS = torch.ones(batch_size, 0, dtype=torch.bool, device=tokens_BT.device)
        assert self.is_token_BS is not None, "a cache with rows knows which of its columns are real"
        if mask_BS is None:
            return self.loop_cache, None
        num_seen = self.is_token_BS.shape[1]
        if tuple(mask_BS.shape) != (self.is_token_BS.shape[0], num_seen + num_new):
            raise ValueError(
                f"attention_mask has shape {tuple(mask_BS.shape)}; with {num_seen} columns in the "
                f"cache and {num_new} in this call it must be {self.is_token_BS.shape[0]} x "
                f"{num_seen + num_new}."
            )
        if bool(((mask_BS[:, :num_seen] != 0) != self.is_token_BS).any()):
            raise ValueError(
                "attention_mask hides or shows tokens that are in the cache already; it must be "
                "the mask of the earlier calls, with new columns behind it."
            )
        return self.loop_cache, mask_BS[:, num_seen:]

    def close(self, shape: tuple[int, int], mask_BT: Tensor | None) -> None:
        """Note the columns of a call that has run."""
        assert self.is_token_BS is not None, "a call is opened first"
        new_BT = self.is_token_BS.new_ones(shape) if mask_BT is None else mask_BT != 0
        self.is_token_BS = torch.cat([self.is_token_BS, new_BT.to(self.is_token_BS.device)], dim=1)

    def end_prompt(self) -> None:
        """The prompt is complete: `LoopCache.end_prompt`."""
        if self.loop_cache is not None:
            self.loop_cache.end_prompt()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding among them."""
        return 0 if self.is_token_BS is None else self.is_token_BS.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most real tokens per row."""
        return self.capacity

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns after a call of `query_length`, and columns that are left out before them."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        if self.loop_cache is None:
            return
        assert self.is_token_BS is not None, "a cache with rows knows which of its columns are real"
        self.loop_cache.reorder(indices.cpu())
        self.is_token_BS = self.is_token_BS[indices.to(self.is_token_BS.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, copies beside each other."""
        if self.loop_cache is not None:
            rows = torch.arange(self.loop_cache.batch_size)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest columns of every row.

        Args: tokens_to_remove: 0, or minus the number of columns.
        Raises: ValueError for a positive number, or more columns than there are.
        """
        num_seen = self.get_seq_length()
        if not -num_seen <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give minus the number of columns to remove; this "
                f"cache has {num_seen}."
            )
        if tokens_to_remove == 0 or self.loop_cache is None:
            return
        assert self.is_token_BS is not None, "a cache with rows knows which of its columns are real"
        self.is_token_BS = self.is_token_BS[:, :tokens_to_remove]
        self.loop_cache.crop(self.is_token_BS.sum(dim=1))

    def reset(self) -> None:
        """Forget everything, the batch size too."""
        self.loop_cache = self.is_token_BS = None

    def activate_past_recording(self) -> None:
        """Nothing to do: every token stays until it is cropped."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object
    ) -> tuple[Tensor, Tensor]:
        """Raises: ValueError; only the looped model itself writes."""
        raise ValueError("this cache is written by the looped model alone; pass it to the model.")

    def __len__(self) -> int:
        """Key and value slots so far."""
        return 0 if self.loop_cache is None else self.loop_cache.num_slots()

    def __repr__(self) -> str:
        return f"DepthdialCache(policy={self.policy!r}, columns={self.get_seq_length()})"

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return -1 if self.loop_cache is None else self.loop_cache.batch_size

    @property
    def is_croppable(self) -> bool:
        """Whether tokens that are tried and taken back leave no trace."""
        return self._can_roll_back

    @property
    def is_initialized(self) -> bool:
        """Whether a call has run."""
        return self.loop_cache is not None

    @property
    def is_compileable(self) -> bool:
        """Rows of different lengths are not compiled by transformers."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops tokens."""
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        """No layer is recurrent over tokens."""
        return [False]

    @property
    def is_dummy(self) -> list[bool]:
        """Every layer counts."""
        return [False]
