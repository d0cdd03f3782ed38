"""Random bits of one place in a run: a pure function of (seed, stream, step, draw).

No generator lives from one call to the next, so any process can compute any draw and a resumed
run repeats them.
"""

from __future__ import annotations

import numpy as np

# High key words of the counter-based generator: keep the kinds of draws apart from each other
# and from anything else that takes the same seed.
DEPTH_STREAM = 0xDE97
PATH_STREAM = 0x9A78
RANDOM_BITS = 64


def random_bits(seed: int, *, stream: int, step: int, draw_idx: int, count: int) -> list[int]:
    """`count` independent integers of 64 random bits.

    Raw bits, because numpy promises a fixed stream for a bit generator but not for the
    distributions drawn from it. The lowest 64 bits of the counter are the generator's own.
    """
    key = seed | stream << 64
    counter = draw_idx << 64 | step << 128
    return [int(bits) for bits in np.random.Philox(key=key, counter=counter).random_raw(count)]


def open_uniform(bits: int) -> float:
    """A number in (0, 1), both ends excluded, from 64 bits."""
    # 52 bits and the half are exact in a double; with 53 the largest value would round to 1.
    return ((bits >> 12) + 0.5) * 2.0**-52
