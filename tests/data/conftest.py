"""Small tokenizers and shards shared by the data tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from depthdial.data.shards import TokenShards
from depthdial.data.tokenizer import train_bpe


@pytest.fixture(scope="session")
def byte_tokenizer():
    """257 tokens: one per byte, so a text has as many tokens as bytes."""
    return train_bpe([""], 257)


@pytest.fixture(scope="session")
def memory_shards():
    """Builds shards in memory from document lengths; token j of the file has id j."""

    def build(lengths) -> TokenShards:
        total = int(sum(lengths))
        return TokenShards(
            directory=Path("in-memory"),
            split="train",
            tokens=np.arange(total, dtype=np.uint32),
            lengths=np.array(lengths, dtype=np.int64),
            num_bytes=np.array(lengths, dtype=np.int64),
            names=[f"document {i}" for i in range(len(lengths))],
            vocab_size=total,
            eos_id=0,
            meta={"splits": {"train": {"sha256": f"{lengths}"}}},
        )

    return build
