"""Two connection cores joined by a carrier, with a virtual clock and no event loop.

``Pair`` joins them by the memory carrier and steps both until nothing moves. ``NetworkPair``
joins them by a ``Network``: what is sent takes its time, and gets lost. ``advance`` lets time
pass. Everything is a function of the calls made and of the seed, so that a failure replays.
"""

from __future__ import annotations

from typing import Any

from aqueduct._speedups.base.buffers import BufferSlice
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.loop.pump import apply
from aqueduct.carriers import memory
from aqueduct.carriers.contract import Buffer
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectionLost
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.connection import ConnectionCore
from aqueduct.protocol.common.events import Closed, Event, Headers, HeadersReceived
from aqueduct.protocol.common.receiver import Received, ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.send_streams import SendStream
from aqueduct.protocol.common.sender import Mode, SenderHalf
from aqueduct.protocol.control_streams.connection import ControlConnection
from tests.support.network import CLEAR, Network, NetworkCarrier, Weather

__all__ = ["Cores", "NetworkPair", "Pair", "Side"]

MOST_INSTANTS = 100_000
"""Instants in one ``advance`` of a NetworkPair: beyond, the two keep each other busy for ever."""


class Side:
    """One core over one end of the link; the carrier's user."""

    def __init__(
        self,
        pair: Cores,
        carrier: memory.MemoryCarrier | NetworkCarrier,
        config: Config,
        kind: type[ChannelConnection] | type[ControlConnection] = ChannelConnection,
    ) -> None:
        self.pair = pair
        self.carrier = carrier
        self.core: ConnectionCore = kind(is_client=carrier.is_client, config=config)
        self.events: list[Event] = []
        self.applied: list[effects.Effect] = []
        """Every effect so far, for tests that look at the wire."""
        self.raw: dict[int, bytearray] = {}
        """What the peer sent, by stream."""
        self.answer_headers: Headers | None = ((b"server-0", b""),)
        """What a server answers at once; None leaves it to the test."""
        self.lose_datagrams = False
        self.hold = 0
        """Stream slots kept back beside those that the core wants to keep."""
        self.mute = False
        """True: the core's effects are dropped, and the test speaks for it."""
        carrier.attach(self)

    # CarrierUser

    def connected(self) -> None:
        self.core.start(self.pair.now, self.carrier.datagram_limit, self.carrier.early)
        self.openable_changed()
        self.core.datagram_room_changed(self.carrier.datagram_room, self.pair.now)

    def early_decided(self, accepted: bool) -> None:
        self.core.early_decided(accepted, self.pair.now)
        self.openable_changed()
        self.core.datagram_room_changed(self.carrier.datagram_room, self.pair.now)

    def stream_data(self, stream: int, data: Buffer, fin: bool) -> None:
        self.raw.setdefault(stream, bytearray()).extend(data)
        self.core.receive_stream(stream, data, fin, self.pair.now)

    def inlet(self, stream: int) -> DirectRead | None:
        return self.core.inlet(stream)

    def inlet_done(self, stream: int) -> None:
        self.core.inlet_done(stream, self.pair.now)

    def stream_reset(self, stream: int, code: int) -> None:
        self.core.receive_reset(stream, code, self.pair.now)

    def stream_stopped(self, stream: int, code: int) -> None:
        self.core.receive_stop(stream, code, self.pair.now)

    def datagram_received(self, data: bytes) -> None:
        self.core.receive_datagram(data, self.pair.now)

    def openable_changed(self) -> None:
        if isinstance(self.core, ControlConnection):
            assert isinstance(self.carrier, NetworkCarrier)
            self.core.bidi_openable_changed(self.carrier.bidi_openable, self.pair.now)
        self.core.openable_changed(self.carrier.openable, self.pair.now)

    def datagram_room_changed(self) -> None:
        self.core.datagram_room_changed(self.carrier.datagram_room, self.pair.now)

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
        self._take_events()

    # What tests use

    def flush(self) -> None:
        """Takes events and applies effects."""
        self._take_events()
        wanted = self.core.effects_to_apply()
        self.applied += wanted
        if self.mute:
            wanted = []
        if self.lose_datagrams:
            wanted = [effect for effect in wanted if effect[0] != effects.DATAGRAM]
        extra = self.core.incoming.extra - self.hold
        apply(wanted, extra, self.core, self.carrier, self.pair.now)
        self.core.datagram_room_changed(self.carrier.datagram_room, self.pair.now)
        self.carrier.flush()

    def _take_events(self) -> None:
        for event in self.core.events_received():
            self.events.append(event)
            if (
                isinstance(event, HeadersReceived)
                and not self.core.is_client
                and self.answer_headers is not None
            ):
                self.core.accept_headers(self.answer_headers, self.pair.now)

    def send(
        self,
        half: Any,
        payload: Any = b"",
        *attachments: Attach,
        headers: Headers = (),
        mode: Mode = Mode.ORDERED,
    ) -> int:
        """Sends and flushes."""
        number = self.core.send(
            half, payload, self.pair.now, headers=headers, attachments=attachments, mode=mode
        )
        self.flush()
        return number

    def finish(self, half: Any) -> None:
        self.core.finish(half, self.pair.now)
        self.flush()

    def cancel(self, half: Any) -> None:
        self.core.cancel(half, self.pair.now)
        self.flush()

    def close_receiver(self, half: Any) -> None:
        self.core.close_receiver(half, self.pair.now)
        self.flush()

    def take(self, half: Any) -> Received | None:
        received = self.core.receive(half, self.pair.now)
        self.flush()
        return received

    def take_all(self, half: Any) -> list[Received]:
        """Everything queued now, without letting more arrive."""
        taken = []
        while (received := self.take(half)) is not None:
            taken.append(received)
        return taken

    def inject(self, *frames: Buffer | BufferSlice, fin: bool = True) -> SendStream:
        """Says something that this core would not say, on a stream of its own."""
        stream = SendStream(None, control=True)
        self.core._shared.outgoing.write(stream, list(frames), fin=fin)
        self.flush()
        return stream

    @property
    def close_code(self) -> int | None:
        """The code this side closed with, if it did."""
        for effect in self.applied:
            if effect[0] == effects.CLOSE:
                code: int = effect[1]
                return code
        return None

    @property
    def ended(self) -> ConnectionLost | None:
        for event in self.events:
            if isinstance(event, Closed):
                return event.error
        return None


class Cores:
    """A client and a server core, and the time."""

    now: float
    client: Side
    server: Side

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

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.client, self.server


class Pair(Cores):
    """Joined by the memory carrier; connected unless ``connect=False``."""

    def __init__(
        self,
        config: Config = DEFAULT,
        *,
        server_config: Config | None = None,
        chunk: int = 64 << 10,
        seed: int | None = None,
        connect: bool = True,
        datagram_limit: int = 1200,
    ) -> None:
        self.now = 100.0
        self.link = memory.pair(
            config,
            server_config=server_config,
            chunk=chunk,
            seed=seed,
            datagram_limit=datagram_limit,
        )
        self.client = Side(self, self.link.client, config)
        self.server = Side(self, self.link.server, server_config or config)
        if connect:
            self.run()

    def run(self) -> None:
        """Until nothing moves, and each core has done what it left to later turns."""
        while True:
            self.client.flush()
            self.server.flush()
            self.link.run()
            cores = [side.core for side in (self.client, self.server) if side.core.goes_on]
            if not cores:
                break
            for core in cores:
                core.handle_deadline(self.now)

    def advance(self, seconds: float) -> None:
        """Lets time pass, waking each core at each of its deadlines."""
        until = self.now + seconds
        while True:
            self.run()
            deadlines = [
                deadline
                for side in (self.client, self.server)
                if (deadline := side.core.next_deadline()) is not None and deadline <= until
            ]
            if not deadlines:
                break
            self.now = max(self.now, min(deadlines))
            for side in (self.client, self.server):
                deadline = side.core.next_deadline()
                if deadline is not None and deadline <= self.now:
                    side.core.handle_deadline(self.now)
        self.now = until
        for side in (self.client, self.server):
            if 0 < side.core.close_by <= self.now:
                self.link.expire_linger()
        self.run()


class NetworkPair(Cores):
    """Joined by a network; not connected yet."""

    def __init__(
        self,
        config: Config = DEFAULT,
        *,
        server_config: Config | None = None,
        seed: int = 0,
        weather: Weather = CLEAR,
        datagram_limit: int = 1200,
        datagram_queue: int = 256,
        bidi: tuple[int, int] | None = None,
        early: str = "",
    ) -> None:
        """``bidi``, ``early``: see Network; with ``bidi`` the cores are those of the draft."""
        self.now = 100.0
        server_config = server_config or config
        kind = ChannelConnection if bidi is None else ControlConnection
        self.network = Network(
            config,
            server_config,
            seed=seed,
            weather=weather,
            datagram_limit=datagram_limit,
            datagram_queue=datagram_queue,
            now=self.now,
            bidi=bidi or (0, 0),
            early=early,
        )
        self.client = Side(self, self.network.client, config, kind)
        self.server = Side(self, self.network.server, server_config, kind)
        self.replayed: Side | None = None
        """A server that is told of the client's early data a second time."""
        if early == "replay":
            self.replayed = Side(self, self.network.replayed, server_config, kind)

    def carrier(self, side: Side) -> NetworkCarrier:
        return self.network.client if side is self.client else self.network.server

    @property
    def next_event(self) -> float | None:
        """When a packet arrives or a core has something to do. None: nothing moves any more."""
        times = [self.network.next_event, *(side.core.next_deadline() for side in self.sides)]
        return min((when for when in times if when is not None), default=None)

    def advance(self, seconds: float) -> None:
        """Lets time pass: packets arrive and deadlines are met, in the order of their time."""
        until = self.now + seconds
        for side in self.sides:
            side.flush()
        for _ in range(MOST_INSTANTS):
            following = self.next_event
            if following is None or following > until:
                break
            self.now = self.network.now = max(self.now, following)
            for side in self.sides:
                side.core.rtt_measured(side.carrier.rtt)
            self.network.run(self.now)
            for side in self.sides:
                deadline = side.core.next_deadline()
                if deadline is not None and deadline <= self.now:
                    side.core.handle_deadline(self.now)
                    side.flush()
        else:
            raise AssertionError(f"no rest within {seconds} s")
        self.now = self.network.now = until
