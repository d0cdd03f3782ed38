"""What the project knows about one published family, as data and four functions.

The families themselves are in `families/`, their list in `hf_maps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from depthdial.config import ModelConfig
from depthdial.convert.source_config import SourceConfig
from depthdial.convert.tensor_rules import TensorRule


@dataclass(frozen=True)
class Family:
    """Two-way translation between a published format and ours."""

    name: str
    """Name on the command line."""
    summary: str
    """One sentence for people: what the family is and what it is published as."""
    matches: Callable[[dict[str, Any]], bool]
    """Whether a config.json is of this family."""
    read: Callable[[SourceConfig], ModelConfig]
    """Source config -> ours. ValueError names what this runtime cannot do."""
    rules: Callable[[ModelConfig, dict[str, Any]], list[TensorRule]]
    """Tensors of a model of ours and of the source config that it came from or goes to."""
    write: Callable[[ModelConfig, dict[str, Any] | None], dict[str, Any]]
    """Ours -> source config. Keys of the origin's config that still hold are kept as they are.
    ValueError where the family has no way to say what the model is."""
    limits: Callable[[ModelConfig], list[str]]
    """What this runtime does differently from the published one, in sentences for people."""
