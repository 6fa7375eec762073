"""Programs that tests run and that are no part of Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def installed(name: str) -> str:
    """The path of a program that ``ci/system.sh`` knows. Without it the test is skipped.

    ``.ci/run`` installs it before the tests, so that no test waits for that.
    """
    found = subprocess.run(
        [ROOT / "ci" / "system.sh", name],
        env={**os.environ, "AQUEDUCT_NO_INSTALL": "1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if found.returncode:
        # Not every machine has a browser or tshark. The text says what to type; with CI=true the
        # skip is a failure.
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()
