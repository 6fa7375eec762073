"""The README's example of channels runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.checkout


def test_the_channels_of_the_readme_run(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n# channels\.py\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    program = tmp_path / "channels.py"
    program.write_text(found.group(1))
    run = subprocess.run(
        [sys.executable, str(program)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "b'HELLO'\n"), run.stderr
