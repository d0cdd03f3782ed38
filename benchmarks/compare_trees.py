"""Training speed of one tree of this repository against another, steps interleaved.

    git worktree add ../before COMMIT
    python benchmarks/compare_trees.py ../before . [--rounds 9] [--out docs/results/trees.json]

Each tree runs the models of its own benchmarks/train_speed.py in a process of its own, on one
thread; a round asks both for one step of every variant, in random order. What is compared is the
processor time of the step, which other work on the machine disturbs least: minimum and median of
the rounds, and their ratios, after over before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
VARIANTS = ("ours eager", "ours compiled", "gate", "gate + modulation")
LIMIT = 1.03


def serve(shape_name: str) -> int:
    """In a tree: build its variants, then run a step for each name that is read."""
    import importlib.util
    import time

    import torch

    torch.set_num_threads(1)
    place = Path.cwd() / "benchmarks" / "train_speed.py"
    spec = importlib.util.spec_from_file_location("train_speed", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_speed"] = module
    spec.loader.exec_module(module)
    shape = module.SHAPES[shape_name]
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, module.CONTEXT + 1)
    tokens = torch.randint(0, shape.vocab_size, size, generator=generator)
    steps = {}
    for name in VARIANTS:
        kind, compiled = module.VARIANTS[name]
        loops = (1, 4) if name == "gate" else (1,)
        made = module.our_steps(shape, tokens, update=kind, compiled=compiled, loops=loops)
        steps |= {name if k == 1 else f"{name} k={k}": step for k, step in made.items()}
    for step in steps.values():
        step()
        step()
    print(json.dumps(sorted(steps)), flush=True)
    for line in sys.stdin:
        started = time.process_time()
        steps[line.strip()]()
        print(time.process_time() - started, flush=True)
    return 0


class Tree:
    """A process that runs the steps of one tree."""

    def __init__(self, folder: Path, shape_name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", shape_name],
            cwd=folder,
            env={**os.environ, **THREAD, "PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> str:
        """A line of its answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a tree's process ended; its error stands above.")
        return line

    def seconds(self, name: str) -> float:
        """Processor time of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self.read())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(before: Path, after: Path, shape_name: str, rounds: int) -> list[dict]:
    """Times of both trees for every variant of one shape."""
    trees = {"before": Tree(before, shape_name), "after": Tree(after, shape_name)}
    names = [json.loads(tree.read()) for tree in trees.values()]
    assert names[0] == names[1], "both trees have the same variants"
    times: dict[tuple[str, str], list[float]] = {}
    shuffler = random.Random(0)
    for number in range(rounds):
        order = [(side, name) for side in trees for name in names[0]]
        shuffler.shuffle(order)
        for side, name in order:
            times.setdefault((side, name), []).append(trees[side].seconds(name))
        print(f"{shape_name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    for tree in trees.values():
        tree.close()
    rows = []
    for name in names[0]:
        old, new = times["before", name], times["after", name]
        rows.append(
            {
                "shape": shape_name,
                "variant": name,
                "before_min_s": min(old),
                "after_min_s": min(new),
                "ratio_of_min": min(new) / min(old),
                "ratio_of_medians": statistics.median(new) / statistics.median(old),
            }
        )
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", nargs="?", type=Path, help="tree to compare with")
    parser.add_argument("after", nargs="?", type=Path, help="tree that is judged")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each variant and tree")
    parser.add_argument("--shapes", default="d256,d128", help="shapes of train_speed.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--serve", metavar="SHAPE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve)
    if arguments.before is None or arguments.after is None:
        parser.error("give two trees: BEFORE AFTER")
    rows = []
    for shape_name in arguments.shapes.split(","):
        rows += compare(arguments.before, arguments.after, shape_name, arguments.rounds)
    for row in rows:
        print(
            f"{row['shape']}  {row['variant']:<18}  min {row['ratio_of_min']:.3f}  "
            f"median {row['ratio_of_medians']:.3f}"
        )
    worst = max(row["ratio_of_min"] for row in rows)
    print(f"worst ratio of minima {worst:.3f}, limit {LIMIT}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
