"""Files straight to a service: an executor reads them with pyarrow, and the JVM sees no row.

::

    files = list_files(spark, "/data/flights")
    score = exchange_files("aqueduct://scores.example", "score", columns=["origin", "delay"])
    receipts = files.mapInArrow(score, score.schema)

``exchange_files`` answers with a receipt for each file or part of one, writes the service's answers
as Parquet if it is told where, or gives them to Spark. ``send_files`` is the same for sinks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from aqueduct.arrow.sizes import batch_bytes
from aqueduct.errors import AqueductError, ConfigError
from spark_udfs.calls.partition import CallSpec, leased
from spark_udfs.calls.retry import Tries
from spark_udfs.calls.telemetry import working
from spark_udfs.files.paths import FileFailed
from spark_udfs.files.progress import watch
from spark_udfs.files.reader import Part, Prefetcher, ReadItem, read
from spark_udfs.files.writer import Written, key_of
from spark_udfs.functions.exchange import Exchange, exchange
from spark_udfs.options import argument, unknown
from spark_udfs.worker.awake import idle_limit, kept_awake, without_rows
from spark_udfs.worker.metrics import TaskMetrics, Total
from spark_udfs.worker.pickling import PickledFunction
from spark_udfs.worker.summary import TaskSummary
from spark_udfs.worker.task import here

__all__ = [
    "RECEIPT",
    "FileReading",
    "FileReceipt",
    "FilesFunction",
    "exchange_files",
    "send_files",
]

MiB: Final = 1 << 20
BATCH_BYTES: Final = 4 * MiB
"""Of a batch by default. With half of it threads and processes hand over twice as often."""
OnFailure: TypeAlias = Literal["fail", "report"]

RECEIPT: Final = (
    "path string, row_groups array<int>, rows_in long, rows_out long, batches_in long, "
    "batches_out long, bytes_in long, bytes_out long, seconds double, output string, error string"
)
"""What is told of each part of a file, in Spark's words."""
_COUNTED: Final = "rows_in", "rows_out", "batches_in", "batches_out", "bytes_in", "bytes_out"
_RECEIPT: Final = pa.schema(
    [
        ("path", pa.string()),
        ("row_groups", pa.list_(pa.int32())),
        *((name, pa.int64()) for name in _COUNTED),
        ("seconds", pa.float64()),
        ("output", pa.string()),
        ("error", pa.string()),
    ]
)


def exchange_files(
    address: str | Sequence[str],
    handler: str,
    *,
    columns: Sequence[str] | None = None,
    returns: Literal["receipts", "answers"] = "receipts",
    write: str | None = None,
    on_failure: OnFailure = "fail",
    batch_bytes: int | str = BATCH_BYTES,
    read_ahead: int | str = 16 * MiB,
    progress: bool | None = None,
    **options: Any,
) -> FilesFunction:
    """A function for ``mapInArrow`` over a frame of files: what is in them goes to the service.

    The frame has a column ``path`` and may have ``row_groups`` (see ``list_files``); each row is a
    call of its own, one after the other on the worker's connection.

    - ``address``, ``handler``, and ``options``: as for ``exchange``; its ``columns`` and
      ``columns_mode`` alone have no place here.
    - ``columns``: those that are read, in this order; None: all.
    - ``returns``: ``receipts``, a row for each part (``RECEIPT``), or ``answers``, what the service
      answered, in the order of the rows and of the files.
    - ``write``: a directory, or a URI that pyarrow.fs knows, for the answers as Parquet: a file
      for each part, with a name that every attempt of the part gives it, put there whole by a
      rename.
    - ``on_failure``: ``fail`` ends the task; ``report`` puts the reason into the receipt and goes
      on with the next part.
    - ``batch_bytes`` (4m): about the size of a batch; ``read_ahead`` (16m): bytes that are decoded
      and not yet sent.
    - ``progress``: whether the driver shows a bar on standard error, or in the notebook, while
      tasks run. None: at a terminal and in a notebook. Spark Connect has none.

    Raises ConfigError at once for arguments that cannot work. The function raises FileFailed for
    what cannot be read or written, and what ``exchange`` raises; both name the file.
    """
    if "columns_mode" in options:
        raise ConfigError("columns_mode has no place here: columns= are those that are read")
    returns = argument("returns", returns)
    on_failure = argument("on_failure", on_failure)
    if write is not None:
        argument("write", write)
    if returns == "answers" and (write is not None or on_failure == "report"):
        raise ConfigError(
            "returns='answers' leaves no receipt; write= and on_failure='report' are told in one"
        )
    return FilesFunction(
        exchange(address, handler, **options),
        _reading(columns, on_failure, batch_bytes, read_ahead),
        _ExchangeWork(answers=returns == "answers", write=write),
        argument("progress", progress),
    )


def send_files(
    address: str | Sequence[str],
    handler: str,
    *,
    columns: Sequence[str] | None = None,
    on_failure: OnFailure = "fail",
    batch_bytes: int | str = BATCH_BYTES,
    read_ahead: int | str = 16 * MiB,
    progress: bool | None = None,
    **options: Any,
) -> FilesFunction:
    """The same for a handler of kind ``sink``: a receipt for each part, nothing comes back.

    ``options``: those of ``exchange`` that say whom to call and how; what concerns answers has no
    place here. A sink that is told a part twice (Spark tries tasks again) must know it by the
    call's ``write_key``, which is the same for every attempt of the part.

    ``retries`` (0), ``backoff``, ``backoff_limit``: how often a part whose call broke is read and
    sent again from its beginning, to the next address if there is one, before the task fails, and
    the pauses between. ``deadline`` is for all of that together.
    """
    known = {
        "in_flight", "in_flight_bytes", "deadline", "token", "token_file", "headers",
        "retries", "backoff", "backoff_limit",
        "connection_headers", "tls", "compression", "config",
        "ca", "certificate", "key", "key_password", "fingerprint", "server_name", "verify",
    }  # fmt: skip
    for name in options:
        if name not in known:
            raise unknown(name, sorted(known))
    call = exchange(address, handler, **options)
    if call.calling.is_reactive:
        raise call.calling.not_carried("a sink of files")
    return FilesFunction(
        call,
        _reading(columns, on_failure, batch_bytes, read_ahead),
        _SinkWork(),
        argument("progress", progress),
    )


@dataclass(frozen=True)
class FileReading:
    """How files are read."""

    columns: tuple[str, ...] | None
    report: bool
    batch_bytes: int
    read_ahead: int

    def ahead(self, parts: Sequence[Part]) -> Prefetcher:
        """The pieces of ``parts``, made by a thread."""

        def make(skipped: Callable[[int], bool]) -> Iterator[ReadItem]:
            return read(parts, self.columns, self.batch_bytes, skipped)

        return Prefetcher(make, limit=self.read_ahead)


def _reading(
    columns: Sequence[str] | None, on_failure: str, batch_bytes: int | str, read_ahead: int | str
) -> FileReading:
    return FileReading(
        columns=None if columns is None else argument("columns", columns, "read_columns"),
        report=argument("on_failure", on_failure) == "report",
        batch_bytes=argument("batch_bytes", batch_bytes),
        read_ahead=argument("read_ahead", read_ahead),
    )


@dataclass
class FileReceipt:
    """What one part came to."""

    part: Part
    rows_in: int = 0
    rows_out: int = 0
    batches_in: int = 0
    batches_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    output: str | None = None
    error: str | None = None
    began: float = field(default_factory=time.monotonic)

    def sent(self, batch: pa.RecordBatch) -> None:
        """Counts a batch that was read."""
        self.rows_in += batch.num_rows
        self.batches_in += 1
        self.bytes_in += batch_bytes(batch)

    def answered(self, batch: pa.RecordBatch) -> None:
        """Counts an answer."""
        self.rows_out += batch.num_rows
        self.batches_out += 1
        self.bytes_out += batch_bytes(batch)

    def to_batch(self) -> pa.RecordBatch:
        """One row of RECEIPT."""
        groups = self.part.groups
        row = {name: getattr(self, name) for name in _RECEIPT.names if hasattr(self, name)}
        row["path"] = self.part.path
        row["row_groups"] = None if groups is None else list(groups)
        row["seconds"] = time.monotonic() - self.began
        return pa.RecordBatch.from_pylist([row], schema=_RECEIPT)


class _Input:
    """The batches of one part, out of the pieces of all."""

    def __init__(self, number: int, receipt: FileReceipt, ahead: Prefetcher) -> None:
        self.receipt = receipt
        self.schema: pa.Schema | None = None
        self._number = number
        self._ahead = ahead
        self._groups: list[tuple[int, int | None]] = []  # the first batch of each row group
        self._over = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (batch := self._next()) is not None:
            self.receipt.sent(batch)
            yield batch
            del batch  # it is not to live until the next has been read

    def _next(self) -> pa.RecordBatch | None:
        while not self._over:
            piece = next(self._ahead)
            if piece.error is not None:
                raise piece.error
            if piece.batch is not None:
                if not self._groups or self._groups[-1][1] != piece.group:
                    self._groups.append((self.receipt.batches_in, piece.group))
                return piece.batch
            if piece.schema is not None:
                self.schema = piece.schema
            else:
                self._over = True
        return None

    def place(self, error: AqueductError) -> str:
        """Where the failed batch came from, if the error has its number; else the part."""
        batch, found = getattr(error, "batch", None), None
        if isinstance(batch, int):
            for first, group in self._groups:
                found = group if first <= batch else found
        part = self.receipt.part
        return str(part) if found is None else f"{part.path}, row group {found}"

    def again(self, ahead: Prefetcher) -> Iterator[pa.RecordBatch]:
        """The batches once more, from the first one, out of pieces of this part alone."""
        self.drain()
        self._ahead, self._number, self._groups, self._over = ahead, 0, [], False
        self.receipt.rows_in = self.receipt.batches_in = self.receipt.bytes_in = 0
        return iter(self)

    def drain(self) -> None:
        """Passes by what is left of the part."""
        self._ahead.skip(self._number)
        while not self._over:
            with contextlib.suppress(FileFailed):
                self._next()


@dataclass(frozen=True)
class _ExchangeWork:
    """The part goes through an exchange; the answers go to Spark, to a file, or nowhere."""

    answers: bool
    write: str | None

    @property
    def name(self) -> str:
        return "exchange_files"

    @property
    def receipts(self) -> bool:
        return not self.answers

    def send(
        self, call: Exchange, entry: _Input, reading: FileReading
    ) -> Generator[pa.RecordBatch]:
        receipt = entry.receipt
        call = replace(call, calling=_calling(call, receipt.part))
        written = None
        if self.write is not None:
            written = Written(self.write, receipt.part, here().attempt_key)
        try:
            # Only what goes to Spark takes Spark's types.
            work = call if self.answers else call.answers
            with contextlib.closing(work(iter(entry))) as answers:
                for answer in answers:
                    receipt.answered(answer)
                    if written is not None:
                        written.add(answer)
                    elif self.answers:
                        yield answer
            if written is not None:
                receipt.output = written.commit()
        finally:
            if written is not None:
                written.close()


@dataclass(frozen=True)
class _SinkWork:
    """The part goes to a sink; nothing comes back."""

    @property
    def name(self) -> str:
        return "send_files"

    @property
    def receipts(self) -> bool:
        return True

    def send(
        self, call: Exchange, entry: _Input, reading: FileReading
    ) -> Generator[pa.RecordBatch]:
        yield from ()
        source = iter(entry)
        first = next(source, None)
        if first is None:
            return
        source = itertools.chain((first,), source)
        part, place, numbers = entry.receipt.part, here(), TaskMetrics()
        own = _calling(call, part)
        with (
            working(
                own, tally=call.tally, trace=call.trace, place=place, numbers=numbers
            ) as calling,
            contextlib.ExitStack() as stack,
        ):
            tries = Tries(calling, place, part)
            while not self._sent(tries, source, first.schema, entry.receipt, numbers):
                ahead = stack.enter_context(contextlib.closing(reading.ahead((part,))))
                stack.callback(entry.drain)  # before its reader is closed
                source = entry.again(ahead)

    def _sent(
        self,
        tries: Tries,
        batches: Iterator[pa.RecordBatch],
        schema: pa.Schema,
        receipt: FileReceipt,
        numbers: TaskMetrics,
    ) -> bool:
        """Whether the call ended well; False: it broke, and there may be another."""
        calling, place = tries.calling, tries.place
        try:
            with leased(calling, place=place, numbers=numbers, skip=tries.failures) as client:
                client.sink(
                    calling.handler,
                    batches,
                    schema=schema,
                    in_flight=calling.in_flight,
                    in_flight_bytes=calling.in_flight_bytes,
                    compression=calling.compression,
                    on_end=numbers.moved,
                    **tries.head(),
                )
        except AqueductError as error:
            tries.failed(error)
            numbers.retries += 1
            return False
        finally:
            numbers.batches_sent, numbers.rows_sent = receipt.batches_in, receipt.rows_in
        return True


def _calling(call: Exchange, part: Part) -> CallSpec:
    """With a write key of the part's own: its attempts are those of one unit of work."""
    calling = call.calling
    return replace(calling, write_key=f"{calling.write_key}/{key_of(part)}")


@dataclass(frozen=True)
class FilesFunction(PickledFunction):
    """What ``exchange_files`` and ``send_files`` return, for ``mapInArrow``.

    It is called with batches of ``path`` and ``row_groups``, and gives receipts or answers.
    """

    call: Exchange
    reading: FileReading
    work: _ExchangeWork | _SinkWork
    progress: bool | None = False

    @property
    def __name__(self) -> str:  # Spark shows it in plans, by which its queries are found
        return f"{self.work.name}_{self.call.handler}_{self.call.write_key[:8]}"

    def __reduce__(self) -> Any:
        title = f"{self.work.name} {self.call.handler!r}"
        watch(self.__name__, title, self.call.tally, self.progress)
        return super().__reduce__()

    @property
    def schema(self) -> str:
        """Of the receipts, for ``mapInArrow``."""
        return RECEIPT

    @property
    def numbers(self) -> Total:
        """What was counted of the parts that ended well so far; to be read on the driver."""
        return self.call.numbers

    def summary(self) -> TaskSummary:
        """``numbers`` in a few lines for people; each part counts as a task."""
        return self.call.summary()

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        """Receipts, or answers."""
        results = self._results(rows)
        # A receipt comes at the end of a part. Answers are kept apart by the exchange itself.
        limit = idle_limit() if self.work.receipts else None
        if limit is None:
            return results
        return kept_awake(results, limit, lambda: without_rows(_RECEIPT))

    def _results(self, rows: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
        parts = _parts(rows)
        with contextlib.closing(self.reading.ahead(parts)) as ahead:
            for number, part in enumerate(parts):
                receipt = FileReceipt(part)
                entry = _Input(number, receipt, ahead)
                try:
                    yield from self.work.send(self.call, entry, self.reading)
                except AqueductError as error:
                    located = _located(error, entry.place(error))
                    if not self.reading.report:
                        raise located from error.__cause__
                    receipt.error = str(located)
                entry.drain()
                if self.work.receipts:
                    yield receipt.to_batch()


def _parts(rows: Iterator[pa.RecordBatch]) -> list[Part]:
    """What the task is to read. Raises ConfigError for a frame that is not one of files."""
    parts = []
    for batch in rows:  # all of it: Spark keeps a worker only if its input was read
        if "path" not in batch.schema.names:
            raise ConfigError(
                f"the frame of files has the columns {', '.join(batch.schema.names)}; it must have "
                "path, and may have row_groups: see list_files"
            )
        paths = batch.column(batch.schema.get_field_index("path")).to_pylist()
        groups: list[list[int] | None] = [None] * len(paths)
        if "row_groups" in batch.schema.names:
            groups = batch.column(batch.schema.get_field_index("row_groups")).to_pylist()
        for path, chosen in zip(paths, groups, strict=True):
            if not isinstance(path, str):
                raise ConfigError(f"a path in the frame of files is {path!r}; it must be text")
            parts.append(Part(path, None if chosen is None else tuple(chosen)))
    return parts


def _located(error: AqueductError, where: str) -> AqueductError:
    """A copy of ``error`` that names the file."""
    if isinstance(error, FileFailed):
        return error  # it does already
    error = copy.copy(error)
    error.args = (f"{where}: {error}", *error.args[1:])
    return error
