"""The writer of the examples is killed, and its service, and started again: each order is once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import PATIENCE, ROOT

PROGRAM = ROOT / "examples" / "writer.py"
END = 20_000

pytestmark = pytest.mark.checkout


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(PROGRAM), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it says that it tries again
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(120)
def test_orders_are_there_once_whoever_is_killed(tmp_path: Path) -> None:
    address, folder = f"aqueduct+unix://{tmp_path}/s", str(tmp_path / "orders")
    service = start("serve", address, folder)
    try:
        assert address in line(service)
        writer = start("write", address, str(END))
        assert line(writer) == "goes on at order 0"
        assert line(writer).startswith("committed up to")
        writer.kill()
        writer.communicate(timeout=PATIENCE)

        writer = start("write", address, str(END))
        went_on = int(line(writer).removeprefix("goes on at order "))
        assert went_on >= 2000
        assert line(writer).startswith("committed up to")
        service.send_signal(signal.SIGKILL)
        service.communicate(timeout=PATIENCE)
        service = start("serve", address, folder)
        said = writer.communicate(timeout=PATIENCE)[0].splitlines()
        assert said[-1].startswith(f"ok: {END} orders in")

        counted = start("count", folder)
        assert counted.communicate(timeout=PATIENCE)[0] == f"{END} orders, 0 twice\n"
    finally:
        service.kill()
        service.communicate(timeout=PATIENCE)
