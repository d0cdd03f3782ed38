"""What the tests of training share; modules beside them can be imported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_folders import new_run  # noqa: E402


@pytest.fixture
def run(tmp_path):
    """A new run."""
    return new_run(tmp_path / "runs", "try-1", provenance={"seed": 3})
