"""A program that writes into a sink under a key and may be killed at any time.

``python -m tests.sinks.program ADDRESS`` loads everything once. For each line ``KEY FIRST`` of its
input it forks a process that writes what is not there yet, and says how that has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections import Counter

import pyarrow as pa

import aqueduct
from aqueduct.errors import AqueductError
from tests.sinks.killing import IDS, ROOT

COMMITS = 3
ATTEMPTS = 2
"""Of each commit."""


def ids_of(first: int) -> Counter[int]:
    """What is there in the end."""
    return Counter(range(first, first + COMMITS * ATTEMPTS * 4))


def write(client: aqueduct.SyncClient, key: str, first: int) -> None:
    """Writes what is not there yet; the note is the next id."""
    with client.writer("sink", key=key, deadline=60) as writer:
        there = writer.committed
        begin = first if there.note is None else there.note
        assert there.commits == (begin - first) // (ATTEMPTS * 4)
        assert there.rows == begin - first
        for _ in range(there.commits, COMMITS):
            for _ in range(ATTEMPTS):
                for _ in range(2):
                    ids = pa.array([begin, begin + 1], pa.int64())
                    writer.write(pa.record_batch([ids], schema=IDS))
                    begin += 2
                writer.flush()
            assert writer.commit(note=begin).rows == begin - first


def connect(address: str) -> aqueduct.SyncClient:
    """A client; the service may be about to be there again. The test's timeout bounds it."""
    while True:
        try:
            return aqueduct.SyncClient(address)
        except AqueductError:
            time.sleep(0.01)


def main(address: str) -> None:
    print("loaded", flush=True)
    for line in sys.stdin:
        key, first = line.split()
        child = os.fork()
        if not child:
            status = 1
            try:
                with connect(address) as client:
                    write(client, key, int(first))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Programs:
    """Those processes, for tests."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.sinks.program", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._said() == "loaded"

    def run(self, key: str, first: int) -> int:
        """Runs the program to its end; gives the status of its exit, or less the signal."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{key} {first}\n")
        self.process.stdin.flush()
        return int(self._said())

    def end(self) -> None:
        self.process.communicate(timeout=20)

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
