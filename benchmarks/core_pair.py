"""Two connection cores in one process, joined by the memory carrier, for benchmarks.

What ``aqueduct._speedups.loop.pump`` does for a core on an event loop, this does without one, call
for call: inputs in, events out, effects to the carrier, one deadline. Nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.loop.pump import apply
from aqueduct.carriers import memory
from aqueduct.carriers.contract import Buffer
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import Closed, HeadersReceived, Readable
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.sender import SenderHalf

__all__ = ["Clock", "Ends", "Pair", "Side"]


class Clock:
    """Real time, but waiting is skipped: when nothing moves, it jumps to the next deadline."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() + self.skipped

    def skip_to(self, deadline: float) -> None:
        """Goes on at ``deadline`` if that is ahead."""
        self.skipped += max(deadline - self.now(), 0.0)


class Side:
    """One core over one end of the link (the carrier's user)."""

    def __init__(self, carrier: memory.MemoryCarrier, config: Config, clock: Clock) -> None:
        self.carrier = carrier
        self.core = ChannelConnection(is_client=carrier.is_client, config=config)
        self.clock = clock
        self.on_readable: Callable[[ReceiverHalf], None] = lambda half: None
        """The application: what it does when a receiver has a message, or its end."""
        self.lose_datagrams = False
        self.deadline: float | None = None
        self._extra_streams = 0
        carrier.attach(self)

    # CarrierUser

    def connected(self) -> None:
        now = self.clock.now()
        self.core.start(now, self.carrier.datagram_limit)
        self.core.openable_changed(self.carrier.openable, now)
        self.core.datagram_room_changed(self.carrier.datagram_room, now)

    def early_decided(self, accepted: bool) -> None:
        """There is no early data here."""

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        self.core.receive_stream(stream, data, fin, self.clock.now())

    def inlet(self, stream: int) -> DirectRead | None:
        return self.core.inlet(stream)

    def inlet_done(self, stream: int) -> None:
        self.core.inlet_done(stream, self.clock.now())

    def stream_reset(self, stream: int, code: int) -> None:
        self.core.receive_reset(stream, code, self.clock.now())

    def stream_stopped(self, stream: int, code: int) -> None:
        self.core.receive_stop(stream, code, self.clock.now())

    def datagram_received(self, data: bytes) -> None:
        self.core.receive_datagram(data, self.clock.now())

    def openable_changed(self) -> None:
        self.core.openable_changed(self.carrier.openable, self.clock.now())

    def datagram_room_changed(self) -> None:
        self.core.datagram_room_changed(self.carrier.datagram_room, self.clock.now())

    def written(self, stream: int, size: int) -> bool:
        return self.core.written(stream, size)

    def kept(self, size: int) -> None:
        self.core.outgoing.keep(size)

    def ponged(self) -> None:
        pass

    def end_of_input(self) -> None:
        self.core.rtt_measured(self.carrier.rtt)
        self.flush()

    def closed(self, error: ConnectionLost) -> None:
        self.core.connection_lost(error)
        self._dispatch()

    # What benchmarks use

    def flush(self) -> None:
        """Hands out events, applies effects, notes the deadline (as ``Pump.flush``)."""
        self._dispatch()
        while True:
            wanted, extra = self.core.effects_to_apply(), self.core.incoming.extra
            if not wanted and extra == self._extra_streams:
                break
            self._extra_streams = extra
            if self.lose_datagrams:
                wanted = [effect for effect in wanted if effect[0] != effects.DATAGRAM]
            apply(wanted, extra, self.core, self.carrier, self.clock.now())
        self._dispatch()
        self.deadline = self.core.next_deadline()

    def work_deadline(self, now: float) -> bool:
        """What is due; False: nothing was."""
        if self.deadline is None or self.deadline > now:
            return False
        self.core.rtt_measured(self.carrier.rtt)
        self.core.handle_deadline(now)
        self.flush()
        return True

    def _dispatch(self) -> None:
        for event in self.core.events_received():
            if isinstance(event, Readable):
                self.on_readable(event.half)
            elif isinstance(event, Closed):
                raise AssertionError(f"the connection is over: {event.error}")
            elif isinstance(event, HeadersReceived) and not self.core.is_client:
                self.core.accept_headers((), self.clock.now())


class Ends:
    """Two cores and no carrier: what one wants written the other gets as it comes from a socket.

    ``give`` reads large buffers straight to their place, without their bytes: of each stretch the
    first eight alone are copied. Nothing is held back by credit.
    """

    def __init__(self, config: Config = DEFAULT) -> None:
        self.client = ChannelConnection(is_client=True, config=config)
        self.server = ChannelConnection(is_client=False, config=config)
        now = time.perf_counter()
        for core in (self.client, self.server):
            core.start(now, 0)
            core.openable_changed(config.flow.streams, now)
        while not (self.client.ready and self.server.ready):
            self.give(self.wanted(self.client), self.server)
            self.give(self.wanted(self.server), self.client)

    def wanted(self, core: ChannelConnection) -> list[effects.Effect]:
        """The effects of a core, what was due included."""
        for event in core.events_received():
            if isinstance(event, HeadersReceived) and not core.is_client:
                core.accept_headers((), time.perf_counter())
        deadline, now = core.next_deadline(), time.perf_counter()
        if deadline is not None and deadline <= now:
            core.handle_deadline(now)
        return core.effects_to_apply()

    @staticmethod
    def give(wanted: Iterable[effects.Effect], target: ChannelConnection) -> dict[int, int]:
        """Hands one core's bytes to the other; returns how many there were of each stream."""
        now, sizes = time.perf_counter(), dict[int, int]()
        for effect in wanted:
            if effect[0] != effects.WRITE:
                continue
            number = effect[1]
            for buffer in effect[2]:
                view, size = memoryview(buffer), len(buffer)
                sizes[number] = sizes.get(number, 0) + size
                inlet = target.inlet(number)
                if inlet is not None:
                    if (room := inlet.room(size)) is not None:
                        room[:8] = view[:8]  # the kernel brings the rest
                        view = view[len(room) :]
                        inlet.landed(len(room))
                    if view and not inlet.stopped:
                        inlet.feed(view)
                        view = view[:0]
                    target.inlet_done(number, now)
                if view:
                    target.receive_stream(number, view, False, now)
            if effect[3]:
                target.receive_stream(number, b"", True, now)
        return sizes


class Pair:
    """A client and a server core, connected."""

    def __init__(self, config: Config = DEFAULT) -> None:
        self.clock = Clock()
        self.link = memory.pair(config)
        self.client = Side(self.link.client, config, self.clock)
        self.server = Side(self.link.server, config, self.clock)
        self.step()

    @property
    def sender(self) -> SenderHalf:
        """The client's entrypoint."""
        half = self.client.core.entrypoint
        assert isinstance(half, SenderHalf)
        return half

    @property
    def receiver(self) -> ReceiverHalf:
        """The server's entrypoint."""
        half = self.server.core.entrypoint
        assert isinstance(half, ReceiverHalf)
        return half

    def step(self) -> None:
        """Until nothing moves; then what is due, and what a core has left for later."""
        self.client.flush()
        self.server.flush()
        self.link.run()
        while True:
            now = self.clock.now()
            moved = self.client.work_deadline(now)
            if self.server.work_deadline(now) or moved:
                self.link.run()
            if not (self.client.core.goes_on or self.server.core.goes_on):
                break

    def settle(self, done: Callable[[], Any]) -> None:
        """Goes on until ``done``, skipping from deadline to deadline. AssertionError if never."""
        self.step()
        while not done():
            deadlines = [
                side.deadline for side in (self.client, self.server) if side.deadline is not None
            ]
            if not deadlines:
                raise AssertionError("nothing is due, and the work is not done")
            self.clock.skip_to(min(deadlines))
            self.step()
