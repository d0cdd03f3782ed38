"""Training speed against transformers, and what gate, modulation and loops cost.

    python benchmarks/train_speed.py [--rounds 15] [--shapes d256 d128] [--out docs/results]

All variants of one shape live in one process on one thread and take turns in random order, so
that a busy machine slows all of them alike; only ratios of medians are meant to be compared.
One step is forward, backward, gradient clipping and fused AdamW in bf16 autocast on random
tokens; neither side masks documents. Writes train_speed.json and train_speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from depthdial.config import LoopConfig, ModelConfig, ModulationConfig
from depthdial.data.packing import Batch
from depthdial.model.count import executed_sublayers, flops_per_token
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.parallel import compile_blocks
from depthdial.training.provenance import collect_provenance
from depthdial.training.step import LossModule, RowPlan, autocast

CONTEXT = 256
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Backbone of both sides, and the ratios that the project asks of itself."""

    d_model: int
    layers: int
    vocab_size: int
    batch_size: int
    split: tuple[int, int, int]
    over_compiled: float
    over_eager: float

    @property
    def d_ff(self) -> int:
        """About 8/3 of the width, a multiple of 8."""
        return self.d_model * 8 // 3 // 8 * 8

    def model(self, update: str, modulation: ModulationConfig | None) -> ModelConfig:
        """Our config: head width 32, no grouping, untied head."""
        heads = self.d_model // 32
        return ModelConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            split=self.split,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=32,
            d_ff=self.d_ff,
            max_context=CONTEXT,
            max_loops=4,
            loop=LoopConfig(update=update),
            modulation=modulation,
        )

    def llama(self) -> LlamaConfig:
        """The same backbone in transformers."""
        heads = self.d_model // 32
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.d_model,
            intermediate_size=self.d_ff,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=CONTEXT,
            attn_implementation="sdpa",
            tie_word_embeddings=False,
            use_cache=False,
        )


SHAPES = {
    "d256": Shape(256, 8, 4096, 8, (4, 8, 4), over_compiled=1.05, over_eager=1.20),
    "d128": Shape(128, 6, 2048, 16, (4, 4, 4), over_compiled=1.15, over_eager=1.45),
}
MODULATION = ModulationConfig(d_cond=64, rank=16, embed_dim=64)
VARIANTS = {
    "transformers compiled": ("llama", True),
    "transformers eager": ("llama", False),
    "ours compiled": ("replace", True),
    "ours eager": ("replace", False),
    "gate": ("adaptive_delta", True),
    "gate + modulation": ("modulated", True),
}


def trainer(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """One optimizer step of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(CPU, "bf16"):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def llama_step(shape: Shape, tokens: torch.Tensor, *, compiled: bool) -> Callable[[], None]:
    """transformers' Llama with its own loss."""
    model = LlamaForCausalLM(shape.llama())
    call = torch.compile(model) if compiled else model
    ids = tokens[:, :-1].contiguous()
    return trainer(model, lambda: call(input_ids=ids, labels=ids).loss)


def our_steps(
    shape: Shape, tokens: torch.Tensor, *, update: str, compiled: bool, loops: tuple[int, ...]
) -> dict[int, Callable[[], None]]:
    """Our model with the project's own loss module and block compiler, per loop count."""
    modulated = update == "modulated"
    config = shape.model(
        "adaptive_delta" if modulated else update, MODULATION if modulated else None
    )
    module = LossModule(LoopedLM(config))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    if compiled:
        compile_blocks(module)
    targets = batch.targets_BT.numel()

    def step_at(num_loops: int) -> Callable[[], None]:
        plan = RowPlan(num_loops)
        return trainer(module, lambda: module(batch, plan).nll_BT.sum() / targets)

    return {num_loops: step_at(num_loops) for num_loops in loops}


def measure(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every variant, `rounds` interleaved repeats each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        0, shape.vocab_size, (shape.batch_size, CONTEXT + 1), generator=generator
    )
    steps: dict[str, Callable[[], None]] = {}
    for name, (kind, compiled) in VARIANTS.items():
        if kind == "llama":
            steps[name] = llama_step(shape, tokens, compiled=compiled)
            continue
        loops = (1, 2, 3, 4) if kind == "adaptive_delta" else (1,)
        made = our_steps(shape, tokens, update=kind, compiled=compiled, loops=loops)
        steps |= {name if k == 1 else f"{name} k={k}": step for k, step in made.items()}
    for name, step in steps.items():
        started = time.perf_counter()
        step()
        step()
        print(f"  {name}: ready after {time.perf_counter() - started:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffler = list(steps), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            started = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def checks(shape: Shape, seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """Each measured ratio beside its target."""
    mid = {name: statistics.median(values) for name, values in seconds.items()}
    ours = mid["ours compiled"]
    rows = [
        ("tokens/s over transformers compiled", mid["transformers compiled"] / ours, ">=",
         shape.over_compiled),
        ("tokens/s over transformers eager", mid["transformers eager"] / ours, ">=",
         shape.over_eager),
        ("eager: tokens/s over transformers eager", mid["transformers eager"] / mid["ours eager"],
         "reported", None),
    ]  # fmt: skip
    modulated = shape.model("adaptive_delta", MODULATION)
    flops = flops_per_token(modulated, 1, context=CONTEXT, training=True)
    without_modulation = flops.total - flops.modulation
    gate_share = flops.gate / (without_modulation - flops.gate)
    rows.append(("gate: extra time at k=1", mid["gate"] / ours - 1, "<=", gate_share + 0.02))
    rows.append(
        ("modulation: extra time at k=1", mid["gate + modulation"] / mid["gate"] - 1, "<=",
         flops.modulation / without_modulation + 0.04)
    )  # fmt: skip
    config = shape.model("adaptive_delta", None)
    for k in (2, 3, 4):
        depth_ratio = executed_sublayers(config, k) / executed_sublayers(config, 1)
        ratio = mid[f"gate k={k}"] / mid["gate"] / depth_ratio
        rows.append((f"k={k}: time over the executed-sublayer ratio", ratio, "<=", 1.06))
    return [
        {
            "what": what,
            "measured": value,
            "target": None if target is None else f"{relation} {target:.3f}",
            "met": target is None or (value >= target if relation == ">=" else value <= target),
        }
        for what, value, relation, target in rows
    ]


def markdown(results: dict[str, dict], header: str) -> str:
    """The measured tables as a page."""
    lines = ["# Training speed", "", header, ""]
    for name, result in results.items():
        lines += [f"## {name}: {result['shape']}", "", "| ratio | measured | target | met |",
                  "|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| {row['what']} | {row['measured']:.3f} | {row['target'] or 'reported'} | "
            f"{'yes' if row['met'] else 'NO'} |"
            for row in result["checks"]
        ]
        lines += ["", "| variant | min ms/step | median ms/step | tokens/s (median) |",
                  "|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| {variant} | {row['min_ms']:.0f} | {row['median_ms']:.0f} | "
            f"{row['tokens_per_second']:,.0f} |"
            for variant, row in result["variants"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="repeats of each variant (>= 15)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="output folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load_before, results = os.getloadavg(), {}
    for name in arguments.shapes:
        shape = SHAPES[name]
        print(f"{name}: compiling", flush=True)
        torch._dynamo.reset()
        seconds = measure(shape, arguments.rounds)
        tokens = shape.batch_size * CONTEXT
        results[name] = {
            "shape": f"{shape.layers} layers, context {CONTEXT}, batch {shape.batch_size}, "
            f"vocabulary {shape.vocab_size}, split {shape.split}",
            "checks": checks(shape, seconds),
            "variants": {
                variant: {
                    "min_ms": min(values) * 1e3,
                    "median_ms": statistics.median(values) * 1e3,
                    "tokens_per_second": tokens / statistics.median(values),
                }
                for variant, values in seconds.items()
            },
        }
    hardware = collect_provenance(seed=0, device="cpu")["hardware"]
    header = (
        f"{arguments.rounds} interleaved rounds, one thread, {hardware['cpu_model']}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; load average {load_before[0]:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after. Written by `benchmarks/train_speed.py`; ratios are of "
        "medians. Gate and modulation targets are their share of FLOPs plus 2 and 4 points."
    )
    page = markdown(results, header)
    print(page)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "train_speed.md").write_text(page, encoding="utf-8")
    record = {"header": header, "results": results}
    (arguments.out / "train_speed.json").write_text(
        json.dumps(record, indent=1) + "\n", encoding="utf-8"
    )
    missed = [row for result in results.values() for row in result["checks"] if not row["met"]]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
