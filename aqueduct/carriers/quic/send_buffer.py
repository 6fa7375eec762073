"""The send half of one stream: buffers by reference until they are acknowledged.

It stands in for aioquic's QuicStreamSender, which copies everything into one bytearray. What it
offers under the same names is what QuicConnection calls; the rest is ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final

from aioquic.quic.packet import QuicResetStreamFrame
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet

from aqueduct.carriers.contract import Buffer
from aqueduct.carriers.quic.varint import encode_varint

__all__ = ["SendBuffer", "SendTotals"]

_JOIN_BELOW: Final = 1024  # smaller buffers are joined with their neighbours: fewer slices a packet
_SHORT_OFFSET: Final = 0x4000_0000  # an offset takes 4 bytes below it, and 8 from it on
_RELEASED: Final = memoryview(b"")
_ACKED: Final = QuicDeliveryState.ACKED


class SendTotals:
    """What all streams of one connection share."""

    __slots__ = ("finished", "queued", "released")

    def __init__(self) -> None:
        self.finished: list[SendBuffer] = []
        """Streams whose end was acknowledged since this list was last emptied."""
        self.queued = 0
        """Bytes written and not yet acknowledged."""
        self.released: list[SendBuffer] = []
        """Streams with bytes acknowledged since this list was last emptied."""


class SendBuffer:
    """The bytes of one stream from ``write`` to their acknowledgement."""

    __slots__ = (
        "_acked", "_base", "_cursor", "_fin", "_fin_acked", "_fin_pending", "_first", "_frame",
        "_fresh", "_gaps", "_lost", "_reset_code", "_starts", "_stop", "_totals", "_views", "_wake",
        "is_finished", "losses", "newly_released", "number", "queued", "reset_pending", "stream_id",
    )  # fmt: skip

    buffer_is_empty = True
    """For aioquic: it never has stream data to send; FastConnection has."""

    def __init__(self, stream_id: int, totals: SendTotals, wake: Callable[[int], None]) -> None:
        self.stream_id = stream_id
        self.number = -1  # that of the carrier, which sets it
        self.queued = False  # in the connection's queue of streams with data
        self.is_finished = False
        self.reset_pending = False
        self.newly_released = 0
        self.losses = False  # whether anything waits to be sent again
        self._totals = totals
        self._wake = wake
        self._views: list[memoryview] = []
        self._starts: list[int] = []
        self._first = 0  # views before this index are released
        self._cursor = 0  # the view that holds the next fresh byte
        self._base = 0  # acknowledged up to here
        self._fresh = 0  # sent up to here
        self._stop = 0  # written up to here
        self._lost = RangeSet()
        self._acked = RangeSet()
        self._gaps = False  # whether _acked holds anything
        self._fin: int | None = None
        self._fin_pending = False
        self._fin_acked = False
        self._reset_code: int | None = None
        number = encode_varint(stream_id)
        self._frame = b"\x0e" + number, b"\x0f" + number  # offset and length follow

    # ours

    @property
    def closed(self) -> bool:
        """Whether nothing more may be written."""
        return self._fin is not None or self._reset_code is not None

    def drop(self) -> None:
        """The connection is over: nothing leaves any more, and no buffer is kept."""
        self._views.clear()
        self._starts.clear()
        self._first = self._cursor = 0
        self._totals.queued -= self._stop - self._base
        self._base = self._fresh = self._stop
        self._lost = RangeSet()
        self.losses = False

    def append(self, buffers: Sequence[Buffer], fin: bool) -> None:
        """Queues ``buffers`` by reference, and the end of the stream."""
        small: list[Buffer] = []
        for buffer in buffers:
            if len(buffer) < _JOIN_BELOW:
                small.append(buffer)
                continue
            if small:
                self._add(memoryview(b"".join(small)))
                small = []
            self._add(memoryview(buffer).cast("B"))
        if small:
            self._add(memoryview(b"".join(small)))
        if fin:
            self._fin = self._stop
            self._fin_pending = True
        if not self.queued and (self._fresh < self._stop or fin):
            self._wake(self.stream_id)

    def sendable(self, limit: int) -> bool:
        """Whether a frame could be made now if the peer lets the stream reach ``limit``."""
        if self.losses:
            return True
        if self._fresh < self._stop:
            return self._fresh < limit
        return self._fin_pending

    def take_released(self) -> int:
        """Bytes acknowledged since the last call."""
        released, self.newly_released = self.newly_released, 0
        return released

    def frame(self, room: int, limit: int, parts: list[Any]) -> tuple[int, int, bool] | None:
        """Appends a STREAM frame of at most ``room`` bytes that ends at ``limit`` at most.

        Returns the arguments of ``on_data_delivery``, or None if nothing may leave.
        """
        lost = self._lost[0] if self.losses else None
        start = self._fresh if lost is None else lost.start
        room -= len(self._frame[0]) + (6 if start < _SHORT_OFFSET else 10)
        if lost is not None:
            stop = min(lost.stop, start + room)
            if stop <= start:
                return None
            self._lost.subtract(start, stop)
            self.losses = len(self._lost) > 0
        else:
            stop = min(self._stop, start + room, limit)
            if stop <= start:
                if not self._fin_pending or start < self._stop or room < 0:
                    return None
                stop = start
        fin = stop == self._fin
        if fin:
            self._fin_pending = False
        if start < _SHORT_OFFSET:
            place = ((start | 0x8000_0000) << 16 | 0x4000 | (stop - start)).to_bytes(6, "big")
        else:
            place = ((start | 0xC000_0000_0000_0000) << 16 | 0x4000 | (stop - start)).to_bytes(
                10, "big"
            )
        parts.append(self._frame[fin] + place)
        if stop > start:
            if start != self._fresh:
                self._slices(bisect_right(self._starts, start) - 1, start, stop, parts)
            else:
                self._fresh = stop
                self._cursor = self._slices(self._cursor, start, stop, parts)
        return start, stop, fin

    def _slices(self, index: int, start: int, stop: int, parts: list[Any]) -> int:
        """Appends the bytes from ``start`` to ``stop``; returns the view that holds ``stop``."""
        view = self._views[index]
        at = start - self._starts[index]
        end = at + stop - start
        size = len(view)
        while end >= size:
            parts.append(view[at:])
            index += 1
            end -= size
            if not end:
                return index
            at = 0
            view = self._views[index]
            size = len(view)
        parts.append(view[at:end])
        return index

    # what QuicConnection calls

    @property
    def highest_offset(self) -> int:
        """The end of what was sent."""
        return self._fresh

    def on_data_delivery(
        self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool
    ) -> None:
        """A frame was acknowledged or lost."""
        if self._reset_code is not None:
            return
        if delivery is not _ACKED:
            if stop > start:
                self._lost.add(start, stop)
                self.losses = True
            if fin:
                self._fin_pending = True
            self._wake(self.stream_id)
            return
        if stop > start:
            if start == self._base and not self._gaps:
                self._release(stop)
            else:
                self._acked.add(start, stop)
                if self._acked[0].start == self._base:
                    self._release(self._acked.shift().stop)
                self._gaps = len(self._acked) > 0
        if fin:
            self._fin_acked = True
        if self._fin_acked and self._base == self._fin:
            self.is_finished = True
            self._totals.finished.append(self)
            self._wake(self.stream_id)

    def reset(self, error_code: int) -> None:
        """Gives the stream up; what was not acknowledged is dropped."""
        if self._reset_code is not None or self.is_finished:
            return
        self._reset_code = error_code
        self.reset_pending = True
        self._totals.queued -= self._stop - self._base
        self._base = self._stop = self._fresh
        self._views.clear()
        self._starts.clear()
        self._first = self._cursor = 0
        self._lost = RangeSet()
        self.losses = self._fin_pending = False
        self.newly_released = 0
        self._wake(self.stream_id)

    def get_reset_frame(self) -> QuicResetStreamFrame:
        """The frame that tells the peer."""
        assert self._reset_code is not None
        self.reset_pending = False
        return QuicResetStreamFrame(
            error_code=self._reset_code, final_size=self._fresh, stream_id=self.stream_id
        )

    def on_reset_delivery(self, delivery: QuicDeliveryState) -> None:
        """The reset was acknowledged or lost."""
        if delivery is _ACKED:
            self.is_finished = True
        else:
            self.reset_pending = True
        self._wake(self.stream_id)

    def _add(self, view: memoryview) -> None:
        if not view:
            return
        self._views.append(view)
        self._starts.append(self._stop)
        self._stop += len(view)
        self._totals.queued += len(view)

    def _release(self, stop: int) -> None:
        size = stop - self._base
        self._base = stop
        self._totals.queued -= size
        if not self.newly_released:
            self._totals.released.append(self)
        self.newly_released += size
        views, starts, first = self._views, self._starts, self._first
        while first < len(views) and starts[first] + len(views[first]) <= stop:
            views[first] = _RELEASED
            first += 1
        if first > 64 and first * 2 > len(views):
            del views[:first], starts[:first]
            self._cursor -= first
            first = 0
        self._first = first
