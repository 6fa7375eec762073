"""The packets that carry nearly all bytes, built and read without aioquic's general machinery.

aioquic copies each byte about ten times on its way into a packet and visits every kind of
frame for it. After the handshake almost every packet holds STREAM frames alone; FastConnection
writes those itself, straight from the written buffers, and reads them itself. Everything else
(handshake, ACK, limits, resets, pings, DATAGRAM, migration, close, and whatever looks odd) goes
the library's way, by the same packet numbers, keys, loss recovery and congestion control. So do
the packets of early data, but for their STREAM frames.

Beside ``flow_control`` this is the only module that touches what is private to aioquic; see
``tests/carriers/test_aioquic_names.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from aioquic import tls
from aioquic._buffer import Buffer as QuicBuffer
from aioquic.quic.connection import (
    END_STATES,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicErrorCode, QuicPacketType, decode_packet_number
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketPacer
from aioquic.quic.stream import StreamFinishedError
from cryptography.exceptions import InvalidTag

from aqueduct.carriers.quic.flow_control import FlowConnection, forget_streams
from aqueduct.carriers.quic.path_mtu import BASE, PathMtu
from aqueduct.carriers.quic.send_buffer import SendBuffer
from aqueduct.carriers.quic.udp import RUN_BYTES, RUN_PACKETS, SocketAddress
from aqueduct.carriers.quic.varint import decode_varint
from aqueduct.config import DEFAULT

__all__ = ["EarlyData", "FastConnection", "FrameCount", "Pacer", "PacketBuilder"]

_TAG: Final = 16
_PACKET_NUMBER: Final = 2
_LEAST_FRAME: Final = 64  # room below which no further stream joins a packet
_FRAME_OVERHEAD: Final = 1 + 4 + 4 + 2
_RUNS: Final = 4  # of one connection, before the loop looks after others
_KEY_PACKETS: Final = 1 << 22  # half of what AES-GCM allows one key (RFC 9001 section 6.6)
_BURST_TIME: Final = 0.002  # seconds of sending at once: the loop's timers count milliseconds
_PACING_GAIN: Final = 1.25  # RFC 9002 section 7.7

_HEAD: Final = 1 + 20 + 4 + _TAG  # the longest header and the sample for its protection


class PacketBuilder(Protocol):
    """Where packets go."""

    @property
    def blocked(self) -> bool:
        """Whether the socket takes no datagrams now."""

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        """Sends datagrams."""

    def send_run(self, parts: list[bytes], size: int, address: SocketAddress) -> bool:
        """Sends datagrams given as two parts each, all of ``size`` bytes but for the last.

        False: this machine sends none of that size.
        """


class FastConnection(FlowConnection):
    """A FlowConnection with its own way for packets of STREAM frames."""

    def __init__(
        self,
        *args: Any,
        gaps: int = DEFAULT.quic.gaps,
        discover: bool = False,
        early: bool = False,
        **kwargs: Any,
    ) -> None:
        """As FlowConnection.

        ``gaps``: how many a stream may have between the pieces that came. ``discover``: datagrams
        become as large as the path takes; else their size is fixed. ``early``: with early data, if
        the client has a ticket.
        """
        self.frames = FrameCount(self, gaps)
        super().__init__(*args, **kwargs)
        self.frames.streams = self._streams
        self._data_queue: deque[Any] = deque()  # streams with data that may leave
        self._pacer = Pacer(max_datagram_size=self._max_datagram_size)
        self._loss._pacer = self._pacer
        self._run_start = self._run_stop = 0  # packet numbers received, not in ack_queue yet
        self._key_sent = 0
        self._cached: tuple[Any, Any] | None = None
        self._path_mtu = PathMtu() if discover else None
        self.early_data = EarlyData(self, self._loss) if early else None
        """None: the connection has none."""

    # sending

    def transmit(self, now: float, outlet: PacketBuilder) -> bool:
        """Sends what may leave now: first what is not stream data, then runs of packets.

        True: there is more, and nothing but fairness to others holds it back.
        """
        self._settle_received()
        path = self._network_paths[0] if self._network_paths else None
        path_mtu = self._path_mtu
        if path_mtu is not None:
            path_mtu.use(path)
            if path_mtu.size != self._max_datagram_size:
                self._max_datagram_size = path_mtu.size
                _resize(path_mtu.size, self._pacer, self._loss._cc)
                limit, pending = self.datagram_limit, self._datagrams_pending
                for data in [each for each in pending if len(each) > limit]:
                    pending.remove(data)  # it would never leave, nor what is behind it
        if self._general_pending(now):
            first = self._packet_number
            datagrams = self.datagrams_to_send(now)
            if datagrams:
                outlet.send(datagrams)
            if path_mtu is not None and path_mtu.size > BASE:
                _watch_large(
                    path_mtu, self._application()[0].sent_packets, range(first, self._packet_number)
                )
        self._pacing_at = None
        if (
            path is None
            or not self._handshake_complete
            or self._state is not QuicConnectionState.CONNECTED
            or self._close_event is not None
            or not path.is_validated
        ):
            return False
        if path_mtu is not None and self._handshake_confirmed and not outlet.blocked:
            self._probe_path(path_mtu, now, outlet)
        if not self._data_queue:
            return False
        for _ in range(_RUNS):
            if outlet.blocked:
                return False
            allowance = self._pacer.allowance(now)
            if allowance <= 0:
                self._pacing_at = self._pacer.ready_at(now)
                return False
            run = self._run(now, allowance)
            if not run:
                return False
            size = self._max_datagram_size
            if not outlet.send_run(run, size, path.addr) and path_mtu is not None:
                path_mtu.refused(size)
                return True
            if not self._data_queue:
                return False
        return True

    # the size of datagrams

    def _probe_path(self, path_mtu: PathMtu, now: float, outlet: PacketBuilder) -> None:
        """Sends what looks for a larger datagram size (RFC 8899): a PING and PADDING each."""
        control = self._loss._cc
        address = self._network_paths[0].addr
        for size in path_mtu.probes(now, control.congestion_window - control.bytes_in_flight):
            space, keys = self._application()
            number = self._packet_number
            header = _prefix(keys, self._peer_cid.cid) + _short_number(number)
            plain = b"\x01".ljust(size - len(header) - _TAG, b"\0")
            sealed = [header, _encrypt(keys.send, number, plain, header)]
            _protect(keys.send.hp, sealed)
            if not outlet.send_run(sealed, size, address):
                path_mtu.refused(size)  # it never left: its number is free, and so is its window
                continue
            handlers = [(path_mtu.on_probe, (size, path_mtu.search))]
            packet = _Probe(number, now, size, handlers)
            self._loss.on_packet_sent(packet=cast(Any, packet), space=space)
            self._packet_number = number + 1
            self._key_sent += 1

    # packets

    def _write_application(self, builder: QuicPacketBuilder, network_path: Any, now: float) -> None:
        if self.early_data is not None and not self._handshake_complete:
            self.early_data.write(builder)
        super()._write_application(builder, network_path, now)

    def _general_pending(self, now: float) -> bool:
        """Whether there is anything to send for aioquic's own code."""
        if not self._handshake_confirmed:
            return True
        if self._queued_peer_streams != self._local_max_streams_uni.used:
            self._trim_queue()
        ack_at = self._spaces[tls.Epoch.ONE_RTT].ack_at
        path = self._network_paths[0]
        return bool(
            (ack_at is not None and ack_at <= now)
            or self._streams_queue
            or self._streams.dirty
            or self._limits_due()
            or self._ping_pending
            or self._probe_pending
            or self._datagrams_pending
            or self._close_pending
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._remote_preferred_address is not None
            or len(self._network_paths) > 1
            or path.remote_challenges
            or not path.is_validated
            or any(not connection_id.was_sent for connection_id in self._host_cids)
            or not self._crypto_streams[tls.Epoch.ONE_RTT].sender.buffer_is_empty
        )

    def _run(self, now: float, allowance: float) -> list[bytes]:
        """Packets for one call of the kernel, as header and payload in turn.

        No more at a time, so that their memory is still in the processor's cache when the kernel
        reads it, and used again by the next run: measured, this halves the cost of a packet.
        """
        control = self._loss._cc
        space, keys = self._application()
        size = self._max_datagram_size
        prefix = _prefix(keys, self._peer_cid.cid)
        header_size = len(prefix) + _PACKET_NUMBER
        room = size - header_size - _TAG
        packets = min(
            RUN_PACKETS,
            RUN_BYTES // size,
            (control.congestion_window - control.bytes_in_flight) // size,
            int(min(allowance, RUN_BYTES)) // size + 1,  # infinite before the first round trip
        )
        sealed: list[bytes] = []
        spent = 0
        first = number = self._packet_number
        for number in range(first, first + packets):
            handlers: list[Any] = []
            plain = self._fill(room, handlers)
            if not plain:
                break
            header = prefix + _short_number(number)
            payload = _encrypt(keys.send, number, plain, header)
            sealed.append(header)
            sealed.append(payload)
            sent = header_size + len(payload)
            if number == first and sent > BASE and self._path_mtu is not None:
                handlers.append((self._path_mtu.on_large, (now, self._path_mtu.search)))
            space.sent_packets[number] = _SentPacket(number, now, sent, handlers)
            spent += sent
            if sent < size:
                break  # the kernel wants all but the last of a run to be of one size
        if not sealed:
            return sealed
        count = len(sealed) // 2
        self._packet_number = first + count
        # As QuicPacketRecovery.on_packet_sent does for each; the run counts as one here.
        space.ack_eliciting_in_flight += count
        if self._loss.handshake_confirmed:
            self._loss._time_of_last_sent_ack_eliciting_packet = now
        control.on_packet_sent(packet=cast(Any, _SentPacket(first, now, spent, [])))
        _protect(keys.send.hp, sealed)
        self._pacer.spend(spent)
        if not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True
        self._key_sent += count
        if self._key_sent >= _KEY_PACKETS:
            self._key_sent = 0
            self.request_key_update()
            self.send_ping(0)  # the update rides on the next packet of aioquic's own
        self._network_paths[0].bytes_sent += spent
        return sealed

    def _fill(self, room: int, handlers: list[Any]) -> bytes:
        """The frames of one packet of at most ``room`` bytes; ``handlers``: of their delivery."""
        queue = self._data_queue
        parts: list[Any] = []
        size = room
        for _ in range(len(queue)):
            stream = queue.popleft()
            sender = stream.sender
            before = sender.highest_offset
            limit = stream.max_stream_data_remote
            allowed = before + self._remote_max_data - self._remote_max_data_used
            frame = sender.frame(room, min(allowed, limit), parts)
            if sender.sendable(limit):
                queue.append(stream)
            else:
                sender.queued = False  # the peer's credit, or more data, wakes it
            if frame is None:
                continue
            handlers.append((sender.on_data_delivery, frame))
            self._remote_max_data_used += sender.highest_offset - before
            room -= frame[1] - frame[0] + _FRAME_OVERHEAD
            if room < _LEAST_FRAME:
                break
        plain = b"".join(parts)
        if size - _LEAST_FRAME < len(plain) < size and queue:
            plain = plain.ljust(size, b"\x00")  # PADDING: the packets of a run are of one size
        return plain

    def _application(self) -> tuple[Any, Any]:
        """The packet number space and the keys of 1-RTT packets."""
        cached = self._cached
        if cached is None:
            epoch = tls.Epoch.ONE_RTT
            cached = self._spaces[epoch], self._cryptos[epoch]
            if self._handshake_complete:
                self._cached = cached
        return cached

    def _wake(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        sender = stream.sender
        if (
            isinstance(sender, SendBuffer)
            and not sender.queued
            and sender.sendable(stream.max_stream_data_remote)
        ):
            sender.queued = True
            self._data_queue.append(stream)
        self._wake_general(stream)

    # receiving

    def receive(self, data: memoryview, addr: SocketAddress, now: float) -> None:
        """Takes one datagram; ``data`` may be used again after the call."""
        if not self._receive_fast(data, addr, now):
            self._settle_received()
            self.frames.total += len(data)
            self.receive_datagram(bytes(data), addr, now)

    def _receive_fast(self, data: memoryview, addr: SocketAddress, now: float) -> bool:
        """Takes a datagram if it is an ordinary 1-RTT packet; False: not touched."""
        head = bytes(data[:_HEAD])
        cid = self.host_cid
        number_at = 1 + len(cid)
        if (
            len(head) < number_at + 4 + _TAG
            or head[0] & 0xC0 != 0x40
            or not head.startswith(cid, 1)
            or not self._handshake_complete
            or self._state is not QuicConnectionState.CONNECTED
            or self._close_event is not None
        ):
            return False
        path = self._network_paths[0]
        if path.addr != addr or not path.is_validated:
            return False
        space, pair = self._application()
        keys = pair.recv
        mask = keys.hp._mask(head[number_at + 4 : number_at + 4 + _TAG])
        first = head[0] ^ (mask[0] & 0x1F)
        if first & 0x1C != keys.key_phase << 2:
            return False  # a key update, or reserved bits
        length = (first & 3) + 1
        payload_at = number_at + length
        truncated = int.from_bytes(head[number_at:payload_at], "big") ^ int.from_bytes(
            mask[1 : 1 + length], "big"
        )
        number = decode_packet_number(truncated, length * 8, space.expected_packet_number)
        header = b"%c%b%b" % (first, cid, truncated.to_bytes(length, "big"))
        aead = keys.aead
        try:
            plain = aead._aead.decrypt(
                (aead._iv ^ number).to_bytes(12, "big"), data[payload_at:], header
            )
        except InvalidTag:
            return True  # not the peer's, or damaged
        if number != self._run_stop or number <= space.largest_received_packet:
            self._settle_received()
            if number in space.received_packets:
                return True
            self._run_start = self._run_stop = number
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        if not self._frames(plain, path, space, now):
            return True
        if now != space.largest_received_time:  # once for a burst
            self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        self._run_stop = number + 1
        return True

    def _frames(self, plain: bytes, path: Any, space: Any, now: float) -> bool:
        """Handles the frames of a packet. False: the connection is closing."""
        limits = self._local_max_data
        size = len(plain)
        at = 0
        while at < size or not size:
            start = at
            try:
                kind = plain[at]
                if kind & 0xF8 != 0x08:
                    if not kind and plain.count(0, at) == size - at:
                        break  # PADDING up to the end
                    return self._general_frames(plain, start, path, now)
                stream_id, at = decode_varint(plain, at + 1)
                if kind & 6 == 6 and plain[at] & 0xC0 == 0x80 and plain[at + 4] & 0xC0 == 0x40:
                    # As SendBuffer writes it: four bytes of offset, two of length.
                    place = int.from_bytes(plain[at : at + 6], "big")
                    offset, length = place >> 16 & 0x3FFF_FFFF, place & 0x3FFF
                    at += 6
                else:
                    offset = 0
                    if kind & 4:
                        offset, at = decode_varint(plain, at)
                    if kind & 2:
                        length, at = decode_varint(plain, at)
                    else:
                        length = size - at
                stream = self._streams.get(stream_id)
                if stream is None:
                    if stream_id & 3 != 2 + self._is_client:  # none of the peer's
                        return self._general_frames(plain, start, path, now)
                    stream = self._get_or_create_stream(kind, stream_id)
            except (IndexError, QuicConnectionError, StreamFinishedError):
                return self._general_frames(plain, start, path, now)  # which sees the same
            receiver = stream.receiver
            stop = offset + length
            fin = kind & 1 == 1
            if (
                # In order and within every limit; aioquic sees to all else, and to errors.
                offset == receiver.highest_offset == receiver._buffer_start
                and (length or fin)
                and at + length <= size
                and stop <= stream.max_stream_data_local
                and limits.used + length <= limits.value
                and receiver._final_size is None
                and not receiver.is_finished
            ):
                receiver._buffer_start = receiver.highest_offset = stop
                limits.used += length
                if fin:
                    receiver._final_size = stop
                    receiver.is_finished = True
                arrived: Any = (stream_id, memoryview(plain)[at : at + length], fin)
                self._events.append(arrived)
                self.frames.total += 1
            else:
                return self._general_frames(plain, start, path, now)
            at += length
        if space.ack_at is None:
            space.ack_at = now + self._ack_delay
        return True

    def _general_frames(self, plain: bytes, start: int, path: Any, now: float) -> bool:
        """Gives the frames from ``start`` on to aioquic. False: the connection is closing."""
        self._settle_received()
        self.frames.total += len(plain) - start
        context = QuicReceiveContext(
            epoch=tls.Epoch.ONE_RTT,
            host_cid=self.host_cid,
            network_path=path,
            quic_logger_frames=None,
            time=now,
            version=None,
        )
        try:
            eliciting, _ = self._payload_received(context, plain[start:] if start else plain)
        except QuicConnectionError as error:
            self.close(
                error_code=error.error_code,
                frame_type=error.frame_type,
                reason_phrase=error.reason_phrase,
            )
        if self._state in END_STATES or self._close_pending:
            return False
        space, _ = self._application()
        if space.ack_at is None and (eliciting or start):
            space.ack_at = now + self._ack_delay
        return True

    def _settle_received(self) -> None:
        """Enters the run of received packet numbers where aioquic's ACKs find it."""
        start, stop = self._run_start, self._run_stop
        if start < stop:
            self._run_start = stop
            space, _ = self._application()
            space.ack_queue.add(start, stop)
            if len(space.ack_queue) > MAX_ACK_RANGES:
                space.ack_queue.shift()
            window = space.received_packets
            window._received.update(range(start, stop - 1))
            window.add(stop - 1)  # moves the window, and forgets what lies below it


class EarlyData:
    """What a connection sends before its handshake is complete (RFC 9001 section 4.6).

    A client's leaves under the keys of its ticket, a server's answers under their final keys. If
    the server has rejected the ticket, nothing has come of what the client has sent. aioquic would
    send it again by itself; here it is taken back, with its streams, so that the user decides.
    """

    def __init__(self, connection: Any, recovery: Any) -> None:
        """Of a FastConnection, and of its loss recovery."""
        self._connection = connection
        self._recovery = recovery
        self._sent_in: Any = None
        connection.frames.after_crypto = self._settle

    @property
    def allowed(self) -> bool:
        """Whether a client may send, or a server takes what comes, before the handshake ends."""
        connection = self._connection
        if connection._handshake_complete:
            return False
        if connection._is_client:
            valid: bool = connection._cryptos[tls.Epoch.ZERO_RTT].send.is_valid()
            return valid
        accepted: bool = connection.tls.early_data_accepted
        return accepted

    def write(self, builder: QuicPacketBuilder) -> None:
        """STREAM frames, before what aioquic has to send."""
        connection = self._connection
        space, keys = connection._application()
        if space is not self._sent_in:
            if self._sent_in is not None:
                self._lose(self._sent_in)  # a Retry has begun the handshake anew, and forgot them
            self._sent_in = space
        kind = QuicPacketType.ONE_RTT
        if not keys.send.is_valid():
            keys, kind = connection._cryptos[tls.Epoch.ZERO_RTT], QuicPacketType.ZERO_RTT
        while keys.send.is_valid() and connection._data_queue:
            builder.start_packet(kind, keys)
            handlers: list[Any] = []
            room = min(builder.remaining_buffer_space, builder.remaining_flight_space)
            plain = connection._fill(room, handlers)
            if not plain:
                break
            frame = builder.start_frame(plain[0], len(plain), _tell_all, (handlers,))
            frame.push_bytes(plain[1:])

    def _settle(self) -> None:
        """A frame of the handshake was read. With the last one the server's decision is known."""
        connection = self._connection
        if not connection._handshake_complete:
            return
        connection.frames.after_crypto = _nothing
        if connection._is_client and not connection.tls.early_data_accepted:
            self._lose(connection._application()[0])
            forget_streams(connection)
            connection._data_queue.clear()
            connection._remote_max_data_used = 0

    def _lose(self, space: Any) -> None:
        """What was sent in a packet number space never arrives."""
        packets = list(space.sent_packets.values())
        space.sent_packets.clear()
        space.ack_eliciting_in_flight = 0
        space.loss_time = None
        self._recovery._cc.on_packets_expired(packets=[p for p in packets if p.in_flight])
        for packet in packets:
            for handler, arguments in packet.delivery_handlers:
                handler(QuicDeliveryState.LOST, *arguments)


def _tell_all(delivery: QuicDeliveryState, handlers: Sequence[Any]) -> None:
    """A packet with several frames was delivered, or lost."""
    for handler, arguments in handlers:
        handler(delivery, *arguments)


def _nothing() -> None:
    pass


class FrameCount:
    """How many frames came to a connection; watches what of them aioquic reads.

    Each is work, however short. It is made before aioquic looks up its own methods.
    """

    def __init__(self, connection: Any, gaps: int) -> None:
        self.total = 0
        """Frames so far. Of those that aioquic reads, each byte counts as one, but for the
        contents of STREAM and DATAGRAM."""
        self.streams: Mapping[int, Any] = {}
        """Those of the connection by their numbers, once it has a place for them."""
        self.after_crypto: Callable[[], None] = _nothing
        """Called after each frame of the handshake."""
        self._connection = connection
        self._gaps = gaps
        connection._handle_stream_frame = self._stream
        connection._handle_crypto_frame = self._crypto
        connection._handle_datagram_frame = self._datagram

    def _stream(self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer) -> None:
        start = buf.tell()
        QuicConnection._handle_stream_frame(self._connection, context, frame_type, buf)
        end = buf.tell()
        self.total -= end - start
        buf.seek(start)
        stream = self.streams.get(buf.pull_uint_var())
        buf.seek(end)
        if stream is not None:
            self._check_gaps(stream, frame_type)

    def _crypto(self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer) -> None:
        QuicConnection._handle_crypto_frame(self._connection, context, frame_type, buf)
        self._check_gaps(self._connection._crypto_streams[context.epoch], frame_type)
        self.after_crypto()

    def _datagram(self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer) -> None:
        start = buf.tell()
        QuicConnection._handle_datagram_frame(self._connection, context, frame_type, buf)
        self.total -= buf.tell() - start

    def _check_gaps(self, stream: Any, frame_type: int) -> None:
        """Aioquic looks at all gaps of a stream for each frame that is out of order."""
        if len(stream.receiver._ranges) > self._gaps:
            raise QuicConnectionError(
                error_code=QuicErrorCode.PROTOCOL_VIOLATION,
                frame_type=frame_type,
                reason_phrase=f"more than {self._gaps} gaps in a stream (Quic.gaps)",
            )


class Pacer(QuicPacketPacer):
    """Bursts as long as the event loop's timers are coarse; what is not data is not paced."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._rate = 0.0  # bytes a second; 0.0: no round trip was measured yet
        self._burst = 0.0
        self._tokens = 0.0
        self._at = 0.0

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """The window or the round-trip time changed."""
        size = self._max_datagram_size
        fresh = not self._rate
        self._rate = _PACING_GAIN * congestion_window / max(smoothed_rtt, 1e-6)
        self._burst = max(
            2 * size,
            min(congestion_window / 4, 16 * size),
            min(congestion_window / 2, self._rate * _BURST_TIME),
        )
        if fresh:
            self._tokens = self._burst

    def next_send_time(self, now: float) -> Any:
        """Never holds back what aioquic sends by itself."""
        return None

    def update_after_send(self, now: float) -> None:
        """What aioquic sends by itself costs nothing."""

    def allowance(self, now: float) -> float:
        """Bytes that may leave now; the last packet may exceed it."""
        if not self._rate:
            return float("inf")
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return self._tokens

    def spend(self, size: int) -> None:
        """``size`` bytes left."""
        self._tokens -= size

    def ready_at(self, now: float) -> float:
        """When more may leave."""
        return now + (self._max_datagram_size - self._tokens) / self._rate


def _resize(size: int, pacer: Pacer, control: Any) -> None:
    """From now on the datagrams that these two reckon with have that size."""
    pacer._max_datagram_size = control._max_datagram_size = size
    if hasattr(control, "additive_increase_factor"):  # Cubic's
        control.additive_increase_factor = size
    # The least window for this size, or the first (RFC 9002 section 7.2): a window of less than one
    # datagram would never open.
    first = min(10 * size, max(14_720, 2 * size))
    least = first if control.ssthresh is None else 2 * size
    control.congestion_window = max(control.congestion_window, least)


def _watch_large(path_mtu: PathMtu, sent: Mapping[int, Any], numbers: range) -> None:
    """Learns what becomes of those of aioquic's packets that are large."""
    for number in numbers:
        packet = sent.get(number)
        if packet is not None and packet.sent_bytes > BASE:
            watch = path_mtu.on_large, (packet.sent_time, path_mtu.search)
            packet.delivery_handlers.append(watch)


class _SentPacket:
    """A sent packet of STREAM frames, for aioquic's loss recovery: a smaller QuicSentPacket."""

    __slots__ = ("delivery_handlers", "packet_number", "sent_bytes", "sent_time")

    epoch = tls.Epoch.ONE_RTT
    in_flight = True
    is_ack_eliciting = True
    is_crypto_packet = False
    packet_type = QuicPacketType.ONE_RTT

    def __init__(self, number: int, now: float, size: int, handlers: list[Any]) -> None:
        self.packet_number = number
        self.sent_time = now
        self.sent_bytes = size
        self.delivery_handlers = handlers


class _Probe(_SentPacket):
    """A probe of the path: its loss tells of its size, and nothing of the network's load."""

    __slots__ = ()

    is_probe = True


def _prefix(keys: Any, peer_id: bytes) -> bytes:
    """The header of 1-RTT packets up to their number."""
    return bytes((0x40 | keys.key_phase << 2 | _PACKET_NUMBER - 1,)) + peer_id


def _short_number(number: int) -> bytes:
    return (number & 0xFFFF).to_bytes(_PACKET_NUMBER, "big")


def _encrypt(pair: Any, number: int, plain: bytes, header: bytes) -> bytes:
    """The payload of a packet (RFC 9001 section 5.3)."""
    aead = pair.aead
    sealed: bytes = aead._aead.encrypt((aead._iv ^ number).to_bytes(12, "big"), plain, header)
    return sealed


def _protect(protection: Any, sealed: list[bytes]) -> None:
    """Applies header protection (RFC 9001 section 5.4) to headers and payloads in turn."""
    start = 4 - _PACKET_NUMBER
    samples = [payload[start : start + 16] for payload in sealed[1::2]]
    if protection._is_chacha20:
        masks = b"".join([protection._mask(sample).ljust(16) for sample in samples])
    else:
        masks = protection._mask(b"".join(samples))  # ECB: all blocks in one call
    number_at = len(sealed[0]) - _PACKET_NUMBER
    constant = sealed[0][1:number_at]
    for index in range(0, len(sealed), 2):
        header = sealed[index]
        at = index * 8
        sealed[index] = b"%c%b%c%c" % (
            header[0] ^ (masks[at] & 0x1F),
            constant,
            header[number_at] ^ masks[at + 1],
            header[number_at + 1] ^ masks[at + 2],
        )
