"""The service of the examples, in a process of its own."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parent.parent.parent
SERVICE = ROOT / "examples" / "reactivesocket" / "service.py"
PATIENCE = 50.0


@dataclass(frozen=True)
class Running:
    """Where the service of ``examples/reactivesocket`` listens."""

    address: str
    host: str
    port: str
    page: str


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The program, as a reader of the cookbook starts it, but at free ports."""
    ports = ("--port", "0", "--web-port", "0", "--page-port", "0")
    process = subprocess.Popen(
        [sys.executable, str(SERVICE), *ports],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    complaints: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=_each, args=(process.stdout, lines.put)),
        threading.Thread(target=_each, args=(process.stderr, complaints.append)),
    ]
    for reader in readers:
        reader.start()
    try:
        try:
            address = lines.get(timeout=PATIENCE).removeprefix("for programs: ").strip()
            page = lines.get(timeout=PATIENCE).removeprefix("for a browser: ").strip()
        except queue.Empty:
            process.kill()
            readers[1].join(10)
            pytest.fail(f"the service did not start: {''.join(complaints)}")
        host, _, port = address.partition("://")[2].rpartition(":")
        yield Running(address, host, port, page)
    finally:
        process.terminate()
        process.wait(20)
        for reader in readers:
            reader.join(10)
        process.stdout.close()
        process.stderr.close()


def _each(stream: IO[str], take: Callable[[str], object]) -> None:
    for line in stream:
        take(line)
