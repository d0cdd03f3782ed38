"""Memory of attention grows with the length of a row, not with its square."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from depthdial.cache.contiguous import ContiguousCache
from depthdial.config import ModelConfig
from depthdial.model.call import Call, build_context

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "attention_memory.json"
LENGTH = 4096


def tensors_in(value):
    """Every tensor below a value, in dataclasses too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
    else:
        for leaf in tree_leaves(value):
            if leaf is not value:
                yield from tensors_in(leaf)


@pytest.mark.parametrize("call", ["packed", "padded", "cached", "window"])
def test_no_table_over_all_pairs_lives_for_the_length_of_a_call(call):
    config = ModelConfig(
        vocab_size=8, d_model=8, layout="SF" if call == "window" else "AF", split=(2, 2, 2),
        num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8, max_context=LENGTH, max_loops=2,
        sliding={"window": 100} if call == "window" else None,
    )  # fmt: skip
    tokens_BT = torch.zeros(1, LENGTH, dtype=torch.int64)
    mask_BT = torch.ones(1, LENGTH, dtype=torch.bool)
    mask_BT[:, 0] = False
    cache = ContiguousCache(config, batch_size=1, capacity=LENGTH)
    ctx, cache_call = build_context(
        Call(
            tokens_BT,
            num_loops=2,
            document_ids_BT=(torch.arange(LENGTH) // 300)[None] if call == "packed" else None,
            padding_mask_BT=mask_BT if call == "padded" else None,
            cache=cache if call == "cached" else None,
        ),
        config,
        dtype=torch.float32,
    )
    found = [*tensors_in(ctx), *tensors_in(cache_call)]
    assert len(found) > 3
    assert max(tensor.numel() for tensor in found) <= 64 * LENGTH


@pytest.mark.parametrize("case", ["packed forward", "packed training", "cached prefill"])
def test_the_committed_peaks_grow_no_faster_than_the_row(case):
    rows = [row for row in json.loads(RESULTS.read_text()) if row["case"] == case]
    assert [row["length"] for row in rows] == [2048, 4096, 8192]
    peaks = [row["peak_bytes"] for row in rows]
    # A table of all pairs alone would take four times as much with every doubling.
    assert all(later <= 2.5 * earlier for earlier, later in zip(peaks, peaks[1:], strict=False))
