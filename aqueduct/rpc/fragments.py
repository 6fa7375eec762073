"""Payloads larger than a message: cut by the sender, put together in one buffer by the receiver.

A payload above ``Calls.fragment_bytes`` travels as consecutive messages of one ORDERED channel,
each a byte range of it. So the user meets no limit of the channels below, and a batch may be one
row of any size. The receiver takes memory once, for the whole, and has each fragment land in its
place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from aqueduct._speedups.base.buffers import AlignedBuffer
from aqueduct.arrow.encode import Encoded, Part
from aqueduct.config import DEFAULT
from aqueduct.errors import BadCall, BatchTooLarge, LocalProtocolError
from aqueduct.rpc.keys import BATCH, FRAGMENT, Headers, number_of, one_each

__all__ = ["Assembler", "Payload", "batch_headers", "fragments"]

Payload: TypeAlias = bytes | bytearray | memoryview | AlignedBuffer
"""The payload of a message, as it is received."""

_KEYS: Final = frozenset({BATCH, FRAGMENT})


def batch_headers(number: int) -> Headers:
    """The headers of a message that is a whole batch; without payload it is a settled mark.

    It says that the handler needs no more of the batches up to this number.
    """
    return ((BATCH, b"%d" % number),)


def fragments(
    encoded: Encoded, number: int, limit: int = DEFAULT.calls.fragment_bytes
) -> Iterator[tuple[Headers, list[Part]]]:
    """The messages that carry a payload: headers and the payload's buffers, none copied.

    Raises LocalProtocolError if ``limit`` is not above zero.
    """
    if limit < 1:
        raise LocalProtocolError(f"a payload cannot be cut into fragments of {limit} bytes")
    if encoded.size <= limit:
        return iter(((batch_headers(number), encoded.buffers),))
    return _split(encoded, number, limit)


def _split(encoded: Encoded, number: int, limit: int) -> Iterator[tuple[Headers, list[Part]]]:
    name = b"%d" % number
    offset, room = 0, limit
    fragment: list[Part] = []
    for buffer in encoded.buffers:
        rest = memoryview(buffer)
        while rest:
            part, rest = rest[:room], rest[room:]
            fragment.append(part)
            room -= len(part)
            if not room:
                yield _fragment_headers(name, offset, encoded.size), fragment
                offset, room, fragment = offset + limit, limit, []
    if fragment:
        yield _fragment_headers(name, offset, encoded.size), fragment


class Assembler:
    """Puts the payloads of one channel together.

    ``place`` tells the channel where a message is to land, before it does; ``add`` takes each
    message as it is delivered. ``place`` may be ahead of ``add``. It is asked for every message in
    the channel's order, or for none: then what landed elsewhere is copied. For those without the
    header FRAGMENT it need not be asked. Where it gives a place, the message must land there. Both
    belong to the same thread.
    """

    def __init__(
        self,
        batch_limit: int = DEFAULT.calls.batch_limit,
        *,
        where: str = "",
        peer: str = "",
        handler: str = "",
    ) -> None:
        self._limit = batch_limit
        self._where = where
        self._peer = peer
        self._handler = handler
        # Begun by place() and not yet by add(). Only the last may lack bytes: memory that is
        # reserved is at most what has arrived, and one batch more.
        self._placed: deque[_Whole] = deque()
        self._current: _Whole | None = None  # begun by add()

    def place(self, headers: Iterable[tuple[bytes, bytes]], size: int) -> memoryview | None:
        """Where a message of ``size`` bytes is to land; None: anywhere.

        Raises BatchTooLarge above the limit, before memory is taken, and BadCall for headers
        that are not a batch's.
        """
        number, fragment = self._read(headers, size)
        if fragment is None:
            return None
        newest = self._placed[-1] if self._placed else self._current
        if newest is None or newest.placed == newest.total:
            if fragment.offset:
                return None  # out of turn: add() says so
            newest = _Whole(number, fragment.total)
            self._placed.append(newest)
        elif not newest.continues(number, fragment, newest.placed):
            # Only the next bytes are given away: those before may be read already.
            return None
        start, newest.placed = newest.placed, newest.placed + size
        return newest.memory[start : newest.placed]

    def announce(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, int] | None:
        """Where a message begins in a batch that comes in fragments, and its bytes; else None.

        What is wrong with the headers is for ``place`` to say.
        """
        try:
            value = one_each(headers, _KEYS).get(FRAGMENT)
            if value is None:
                return None
            fragment = _read_fragment(value)
        except BadCall:
            return None
        return fragment if fragment.total <= self._limit else None

    def add(
        self, headers: Iterable[tuple[bytes, bytes]], payload: Payload
    ) -> tuple[int, Payload] | None:
        """The number and the whole payload of the batch that this message completes, if it does.

        A settled mark has an empty payload. Raises BatchTooLarge, BadCall for a message out of
        turn, and LocalProtocolError for one that is not where ``place`` wanted it.
        """
        view = memoryview(payload).cast("B")
        number, fragment = self._read(headers, len(view))
        whole = self._current
        if whole is not None and not (
            fragment is not None and whole.continues(number, fragment, whole.added)
        ):
            came = "a whole message"
            if fragment is not None:
                came = f"a fragment at {fragment.offset}/{fragment.total}"
            raise self._bad(
                f"{came} of batch {number} came when the next fragment was due of batch "
                f"{whole.number}, at {whole.added}/{whole.total}"
            )
        if fragment is None:
            return number, payload
        if whole is None:
            if fragment.offset:
                raise self._bad(
                    f"batch {number} begins with a fragment at {fragment.offset}/{fragment.total}"
                )
            whole = self._begin(number, fragment.total, view)
        whole.land(view)
        if whole.added < whole.total:
            self._current = whole
            return None
        self._current = None
        return number, whole.buffer

    def _begin(self, number: int, total: int, view: memoryview) -> _Whole:
        if self._placed and self._placed[0].holds(view, 0):
            return self._placed.popleft()
        return _Whole(number, total)

    def _read(
        self, headers: Iterable[tuple[bytes, bytes]], size: int
    ) -> tuple[int, _Fragment | None]:
        """The batch's number, and which bytes of it these are if not all."""
        try:
            values = one_each(headers, _KEYS)
            if BATCH not in values:
                raise BadCall(f"a message without the header {BATCH.decode()} is no batch")
            number = number_of(values[BATCH], BATCH)
            fragment = _read_fragment(values[FRAGMENT]) if FRAGMENT in values else None
        except BadCall as error:
            raise self._bad(str(error)) from error
        total = size if fragment is None else fragment.total
        if total > self._limit:
            raise BatchTooLarge(
                f"{self._prefix()}batch {number} has {total} bytes, above the limit of "
                f"{self._limit} (Calls.batch_limit); send fewer rows at a time",
                peer=self._peer,
                handler=self._handler,
            )
        if fragment is not None and not 0 < size <= fragment.total - fragment.offset:
            raise self._bad(
                f"a fragment of batch {number} at {fragment.offset}/{fragment.total} has {size} "
                "bytes"
            )
        return number, fragment

    def _bad(self, text: str) -> BadCall:
        return BadCall(self._prefix() + text, peer=self._peer, handler=self._handler)

    def _prefix(self) -> str:
        return f"{self._where}: " if self._where else ""


class _Fragment(NamedTuple):
    offset: int
    total: int


class _Whole:
    """A payload of which fragments come in."""

    __slots__ = ("added", "address", "buffer", "memory", "number", "placed", "total")

    def __init__(self, number: int, total: int) -> None:
        self.number = number
        self.total = total
        self.buffer = AlignedBuffer(total)
        self.memory = memoryview(self.buffer)
        self.address = self.buffer.address
        self.placed = 0
        self.added = 0

    def continues(self, number: int, fragment: _Fragment, offset: int) -> bool:
        return number == self.number and fragment.total == self.total and fragment.offset == offset

    def holds(self, view: memoryview, offset: int) -> bool:
        """Whether ``view`` is this payload's own memory at ``offset``."""
        address: int = pa.py_buffer(view).address
        return address == self.address + offset

    def land(self, view: memoryview) -> None:
        """Takes the next fragment, copying it if it landed elsewhere."""
        start, end = self.added, self.added + len(view)
        if not self.holds(view, start):
            if start < self.placed:
                raise LocalProtocolError(
                    f"a fragment of batch {self.number} at {start}/{self.total} did not land in "
                    "its place; Assembler.place is asked for every message, in order, or for none"
                )
            self.memory[start:end] = view
        self.added = end
        self.placed = max(self.placed, end)


def _read_fragment(value: bytes) -> _Fragment:
    offset, _, total = value.partition(b"/")
    return _Fragment(number_of(offset, FRAGMENT), number_of(total, FRAGMENT))


def _fragment_headers(number: bytes, offset: int, total: int) -> Headers:
    return ((BATCH, number), (FRAGMENT, b"%d/%d" % (offset, total)))
