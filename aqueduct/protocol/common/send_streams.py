"""My streams: who may open one now, who waits above the transport, and how much is queued.

Streams are a budget (Flow.streams of the peer): control streams may use all of it, message
streams leave a share of it alone, so that an ack or a cancel never waits for bulk. What has no
stream yet waits here and counts as queued like everything else.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base.accounts import Account
from aqueduct._speedups.base.buffers import size_of
from aqueduct._speedups.channels.sender import SendQueue, SendStream
from aqueduct.config import Config
from aqueduct.errors import LimitExceeded, LocalProtocolError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.state import SenderState

__all__ = ["SendStream", "SendStreams"]

STALLED_ALLOWANCE: Final = 4 << 20
"""Bytes of control frames that may wait beyond the connection's high-water mark."""

GUARDED_FROM: Final = 4096
"""Smaller buffers are copied into the frame when they are sent."""


class SendStreams(SendQueue):
    """All of my streams, and the effects that concern them."""

    def __init__(
        self, config: Config, effects_out: list[effects.Effect], sending: Account | None = None
    ) -> None:
        """``sending`` counts what all connections of the process have queued."""
        guard = _Guard if config.debug else None
        super().__init__(effects_out, config.flow, config.limits, SenderState.OPEN, guard)
        if sending is not None:
            self.process = sending
            self.process_budget = config.flow.process_send_bytes
        self._held_back = 0
        self._guarded = config.debug
        self._high_water = config.flow.connection_high_water
        self._at_once = config.flow.wake_up
        self.stalled_beside = 0
        """Bytes of control frames that wait elsewhere, with what their streams weigh."""
        self.waiting_beside = 0
        """Streams that wait elsewhere; one more while all may have to be written again."""
        self.goes_on = False
        """Whether more waiting streams are to be opened once others had their turn."""

    # Inputs

    def openable_changed(self, count: int) -> None:
        """The carrier can now open ``count`` more streams, those in waiting effects included."""
        self._allow(count)
        self._open_waiting()

    def open_on(self) -> None:
        """Others had their turn: more of the streams that wait are opened."""
        if self.goes_on:
            self.goes_on = False
            self._open_waiting()

    def stopped(self, number: int) -> Any:
        """The peer reads no more of a stream; what was queued is gone.

        Returns the sender half whose messages or control frames it carried, if there is one. Not
        so if all of the stream had left and all messages are acknowledged: nothing was lost.
        """
        stream = self._open.pop(number, None)
        if stream is None:
            half = self.live.get(self._left.pop(number, -1))
            lost = half is not None and (half.state is SenderState.FINISHED or half.unsettled)
            return half if lost else None
        half = stream.speaker or stream.half
        self._kill(stream)
        return half

    # Commands

    def adopt(self, stream: SendStream, number: int) -> None:
        """A stream that has its number: what is written goes out at once."""
        stream.number = number
        self._open[number] = stream

    def hold_back(self, stream: SendStream, buffers: list[Any]) -> None:
        """Queues a whole sequence that takes its turn with ``let_go``."""
        stream.waiting = buffers
        stream.fin = True
        self._held_back += 1
        self._charge(stream, size_of(buffers))

    def let_go(self, stream: SendStream) -> None:
        """A sequence that was held back opens its stream when it can."""
        self._held_back -= 1
        (self._control_waiting if stream.control else self._message_waiting)[stream] = None
        self._open_waiting()

    def reset(self, stream: SendStream, code: int) -> None:
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

    def withdraw(self, number: int, buffers: list[Any] | None = None) -> SendStream | None:
        """A stream that the carrier has forgotten is unopened again; None: it was given up.

        ``buffers``: all that was written on it, without VERSION. They wait here, before what waits
        already; without them nothing is queued on the stream any more.
        """
        stream: SendStream | None = self._open.pop(number, None)
        if stream is not None:
            stream.number = -1
            stream.guard = None
            self._charge(stream, size_of(buffers or []) - stream.queued)
            if buffers is not None:
                stream.waiting = buffers
                queue = self._control_waiting if stream.control else self._message_waiting
                queue[stream] = None
                queue.move_to_end(stream, last=False)
        return stream

    def clear(self) -> None:
        """The connection is over."""
        self._open.clear()
        self._left.clear()
        self._control_waiting.clear()
        self._message_waiting.clear()
        self.goes_on = False
        self.process.charge(-self.queued - self.retained)
        self.process = Account()
        self.queued = self._control_queued = self._held_back = 0
        self.stalled_beside = self.waiting_beside = 0

    def check_stalled(self) -> None:
        """Raises LimitExceeded if the peer lets too little of our acks and closes out."""
        stalled = self.stalled_control + self.stalled_beside
        if stalled > self._high_water + STALLED_ALLOWANCE:
            raise LimitExceeded(
                f"the peer lets no acks and closes out; {stalled} bytes of them wait, "
                f"Flow.connection_high_water allows {self._high_water}"
            )

    @property
    def waiting(self) -> int:
        """Streams that wait above the transport."""
        waiting = len(self._control_waiting) + len(self._message_waiting)
        return waiting + self._held_back + self.waiting_beside

    @property
    def open(self) -> int:
        """Streams with bytes that have not left, or without their end."""
        return len(self._open)

    # Within

    def _open_waiting(self) -> None:
        if self.goes_on:
            return
        left = self._at_once
        for queue in (self._control_waiting, self._message_waiting):
            while queue and self._may_open(next(iter(queue))):
                if not left:
                    self.goes_on = True
                    return
                left -= 1
                stream = queue.popitem(last=False)[0]
                waiting, stream.waiting = stream.waiting, ()
                buffers = list(waiting)
                if self._begin(stream):
                    buffers.insert(0, codec.VERSION)
                    self._charge(stream, len(codec.VERSION))
                if self._guarded:
                    self._watch(stream, buffers)
                self._effects.append((effects.WRITE, stream.number, buffers, stream.fin))
                if stream.half is not None:
                    stream.half.stream_opened()

    def _kill(self, stream: SendStream) -> None:
        stream.dead = True
        stream.waiting = ()
        stream.speaker = None
        self._release(stream, stream.queued)
        if stream.half is not None:
            stream.half.stream_left(stream)


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

    def check(self, stream: SendStream, size: int) -> None:
        self._left += size
        while self._buffers and self._buffers[0][0] <= self._left:
            _, view, checksum = self._buffers.popleft()
            if zlib.crc32(view) != checksum:
                raise LocalProtocolError(
                    f"a buffer of {view.nbytes} bytes changed after it was sent on "
                    f"{stream.half.describe() if stream.half else 'a stream'}: it "
                    "belongs to the transport until it has left; send it with copy=True"
                )
