"""How a loop count rises from 1 to its full value over the first steps of mixed depth.

Exact integers throughout: a float that is a little too large would start a level one step early.
"""

from __future__ import annotations

from math import isqrt
from typing import Literal

Curriculum = Literal["none", "linear", "one_minus_sqrt"]


def risen_loops(curriculum: Curriculum, full_loops: int, *, step: int, num_steps: int) -> int:
    """Loop count after `step` of the rise's `num_steps` steps.

        r(t) = max(1, ceil(r_max f(t / T))),  f(u) = u  or  1 - sqrt(1 - u)

    Args:
        full_loops: r_max, reached at step T = `num_steps` and kept from there on.
        step: 0-based step since the rise began.

    Source: arXiv 2511.07384; it calls the second form "1-sqrt", which starts slowly.
    """
    if curriculum == "none" or step >= num_steps:
        return full_loops
    if curriculum == "linear":
        return max(1, -(-full_loops * step // num_steps))
    # ceil(r - r sqrt(q)) = r - floor(sqrt(r^2 q)), and the square root of a fraction rounds
    # down to that of its floor.
    left = full_loops**2 * (num_steps - step) // num_steps
    return max(1, full_loops - isqrt(left))
