"""`python -m depthdial` is the `depthdial` command."""

from __future__ import annotations

import sys

from depthdial.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
