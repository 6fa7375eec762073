"""The send half of one stream: buffers by reference until they are acknowledged.

It stands in for aioquic's QuicStreamSender, which copies everything into one bytearray. What it
offers under the same names is what QuicConnection calls; the rest is ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from aioquic.quic.packet import QuicResetStreamFrame
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet

from aqueduct.carriers.contract import Buffer

__all__ = ["SendBuffer", "SendTotals"]

_JOIN_BELOW = 1024  # smaller buffers are joined with their neighbours: fewer slices a packet


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
        "_acked", "_base", "_fin", "_fin_acked", "_fin_pending", "_first", "_fresh", "_lost",
        "_reset_code", "_starts", "_stop", "_stream_id", "_totals", "_views", "_wake",
        "is_finished", "newly_released", "queued", "reset_pending",
    )  # fmt: skip

    buffer_is_empty = True
    """For aioquic: it never has stream data to send; FastConnection has."""

    def __init__(self, stream_id: int, totals: SendTotals, wake: Callable[[int], None]) -> None:
        self.queued = False  # in the connection's queue of streams with data
        self.is_finished = False
        self.reset_pending = False
        self.newly_released = 0
        self._stream_id = stream_id
        self._totals = totals
        self._wake = wake
        self._views: list[memoryview] = []
        self._starts: list[int] = []
        self._first = 0  # views before this index are released
        self._base = 0  # acknowledged up to here
        self._fresh = 0  # sent up to here
        self._stop = 0  # written up to here
        self._lost = RangeSet()
        self._acked = RangeSet()
        self._fin: int | None = None
        self._fin_pending = False
        self._fin_acked = False
        self._reset_code: int | None = None

    # ours

    @property
    def stream_id(self) -> int:
        """The stream's number on the wire."""
        return self._stream_id

    @property
    def closed(self) -> bool:
        """Whether nothing more may be written."""
        return self._fin is not None or self._reset_code is not None

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
        if self._fresh < self._stop or fin:
            self._wake(self._stream_id)

    def sendable(self, limit: int) -> bool:
        """Whether a frame could be made now if the peer lets the stream reach ``limit``."""
        if self._reset_code is not None:
            return False
        if len(self._lost):
            return True
        if self._fresh < self._stop:
            return self._fresh < limit
        return self._fin_pending

    def take_released(self) -> int:
        """Bytes acknowledged since the last call."""
        released, self.newly_released = self.newly_released, 0
        return released

    def parts(self, start: int, stop: int) -> list[memoryview]:
        """The bytes from ``start`` to ``stop`` as slices of what was written."""
        index = bisect_right(self._starts, start, self._first) - 1
        offset = start - self._starts[index]
        view = self._views[index]
        if len(view) - offset >= stop - start:
            return [view[offset : offset + stop - start]]
        parts = [view[offset:]]
        left = stop - start - len(view) + offset
        while left > 0:
            index += 1
            view = self._views[index]
            parts.append(view[:left])
            left -= len(view)
        return parts

    # what QuicConnection calls

    @property
    def highest_offset(self) -> int:
        """The end of what was sent."""
        return self._fresh

    @property
    def next_offset(self) -> int:
        """Where the next frame begins."""
        return self._lost[0].start if len(self._lost) else self._fresh

    def take(self, max_size: int, max_offset: int) -> tuple[int, int, bool] | None:
        """Start, stop and end flag of the next frame; None: nothing may leave."""
        if len(self._lost):
            lost = self._lost[0]
            start, stop = lost.start, min(lost.stop, lost.start + max_size)
            if stop <= start:
                return None
            self._lost.subtract(start, stop)
        elif self._fresh < self._stop:
            start = self._fresh
            stop = min(self._stop, start + max_size, max_offset)
            if stop <= start:
                return None
            self._fresh = stop
        else:
            if not self._fin_pending or max_size < 0:
                return None
            self._fin_pending = False
            return self._stop, self._stop, True
        fin = self._fin == stop
        if fin:
            self._fin_pending = False
        return start, stop, fin

    def on_data_delivery(
        self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool
    ) -> None:
        """A frame was acknowledged or lost."""
        if self._reset_code is not None:
            return
        if delivery is not QuicDeliveryState.ACKED:
            if stop > start:
                self._lost.add(start, stop)
            if fin:
                self._fin_pending = True
            self._wake(self._stream_id)
            return
        if stop > start:
            if start == self._base and not len(self._acked):
                self._release(stop)
            else:
                self._acked.add(start, stop)
                if self._acked[0].start == self._base:
                    self._release(self._acked.shift().stop)
        if fin:
            self._fin_acked = True
        if self._fin_acked and self._base == self._fin:
            self.is_finished = True
            self._totals.finished.append(self)
            self._wake(self._stream_id)

    def reset(self, error_code: int) -> None:
        """Gives the stream up; what was not acknowledged is dropped."""
        if self._reset_code is not None or self.is_finished:
            return
        self._reset_code = error_code
        self.reset_pending = True
        self._totals.queued -= self._stop - self._base
        self._base = self._stop
        self._views.clear()
        self._starts.clear()
        self._first = 0
        self.newly_released = 0
        self._wake(self._stream_id)

    def get_reset_frame(self) -> QuicResetStreamFrame:
        """The frame that tells the peer."""
        assert self._reset_code is not None
        self.reset_pending = False
        return QuicResetStreamFrame(
            error_code=self._reset_code, final_size=self._fresh, stream_id=self._stream_id
        )

    def on_reset_delivery(self, delivery: QuicDeliveryState) -> None:
        """The reset was acknowledged or lost."""
        if delivery is QuicDeliveryState.ACKED:
            self.is_finished = True
        else:
            self.reset_pending = True
        self._wake(self._stream_id)

    def _add(self, view: memoryview) -> None:
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
        if first == len(views):
            views.clear()
            starts.clear()
            first = 0
        elif first > 64 and first * 2 > len(views):
            del views[:first], starts[:first]
            first = 0
        self._first = first


_RELEASED = memoryview(b"")
