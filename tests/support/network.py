"""A network between two carriers in virtual time: what QUIC promises, and no more than that.

Both directions of a bidirectional stream are streams of their own; with the second, its slot
returns.

Each piece of a stream, each datagram and each signal is a packet with a fate of its own: delayed,
late by jitter, lost, doubled. What QUIC sends again arrives late instead of never, and a stream
waits for its gaps, but no stream waits for another: data overtakes data, a reset its stream, a
close everything. Nothing moves but in ``run``, and everything is a function of the calls made
and of the seed. What a side may not do (more streams than it was allowed, bytes after the end)
raises at once; what arrives beyond the credit given is an AssertionError.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aqueduct.carriers.contract import Buffer, CarrierUser
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost, LocalProtocolError
from aqueduct.protocol.control_streams.bidi_streams import BIDI, is_mine

__all__ = ["CLEAR", "Network", "NetworkCarrier", "Weather"]

MOST_LATE = 0.9
"""Seconds by which a packet may be overtaken. What is sent again is not sent again for longer:
beyond a second a FORGET_CHANNEL may overtake the CLOSE_RECEIVER that it waited for (AQ-R24)."""

SHORTEST_HOP: Final = 0.04
"""Seconds that a packet of a handshake takes at least, where there is early data."""
REPLAYED_HOPS: Final = 6
"""So many later a replay begins."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to packets from now on."""

    delay: float = 0.0
    """One way, seconds."""
    jitter: float = 0.0
    """At most this much more, seconds."""
    loss: float = 0.0
    """The share of packets that is lost; of datagrams for good."""
    duplication: float = 0.0
    """The share of packets that arrives twice."""
    piece: int = 64 << 10
    """The most that one packet has of a stream, bytes."""
    in_flight: int = 4 << 20
    """Bytes that may be under way in one direction."""


CLEAR = Weather()


class Network:
    """Two carriers joined; ``client`` and ``server``."""

    def __init__(
        self,
        config: Config,
        server_config: Config,
        *,
        seed: int,
        weather: Weather = CLEAR,
        datagram_limit: int = 1200,
        datagram_queue: int = 256,
        now: float = 0.0,
        bidi: tuple[int, int] = (0, 0),
        early: str = "",
    ) -> None:
        """``bidi``: bidirectional streams that the client, and the server, may have open.

        ``early``: the client has early data, which is accepted ("accept"), rejected ("reject"), or
        accepted here and reported a second time to ``replayed`` ("replay").
        """
        self.early = early
        self.now = now
        self.weather = weather
        self.packets = 0
        """Sent so far, those that were lost included."""
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, bool, Callable[[], object]]] = []
        self._serial = 0
        self._cut = False
        self.client = NetworkCarrier(self, True, config, datagram_limit, datagram_queue)
        self.server = NetworkCarrier(self, False, server_config, datagram_limit, datagram_queue)
        self.client.join(self.server, server_config)
        self.server.join(self.client, config)
        self.client.bidi_limit, self.server.bidi_limit = bidi
        self.client.bidi_allowed, self.server.bidi_allowed = reversed(bidi)
        self.replayed = NetworkCarrier(self, False, server_config, datagram_limit, datagram_queue)
        """A server whose handshake never ends."""
        self.replayed.bidi_allowed = bidi[0]
        nobody = NetworkCarrier(self, True, config, datagram_limit, datagram_queue)
        nobody.over = True
        self.replayed.join(nobody, config)

    @property
    def next_event(self) -> float | None:
        """When ``run`` has something to do."""
        return self._events[0][0] if self._events else None

    def run(self, now: float) -> None:
        """Everything that is due, in the order of its time; users answer after each instant."""
        while self._events and self._events[0][0] <= now:
            self.now = max(self.now, self._events[0][0])
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[3]()
            for carrier in (self.client, self.server, self.replayed):
                carrier.settle()
        self.now = now

    def cut(self, client_after: float, server_after: float, *, swallow: bool) -> None:
        """Nothing is sent any more; each side notices when its time has passed, seconds.

        ``swallow``: what is under way is lost too.
        """
        self._cut = True
        if swallow:
            self._events = [event for event in self._events if not event[2]]
            heapq.heapify(self._events)
        for carrier, after in ((self.client, client_after), (self.server, server_after)):
            error = ConnectionLost(f"{carrier.peer}: the network was cut")
            self.at(self.now + after, partial(carrier.end, error))

    # What the carriers use

    def at(self, when: float, action: Callable[[], object], *, packet: bool = False) -> None:
        self._serial += 1
        # A coarse clock, so that some things happen at once.
        heapq.heappush(self._events, (round(when, 4), self._serial, packet, action))

    def send(self, action: Callable[[], object], *, again: bool = True) -> int:
        """A packet; ``action`` is its arrival. ``again``: sent again until it arrives.

        Returns how often it will arrive.
        """
        if self._cut:
            return 0
        copies = 0
        for _ in range(1 + (self._random.random() < self.weather.duplication)):
            when = self._arrival(again)
            self.packets += 1
            if when is not None:
                copies += 1
                self.at(when, action, packet=True)
        return copies

    def piece(self, most: int) -> int:
        return self._random.randint(1, max(1, min(most, self.weather.piece)))

    def _arrival(self, again: bool) -> float | None:
        weather, rng = self.weather, self._random
        late = 0.0
        while rng.random() < weather.loss:
            if not again:
                return None
            late = 2 * late + 2 * weather.delay + 0.02
            if late > MOST_LATE:
                break
        late += rng.random() * weather.jitter
        return self.now + weather.delay + min(late, MOST_LATE)


@dataclass(slots=True)
class Sending:
    """One stream of mine."""

    limit: int
    queue: deque[memoryview] = field(default_factory=deque)
    queued: int = 0
    sent: int = 0
    fin: bool = False
    fin_sent: bool = False
    acked: dict[int, int] = field(default_factory=dict)
    """Offset -> bytes beyond ``acked_to``."""
    acked_to: int = 0
    fin_acked: bool = False

    @property
    def movable(self) -> bool:
        if self.queued:
            return self.sent < self.limit
        return self.fin and not self.fin_sent

    @property
    def unwritten(self) -> int:
        """Bytes that were not reported as written."""
        return self.sent + self.queued - self.acked_to

    def take(self, size: int) -> bytes:
        parts = []
        size = min(size, self.queued, self.limit - self.sent)
        self.queued -= size
        self.sent += size
        while size > 0:
            head = self.queue.popleft()
            if len(head) > size:
                self.queue.appendleft(head[size:])
                head = head[:size]
            parts.append(head)
            size -= len(head)
        return b"".join(parts)


@dataclass(slots=True)
class Receiving:
    """One stream of the peer."""

    limit: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    read: int = 0
    final: int = -1
    """Its length, once known."""


def _arrival_of(datagram: bytes) -> Callable[[NetworkCarrier], None]:
    return lambda other: other.arrive_datagram(datagram)


class NetworkCarrier:
    """One end of a network; a Carrier."""

    scheme = "network"
    bidi = False
    loopback = False
    suspended = False
    resumes = 0
    peer_certificate_fingerprint = None
    peer_identity = None
    peer_credentials = None

    def __init__(
        self,
        network: Network,
        is_client: bool,
        config: Config,
        datagram_limit: int,
        datagram_queue: int,
    ) -> None:
        self.is_client = is_client
        self.local = f"network://{'client' if is_client else 'server'}"
        self.peer = f"network://{'server' if is_client else 'client'}"
        self.datagram_limit = datagram_limit
        self.rtt = 0.0
        self.over = False
        self.closed_clean = False
        """Whether this side closed after everything had left and was acknowledged."""
        self.copies: list[int] = []
        """How often each datagram sent here will arrive; 0 while it has not left."""
        self.sending: dict[int, Sending] = {}
        self.receiving: dict[int, Receiving] = {}
        self._network = network
        self._config = config
        self._user: CarrierUser | None = None
        self._touched = False
        self._opened = 0
        self.bidi_limit = 0
        """Bidirectional streams that this side may have opened until now."""
        self.bidi_allowed = 0
        """The same for the peer."""
        self.bidi_ends: dict[int, int] = {}
        """How many directions of each open bidirectional stream have ended."""
        self._bidi_opened = 0
        self._ready: dict[int, None] = {}
        self._in_flight = 0
        self._datagram_queue = datagram_queue
        self._datagrams: deque[tuple[int, bytes]] = deque()
        self._ended: set[int] = set()
        self._ended_uni = 0
        self._announced = config.flow.streams
        self._extra = 0
        self._stopped: set[int] = set()
        self._close: tuple[int, str] | None = None
        # A server that rejects early data is never told of any.
        self.early = bool(network.early) and (is_client or network.early != "reject")
        self.early_flight: list[Callable[[NetworkCarrier], None]] = []
        """What arrives of the early data of a client, in the order of its leaving."""
        self.forgotten = [0, 0]
        """Streams of a client, unidirectional and not, that are unknown to its server."""
        self._up = not network.early
        self._before: list[Callable[[], object]] = []
        """What came before the handshake began."""

    def join(self, other: NetworkCarrier, config: Config) -> None:
        self._other = other
        self._stream_limit = config.flow.streams
        self._window = config.flow.initial_window

    # What the contract promises

    @property
    def openable(self) -> int:
        return 0 if self.over else self._stream_limit - self._opened + self.forgotten[0]

    @property
    def bidi_openable(self) -> int:
        return 0 if self.over else self.bidi_limit - self._bidi_opened + self.forgotten[1]

    def attach(self, user: CarrierUser) -> None:
        self._user = user
        # A handshake: the server is up with the client's second packet at the latest.
        network, hops = self._network, 2 if self.is_client else 1
        if not network.early:
            network.at(network.now + hops * network.weather.delay, self._connected)
            return
        # The client is up at once, its server with the first packet; the second and the third one
        # complete the handshake for them.
        hop = max(network.weather.delay, SHORTEST_HOP)
        if self is network.replayed:
            hops = REPLAYED_HOPS
            network.at(network.now + (hops + 2) * hop, self._handshake_failed)
        else:
            network.at(network.now + (2 if self.is_client else 3) * hop, self._decided)
        network.at(network.now + (0 if self.is_client else hops) * hop, self._connected)

    def write(self, stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
        if self.over or self._close is not None:
            return
        if stream >= BIDI:
            self._write_bidi(stream)
        elif stream == self._opened:
            if self.openable < 1:
                raise LocalProtocolError(f"stream {stream}: the peer allows no more streams now")
            self._opened += 1
            self.sending[stream] = Sending(self._window)
        elif stream > self._opened:
            raise LocalProtocolError(f"stream {stream}: the next one to open is {self._opened}")
        if stream in self._stopped:
            return
        state = self.sending.get(stream)
        if state is None or state.fin:
            raise LocalProtocolError(f"stream {stream} ended; nothing can be written to it")
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        state.queue.extend(views)
        state.queued += sum(map(len, views))
        state.fin = fin
        self._ready_if(stream, state)

    def reset(self, stream: int, code: int) -> None:
        if self.over or self._close is not None:
            return
        if not self._was_opened(stream):
            raise LocalProtocolError(f"stream {stream} was never opened")
        if self._drop(stream):
            number = self._number_there(stream)
            self._send(lambda other: other.arrive_reset(number, code))

    def stop(self, stream: int, code: int) -> None:
        if self._is_open(stream):
            number = self._number_there(stream, mine=False)
            self._network.send(lambda: self._other.arrive_stop(number, code))

    def credit(self, stream: int, limit: int) -> None:
        if self._is_open(stream) and limit > self.receiving[stream].limit:
            self.receiving[stream].limit = limit
            number = self._number_there(stream, mine=False)
            self._network.send(lambda: self._other.arrive_credit(number, limit))

    def expect_input(self) -> None:
        pass

    def look(self) -> bool:
        return False

    def read(self) -> None:
        pass

    def extra_streams(self, count: int) -> None:
        self._extra = count
        self._announce()

    @property
    def datagram_room(self) -> int:
        return self._datagram_queue - len(self._datagrams)

    def send_datagram(self, data: bytes) -> bool:
        fits = 0 < len(data) <= self.datagram_limit and self.datagram_room > 0
        taken = fits and not self.over and self._close is None
        if taken:
            self._datagrams.append((len(self.copies), data))
        self.copies.append(0)
        return taken

    def ping(self) -> None:
        network = self._network
        network.send(lambda: network.send(lambda: self._report().ponged()))

    def flush(self) -> None:
        network = self._network
        if self._datagrams and not self.over:
            self._send_datagrams()
        while not self.over and self._ready and self._in_flight < network.weather.in_flight:
            stream = next(iter(self._ready))
            del self._ready[stream]
            state = self.sending[stream]
            offset = state.sent
            data = state.take(network.piece(min(state.queued, state.limit - state.sent)))
            fin = state.fin and not state.queued
            state.fin_sent = fin
            self._in_flight += len(data)
            self._send_piece(stream, offset, data, fin)
            self._ready_if(stream, state)

    def snapshot(self) -> dict[str, Any]:
        return {
            "carrier": "network",
            "queued": sum(state.unwritten for state in self.sending.values()),
            "opened": self._opened,
            "open": len(self.sending),
            "openable": self.openable,
            "peer_open": len(self.receiving),
        }

    def close(self, code: int, reason: str, *, linger: float = 0.0) -> None:
        if self.over or self._close is not None:
            return
        self.flush()
        self._close = (code, reason)
        network = self._network
        if linger > 0:
            network.at(network.now, self._close_if_drained)
        network.at(network.now + linger, self._close_now)

    def abandon(self, error: ConnectionLost) -> None:
        self.close(0, error.reason or "")

    # What arrives

    def arrive_piece(self, stream: int, offset: int, data: bytes, fin: bool) -> None:
        if self.over:
            return
        state = self._open(stream)
        if state is None:
            return
        assert offset + len(data) <= state.limit, f"stream {stream}: sent beyond its credit"
        if fin:
            state.final = offset + len(data)
        if offset >= state.read:
            state.pieces[offset] = data
        while (data_now := state.pieces.pop(state.read, None)) is not None:
            state.read += len(data_now)
            ended = state.read == state.final
            if ended:
                self._end_stream(stream)
            self._deliver(stream, data_now, ended)
            if ended or self.over:
                return

    def _deliver(self, stream: int, data: bytes, ended: bool) -> None:
        """By an inlet where the user has one, as bytes of a socket are read, in any pieces."""
        user, view = self._report(), memoryview(data)
        inlet = user.inlet(stream) if view else None
        if inlet is not None:
            while view and not inlet.stopped:
                size = self._network.piece(len(view))
                room = inlet.room(size)
                if room is None:
                    inlet.feed(bytes(view[:size]))
                else:
                    size = len(room)
                    room[:] = view[:size]
                    inlet.landed(size)
                view = view[size:]
            user.inlet_done(stream)
            if self.over:
                return
        if view or ended:
            user.stream_data(stream, bytes(view), ended)

    def arrive_reset(self, stream: int, code: int) -> None:
        if not self.over and self._open(stream) is not None:
            self._end_stream(stream)
            self._report().stream_reset(stream, code)

    def arrive_stop(self, stream: int, code: int) -> None:
        if self.over or not self._drop(stream):
            return
        self._stopped.add(stream)
        number = self._number_there(stream)
        self._send(lambda other: other.arrive_reset(number, code))
        self._report().stream_stopped(stream, code)

    def arrive_credit(self, stream: int, limit: int) -> None:
        state = self.sending.get(stream)
        if state is not None and limit > state.limit:
            state.limit = limit
            self._ready_if(stream, state)
            self.flush()

    def arrive_slots(self, limit: int) -> None:
        if not self.over and limit > self._stream_limit:
            self._stream_limit = limit
            self._report().openable_changed()

    def arrive_bidi_slots(self, limit: int) -> None:
        if not self.over and limit > self.bidi_limit:
            self.bidi_limit = limit
            self._report().openable_changed()

    def arrive_datagram(self, data: bytes) -> None:
        if not self.over:
            self._report().datagram_received(data)

    def arrive_close(self, code: int, reason: str) -> None:
        self.end(
            ConnectionLost(
                f"{self.peer} closed the connection: {reason or code}",
                code=code,
                reason=reason,
                remote=True,
            )
        )

    def arrive_ack(self, stream: int, offset: int, size: int, fin: bool, sent_at: float) -> None:
        if self.over:
            return
        sample = self._network.now - sent_at
        self.rtt = sample if not self.rtt else 0.875 * self.rtt + 0.125 * sample
        state = self.sending.get(stream)
        if state is None:
            return
        state.fin_acked |= fin
        before = state.acked_to
        if offset >= state.acked_to:
            state.acked[offset] = size
        while state.acked_to in state.acked:
            size = state.acked.pop(state.acked_to)
            state.acked_to += size
            if not size:
                break
        if state.fin_acked and not state.unwritten:
            del self.sending[stream]
            self._end_direction(stream)
        if state.acked_to > before:
            self._report().written(stream, state.acked_to - before)
        self.flush()
        self._close_if_drained()

    # Within

    def settle(self) -> None:
        """Ends an instant: the user answers."""
        if self._touched and not self.over and self._user is not None:
            self._touched = False
            self._user.end_of_input()
            self.flush()

    def end(self, error: ConnectionLost) -> None:
        if self.over:
            return
        self.over = True
        self.sending.clear()
        self.receiving.clear()
        self._ready.clear()
        self._datagrams.clear()
        if self._user is not None:
            self._user.closed(error)

    def _report(self) -> CarrierUser:
        assert self._user is not None
        self._touched = True
        return self._user

    def _connected(self) -> None:
        if self.over:
            return
        self._report().connected()
        self._up = True
        before, self._before = self._before, []
        for action in before:
            action()
        if self is self._network.replayed:
            for arrival in self._network.client.early_flight:
                arrival(self)

    # Early data

    def _send(self, arrival: Callable[[NetworkCarrier], None], *, again: bool = True) -> int:
        """A packet of streams or datagrams. Returns how often it will arrive."""
        early = self.is_client and self.early
        if early:
            self.early_flight.append(arrival)

        def arrive() -> None:
            other, network = self._other, self._network
            if early and network.early == "reject":
                return
            if other._up:
                if not early and not other.is_client:
                    other._decided()  # the end of the handshake comes with it, or came before
                arrival(other)
            else:
                other._before.append(partial(arrival, other))

        copies = self._network.send(arrive, again=again)
        return 0 if early and self._network.early == "reject" else copies

    def _decided(self) -> None:
        if self.over or not self.early:
            return
        self.early = False
        accepted = not self.is_client or self._network.early != "reject"
        if not accepted:
            assert all(map(is_mine, self.bidi_ends))
            self._ended.update(self.bidi_ends)
            self.sending.clear()
            self.bidi_ends.clear()
            self._ready.clear()
            self._datagrams.clear()
            self._in_flight = 0
            self.forgotten = [self._opened, self._bidi_opened]
        self._report().early_decided(accepted)

    def _handshake_failed(self) -> None:
        self.end(ConnectionLost(f"{self.peer}: the handshake was never completed"))

    def _number_there(self, stream: int, *, mine: bool = True) -> int:
        """The other side's number of a stream, which is ``mine`` or the peer's.

        Those that a server was never told of do not count for it.
        """
        if stream >= BIDI:
            mine = is_mine(stream)
            stream ^= 1
        unknown = self._network.client.forgotten[stream >= BIDI] << (stream >= BIDI)
        if self.is_client:
            return stream - unknown if mine else stream
        return stream if mine else stream + unknown

    def _ready_if(self, stream: int, state: Sending) -> None:
        if state.movable:
            self._ready[stream] = None

    def _send_datagrams(self) -> None:
        network = self._network
        full = self.datagram_room <= 0
        while self._datagrams and self._in_flight < network.weather.in_flight:
            index, data = self._datagrams.popleft()
            self.copies[index] = self._send(_arrival_of(data), again=False)
            # Whether or not it arrives, its place is free after a round trip.
            self._in_flight += len(data)
            free = partial(self._free, len(data), self.forgotten)
            network.at(network.now + 2 * network.weather.delay, free)
        if full and self.datagram_room > 0:
            network.at(network.now, self._tell_room)

    def _free(self, size: int, forgotten: list[int]) -> None:
        if forgotten is self.forgotten:  # or all that was in flight is gone
            self._in_flight -= size
        self.flush()

    def _tell_room(self) -> None:
        if not self.over:
            self._report().datagram_room_changed()

    def _send_piece(self, stream: int, offset: int, data: bytes, fin: bool) -> None:
        network, sent_at, size = self._network, self._network.now, len(data)
        number = self._number_there(stream)
        arrived = False

        def landed() -> None:
            # Of two copies the first frees the window.
            nonlocal arrived
            if not arrived:
                arrived = True
                self._in_flight -= size
            self.arrive_ack(stream, offset, size, fin, sent_at)

        def arrive(other: NetworkCarrier) -> None:
            if not other.over and other is self._other:
                network.send(landed)
            other.arrive_piece(number, offset, data, fin)

        self._send(arrive)

    def _open(self, stream: int) -> Receiving | None:
        if stream in self._ended:
            return None
        if stream >= BIDI:
            self._open_bidi(stream)
        else:
            assert stream < self._announced, f"stream {stream}: {self._announced} were allowed"
        if stream not in self.receiving:
            self.receiving[stream] = Receiving(self._config.flow.initial_window)
        return self.receiving[stream]

    def _is_open(self, stream: int) -> bool:
        if self.over or self._close is not None:
            return False
        if stream not in self.receiving and stream not in self._ended:
            raise LocalProtocolError(f"the peer never opened its stream {stream}")
        return stream in self.receiving

    def _end_stream(self, stream: int) -> None:
        del self.receiving[stream]
        self._ended.add(stream)
        if stream >= BIDI:
            self._end_direction(stream)
        else:
            self._ended_uni += 1
            self._announce()

    def _announce(self) -> None:
        limit = self._config.flow.streams + self._ended_uni + self._extra
        if limit > self._announced:
            self._announced = limit
            self._network.send(lambda: self._other.arrive_slots(limit))

    def _drop(self, stream: int) -> bool:
        """Forgets a stream of mine; False if it had ended."""
        self._ready.pop(stream, None)
        found = self.sending.pop(stream, None) is not None
        if found:
            self._end_direction(stream)
        return found

    def _was_opened(self, stream: int) -> bool:
        if stream < BIDI:
            return stream < self._opened
        return stream in self.bidi_ends or stream in self._ended

    def _write_bidi(self, stream: int) -> None:
        opening = BIDI | self._bidi_opened << 1
        if stream == opening:
            if self.bidi_openable < 1:
                raise LocalProtocolError(f"stream {stream:#x}: the peer allows no more now")
            self._bidi_opened += 1
            self.bidi_ends[stream] = 0
            self.sending[stream] = Sending(self._window)
        elif is_mine(stream) and stream > opening:
            raise LocalProtocolError(f"stream {stream:#x}: the next one to open is {opening:#x}")

    def _open_bidi(self, stream: int) -> None:
        """The peer opens a stream with the first thing that arrives of it."""
        if not is_mine(stream) and stream not in self.bidi_ends:
            number = (stream - BIDI) >> 1
            assert number < self.bidi_allowed, f"stream {stream:#x}: too many bidirectional ones"
            self.bidi_ends[stream] = 0
            self.sending[stream] = Sending(self._window)

    def allow_bidi(self, count: int) -> None:
        """The peer may open so many bidirectional streams more."""
        limit = self.bidi_allowed = self.bidi_allowed + count
        self._network.send(lambda: self._other.arrive_bidi_slots(limit))

    def _end_direction(self, stream: int) -> None:
        """Of a bidirectional stream; with the second, the peer may open another."""
        if stream < BIDI:
            return
        self.bidi_ends[stream] += 1
        if self.bidi_ends[stream] < 2:
            return
        del self.bidi_ends[stream]
        if not is_mine(stream):
            self.allow_bidi(1)

    def _close_if_drained(self) -> None:
        if self._close is not None and not self.over and not self.sending_anything:
            self.closed_clean = True
            self._close_now()

    @property
    def sending_anything(self) -> bool:
        """Whether bytes or ends of streams wait to leave or to be acknowledged."""
        return any(
            state.unwritten or (state.fin and not state.fin_acked)
            for state in self.sending.values()
        )

    def _close_now(self) -> None:
        if self.over or self._close is None:
            return
        code, reason = self._close
        self._network.send(lambda: self._other.arrive_close(code, reason))
        error = ConnectionLost(f"closed here: {reason or code}", code=code, reason=reason)
        self.end(error)
