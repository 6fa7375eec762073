"""A service with a table that grows by itself, as a process of its own.

``python -m tests.spark.tables PORT FOLDER``: the table ``log`` has rows 0, 1, 2 ... as far as the
file ``newest`` of the folder says; what it is told by ``commit`` is appended to ``commits``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import aqueduct
from aqueduct.config import Config, Timing
from aqueduct.service.tables import Limit

ENTRIES = pa.schema([("row", pa.int64()), ("text", pa.string())])


def entries(start: int, end: int) -> pa.RecordBatch:
    """The rows from ``start`` on and before ``end``."""
    numbers = range(start, end)
    return pa.RecordBatch.from_arrays(
        [pa.array(numbers, pa.int64()), pa.array([f"row {n}" for n in numbers], pa.string())],
        schema=ENTRIES,
    )


class Log:
    """Rows that are numbered; an offset is the number of the next one."""

    schema = ENTRIES

    def __init__(self, folder: Path, *, step: int = 4) -> None:
        self.folder = folder
        self.step = step
        self.asked: list[tuple[str, Any]] = []

    @property
    def newest(self) -> int:
        """How many rows there are."""
        return int((self.folder / "newest").read_text())

    @newest.setter
    def newest(self, count: int) -> None:
        fresh = self.folder / "newest.tmp"
        fresh.write_text(str(count))
        fresh.rename(self.folder / "newest")

    @property
    def commits(self) -> list[dict[str, int]]:
        """What it was told, in order."""
        file = self.folder / "commits"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def read(self, split: list[int]) -> Iterator[pa.RecordBatch]:
        start, end = split
        self.asked.append(("read", split))
        middle = (start + end) // 2
        yield entries(start, middle)
        yield entries(middle, end)

    def initial(self) -> dict[str, int]:
        return {"row": 0}

    def latest(self, start: dict[str, int], limit: Limit) -> dict[str, int]:
        ends = [self.newest]
        if limit.rows is not None:
            ends.append(start["row"] + limit.rows)
        if limit.until is not None:
            ends.append(limit.until["row"])
        self.asked.append(("latest", limit))
        return {"row": max(start["row"], min(ends))}

    def between(self, start: dict[str, int], end: dict[str, int]) -> list[list[int]]:
        self.asked.append(("between", (start["row"], end["row"])))
        ends = range(start["row"], end["row"], self.step)
        return [[row, min(row + self.step, end["row"])] for row in ends]

    def commit(self, end: dict[str, int]) -> None:
        with (self.folder / "commits").open("a") as file:
            file.write(json.dumps(end) + "\n")


def make(log: Log) -> aqueduct.Service:
    """A service with the table ``log``, and one that is no stream."""
    config = Config(timing=Timing(close_linger=0.2, drain_timeout=1))
    service = aqueduct.Service("logs", config=config)
    service.table("log", log)

    @service.table("plain", schema=ENTRIES)
    def plain() -> Iterator[pa.RecordBatch]:
        yield entries(0, 3)

    return service


if __name__ == "__main__":
    make(Log(Path(sys.argv[2]))).run(f"aqueduct+tcp://127.0.0.1:{sys.argv[1]}")
