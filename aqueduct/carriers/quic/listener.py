"""Accepting QUIC connections: routing by connection id, and what is refused at the door."""

from __future__ import annotations

import asyncio
import copy
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from aioquic._buffer import Buffer as QuicBuffer
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler
from aioquic.tls import SessionTicket

from aqueduct.address import Address
from aqueduct.carriers.binding import listens
from aqueduct.carriers.certificates import ServerTls
from aqueduct.carriers.contract import Carrier
from aqueduct.carriers.places import Places, origin_of
from aqueduct.carriers.quic.binding import bind
from aqueduct.carriers.quic.connection import QuicCarrier
from aqueduct.carriers.quic.flow_control import capped_congestion_control, version_of
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.path_mtu import BASE
from aqueduct.carriers.quic.tickets import TicketRecord
from aqueduct.carriers.quic.tls import server_configuration
from aqueduct.carriers.quic.udp import (
    BURST_FRAMES,
    SocketAddress,
    UdpSocket,
    datagram_size,
    host_port,
)
from aqueduct.carriers.renewal import Renewed
from aqueduct.config import Config
from aqueduct.errors import ConnectionLost
from aqueduct.escaping import logger_of

__all__ = ["QuicListener", "listen"]

logger = logger_of("aqueduct.carriers.quic")

_WARN_EVERY: Final = 10.0  # seconds between two warnings about the same thing
_ADMITTED: Final = 16  # packets that waited and are taken in one turn of the loop
_FAREWELLS: Final = 8  # repetitions of a CONNECTION_CLOSE to a peer that sends on
_FAREWELL_TIME: Final = 3.0  # seconds in which they are given, after a handshake


async def listen(
    address: Address,
    config: Config,
    tls: ServerTls,
    on_carrier: Callable[[Carrier], None],
    *,
    sockets: Sequence[socket.socket] | None = None,
    bidi: bool = False,
) -> QuicListener:
    """Listens at every address of ``address.host``; ``on_carrier`` gets each new connection.

    Port 0 takes a free one, the same for all. ``sockets`` are those of ``bind``, which are taken
    over. Raises ConfigError: the name does not resolve, the port is taken, or the certificate is
    of no use. ``bidi``: clients that ask for bidirectional streams, by ALPN, have them. If the
    address has ``early_data=on``, these have tickets for early data, too.
    """

    def configuration(tls: ServerTls) -> QuicConfiguration:
        made = server_configuration(config, tls, bidi=bidi)
        made.congestion_control_algorithm = capped_congestion_control(
            config.quic.congestion_control, config.quic.transport_buffer
        )
        return made

    shown = Renewed(tls, configuration)
    if sockets is None:
        (bound,) = await bind(address, 1)
        sockets = bound.sockets
    return QuicListener(address, config, shown, on_carrier, sockets, bidi)


class QuicListener:
    """The sockets of one address and the connections on them."""

    def __init__(
        self,
        address: Address,
        config: Config,
        shown: Renewed[QuicConfiguration],
        on_carrier: Callable[[Carrier], None],
        sockets: Sequence[socket.socket],
        bidi: bool,
    ) -> None:
        self._bidi = bidi
        self._address = address
        self._config = config
        self._shown = shown
        self._on_carrier = on_carrier
        self._loop = asyncio.get_running_loop()
        self._carriers: dict[QuicCarrier, set[bytes]] = {}
        self._half_open: dict[QuicCarrier, asyncio.TimerHandle] = {}
        self._places: Places[QuicCarrier] = Places(
            config.quic.half_open, config.timing.handshake_silence
        )
        self._waiting: dict[bytes, tuple[_Acceptor, bytes, SocketAddress]] = {}
        """First packets that have no place yet, by the connection id they are for."""
        self._admission: asyncio.TimerHandle | None = None
        self._retry = QuicRetryTokenHandler()
        self._tickets: TicketRecord | None = None
        """None: early data is not taken."""
        if bidi and address.early_data:
            settings = config.quic
            self._tickets = TicketRecord(
                settings.tickets, settings.ticket_lifetime, self._loop.time
            )
        self._early: set[QuicCarrier] = set()
        """Those that were handed on before their handshake was complete."""
        self._accepting = True
        self._warned_at = -_WARN_EVERY
        self._delayed = 0
        self._finished = asyncio.Event()
        self._port = sockets[0].getsockname()[1]
        self._doors = [_Acceptor(self, sock, config) for sock in sockets]
        for sock in sockets:
            listens(sock)
        shown.watch(config.timing.certificate_check)

    @property
    def configuration(self) -> QuicConfiguration:
        """For the next connection."""
        return self._shown.current

    @property
    def addresses(self) -> Sequence[str]:
        """What clients can connect to; with the fingerprint of a development certificate."""
        options = dict(self._address.options)
        if self._shown.tls.development:
            options["fingerprint"] = self._shown.tls.fingerprint
        return (str(Address("aqueduct", self._address.host, self._port, options)),)

    @property
    def half_open(self) -> int:
        """Connections whose handshake is not complete."""
        return len(self._half_open)

    @property
    def connections(self) -> int:
        """All connections, half-open ones included."""
        return len(self._carriers)

    def close(self) -> None:
        """Accepts no more; live connections go on."""
        self._accepting = False
        self._shown.close()
        self._waiting.clear()
        if self._admission is not None:
            self._admission.cancel()
        for carrier in self._half_open.keys() - self._early:
            carrier.lose(ConnectionLost(f"{carrier.peer}: the listener was closed"))
        self._finish_if_idle()

    async def wait_closed(self) -> None:
        """Returns when closed, and the last connection has ended."""
        await self._finished.wait()

    # what the doors call

    def accept(
        self, door: _Acceptor, header: QuicHeader, data: bytes, address: SocketAddress
    ) -> QuicCarrier | None:
        """Makes a connection for a first Initial packet, ``data``; without room it waits."""
        if not self._accepting:
            return None
        crowd = len(self._half_open)
        original, retried = header.destination_cid, None
        if header.token:
            try:
                original = self._retry.validate_token(
                    address=address,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=self._loop.time(),
                )
                retried = header.destination_cid
            except ValueError:
                pass  # of another program that was at this address: as good as none
            # Somebody may send a copy of a client's first packets after the client got a Retry.
            # What they say must not be read again with the ones that answer the Retry.
            if retried is not None and any(one.has_read_early(original) for one in self._doors):
                return None
        if retried is None and 2 * crowd >= self._config.quic.half_open:
            # Half full: from now on a client has to show first that it has its address, so
            # that forged ones cannot take the rest.
            door.socket.send([(self._ask_again(header, address), address)])
            return None
        # In turn: a new client waits behind those that wait, and costs no search for room.
        if self._places.full and (self._waiting or not self._make_room()):
            self._let_wait(door, header, data, address)
            return None
        configuration = copy.copy(self.configuration)
        size = datagram_size(self._config, self._address)
        configuration.max_datagram_size = size or BASE
        quic = FastConnection(
            configuration,
            streams=self._config.flow.streams,
            initial_window=self._config.flow.initial_window,
            gaps=self._config.quic.gaps,
            discover=size is None,
            bidi=self._config.limits.channels + 1 if self._bidi else 0,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
            early=self._tickets is not None,
            **_ticket_handlers(self._tickets, address[0], lambda: quic),
        )
        carrier = QuicCarrier(
            quic,
            door,
            is_client=False,
            peer=host_port(address),
            local=host_port(door.socket.address),
            config=self._config,
        )
        timeout = self._config.timing.connect_timeout
        self._places.add(carrier, origin_of(carrier.peer, None), self._loop.time())
        self._carriers[carrier] = set()
        self._half_open[carrier] = self._loop.call_later(timeout, self._overdue, carrier, timeout)
        door.route(header.destination_cid, carrier)
        door.route(quic.host_cid, carrier)
        return carrier

    def _overdue(self, carrier: QuicCarrier, timeout: float) -> None:
        error = ConnectionLost(f"{carrier.peer} did not finish its handshake in {timeout:g} s")
        if carrier in self._early:
            # Its client is told, if it is there: or it might repeat what was read here already.
            carrier.abandon(error)
        else:
            carrier.lose(error)

    def _let_wait(
        self, door: _Acceptor, header: QuicHeader, data: bytes, address: SocketAddress
    ) -> None:
        """Keeps a first packet, as the kernel keeps connections in a backlog."""
        self._warn_half_open()
        if len(self._waiting) < self._config.quic.backlog:
            self._waiting[header.destination_cid] = door, data, address
            if self._admission is None:
                self._admit_later(self._places.pause(self._loop.time()))

    def _admit_later(self, seconds: float) -> None:
        if self._admission is not None:
            self._admission.cancel()
        self._admission = self._loop.call_later(seconds, self._admit)

    def _admit(self) -> None:
        """Goes on with the packets that wait, as far as there is room."""
        self._admission = None
        for _ in range(min(len(self._waiting), _ADMITTED)):
            if self._places.full and not self._make_room():
                break
            door, data, address = self._waiting.pop(next(iter(self._waiting)))
            door.admit(data, address)
        if self._waiting:
            full = self._places.full
            self._admit_later(self._places.pause(self._loop.time()) if full else 0)

    def _make_room(self) -> bool:
        """Gives up a handshake that was silent, if there is one."""
        # What a peer has sent may lie unread behind others': it was silent only until then.
        silent = self._places.candidate(min(door.socket.read_until() for door in self._doors))
        if silent is None:
            return False
        reason = (
            "it did not go on with its handshake, and all places are taken (Quic.half_open, "
            "Timing.handshake_silence)"
        )
        silent.abandon(ConnectionLost(f"{silent.peer}: {reason}", reason=reason))
        return True

    def _ask_again(self, header: QuicHeader, address: SocketAddress) -> bytes:
        """A Retry packet (RFC 9000 section 8.1.2)."""
        source_id = os.urandom(self.configuration.connection_id_length)
        return encode_quic_retry(
            version=cast(int, header.version),
            source_cid=source_id,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=self._retry.create_token(
                address=address,
                original_destination_connection_id=header.destination_cid,
                retry_source_connection_id=source_id,
                now=self._loop.time(),
            ),
        )

    def accepted_early(self, carrier: QuicCarrier) -> None:
        """A ticket is back: the connection is handed on, and keeps its place meanwhile."""
        self._early.add(carrier)
        self._on_carrier(carrier)

    def established(self, carrier: QuicCarrier) -> None:
        """A handshake is complete: the connection is handed on."""
        if self._leave(carrier):
            if carrier in self._early:
                self._early.discard(carrier)
            else:
                self._on_carrier(carrier)

    def ended(self, carrier: QuicCarrier) -> None:
        """A connection is over: nothing of it stays in the tables."""
        self._leave(carrier)
        self._early.discard(carrier)
        self._carriers.pop(carrier, None)
        self._finish_if_idle()

    def _leave(self, carrier: QuicCarrier) -> bool:
        """Its handshake is over, well or not; False: it was before."""
        timer = self._half_open.pop(carrier, None)
        if timer is None:
            return False
        timer.cancel()
        self._places.discard(carrier)
        if self._waiting:
            self._admit_later(0)
        return True

    def keeps(self, connection_id: bytes) -> bool:
        """Whether a first packet for this connection id waits for a place."""
        return connection_id in self._waiting

    def is_half_open(self, carrier: QuicCarrier) -> bool:
        """Whether its handshake is not over."""
        return carrier in self._half_open

    def is_early(self, carrier: QuicCarrier) -> bool:
        """Whether it was handed on, and its handshake is not over."""
        return carrier in self._early

    def connection_ids(self, carrier: QuicCarrier) -> set[bytes]:
        """The ids routed to a carrier."""
        return self._carriers.get(carrier, set())

    def _finish_if_idle(self) -> None:
        if not self._accepting and not self._carriers and not self._finished.is_set():
            for door in self._doors:
                door.socket.close()
            self._finished.set()

    def _warn_half_open(self) -> None:
        self._delayed += 1
        now = self._loop.time()
        if now - self._warned_at >= _WARN_EVERY:
            self._warned_at = now
            logger.warning(
                "%s: %d connections are in their handshake (Quic.half_open); "
                "%d further attempts had to wait so far",
                self._address,
                len(self._half_open),
                self._delayed,
            )


def _ticket_handlers(
    record: TicketRecord | None, host: str, connection: Callable[[], FastConnection]
) -> dict[str, Any]:
    """What aioquic calls for tickets. They are for connections with bidirectional streams alone."""
    if record is None:
        return {}

    def take(name: bytes) -> SessionTicket | None:
        quic = connection()
        return None if quic.bidi_streams is None else record.take(name, (host, version_of(quic)))

    def add(ticket: SessionTicket) -> None:
        quic = connection()
        if quic.bidi_streams is not None:
            record.add(ticket, (host, version_of(quic)))

    return {"session_ticket_fetcher": take, "session_ticket_handler": add}


class _Acceptor:
    """One socket of a listener: the Host of the connections that came through it."""

    def __init__(self, listener: QuicListener, sock: socket.socket, config: Config) -> None:
        self._listener = listener
        self._routes: dict[bytes, QuicCarrier] = {}
        self._waiting: dict[QuicCarrier, None] = {}
        self._touched: dict[QuicCarrier, None] = {}
        self._new: list[QuicCarrier] = []
        self._farewells: dict[bytes, list[tuple[bytes, SocketAddress]]] = {}
        self._read_early: set[bytes] = set()
        """Connection ids with early data that was read, and whose handshake was not completed."""
        self._loop = asyncio.get_running_loop()
        self._id_length = listener.configuration.connection_id_length
        self._connect_timeout = config.timing.connect_timeout
        self.socket = UdpSocket(
            sock,
            buffer_size=config.quic.socket_buffer,
            on_datagrams=self._arrived,
            on_burst=self._burst,
            on_error=self._failed,
            on_writable=self._writable,
            connected=False,
        )

    # Host

    @property
    def blocked(self) -> bool:
        return self.socket.blocked

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        self.socket.send(datagrams)

    def send_run(self, parts: list[bytes], size: int, address: SocketAddress) -> bool:
        return self.socket.send_run(parts, size, address)

    def send_later(self, carrier: QuicCarrier) -> None:
        self._waiting[carrier] = None

    def route(self, connection_id: bytes, carrier: QuicCarrier) -> None:
        self._routes[connection_id] = carrier
        self._listener.connection_ids(carrier).add(connection_id)

    def unroute(self, connection_id: bytes) -> None:
        carrier = self._routes.pop(connection_id, None)
        if carrier is not None:
            self._listener.connection_ids(carrier).discard(connection_id)

    def accepted_early(self, carrier: QuicCarrier) -> None:
        self._listener.accepted_early(carrier)

    def established(self, carrier: QuicCarrier) -> None:
        self._listener.established(carrier)

    def ended(self, carrier: QuicCarrier, error: ConnectionLost) -> None:
        connection_ids = self._listener.connection_ids(carrier)
        for connection_id in connection_ids:
            self._routes.pop(connection_id, None)
        early = self._listener.is_early(carrier)
        if early:
            self._read_early |= connection_ids
        if carrier.farewell or early:
            repeats = carrier.farewell[:1] * _FAREWELLS
            self._farewells |= dict.fromkeys(connection_ids, repeats)
            # A client may send its first packet again for as long as it tries to connect.
            half_open = self._listener.is_half_open(carrier)
            seconds = self._connect_timeout if half_open else _FAREWELL_TIME
            self._loop.call_later(seconds, self._forget, connection_ids)
        self._waiting.pop(carrier, None)
        self._listener.ended(carrier)

    def _forget(self, connection_ids: set[bytes]) -> None:
        for connection_id in connection_ids:
            self._farewells.pop(connection_id, None)
        self._read_early -= connection_ids

    def has_read_early(self, connection_id: bytes) -> bool:
        """Whether early data of this connection id was read, with no complete handshake so far."""
        carrier = self._routes.get(connection_id)
        here = carrier is not None and self._listener.is_early(carrier)
        return here or connection_id in self._read_early

    # the socket

    def _arrived(self, buffer: memoryview, size: int, address: SocketAddress) -> tuple[int, int]:
        count = frames = 0
        now = self._loop.time()
        routes, id_stop = self._routes, 1 + self._id_length
        carrier = previous = None
        for at in range(0, len(buffer), size):
            data = buffer[at : at + size]
            # A short header (the common case) has the connection id right after its first byte.
            if not data[0] & 0x80:
                carrier = routes.get(bytes(data[1:id_stop]))
            else:
                carrier = self._long_header(bytes(data), address)
            if carrier is not previous and previous is not None:
                previous.deliver()
            previous = carrier
            count += 1
            if carrier is not None:
                frames += carrier.receive(data, address, now)
                self._touched[carrier] = None
                if frames >= BURST_FRAMES:
                    break
            elif self._farewells and not data[0] & 0x80:
                self._repeat_farewell(bytes(data[1:id_stop]))
        if carrier is not None:
            carrier.deliver()
        return count, frames

    def admit(self, data: bytes, address: SocketAddress) -> None:
        """Takes a datagram that had to wait for a place."""
        carrier = self._long_header(data, address)
        if carrier is not None:
            carrier.receive(memoryview(data), address, self._loop.time())
            carrier.deliver()
            self._touched[carrier] = None
            self._burst()

    def _burst(self) -> None:
        touched, self._touched = self._touched, {}
        new, self._new = self._new, []
        for carrier in new:
            if not carrier.started:
                # Not a QUIC client's first packet, whatever its header says: it takes no place.
                carrier.lose(ConnectionLost(f"{carrier.peer} sent no valid Initial packet"))
        for carrier in touched:
            carrier.after_input()

    def _long_header(self, data: bytes, address: SocketAddress) -> QuicCarrier | None:
        """Whose packet it is; a new connection's for a first Initial; None: to be ignored."""
        # Before the rest of the header is read: packets sent again may be many.
        connection_id = data[6 : 6 + data[5]] if len(data) > 6 else b""
        if connection_id in self._farewells:
            # A first packet sent again must not bring back a connection that was closed here.
            self._repeat_farewell(connection_id)
            return None
        if self._listener.keeps(connection_id):
            return None
        try:
            header = pull_quic_header(QuicBuffer(data=data), host_cid_length=self._id_length)
        except ValueError:
            return None
        carrier = self._routes.get(header.destination_cid)
        if carrier is not None:
            return carrier
        if len(data) < SMALLEST_MAX_DATAGRAM_SIZE:
            return None  # no answer: it would be larger than what asked for it
        supported = self._listener.configuration.supported_versions
        if header.packet_type == QuicPacketType.VERSION_NEGOTIATION:
            return None
        if header.version not in supported:
            answer = encode_quic_version_negotiation(
                source_cid=header.destination_cid,
                destination_cid=header.source_cid,
                supported_versions=supported,
            )
            self.socket.send([(answer, address)])
            return None
        if header.packet_type != QuicPacketType.INITIAL:
            return None
        carrier = self._listener.accept(self, header, data, address)
        if carrier is not None:
            self._new.append(carrier)
        return carrier

    def _repeat_farewell(self, connection_id: bytes) -> None:
        """A peer that still sends on a closed connection has not received the close."""
        farewell = self._farewells.get(connection_id)
        if farewell:
            self.socket.send([farewell.pop()])

    def _failed(self, error: OSError) -> None:
        # An unconnected socket reports what one peer's network did; the others go on.
        logger.debug("%s: %s", self._listener._address, error)

    def _writable(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for carrier in waiting:
            carrier.transmit()
