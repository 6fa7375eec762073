"""My streams: who may open one now, who waits above the transport, and how much is queued.

Streams are a budget (Flow.streams of the peer): control streams may use all of it, message
streams leave a share of it alone, so that an ack or a cancel never waits for bulk. What has no
stream yet waits here and counts as queued like everything else.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final, cast

from aqueduct._speedups import codec
from aqueduct._speedups.buffers import size_of
from aqueduct._speedups.posting import Ledger, OutStream
from aqueduct.config import Config
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.channels import effects, ids
from aqueduct.protocol.channels.state import SenderState

__all__ = ["OutStream", "Outgoing"]

STALLED_STREAM = 512
"""What a stream that waits above the transport weighs beside its bytes."""

NOTHING: Final = cast("list[Any]", ())
"""What waits in a stream that is open; it cannot be changed."""

GUARDED_FROM = 4096
"""Smaller buffers are copied into the frame when they are sent."""


class Outgoing(Ledger):
    """All of my streams, and the effects that concern them."""

    def __init__(self, config: Config, effects_out: list[effects.Effect]) -> None:
        super().__init__(effects_out, config.flow, config.limits, SenderState.OPEN, config.debug)
        self._flow = config.flow
        self._next = 0
        self._openable = 0
        self._opened_since = 0
        """Streams opened in effects that the carrier has not seen yet."""
        self._most_openable = 0
        self._control_waiting: OrderedDict[OutStream, None] = OrderedDict()
        self._message_waiting: OrderedDict[OutStream, None] = OrderedDict()
        self.version_acknowledged = False
        """Once true, sequences begin without VERSION (AQ-26)."""
        self._held_back = 0
        self.connected = False

    # Inputs

    def openable_changed(self, count: int) -> None:
        """The carrier can now open ``count`` more streams, those in waiting effects included."""
        self._openable = count - self._opened_since
        self._most_openable = max(self._most_openable, count)
        self._open_waiting()

    def stopped(self, number: int) -> OutStream | None:
        """The peer reads no more of a stream; what was queued is gone."""
        stream = self._open.pop(number, None)
        if stream is not None:
            self._kill(stream)
        return stream

    def effects_taken(self) -> None:
        """The carrier sees the effects so far before it counts again."""
        self._opened_since = 0

    # Commands

    def write(self, stream: OutStream, buffers: list[Any], fin: bool = False) -> None:
        """Queues buffers; opens the stream if there is one to be had."""
        if stream.dead:
            return
        size = size_of(buffers)
        if stream.number < 0:
            if stream.waiting or not self._may_open(stream):
                (self._control_waiting if stream.control else self._message_waiting)[stream] = None
                if stream.waiting is NOTHING:
                    stream.waiting = []
                stream.waiting.extend(buffers)
                stream.fin = fin
                self._charge(stream, size)
                return
            buffers, added = self._begin(stream, buffers)
            size += added
        stream.fin = fin
        self._charge(stream, size)
        if self._debug:
            self._guard(stream, buffers)
        self._emit(stream.number, buffers, fin)

    def hold_back(self, stream: OutStream, buffers: list[Any]) -> None:
        """Queues a whole sequence that takes its turn with ``let_go``."""
        stream.waiting = buffers
        stream.fin = True
        self._held_back += 1
        self._charge(stream, size_of(buffers))

    def let_go(self, stream: OutStream) -> None:
        """A sequence that was held back opens its stream when it can."""
        self._held_back -= 1
        (self._control_waiting if stream.control else self._message_waiting)[stream] = None
        self._open_waiting()

    def reset(self, stream: OutStream, code: int) -> None:
        """Gives a stream up, whether or not it was ever opened (AQ-R29 for the code)."""
        if stream.dead:
            return
        if stream.number < 0:
            queue = self._control_waiting if stream.control else self._message_waiting
            if stream in queue:
                del queue[stream]
            elif stream.waiting:
                self._held_back -= 1
        elif self._open.pop(stream.number, None) is not None:
            self._effects.append((effects.RESET, stream.number, code))
        self._kill(stream)

    def clear(self) -> None:
        """The connection is over."""
        self._open.clear()
        self._control_waiting.clear()
        self._message_waiting.clear()
        self.queued = self._control_queued = self._held_back = 0

    @property
    def waiting(self) -> int:
        """Streams that wait above the transport."""
        return len(self._control_waiting) + len(self._message_waiting) + self._held_back

    @property
    def stalled_control(self) -> int:
        """Bytes and streams of acks, closes and the like that the peer does not let leave.

        Nobody waits before these are queued, so a peer that lets none of them out while it makes
        us say ever more has to be stopped.
        """
        return self._control_queued + STALLED_STREAM * len(self._control_waiting)

    @property
    def open(self) -> int:
        """Streams with bytes that have not left, or without their end."""
        return len(self._open)

    # Within

    def _may_open(self, stream: OutStream) -> bool:
        if not self.connected or self._openable <= 0:
            return False
        if stream.control:
            return not self._control_waiting or stream is next(iter(self._control_waiting))
        reserved = int(self._most_openable * self._flow.control_share)
        if self._openable <= reserved or self._control_waiting:
            return False
        return not self._message_waiting or stream is next(iter(self._message_waiting))

    def _emit(self, number: int, buffers: list[Any], fin: bool) -> None:
        """One WRITE for what goes to a stream at once: each costs a call of the carrier."""
        last = self._effects[-1] if self._effects else None
        if last is None or last[0] != effects.WRITE or last[1] != number:
            self._effects.append((effects.WRITE, number, buffers, fin))
            return
        last[2].extend(buffers)
        if fin:
            self._effects[-1] = (effects.WRITE, number, last[2], True)

    def _begin(self, stream: OutStream, buffers: list[Any]) -> tuple[list[Any], int]:
        """Opens the stream: its first buffers, and the bytes added to them."""
        stream.number = self._next
        self._next += 1
        self._openable -= 1
        self._opened_since += 1
        self._open[stream.number] = stream
        if self.version_acknowledged:
            return buffers, 0
        return [codec.VERSION, *buffers], len(codec.VERSION)  # AQ-26, AQ-R6

    def _open_waiting(self) -> None:
        for queue in (self._control_waiting, self._message_waiting):
            while queue and self._may_open(next(iter(queue))):
                stream = queue.popitem(last=False)[0]
                waiting, stream.waiting = stream.waiting, NOTHING
                buffers, added = self._begin(stream, list(waiting))
                self._charge(stream, added)
                if self._debug:
                    self._guard(stream, buffers)
                self._effects.append((effects.WRITE, stream.number, buffers, stream.fin))
                if stream.half is not None:
                    stream.half.stream_opened()

    def _kill(self, stream: OutStream) -> None:
        stream.dead = True
        stream.waiting = NOTHING
        self._release(stream, stream.queued)
        if stream.half is not None:
            stream.half.stream_left(stream)

    def _guard(self, stream: OutStream, buffers: Sequence[Any]) -> None:
        if stream.guard is None:
            stream.guard = _Guard()
        stream.guard.add(buffers)


class _Guard:
    """Debug only: a buffer belongs to the transport until it has left, so it may not change."""

    def __init__(self) -> None:
        self._given = 0
        self._left = 0
        self._buffers: deque[tuple[int, memoryview, int]] = deque()

    def add(self, buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            self._given += view.nbytes
            if view.nbytes >= GUARDED_FROM:
                self._buffers.append((self._given, view, zlib.crc32(view)))

    def check(self, stream: OutStream, size: int) -> None:
        self._left += size
        while self._buffers and self._buffers[0][0] <= self._left:
            _, view, checksum = self._buffers.popleft()
            if zlib.crc32(view) != checksum:
                raise LocalProtocolError(
                    f"a buffer of {view.nbytes} bytes changed after it was sent on "
                    f"{ids.describe(stream.half.channel) if stream.half else 'a stream'}: it "
                    "belongs to the transport until it has left; send it with copy=True"
                )
