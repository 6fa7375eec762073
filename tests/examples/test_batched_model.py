"""The example of a model that takes the rows of many callers at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "batched_model.py"

pytestmark = pytest.mark.checkout


def test_all_callers_but_one_are_answered() -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "20"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    failed, answered, largest = run.stdout.splitlines()
    assert failed == "caller 0: a row has no length"
    assert answered == "20 callers of 8 rows, 19 answered"
    found = re.fullmatch(r"the largest run had the rows of (\d+) callers", largest)
    assert found is not None and 2 <= int(found[1]) <= 20
