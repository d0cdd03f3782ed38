"""The published families: which there are, and which one a config.json belongs to.

One file per family in `families/`; folders and files are read by `import_export.py`.
"""

from __future__ import annotations

from typing import Any

from depthdial.config import ModelConfig, nearest_name
from depthdial.formats.families.dense import LLAMA, QWEN3
from depthdial.formats.families.dory import DORY
from depthdial.formats.families.family import Family
from depthdial.formats.families.huginn import HUGINN
from depthdial.formats.families.iquest_loop import IQUEST_LOOP
from depthdial.formats.families.loopformer import LOOPFORMER
from depthdial.formats.families.loopus import LOOPUS
from depthdial.formats.families.nanbeige import NANBEIGE
from depthdial.formats.families.ouro import OURO
from depthdial.formats.families.parcae import PARCAE
from depthdial.formats.families.retrofit import RETROFIT
from depthdial.formats.source_config import SourceConfig
from depthdial.formats.tensors.rules import (
    Buffer,
    Copy,
    Get,
    Regroup,
    Rename,
    Reshape,
    Split,
    TensorRule,
    rules_to_export,
    select_rules,
)

__all__ = [
    "FAMILIES",
    "Buffer",
    "Copy",
    "Family",
    "Get",
    "Regroup",
    "Rename",
    "Reshape",
    "SourceConfig",
    "Split",
    "TensorRule",
    "detect",
    "family_named",
    "map_config",
    "rules_to_export",
    "select_rules",
]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN3,
    OURO,
    HUGINN,
    DORY,
    NANBEIGE,
    IQUEST_LOOP,
    PARCAE,
    LOOPFORMER,
    LOOPUS,
    RETROFIT,
)
"""Every family that import and export know."""


def family_named(name: str) -> Family:
    """The family of that name. Raises: ValueError with the nearest known one."""
    for family in FAMILIES:
        if family.name == name:
            return family
    known = [family.name for family in FAMILIES]
    raise ValueError(f"unknown family '{name}'.{nearest_name(name, known)}")


def detect(values: dict[str, Any]) -> Family:
    """The family that a published config.json belongs to.

    Raises: ValueError with what the config says of itself, and the known families.
    """
    for family in FAMILIES:
        if family.matches(values):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ValueError(
        f"no known family has model_type={values.get('model_type')!r} and architectures="
        f"{values.get('architectures')!r}. Known: {known}."
    )


def map_config(values: dict[str, Any]) -> tuple[Family, ModelConfig]:
    """Family and config of ours of a published config.json.

    Raises: ValueError for an unknown family, a value that this runtime cannot do, and for keys
        that nobody read, each by name.
    """
    family = detect(values)
    source = SourceConfig(values)
    config = family.read(source)
    source.check_all_read()
    return family, config
