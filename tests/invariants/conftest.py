"""Models shared by the invariants."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from toys import toy_model  # noqa: E402


@pytest.fixture(scope="session")
def model():
    """The modulated toy, every parameter random."""
    return toy_model()


@pytest.fixture(autouse=True)
def no_grad(request):
    """Invariants of inference need no graph; modules that train set TRAINS."""
    with torch.set_grad_enabled("TRAINS" in vars(request.module)):
        yield
