"""Flow control of QUIC. With ``packets`` it touches what is private to aioquic.

FlowConnection is aioquic's QuicConnection with flow control that we own:

- a peer's stream is credited by ``credit`` alone, and never because bytes arrived;
- the connection-wide limit never binds: it is kept at what all streams may send together;
- stream slots return when a stream's end was received, and as the user gives more or fewer;
- slots of bidirectional streams return when both directions have ended (BidiSlots);
- what is written is referenced, not copied, until it is acknowledged (``send_buffer``);
- only streams with something to do are visited for each packet, not all that are open;
- stream data is sent by ``packets``, and never by aioquic.

``tests/carriers/test_aioquic_names.py`` has a test for each private name used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from aioquic._buffer import Buffer as QuicBuffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.congestion.cubic import CubicCongestionControl
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import (
    CONNECTION_LIMIT_FRAME_CAPACITY,
    END_STATES,
    MAX_STREAM_DATA_FRAME_CAPACITY,
    Limit,
    QuicConnection,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
)
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicSentPacket
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.tls import Epoch, ExtensionType
from cryptography import x509

from aqueduct.carriers.contract import BIDI
from aqueduct.carriers.quic.send_buffer import SendBuffer, SendTotals
from aqueduct.carriers.quic.tls import BIDI_ALPN

__all__ = [
    "BidiSlots",
    "FlowConnection",
    "capped_congestion_control",
    "forget_streams",
    "version_of",
]

_DATAGRAM_QUEUE: Final = 256
_SLOTS: Final = 32  # of streams, that are worth a frame of their own
_DATAGRAM_MARGIN: Final = 64  # for an ACK and other frames in front of a DATAGRAM


class FlowConnection(QuicConnection):
    """A QUIC connection whose windows follow consumption. Not thread-safe; does no I/O."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        *,
        streams: int,
        initial_window: int,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        bidi: int = 0,
        **handlers: Any,
    ) -> None:
        """``bidi``: so many bidirectional streams of the peer; of a server: if it wants them.

        ``handlers``: aioquic's, of tickets and tokens.
        """
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
            **handlers,
        )
        self._window = initial_window
        self._local_max_streams_uni = Limit(
            QuicFrameType.MAX_STREAMS_UNI, "max_streams_uni", streams
        )
        self._local_max_streams_bidi = Limit(QuicFrameType.MAX_STREAMS_BIDI, "max_streams_bidi", 0)
        # What the peer may have sent when every stream, open or openable, is at its limit.
        self._promised = streams * initial_window
        self._stream_budget = streams
        self._slots_earned = streams
        self._slots_given = streams
        self._slots_extra = 0
        self._streams: _StreamTable = _StreamTable()
        self._queued: set[int] = set()
        self._queued_peer_streams = 0  # of the peer's, those above are in the queue already
        self._totals = SendTotals()
        self.closed_by_peer = False
        """Whether the end came from the peer."""
        self.bidi_streams = BidiSlots(self, bidi) if bidi else None
        """None: the connection has none."""
        self.forgotten = 0
        """Streams that were opened in vain: their early data was rejected."""
        self.remembered_chain: Sequence[x509.Certificate] = ()
        """The certificates that the peer showed when it gave the ticket of this connection."""

    # streams

    @property
    def openable(self) -> int:
        """How many more streams the peer lets us open now."""
        return max(0, self._remote_max_streams_uni - self._local_next_stream_id_uni // 4)

    @property
    def opened(self) -> int:
        """How many streams we opened, those that were forgotten included."""
        return self.forgotten + self._local_next_stream_id_uni // 4

    @property
    def opened_by_peer(self) -> int:
        """How many streams the peer opened."""
        return self._local_max_streams_uni.used

    def open(self) -> SendBuffer:
        """Opens the next stream."""
        stream_id = self._local_next_stream_id_uni
        stream: Any = self._get_or_create_stream_for_send(stream_id)
        self._streams_queue.pop()  # where aioquic puts every new stream; it has no work yet
        sender = SendBuffer(stream_id, self._totals, self._wake)
        stream.sender = sender
        return sender

    def take_released(self) -> list[tuple[SendBuffer, int]]:
        """The streams with newly acknowledged bytes, and how many."""
        if not self._totals.released:
            return []
        released, self._totals.released = self._totals.released, []
        return [(sender, sender.take_released()) for sender in released]

    def take_finished(self) -> list[SendBuffer]:
        """The streams whose end was acknowledged since the last call."""
        finished, self._totals.finished = self._totals.finished, []
        return finished

    def drained(self) -> bool:
        """Whether the peer has acknowledged everything that was written, ends included."""
        return (
            self._totals.queued == 0
            and not self._datagrams_pending
            and not any(
                not stream.sender.is_finished and stream.sender.closed
                for stream in self._streams.all()
                if isinstance(stream.sender, SendBuffer)
            )
        )

    def credit(self, stream_id: int, limit: int) -> None:
        """Raises what the peer may send on its stream to ``limit``, counted from its start."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            return
        if limit > stream.max_stream_data_local:
            self._promised += limit - stream.max_stream_data_local
            stream.max_stream_data_local = limit
            self._streams.dirty[stream_id] = stream

    def stop(self, stream_id: int, error_code: int) -> None:
        """Asks the peer to send no more on its stream; without effect if it ended."""
        stream: Any = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            return
        stream.receiver.stop(error_code)

        def delivered(delivery: QuicDeliveryState) -> None:
            if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
                stream.receiver.stop_pending = True
                self._wake(stream_id)

        stream.receiver.on_stop_sending_delivery = delivered
        self._wake(stream_id)

    def ended(self, stream_id: int) -> None:
        """The end of the peer's stream, or its reset, was taken from the events."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._promised -= stream.max_stream_data_local - stream.receiver.highest_offset
            self._streams.dirty.pop(stream_id, None)
            if not stream_id & 2 and self.bidi_streams is not None:
                self.bidi_streams.taken.add(stream_id)
            self._wake(stream_id)

    def extra_streams(self, count: int) -> None:
        """Gives the peer ``count`` more slots; below zero: keeps slots of ended streams back."""
        self._slots_extra = count

    # datagrams

    @property
    def datagram_limit(self) -> int:
        """The largest datagram that fits a packet and that the peer takes; 0: none."""
        peer = self._remote_max_datagram_frame_size
        if peer is None:
            return 0
        packet = self._max_datagram_size - 3 - len(self._peer_cid.cid) - 16 - _DATAGRAM_MARGIN
        return max(0, min(packet, peer) - 5)

    @property
    def datagram_room(self) -> int:
        """How many datagrams the queue takes now."""
        return _DATAGRAM_QUEUE - len(self._datagrams_pending)

    def send_datagram(self, data: bytes) -> bool:
        """Queues a datagram; False if it can never leave or the queue is full."""
        if len(data) > self.datagram_limit or len(self._datagrams_pending) >= _DATAGRAM_QUEUE:
            return False
        self.send_datagram_frame(data)
        return True

    # the connection

    @property
    def started(self) -> bool:
        """Whether a packet of the peer was understood."""
        return self._state is not QuicConnectionState.FIRSTFLIGHT

    @property
    def unconfirmed(self) -> bool:
        """Whether this side does not know of the peer that it has all keys."""
        return not self._handshake_confirmed

    @property
    def termination(self) -> ConnectionTerminated | None:
        """How the connection ended, as soon as nothing more of it can be used."""
        return self._close_event if self._state in END_STATES else None

    @property
    def peer_chain(self) -> list[x509.Certificate]:
        """The certificates that the peer showed, its own first; empty: none."""
        context = getattr(self, "tls", None)
        if context is None or context._peer_certificate is None:
            return list(self.remembered_chain)
        return [context._peer_certificate, *context._peer_certificate_chain]

    @property
    def rtt(self) -> float:
        """The smoothed round-trip time in seconds; 0.0 before the first sample."""
        return self._loss._rtt_smoothed

    @property
    def idle_timeout(self) -> float:
        """Seconds of silence that end the connection: the shorter of what both sides set."""
        return self._idle_timeout()

    @property
    def has_events(self) -> bool:
        """Whether ``next_event`` has one."""
        return bool(self._events)

    def counters(self) -> dict[str, object]:
        """Windows, for people."""
        return {
            "rtt": self._loss._rtt_smoothed,
            "congestion_window": self._loss.congestion_window,
            "in_flight": self._loss.bytes_in_flight,
            "datagram_size": self._max_datagram_size,
            "packets_lost": getattr(self._loss._cc, "packets_lost", 0),
            "queued": self._totals.queued,
            "openable": self.openable,
            "opened": self.opened,
            "opened_by_peer": self.opened_by_peer,
            "open_streams": len(self._streams),
            "streams_with_work": len(self._streams_queue),
            "may_send": self._remote_max_data - self._remote_max_data_used,
            "may_receive": self._local_max_data.value - self._local_max_data.used,
            "bidi_openable": 0 if self.bidi_streams is None else self.bidi_streams.openable,
        }

    # overrides

    def _close_begin(self, is_initiator: bool, now: float) -> None:
        self.closed_by_peer = not is_initiator
        super()._close_begin(is_initiator, now)

    def _write_application(
        self, builder: QuicPacketBuilder, network_path: QuicNetworkPath, now: float
    ) -> None:
        self._trim_queue()
        try:
            super()._write_application(builder, network_path, now)
        finally:
            self._trim_queue()

    def _trim_queue(self) -> None:
        """Leaves in the queue what aioquic has to visit for each packet; it adds all streams."""
        queue = self._streams_queue
        if queue:
            queue[:] = [s for s in queue if s.stream_id in self._streams and _has_work(s)]
            self._queued = {cast(int, s.stream_id) for s in queue}
        self._queued_peer_streams = self._local_max_streams_uni.used

    def _limits_due(self) -> bool:
        """Whether the peer is to hear of a limit of the connection."""
        data, streams = self._local_max_data, self._local_max_streams_uni
        return (
            self._promised > data.value
            or data.value != data.sent
            or streams.sent != self._slots_given
            or self._slots_to_give() > 0
            or (self.bidi_streams is not None and self.bidi_streams.due())
        )

    def _slots_to_give(self) -> int:
        """How many stream slots to announce now; 0 while they are not worth a packet.

        They are when they are many, or when the peer has used half of what it has.
        """
        streams = self._local_max_streams_uni
        given = self._slots_given
        # aioquic raises the value for each stream that ends.
        more = self._slots_earned + self._slots_extra + streams.value - 2 * given
        left = given - streams.used
        return more if more >= _SLOTS or left * 2 <= self._stream_budget else 0

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        data, streams = self._local_max_data, self._local_max_streams_uni
        more = max(0, self._slots_to_give())
        self._slots_earned += streams.value - self._slots_given
        self._promised += more * self._window
        self._slots_given = streams.value = self._slots_given + more
        if self.bidi_streams is not None:
            self._promised += self.bidi_streams.give() * self._window
        data.value = max(data.value, self._promised)
        limits = data, streams, self._local_max_streams_bidi
        due = [limit for limit in limits if limit.value != limit.sent]
        for limit in due:
            buffer = builder.start_frame(
                limit.frame_type,
                capacity=CONNECTION_LIMIT_FRAME_CAPACITY,
                handler=self._on_connection_limit_delivery,
                handler_args=(limit,),
            )
            buffer.push_uint_var(limit.value)
            limit.sent = limit.value

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: Any
    ) -> None:
        if stream.max_stream_data_local_sent != stream.max_stream_data_local:
            buffer = builder.start_frame(
                QuicFrameType.MAX_STREAM_DATA,
                capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
                handler=self._on_max_stream_data_delivery,
                handler_args=(stream,),
            )
            buffer.push_uint_var(stream.stream_id)
            buffer.push_uint_var(stream.max_stream_data_local)
            stream.max_stream_data_local_sent = stream.max_stream_data_local
        del self._streams.dirty[stream.stream_id]

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: Any) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            stream.max_stream_data_local_sent = 0
            self._streams.dirty[stream.stream_id] = stream

    def _on_path_challenge_delivery(
        self, delivery: QuicDeliveryState, network_path: QuicNetworkPath
    ) -> None:
        super()._on_path_challenge_delivery(delivery, network_path)
        if network_path is self._network_paths[0] and not network_path.is_validated:
            # Acknowledged, but the answer is not here: a PATH_RESPONSE is never sent again. Without
            # another challenge the validation would fail, and all be sent to the old address.
            network_path.local_challenge_sent = False

    def _handle_max_stream_data_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer
    ) -> None:
        start = buf.tell()
        super()._handle_max_stream_data_frame(context, frame_type, buf)
        end = buf.tell()
        buf.seek(start)
        self._wake(buf.pull_uint_var())
        buf.seek(end)

    def _wake(self, stream_id: int) -> None:
        """A stream has something to do."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._wake_general(stream)

    def _wake_general(self, stream: Any) -> None:
        """Puts a stream into the queue that aioquic visits for each packet, if it has to."""
        stream_id = stream.stream_id
        mine = bool(stream_id & 1) is not self._is_client
        if stream.is_finished:
            if not stream_id & 2:
                if self.bidi_streams is not None:
                    self.bidi_streams.finished(stream_id, mine)
                return
            del self._streams[stream_id]
            if not mine:
                self._local_max_streams_uni.value += 1
        elif stream_id not in self._queued and _has_work(stream):
            if stream_id & 2 and not mine and stream_id // 4 >= self._queued_peer_streams:
                return  # aioquic queued it when it was opened
            self._queued.add(stream_id)
            self._streams_queue.append(stream)


class BidiSlots:
    """The bidirectional streams of a connection: who may open how many, and what they cost.

    Both sides agree on them by ALPN, which a server learns in the handshake. Of a connection
    without them ``FlowConnection.bidi_streams`` is None from then on.
    """

    def __init__(self, connection: Any, slots: int) -> None:
        """``slots``: how many the FlowConnection ``connection`` lets the peer have at once."""
        self.agreed = False
        """Whether both sides want them."""
        self.forgotten = 0
        """Of those that we opened: in vain, as their early data was rejected."""
        self.taken: set[int] = set()
        """Streams of which the user has heard the end."""
        self._stopped: set[int] = set()
        self._connection = connection
        self._slots = slots
        self._given = 0
        # aioquic calls these by the connection; without such streams nothing is called more.
        connection._alpn_handler = self._negotiated
        if connection._is_client:
            self._allow()

    @property
    def openable(self) -> int:
        """How many more the peer lets us open now."""
        connection = self._connection
        opened = connection._local_next_stream_id_bidi // 4
        allowed: int = connection._remote_max_streams_bidi - opened
        return max(0, allowed) if self.agreed else 0

    @property
    def opened(self) -> int:
        """How many we opened, those that were forgotten included."""
        following: int = self._connection._local_next_stream_id_bidi
        return self.forgotten + following // 4

    @property
    def opened_by_peer(self) -> int:
        """How many the peer opened."""
        used: int = self._connection._local_max_streams_bidi.used
        return used

    def has(self, number: int) -> bool:
        """Whether the stream that the carrier gives this number was opened."""
        opened = self.opened_by_peer if number & 1 else self.opened
        return number >= BIDI and (number ^ BIDI) >> 1 < opened

    def number_of(self, stream_id: int) -> int:
        """The number that the carrier gives to a stream."""
        theirs: bool = bool(stream_id & 1) is self._connection._is_client
        index = stream_id >> 2
        return BIDI | index << 1 | 1 if theirs else BIDI | index + self.forgotten << 1

    def id_of(self, number: int) -> int:
        """The id in QUIC of the stream with this number; below 0: it was forgotten."""
        index, theirs = (number ^ BIDI) >> 1, number & 1
        if not theirs:
            index -= self.forgotten
        return index << 2 | (theirs ^ (not self._connection._is_client))

    def open(self) -> SendBuffer:
        """Opens the next one; what sends on it."""
        connection = self._connection
        stream = connection._get_or_create_stream_for_send(connection._local_next_stream_id_bidi)
        connection._streams_queue.pop()  # as with those of one direction
        connection._promised += connection._window
        return self._own(stream)

    def forget(self) -> None:
        """Those that we opened so far are gone, and their ids are free."""
        self.forgotten = self.opened
        self.taken.clear()
        self._stopped.clear()

    def sender(self, stream_id: int) -> SendBuffer | None:
        """What sends on an open stream; None: it is over."""
        stream = self._connection._streams.get(stream_id)
        return None if stream is None else cast(SendBuffer, stream.sender)

    def finished(self, stream_id: int, mine: bool) -> None:
        """Both directions have ended: the stream is forgotten once the user knows it, too."""
        if stream_id in self.taken:
            self.taken.remove(stream_id)
            self._stopped.discard(stream_id)
            del self._connection._streams[stream_id]
            if not mine:
                self._connection._local_max_streams_bidi.value += 1

    def stopped(self, stream_id: int) -> bool:
        """The peer has stopped a stream; whether that is news. It says so again if it must."""
        if stream_id in self._stopped or stream_id not in self._connection._streams:
            return False
        self._stopped.add(stream_id)
        return True

    def due(self) -> bool:
        """Whether the peer is to hear of more slots: many, or it has used half of them."""
        limit = self._connection._local_max_streams_bidi
        more = limit.value - self._given
        if more >= _SLOTS or (more and (self._given - limit.used) * 2 <= self._slots):
            return True
        return bool(limit.sent != self._given)

    def give(self) -> int:
        """How many slots are announced more now."""
        before, self._given = self._given, self._connection._local_max_streams_bidi.value
        return self._given - before

    def _negotiated(self, protocol: str) -> None:
        """TLS has chosen a protocol; a server's transport parameters are sent behind this."""
        connection = self._connection
        QuicConnection._alpn_handler(connection, protocol)
        if protocol != BIDI_ALPN:
            connection.bidi_streams = None
            return
        self.agreed = True
        connection._get_or_create_stream = self._get_or_create
        if not connection._is_client:
            self._allow()
            parameters = connection._serialize_transport_parameters()
            connection.tls.handshake_extensions = [
                (ExtensionType.QUIC_TRANSPORT_PARAMETERS, parameters)
            ]

    def _allow(self) -> None:
        """Puts them into the transport parameters, which are not sent yet."""
        connection = self._connection
        limit, data = connection._local_max_streams_bidi, connection._local_max_data
        limit.value = limit.sent = self._given = self._slots
        connection._promised += self._slots * connection._window
        data.value = data.sent = connection._promised

    def _get_or_create(self, frame_type: int, stream_id: int) -> Any:
        """As aioquic's; streams that the peer opens so send by ours."""
        connection = self._connection
        before = self.opened_by_peer
        stream = QuicConnection._get_or_create_stream(connection, frame_type, stream_id)
        count = self.opened_by_peer - before
        if count:
            queue = connection._streams_queue
            for new in queue[-count:]:
                self._own(new)
            del queue[-count:]  # as with those that we open
        return stream

    def _own(self, stream: Any) -> SendBuffer:
        connection = self._connection
        sender = SendBuffer(stream.stream_id, connection._totals, connection._wake)
        stream.sender = sender
        return sender


def forget_streams(connection: Any) -> None:
    """All streams that a FlowConnection has opened are gone, and so is what waits to be sent.

    The next ones have the first ids again. The peer must not know of any of them.
    """
    for stream in connection._streams.all():
        stream.sender.drop()
        connection._promised -= stream.max_stream_data_local
    connection.forgotten = connection.opened
    if connection.bidi_streams is not None:
        connection.bidi_streams.forget()
    connection._streams.clear()
    connection._streams.dirty.clear()
    connection._streams_queue.clear()
    connection._queued.clear()
    connection._totals.released.clear()
    connection._totals.finished.clear()
    connection._datagrams_pending.clear()
    connection._local_next_stream_id_uni = 2 + (not connection._is_client)
    connection._local_next_stream_id_bidi = int(not connection._is_client)


class _StreamTable(dict[int, Any]):
    """The streams by number, of which ``values`` shows those whose limit must be announced.

    aioquic calls ``values`` in one place: for each packet, to write MAX_STREAM_DATA for every
    stream there is. With a thousand open streams that walk would cost more than the packet.
    """

    __slots__ = ("dirty",)

    def __init__(self) -> None:
        super().__init__()
        self.dirty: dict[int, Any] = {}

    def values(self) -> Sequence[Any]:  # type: ignore[override]
        return tuple(self.dirty.values()) if self.dirty else ()

    def all(self) -> Iterable[Any]:
        """All of them."""
        return super().values()


def _has_work(stream: Any) -> bool:
    """Whether aioquic's own code has something to do for the stream."""
    receiver = stream.receiver  # a stop of one that has ended would make aioquic forget it early
    return bool((receiver.stop_pending and not receiver.is_finished) or stream.sender.reset_pending)


def version_of(connection: FlowConnection) -> int:
    """The version of QUIC that a connection speaks, once its first packet was sent or has come."""
    keys = connection._cryptos[Epoch.ONE_RTT].send
    if not keys.is_valid():
        keys = connection._cryptos[Epoch.INITIAL].send
    assert keys.version is not None
    return keys.version


def capped_congestion_control(name: str, limit: int) -> str:
    """Registers ``name`` ("reno" or "cubic") with a window of at most ``limit`` bytes.

    Nothing in aioquic bounds the window; without loss it grows beyond any socket's buffer.
    """
    base: Any = {"reno": RenoCongestionControl, "cubic": CubicCongestionControl}[name]

    def on_packet_acked(self: Any, *, now: float, packet: QuicSentPacket) -> None:
        base.on_packet_acked(self, now=now, packet=packet)
        if self.congestion_window > limit:
            self.congestion_window = limit

    def on_packets_lost(self: Any, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        lost = tuple(packets)
        probes = [packet for packet in lost if getattr(packet, "is_probe", False)]
        if probes:  # of the path: no sign of its load
            base.on_packets_expired(self, packets=probes)
            lost = tuple(packet for packet in lost if packet not in probes)
        if lost:
            self.packets_lost += len(lost)
            base.on_packets_lost(self, now=now, packets=lost)

    members = {
        "packets_lost": 0,
        "on_packet_acked": on_packet_acked,
        "on_packets_lost": on_packets_lost,
    }
    capped = type("Capped", (base,), members)

    def make(*, max_datagram_size: int) -> QuicCongestionControl:
        control: QuicCongestionControl = capped(max_datagram_size=max_datagram_size)
        return control

    registered = f"{name}-{limit}"
    register_congestion_control(registered, make)
    return registered
