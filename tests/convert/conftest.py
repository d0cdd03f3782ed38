"""What the tests of conversions share; golden cases are opened by `goldens.py`."""

import sys
from pathlib import Path

import pytest
import torch

# Golden cases are opened by helpers that stand beside the tests of formats.
sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))


@pytest.fixture(autouse=True)
def no_grad(request):
    """Maps and reference outputs need no graph; modules that train set TRAINS."""
    with torch.set_grad_enabled("TRAINS" in vars(request.module)):
        yield
