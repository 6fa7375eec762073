"""Files as record batches, a part at a time, read ahead of their consumer.

A part is a file, or some row groups of a Parquet file, or some batches of an Arrow file. It is read
by pyarrow alone: Spark's JVM sees nothing but its name.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq

from aqueduct.arrow.sizes import batch_bytes as bytes_of
from spark_udfs.files.paths import FileFailed, resolve

__all__ = ["Part", "Prefetcher", "ReadItem", "read"]

MiB: Final = 1 << 20
_ROWS: Final = 128 << 10
"""Of a batch at most: what is encoded as a dictionary grows when it is decoded."""
_STEP: Final = 64
"""Batches are cut at multiples of so many rows, where Arrow need not copy a bitmap."""
_BUFFER: Final = 64 << 10
"""Bytes of a column of a local Parquet file that are read at once."""
_JOIN: Final = 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one call is about."""

    path: str
    """A local path, or a URI that pyarrow.fs knows."""
    groups: tuple[int, ...] | None = None
    """Row groups of a Parquet file, batches of an Arrow file; None: all."""

    def __str__(self) -> str:
        if self.groups is None:
            return self.path
        if len(self.groups) == 1:
            return f"{self.path}, row group {self.groups[0]}"
        return f"{self.path}, {len(self.groups)} row groups from {min(self.groups, default=0)}"


@dataclass(frozen=True, slots=True)
class ReadItem:
    """What a reader gives: first the schema of a part, then its batches, then its end."""

    part: int
    """Its place among the parts."""
    schema: pa.Schema | None = None
    group: int | None = None
    batch: pa.RecordBatch | None = None
    error: FileFailed | None = None

    @property
    def size(self) -> int:
        """Bytes of the batch."""
        return 0 if self.batch is None else bytes_of(self.batch)


def read(
    parts: Sequence[Part],
    columns: Sequence[str] | None,
    batch_bytes: int,
    skipped: Callable[[int], bool] = lambda part: False,
) -> Iterator[ReadItem]:
    """The pieces of ``parts`` in their order. ``skipped``: whether a part is wanted no more."""
    for number, part in enumerate(parts):
        try:
            yield from _read_part(number, part, columns, batch_bytes, skipped)
        except FileFailed as error:
            yield ReadItem(number, error=error)
        yield ReadItem(number)


def _read_part(
    number: int,
    part: Part,
    columns: Sequence[str] | None,
    batch_bytes: int,
    skipped: Callable[[int], bool],
) -> Iterator[ReadItem]:
    if skipped(number):
        return
    group: int | None = None
    try:
        filesystem, path = resolve(part.path)
        with filesystem.open_input_file(path) as source:
            local = isinstance(filesystem, fs.LocalFileSystem)
            opened = _open(source, part, columns, local=local)
            yield ReadItem(number, schema=opened.schema)
            for group in opened.groups:
                for batch in opened.batches(group, batch_bytes):
                    if skipped(number):
                        return
                    yield ReadItem(number, group=group, batch=batch)
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        where = part.path if group is None else f"{part.path}, row group {group}"
        raise FileFailed(f"{where}: {type(error).__name__}: {error}") from error


class _Opened(Protocol):
    """One open file: its schema, what it is divided into, and the batches of that."""

    schema: pa.Schema

    @property
    def groups(self) -> Iterable[int | None]: ...

    def batches(self, group: int | None, batch_bytes: int) -> Iterator[pa.RecordBatch]: ...


def _open(source: Any, part: Part, columns: Sequence[str] | None, *, local: bool) -> _Opened:
    """By the file's first bytes, whatever its name. ``local``: to read costs no round trip."""
    magic = source.read(6)
    source.seek(0)
    if magic[:4] == b"PAR1":
        return _Parquet(source, part, columns, local=local)
    if magic == b"ARROW1":
        return _ArrowFile(source, part, columns)
    if magic[:4] == b"\xff\xff\xff\xff":
        return _ArrowStream(source, part, columns)
    raise FileFailed(f"{part.path}: neither Parquet nor Arrow IPC; it begins with {magic!r}")


class _Parquet:
    def __init__(
        self, source: Any, part: Part, columns: Sequence[str] | None, *, local: bool
    ) -> None:
        # pyarrow would fetch the columns of a whole row group before it decodes them: where each
        # read is a request that hides their latency. A local file would only be copied, to fresh
        # memory as large as the row group, and be out of the processor's caches again.
        buffer_size = _BUFFER if local else 0
        self.file = pq.ParquetFile(source, pre_buffer=not local, buffer_size=buffer_size)
        self.names, self.schema = _projected(self.file.schema_arrow, columns, part.path)
        self.groups = _chosen(part, self.file.num_row_groups)

    def batches(self, group: int | None, batch_bytes: int) -> Iterator[pa.RecordBatch]:
        assert group is not None
        described = self.file.metadata.row_group(group)
        if not described.num_rows:
            return
        rows = _rows(self.schema, described, batch_bytes)
        # In pyarrow's own threads if there are several, as Spark says by OMP_NUM_THREADS: as many
        # as spark.task.cpus. To hand over to a single one would cost more than it gains.
        found = self.file.iter_batches(
            rows, row_groups=[group], columns=self.names, use_threads=pa.cpu_count() > 1
        )
        order: list[int] | None = None
        read = 0
        for batch in found:
            order = order or _order(batch.schema, self.schema)
            read += batch.num_rows
            yield from _cut(_as(batch, self.schema, order), batch_bytes)
        # PyArrow 21 ends without an error where a file was cut.
        if read != described.num_rows:
            raise pa.ArrowInvalid(
                f"{read} of its {described.num_rows} rows could be read; has the file been cut?"
            )


class _ArrowFile:
    def __init__(self, source: Any, part: Part, columns: Sequence[str] | None) -> None:
        whole = pa.ipc.open_file(source)
        names, self.schema = _projected(whole.schema, columns, part.path)
        fields = None if names is None else [whole.schema.get_field_index(name) for name in names]
        self.file = (
            whole
            if fields is None
            else pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        )
        self.groups = _chosen(part, whole.num_record_batches)

    def batches(self, group: int | None, batch_bytes: int) -> Iterator[pa.RecordBatch]:
        batch = self.file.get_batch(group)
        batch = _as(batch, self.schema, _order(batch.schema, self.schema))
        yield from _cut(_sound(batch), batch_bytes)


class _ArrowStream:
    def __init__(self, source: Any, part: Part, columns: Sequence[str] | None) -> None:
        if part.groups is not None:
            raise FileFailed(
                f"{part.path}: an Arrow stream is read as a whole; its batches cannot be chosen"
            )
        self.reader = pa.ipc.open_stream(source)
        _, self.schema = _projected(self.reader.schema, columns, part.path)
        self.groups = (None,)

    def batches(self, group: int | None, batch_bytes: int) -> Iterator[pa.RecordBatch]:
        order = _order(self.reader.schema, self.schema)
        for batch in self.reader:
            yield from _cut(_sound(_as(batch, self.schema, order)), batch_bytes)


def _projected(
    schema: pa.Schema, columns: Sequence[str] | None, path: str
) -> tuple[list[str] | None, pa.Schema]:
    """The names to read (None: all) and the schema of that. Raises FileFailed."""
    schema = schema.remove_metadata()  # what pandas and Spark leave there is not of the data
    if columns is None:
        return None, schema
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise FileFailed(f"{path} has no column {missing[0]!r}; it has {', '.join(schema.names)}")
    return list(columns), pa.schema([schema.field(name) for name in columns])


def _order(found: pa.Schema, wanted: pa.Schema) -> list[int]:
    """Where in ``found`` the columns of ``wanted`` are."""
    names = wanted.names
    if len(set(names)) < len(names):  # names that are there twice go by place
        return list(range(len(names)))
    return [found.get_field_index(name) for name in names]


def _as(batch: pa.RecordBatch, schema: pa.Schema, order: list[int]) -> pa.RecordBatch:
    """The batch's columns in the order of ``schema``, and with its metadata: none."""
    columns = batch.columns
    return pa.RecordBatch.from_arrays([columns[place] for place in order], schema=schema)


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, if all that it says of itself is true. Raises ArrowInvalid.

    Of what is decoded Arrow knows that. From an Arrow file it takes offsets and lengths as they
    stand there, and who follows a wrong one leaves the memory of the column.
    """
    batch.validate(full=True)
    return batch


def _chosen(part: Part, count: int) -> Sequence[int]:
    if part.groups is None:
        return range(count)
    for group in part.groups:
        if not 0 <= group < count:
            raise FileFailed(f"{part.path}: there is no row group {group}; it has {count}")
    return part.groups


def _rows(schema: pa.Schema, described: Any, batch_bytes: int) -> int:
    """How many rows of a row group are about so many bytes."""
    stored = described.total_byte_size / described.num_rows
    fixed = 0.0
    for field in schema:
        with contextlib.suppress(ValueError):  # not of a fixed width
            fixed += field.type.bit_width / 8
    rows = int(batch_bytes / max(fixed, stored, 1.0))
    return max(_STEP, min(_ROWS, rows) // _STEP * _STEP)


def _cut(batch: pa.RecordBatch, batch_bytes: int) -> Iterator[pa.RecordBatch]:
    size = bytes_of(batch)
    if size <= 2 * batch_bytes or batch.num_rows <= _STEP:
        if batch.num_rows:
            yield batch
        return
    rows = max(_STEP, int(batch.num_rows * batch_bytes / size) // _STEP * _STEP)
    for begin in range(0, batch.num_rows, rows):
        yield batch.slice(begin, rows)


class Prefetcher:
    """An iterator over pieces that a thread makes, at most ``limit`` bytes ahead.

    pyarrow decodes without holding the interpreter, so reading goes on while batches are sent.
    """

    def __init__(
        self, make: Callable[[Callable[[int], bool]], Iterator[ReadItem]], *, limit: int
    ) -> None:
        self._limit = limit
        self._ready: deque[ReadItem] = deque()
        self._held = 0
        self._skipped = -1
        self._over = self._closed = False
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(make,), name="aqueduct-files", daemon=True
        )
        self._thread.start()

    def skip(self, part: int) -> None:
        """Of this part and those before it nothing more is wanted but the end."""
        self._skipped = max(self._skipped, part)

    def __iter__(self) -> Iterator[ReadItem]:
        return self

    def __next__(self) -> ReadItem:
        with self._change:
            # Reading a file has no deadline of ours: the file system's errors end the wait.
            while not self._ready and not self._over:
                self._change.wait()
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            piece = self._ready.popleft()
            self._held -= piece.size
            if self._held <= self._limit // 2:  # to wake a thread costs: for several batches
                self._change.notify_all()
            return piece

    def close(self) -> None:
        """Ends the thread as soon as what it reads now has been read."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._thread.join(_JOIN)

    def _run(self, make: Callable[[Callable[[int], bool]], Iterator[ReadItem]]) -> None:
        try:
            for piece in make(lambda part: self._closed or part <= self._skipped):
                with self._change:
                    while self._held >= self._limit and not self._closed:
                        self._change.wait()
                    if self._closed:
                        return
                    self._ready.append(piece)
                    self._held += piece.size
                    self._change.notify_all()
        except BaseException as error:  # noqa: BLE001  it belongs to the other thread
            self._error = error
        finally:
            with self._change:
                self._over = True
                self._change.notify_all()
