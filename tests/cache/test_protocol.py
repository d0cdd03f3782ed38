"""The model, the engine and the faces ask a cache for nothing but the protocol."""

import ast
from pathlib import Path

import pytest
import torch

from depthdial.cache.contiguous import ContiguousCache
from depthdial.cache.protocol import LoopCache
from depthdial.config import ModelConfig

PACKAGE = Path(__file__).parents[2] / "depthdial"
OWN = ("contiguous", "buffers", "slots", "entries", "groups", "collapse", "policies")
"""Files of `cache/` that say how a cache keeps what it keeps."""


def imports_of_storage(source: str) -> set[str]:
    """Names that a file takes from the cache's own files."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if node.module.startswith("depthdial.cache.") and node.module.split(".")[2] in OWN
    }


def test_whoever_makes_a_cache_takes_nothing_else_from_its_files():
    found = {
        path.relative_to(PACKAGE).as_posix(): imports_of_storage(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
        if "cache" not in path.relative_to(PACKAGE).parts[:1]
    }
    assert {name: taken for name, taken in found.items() if taken - {"ContiguousCache"}} == {}
    assert not any(taken for name, taken in found.items() if name.startswith(("model/", "layers/")))


def public(kind: type) -> set[str]:
    return {name for name in (*vars(kind), *kind.__annotations__) if not name.startswith("_")}


@pytest.fixture
def cache():
    config = ModelConfig(
        vocab_size=9, d_model=8, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8,
        max_context=8,
    )  # fmt: skip
    return ContiguousCache(config, batch_size=1, capacity=4)


def test_the_contiguous_cache_has_the_members_of_the_protocol_and_no_others(cache):
    members = public(ContiguousCache) | {name for name in vars(cache) if not name.startswith("_")}
    assert members == public(LoopCache)


@pytest.mark.parametrize("rows", [None, torch.tensor([0])])
def test_end_prompt_is_no_matter_of_policies_that_do_not_collapse(cache, rows):
    cache.end_prompt(rows)
    assert cache.lengths_B.tolist() == [0]
