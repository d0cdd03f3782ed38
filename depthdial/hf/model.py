"""`DepthdialForCausalLM`: one `LoopedLM` behind the interface of transformers.

What the model computes is in `model/looped_lm.py`, here are only names, masks, caches and files.
Weights keep our names in a file, so that `depthdial.load` and `from_pretrained` read the same one.
transformers calls the cache `cache` since 5.24 and `past_key_values` before; both are taken.
Letters: B batch, T tokens of one call, S columns so far, D model width, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation import CandidateGenerator, GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthdial.cache.loop_counts import NumLoops
from depthdial.config import POLICIES, CachePolicy, ModelConfig
from depthdial.config.model import OLD_LOOP_LORA
from depthdial.hf.backbone import Backbone, ScaledHead, wants_tuple
from depthdial.hf.cache import CACHE_FIELD, DepthdialCache
from depthdial.hf.call import check_given, check_labels, num_items
from depthdial.hf.config import DepthdialConfig, check_same_function
from depthdial.hf.files import bring_to, mixed_formats, stored_config, widest
from depthdial.hf.generation import (
    BoundedCandidates,
    check_guidance,
    guide_at_depth,
    prepare_saving,
    take_depth_settings,
)
from depthdial.layers.primitives import TokenEmbedding
from depthdial.model.call import check_finite_logits
from depthdial.model.looped_lm import LoopedLM

PREFIX = "model."
"""Before our parameter names inside the wrapper; never in a file."""
ONE_FILE = "1000000GB"
"""Size of a file that is never reached."""


class DepthdialForCausalLM(PreTrainedModel, GenerationMixin):
    """Looped language model for transformers; `.model` is the `LoopedLM`.

    `num_loops` is an argument of `forward` and `generate`: an int, or a LongTensor [B] with one
    count per row; `config.num_loops` where it is left out.
    """

    config_class = DepthdialConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
    """Trainers ask for it, and pass `num_items_in_batch` only where it is True."""
    _no_split_modules = ["LoopedLM"]

    def __init__(self, config: DepthdialConfig) -> None:
        super().__init__(config)
        # In a folder with code of its own, transformers loads the files of the config and of the
        # model apart, each with its own classes: plain values bring the config over to ours.
        self.model = LoopedLM(ModelConfig.from_dict(config.looped.to_dict()))
        # In a tuple, so that what it shares with `model` is registered once.
        self._unregistered = (Backbone(config, self.model),)
        self.register_load_state_dict_pre_hook(_with_prefix)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `LoopedLM` draws its own values, by parameter name."""

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
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        step_sizes: Tensor | Sequence[float] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits after `num_loops` passes of the core.

        Args:
            input_ids: token ids [B, T].
            attention_mask: 1 at real tokens, 0 at padding, on any side: [B, T], with a cache
                [B, S], the columns of earlier calls first.
            num_loops: see the class.
            position_ids: [B, T] or [1, T]; None counts the real tokens of each row. Without mask
                and cache, a row whose positions start again holds several documents, which do not
                see each other.
            cache, past_key_values: two names of one argument; advanced by the call.
            cache_policy: of the cache that `use_cache=True` makes; None for the model's own.
            use_cache: make a cache for the whole context; None makes none.
            labels: [B, T], `input_ids` as a rule, -100 where no loss is wanted; shifted here.
            num_items_in_batch: targets of the whole optimizer step, by which the summed loss of
                this call is divided; None for the targets of this call. Trainers that accumulate
                gradients pass it, also in calls without labels, where there is no loss.
            logits_to_keep: last positions to read out, or their places [n]; 0 for all.
            step_sizes: of the loops, for a model conditioned on time. With beams, which repeat
                the rows of every tensor, a list or one row per prompt.
            output_hidden_states: also return the states: after the prelude, after every loop,
                after the coda; the last one times the head gives the logits. A row of fewer loops
                than others repeats its last state.
            return_dict: False for a tuple.
            inputs_embeds, output_attentions: refused.

        Returns: logits [B, T or fewer, V]; loss; hidden_states, most loops + 2 of [B, T, D]; the
            cache.
        Raises: ValueError for what is not allowed, or has no effect.
        """
        hidden = self.base_model(
            input_ids,
            attention_mask,
            num_loops=num_loops,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            cache_policy=cache_policy,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            step_sizes=step_sizes,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
        )
        logits_BTV = self.model.scores(hidden.last_hidden_state)
        output = CausalLMOutputWithPast(
            loss=self._loss(logits_BTV, labels, input_ids, num_items_in_batch),
            logits=logits_BTV,
            hidden_states=hidden.hidden_states,
            **{CACHE_FIELD: hidden.get(CACHE_FIELD)},
        )
        return output.to_tuple() if wants_tuple(self.config, return_dict) else output

    @property
    def base_model(self) -> Backbone:
        """The model without its head, as trainers call it: `base_model(input_ids, num_loops=2)`.

        Its last_hidden_state times the weight of `get_output_embeddings()` gives the logits.
        """
        (backbone,) = self._unregistered
        # Somebody may have replaced one of them.
        backbone.config, backbone.looped = self.config, self.model
        return backbone

    def get_decoder(self) -> Backbone:
        """`base_model`."""
        return self.base_model

    def _loss(
        self,
        logits_BTV: Tensor,
        labels: Tensor | None,
        input_ids: Tensor | None,
        num_items_in_batch: int | Tensor | None,
    ) -> Tensor | None:
        """Negative log-likelihood of the next tokens, in nats, per item of the optimizer step."""
        if labels is None:
            return None
        assert input_ids is not None, "a call without token ids is refused before"
        check_labels(labels, input_ids, num_read_out=logits_BTV.shape[1])
        return self.loss_function(
            logits=logits_BTV,
            labels=labels,
            vocab_size=self.config.vocab_size,
            num_items_in_batch=num_items(labels, num_items_in_batch),
        )

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """As transformers', with the depth settings of the config among the arguments."""
        merged, arguments = super()._prepare_generation_config(generation_config, *args, **kwargs)
        return merged, take_depth_settings(merged, self.generation_config, arguments)

    def _get_candidate_generator(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> CandidateGenerator:
        """As transformers', but tokens copied from the prompt end where generation does."""
        source = super()._get_candidate_generator(generation_config, *args, **kwargs)
        if generation_config.prompt_lookup_num_tokens is None:
            return source
        return BoundedCandidates(source, max_length=generation_config.max_length)

    def _get_logits_processor(
        self, *args: Any, model_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> LogitsProcessorList:
        """As transformers', with guidance at the depth of the call."""
        processors = super()._get_logits_processor(*args, model_kwargs=model_kwargs, **kwargs)
        guide_at_depth(processors, self, model_kwargs or {})
        return processors

    def prepare_inputs_for_generation(
        self, *args: Any, tokenizer: Any = None, assistant_tokenizer: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers', without the tokenizers of `generate`, which stop strings need."""
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: ValueError; it keeps one entry per token and layer, not one per loop."""
        raise ValueError(
            "continuous batching keeps no keys and values of loops; use generate, which takes rows "
            "of different lengths and loop counts in one batch."
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Check what `generate` was asked for, and make its cache."""
        given = [model_kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        cache = next((value for value in given if value is not None), None)
        policy = model_kwargs.pop("cache_policy", None)
        check_guidance(generation_config, generation_mode)
        self._check_context(generation_config, model_kwargs.get("attention_mask"))
        is_used = generation_config.use_cache is not False
        check_given(cache, policy=policy, is_used=is_used)
        if cache is None and is_used:
            capacity = self._capacity(generation_config)
            cache = DepthdialCache(self.model.config, capacity=capacity, policy=policy)
        if cache is None:
            return
        if generation_mode == GenerationMode.ASSISTED_GENERATION and not cache.is_croppable:
            able = [name for name, rule in POLICIES.items() if rule.can_roll_back]
            raise ValueError(
                f"assisted generation takes tokens back, which cache policy '{cache.policy}' "
                f"cannot do without a trace; use one of {', '.join(able)}."
            )
        model_kwargs[CACHE_FIELD] = cache

    def _capacity(self, generation_config: GenerationConfig) -> int:
        """Most tokens that one `generate` stores per row."""
        if generation_config.is_assistant:
            # It is called again and again with the cache of its first, short call.
            return self.model.config.max_context
        return generation_config.max_length

    def _check_context(
        self, generation_config: GenerationConfig, attention_mask: Tensor | None
    ) -> None:
        padding = 0
        if attention_mask is not None:
            padding = attention_mask.shape[1] - int((attention_mask != 0).sum(dim=1).max())
        longest, context = generation_config.max_length - padding, self.model.config.max_context
        if longest > context:
            raise ValueError(
                f"prompt and new tokens are up to {longest} tokens; the model's context is "
                f"{context}. Shorten the prompt, or ask for fewer (max_new_tokens)."
            )

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers', after the prompt and after every later call, before a token is drawn.

        Raises: ValueError for scores that are no finite numbers.
        """
        check_finite_logits(outputs.logits)
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get(CACHE_FIELD)
        if cache is not None:
            cache.end_prompt()
        return model_kwargs

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As transformers', but strict, and with the number formats of the file where it has
        several and `dtype` asks for none.

        Raises: ValueError if a tensor is missing, unknown, or of another shape: transformers by
            itself would draw new values for it and go on; or for a change of the config that makes
            another function of these weights.
        """
        formats = mixed_formats(pretrained_model_name_or_path, kwargs)
        if formats:
            kwargs = {**kwargs, "dtype": widest(formats)}
        # A file of format_version 1 has one other name.
        kwargs.setdefault("key_mapping", {f"^{OLD_LOOP_LORA}": "loop_lora"})
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        problems = [
            f"{kind.removesuffix('_keys')}: {', '.join(sorted(map(str, info[kind]))[:5])}"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info[kind]
        ]
        if problems:
            raise ValueError(
                f"{pretrained_model_name_or_path}: tensors do not fit the config; "
                f"{'; '.join(problems)}. Config and weights must come from the same model."
            )
        stored = stored_config(pretrained_model_name_or_path, kwargs)
        if stored is not None:
            check_same_function(model.config.looped, stored, pretrained_model_name_or_path)
        if formats:
            bring_to(model.model, formats)
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """As transformers', under our parameter names: `depthdial.load` reads the directory.

        Warns where the generation config holds a depth setting, which `depthdial.load` does not
        read. The weights are one file, which `depthdial.load` needs, unless `max_shard_size`
        asks for several.
        """
        prepare_saving(self.generation_config, save_directory)
        tensors = self.state_dict() if state_dict is None else state_dict
        super().save_pretrained(
            save_directory,
            *args,
            state_dict={name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()},
            **{"max_shard_size": ONE_FILE, **kwargs, "save_original_format": False},
        )

    def get_input_embeddings(self) -> nn.Module:
        """Embedding [V, D]."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding; with a tied head the head too."""
        if self.model.lm_head is None and not isinstance(value, TokenEmbedding):
            own = TokenEmbedding(value.num_embeddings, value.embedding_dim, device="meta")
            own.weight = value.weight
            value = own
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """Module with the head's weight [V, D]: the embedding where the head is tied, and a product
        of weight and scale where each token's score is scaled."""
        head = self.model.embedding if self.model.lm_head is None else self.model.lm_head
        scale, ngpt = self.model.logit_scale, self.model.config.ngpt
        return head if scale is None or ngpt is None else ScaledHead(head, scale / ngpt.scale_std)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head.

        Raises: ValueError if it is tied to the embedding.
        """
        if self.model.lm_head is None:
            raise ValueError("the head of this model is its embedding; replace that.")
        self.model.lm_head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Raises: ValueError for any size but the present one."""
        size = self.config.vocab_size
        if new_num_tokens is None or new_num_tokens == size:
            return self.model.embedding
        raise ValueError(
            f"this model has {size} token ids and cannot be resized to {new_num_tokens}. Build a "
            "ModelConfig with that vocab_size and copy the weights."
        )


def _with_prefix(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *unused: object
) -> None:
    """Let `load_state_dict` take the names of a file: trainers resume by it, and not strictly."""
    for name in [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]:
        if not name.startswith(PREFIX):
            state_dict[prefix + PREFIX + name] = state_dict.pop(prefix + name)
