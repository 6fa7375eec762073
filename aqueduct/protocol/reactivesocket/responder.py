"""The responder of one side: the streams that the peer has requested, and what is sent on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.errors import LocalProtocolError, RemoteProtocolError, SequenceError
from aqueduct.protocol.reactivesocket import events, reasons
from aqueduct.protocol.reactivesocket.cost import FRAME_COST, STREAM_COST, length_of
from aqueduct.protocol.reactivesocket.demand import Demand, check_initial, check_more
from aqueduct.protocol.reactivesocket.outbox import FrameQueue, ReactiveOutbox
from aqueduct.protocol.reactivesocket.state import RESPONDER, ResponderInput, ResponderState

__all__ = ["ReactiveResponder", "RespondingStream"]


class RespondingStream:
    """A stream at its responder: the items that it may send."""

    __slots__ = ("demand", "kind", "queue", "state")

    def __init__(self, kind: int, items: int, queue: FrameQueue) -> None:
        self.kind = kind
        self.demand = Demand(items)
        self.queue = queue
        self.state = ResponderState.CLOSED
        self.change(ResponderInput.REQUEST)

    def change(self, given: ResponderInput) -> None:
        """Something happens."""
        self.state = RESPONDER[self.state, given]


class ReactiveResponder:
    """The streams that the peer has requested and that have not ended."""

    def __init__(
        self, settings: Settings, outbox: ReactiveOutbox, reported: list[events.Event]
    ) -> None:
        self._settings = settings
        self._outbox = outbox
        self._events = reported
        self.streams: dict[int, RespondingStream] = {}
        self.unasked_streams = 0
        """Streams on which nothing may be sent until the peer asks for it."""
        self._unasked: OrderedDict[int, float] = OrderedDict()
        """Streams that were requested for 0 items and not asked since, with when that is too long.
        All wait as long, so the first is due first."""

    # What comes

    def take_request(
        self, kind: int, stream: int, items: int, data: Any, now: float, *, crowded: str
    ) -> int:
        """A request has come; returns what it costs, 0 if it is not reported.

        ``crowded``: why there is no room for it; empty: there is.
        """
        if stream in self.streams:
            return 0  # RS-R11
        if crowded:
            if kind != frames.REQUEST_FNF:
                self.answer(stream, reasons.REJECTED, crowded)
            return 0
        if kind == frames.REQUEST_RESPONSE:
            items = 1
        try:
            check_initial(items)
        except SequenceError as error:
            self.answer(stream, reasons.INVALID, str(error))
            return 0
        if kind != frames.REQUEST_FNF:
            if len(self.streams) >= self._settings.streams:
                self.answer(
                    stream,
                    reasons.REJECTED,
                    f"{len(self.streams)} streams are open, and no more are served "
                    "(ReactiveSocket.streams)",
                )
                return 0
            # What waits of a stream that is complete leaves before this one's items.
            queue = self._outbox.waits(~stream) or FrameQueue(stream, ~stream)
            self.streams[stream] = RespondingStream(kind, items, queue)
            if not items:
                self.unasked_streams += 1
                self._unasked[stream] = now + self._settings.first_demand
        cost = length_of(data) + FRAME_COST
        if kind == frames.REQUEST_FNF:
            cost += STREAM_COST  # it is at work until it is released, as a stream is until its end
        self._events.append((events.REQUEST, stream, kind, items, data, cost))
        return cost

    def take_more(self, stream: int, items: int) -> None:
        """A REQUEST_N has come."""
        found = self.streams.get(stream)
        if found is None:
            return  # RS-R11
        try:
            check_more(items)
        except SequenceError as error:
            self._abort(stream, found, reasons.INVALID, error)
            return
        found.change(ResponderInput.DEMAND)
        waited = not found.demand.items
        found.demand.add(items)
        self._unasked.pop(stream, None)
        if waited:
            self.unasked_streams -= 1
            self._events.append((events.DEMAND, stream))

    def take_cancel(self, stream: int) -> None:
        """A CANCEL has come: what waits to leave is dropped (RS-18)."""
        found = self.streams.get(stream)
        if found is not None:
            self._end(stream, found, ResponderInput.CANCEL)
            self._events.append((events.CANCELLED, stream))
        queue = self._outbox.waits(~stream)  # also of a stream that is complete
        if queue is not None:
            self._outbox.drop(queue)

    # Time

    def next_deadline(self) -> float | None:
        """When the first stream has waited too long for a REQUEST_N."""
        return next(iter(self._unasked.values()), None)

    def handle_deadline(self, now: float) -> None:
        """Ends the streams that have (RS-R6)."""
        while self._unasked:
            stream, due = next(iter(self._unasked.items()))
            if due > now:
                break
            error = SequenceError(
                f"no REQUEST_N came for {self._settings.first_demand:g} s after a request for 0 "
                "items, which asks for nothing (ReactiveSocket.first_demand)"
            )
            self._abort(stream, self.streams[stream], reasons.CANCELED, error)

    # What is sent

    def demand(self, stream: int) -> int:
        """How many items may be sent; 0 also for a stream that has ended."""
        found = self.streams.get(stream)
        return 0 if found is None else found.demand.items

    def item(self, stream: int, parts: list[Any]) -> bool:
        """Sends an item. False: the stream has ended."""
        found = self.streams.get(stream)
        if found is None:
            return False
        if found.kind == frames.REQUEST_RESPONSE:
            raise LocalProtocolError(f"stream {stream} has one response: complete it with that")
        cut = self._cut(stream, found, parts)
        found.change(ResponderInput.ITEM)
        self._send(found, cut, complete=False)
        return True

    def complete(self, stream: int, parts: list[Any] | None) -> bool:
        """Ends a stream, with a last item unless ``parts`` is None. False: it has ended."""
        found = self.streams.get(stream)
        if found is None:
            return False
        if found.kind == frames.REQUEST_SUB:
            raise LocalProtocolError(
                f"stream {stream} is a subscription, which does not complete (RS-17)"
            )
        cut = None if parts is None else self._cut(stream, found, parts)
        self._end(stream, found, ResponderInput.COMPLETE)
        if cut is None:
            frame = self._outbox.frame(frames.RESPONSE, stream, [], flags=frames.COMPLETE)
            self._outbox.push(found.queue, frame)
        else:
            self._send(found, cut, complete=True)
        return True

    def error(self, stream: int, word: str, text: str) -> bool:
        """Ends a stream with an ERROR. False: it has ended."""
        found = self.streams.get(stream)
        if found is None:
            return False
        frame = self._error(stream, word, text)
        self._end(stream, found, ResponderInput.ERROR)
        self._outbox.push(found.queue, frame)
        return True

    def answer(self, stream: int, word: str, text: str) -> None:
        """An ERROR for what the peer did; stream 0 is the connection."""
        self._outbox.urge(self._error(stream, word, text), answer=True)

    def clear(self) -> None:
        """The connection has ended."""
        self.streams.clear()
        self.unasked_streams = 0
        self._unasked.clear()

    def _error(self, stream: int, word: str, text: str) -> tuple[list[Any], int]:
        data = reasons.encode_reason(word, text, self._outbox.data_most)
        return self._outbox.frame(frames.ERROR, stream, [data])

    def _cut(self, stream: int, found: RespondingStream, parts: list[Any]) -> list[list[Any]]:
        """An item as fragments; its demand counts. LocalProtocolError: it may not be sent."""
        settings = self._settings
        size = size_of(parts)
        if size > settings.item_bytes:
            raise LocalProtocolError(
                f"an item of {size} bytes is above {settings.item_bytes} "
                "(ReactiveSocket.item_bytes)"
            )
        if size > settings.fragments * self._outbox.data_most:
            raise LocalProtocolError(
                f"an item of {size} bytes has more than {settings.fragments} fragments "
                "(ReactiveSocket.fragments)"
            )
        if not found.demand.take():
            raise LocalProtocolError(f"stream {stream} was not asked for an item: wait for DEMAND")
        if not found.demand.items:
            self.unasked_streams += 1
        if size <= self._outbox.data_most:
            return [parts]
        return list(self._outbox.fragments(parts))

    def _send(self, found: RespondingStream, cut: Sequence[list[Any]], *, complete: bool) -> None:
        last = len(cut) - 1
        for at, parts in enumerate(cut):
            flags = frames.BEGIN if at == 0 else 0
            if at == last:
                flags |= frames.END | (frames.COMPLETE if complete else 0)
            frame = self._outbox.frame(frames.RESPONSE, found.queue.stream, parts, flags=flags)
            self._outbox.push(found.queue, frame)

    def _abort(
        self, stream: int, found: RespondingStream, word: str, error: RemoteProtocolError
    ) -> None:
        """Ends a stream for what the peer did (RS-R12)."""
        self._end(stream, found, ResponderInput.ERROR)
        self._outbox.drop(found.queue)
        self.answer(stream, word, str(error))
        self._events.append((events.ABORTED, stream, error))

    def _end(self, stream: int, found: RespondingStream, given: ResponderInput) -> None:
        found.change(given)
        del self.streams[stream]
        if not found.demand.items:
            self.unasked_streams -= 1
        self._unasked.pop(stream, None)
