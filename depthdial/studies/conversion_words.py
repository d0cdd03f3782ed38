"""The retrofit study as JSON and Markdown: what gained, what did not, with intervals.

Comparisons are made in `conversion_results.py`, the figure in `conversion_figure.py`. Nothing here
is written by hand: every number, and every verdict, follows from the scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from depthdial.data.pointer_chains import DIGITS
from depthdial.eval.depth_sweep import DepthSweep
from depthdial.studies.conversion_arms import CONTROL, CORE, EQUAL_TIME, LOOPED, LOOPS, RANK, Arm
from depthdial.studies.conversion_data import TRAINED_CORPORA, UNSEEN_CORPUS
from depthdial.studies.conversion_figure import DEEP, figure_png
from depthdial.studies.conversion_results import (
    Difference,
    Scores,
    accuracies,
    accuracy_difference,
    difference,
    mean_loss,
)
from depthdial.studies.conversion_study import LONG_CHAINS

Jobs = Sequence[Mapping[str, Any]]
Side = tuple[str, int]
"""Arm and loop count."""
Compare = Callable[[Side, Side], Difference]
CONTROLS = (CONTROL, EQUAL_TIME)
TITLES = {
    "base": "base, looped untrained",
    "untaught": "checkpoint, before the short chains",
    **{arm.name: arm.title for arm in (*CONTROLS, *LOOPED)},
}
GROUPS = {
    "trained domains": TRAINED_CORPORA,
    f"the untrained corpus ({UNSEEN_CORPUS})": (UNSEEN_CORPUS,),
}
JUDGED = 2
"""Loop count at which arms are judged on text, fixed before the runs."""


def write_results(
    results: Mapping[str, Jobs], *, seeds: Sequence[int], base: str, folder: Path
) -> None:
    """conversion_study.json with every seed's scores, its .md and its .png. base: in words."""
    parts = [_opening(seeds, base)]
    if "text" in results:
        parts.append(text_part(results["text"]))
    if "chains" in results:
        parts.append(chain_part(results["chains"]))
    (folder / "conversion_study.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (folder / "conversion_study.png").write_bytes(
        figure_png({name: scores_of(jobs) for name, jobs in results.items()})
    )
    values = {"seeds": list(seeds), **{name: list(jobs) for name, jobs in results.items()}}
    (folder / "conversion_study.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


def scores_of(jobs: Jobs) -> list[dict[str, DepthSweep]]:
    """The sweeps of each seed, by side."""
    return [
        {side: DepthSweep.from_dict(values["sweep"]) for side, values in job["sides"].items()}
        for job in jobs
    ]


def _opening(seeds: Sequence[int], base: str) -> str:
    first, last = CORE.split(":")
    return (
        "# What loops gain in a retrofitted checkpoint\n\n"
        f"{base}; layers {first} to {int(last) - 1} loop. Written by "
        "`benchmarks/conversion_study.py`; the scores of every seed are in "
        "conversion_study.json.\n\n"
        "![Loss on text and exact answers of chains, against loop count](conversion_study.png)\n\n"
        f"The checkpoint's own weights are frozen in every arm. `later-deltas` trains a rate and "
        f"low-rank differences (rank {RANK}, and copies of the norms) of passes 2 and later; "
        "`joint-deltas` adds a set for pass 1, so it trains twice as many parameters as a control; "
        f"`elr-graft` trains a gate and loop-conditioned modulation (rank {RANK}). The controls "
        "train differences of the same layers and never loop: one on the same rows, one for as "
        "long as the slowest looped arm takes.\n\n"
        f"Seeds {', '.join(map(str, seeds))} change data order, depth draws and new parameters. "
        "Brackets: 95 % intervals over documents, whose losses are averaged over seeds; they hold "
        "no noise of seeds. A star marks what is resolved: the interval excludes zero and all "
        "seeds agree in sign; beside the stars no correction is made for the number of "
        "comparisons. Learning rates were not tuned per arm."
    )


def text_part(jobs: Jobs) -> str:
    """Loss on text by arm and loop count, and the comparisons that matter."""
    seeds = scores_of(jobs)
    lines = ["## Text", "", _budget(jobs), ""]
    lines += [f"- {sentence}" for sentence in text_findings(seeds)]
    lines += ["", f"By seed: loss at k={JUDGED} on trained domains.", ""]
    lines += _by_seed(jobs, JUDGED, partial(difference, seeds, prefixes=TRAINED_CORPORA))
    for title, corpora in GROUPS.items():
        lines += ["", f"### Loss on {title}, nats per token", ""]
        lines += _table(
            ["", *(f"k={k}" for k in LOOPS)],
            [[TITLES[side], *_losses(seeds, side, corpora)] for side in _sides(seeds)],
        )
        lines += ["", *_differences(partial(difference, seeds, prefixes=corpora))]
    return "\n".join(lines)


def text_findings(seeds: Sequence[Scores]) -> list[str]:
    """Sentences about text, the unfavourable ones first."""
    found = [_better_than_controls(seeds, title, corpora) for title, corpora in GROUPS.items()]
    found += [_judged(seeds, arm) for arm in LOOPED]
    for title, corpora in GROUPS.items():
        widths = []
        for arm in LOOPED:
            means = [mean_loss(seeds, arm.name, k, prefixes=corpora) for k in LOOPS]
            widths.append(f"{max(means) - min(means):.3f} ({arm.title})")
        at = [mean_loss(seeds, "base", k, prefixes=corpora) for k in LOOPS]
        costs = ", ".join(f"{loss - at[0]:.2f}" for loss in at[1:])
        found.append(
            f"Depth stability on {title}: k=1 to 4 lie within {', '.join(widths)} nats of each "
            f"other; looping the untouched base costs {costs} at k=2, 3, 4."
        )
    same = all((scores["graft"].nll(1) == scores["base"].nll(1)).all() for scores in seeds)
    state = "is the base's on every document, bit for bit" if same else "DIFFERS from the base's"
    return [*found, f"{TITLES['graft']}: the loss at k=1 {state}."]


def _better_than_controls(seeds: Sequence[Scores], title: str, corpora: Sequence[str]) -> str:
    """Which arms, at any loop count, are resolved to be better than both controls."""
    better = []
    for arm in LOOPED:
        for k in LOOPS:
            gains = _against_controls(seeds, arm, k, corpora)
            if all(gain.is_resolved and gain.interval.estimate < 0 for gain in gains):
                shown = " and ".join(map(_shown, gains))
                better.append(f"{arm.title} at k={k} ({shown})")
    if not better:
        return f"On {title} no looped arm is better than both controls, at any loop count."
    return f"On {title} better than the controls of equal data and equal time: {'; '.join(better)}."


def _judged(seeds: Sequence[Scores], arm: Arm) -> str:
    """An arm at the loop count that was fixed beforehand, against both controls."""
    data, time = _against_controls(seeds, arm, JUDGED, TRAINED_CORPORA)
    text = (
        f"{arm.title} at k={JUDGED} on trained domains: {_shown(data)} against equal data, "
        f"{_shown(time)} against equal time."
    )
    own = difference(seeds, (arm.name, JUDGED), (arm.name, 1), prefixes=TRAINED_CORPORA)
    falls = own.is_resolved and own.interval.estimate < 0
    if falls and data.is_resolved and data.interval.estimate > 0:
        text += (
            f" Its own loss falls from k=1 ({_shown(own)}); as it stays behind the control, that "
            "is adaptation which its first pass was not given, not a gain of looping."
        )
    return text


def _against_controls(
    seeds: Sequence[Scores], arm: Arm, num_loops: int, corpora: Sequence[str]
) -> list[Difference]:
    """Loss minus that of the controls of equal data and equal time."""
    return [
        difference(seeds, (arm.name, num_loops), (control.name, 1), prefixes=corpora)
        for control in CONTROLS
    ]


def chain_part(jobs: Jobs) -> str:
    """Loss and exact answers on pointer chains."""
    seeds = scores_of(jobs)
    length = LONG_CHAINS["chain_length"]
    lines = [
        f"## Shuffled pointer chains ({LONG_CHAINS['num_chains']} of {length} letters)",
        "",
        "Every arm starts from the checkpoint taught on shorter chains with one loop, here the "
        "base. Naming the digit of either chain by chance is right "
        f"{_guessed():.2f} of the time. " + _budget(jobs),
        "",
        *(f"- {sentence}" for sentence in chain_findings(seeds)),
        "",
        f"By seed: exact answers of {DEEP} and more look-ups at k={max(LOOPS)}.",
        "",
        *_by_seed(jobs, max(LOOPS), partial(accuracy_difference, seeds, min_depth=DEEP)),
        "",
        "### Loss per answer, nats, and exact answers by look-ups",
        "",
    ]
    rows = []
    for side in _sides(seeds):
        for k in _trained_loops(side):
            answers = [f"{share:.2f}" for share in accuracies(seeds, side, k)]
            rows.append([TITLES[side], str(k), f"{mean_loss(seeds, side, k):.3f}", *answers])
    lines += _table(["", "k", "loss", "1 look-up", *map(str, range(2, length + 1))], rows)
    lines += ["", f"### Exact answers of {DEEP} and more look-ups, differences", ""]
    lines += _differences(partial(accuracy_difference, seeds, min_depth=DEEP))
    lines += ["", "### Loss, differences", "", *_differences(partial(difference, seeds))]
    return "\n".join(lines)


def _guessed() -> float:
    """Right answers of who names the digit of any chain; chains may end at equal digits."""
    right_chain = 1 / LONG_CHAINS["num_chains"]
    return right_chain + (1 - right_chain) / len(DIGITS)


def chain_findings(seeds: Sequence[Scores]) -> list[str]:
    """Sentences about chains, the comparison with equal time first."""
    found = []
    for arm in LOOPED:
        tax = difference(seeds, (arm.name, 1), (EQUAL_TIME.name, 1))
        deep = []
        for control, kind in ((EQUAL_TIME, "equal time"), (CONTROL, "equal data")):
            gains = " and ".join(
                _shown(accuracy_difference(seeds, (arm.name, k), (control.name, 1), min_depth=DEEP))
                for k in (2, 4)
            )
            deep.append(f"{gains} against {kind}")
        found.append(
            f"{arm.title}: share of exact answers of {DEEP} and more look-ups at k=2 and k=4: "
            f"{', '.join(deep)}. At k=1 its loss is {_shown(tax)} against equal time."
        )
    own = []
    for arm in LOOPED:
        gain = accuracy_difference(seeds, (arm.name, 4), (arm.name, 1), min_depth=2)
        own.append(f"{_shown(gain)} ({arm.title})")
    found.append(
        "More loops of one checkpoint, k=4 against its own k=1, exact answers of 2 and more "
        f"look-ups: {', '.join(own)}."
    )
    naive = accuracy_difference(seeds, ("base", 2), ("base", 1), min_depth=2)
    learned = not naive.interval.low > 0
    found.append(
        f"Looping the taught base without training, k=2 against k=1: {_shown(naive)}"
        + (", so what an arm gains by loops is learned." if learned else ": loops gain untrained.")
    )
    return found


def _by_seed(jobs: Jobs, num_loops: int, compare: Compare) -> list[str]:
    """Table of each seed's differences of every looped arm to both controls."""
    rows = []
    for arm in LOOPED:
        for control in CONTROLS:
            found = compare((arm.name, num_loops), (control.name, 1)).by_seed
            title = f"{arm.title} minus {control.title}"
            rows.append([title, *(f"{value:+.3f}" for value in found)])
    return _table(["", *(f"seed {job['seed']}" for job in jobs)], rows)


def _differences(compare: Compare) -> list[str]:
    """Table of every looped arm and loop count against its own k=1, both controls and the base."""
    heads = ("", "k", "minus own k=1", "minus equal data", "minus equal time", "minus base at k=1")
    rows = []
    for arm in LOOPED:
        own = (arm.name, 1)
        others = (own, *((control.name, 1) for control in CONTROLS), ("base", 1))
        for k in LOOPS:
            left = (arm.name, k)
            cells = ["" if left == other else _shown(compare(left, other)) for other in others]
            rows.append([arm.title, str(k), *cells])
    return _table(heads, rows)


def _budget(jobs: Jobs) -> str:
    """Steps, tokens and cost of a step, of every arm; times are those of the first job."""
    sides, seconds = jobs[0]["sides"], jobs[0]["step_seconds"]
    looped = ", ".join(
        f"{seconds[arm.name] / seconds[CONTROL.name]:.2f} ({arm.title})" for arm in LOOPED
    )
    longer = {job["sides"][EQUAL_TIME.name]["steps"] for job in jobs}
    steps = " to ".join(map(str, sorted({min(longer), max(longer)})))
    minutes = max(sides[arm.name]["steps"] * seconds[arm.name] / 60 for arm in (CONTROL, *LOOPED))
    return (
        f"Training: {sides[CONTROL.name]['steps']} steps, {sides[CONTROL.name]['tokens']:,} input "
        f"tokens, at most {minutes:.1f} minutes of one thread per arm. A step costs {looped} times "
        "that of the control, in processor time (fastest of two interleaved rounds, first seed). "
        f"The control of equal time runs {steps} steps."
    )


def _sides(seeds: Sequence[Scores]) -> list[str]:
    """What was scored, in the order of the tables: what is not trained, controls, looped arms."""
    return [side for side in TITLES if side in seeds[0]]


def _trained_loops(side: str) -> Sequence[int]:
    """Loop counts that say something about a side: of a control the one that it trained."""
    return (1,) if side in {control.name for control in CONTROLS} else LOOPS


def _losses(seeds: Sequence[Scores], side: str, prefixes: Sequence[str]) -> list[str]:
    shown = _trained_loops(side)
    return [
        f"{mean_loss(seeds, side, k, prefixes=prefixes):.4f}" if k in shown else "" for k in LOOPS
    ]


def _shown(value: Difference) -> str:
    interval = value.interval
    star = "*" if value.is_resolved else ""
    return f"{interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]{star}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
