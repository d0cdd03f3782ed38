"""What all tests share: one thread, fixed examples, no network; and two really tiny runs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings

# Before any test module imports a hub client: a test that wants to download must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# Fixed examples: a red run can be repeated; no deadline: CI machines are shared.
settings.register_profile("depthdial", deadline=None, derandomize=True)
settings.load_profile("depthdial")


def pytest_configure() -> None:
    """Bit-exact comparisons need a fixed thread count."""
    torch.set_num_threads(1)


def refuse_remote(address: object) -> None:
    """Raise for an internet address that is not this machine."""
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost", ""):
        raise RuntimeError(f"a test tried to reach {address[0]}; tests use no network.")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Connections to other machines fail; local servers and gloo processes work."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded(self: socket.socket, address: object) -> None:
        refuse_remote(address)
        return connect(self, address)

    def guarded_ex(self: socket.socket, address: object) -> int:
        refuse_remote(address)
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        patch.setattr(socket.socket, "connect_ex", guarded_ex)
        yield


TEXTS = [f"Chapter {i}. The ship sailed {i} days past the island of birds. " * 12 for i in range(9)]
TINY_RECIPE: dict[str, Any] = {
    "model.vocab_size": 300,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
    "model.d_ff": 32,
    "model.max_context": 48,
    "model.max_loops": 3,
    "model.num_loops": 2,
    "model.modulation": {"d_cond": 8, "rank": 4, "embed_dim": 8},
    "data.context": 16,
    "train.batch_size": 8,
    "train.steps": 4,
    "train.val_every": 4,
    "train.val_rows": 4,
    "train.checkpoint_every": 2,
}
"""Overrides of a shipped recipe that make its model and its run tiny."""
NOT_LOOPED = {"model.max_loops": 1, "model.num_loops": 1, "model.modulation": None}


class Outcome(NamedTuple):
    """What one command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs one command line in this process."""
    from depthdial.cli.main import main

    def run_command(*argv: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(part) for part in argv])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run_command


@pytest.fixture(scope="session")
def tiny_flags() -> Callable[..., list[str]]:
    """Makes the flags of the tiny recipe; `train__steps=9` changes one."""

    def flags(**changes: Any) -> list[str]:
        values = TINY_RECIPE | {name.replace("__", "."): x for name, x in changes.items()}
        texts = {k: x if isinstance(x, str) else json.dumps(x) for k, x in values.items()}
        return [part for name, text in texts.items() for part in (f"--{name}", text)]

    return flags


@pytest.fixture(scope="session")
def tiny_texts() -> list[str]:
    """The documents of `tiny_folder`."""
    return list(TEXTS)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts/`, `data/` prepared from them, `runs/tiny` and its baseline `runs/plain`.

    One for all tests of a process: add files if need be, change none.
    """
    import depthdial
    from depthdial.data.text import prepare

    root = tmp_path_factory.mktemp("tiny")
    (root / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (root / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    prepare([root / "texts"], root / "data", vocab_size=300, valid_frac=0.3)
    common = TINY_RECIPE | {"data.path": str(root / "data")}
    for recipe, name, changes in (
        ("tiny-text", "tiny", {}),
        ("tiny-text-baseline", "plain", NOT_LOOPED),
    ):
        overrides = common | changes | {"name": name}
        result = depthdial.train(recipe, root=root / "runs", **overrides)
        assert (result.status, result.step) == ("finished", 4)
    return root


@pytest.fixture(scope="session")
def tiny_run(tiny_folder: Path) -> Path:
    """The looped run of `tiny_folder`."""
    return tiny_folder / "runs" / "tiny"


@pytest.fixture(scope="session")
def byte_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer of single bytes: something that runs can start from."""
    from depthdial.config import LoopConfig, ModelConfig
    from depthdial.data.tokenizer import train_bpe
    from depthdial.model.checkpoint import save_model
    from depthdial.model.looped_lm import LoopedLM

    folder = tmp_path_factory.mktemp("bases") / "bytes"
    config = ModelConfig(
        vocab_size=257, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=32, max_context=48, num_loops=2, max_loops=3, tie_embeddings=True,
        loop=LoopConfig(update="adaptive_delta"),
    )  # fmt: skip
    save_model(LoopedLM(config, seed=0), folder, trained_loops=())
    train_bpe(TEXTS, 257).save(folder)
    return folder


CHAIN_RECIPE: dict[str, Any] = {
    "name": "chains",
    "data": {"task": "pointer_chain", "num_chains": 2, "chain_length": 3, "context": 42},
    "depth": {"sampler": "listed", "listed_loops": [1, 2]},
    "train": {
        "steps": 4, "batch_size": 4, "val_every": 2, "val_rows": 4, "checkpoint_every": 2,
        "precision": "fp32",
    },
}  # fmt: skip
"""A recipe without model: short pointer chains, in the letters of the model it starts from."""


@pytest.fixture(scope="session")
def chain_recipe(byte_base: Path) -> Callable[..., Any]:
    """Makes the recipe of chains that starts from `byte_base`, with some keys changed."""
    from depthdial.config import Recipe

    def make(**changes: Any) -> Recipe:
        values = json.loads(json.dumps(CHAIN_RECIPE))
        values["train"]["init"] = str(byte_base)
        return Recipe.from_dict(values).replace(**changes)

    return make


@pytest.fixture(scope="session")
def chain_run(
    chain_recipe: Callable[..., Any], byte_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run on chains whose model directory is gone; change nothing in it."""
    import shutil

    import depthdial

    root = tmp_path_factory.mktemp("chains")
    moved = shutil.copytree(byte_base, root / "moved")
    recipe = chain_recipe(**{"train.init": str(moved)})
    result = depthdial.train(recipe, root=root)
    assert (result.status, result.step) == ("finished", 4)
    shutil.rmtree(moved)
    return result.path
