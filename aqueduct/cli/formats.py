"""Files of record batches: Arrow, Parquet and CSV, read and written batch by batch.

A file that is written has its name once it is complete: until then it is a hidden file beside it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, cast

import pyarrow as pa

from aqueduct.arrow.sizes import batch_bytes
from aqueduct.cli.common import CommandFailed, require_standard_input
from aqueduct.cli.pipe_input import PipeInput
from aqueduct.escaping import escape_lines, one_line

__all__ = ["FORMATS", "STANDARD", "BatchFile", "OutputFile", "format_of"]

STANDARD: Final = "-"
"""Standard input, or standard output."""
FORMATS: Final = ("arrow", "parquet", "csv")

_LEAVING: Final = 1.0  # seconds for threads of pyarrow to leave a pipe
_GRACE: Final = 0.05  # seconds for them to let go of what they have read
_SUFFIXES: Final = {
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
}
_STREAM: Final = ".arrows"  # of Arrow's two formats the one that can only be read from its start
_MAGIC: Final = b"ARROW1"
_BLOCK: Final = 4 << 20  # bytes of CSV that are parsed at once: a longer line may fail
_GROUP_ROWS: Final = 1 << 20
_GROUP_BYTES: Final = 64 << 20  # a row group is in memory until it is written


def format_of(name: str, given: str | None) -> str:
    """The format of a file: what its suffix says, else what is ``given``, else Arrow.

    Raises CommandFailed for a suffix that says nothing, unless a format is given.
    """
    suffix = Path(name).suffix.lower() if name != STANDARD else ""
    found = _SUFFIXES.get(suffix) or given
    if found is None and name != STANDARD:
        raise CommandFailed(
            f"{name}: the suffix does not say what it is; it may be "
            f"{', '.join(_SUFFIXES)}, or give --format"
        )
    found = found or "arrow"
    if found == "parquet" and name == STANDARD:
        raise CommandFailed("Parquet has its index at the end, so it needs a file and not a pipe")
    return found


class BatchFile:
    """A file that is read; ``with`` closes it."""

    def __init__(self, name: str, kind: str, *, rows: int, wanted: pa.Schema | None = None) -> None:
        """``rows``: of a batch at most. ``wanted``: the columns that are read from CSV.

        Raises OSError, and CommandFailed for a file that is not of its kind.
        """
        self.name = "standard input" if name == STANDARD else name
        self.rows: int | None = None
        """In all, where the file says it."""
        self._most = rows
        self._read = 0
        self._size = 0
        self._standard = name == STANDARD
        self._read_ahead = kind == "csv"
        """Whether threads of pyarrow read it."""
        self._pipe: PipeInput | None = None
        self._file: Any
        if self._standard:
            require_standard_input()
            self._pipe = PipeInput(None, sys.stdin.fileno())
        else:
            self._file = Path(name).open("rb", buffering=0)  # noqa: SIM115  `close` closes it
        try:
            if not self._standard:
                status = os.fstat(self._file.fileno())
                if stat.S_ISREG(status.st_mode):
                    self._size = status.st_size
                else:
                    self._pipe = PipeInput(self._file)
            if self._pipe is not None:
                self._file = io.BufferedReader(self._pipe)
                pa.enable_signal_handlers(False)  # its own would not end a read of Python's
            with self._named():
                self.schema, self._batches = getattr(self, f"_open_{kind}")(wanted)
        except BaseException:
            self.close()
            raise

    @property
    def share(self) -> float | None:
        """How much of it is read, from 0 to 1; None: nobody knows."""
        if self.rows:
            return min(self._read / self.rows, 1.0)
        if not self._size:
            return None
        with contextlib.suppress(OSError, ValueError):
            return min(os.lseek(self._file.fileno(), 0, os.SEEK_CUR) / self._size, 1.0)
        return None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Each batch, cut to the rows that one may have. Raises CommandFailed."""
        while True:
            with self._named():
                batch = next(self._batches, None)
            if batch is None:
                if self.rows not in (None, self._read):  # PyArrow 21 has no error for a cut file
                    raise CommandFailed(
                        f"{self.name} cannot be read: {self._read} of its {self.rows} rows came; "
                        "has the file been cut?"
                    )
                return
            self._read += batch.num_rows
            if batch.num_rows <= self._most:
                yield batch
                continue
            for start in range(0, batch.num_rows, self._most):
                yield batch.slice(start, self._most)

    def close(self) -> None:
        """Closes the file. Standard input stays open, and nobody reads it any more.

        It waits until threads of pyarrow have left a pipe, for a second at most. While Python ends,
        it ends each thread that comes back to it. In C++ that would end the process with SIGABRT.
        """
        if self._pipe is None:
            if self._file is not None:
                self._file.close()
            return
        self._pipe.interrupt()
        gone = self._pipe.gone
        self._batches, self._file, self._pipe = iter(()), None, None
        if self._read_ahead and not gone.is_set():
            gone.wait(_LEAVING)
            time.sleep(_GRACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of pyarrow say which file they are about."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:  # pyarrow has both
            raise CommandFailed(f"{self.name} cannot be read: {one_line(error)}") from error

    def _open_arrow(self, wanted: pa.Schema | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if self._pipe is not None:
            if self._file.peek(len(_MAGIC))[: len(_MAGIC)] == _MAGIC:
                raise CommandFailed(
                    f"{self.name} has an Arrow file, which has its index at the end: give its "
                    "name to --in, or pipe an Arrow stream"
                )
        elif self._size and self._file.read(len(_MAGIC)) == _MAGIC:
            file = pa.ipc.open_file(self._file)
            return file.schema, (file.get_batch(each) for each in range(file.num_record_batches))
        elif self._size:
            self._file.seek(0)
        stream = pa.ipc.open_stream(self._file)
        return stream.schema, iter(stream)

    def _open_parquet(self, wanted: pa.Schema | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        from pyarrow import parquet

        if not self._size:
            raise CommandFailed(f"{self.name} is no file of Parquet: it is empty, or no file")
        # Columns are read as they are decoded, not a whole row group at once.
        file = parquet.ParquetFile(self._file, pre_buffer=False, buffer_size=1 << 20)
        self.rows = file.metadata.num_rows
        return file.schema_arrow, file.iter_batches(batch_size=self._most)

    def _open_csv(self, wanted: pa.Schema | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        from pyarrow import csv

        convert = None
        if wanted is not None:
            convert = csv.ConvertOptions(column_types=wanted, include_columns=wanted.names)
        reader = csv.open_csv(
            self._file,
            read_options=csv.ReadOptions(block_size=_BLOCK),
            convert_options=convert,
        )
        if wanted is None:
            return reader.schema, iter(reader)
        # A generator's frame would hold the reader for as long as its error is known.
        return wanted, map(partial(self._fitted, wanted=wanted), reader)

    def _fitted(self, batch: pa.RecordBatch, *, wanted: pa.Schema) -> pa.RecordBatch:
        """The same columns under the schema of the handler, which may want no nulls."""
        for field, column in zip(wanted, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise CommandFailed(
                    f"{self.name} has an empty value in the column {field.name!r}, which may have "
                    "none"
                )
        return pa.RecordBatch.from_arrays(batch.columns, schema=wanted)


class _Terminal(io.RawIOBase):
    """A terminal that gets rows: what a service puts into them does not steer it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(escape_lines(self._decoder.decode(view)).encode())
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def _is_descriptor(name: str) -> bool:
    """Whether a name leads to an open file of this process: ``/dev/stdout``, ``/dev/fd/63``."""
    return os.path.abspath(name).startswith(("/dev/fd/", "/dev/std", "/proc/"))


def _beginning(name: str) -> str:
    """Of a file's name what leaves room for more: names are bounded in bytes."""
    return os.fsencode(name)[:100].decode("utf-8", "ignore")


class OutputFile:
    """A file that is written. At the end of ``with`` it has its name if it was completed."""

    def __init__(self, name: str, kind: str) -> None:
        """Raises OSError where nothing can be written, so that a call does not find that out."""
        self.name = "standard output" if name == STANDARD else name
        self.rows = 0
        """Rows that were written."""
        self._kind = kind
        self._stream = name == STANDARD or Path(name).suffix.lower() == _STREAM
        self._schema: pa.Schema | None = None
        self._writer: Any = None
        self._group: list[pa.RecordBatch] = []
        self._group_rows = self._group_bytes = 0
        self._path: Path | None = None
        self._part: Path | None = None
        self._file: IO[bytes]
        if name == STANDARD:
            self._file = sys.stdout.buffer
            if kind == "csv" and sys.stdout.isatty():
                self._file = cast("IO[bytes]", _Terminal(self._file))
            return
        mode = None
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(name).st_mode
        # A device or a pipe is no file to replace, nor is what a name in /dev or /proc leads to.
        if mode is not None and (not stat.S_ISREG(mode) or _is_descriptor(name)):
            self._stream = True
            self._file = Path(name).open("wb")  # noqa: SIM115  `__exit__` closes it
            return
        path = Path(os.path.realpath(name))  # what a symbolic link leads to is written
        self._path = path
        self._part = path.with_name(f".{_beginning(path.name)}.{secrets.token_hex(4)}.part")
        try:
            self._file = self._part.open("xb")
        except OSError as error:
            # The name of the hidden file would say nothing to its user.
            raise OSError(error.errno, os.strerror(error.errno or 0), name) from None
        if mode is not None:
            os.fchmod(self._file.fileno(), stat.S_IMODE(mode))

    @property
    def replaces(self) -> bool:
        """Whether nothing is seen of it before it is complete."""
        return self._part is not None

    def begin(self, schema: pa.Schema) -> None:
        """Opens it for rows of this schema.

        Raises CommandFailed if the format has no such types.
        """
        self._schema = schema
        with self._named():
            if self._kind == "parquet":
                from pyarrow import parquet

                self._writer = parquet.ParquetWriter(self._file, schema)
            elif self._kind == "csv":
                from pyarrow import csv

                self._writer = csv.CSVWriter(self._file, schema)
            elif self._stream:
                self._writer = pa.ipc.new_stream(self._file, schema)
            else:
                self._writer = pa.ipc.new_file(self._file, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes rows. Parquet keeps them until they make a row group."""
        self.rows += batch.num_rows
        if self._kind == "parquet":
            self._group.append(batch)
            self._group_rows += batch.num_rows
            self._group_bytes += batch_bytes(batch)
            if self._group_rows >= _GROUP_ROWS or self._group_bytes >= _GROUP_BYTES:
                self._write_group()
            return
        with self._named():
            self._writer.write_batch(batch)
            if self._path is None:
                self._file.flush()  # whoever reads a pipe may wait for it

    def complete(self) -> None:
        """All rows were written: the file gets its name."""
        self._write_group()
        with self._named():
            self._writer.close()
            self._file.flush()
            if self._part is None or self._path is None:
                return
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._path)
        self._part = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kind == "parquet" and self._writer is not None:
            with contextlib.suppress(Exception):  # else it complains when it is collected
                self._writer.close()
        if self._part is not None:
            self._part.unlink(missing_ok=True)
        if self.name != "standard output":
            with contextlib.suppress(OSError):  # of a pipe or device without a reader
                self._file.close()

    def _write_group(self) -> None:
        if self._group:
            group, self._group = self._group, []
            self._group_rows = self._group_bytes = 0
            with self._named():
                self._writer.write_table(pa.Table.from_batches(group, self._schema))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of pyarrow say which file they are about."""
        try:
            yield
        except BrokenPipeError:
            raise  # its reader has ended, which is no error
        except (pa.ArrowException, OSError) as error:
            raise CommandFailed(
                f"{self.name} cannot be written as {self._kind}: {one_line(error)}"
            ) from error
