"""What the tests of the transformers face share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import depthdial.hf
from depthdial.hf.model import DepthdialForCausalLM
from depthdial.model.checkpoint import save_model
from depthdial.model.looped_lm import LoopedLM

for folder in ("formats", "invariants", "hf"):
    # Golden cases and toy models are opened by helpers that stand beside their tests.
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

logging.disable_progress_bar()
depthdial.hf.register()


@pytest.fixture(autouse=True)
def no_grad(request):
    """Comparisons need no graph; modules that train set TRAINS."""
    with torch.set_grad_enabled("TRAINS" in vars(request.module)):
        yield


@pytest.fixture
def opened(tmp_path) -> Callable[..., DepthdialForCausalLM]:
    """Saves a model of ours and opens the folder with transformers."""

    def open_model(model: LoopedLM, name: str = "model", **arguments) -> DepthdialForCausalLM:
        save_model(model, tmp_path / name)
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, **arguments)

    return open_model
