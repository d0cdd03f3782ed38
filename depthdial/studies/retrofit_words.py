"""The retrofit study as JSON and Markdown: what gained, what did not, with intervals.

Comparisons are made in `retrofit_results.py`. Nothing here is written by hand: every number, and
every verdict, follows from the scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthdial.data.pointer_chains import DIGITS
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.studies.retrofit_arms import CONTROL, CORE, EQUAL_TIME, LOOPED, LOOPS, RANK
from depthdial.studies.retrofit_data import TRAINED_CORPORA, UNSEEN_CORPUS
from depthdial.studies.retrofit_results import (
    Difference,
    Scores,
    accuracies,
    accuracy_difference,
    difference,
    mean_loss,
)
from depthdial.studies.retrofit_study import LONG_CHAINS

Jobs = Sequence[Mapping[str, Any]]
TITLES = {
    "base": "base, looped as it is",
    "untaught": "checkpoint before any training",
    **{arm.name: arm.title for arm in (CONTROL, EQUAL_TIME, *LOOPED)},
}
JUDGED = 2
"""Loop count at which arms are judged on text, fixed before the runs."""
DEEP = 5
"""Look-ups from which a chain is called deep."""


def write_results(
    results: Mapping[str, Jobs], *, seeds: Sequence[int], base: str, folder: Path
) -> None:
    """retrofit.json with every seed's scores, and retrofit.md. base: the checkpoint in words."""
    parts = []
    if "text" in results:
        parts.append(text_part(results["text"]))
    if "chains" in results:
        parts.append(chain_part(results["chains"]))
    text = "\n\n".join([_opening(seeds, base), *parts]) + "\n"
    (folder / "retrofit.md").write_text(text, encoding="utf-8")
    values = {"seeds": list(seeds), **{name: list(jobs) for name, jobs in results.items()}}
    (folder / "retrofit.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


def _opening(seeds: Sequence[int], base: str) -> str:
    first, last = CORE.split(":")
    return (
        "# What loops gain in a retrofitted checkpoint\n\n"
        f"{base}; layers {first} to {int(last) - 1} loop. Written by "
        "`benchmarks/retrofit.py`; per-seed scores are in retrofit.json.\n\n"
        "The checkpoint's own weights are frozen in every arm. Trained are low-rank differences "
        f"(rank {RANK}) and copies of the norms of the looped layers, or a gate and modulation of "
        f"equal rank. Seeds {', '.join(map(str, seeds))} change data order, depth draws and new "
        "parameters. Brackets are 95 % intervals over documents, whose losses are averaged over "
        "seeds; braces hold the value of each seed. A difference is called resolved if its "
        "interval excludes zero and all seeds agree in sign. No correction is made for the number "
        "of comparisons, and learning rates were not tuned per arm."
    )


def text_part(jobs: Jobs) -> str:
    """Loss on text by arm and loop count, and the comparisons that matter."""
    seeds = _scores(jobs)
    groups = {
        "trained domains": TRAINED_CORPORA,
        f"untrained corpus ({UNSEEN_CORPUS})": (UNSEEN_CORPUS,),
    }
    lines = ["## Text", "", _budget(jobs), "", "### What it says", ""]
    lines += [f"- {sentence}" for sentence in text_findings(seeds)]
    for title, corpora in groups.items():
        lines += ["", f"### Loss on {title}, nats per token", ""]
        lines += _table(
            ["arm", *(f"k={k}" for k in LOOPS)],
            [[TITLES[side], *_losses(seeds, side, corpora)] for side in jobs[0]["sides"]],
        )
        lines += ["", f"Differences on {title}:", ""]
        lines += _differences(seeds, corpora)
    return "\n".join(lines)


def text_findings(seeds: Sequence[Scores]) -> list[str]:
    """Sentences about text, the unfavourable ones first."""
    trained, unseen = TRAINED_CORPORA, (UNSEEN_CORPUS,)
    found = []
    for arm in LOOPED:
        for control in (CONTROL, EQUAL_TIME):
            gain = difference(seeds, (arm.name, JUDGED), (control.name, 1), prefixes=trained)
            found.append(
                f"{arm.title} at k={JUDGED}: {_verdict(gain)} the non-looped "
                f"{_kind(control.name)} on trained domains ({_shown(gain)})."
            )
    for arm in LOOPED:
        for title, corpora in (("trained domains", trained), ("the untrained corpus", unseen)):
            means = [_mean(seeds, arm.name, k, corpora) for k in LOOPS]
            naive = [
                _mean(seeds, "base", k, corpora) - _mean(seeds, "base", 1, corpora) for k in LOOPS
            ]
            found.append(
                f"{arm.title}: k=1 to 4 lie within {max(means) - min(means):.3f} nats on {title}; "
                f"looping the untouched base costs {naive[1]:.2f}, {naive[2]:.2f} and "
                f"{naive[3]:.2f} at k=2, 3, 4."
            )
    same = all((scores["graft"].nll(1) == scores["base"].nll(1)).all() for scores in seeds)
    state = "is the base's on every document, bit for bit" if same else "DIFFERS from the base's"
    found.append(f"{LOOPED[0].title}: the loss at k=1 {state}.")
    return found


def chain_part(jobs: Jobs) -> str:
    """Loss and exact answers on pointer chains."""
    seeds = _scores(jobs)
    length = LONG_CHAINS["chain_length"]
    lines = [
        f"## Shuffled pointer chains ({LONG_CHAINS['num_chains']} of {length} letters)",
        "",
        "Every arm starts from the checkpoint taught on shorter chains with one loop. A guess "
        f"between the digits of a row scores {_guessed():.2f}. " + _budget(jobs),
        "",
        "### What it says",
        "",
        *(f"- {sentence}" for sentence in chain_findings(seeds)),
        "",
        "### Loss per answer, nats, and exact answers by look-ups",
        "",
    ]
    rows = []
    for side in jobs[0]["sides"]:
        loops = (1,) if side in (CONTROL.name, EQUAL_TIME.name) else LOOPS
        for k in loops:
            answers = [f"{share:.2f}" for share in accuracies(seeds, side, k)]
            rows.append([TITLES[side], str(k), f"{_mean(seeds, side, k, ('',)):.3f}", *answers])
    lines += _table(["arm", "k", "loss", *(f"d{d}" for d in range(1, length + 1))], rows)
    lines += ["", "Differences in loss:", ""]
    lines += _differences(seeds, ("",))
    return "\n".join(lines)


def _guessed() -> float:
    """Right answers of who names the digit of any chain; chains may end at equal digits."""
    right_chain = 1 / LONG_CHAINS["num_chains"]
    return right_chain + (1 - right_chain) / len(DIGITS)


def chain_findings(seeds: Sequence[Scores]) -> list[str]:
    """Sentences about chains, the comparison with equal time first."""
    found = []
    for arm in LOOPED:
        for control in (EQUAL_TIME, CONTROL):
            tax = difference(seeds, (arm.name, 1), (control.name, 1))
            found.append(
                f"{arm.title} at k=1: {_verdict(tax)} the {_kind(control.name)} in loss "
                f"({_shown(tax)})."
            )
            for k in (2, 4):
                gain = accuracy_difference(seeds, (arm.name, k), (control.name, 1), min_depth=DEEP)
                found.append(
                    f"{arm.title} at k={k}: {_verdict(gain)} the {_kind(control.name)} in exact "
                    f"answers of {DEEP} and more look-ups ({_shown(gain)})."
                )
    for arm in LOOPED:
        own = accuracy_difference(seeds, (arm.name, 4), (arm.name, 1), min_depth=2)
        found.append(
            f"{arm.title}: k=4 is {_verdict(own)} its own k=1 in exact answers of 2 and more "
            f"look-ups ({_shown(own)})."
        )
    naive = accuracy_difference(seeds, ("base", 2), ("base", 1), min_depth=2)
    found.append(
        f"Looping the taught model without training: k=2 is {_verdict(naive)} k=1 in exact "
        f"answers of 2 and more look-ups ({_shown(naive)}), so what the arms gain is learned."
        if not naive.interval.low > 0
        else f"Looping the taught model without training gains too ({_shown(naive)})."
    )
    return found


def _scores(jobs: Jobs) -> list[dict[str, DepthSweep]]:
    return [
        {side: DepthSweep.from_dict(values["sweep"]) for side, values in job["sides"].items()}
        for job in jobs
    ]


def _budget(jobs: Jobs) -> str:
    """Steps, tokens and cost of a step, of every arm."""
    sides, seconds = jobs[0]["sides"], jobs[0]["step_seconds"]
    steps = sorted({job["sides"][EQUAL_TIME.name]["steps"] for job in jobs})
    looped = ", ".join(
        f"{seconds[arm.name] / seconds[CONTROL.name]:.2f} ({arm.name})" for arm in LOOPED
    )
    return (
        f"Training: {sides[CONTROL.name]['steps']} steps, {sides[CONTROL.name]['tokens']:,} input "
        f"tokens; a step of a looped arm costs {looped} times that of the control, in processor "
        f"time of one thread (fastest of two interleaved rounds, seed of the first job). The "
        f"equal-time control runs {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} "
        "steps."
    )


def _differences(seeds: Sequence[Scores], prefixes: Sequence[str]) -> list[str]:
    """Rows of every looped arm and loop count against its own k=1 and both controls."""
    rows = []
    for arm in LOOPED:
        for k in LOOPS:
            cells = [TITLES[arm.name], str(k)]
            for other in ((arm.name, 1), (CONTROL.name, 1), (EQUAL_TIME.name, 1), ("base", 1)):
                if other == (arm.name, k):
                    cells.append("")
                    continue
                cells.append(_shown(difference(seeds, (arm.name, k), other, prefixes=prefixes)))
            rows.append(cells)
    heads = ["arm", "k", "minus own k=1", "minus control", "minus equal time", "minus base"]
    return _table(heads, rows)


def _losses(seeds: Sequence[Scores], side: str, prefixes: Sequence[str]) -> list[str]:
    """One loss per loop count; of a control only the one that it trained."""
    trained = (1,) if side in (CONTROL.name, EQUAL_TIME.name) else LOOPS
    return [f"{_mean(seeds, side, k, prefixes):.4f}" if k in trained else "" for k in LOOPS]


def _mean(seeds: Sequence[Scores], side: str, num_loops: int, prefixes: Sequence[str]) -> float:
    return mean_loss(seeds, side, num_loops, prefixes=prefixes)


def _shown(value: Difference) -> str:
    interval = value.interval
    by_seed = ", ".join(f"{x:+.3f}" for x in value.by_seed)
    return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}] {{{by_seed}}}"


def _verdict(value: Difference) -> str:
    """In words: whether a difference is resolved, and its sign."""
    if not value.is_resolved:
        return "not resolved from"
    return "above" if value.interval.estimate > 0 else "below"


def _kind(name: str) -> str:
    return "control of equal time" if name == EQUAL_TIME.name else "control of equal data"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
