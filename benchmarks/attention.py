"""The two attention products on this CPU: explicit matrix products against torch's fused kernel.

    python benchmarks/attention.py [--rounds 15] [--out docs/results]

Forward and backward of causal attention on one thread, at equal tokens, both products in turn in
one process. Writes attention.json and attention.md; the rule in layers/attention_ops.py follows it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from depthdial.layers.attention_ops import AttentionSpec, attention, choose_attention
from depthdial.training.provenance import collect_provenance

TOKENS, HEADS, HEAD_DIM = 4096, 4, 32
LENGTHS = (64, 128, 256, 512, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
IMPLS = ("explicit", "sdpa")


def seconds_of_step(impl: str, length: int, dtype: torch.dtype) -> float:
    """One forward and backward."""
    shape = (TOKENS // length, length, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    spec = AttentionSpec(length, length, dtype, impl).ready(torch.device("cpu"))
    started = time.perf_counter()
    attention(q, k, v, spec=spec, scale=HEAD_DIM**-0.5).sum().backward()
    return time.perf_counter() - started


def measure(rounds: int) -> list[dict]:
    """Times of both products at every length and dtype."""
    rows = []
    for name, dtype in DTYPES.items():
        for length in LENGTHS:
            times: dict[str, list[float]] = {impl: [] for impl in IMPLS}
            for round_idx in range(rounds + 2):
                for impl in IMPLS:
                    seconds = seconds_of_step(impl, length, dtype)
                    if round_idx >= 2:
                        times[impl].append(seconds * 1e3)
            medians = {impl: statistics.median(values) for impl, values in times.items()}
            rows.append(
                {
                    "dtype": name,
                    "length": length,
                    **{f"{impl}_min_ms": min(values) for impl, values in times.items()},
                    **{f"{impl}_median_ms": value for impl, value in medians.items()},
                    "sdpa_over_explicit": medians["sdpa"] / medians["explicit"],
                    "chosen": choose_attention(dtype, num_source_tokens=length, device_type="cpu"),
                }
            )
    return rows


def markdown(rows: list[dict], rounds: int) -> str:
    """The measured table as a page."""
    hardware = collect_provenance(seed=0, device="cpu")["hardware"]
    lines = [
        "# Attention products on a CPU",
        "",
        f"Forward and backward of causal attention, {TOKENS} tokens, {HEADS} heads of {HEAD_DIM}, "
        f"{rounds} interleaved rounds on one thread, {hardware['cpu_model']}, torch "
        f"{torch.__version__}. Written by `benchmarks/attention.py`.",
        "",
        "| dtype | tokens per row | explicit ms (min, median) | sdpa ms (min, median) | "
        "sdpa over explicit | chosen |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['dtype']} | {row['length']} | {row['explicit_min_ms']:.1f}, "
        f"{row['explicit_median_ms']:.1f} | {row['sdpa_min_ms']:.1f}, "
        f"{row['sdpa_median_ms']:.1f} | {row['sdpa_over_explicit']:.2f} | {row['chosen']} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="repeats of each product")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="output folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.rounds)
    page = markdown(rows, arguments.rounds)
    print(page)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attention.md").write_text(page, encoding="utf-8")
    (arguments.out / "attention.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
