"""Answers as Parquet files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import uuid
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from aqueduct.arrow.sizes import batch_bytes
from spark_udfs.files.paths import FileFailed, base_name, named, resolve
from spark_udfs.files.reader import Part

__all__ = ["Written", "key_of"]

_GROUP_BYTES: Final = 64 << 20
"""Of answers that are kept for one row group."""


def key_of(part: Part) -> str:
    """A short name of a part: the same in every attempt, and no other part's."""
    return hashlib.sha256(repr((part.path, part.groups)).encode()).hexdigest()[:16]


class Written:
    """One file of answers in ``directory``: ``add`` them, then ``commit``; ``close`` in any case.

    Its name is that of the part. Attempts write under names of their own, and the last one that
    commits stays: a task that Spark tries twice leaves one file.
    """

    def __init__(self, directory: str, part: Part, attempt: str) -> None:
        self._filesystem, inner = resolve(directory)
        stem = posixpath.splitext(base_name(part.path))[0]
        name = f"{stem}-{key_of(part)}.parquet"
        self._path = posixpath.join(inner, name)
        unique = f"{attempt or 'none'}-{uuid.uuid4().hex[:8]}"
        self._temporary = posixpath.join(inner, f".{name}.{unique}.tmp")  # Spark passes it by
        self._inner = inner
        self._shown = named(directory, inner, self._path)
        self._writer: Any = None
        self._kept: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Writes ``batch`` with the next row group. Raises FileFailed."""
        self._kept.append(batch)
        self._bytes += batch_bytes(batch)
        if self._bytes >= _GROUP_BYTES:
            self._write()

    def commit(self) -> str | None:
        """Puts the file in its place and returns where that is; None if nothing was added."""
        if self._kept:
            self._write()
        if self._writer is None:
            return None
        try:
            writer, self._writer = self._writer, None
            writer.close()
            self._filesystem.move(self._temporary, self._path)
        except (pa.ArrowException, OSError) as error:
            raise self._failed(error) from error
        return self._shown

    def close(self) -> None:
        """Leaves nothing behind of what was not committed."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()
        with contextlib.suppress(pa.ArrowException, OSError):
            self._filesystem.delete_file(self._temporary)

    def _write(self) -> None:
        kept, self._kept, self._bytes = self._kept, [], 0
        try:
            if self._writer is None:
                self._filesystem.create_dir(self._inner, recursive=True)
                self._writer = pq.ParquetWriter(
                    self._temporary, kept[0].schema, filesystem=self._filesystem
                )
            self._writer.write_table(pa.Table.from_batches(kept))
        except (pa.ArrowException, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> FileFailed:
        return FileFailed(f"{self._shown} cannot be written: {type(error).__name__}: {error}")
