"""What a GenerationConfig may say to a looped model, guidance at its depth, drafts in its context.

`DepthdialForCausalLM` (`hf/model.py`) calls these from the hooks of transformers' `generate`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    CandidateGenerator,
    GenerationMode,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from depthdial.config import CachePolicy, ModelConfig, nearest_name
from depthdial.hf.cache import CACHE_FIELD
from depthdial.model.call import check_finite_logits

Model = Callable[..., CausalLMOutputWithPast]
"""`DepthdialForCausalLM`, called as transformers does."""

DEPTH_SETTINGS = ("num_loops", "step_sizes", "cache_policy")
"""Arguments of a call that a GenerationConfig may carry as well."""
DEPTH_NAMES = re.compile("loop|depth|recur|exit|ponder|num_steps|ut_steps")
"""In the names by which this project and published looped models set the depth."""
REFUSED = {
    "assistant_early_exit": "it counts layers. A looped model drafts with fewer loops: pass "
    "assistant_model, the same folder opened with num_loops=1",
    "dola_layers": "it counts layers, and the states of a looped model are those of its loops",
    "cache_implementation": "the kinds of cache of a looped model are named by cache_policy",
    "cache_config": "the kinds of cache of a looped model are named by cache_policy",
    "remove_invalid_values": "scores that are no finite numbers are an error; tokens drawn from "
    "others in their place mean nothing",
    "max_cache_len": "pass a DepthdialCache(model.config.looped, capacity=...) instead",
}
"""Settings of transformers that have no effect on a looped model, and what to do instead."""


def take_depth_settings(
    merged: GenerationConfig, own: GenerationConfig, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of `generate` with the depth settings of its generation config.

    Args:
        merged: config of this call; loses its depth settings, so that an assistant, which is
            given the same config, keeps its own.
        own: the model's. Keys that only its publisher understands stay in it, as in transformers.
        arguments: for `forward`; they win over the config.
    Raises: ValueError for a setting that would have no effect.
    """
    for name, reason in REFUSED.items():
        # A version that lacks the setting refuses it by itself; some fill in False.
        if vars(merged).get(name) not in (None, False):
            raise ValueError(f"{name}={vars(merged)[name]!r} has no effect: {reason}.")
    known = vars(GenerationConfig())
    extra = [key for key in vars(merged) if key not in known and not key.startswith("_")]
    for key in extra:
        if key in DEPTH_SETTINGS:
            value = vars(merged).pop(key)
            if arguments.get(key) is None:
                arguments = {**arguments, key: value}
        elif key not in vars(own) or key in ModelConfig.model_fields or DEPTH_NAMES.search(key):
            raise ValueError(
                f"the generation config has {key}={vars(merged)[key]!r}, which nothing reads."
                f"{nearest_name(key, [*DEPTH_SETTINGS, *known])} Of the depth it may set "
                f"{', '.join(DEPTH_SETTINGS)}; leave the rest out."
            )
    return arguments


def prepare_saving(config: GenerationConfig, folder: object) -> None:
    """Let transformers read the depth settings of a saved config again, and say who does not."""
    found = [name for name in DEPTH_SETTINGS if vars(config).get(name) is not None]
    if found:
        # transformers skips keys that it does not know in a file with this mark.
        config._from_model_config = False
        warnings.warn(
            f"only transformers reads {', '.join(found)} of {folder}/generation_config.json; "
            "depthdial.load reads config.json. Set model.config.num_loops for both, and pass the "
            "others to each call.",
            stacklevel=3,
        )


class SecondBranch:
    """The model at the depth of a call, as guidance asks it for the scores of the other prompt.

    transformers calls the model for them with token ids, mask and a cache alone: they came at the
    loop count of the config.

    Args:
        depth: num_loops and step_sizes of the call.
        cache_policy: of the call's cache; None for a call without one.
    """

    def __init__(
        self, model: Model, depth: Mapping[str, Any], *, cache_policy: CachePolicy | None
    ) -> None:
        self.model = model
        self.depth = dict(depth)
        self.cache_policy = cache_policy

    def __call__(self, input_ids: Tensor, **arguments: Any) -> CausalLMOutputWithPast:
        """Scores behind the other prompt, whose cache is made by the first call."""
        policy = self.cache_policy
        if not arguments.get("use_cache") or arguments.get(CACHE_FIELD) is not None:
            policy = None
        output = self.model(
            input_ids, cache_policy=policy, logits_to_keep=1, **self.depth, **arguments
        )
        cache = output.get(CACHE_FIELD)
        if cache is not None:
            cache.end_prompt()
        check_finite_logits(output.logits)
        return output


def guide_at_depth(
    processors: LogitsProcessorList, model: Model, arguments: Mapping[str, Any]
) -> None:
    """Give guidance the depth of the call, `arguments` of the model."""
    depth = {name: arguments.get(name) for name in ("num_loops", "step_sizes")}
    cache = arguments.get(CACHE_FIELD)
    for processor in processors:
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            given = processor.model
            # A processor that its user made for this model may have served an earlier call.
            if given is model or (isinstance(given, SecondBranch) and given.model is model):
                policy = None if cache is None else cache.policy
                processor.model = SecondBranch(model, depth, cache_policy=policy)


def check_guidance(config: GenerationConfig, mode: GenerationMode) -> None:
    """Raises: ValueError where guidance would follow another text than the one that is written."""
    if config.guidance_scale in (None, 1) or mode in (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
    ):
        return
    raise ValueError(
        f"guidance_scale={config.guidance_scale} with {mode.value.replace('_', ' ')}: the second "
        "branch of transformers neither follows beams nor takes drafts back. Use it with greedy "
        "decoding or sampling."
    )


class BoundedCandidates(CandidateGenerator):
    """Draft tokens of another generator, cut where the model itself has to stop.

    Prompt lookup copies as many tokens as it is told to, also beyond the last position: there a
    cache is full, and a model with learned positions has no vector.

    Args: max_length: most columns of prompt and new tokens.
    """

    def __init__(self, source: CandidateGenerator, *, max_length: int) -> None:
        self.source = source
        self.max_length = max_length

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Prompt, tokens so far and drafts [1, columns], and the logits of the drafts if known."""
        candidates, logits = self.source.get_candidates(input_ids, **kwargs)
        # The model adds one token of its own behind the drafts.
        num_columns = max(self.max_length - 1, input_ids.shape[1])
        if logits is not None:
            logits = logits[:, : num_columns - input_ids.shape[1]]
        return candidates[:, :num_columns], logits

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Tell the other generator how many drafts were right."""
        self.source.update_candidate_strategy(input_ids, scores, num_matches)
