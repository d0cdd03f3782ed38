"""Peak memory of attention over row length: packed documents, and a prefill into a cache.

    python benchmarks/attention_memory.py [--out docs/results]

One model of width 256 runs each length in a process of its own, forward alone and forward with
backward, with and without documents; a prefill fills a cache in one call. Peak memory is the
largest resident set during the call less the one before it, read by a second thread. Writes
attention_memory.json and attention_memory.md. A row twice as long takes twice the memory where no
table of all pairs of tokens is made, and four times where one is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

LENGTHS = (2048, 4096, 8192)
CASES = ("packed forward", "packed training", "cached prefill", "plain forward")
WIDTH, SUBLAYERS, DOCUMENT_TOKENS = 256, (2, 2, 2), 300


def measure(case: str, length: int) -> dict[str, float]:
    """Peak and time of one call, in this process."""
    import torch

    from depthdial.cache.contiguous import ContiguousCache
    from depthdial.config import ModelConfig
    from depthdial.model.call import Call
    from depthdial.model.looped_lm import LoopedLM

    torch.set_num_threads(1)
    config = ModelConfig(
        vocab_size=128, d_model=WIDTH, split=SUBLAYERS, num_heads=4, num_kv_heads=4, head_dim=64,
        d_ff=512, max_context=length, max_loops=2,
    )  # fmt: skip
    model = LoopedLM(config)
    tokens_BT = torch.arange(length)[None] % 128
    documents_BT = (torch.arange(length) // DOCUMENT_TOKENS)[None]
    cache = None
    if case == "cached prefill":
        cache = ContiguousCache(config, batch_size=1, capacity=length)
    call = Call(
        tokens_BT,
        num_loops=2,
        cache=cache,
        document_ids_BT=documents_BT if case.startswith("packed") else None,
    )
    # A short call first, so that libraries and allocators have what they keep.
    with torch.no_grad():
        model.hidden_states(Call(tokens_BT[:, :64], num_loops=2))
    before, started = resident_bytes(), time.perf_counter()
    with PeakWatch() as watch:
        if case == "packed training":
            model.hidden_states(call).sum().backward()
        else:
            with torch.no_grad():
                model.hidden_states(call)
    return {"peak_bytes": watch.peak - before, "seconds": time.perf_counter() - started}


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakWatch:
    """The largest resident set while the block runs, sampled every two milliseconds."""

    def __enter__(self) -> PeakWatch:
        self.peak, self._running = resident_bytes(), True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._running = False
        self._thread.join()

    def _watch(self) -> None:
        while self._running:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.002)


def run_all() -> list[dict]:
    """Every case at every length, each in a new process."""
    rows = []
    for case in CASES:
        for length in LENGTHS:
            program = [sys.executable, __file__, "--one", case, str(length)]
            done = subprocess.run(program, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            rows.append({"case": case, "length": length, **found})
            print(f"{case:<16} {length:>6}  {found['peak_bytes'] / 2**20:8.1f} MiB", flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    """The measured table as a page."""
    lines = [
        "# Peak memory of attention",
        "",
        f"A model of width {WIDTH}, {sum(SUBLAYERS)} sublayers, two loops, one row; fp32 on a CPU, "
        f"documents of {DOCUMENT_TOKENS} tokens. Peak resident memory of one call less that before "
        "it. Written by `benchmarks/attention_memory.py`.",
        "",
        "| call | " + " | ".join(f"{length:,} tokens" for length in LENGTHS) + " | growth per "
        "doubling |",
        "|---|" + "---|" * (len(LENGTHS) + 1),
    ]
    for case in CASES:
        peaks = [row["peak_bytes"] for row in rows if row["case"] == case]
        growth = ", ".join(f"{b / a:.2f}x" for a, b in zip(peaks, peaks[1:], strict=False))
        cells = " | ".join(f"{peak / 2**20:.0f} MiB" for peak in peaks)
        lines.append(f"| {case} | {cells} | {growth} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="output folder")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return 0
    rows = run_all()
    page = markdown(rows)
    print(page)
    (arguments.out / "attention_memory.md").write_text(page, encoding="utf-8")
    (arguments.out / "attention_memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
