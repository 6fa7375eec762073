"""A sink of Parquet files with an atomic commit.

A folder holds ``data/WRITE/ATTEMPT.parquet`` and ``writes/WRITE.json``. An attempt writes a file
and syncs it; a commit syncs one small file that names those of its write, and renames it to its
place in ``writes``. That rename is the moment: before it nobody reads any row of the write, after
it everybody reads all of them. The same file is the note that the write is committed, so a
repeated commit finds it and does nothing. One that overwrites names those whose place it takes.
It holds what a writer gives with its commit, too, and tells it when the writer asks.

Read by ``files(folder)`` or ``read(folder)``; from Spark, ``spark.read.parquet(*files(folder))``.
Several processes may share the folder if its file system has ``flock``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aqueduct.service.context import Call
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey

__all__ = ["ParquetAttempt", "ParquetSink", "files", "read"]

ROWS = 128 << 10
BYTES = 64 << 20


class ParquetSink:
    """Parquet files in a folder, committed write by write."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.data = self.folder / "data"
        self.writes = self.folder / "writes"
        for place in (self.data, self.writes):
            place.mkdir(parents=True, exist_ok=True)

    def open(self, attempt: Attempt, call: Call) -> ParquetAttempt:
        """A file of the attempt's own; nobody reads it before it is committed."""
        return ParquetAttempt(self, attempt, call.schema)

    def commit(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], note: Any = None
    ) -> dict[str, Any]:
        """Makes the files of all of ``prepared`` visible in one stroke, and keeps ``note``."""
        with self.locked():
            place = self.writes / f"{write_key.id}.json"
            if place.exists():
                return {"repeated": True, "rows": json.loads(place.read_text())["rows"]}
            names = []
            for each in prepared:
                path = self.place(each.attempt)
                wanted = each.receipt.get("bytes") if isinstance(each.receipt, dict) else None
                if not path.exists() or path.stat().st_size != wanted:
                    raise RuntimeError(
                        f"{path} is not there as {each.attempt} prepared it (it was aborted, or "
                        "nobody committed it in time), so nothing of the write is committed"
                    )
                names.append(str(path.relative_to(self.data)))
            rows = sum(int(each.receipt["rows"]) for each in prepared)
            gone = replaced_writes(self.writes) if write_key.overwrite else set()
            there = (
                {path.stem for path in self.writes.glob("*.json")} if write_key.overwrite else set()
            )
            content = {
                "write_key": write_key.key,
                "rows": rows,
                "files": names,
                "note": note,
                "replaces": sorted(there - gone),
            }
            self.publish(place, json.dumps(content))
            for each in prepared:
                self.place(each.attempt).with_suffix(".json").unlink(missing_ok=True)
            for former in gone:  # not those replaced now: somebody may be reading them
                self.remove_files(former)
            return {"repeated": False, "rows": rows}

    def committed(self, write_key: WriteKey) -> dict[str, Any] | None:
        """What was given with a commit; None: it is not there."""
        place = self.writes / f"{write_key.id}.json"
        return {"note": json.loads(place.read_text()).get("note")} if place.exists() else None

    def publish(self, note: Path, content: str) -> None:
        """The moment of the commit: ``note`` is there as a whole or not at all."""
        draft = note.with_suffix(".draft")
        with draft.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(note)
        sync_folder(self.writes)

    def abort(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> None:
        """Removes what these attempts wrote; files of a committed write stay."""
        with self.locked():
            note = self.writes / f"{write_key.id}.json"
            committed = set(json.loads(note.read_text())["files"]) if note.exists() else set()
            for each in prepared:
                path = self.place(each.attempt)
                if str(path.relative_to(self.data)) not in committed:
                    path.unlink(missing_ok=True)
                    path.with_suffix(".part").unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
            self.remove_if_empty(self.data / write_key.id)

    def leftovers(self) -> Iterator[tuple[PreparedAttempt, float]]:
        """Attempts that still have the note of an attempt: a commit removes it."""
        for note in self.data.glob("*/*.json"):
            try:
                attempt = Attempt.from_json(note.read_text())
                touched = max(path.stat().st_mtime for path in note.parent.glob(f"{note.stem}.*"))
            except (OSError, ValueError):  # removed meanwhile
                continue
            yield PreparedAttempt(attempt), max(0.0, time.time() - touched)

    def place(self, attempt: Attempt) -> Path:
        """Where the attempt's rows are. Made of ids alone: nothing that a client says is a path."""
        return self.data / attempt.write_key.id / f"{attempt.id}.parquet"

    def remove_files(self, write: str) -> None:
        """Removes the files of a write that was replaced; its note stays, as it may come again."""
        for path in (self.data / write).glob("*.parquet"):
            path.unlink(missing_ok=True)
        self.remove_if_empty(self.data / write)

    def remove_if_empty(self, folder: Path) -> None:
        """With the lock held: an attempt that opens makes the folder and its note under it."""
        with contextlib.suppress(OSError):  # others have files in it, or it is gone
            folder.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One commit or abort at a time, in all processes."""
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class ParquetAttempt:
    """One file that is being written."""

    def __init__(self, sink: ParquetSink, attempt: Attempt, schema: pa.Schema) -> None:
        self.sink = sink
        self.attempt = attempt
        self.path = sink.place(attempt)
        self.part = self.path.with_suffix(".part")
        self.rows = 0
        self.waiting: list[pa.RecordBatch] = []
        with sink.locked():
            self.path.parent.mkdir(exist_ok=True)
            self.path.with_suffix(".json").write_text(attempt.to_json())  # for ``leftovers``
        self.file = self.part.open("wb")
        self.writer = pq.ParquetWriter(self.file, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Batches are gathered into row groups."""
        self.waiting.append(batch)
        self.rows += batch.num_rows
        if (
            sum(each.num_rows for each in self.waiting) >= ROWS
            or sum(each.nbytes for each in self.waiting) >= BYTES
        ):
            self.flush()

    def flush(self) -> None:
        """Writes what was gathered as one row group."""
        if self.waiting:
            self.writer.write_table(pa.Table.from_batches(self.waiting))
            self.waiting.clear()

    def prepare(self) -> dict[str, int]:
        """The file is complete, and would survive the loss of power."""
        self.flush()
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        size = self.file.tell()
        self.file.close()
        self.part.replace(self.path)
        sync_folder(self.path.parent)
        sync_folder(self.sink.data)
        return {"rows": self.rows, "bytes": size}

    def abort(self) -> None:
        """Nothing of it stays."""
        self.waiting.clear()
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self.writer.close()  # else it would write its end later, into a file that is closed
        self.writer.is_open = False
        self.file.close()
        self.sink.abort(self.attempt.write_key, [PreparedAttempt(self.attempt)])


def files(folder: str | os.PathLike[str]) -> list[str]:
    """The files whose rows count, at this moment."""
    writes = Path(folder) / "writes"
    notes = {path.stem: json.loads(path.read_text()) for path in sorted(writes.glob("*.json"))}
    gone = {replaced for note in notes.values() for replaced in note["replaces"]}
    return [
        str(Path(folder) / "data" / name)
        for write, note in notes.items()
        if write not in gone
        for name in note["files"]
    ]


def read(folder: str | os.PathLike[str]) -> pa.Table | None:
    """All rows that count; None if no write is committed that has any."""
    found = files(folder)
    return (
        pa.concat_tables(map(pq.read_table, found), promote_options="permissive") if found else None
    )


def replaced_writes(writes: Path) -> set[str]:
    """The ids of writes whose place others have taken."""
    return {
        gone for note in writes.glob("*.json") for gone in json.loads(note.read_text())["replaces"]
    }


def sync_folder(folder: Path) -> None:
    """Names in it would survive the loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
