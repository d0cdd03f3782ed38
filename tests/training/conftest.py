"""What the tests of training share; modules beside them can be imported."""

import sys
from pathlib import Path

import pytest

from depthdial.training.run_dir import RunDir

sys.path.insert(0, str(Path(__file__).parent))

from run_folders import CONFIG  # noqa: E402


@pytest.fixture
def run(tmp_path):
    """A new run."""
    return RunDir.create(tmp_path / "runs", "try-1", config=CONFIG, provenance={"seed": 3})
