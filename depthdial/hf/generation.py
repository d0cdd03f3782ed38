"""What a GenerationConfig may say to a looped model, and drafts that stay within the context.

`DepthdialForCausalLM` (`hf/model.py`) calls these from the hooks of transformers' `generate`.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import CandidateGenerator

from depthdial.config import ModelConfig, nearest_name

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
        # A version that lacks the setting refuses it by itself.
        if vars(merged).get(name) is not None:
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
