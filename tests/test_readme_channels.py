"""The README's examples of channels and of bpmux run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize("name", ["channels.py", "calls.py"])
def test_a_program_of_the_readme_runs(name: str, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    program = tmp_path / name
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
