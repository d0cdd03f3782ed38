"""How far log-probabilities move with the batch that a row is scored in, in fp32 and in bf16.

    python benchmarks/batch_rounding.py [--out docs/results]

Rows of random tokens are scored alone and in batches of 2 to 32 rows, at one and at four loops, by
models of random weights whose logits are small or large. A row's result should be its own; what is
left is rounding, which depends on the shapes of the products. Writes batch_rounding.json and
batch_rounding.md; docs/exactness.md quotes them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from depthdial.config import ModelConfig
from depthdial.eval.scoring import ScoredRow, token_logprobs
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.provenance import collect_provenance

VOCAB, CONTEXT, ROWS, WIDTH = 1024, 128, 32, 128
LOOPS = (1, 4)
BATCHES = (2, 8, 32)
LOGIT_SCALES = (1.0, 2.0, 4.0)
"""Factors of the head's matrix: a trained model has larger logits than a new one."""


def small_model(logit_scale: float) -> LoopedLM:
    """Eight sublayers of random weights."""
    config = ModelConfig(
        vocab_size=VOCAB, d_model=WIDTH, split=(2, 4, 2), num_heads=4, num_kv_heads=4,
        head_dim=32, d_ff=352, max_context=CONTEXT, max_loops=4, num_loops=4, init_std=0.06,
        tie_embeddings=False,
    )  # fmt: skip
    model = LoopedLM(config, seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(logit_scale)
    return model


def random_rows() -> list[ScoredRow]:
    """Rows of 8 to CONTEXT - 1 tokens, all but the first scored."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, CONTEXT - 1, (ROWS,), generator=generator).tolist()
    rows = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [ScoredRow([1], row) for row in rows]


@torch.no_grad()
def measure() -> list[dict]:
    """The largest change of any token's log-probability, by size of the logits and precision."""
    rows, found = random_rows(), []
    for scale in LOGIT_SCALES:
        model = small_model(scale)
        tokens_BT = torch.tensor([rows[0].target_ids])
        largest = float(model(tokens_BT, num_loops=4).abs().max())
        for precision in ("fp32", "bf16"):
            moved = 0.0
            for num_loops in LOOPS:
                alone = token_logprobs(
                    model, rows, num_loops, rows_per_forward=1, precision=precision
                )
                for size in BATCHES:
                    batched = token_logprobs(
                        model, rows, num_loops, rows_per_forward=size, precision=precision
                    )
                    pairs = zip(alone, batched, strict=True)
                    moved = max(moved, *(float((a - b).abs().max()) for a, b in pairs))
            found.append(
                {
                    "precision": precision,
                    "largest_logit": largest,
                    # 8 significant bits: a number in [2^n, 2^(n+1)) stands in steps of 2^(n-7).
                    "bf16_step": 2.0 ** (math.floor(math.log2(largest)) - 7),
                    "largest_change_nats": moved,
                }
            )
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    facts = collect_provenance(seed=0, device="cpu")
    lines = [
        "# What the batch changes in a log-probability",
        "",
        f"{ROWS} rows of up to {CONTEXT} tokens, scored alone and in batches of "
        f"{', '.join(map(str, BATCHES))}, at k = {' and '.join(map(str, LOOPS))}; width {WIDTH}, "
        f"random weights, {facts['hardware']['cpu_model']}, torch {torch.__version__}. Written by "
        "`benchmarks/batch_rounding.py`.",
        "",
        "| precision | largest logit | step of bf16 there | largest change, nats |",
        "|---|---|---|---|",
        *(
            f"| {row['precision']} | {row['largest_logit']:.1f} | {row['bf16_step']:.2g} "
            f"| {row['largest_change_nats']:.1e} |"
            for row in rows
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    values = json.dumps(rows, indent=1) + "\n"
    (options.out / "batch_rounding.json").write_text(values, encoding="utf-8")
    (options.out / "batch_rounding.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
