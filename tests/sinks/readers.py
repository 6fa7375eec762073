"""What a reader sees that is not the sink."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

__all__ = ["parquet_rows"]


def parquet_rows(folder: Path) -> Counter[int]:
    """How often each id is in the folder of a ParquetSink. Reads the notes itself."""
    notes = {path.stem: json.loads(path.read_text()) for path in (folder / "writes").glob("*.json")}
    gone = {run for note in notes.values() for run in note["replaces"]}
    rows: Counter[int] = Counter()
    for run, note in notes.items():
        for name in note["files"] if run not in gone else ():
            rows.update(pq.ParquetFile(folder / "data" / name).read()["id"].to_pylist())
    return rows
