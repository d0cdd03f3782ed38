"""Largest values that a config may name, compared before anything is built from them.

A small file can ask for any number of layers, loops or tokens. Each limit is far beyond any
published model; sizes that a tensor has are compared with the tensors as well.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_LOOPS = 1024
"""Loop counts, of a config as of a request; published models are trained up to about 100."""
MAX_SUBLAYERS = 20_000
"""Physical sublayers of a model, and entries of a list with one for each."""
MAX_CONTEXT = 2**24
"""Tokens of a context or a window."""
MAX_SIZE = 2**31 - 1
"""Any other whole number: widths, heads, vocabularies, rows, steps."""
MAX_SLICES = 2**16
"""Depth slices of a global batch."""
MAX_CONFIG_BYTES = 4 * 2**20
"""A config.json; published ones have under 100 kB."""
MAX_YAML_BYTES = 2**18
"""A YAML file, whose reader takes seconds for each 100 kB; recipes have under 5 kB."""
MAX_YAML_VALUES = 100_000
"""Values of a YAML file after its aliases are written out: nine lines can name billions."""
MAX_NESTING = 32
"""Levels of groups inside groups."""
MAX_SHOWN = 500
"""Characters of one problem in a message, where a value of any length is repeated."""

PositiveInt = Annotated[int, Field(ge=1, le=MAX_SIZE)]
LoopCount = Annotated[int, Field(ge=1, le=MAX_LOOPS)]
Sublayers = Annotated[int, Field(ge=0, le=MAX_SUBLAYERS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_CONTEXT)]


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """The text, or its beginning and its end, where a message says what to do."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
