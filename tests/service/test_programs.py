"""The examples of services run as they stand, and print what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PRINTS = {
    "numpy_model.py": r"(image \d: class \d, score -?\d+\.\d\d\n){3}",
    "tokens.py": (
        r"square: \[9\]\n"
        r"double: \[6\]\n"
        r"square: .* the token of 'guest' is not for handler 'square'; it is for handlers double\n"
        r"double: .* asks for a token, and the call has none; give token=\.\.\.\n"
        r"double: .* does not know the token of the call\n"
    ),
}

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_prints_what_it_should(name: str) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(PRINTS[name], run.stdout), run.stdout
