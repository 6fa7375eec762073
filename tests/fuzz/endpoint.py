"""A connection core over one end of a memory link, and an application that uses it.

Whatever the core is told and asked, it raises only what the lists here name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.loop.pump import apply
from aqueduct.carriers.contract import Buffer
from aqueduct.carriers.memory import MemoryCarrier
from aqueduct.config import Config
from aqueduct.errors import ChannelError, ConnectionLost, LocalProtocolError
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import Closed, Event, HeadersReceived
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach, Half
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.common.state import ReceiverState, SenderState

__all__ = ["Clock", "Endpoint"]

Result = TypeVar("Result")

SEND: Final = (LocalProtocolError, ChannelError, ConnectionLost)
"""``send`` and ``finish``: how the channel or the connection ended, or misuse."""
CANCEL: Final = (LocalProtocolError,)
"""``cancel`` after ``finish``."""
ACCEPT: Final = (LocalProtocolError,)
"""``accept_headers`` by a client, twice, or before the peer's."""
NOTHING: Final[tuple[type[Exception], ...]] = ()
"""Every ``receive_*``, ``receive``, ``close_receiver``, ``drop_attachment`` ..."""

CLOSE_CODES: Final = frozenset(range(7))
"""AQ-R30, and 0 for a close that is no error."""


class Clock:
    """One virtual time for both sides."""

    def __init__(self) -> None:
        self.now = 100.0


class Endpoint:
    """The carrier's user: inputs to the core, its effects to the carrier, its events kept."""

    def __init__(self, carrier: MemoryCarrier, config: Config, clock: Clock) -> None:
        self.carrier = carrier
        self.clock = clock
        self.core = ChannelConnection(is_client=carrier.is_client, config=config)
        self.halves: list[Half] = [self.core.entrypoint]
        """Every half that the application was ever given."""
        self.events: list[Event] = []
        self.accepts = True
        """Whether a server answers the client's headers at once."""
        self.lossy = False
        """Whether datagrams vanish."""
        self.doubling = False
        """Whether those that do not arrive twice."""
        self.close_codes: list[int] = []
        """What this core closed with: one code at the most."""
        self.ends: list[ConnectionLost] = []
        carrier.attach(self)

    # The carrier's calls

    def connected(self) -> None:
        self.core.start(self.clock.now, self.carrier.datagram_limit)
        self.core.openable_changed(self.carrier.openable, self.clock.now)
        self.core.datagram_room_changed(self.carrier.datagram_room, self.clock.now)

    def early_decided(self, accepted: bool) -> None:
        """There is no early data here."""

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        self.core.receive_stream(stream, data, fin, self.clock.now)

    def inlet(self, stream: int) -> DirectRead | None:
        return self.core.inlet(stream)

    def inlet_done(self, stream: int) -> None:
        self.core.inlet_done(stream, self.clock.now)

    def stream_reset(self, stream: int, code: int) -> None:
        self.core.receive_reset(stream, code, self.clock.now)

    def stream_stopped(self, stream: int, code: int) -> None:
        self.core.receive_stop(stream, code, self.clock.now)

    def datagram_received(self, data: bytes) -> None:
        self.core.receive_datagram(data, self.clock.now)

    def openable_changed(self) -> None:
        self.core.openable_changed(self.carrier.openable, self.clock.now)

    def datagram_room_changed(self) -> None:
        self.core.datagram_room_changed(self.carrier.datagram_room, self.clock.now)

    def written(self, stream: int, size: int) -> bool:
        return self.core.written(stream, size)

    def kept(self, size: int) -> None:
        self.core.outgoing.keep(size)

    def ponged(self) -> None:
        pass

    def end_of_input(self) -> None:
        self.flush()

    def closed(self, error: ConnectionLost) -> None:
        self.core.connection_lost(error)
        self.take_events()

    def flush(self) -> None:
        """Takes events and applies effects; the carrier refuses what its contract forbids."""
        self.take_events()
        wanted: list[effects.Effect] = []
        for effect in self.core.effects_to_apply():
            assert not self.close_codes, f"{effect} after the close"
            copies = 1
            if effect[0] == effects.DATAGRAM:
                copies = 0 if self.lossy else 1 + self.doubling
            elif effect[0] == effects.CLOSE:
                assert effect[1] in CLOSE_CODES, effect
                self.close_codes.append(effect[1])
            wanted += [effect] * copies
        apply(wanted, self.core.incoming.extra, self.core, self.carrier, self.clock.now)
        self.core.datagram_room_changed(self.carrier.datagram_room, self.clock.now)
        self.carrier.flush()

    def take_events(self) -> None:
        for event in self.core.events_received():
            self.events.append(event)
            if isinstance(event, Closed):
                self.ends.append(event.error)
                assert len(self.ends) == 1 and event.error is self.core.error
            elif isinstance(event, HeadersReceived) and self.accepts and not self.core.is_client:
                self.command(ACCEPT, self.core.accept_headers, ((b"server-0", b""),), self.now)

    # What the application does

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def senders(self) -> list[SenderHalf]:
        return [half for half in self.halves if isinstance(half, SenderHalf)]

    @property
    def receivers(self) -> list[ReceiverHalf]:
        return [half for half in self.halves if isinstance(half, ReceiverHalf)]

    def send(
        self,
        half: SenderHalf,
        payload: Any,
        attaches: list[Attach],
        mode: Mode,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> int | None:
        """Sends; None if that was refused."""
        number = self.command(
            SEND,
            self.core.send,
            half,
            payload,
            self.now,
            headers=headers,
            attachments=attaches,
            mode=mode,
        )
        if number is not None:
            for attach in attaches:
                assert attach.half is not None
                self.halves.append(attach.half)
        self.flush()
        return number

    def take(self, half: ReceiverHalf) -> Received | None:
        """The next message; what is attached to it is the application's from now on."""
        received = self.command(NOTHING, self.core.receive, half, self.now)
        if received is not None:
            self.halves.extend(inner for inner, _ in received.attachments)
        self.flush()
        return received

    def finish(self, half: SenderHalf) -> bool:
        """Whether it was accepted."""
        before = half.state
        self.command(SEND, self.core.finish, half, self.now)
        self.flush()
        return before is SenderState.OPEN

    def cancel(self, half: SenderHalf) -> bool:
        """Whether it was accepted."""
        before = half.state
        self.command(CANCEL, self.core.cancel, half, self.now)
        self.flush()
        return before is SenderState.OPEN

    def close_receiver(self, half: ReceiverHalf) -> None:
        self.command(NOTHING, self.core.close_receiver, half, self.now)
        self.flush()

    def drop(self, half: Half) -> None:
        self.command(NOTHING, self.core.drop_attachment, half, self.now)
        self.flush()

    def wait_writable(self, half: SenderHalf) -> None:
        self.command(NOTHING, self.core.wait_writable, half)
        self.flush()

    def answer(self) -> None:
        self.command(ACCEPT, self.core.accept_headers, (), self.now)
        self.flush()

    def close(self, code: int) -> None:
        self.command(NOTHING, self.core.close, code, "as the input says", self.now)
        self.flush()

    def wake(self) -> None:
        """What a timer does."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.core.handle_deadline(self.now)
            self.flush()
            following = self.core.next_deadline()
            assert following is None or following > self.now, "a timer that fires for ever"

    def command(
        self,
        allowed: tuple[type[Exception], ...],
        call: Callable[..., Result],
        *args: Any,
        **options: Any,
    ) -> Result | None:
        """Calls; of what it may raise, misuse changes nothing."""
        before = self.core.snapshot()
        try:
            return call(*args, **options)
        except allowed as error:
            refusal = error
        if isinstance(refusal, LocalProtocolError):
            assert self.core.snapshot() == before, refusal
        return None

    # What must hold

    def check(self) -> None:
        """The core's sums are those of its parts."""
        core = self.core
        if core.error is not None:
            return
        shared, incoming = core._shared, core._reader.incoming
        halves = set(self.halves) | set(core._registry._live.values())
        halves |= set(core._registry._ended_early.values())
        mine = list(halves)
        while mine:  # with those in messages that nobody took yet, which no table may know
            half = mine.pop()
            for received in half.queue if isinstance(half, ReceiverHalf) else ():
                for inner, _ in received.attachments:
                    if inner not in halves:
                        halves.add(inner)
                        mine.append(inner)
        charged = 0
        queued = shared.outgoing._control_queued
        for half in halves:
            if isinstance(half, SenderHalf):
                assert half.queued >= 0
                queued += half.queued
            else:
                charged += half.queue.charged
                check_receiver(half)
        streams = incoming.streams.values()
        assert shared.budget_used == charged + sum(stream.granted for stream in streams)
        assert shared.outgoing.queued == queued
        assert core.held_streams == sum(stream.held for stream in streams)
        assert incoming._gathered == sum(stream.gathered for stream in streams)

    def check_final(self) -> None:
        """The connection is over and everything was taken: each handle says how it ended."""
        for half in self.halves:
            if isinstance(half, SenderHalf):
                assert half.state is SenderState.ENDED, half.state
            else:
                assert half.state is ReceiverState.CLOSED and half.error is not None, half.state
                assert not half.queue


def check_receiver(half: ReceiverHalf) -> None:
    """What a receiver is charged is what waits there or lands."""
    landing = [stream for stream in half.streams if stream.partial >= 0]
    live = [received for received in half.queue if not received.dropped]
    assert half.queue.outstanding == len(landing) + len(live)
    assert half.queue.charged == sum(received.charge for received in live) + sum(
        half._shared.admission.cost(stream.partial) for stream in landing
    )
    assert half.state is not ReceiverState.CLOSED or (not half.streams and not half.queue.waiting)
