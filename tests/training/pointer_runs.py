"""Tiny runs on pointer programs, and an observer that keeps what it is told."""

import os
import signal

from depthdial.config import (
    DataConfig,
    DepthConfig,
    ModelConfig,
    ModulationConfig,
    OptimConfig,
    Recipe,
    TrainConfig,
)


def pointer_recipe(**changes) -> Recipe:
    recipe = Recipe(
        name="run",
        model=ModelConfig(
            vocab_size=32, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=2, head_dim=8,
            d_ff=16, max_context=32, num_loops=2, max_loops=3,
            modulation=ModulationConfig(d_cond=8, rank=2, embed_dim=8),
        ),
        data=DataConfig(task="pointer_program", context=16),
        depth=DepthConfig(
            sampler="override", override_frac=0.25, num_depth_slices=4, switch_frac=0.5
        ),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(
            steps=6, batch_size=8, val_every=3, val_rows=16, checkpoint_every=2, precision="fp32"
        ),
    )  # fmt: skip
    return recipe.replace(**changes) if changes else recipe


class Recorder:
    """Collects what an observer is told, and may send a signal."""

    def __init__(self, *, signal_at: int | None = None, number: int = signal.SIGINT) -> None:
        self.records, self.notices = [], []
        self.signal_at, self.number = signal_at, number

    def record(self, record) -> None:
        self.records.append(record)
        if record["step"] == self.signal_at and "train/loss" in record:
            os.kill(os.getpid(), self.number)

    def notice(self, text: str) -> None:
        self.notices.append(text)
