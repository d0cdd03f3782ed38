"""Our config.json as a transformers config.

`DepthdialConfig` wraps one `ModelConfig` and writes exactly its keys: transformers' own fields
(dtype, transformers_version) are read where a file has them and never written, so that the same
directory stays readable by `depthdial.load`. The model is in `hf/model.py`.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any, Self

from transformers import PreTrainedConfig

from depthdial.config import ModelConfig, nearest_name
from depthdial.config.model import from_version_1

FRAMEWORK_KEYS = {
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
}
"""What transformers hands to a config beside its declared fields."""


SETTINGS_OF_USE = (
    "num_loops",
    "max_context",
    "rope_scaling",
    "loop.cache_policy",
    "loop.beyond_max_loops",
)
"""Keys that may differ from those stored with the weights: they say how a model is used."""


class DepthdialConfig(PreTrainedConfig):
    """Config of a looped language model.

    Fields:
        looped: the model's own config; `DepthdialConfig(**values)` takes its keys.

    Only `num_loops`, the loop count where a call names none, can be set on an existing config; it
    is what `save_pretrained` then writes. The properties below are transformers' names for fields
    of `looped`.
    """

    model_type = "depthdial"
    # transformers below 5.2x builds a config without arguments otherwise.
    has_no_defaults_at_init = True

    def __post_init__(self, **values: Any) -> None:
        """Raises: ValueError for a key that neither `ModelConfig` nor transformers knows."""
        values = from_version_1(values)
        ours = {key: value for key, value in values.items() if key in ModelConfig.model_fields}
        framework = {key: value for key, value in values.items() if key in FRAMEWORK_KEYS}
        for key in values:
            if key not in ours and key not in framework:
                known = list(ModelConfig.model_fields)
                raise ValueError(f"unknown key '{key}'.{nearest_name(key, known)}")
        self.looped = ModelConfig.from_dict(ours)
        super().__post_init__(**framework)
        # Trainers read it of every model that is not transformers' own.
        self.auto_map = framework.get("auto_map") or {}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """As transformers', with changes of our fields: `num_loops=4`, `loop={"update": ...}`.

        Weights are opened only under changes of SETTINGS_OF_USE. A group is changed key by key.
        Returns and Raises: as transformers' and the constructor.
        """
        changes = {key: kwargs.pop(key) for key in list(kwargs) if key in ModelConfig.model_fields}
        return super().from_dict(_merged(config_dict, changes), **kwargs)

    @property
    def num_loops(self) -> int:
        """Loops of a call that names none."""
        return self.looped.num_loops

    @num_loops.setter
    def num_loops(self, value: int) -> None:
        self.looped = self.looped.replace(num_loops=value)

    @property
    def max_loops(self) -> int:
        """Largest loop count that the model is made for."""
        return self.looped.max_loops

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.looped.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.looped.d_model

    @property
    def intermediate_size(self) -> int | None:
        """Hidden width of the feed-forward MLP."""
        return self.looped.d_ff

    @property
    def num_hidden_layers(self) -> int:
        """Sublayers with weights of their own; those of the core run once per loop."""
        return sum(self.looped.split)

    @property
    def num_attention_heads(self) -> int | None:
        """Query heads; None without attention."""
        return self.looped.num_heads

    @property
    def num_key_value_heads(self) -> int | None:
        """Key and value heads."""
        return self.looped.num_kv_heads

    @property
    def head_dim(self) -> int | None:
        """Channels per head."""
        return self.looped.head_dim

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence the model is meant for, in tokens."""
        return self.looped.max_context

    @property
    def final_logit_softcapping(self) -> float | None:
        """Bound c of c tanh(logit / c); trainers that compute logits themselves read it."""
        return self.looped.logit_soft_cap

    @property
    def tie_word_embeddings(self) -> bool:
        """The head is the embedding matrix, which is stored once."""
        return self.looped.tie_embeddings

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """As transformers'.

        Warns where the folder that was opened brought code of its own, which the installed package
        did not run: the copy opens with the package only.
        """
        if self._auto_class is None and self.auto_map:
            warnings.warn(
                f"{save_directory} gets neither the code nor the auto_map of the folder that was "
                "opened, because the installed depthdial opened it. It opens after `import "
                "depthdial.hf`; `depthdial export DIR --as hf` writes one that needs no package.",
                stacklevel=2,
            )
        super().save_pretrained(save_directory, *args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json; with them `auto_map` where the code travels with the model."""
        values = self.looped.to_dict()
        if self._auto_class is not None and self.auto_map:
            values["auto_map"] = dict(self.auto_map)
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: our files state every key."""
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        """Text of config.json, keys in the order of their declaration."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def check_same_function(given: ModelConfig, stored: ModelConfig, source: object) -> None:
    """Weights are opened as the model that they were stored as.

    Args: source: where `stored` and the weights come from.
    Raises: ValueError naming the first key that differs, with both values.
    """
    wanted, found = _dotted(given.to_dict()), _dotted(stored.to_dict())
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) == found.get(key) or key.startswith(SETTINGS_OF_USE):
            continue
        more = ""
        if key in ("max_loops", "trained_loops"):
            more = ' More loops than were trained: loop={"beyond_max_loops": "extrapolate"}.'
        raise ValueError(
            f"{key}={wanted.get(key)!r}, but {source} was stored with {found.get(key)!r}: the same "
            f"weights would be another model. Leave it out.{more} Only {', '.join(SETTINGS_OF_USE)}"
            " may differ; for another model from these weights see `depthdial convert`."
        )


def _dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all groups by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        found |= _dotted(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with changed keys; a group keeps its other keys."""
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        is_group = isinstance(old, dict) and isinstance(change, dict)
        merged[key] = _merged(old, change) if is_group else change
    return merged
