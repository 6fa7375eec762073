"""The service and the Spark job of the README run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "aqueduct+tcp://127.0.0.1:4433"

pytestmark = [pytest.mark.spark, pytest.mark.checkout]


def test_the_service_and_the_job_of_the_readme_run(tmp_path):
    readme = (ROOT / "README.md").read_text()
    programs = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", readme, re.DOTALL))
    assert set(programs) == {"service.py", "job.py"}
    assert sum(bool(line.strip()) for text in programs.values() for line in text.splitlines()) < 20
    (tmp_path / "service.py").write_text(programs["service.py"])
    (command,) = re.findall(r"^\$ aqueduct (serve .*)$", readme, re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    service = subprocess.Popen(
        [sys.executable, "-u", "-m", "aqueduct.cli", *command.replace(":4433", ":0").split()],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    try:
        address = service.stdout.readline().split()[-1]
        assert ADDRESS in programs["job.py"]
        (tmp_path / "job.py").write_text(programs["job.py"].replace(ADDRESS, address))
        job = subprocess.run(
            [sys.executable, "job.py"],
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
