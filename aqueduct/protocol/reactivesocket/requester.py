"""The requester of one side: its streams, and what comes on them."""

from __future__ import annotations

from typing import Any

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.errors import (
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
)
from aqueduct.protocol.reactivesocket import events
from aqueduct.protocol.reactivesocket.cost import FRAME_COST, length_of
from aqueduct.protocol.reactivesocket.demand import UNBOUNDED, Demand
from aqueduct.protocol.reactivesocket.outbox import FrameQueue, ReactiveOutbox
from aqueduct.protocol.reactivesocket.state import REQUESTER, RequesterInput, RequesterState

__all__ = ["ReactiveRequester", "RequestedStream"]

_WHOLE = frames.BEGIN | frames.END
_HIGHEST = (1 << 64) - 1


class RequestedStream:
    """A stream at its requester: the demand that is not met, and the fragments of the next item."""

    __slots__ = ("cost", "demand", "kind", "parts", "queue", "size", "state")

    def __init__(self, kind: int, items: int, queue: FrameQueue) -> None:
        self.kind = kind
        self.demand = Demand(items)
        self.queue = queue
        self.parts: list[Any] | None = None
        """Fragments of an item that is not whole; None: there is none."""
        self.size = 0
        self.cost = 0
        """Of these fragments."""
        self.state = RequesterState.CLOSED
        self.change(RequesterInput.REQUEST)

    def change(self, given: RequesterInput) -> None:
        """Something happens. LocalProtocolError for what may not."""
        after = REQUESTER[self.state, given]
        if after is None:
            raise LocalProtocolError(f"{given.name} on a stream that is {self.state.name}")
        self.state = after

    def take(self, flags: int, data: Any, settings: Settings) -> tuple[list[Any] | None, bool]:
        """A RESPONSE: the item that is whole with it, and whether it completes (RS-R7).

        Raises SequenceError and LimitExceeded for what ends this stream alone.
        """
        begin, end = flags & frames.BEGIN, flags & frames.END
        complete = flags & frames.COMPLETE > 0
        if self.parts is None:
            if end and not begin:
                raise SequenceError("the end of a response that has not begun (RS-R7)")
            size = length_of(data)
            if complete and not begin and not size:
                return None, True
            if not self.demand.take():
                raise SequenceError("an item that was not asked for (RS-R6)")
            if begin and not end:
                self.parts = []
            elif size > settings.item_bytes:
                raise _too_large(size, settings)
            else:
                return [data] if size else [], complete
        elif begin:
            raise SequenceError("the begin of a response inside another one (RS-R7)")
        return self._add(data, settings, whole=end > 0), complete and end > 0

    def _add(self, data: Any, settings: Settings, *, whole: bool) -> list[Any] | None:
        """A fragment: the item, if it is whole."""
        assert self.parts is not None
        size = length_of(data)
        self.size += size
        self.cost += size + FRAME_COST
        if self.size > settings.item_bytes:
            raise _too_large(self.size, settings)
        if len(self.parts) >= settings.fragments:
            raise LimitExceeded(
                f"an item of more than {settings.fragments} fragments (ReactiveSocket.fragments)"
            )
        self.parts.append(data)
        if not whole:
            return None
        parts = [part for part in self.parts if length_of(part)]
        self.forget()
        return parts

    def forget(self) -> None:
        """Lets go of fragments."""
        self.parts = None
        self.size = self.cost = 0


class ReactiveRequester:
    """The streams that this side has requested.

    ``fragments_cost``: what fragments cost of items that are not whole.
    """

    def __init__(
        self,
        settings: Settings,
        outbox: ReactiveOutbox,
        reported: list[events.Event],
        *,
        first: int,
    ) -> None:
        self._settings = settings
        self._outbox = outbox
        self._events = reported
        self._next = first
        self.streams: dict[int, RequestedStream] = {}
        self.fragments_cost = 0

    def request(self, kind: int, items: int | None, parts: list[Any]) -> int:
        """Opens a stream; returns its id. REQUEST_FNF ends it at once (RS-15)."""
        settings = self._settings
        if kind != frames.REQUEST_FNF and len(self.streams) >= settings.streams:
            raise LocalProtocolError(
                f"{len(self.streams)} requests are open; ReactiveSocket.streams is the limit"
            )
        if self._next > _HIGHEST:
            raise LocalProtocolError("no stream id is left; open another connection")
        size = size_of(parts)
        most = self._outbox.data_most - (0 if items is None else 8)
        if size > most:
            raise LocalProtocolError(
                f"a request of {size} bytes; {most} are the most, and a request is not fragmented "
                "(ReactiveSocket.frame_bytes)"
            )
        if items is not None and not 0 <= items <= UNBOUNDED:
            raise LocalProtocolError(f"a request for {items} items; it has 0 to 2^63 - 1 (RS-R6)")
        stream = self._next
        self._next += 2
        queue = FrameQueue(stream, stream)
        self._outbox.push(queue, self._outbox.frame(kind, stream, parts, n=items))
        if kind != frames.REQUEST_FNF:
            demand = 1 if items is None else items
            self.streams[stream] = RequestedStream(kind, demand, queue)
        return stream

    def request_n(self, stream: int, items: int) -> bool:
        """Asks for more items. False: the stream has ended."""
        if not 0 < items <= UNBOUNDED:
            raise LocalProtocolError(f"a REQUEST_N of {items} items; it has 1 to 2^63 - 1 (RS-R6)")
        found = self.streams.get(stream)
        if found is None:
            return False
        if found.kind == frames.REQUEST_RESPONSE:
            raise LocalProtocolError(f"stream {stream} has one response: no more can be asked for")
        found.demand.add(items)
        self._outbox.push_more(found.queue, items)
        return True

    def cancel(self, stream: int) -> bool:
        """Ends a stream. False: it has ended."""
        found = self.streams.get(stream)
        if found is None:
            return False
        self._end(stream, found, RequesterInput.CANCEL)
        # Behind its request, which may wait yet: the peer hears of both.
        self._outbox.push(found.queue, self._outbox.frame(frames.CANCEL, stream, []))
        return True

    def take_response(self, stream: int, flags: int, data: Any) -> int:
        """A RESPONSE has come; returns what its item costs, 0 without one."""
        found = self.streams.get(stream)
        if found is None:
            return 0  # RS-R11
        before = found.cost
        try:
            item, complete = found.take(flags, data, self._settings)
            if found.cost != before:
                self._count(found.cost - before)
        except RemoteProtocolError as error:
            self.fragments_cost -= before
            found.forget()
            self._break(stream, found, error)
            return 0
        cost = 0
        if item is not None:
            cost = size_of(item) + FRAME_COST * max(len(item), 1)
            self._events.append((events.ITEM, stream, item, cost))
            if found.kind == frames.REQUEST_RESPONSE:
                complete = True  # RS-R9
        if complete:
            self._end(stream, found, RequesterInput.COMPLETE)
            self._outbox.drop(found.queue)
            self._events.append((events.COMPLETED, stream))
        else:
            found.change(RequesterInput.ITEM)
        return cost

    def take_error(self, stream: int, data: Any) -> int:
        """An ERROR has come; returns what it costs."""
        found = self.streams.get(stream)
        if found is None:
            return 0  # RS-R11
        self._end(stream, found, RequesterInput.ERROR)
        self._outbox.drop(found.queue)
        cost = length_of(data) + FRAME_COST
        self._events.append((events.ERROR, stream, bytes(data), cost))
        return cost

    def clear(self) -> None:
        """The connection has ended."""
        self.streams.clear()
        self.fragments_cost = 0

    def _count(self, cost: int) -> None:
        most = self._settings.fragments_bytes
        if cost > 0 and self.fragments_cost + cost > most:
            raise LimitExceeded(
                f"fragments of items that are not whole cost more than {most} bytes "
                "(ReactiveSocket.fragments_bytes)"
            )
        self.fragments_cost += cost

    def _break(self, stream: int, found: RequestedStream, error: RemoteProtocolError) -> None:
        """The responder broke the protocol on this stream (RS-R12)."""
        self._end(stream, found, RequesterInput.CANCEL)
        self._outbox.drop(found.queue)
        self._outbox.urge(self._outbox.frame(frames.CANCEL, stream, []), answer=True)
        self._events.append((events.BROKEN, stream, error))

    def _end(self, stream: int, found: RequestedStream, given: RequesterInput) -> None:
        found.change(given)
        self.fragments_cost -= found.cost
        found.forget()
        del self.streams[stream]


def _too_large(size: int, settings: Settings) -> LimitExceeded:
    return LimitExceeded(
        f"an item of {size} bytes is above {settings.item_bytes} (ReactiveSocket.item_bytes)"
    )
