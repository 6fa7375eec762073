"""The packets that carry nearly all bytes, built and read without aioquic's general machinery.

aioquic 1.7.2 copies each byte about ten times on its way into a packet and visits every kind of
frame for it. After the handshake almost every packet holds STREAM frames alone; FastConnection
writes those itself, straight from the written buffers, and reads them itself. Everything else
(handshake, ACK, limits, resets, pings, DATAGRAM, migration, close, and whatever looks odd) goes
the library's way, by the same packet numbers, keys, loss recovery and congestion control.

Beside ``flow`` this is the only module that touches what is private to aioquic; see
``tests/carriers/test_aioquic_names.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from aioquic import tls
from aioquic._crypto import CryptoError
from aioquic.quic.connection import (
    END_STATES,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicPacketType, decode_packet_number
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketPacer

from aqueduct.carriers.quic.flow import FlowConnection
from aqueduct.carriers.quic.send_buffer import SendBuffer
from aqueduct.carriers.quic.sockets import RUN_BYTES, RUN_PACKETS, SocketAddress

__all__ = ["FastConnection"]

_TAG: Final = 16
_PACKET_NUMBER: Final = 2
_LEAST_FRAME: Final = 64  # room below which no further stream joins a packet
_KEY_PACKETS: Final = 1 << 22  # half of what AES-GCM allows one key (RFC 9001 section 6.6)
_BURST_TIME: Final = 0.002  # seconds of sending at once: the loop's timers count milliseconds
_PACING_GAIN: Final = 1.25  # RFC 9002 section 7.7

_HEAD: Final = 1 + 20 + 4 + _TAG  # the longest header and the sample for its protection


class Outlet(Protocol):
    """Where packets go."""

    @property
    def blocked(self) -> bool:
        """Whether the socket takes no datagrams now."""

    def send(self, datagrams: Sequence[tuple[bytes, SocketAddress]]) -> None:
        """Sends datagrams."""

    def send_run(self, parts: list[bytes], size: int, address: SocketAddress) -> None:
        """Sends datagrams given as two parts each, all of ``size`` bytes but for the last."""


class FastConnection(FlowConnection):
    """A FlowConnection with its own way for packets of STREAM frames."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._data_queue: deque[Any] = deque()  # streams with data that may leave
        self._pacer = Pacer(max_datagram_size=self._max_datagram_size)
        self._loss._pacer = self._pacer
        self._run_start = self._run_stop = 0  # packet numbers received, not in ack_queue yet
        self._heard_at = -1.0
        self._key_sent = 0
        self._cached: tuple[Any, Any] | None = None
        self._arrived: deque[Any] = cast(Any, self._events)  # the same, with tuples in it

    # sending

    def transmit(self, now: float, outlet: Outlet) -> None:
        """Sends what may leave now: first what is not stream data, then runs of packets."""
        self._settle_received()
        if self._general_pending(now):
            datagrams = self.datagrams_to_send(now)
            if datagrams:
                outlet.send(datagrams)
        self._pacing_at = None
        if (
            self._data_queue
            and self._handshake_complete
            and self._state is QuicConnectionState.CONNECTED
            and self._close_event is None
            and self._network_paths[0].is_validated
        ):
            allowance = self._pacer.allowance(now)
            address = self._network_paths[0].addr
            while self._data_queue and not outlet.blocked:
                if allowance <= 0:
                    self._pacing_at = self._pacer.ready_at(now)
                    break
                parts, sent = self._run(now, allowance)
                if not parts:
                    break
                allowance -= sent
                outlet.send_run(parts, self._max_datagram_size, address)

    def _general_pending(self, now: float) -> bool:
        """Whether there is anything to send for aioquic's own code."""
        if not self._handshake_confirmed:
            return True
        ack_at = self._spaces[tls.Epoch.ONE_RTT].ack_at
        path = self._network_paths[0]
        return bool(
            (ack_at is not None and ack_at <= now)
            or self._streams_queue
            or self._streams.dirty
            or self._limits_changed()
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

    def _run(self, now: float, allowance: float) -> tuple[list[bytes], int]:
        """Packets for one call of the kernel, as header and payload in turn, and their bytes.

        No more at a time, so that their memory is still in the processor's cache when the kernel
        reads it, and used again by the next run: measured, this halves the cost of a packet.
        """
        loss = self._loss
        space, keys = self._application()
        encrypt = keys.send.aead.encrypt
        size = self._max_datagram_size
        first = 0x40 | (keys.key_phase << 2) | (_PACKET_NUMBER - 1)
        prefix = bytes((first,)) + self._peer_cid.cid
        header_size = len(prefix) + _PACKET_NUMBER
        most = size - header_size - _TAG
        window = loss.congestion_window - loss.bytes_in_flight
        sealed: list[bytes] = []
        spent = 0
        sent = size
        left = min(RUN_PACKETS, RUN_BYTES // size)
        while left and sent == size and window >= size and spent < allowance:
            handlers: list[Any] = []
            plain = self._fill(most, handlers)
            if not handlers:
                break
            number = self._packet_number
            self._packet_number = number + 1
            header = prefix + (number & 0xFFFF).to_bytes(_PACKET_NUMBER, "big")
            payload = encrypt(plain, header, number)
            sealed += header, payload
            sent = header_size + len(payload)
            loss.on_packet_sent(packet=_SentPacket(number, now, sent, handlers), space=space)
            window -= sent
            spent += sent
            left -= 1
        if not sealed:
            return sealed, 0
        _protect(keys.send.hp, sealed)
        self._pacer.spend(spent)
        if not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True
        self._key_sent += len(sealed) // 2
        if self._key_sent >= _KEY_PACKETS:
            self._key_sent = 0
            self.request_key_update()
            self.send_ping(0)  # the update rides on the next packet of aioquic's own
        self._network_paths[0].bytes_sent += spent
        return sealed, spent

    def _fill(self, room: int, handlers: list[Any]) -> bytes:
        """The frames of one packet of at most ``room`` bytes; ``handlers``: of their delivery."""
        queue = self._data_queue
        parts: list[Any] = []
        for _ in range(len(queue)):
            stream = queue.popleft()
            sender: SendBuffer = stream.sender
            before = sender.highest_offset
            offset = sender.next_offset
            head = (b"\x0e" if offset else b"\x0a") + _varint(stream.stream_id)
            if offset:
                head += _varint(offset)
            taken = sender.take(
                room - len(head) - 2,
                min(
                    stream.max_stream_data_remote,
                    before + self._remote_max_data - self._remote_max_data_used,
                ),
            )
            if sender.sendable(stream.max_stream_data_remote):
                queue.append(stream)
            else:
                sender.queued = False  # the peer's credit, or more data, wakes it
            if taken is None:
                continue
            start, stop, fin = taken
            if fin:
                head = bytes((head[0] | 1,)) + head[1:]
            length = stop - start
            parts.append(head + (length | 0x4000).to_bytes(2, "big"))
            if length:
                parts += sender.parts(start, stop)
            handlers.append((sender.on_data_delivery, (start, stop, fin)))
            self._remote_max_data_used += sender.highest_offset - before
            room -= len(head) + 2 + length
            if room < _LEAST_FRAME:
                break
        return b"".join(parts)

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
        header = bytes((first,)) + cid + truncated.to_bytes(length, "big")
        try:
            plain = keys.aead.decrypt(data[payload_at:], header, number)
        except CryptoError:
            return True  # not the peer's, or damaged
        if number <= space.largest_received_packet and number in space.received_packets:
            return True
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        if not plain or not self._frames(plain, path, space, now):
            return True
        if now != self._heard_at:
            self._heard_at = now
            self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        space.received_packets.add(number)
        if number != self._run_stop:
            self._settle_received()
            self._run_start = number
        self._run_stop = number + 1
        return True

    def _frames(self, plain: bytes, path: Any, space: Any, now: float) -> bool:
        """Handles the frames of a packet. False: the connection is closing."""
        streams, limits, arrived = self._streams, self._local_max_data, self._arrived
        size = len(plain)
        at = 0
        while at < size:
            start = at
            kind = plain[at]
            if kind & 0xF8 != 0x08:
                return self._general_frames(plain, start, path, now)
            try:
                stream_id, at = _read_varint(plain, at + 1)
                offset = 0
                if kind & 4:
                    offset, at = _read_varint(plain, at)
                if kind & 2:
                    length, at = _read_varint(plain, at)
                else:
                    length = size - at
            except IndexError:
                return self._general_frames(plain, start, path, now)
            stream = streams.get(stream_id)
            stop = offset + length
            if stream is None or at + length > size or stop > stream.max_stream_data_local:
                return self._general_frames(plain, start, path, now)
            receiver = stream.receiver
            fresh = stop - receiver.highest_offset
            if fresh > 0 and limits.used + fresh > limits.value:
                return self._general_frames(plain, start, path, now)
            if (
                offset == receiver._buffer_start
                and length
                and not receiver._buffer
                and receiver._final_size is None
                and not receiver.is_finished
                and fresh == length
            ):
                receiver._buffer_start = receiver.highest_offset = stop
                if kind & 1:
                    receiver._final_size = stop
                    receiver.is_finished = True
                arrived.append((stream_id, memoryview(plain)[at : at + length], bool(kind & 1)))
                limits.used += fresh
            else:
                return self._general_frames(plain, start, path, now)
            at += length
        if space.ack_at is None:
            space.ack_at = now + self._ack_delay
        return True

    def _general_frames(self, plain: bytes, start: int, path: Any, now: float) -> bool:
        """Gives the frames from ``start`` on to aioquic. False: the connection is closing."""
        self._settle_received()
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
        if self._run_stop > self._run_start:
            queue = self._application()[0].ack_queue
            queue.add(self._run_start, self._run_stop)
            if len(queue) > MAX_ACK_RANGES:
                queue.shift()
            self._run_start = self._run_stop


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


class _SentPacket(QuicSentPacket):
    """A sent packet of STREAM frames, for aioquic's loss recovery."""

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


def _varint(value: int) -> bytes:
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x4000_0000:
        return (value | 0x8000_0000).to_bytes(4, "big")
    return (value | 0xC000_0000_0000_0000).to_bytes(8, "big")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and where it ends. Raises IndexError if it is cut."""
    first = data[at]
    if first < 0x40:
        return first, at + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | data[at + 1], at + 2
    stop = at + (4 if first < 0xC0 else 8)
    if stop > len(data):
        raise IndexError(stop)
    mask = 0x3FFF_FFFF if first < 0xC0 else 0x3FFF_FFFF_FFFF_FFFF
    return int.from_bytes(data[at:stop], "big") & mask, stop
