"""Checkpoints know which loop counts training has run: in their run, and before it."""

import json
import os
import signal

from depthdial.config import DataConfig, DepthConfig, ModelConfig, OptimConfig, Recipe, TrainConfig
from depthdial.data.synthetic import pointer_tokenizer
from depthdial.model.checkpoint import read_config, save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.training.pretrain import resume, train

TRAINING = TrainConfig(
    steps=6, batch_size=4, val_every=6, val_rows=4, checkpoint_every=2, keep_checkpoints=9,
    precision="fp32",
)  # fmt: skip


def pointer_recipe(**changes) -> Recipe:
    recipe = Recipe(
        name="run",
        model=ModelConfig(
            vocab_size=32, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=2, head_dim=8,
            d_ff=16, max_context=32, num_loops=2, max_loops=5,
        ),
        data=DataConfig(task="pointer_program", context=16),
        depth=DepthConfig(sampler="listed", listed_loops=(2, 3, 5)),
        optim=OptimConfig(),
        train=TRAINING,
    )  # fmt: skip
    return recipe.replace(**changes) if changes else recipe


class StopAfter:
    """Sends this process SIGTERM after a number of steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, record) -> None:
        if record["step"] == self.step and "train/loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    def notice(self, text: str) -> None:
        return None


def drawn(run, *, until: int) -> set[int]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {k for x in lines if x["step"] <= until for k in x.get("loops/per_slice", ())}


def test_b15_every_checkpoint_names_the_loop_counts_drawn_so_far(tmp_path):
    run = train(pointer_recipe(), root=tmp_path).path
    for step in (0, 2, 4, 6):
        config = read_config(run / "checkpoints" / f"step_{step}")
        assert config.trained_loops == tuple(sorted(drawn(run, until=step)))
        assert config.replace(trained_loops=None) == pointer_recipe().model
    assert drawn(run, until=2) < drawn(run, until=6)


def test_a_resumed_run_writes_the_config_of_the_uninterrupted_one(tmp_path):
    """The loop counts from before the stop must not be lost."""
    whole = train(pointer_recipe(name="whole"), root=tmp_path).path
    part = train(pointer_recipe(name="part"), root=tmp_path, observer=StopAfter(3)).path
    assert resume(part).step == 6
    for step in (4, 6):
        name = f"checkpoints/step_{step}/config.json"
        assert (part / name).read_bytes() == (whole / name).read_bytes()


def test_what_a_model_directory_was_trained_at_is_kept_and_added_to(tmp_path):
    """With another limit, null would mean more loop counts than training ran."""
    folder = tmp_path / "start"
    save_model(LoopedLM(pointer_recipe().model.replace(max_loops=4)), folder)
    pointer_tokenizer().save(folder)
    recipe = pointer_recipe(**{"train.init": str(folder), "model.max_loops": 8,
                               "depth.listed_loops": [7]})  # fmt: skip
    run = train(recipe, root=tmp_path).path
    assert recipe.model.trained_loops is None
    assert read_config(run / "checkpoints" / "step_0").trained_loops == (1, 2, 3, 4)
    assert read_config(run / "checkpoints" / "step_6").trained_loops == (1, 2, 3, 4, 7)
