"""The tutorial, typed as it stands: every command of it says what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.test_guides import PROGRAM_TEXT

ROOT = Path(__file__).parent.parent.parent
COMMAND = re.compile(r"^```\n\$ ([^\n]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDRESS = "aqueduct+tcp://127.0.0.1:4433"

pytestmark = [pytest.mark.spark, pytest.mark.checkout]


def test_the_tutorial_can_be_typed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    programs = dict(PROGRAM_TEXT.findall(page))
    (served, greeting), *commands = COMMAND.findall(page)
    assert [each.split()[0] for each, _ in commands] == ["aqueduct", "python", "python", "python"]
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
    }
    (tmp_path / "service.py").write_text(programs.pop("service.py"))
    service = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "aqueduct.cli",
            *shlex.split(served.replace(":4433", ":0"))[1:],
        ],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    try:
        line = service.stdout.readline()
        address = line.split()[-1]
        assert line.replace(address, ADDRESS) == greeting
        for name, text in programs.items():
            (tmp_path / name).write_text(text.replace(ADDRESS, address))
        for command, says in commands:
            program, *arguments = shlex.split(command.replace(ADDRESS, address))
            found = (
                [sys.executable] if program == "python" else [sys.executable, "-m", "aqueduct.cli"]
            )
            done = subprocess.run(
                [*found, *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            # Another port may break a line at another place.
            assert done.stdout.replace(address, ADDRESS).split() == says.split()
    finally:
        service.terminate()
        service.wait(30)
        service.stdout.close()
