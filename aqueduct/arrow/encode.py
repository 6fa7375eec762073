"""Record batches into payloads, without copying their columns.

The IPC writer of pyarrow writes into a Python object that keeps what it is given: for bodies these
are the batch's own buffers, so they must not change until they have left.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import pyarrow as pa

from aqueduct._speedups.arrow.writer import BatchEncoder, Encoded
from aqueduct._speedups.base.buffers import BufferSlice
from aqueduct.arrow.compact import Compactor
from aqueduct.arrow.ipc import (
    ALIGNMENT,
    ROWS_LIMIT,
    SCHEMA,
    adopt,
    first_line,
    summarize,
)
from aqueduct.arrow.layout import BufferLayout, plan, quick_plan
from aqueduct.arrow.schema import check, equal_schemas
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.arrow.views import may_lack_buffers, with_all_buffers
from aqueduct.errors import LocalProtocolError, SchemaMismatch

__all__ = ["Encoded", "Encoder", "Part"]

Part: TypeAlias = bytes | memoryview | BufferSlice
"""A buffer of a payload."""

LONG_BYTES: Final = 4 << 20
"""Bytes of a batch that Arrow itself, not a compiled module, takes long to write or to read."""
LONG_PACKED: Final = 256 << 10
"""Bytes that take long to pack, or to unpack."""
LONG_NODES: Final = 1000
"""Arrays of a batch that take Arrow long to write or to read."""
LONG_ROWS: Final = 1 << 20
"""Rows of a batch that take long if it is a slice, whatever writes it."""
SMALL: Final = 4 << 10
"""Columns of at most so many bytes are copied: that costs less than to keep them apart."""
_TOGETHER: Final = 256
"""Parts of so many bytes are copied, and those that follow each other put together."""
_ZEROS: Final = bytes(ALIGNMENT)
_PREFIX: Final = 8  # the continuation, ff ff ff ff, and the length of the metadata


class Encoder(BatchEncoder):
    """Makes payloads of the batches of one stream, in their order.

    Dictionaries are sent once and again when they change (what was appended alone, if a dictionary
    only grew), so each payload stands on those before it. Extension types must be registered.
    Not for use by several threads at once.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        where: str = "",
        peer: str = "",
        handler: str = "",
        fault: str = "",
    ) -> None:
        """``where`` and ``fault`` are for errors; see ``aqueduct.arrow.schema.check``."""
        super().__init__(schema, None, pa.RecordBatch, pa.ArrowException)
        self._found = quick_plan(schema)
        if self._found is not None:
            self._fast = self._found.writer
        self._where = where or "the batch"
        self._peer = peer
        self._handler = handler
        self._fault = fault
        self._parts: list[pa.Buffer | bytes] = []
        self._compactor: Compactor | None = None
        self._may_lack_buffers = may_lack_buffers(*schema.types)
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def slow(self, batch: Any, compression: str = "") -> bool:
        """Whether encoding this batch may take milliseconds: it then belongs in a thread.

        ``plain`` may have left it alone, or not have been asked.
        """
        if not isinstance(batch, pa.RecordBatch):
            return False  # which ``encode`` refuses
        if self._found is None:
            return True
        if self._fast is None and self._found.layout.nodes > LONG_NODES:
            return True
        if self._fast is not None and not compression:
            return self.lengthy or batch.num_rows > LONG_ROWS
        most = LONG_PACKED if compression else LONG_BYTES
        # The first test is quicker; for a slice it counts the whole.
        return bool(batch.get_total_buffer_size() >= most and batch_bytes(batch) >= most)

    @property
    def independent(self) -> bool:
        """Whether each batch stands alone, so that other streams may use this encoder, too."""
        return not self._plan.dictionaries and self.broken is None

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """The payload of ``batch``. Its column buffers are not copied.

        What cannot be sent as it is, is copied: the validity bitmaps and offsets of a slice that
        begins inside them, and what rows refer to of buffers that have much else (``compact``).
        Raises SchemaMismatch, before anything is written, if the schema of the batch is not the
        encoder's, or if it has nulls, at any depth, where that allows none; LocalProtocolError if
        Arrow cannot write it, and then the encoder is of no use any more.
        """
        if self._found is None:
            self._prepare()
        written = self.plain(batch, quick=False)
        if written is not None:
            return written
        if self.broken is not None:
            raise LocalProtocolError(f"{self._where}: an earlier one failed: {self.broken}")
        if not isinstance(batch, pa.RecordBatch):
            raise LocalProtocolError(
                f"{self._where}: a pyarrow.RecordBatch is wanted, got {type(batch).__name__} "
                "(a Table gives its batches by to_batches())"
            )
        if batch.num_rows > ROWS_LIMIT:
            raise LocalProtocolError(
                f"{self._where} has {batch.num_rows} rows, above the limit of {ROWS_LIMIT}; "
                "send it in slices: batch.slice(offset, length)"
            )
        if self._may_lack_buffers:
            try:
                batch = with_all_buffers(batch)
            except pa.ArrowException as error:
                text = f"{self._where}: Arrow cannot write it: {first_line(error)}"
                raise LocalProtocolError(text) from error
        if not equal_schemas(batch.schema, self.schema):
            check(
                self.schema,
                batch.schema,
                where=self._where,
                peer=self._peer,
                handler=self._handler,
                fault=self._fault,
            )
            batch = adopt(batch, self.schema)
            written = self.plain(batch, quick=False)
            if written is not None:
                return written
        self._check_nulls(batch)
        try:
            batch = self._compact(batch)
            if not self._plan.dictionaries and batch.get_total_buffer_size() <= SMALL:
                return _small(batch)
            if self._writer is None:
                self._writer = self._open()
            self._writer.write_batch(batch)
            return _align(self._parts)
        except Exception as error:
            self.broken = first_line(error)
            if isinstance(error, MemoryError):
                raise
            text = f"{self._where}: Arrow cannot write it: {self.broken}"
            raise LocalProtocolError(text) from error
        finally:
            self._parts.clear()

    @property
    def _plan(self) -> BufferLayout:
        return self._found or self._prepare()

    def _prepare(self) -> BufferLayout:
        found = self._found = plan(self.schema)
        self._fast = found.writer
        return found

    def _check_nulls(self, batch: pa.RecordBatch) -> None:
        try:
            found = self._plan.required.find(batch)
        except ValueError as error:
            raise LocalProtocolError(f"{self._where} is damaged: {error}") from error
        if found is not None:
            what = "column" if found.path in self.schema.names else "field"
            raise SchemaMismatch(
                f"{self._where}: {found}; {self._fault}fill them "
                f"(pyarrow.compute.fill_null), or declare the {what} nullable",
                peer=self._peer,
                handler=self._handler,
                column=found.path,
                wanted=f"{found.type} not null",
                got=f"{found.nulls} nulls",
            )

    def _compact(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        slack = self._plan.slack
        if not slack and batch.num_rows:
            return batch
        if self._compactor is None:
            self._compactor = Compactor(self.schema, slack)
        return self._compactor.compact(batch)

    def _open(self) -> pa.ipc.RecordBatchStreamWriter:
        options = pa.ipc.IpcWriteOptions(
            allow_64bit=True, emit_dictionary_deltas=self._plan.grows_by_deltas
        )
        sink = pa.PythonFile(_Sink(self._parts), "w")
        return pa.ipc.new_stream(sink, self.schema, options=options)


class _Sink:
    """What the IPC writer writes into: it keeps the parts, which for bodies are the columns."""

    closed = False

    def __init__(self, parts: list[pa.Buffer | bytes]) -> None:
        self.write = parts.append

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _small(batch: pa.RecordBatch) -> Encoded:
    """The payload of a batch without dictionaries, as one piece."""
    message = memoryview(batch.serialize()).cast("B")
    length = int.from_bytes(message[4:_PREFIX], "little")
    padding = -(_PREFIX + length) % ALIGNMENT
    payload = b"".join(
        (
            message[:4],
            (length + padding).to_bytes(4, "little"),
            message[_PREFIX : _PREFIX + length],
            _ZEROS[:padding],
            message[_PREFIX + length :],
        )
    )
    return Encoded([payload], len(payload))


def _align(parts: list[pa.Buffer | bytes]) -> Encoded:
    """The parts of some IPC messages, as written, with each body moved to a multiple of 64.

    It knows the format and nothing of how the writer cuts it into parts, except that a body
    begins with a part of its own.
    """
    buffers: list[Part] = []
    size = 0
    place, count = 0, len(parts)
    while place < count:
        head = bytes(parts[place])
        place += 1
        while len(head) < _PREFIX:
            head += bytes(parts[place])
            place += 1
        length = int.from_bytes(head[4:_PREFIX], "little")
        while len(head) < _PREFIX + length:
            head += bytes(parts[place])
            place += 1
        summary = summarize(memoryview(head)[_PREFIX:])
        if summary.kind != SCHEMA:
            padding = -(size + len(head)) % ALIGNMENT
            if padding:
                length += padding
                head = b"".join(
                    (head[:4], length.to_bytes(4, "little"), head[_PREFIX:], _ZEROS[:padding])
                )
            buffers.append(head)
            size += len(head)
        left = summary.body
        size += left
        small: list[pa.Buffer | bytes] = []
        while left > 0:
            part = parts[place]
            place += 1
            left -= len(part)
            if len(part) <= _TOGETHER:  # very many of them would keep all threads busy
                small.append(part)
                continue
            if small:
                buffers.append(b"".join(small))
                small = []
            buffers.append(part if type(part) is bytes else memoryview(part).cast("B"))
        if small:
            buffers.append(b"".join(small))
    return Encoded(buffers, size)
