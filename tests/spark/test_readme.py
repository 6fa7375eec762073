"""What the README shows can be typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.spark, pytest.mark.checkout]


def test_the_service_and_the_job_of_the_readme_run(tmp_path):
    blocks = re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    programs = dict(blocks)
    assert set(programs) >= {"service.py", "job.py"}
    lines = [line for name in ("service.py", "job.py") for line in programs[name].splitlines()]
    assert sum(bool(line.strip()) for line in lines) < 40
    for name, text in programs.items():
        (tmp_path / name).write_text(text.replace(":4433", ":0"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    service = subprocess.Popen(
        [sys.executable, "-u", "service.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    try:
        address = next(
            word for line in service.stdout for word in line.split() if "fingerprint=" in word
        )
        job = subprocess.run(
            [sys.executable, "job.py", address],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        service.terminate()
        service.wait(30)
        service.stdout.close()
    assert job.returncode == 0, job.stderr
    counts = re.findall(r"\|\s*(\d+)\|\s*(\d+)\|", job.stdout)
    assert counts == [("6", "10"), ("7", "90"), ("8", "900")]
