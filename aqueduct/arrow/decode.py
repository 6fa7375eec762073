"""Payloads into record batches that point into them, and nothing else into anything.

Payloads come from a peer. Whatever they hold, the answer is a batch that can be used without fear
or a BadCall; see ``Decoder`` for what is looked at.
"""

from __future__ import annotations

from collections.abc import Container, Sized
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from aqueduct._speedups.arrow.flatbuffer import is_batch
from aqueduct._speedups.arrow.reader import BatchReader
from aqueduct.arrow.compression import Overblown, Unpacking
from aqueduct.arrow.encode import LONG_BYTES, LONG_NODES, LONG_PACKED
from aqueduct.arrow.ipc import (
    DICTIONARY,
    RECORD_BATCH,
    ROWS_LIMIT,
    SCHEMA,
    VERSION_5,
    Layout,
    Summary,
    adopt,
    first_line,
    serialize_schema,
    summarize,
)
from aqueduct.arrow.layout import BufferLayout, plan, quick_plan
from aqueduct.config import DEFAULT
from aqueduct.errors import BadCall, BatchTooLarge, CallError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Checks", "Decoder"]

_LONG_ALWAYS: Final = 64 << 20
"""Bytes of a payload that takes long to decode in any case."""

Checks: TypeAlias = Literal["layout", "memory", "full"]
"""How closely a received batch is looked at; see ``Decoder``."""


_NO_THREAD: Final = "Failed to launch worker thread"
"""What Arrow says if there is no memory for the stack of one of its threads."""


class Decoder:
    """Makes batches of the payloads of one stream, in their order, without copying columns.

    ``checks`` says how closely a batch is looked at, beyond what Arrow does in reading it:

    - ``"layout"``: the sizes of all buffers (under a microsecond). Reading a column of a hostile
      peer may still crash the process. For peers that are trusted like this program.
    - ``"memory"``, the default: also every offset, index and run, so that no value lies outside
      the payload (about 2 us a MiB where there are strings, nothing where there are none; 10 us
      where types are nested in unions, dictionaries and the like).
    - ``"full"``: also text is UTF-8, decimals and times are in range (about 80 us a MiB).

    A payload that is not what it should be raises BadCall; so do nulls, at any depth, where the
    schema allows none. If the schema has dictionaries, the
    stream cannot go on after that, and every later call raises the same. What has been sent of
    dictionaries and not been replaced may reach ``dictionary_limit`` bytes, then BatchTooLarge.
    So may what a payload unpacks to, if it is compressed by one of ``compressions``.

    Extension types must be registered. Not for use by several threads at once.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        checks: Checks = "memory",
        dictionary_limit: int = DEFAULT.calls.batch_limit,
        compressions: tuple[str, ...] = (),
        where: str = "",
        peer: str = "",
        handler: str = "",
    ) -> None:
        self.schema = schema
        self._where = where
        self._peer = peer
        self._handler = handler
        self._checks = checks
        self._full = checks == "full"
        self._deep = checks == "memory"
        self._compressions = compressions
        self.unpacks = bool(compressions)
        """Whether payloads may be compressed."""
        self._limit = dictionary_limit
        self._found: BufferLayout | None = None
        self._fast: BatchReader | None = None
        self.reader: BatchReader | None = None
        """What reads most payloads as ``decode`` does; None if there are none it could read.

        What it gives None for, or raises an error at, is for ``decode``.
        """
        self._stream: _DictionaryStream | None = None
        self._broken: _Fault | None = None
        if (found := quick_plan(schema)) is not None:
            self._use(found)

    def slow(self, payload: Sized) -> bool:
        """Whether decoding this payload may take milliseconds: it then belongs in a thread.

        ``len(payload)`` counts bytes.
        """
        size = len(payload)
        if self._found is None or size >= _LONG_ALWAYS:
            return True
        if self._compressions and size >= LONG_PACKED:
            return True
        if self._fast is not None and not self._full:
            return False
        return size >= LONG_BYTES or self._found.layout.nodes > LONG_NODES

    def unpacked_bytes(self, payload: ReadableBuffer) -> int:
        """The bytes that ``payload`` will take beside itself, as its compressed buffers say.

        0 if it is not compressed, or if ``decode`` refuses it before it takes memory.
        """
        buffer, claimed = pa.py_buffer(payload), 0
        unpacking = Unpacking(self._compressions, self._limit, buffer.size)
        source = pa.BufferReader(_copied(buffer) if buffer.address % 8 else buffer)
        try:
            while source.tell() < source.size():
                message = pa.ipc.read_message(source)
                if summarize(message.metadata).compressed:
                    claimed += unpacking.admit(message.metadata, message.body)
        except Exception:  # noqa: BLE001  ``decode`` says what is wrong
            return 0
        return claimed

    @property
    def independent(self) -> bool:
        """Whether each batch stands alone, so that other streams may use this decoder, too."""
        return not self._plan.dictionaries

    def decode(
        self,
        payload: ReadableBuffer,
        *,
        number: int | None = None,
    ) -> pa.RecordBatch:
        """The batch of ``payload``, whose memory it keeps and points into.

        ``number`` is the batch's, for the text of errors. Raises BadCall and BatchTooLarge.
        """
        if self._broken is not None:
            raise self._broken.error()
        if self._found is None:
            self._prepare()
        try:
            if self._fast is not None:
                batch = self._fast.read(payload)
                if batch is not None:
                    if self._full:
                        batch.validate(full=True)
                    return batch
            try:
                return self._decode(pa.py_buffer(payload))
            except pa.ArrowException as error:
                if _NO_THREAD in str(error):
                    raise MemoryError(first_line(error)) from error
                raise
        except Exception as error:
            if isinstance(error, MemoryError) and self._stream is None:
                raise
            name = "the batch" if number is None else f"batch {number}"
            where = f"{name} of {self._where}" if self._where else name
            kind = BatchTooLarge if isinstance(error, _TooLarge | Overblown) else BadCall
            text = f"{where} cannot be read: {first_line(error)}"
            fault = _Fault(kind, text, self._peer, self._handler)
            if self._stream is not None:
                self._broken = fault
            if isinstance(error, MemoryError):
                raise
            raise fault.error() from error

    @property
    def _plan(self) -> BufferLayout:
        return self._found or self._prepare()

    def _prepare(self) -> BufferLayout:
        return self._use(plan(self.schema))

    def _use(self, found: BufferLayout) -> BufferLayout:
        self._found = found
        if found.columns is not None:
            import_ = pa.RecordBatch._import_from_c
            inside = self._checks != "layout"
            # Nulls that no row shows are nothing to worry about, except in maps: Arrow's own
            # reader refuses those.
            nulls = None if found.maps else found.required.check
            self._fast = BatchReader(found.columns, import_, self.schema, inside, nulls)
            self.reader = None if self._full else self._fast
        if found.dictionaries:
            self._stream = _DictionaryStream(self.schema, found.dictionaries, self._limit)
        return found

    def _decode(self, payload: pa.Buffer) -> pa.RecordBatch:
        if payload.address % 8:  # Arrow expects its numbers on their own boundaries
            payload = _copied(payload)
        source = pa.BufferReader(payload)
        unpacking: Unpacking | None = None
        if self._compressions:
            unpacking = Unpacking(self._compressions, self._limit, payload.size)
        again = self._stream is None  # whether to read it twice costs nothing
        if self._stream is not None:
            message, summary = _next_message(source)
            batch = self._stream.read(
                payload, source, message, summary, self._plan.layout, unpacking
            )
        else:
            message = _read_message(source)
            if not is_batch(message.metadata, *self._plan.layout):
                summary = summarize(message.metadata)
                _check_batch(message, summary, self._plan.layout, unpacking)
                again = not summary.compressed
            _check_end(source)
            batch = pa.ipc.read_record_batch(message, self.schema)
        if self._full:
            batch.validate(full=True)
        else:
            batch.validate()
        physical = self._plan.physical if self._deep else None
        if physical is not None:
            if again:
                twin = pa.ipc.read_record_batch(message, physical)
            else:
                twin = adopt(batch, physical)
            twin.validate(full=True)
        if not 0 <= batch.num_rows <= ROWS_LIMIT:
            # Rows of nothing take no bytes, so nothing else bounds them.
            raise _Malformed(
                f"it says that it has {batch.num_rows} rows; the limit is {ROWS_LIMIT}"
            )
        nulls = self._plan.required.find(batch)
        if nulls is not None:
            raise _Malformed(str(nulls))
        return batch


class _Fault(NamedTuple):
    """An error to be raised again: the exception itself would keep the payload in its frames."""

    kind: type[CallError]
    text: str
    peer: str
    handler: str

    def error(self) -> CallError:
        return self.kind(self.text, peer=self.peer, handler=self.handler)


class _Malformed(Exception):
    """What this module itself finds wrong with a payload; ``Decoder.decode`` says where."""


class _TooLarge(_Malformed):
    """Dictionaries above the limit."""


class _DictionaryStream:
    """Reads batches whose dictionaries came before: pyarrow keeps those in a stream reader only.

    The reader lives as long as the stream of batches. It reads from a file-like object that hands
    out the payload itself.
    """

    def __init__(self, schema: pa.Schema, layouts: dict[int, Layout], limit: int) -> None:
        self._layouts = layouts
        self._limit = limit
        self._sizes: dict[int, int] = {}
        self._source = _Source(pa.py_buffer(serialize_schema(schema)))
        self._reader = pa.ipc.open_stream(pa.PythonFile(self._source, "r"))

    def read(
        self,
        payload: pa.Buffer,
        source: pa.BufferReader,
        message: pa.Message,
        summary: Summary,
        layout: Layout,
        unpacking: Unpacking | None,
    ) -> pa.RecordBatch:
        """The batch of ``payload``, whose first message ``source`` has read."""
        in_place: set[int] = set()
        while summary.kind == DICTIONARY:
            self._admit(message, summary, unpacking)
            if summary.body * 2 > payload.size:
                # The reader keeps dictionaries: a small one would keep the memory of a batch.
                in_place.add(source.tell() - summary.body)
            message, summary = _next_message(source)
        _check_batch(message, summary, layout, unpacking)
        _check_end(source)
        in_place.add(source.tell() - summary.body)
        self._source.serve(payload, in_place)
        try:
            batch = self._reader.read_next_batch()
            if not self._source.exhausted:
                raise _Malformed("it does not hold the dictionaries that the schema needs")
        finally:
            self._source.serve(_NOTHING)
        return batch

    def _admit(self, message: pa.Message, summary: Summary, unpacking: Unpacking | None) -> None:
        wanted = self._layouts.get(summary.dictionary)
        if wanted is None:
            raise _Malformed(f"dictionary {summary.dictionary} is none of the schema's")
        size = _check_message(message, summary, wanted, "dictionary", unpacking)
        kept = self._sizes.get(summary.dictionary, 0) if summary.delta else 0
        self._sizes[summary.dictionary] = kept + size
        total = sum(self._sizes.values())
        if total > self._limit:
            raise _TooLarge(
                f"the dictionaries hold {total} bytes, above the limit of {self._limit} "
                "(Calls.batch_limit)"
            )


_NOTHING: Final = pa.py_buffer(b"")


class _Source:
    """A file-like object whose reads of bodies are slices of the payload, not copies."""

    closed = False

    def __init__(self, payload: pa.Buffer) -> None:
        self.serve(payload)

    def serve(self, payload: pa.Buffer, in_place: Container[int] = ()) -> None:
        """Reads come from ``payload`` from now on, as copies but for those at ``in_place``."""
        self._payload = payload
        self._in_place = in_place
        self._place = 0

    @property
    def exhausted(self) -> bool:
        return bool(self._place == self._payload.size)

    def read_buffer(self, size: int) -> pa.Buffer:
        """What pyarrow calls for metadata and bodies."""
        part = self._payload.slice(self._place, min(size, self._payload.size - self._place))
        if self._place not in self._in_place:
            part = pa.py_buffer(part.to_pybytes())
        self._place += part.size
        return part

    read = read_buffer

    def close(self) -> None:
        pass


def _next_message(source: pa.BufferReader) -> tuple[pa.Message, Summary]:
    message = _read_message(source)
    return message, summarize(message.metadata)


def _read_message(source: pa.BufferReader) -> pa.Message:
    if source.tell() == source.size():
        raise _Malformed("it ends where a record batch is expected")
    return pa.ipc.read_message(source)  # this verifies the metadata


def _check_batch(
    message: pa.Message, summary: Summary, layout: Layout, unpacking: Unpacking | None
) -> None:
    if summary.kind != RECORD_BATCH:
        kind = {DICTIONARY: "dictionary, which the schema does not have,", SCHEMA: "schema"}
        raise _Malformed(
            f"a {kind.get(summary.kind, 'message of another kind')} came instead of a record batch"
        )
    _check_message(message, summary, layout, "record batch", unpacking)


def _check_message(
    message: pa.Message, summary: Summary, wanted: Layout, name: str, unpacking: Unpacking | None
) -> int:
    """Returns how many bytes it holds, unpacked if it is compressed."""
    if summary.version != VERSION_5:
        raise _Malformed(f"the {name} is of metadata version V{summary.version + 1}, not V5")
    if summary.compressed and unpacking is None:
        # A few bytes could ask for any amount of memory.
        raise _Malformed(f"the {name} is compressed, which was not agreed on")
    if summary.layout != wanted:
        raise _Malformed(
            f"the {name} is of another schema: its parts are {_parts(summary.layout)}, "
            f"and the schema's are {_parts(wanted)}"
        )
    if summary.compressed and unpacking is not None:
        return unpacking.admit(message.metadata, message.body)
    return summary.body


def _parts(layout: Layout | None) -> str:
    return "none" if layout is None else f"{layout.nodes} arrays in {layout.buffers} buffers"


def _check_end(source: pa.BufferReader) -> None:
    rest = source.size() - source.tell()
    if rest:
        raise _Malformed(f"{rest} bytes follow the record batch")


def _copied(buffer: pa.Buffer) -> pa.Buffer:
    copy = pa.allocate_buffer(buffer.size)
    memoryview(copy).cast("B")[:] = memoryview(buffer).cast("B")
    return copy
