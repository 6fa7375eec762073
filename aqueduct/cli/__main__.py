"""``python -m aqueduct.cli``."""

from __future__ import annotations

import sys

from aqueduct.cli import main

if __name__ == "__main__":
    sys.exit(main())
