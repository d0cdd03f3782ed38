"""What the tests of the command share: helpers that stand beside the tests of formats."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
