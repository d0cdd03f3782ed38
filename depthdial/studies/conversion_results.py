"""What the arms of the conversion study scored, compared over documents and seeds.

Arms and training are in `conversion_arms.py`; the words of the report are in `conversion_words.py`.
Letters: S seeds, K loop counts, N documents, P dependency depths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from depthdial.eval.depth_sweep import DepthSweep
from depthdial.eval.stats import BOOTSTRAP_SEED, Interval, paired_bootstrap

Scores = Mapping[str, DepthSweep]
"""Arm -> its sweep, of one seed."""


@dataclass(frozen=True)
class Difference:
    """Loss of one side minus that of another on the same documents, nats per token.

    Fields: interval: over documents, their losses averaged over seeds; by_seed: of each seed.
    """

    interval: Interval
    by_seed: tuple[float, ...]

    @property
    def is_resolved(self) -> bool:
        """Whether the interval excludes zero and every seed has the same sign."""
        same_sign = all(x > 0 for x in self.by_seed) or all(x < 0 for x in self.by_seed)
        return self.interval.excludes_zero and same_sign


def mean_loss(
    seeds: Sequence[Scores], side: str, num_loops: int, *, prefixes: Sequence[str] = ("",)
) -> float:
    """Mean over seeds of the loss on the documents whose names have one of the prefixes."""
    losses = []
    for scores in seeds:
        sweep = scores[side]
        chosen = _chosen(sweep, prefixes)
        losses.append(sweep.nll(num_loops)[chosen].sum() / sweep.tokens_N[chosen].sum())
    return float(np.mean(losses))


def difference(
    seeds: Sequence[Scores],
    left: tuple[str, int],
    right: tuple[str, int],
    *,
    prefixes: Sequence[str] = ("",),
) -> Difference:
    """Loss of (side, loop count) `left` minus `right` on documents with one of the prefixes."""
    sums: list[tuple[np.ndarray, np.ndarray]] = []
    for scores in seeds:
        first, second = scores[left[0]], scores[right[0]]
        first.check_paired(second)
        chosen = _chosen(first, prefixes)
        tokens_N = first.tokens_N[chosen]
        sums.append((first.nll(left[1])[chosen], second.nll(right[1])[chosen]))
    return _difference(sums, tokens_N)


def accuracies(seeds: Sequence[Scores], arm: str, num_loops: int) -> list[float]:
    """Share of right answers at each dependency depth, all seeds together."""
    correct, total = [], []
    for scores in seeds:
        sweep = scores[arm]
        assert sweep.correct_KNP is not None and sweep.total_NP is not None
        correct.append(sweep.correct_KNP[sweep.loops.index(num_loops)].sum(axis=0))
        total.append(sweep.total_NP.sum(axis=0))
    return (np.sum(correct, axis=0) / np.sum(total, axis=0)).tolist()


def accuracy_difference(
    seeds: Sequence[Scores],
    left: tuple[str, int],
    right: tuple[str, int],
    *,
    min_depth: int,
) -> Difference:
    """Share of right answers of `left` minus `right` at dependency depths of `min_depth` up."""
    sums: list[tuple[np.ndarray, np.ndarray]] = []
    for scores in seeds:
        first_N, total_N = _right(scores[left[0]], left[1], min_depth)
        second_N, _ = _right(scores[right[0]], right[1], min_depth)
        sums.append((first_N, second_N))
    return _difference(sums, total_N)


def _chosen(sweep: DepthSweep, prefixes: Sequence[str]) -> np.ndarray:
    """Which documents have a name with one of the prefixes, bool [N]."""
    return np.array([name.startswith(tuple(prefixes)) for name in sweep.names])


def _difference(sums: list[tuple[np.ndarray, np.ndarray]], weights_N: np.ndarray) -> Difference:
    """Interval of the seeds' mean, and each seed's value; sums [N] of both sides per seed."""
    interval = paired_bootstrap(
        np.mean([first for first, _ in sums], axis=0),
        np.mean([second for _, second in sums], axis=0),
        weights_N,
        seed=BOOTSTRAP_SEED,
    )
    by_seed = tuple(float((a - b).sum() / weights_N.sum()) for a, b in sums)
    return Difference(interval, by_seed)


def _right(sweep: DepthSweep, num_loops: int, min_depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Right answers and questions of each document at depths of `min_depth` up, [N]."""
    assert sweep.correct_KNP is not None and sweep.total_NP is not None
    correct_NP = sweep.correct_KNP[sweep.loops.index(num_loops)]
    kept = slice(min_depth - 1, None)
    return correct_NP[:, kept].sum(axis=1), sweep.total_NP[:, kept].sum(axis=1)
