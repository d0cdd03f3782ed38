"""`Backbone`: one call of the looped model without its head, behind the interface of transformers.

`DepthdialForCausalLM.forward` reads its logits from it, and trainers that multiply by the head's
matrix themselves call it as `model.base_model`.
Letters: B batch, T tokens of one call, S columns so far, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from depthdial.cache.loop_counts import NumLoops, allowed_num_loops
from depthdial.config import CachePolicy
from depthdial.hf.cache import CACHE_FIELD, DepthdialCache
from depthdial.hf.call import (
    RecordedStates,
    check_given,
    check_inputs,
    document_numbers,
    kept_positions,
)
from depthdial.hf.config import DepthdialConfig
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM, last_states


class Backbone(nn.Module):
    """The looped model up to the input of its head.

    Its parameters are those of the whole `LoopedLM`, the head's among them.
    """

    def __init__(self, config: DepthdialConfig, looped: LoopedLM) -> None:
        super().__init__()
        self.config = config
        self.looped = looped

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        num_loops: NumLoops | None = None,
        position_ids: Tensor | None = None,
        cache: DepthdialCache | None = None,
        past_key_values: DepthdialCache | None = None,
        cache_policy: CachePolicy | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        step_sizes: Tensor | Sequence[float] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """States after `num_loops` passes of the core.

        Args: as in `DepthdialForCausalLM.forward`.
        Returns: last_hidden_state [B, T or fewer, D], which the head's matrix multiplies;
            hidden_states and the cache as there.
        Raises: ValueError for what is not allowed, or has no effect.
        """
        tokens_BT = check_inputs(input_ids, attention_mask, inputs_embeds, output_attentions)
        _check_placed(self.looped)
        loops = self._loops(num_loops, batch_size=tokens_BT.shape[0])
        cache = self._cache_of_call(cache, past_key_values, use_cache, cache_policy)
        states = RecordedStates() if self._wants_states(output_hidden_states) else None
        mask_BT, loop_cache = attention_mask, None
        if cache is not None:
            loop_cache, mask_BT = cache.open(tokens_BT, attention_mask)
        is_packed = position_ids is not None and attention_mask is None and cache is None
        call = Call(
            tokens_BT,
            num_loops=loops,
            cache=loop_cache,
            positions_BT=None if position_ids is None else position_ids.expand(tokens_BT.shape),
            padding_mask_BT=mask_BT,
            document_ids_BT=document_numbers(position_ids, tokens_BT.shape) if is_packed else None,
            step_sizes=None if step_sizes is None else torch.as_tensor(step_sizes),
            on_loop=states,
        )
        begun = self.looped.begin(call)
        x_BTD = self.looped.finish(last_states(self.looped.iterate(begun)), begun)
        if cache is not None:
            cache.close((tokens_BT.shape[0], tokens_BT.shape[1]), mask_BT)
        output = BaseModelOutputWithPast(
            last_hidden_state=self.looped.head_input(kept_positions(x_BTD, logits_to_keep)),
            hidden_states=None if states is None else (begun.h_in_BTD, *states.states, x_BTD),
            **{CACHE_FIELD: cache},
        )
        return output.to_tuple() if wants_tuple(self.config, return_dict) else output

    def _loops(self, num_loops: NumLoops | None, *, batch_size: int) -> NumLoops:
        """Checked loop counts, on the CPU: generation moves every tensor to the model's device."""
        if num_loops is None:
            num_loops = self.config.num_loops
        if isinstance(num_loops, Tensor):
            num_loops = num_loops.cpu()
        return allowed_num_loops(self.looped.config, num_loops, batch_size=batch_size)

    def _wants_states(self, output_hidden_states: bool | None) -> bool:
        if output_hidden_states is None:
            return bool(self.config.output_hidden_states)
        return output_hidden_states

    def _cache_of_call(
        self,
        cache: DepthdialCache | None,
        past_key_values: DepthdialCache | None,
        use_cache: bool | None,
        cache_policy: CachePolicy | None,
    ) -> DepthdialCache | None:
        """The cache given under either name, or a new one where one is asked for."""
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are one argument; give one of them.")
        given = past_key_values if cache is None else cache
        if given is None and use_cache:
            return DepthdialCache(self.looped.config, policy=cache_policy)
        is_used = given is not None if use_cache is None else use_cache
        check_given(given, policy=cache_policy, is_used=is_used)
        return given


def _check_placed(looped: LoopedLM) -> None:
    """Refuse weights of which offloading brings back all but one."""
    if looped.logit_scale is not None and looped.logit_scale.is_meta:
        raise ValueError(
            "the scales of the scores (nGPT) are offloaded, and no hook brings them back: they "
            "belong to no module that is called. Load this model whole: device_map='cpu', or one "
            "device."
        )


def wants_tuple(config: DepthdialConfig, return_dict: bool | None) -> bool:
    """Whether a call answers with a plain tuple."""
    return return_dict is False or (return_dict is None and not config.return_dict)


class ScaledHead(nn.Module):
    """The head of a model that scales each token's score (nGPT), as one matrix.

    Args: head: module with the weight [V, D]; scale: of each token's score, [V].
    """

    bias = None

    def __init__(self, head: nn.Module, scale: Tensor) -> None:
        super().__init__()
        self.head = head
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        """[V, D]; gradients reach both factors."""
        weight = self.head.get_parameter("weight")
        return (self.scale[:, None] * weight).to(weight.dtype)

    def forward(self, head_input_BTD: Tensor) -> Tensor:
        """Scores [B, T, V]."""
        return self.head(head_input_BTD) * self.scale
