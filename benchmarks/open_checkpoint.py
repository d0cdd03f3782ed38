"""Open a generated checkpoint of about 2 GB: time and memory against safetensors' own load.

    python benchmarks/open_checkpoint.py [--rounds 7] [--gigabytes 2] [--save]

Every measurement is a process of its own. The clock runs from the call until every byte of every
tensor has been summed, so that what a load leaves for later counts too; imports are before it.
Anonymous memory is `RssAnon` of Linux, sampled while the clock runs: pages that are mapped from
the file are no part of it. Rounds take the variants in turn, so that a slow moment hits all.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from depthdial.config import ModelConfig
from depthdial.formats.tensors.files import TensorSpec, TensorWriter
from depthdial.model.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_model
from depthdial.model.looped_lm import LoopedLM

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "open_checkpoint.json"
SAMPLE_SECONDS = 0.002
STATUS = Path("/proc/self/status")


def config_of(gigabytes: float) -> ModelConfig:
    """A looped model in bf16; blocks are added until it has the size."""
    width = 2048
    block_values = 4 * width**2 + 3 * width * 4 * width
    vocab_size = 32_768
    blocks = max(3, round((gigabytes * 1e9 / 2 - 2 * vocab_size * width) / block_values))
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=width,
        split=(2, 2 * blocks - 4, 2),
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        d_ff=4 * width,
        max_context=4096,
        num_loops=4,
        max_loops=4,
    )


def write_checkpoint(folder: Path, config: ModelConfig) -> int:
    """Write config and deterministic bf16 weights; bytes of the weights."""
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in LoopedLM(config).state_dict().items()}
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    with TensorWriter(folder / WEIGHTS_FILE, specs) as writer:
        for name, shape in shapes.items():
            values = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
            writer.write(name, values.to(torch.bfloat16) / 4096)
    (folder / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    return sum(spec.num_bytes for spec in specs.values())


def open_ours(folder: Path) -> dict[str, torch.Tensor]:
    """Depthdial's way: a model that could run."""
    return dict(load_model(folder).state_dict())


def open_theirs(folder: Path) -> dict[str, torch.Tensor]:
    """The library's own: a dictionary of tensors."""
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS_FILE)


VARIANTS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "depthdial load_model": open_ours,
    "safetensors load_file": open_theirs,
}


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    for line in STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no RssAnon; this benchmark needs Linux.")


def measure(variant: str, folder: Path) -> dict[str, Any]:
    """Open and sum in this process."""
    import safetensors.torch  # noqa: F401  (imported before the clock starts, for both)

    torch.set_num_threads(1)
    peak, done = anonymous_bytes(), threading.Event()
    before = peak

    def sample() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    started = time.perf_counter()
    tensors = VARIANTS[variant](folder)
    opened = time.perf_counter()
    # In the order of the names for both, which is that of the file.
    total = sum(sum_bytes(tensors[name]) for name in sorted(tensors))
    finished = time.perf_counter()
    done.set()
    sampler.join()
    peak = max(peak, anonymous_bytes())
    return {
        "seconds": finished - started,
        "open_seconds": opened - started,
        "peak_anonymous_bytes": peak,
        "anonymous_bytes_before": before,
        "checksum": total,
    }


def sum_bytes(tensor: torch.Tensor) -> int:
    """Sum of a tensor's memory as 64-bit integers, modulo 2^64: touches every byte."""
    return int(tensor.flatten().view(torch.int64).sum())


def compare(folder: Path, *, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """All measurements, variants in turn; the first round warms the page cache and is dropped."""
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds + 1):
        for variant in list(VARIANTS)[:: -1 if number % 2 else 1]:
            command = [sys.executable, __file__, "--measure", variant, "--folder", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if number:
                found[variant].append(json.loads(done.stdout))
    sums = {record["checksum"] for records in found.values() for record in records}
    if len(sums) != 1:
        raise RuntimeError(f"the variants read different bytes: checksums {sorted(sums)}")
    return found


def summary(found: dict[str, list[dict[str, Any]]], *, num_bytes: int) -> dict[str, Any]:
    """What is reported, and whether the two limits hold."""
    variants = {
        variant: {
            "seconds_min": round(min(r["seconds"] for r in records), 4),
            "seconds_median": round(median(r["seconds"] for r in records), 4),
            "open_seconds_median": round(median(r["open_seconds"] for r in records), 4),
            "peak_anonymous_bytes_max": max(r["peak_anonymous_bytes"] for r in records),
            "anonymous_bytes_before": records[0]["anonymous_bytes_before"],
        }
        for variant, records in found.items()
    }
    ours, theirs = (variants[name] for name in VARIANTS)
    return {
        "checkpoint_bytes": num_bytes,
        "rounds": len(next(iter(found.values()))),
        "variants": variants,
        "time_ratio_median": round(ours["seconds_median"] / theirs["seconds_median"], 3),
        "time_ratio_min": round(ours["seconds_min"] / theirs["seconds_min"], 3),
        "time_limit": 1.3,
        "memory_ratio": round(ours["peak_anonymous_bytes_max"] / num_bytes, 3),
        "memory_limit": 1.1,
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def main() -> None:
    """Generate, measure, print; with --save also write docs/results/open_checkpoint.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.folder)))
        return
    with tempfile.TemporaryDirectory() as place:
        num_bytes = write_checkpoint(Path(place), config_of(options.gigabytes))
        result = summary(compare(Path(place), rounds=options.rounds), num_bytes=num_bytes)
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.save:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
