"""Record the numbers of the library, and show which of them a change moved.

    python tools/numerics.py                     compare with tools/numerics.json
    python tools/numerics.py --only tiny cache   these sections alone
    python tools/numerics.py --add               record what is new; nothing else may differ
    python tools/numerics.py --record            write the record anew, changed numbers included

Logits, losses, gradients, converted weights, trained weights, generated ids and `plan` tables, of
tiny models and golden checkpoints, in float64 wherever the library computes in the dtype of the
weights. The record holds of a tensor its SHA-256, its norm and a few projections, which tell how
far a changed tensor is from the recorded one; ids, losses and texts are held in full.
Equal is bit for bit; within 1e-12 of the norm is counted apart; anything else fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# This checkout's package, not an installed one; the tool's own files beside it.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from numerics_measures import Entries  # noqa: E402
from numerics_models import uniform  # noqa: E402
from numerics_sections import SECTIONS  # noqa: E402
from torch import Tensor  # noqa: E402

RECORD = Path(__file__).with_suffix(".json")
TOLERANCE = 1e-12
NUM_PROJECTIONS = 3
HASH_DIGITS = 32
"""Of 64; the half keeps the record small."""
TENSOR = "tensor"
FAILED = "(failed)"
MOST_LINES = 60
Record = dict[str, dict[str, dict[str, Any]]]
_directions: list[Tensor] = []
_shown_errors: set[str] = set()


class Difference(NamedTuple):
    """One entry that is not as recorded. size: relative to the norm, or to the larger number;
    None where there is no such number."""

    where: str
    what: str
    size: float | None = None


class Verdict(NamedTuple):
    """Entries by how they compare; new: those that the record lacks."""

    num_equal: int
    close: list[Difference]
    wrong: list[Difference]
    new: list[Difference]


def digest(tensor: Tensor) -> dict[str, Any]:
    """{TENSOR: [shape, hash, norm, projections ...]}."""
    tensor = tensor.detach().contiguous()
    data = tensor.flatten().view(torch.uint8)
    flat = tensor.double().flatten()
    while len(_directions) < NUM_PROJECTIONS or len(_directions[0]) < len(flat):
        size = max(2 * len(flat), 1 << 16)
        _directions[:] = [uniform(f"direction {i}", size) for i in range(NUM_PROJECTIONS)]
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    sha256 = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:HASH_DIGITS]
    projections = [float(d[: len(flat)] @ flat) for d in _directions]
    return {TENSOR: [shape, sha256, float(flat.norm()), *projections]}


def kept(entries: Entries) -> dict[str, Any]:
    """Entries as they stand in the record."""
    return {name: digest(x) if isinstance(x, Tensor) else x for name, x in entries.items()}


def compare_entry(where: str, old: Any, new: Any) -> Difference | None:
    """None where an entry is as recorded."""
    if _is_tensor(old) and _is_tensor(new):
        return _compare_tensor(where, old[TENSOR], new[TENSOR])
    if old == new:
        return None
    worst, text = 0.0, ""
    for path, a, b in _leaves(old, new):
        if type(a) is float and type(b) is float:
            if a != b:
                size = abs(a - b) / max(abs(a), abs(b))
                # A size that is no number is no small one.
                if not size <= worst:
                    worst, text = size, f"{path} was {a!r}, is {b!r}"
        elif a != b:
            return Difference(where, f"{path} was {_short(a)}, is {_short(b)}")
    return Difference(where, text, worst)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and TENSOR in value


def _compare_tensor(where: str, old: list[Any], new: list[Any]) -> Difference | None:
    (old_shape, old_hash, *old_sums), (new_shape, new_hash, *new_sums) = old, new
    if old_shape != new_shape:
        return Difference(where, f"was {old_shape}, is {new_shape}")
    if old_hash == new_hash:
        return None
    scale = max(old_sums[0], new_sums[0]) or 1.0
    sizes = [abs(a - b) / scale for a, b in zip(old_sums, new_sums, strict=True)]
    # Of a tensor with NaN nothing is known, and max() would depend on the order.
    size = max(sizes) if all(map(math.isfinite, sizes)) else math.nan
    return Difference(where, new_shape, size)


def _leaves(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Values that stand at the same place, with their place; groups of other kinds as a whole."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(a, b, f"{path}[{i}]")
    elif isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for key in old:
            yield from _leaves(old[key], new[key], f"{path}.{key}")
    else:
        yield path, old, new


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def compare(old: Record, new: Record) -> Verdict:
    """Every entry of both sides."""
    num_equal, close, wrong, added = 0, [], [], []
    for where, a, b in _entries(old, new):
        if where.endswith(FAILED):
            wrong.append(Difference(where, _short(b)))
        elif a is _ABSENT:
            added.append(Difference(where, "is not in the record: see --add"))
        elif b is _ABSENT:
            wrong.append(Difference(where, "is in the record alone"))
        elif (found := compare_entry(where, a, b)) is None:
            num_equal += 1
        elif found.size is not None and found.size <= TOLERANCE:
            close.append(found)
        else:
            wrong.append(found)
    return Verdict(num_equal, close, wrong, added)


_ABSENT = object()


def _entries(old: Record, new: Record) -> Iterator[tuple[str, Any, Any]]:
    for section in {**old, **new}:
        cases, new_cases = old.get(section, {}), new.get(section, {})
        for case in {**cases, **new_cases}:
            a, b = cases.get(case, {}), new_cases.get(case, {})
            if FAILED in b:
                yield f"{section} / {case} / {FAILED}", _ABSENT, b[FAILED]
                continue
            if not a or not b:
                yield f"{section} / {case}", a or _ABSENT, b or _ABSENT
                continue
            for name in {**a, **b}:
                where = f"{section} / {case} / {name}"
                yield where, a.get(name, _ABSENT), b.get(name, _ABSENT)


def measure(sections: list[str]) -> Record:
    """Run sections, with a line of progress for each; a case that fails holds its error."""
    # Sums in another number of threads round differently; tables wrap at the screen's width.
    torch.set_num_threads(1)
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    record: Record = {}
    for section in sections:
        started, cases = time.perf_counter(), {}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case, run in SECTIONS[section](Path(folder)):
                _progress(f"{section}: {len(cases)} cases, {case}"[:90])
                cases[case] = _run(case, run)
        record[section] = cases
        num_entries = sum(map(len, cases.values()))
        seconds = time.perf_counter() - started
        _progress(f"{section}: {len(cases)} cases, {num_entries} entries, {seconds:.1f} s", "\n")
    return record


def _run(case: str, run: Callable[[], Entries]) -> dict[str, Any]:
    """The entries of one case as plain values, through JSON as those that were recorded."""
    try:
        return json.loads(json.dumps(kept(run())))
    except Exception as error:
        # The other cases still tell what they know; most fail for one reason.
        text = f"{type(error).__name__}: {error}"
        if text not in _shown_errors:
            _shown_errors.add(text)
            print(f"\nin {case}:", file=sys.stderr)
            traceback.print_exc()
        return {FAILED: text}


def _progress(text: str, end: str = "") -> None:
    is_line = end == "\n"
    if is_line or sys.stderr.isatty():
        print(f"\r{text:<90}", end=end, file=sys.stderr, flush=True)


def read_record() -> tuple[dict[str, str], Record]:
    """What the record was made with, and the record. Raises: SystemExit where there is none."""
    if not RECORD.is_file():
        sys.exit(f"no record at {RECORD}; make one with --record, from code that is known good.")
    values = json.loads(RECORD.read_text(encoding="utf-8"))
    return values["made_with"], values["sections"]


def write_record(record: Record, made_with: Mapping[str, str]) -> None:
    """One line for each entry, so that a diff shows which changed."""
    lines = ["{", f'"made_with": {json.dumps(dict(made_with))},', '"sections": {']
    for i, (section, cases) in enumerate(record.items()):
        lines.append(f"{json.dumps(section)}: {{")
        for j, (case, entries) in enumerate(cases.items()):
            body = ",\n".join(
                f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
                for name, value in entries.items()
            )
            end = "}" if j == len(cases) - 1 else "},"
            lines.append(f"{json.dumps(case)}: {{\n{body}{end}")
        lines.append("}" if i == len(record) - 1 else "},")
    RECORD.write_text("\n".join([*lines, "}", "}"]) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability()}


def _rank(found: Difference) -> float:
    """What has no size comes first."""
    return math.inf if found.size is None or math.isnan(found.size) else found.size


def report(verdict: Verdict, made_with: Mapping[str, str]) -> int:
    """Print what differs, the worst first; the exit code."""
    print(
        f"{verdict.num_equal} entries are bit-equal, {len(verdict.close)} within "
        f"{TOLERANCE:.0e}, {len(verdict.wrong)} differ, {len(verdict.new)} are new."
    )
    kinds = {"within tolerance": verdict.close, "differ": verdict.wrong, "new": verdict.new}
    for title, found in kinds.items():
        if not found:
            continue
        found = sorted(found, key=lambda x: -_rank(x))
        print(f"\n{title}:")
        for item in found[:MOST_LINES]:
            size = "" if item.size is None else f"{item.size:.1e}"
            print(f"  {size:>8}  {item.where}  {item.what}")
        if len(found) > MOST_LINES:
            print(f"  ... and {len(found) - MOST_LINES} more")
    if verdict.wrong and dict(made_with) != _versions():
        print(f"\nThe record was made with {dict(made_with)}; this is {_versions()}.")
    return 1 if verdict.wrong or verdict.new else 0


def with_new(old: Record, new: Record) -> Record:
    """The record with what it lacks, in the order of today; recorded entries stay."""
    return {
        section: {
            case: new.get(section, {}).get(case, {}) | old.get(section, {}).get(case, {})
            for case in {**new.get(section, {}), **old.get(section, {})}
        }
        for section in {**old, **new}
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--compare", action="store_true", help="compare with the record (default)")
    action.add_argument("--add", action="store_true", help="record what the record lacks")
    action.add_argument("--record", action="store_true", help="write the record anew")
    action.add_argument("--list", action="store_true", help="name the sections")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help="these sections alone"
    )
    options = parser.parse_args(argv)
    chosen = options.only or list(SECTIONS)
    if options.list:
        for name, section in SECTIONS.items():
            print(f"{name:<8}  {(section.__doc__ or '').splitlines()[0]}")
        return 0
    is_first = options.record and not (RECORD.is_file() and options.only)
    made_with, old = ({}, {}) if is_first else read_record()
    new = measure(chosen)
    failed = [case for cases in new.values() for case in cases if FAILED in cases[case]]
    if not options.record:
        verdict = compare({s: old.get(s, {}) for s in chosen}, new)
        code = report(verdict, made_with)
        if not options.add or verdict.wrong:
            return code
        new = with_new(old, new)
    elif failed:
        print(f"Failed: {', '.join(failed)}. The record stays what it was.")
        return 1
    sections = old | new
    ordered = {section: sections[section] for section in SECTIONS if section in sections}
    write_record(ordered, _versions() if options.record else made_with)
    print(f"{RECORD}: {RECORD.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
