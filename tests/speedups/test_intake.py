"""Reading a real socket: what goes by an inlet, and what is left to the core."""

from __future__ import annotations

import ctypes
import mmap
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base.buffers import bytes_copied, pooled_bytes
from aqueduct._speedups.bpmux.chunks import CREDIT, END, PAYLOAD, encode_head, encode_rest
from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.bpmux.entity_receiver import EntityReceiver
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.stream.socket_reader import Outcome, SocketReader
from aqueduct.carriers import tls_openssl
from aqueduct.config import DEFAULT, ByteStream, Config, Flow
from aqueduct.errors import ConfigError, FrameError
from aqueduct.protocol.bpmux import events
from aqueduct.protocol.bpmux.connection import Mux
from aqueduct.protocol.bpmux.state import STREAM_IN
from tests.protocol.channels.arriving import entry, server, taken
from tests.speedups.test_buffers import empty_pool
from tests.speedups.test_records import Ends

KiB = 1 << 10
MiB = 1 << 20
SINK = 2  # Out-Sink: what the peer writes to us
PREFIX = codec.VERSION + codec.encode_route_to(0)
WIDE = Config(flow=Flow(channel_receive_bytes=64 * MiB, receive_budget=256 * MiB))


def chunk(payload: bytes, identifier: int = 1) -> bytes:
    return encode_head(SINK, PAYLOAD, identifier, len(payload)) + payload


def message(number: int, payload: bytes) -> bytes:
    return b"".join(map(bytes, codec.encode_message(number, payload)))


class Sealing:
    """The peer's socket, with TLS."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends

    def sendall(self, data: bytes) -> None:
        self.ends.send(data)

    def close(self) -> None:
        sock = self.ends.sockets[0]
        if sock.fileno() >= 0:
            sock.recv(64 * KiB)  # unread, the session tickets would make it a reset
            sock.close()


class Reader:
    """One end of a socket pair: an SocketReader, its bpmux core, and the channels of stream 1."""

    def __init__(self, config: Config = DEFAULT, *, decrypts: bool = False) -> None:
        self.peer: socket.socket | Sealing
        if decrypts:
            ends = Ends(tls_openssl)
            self.peer, self.here, records = Sealing(ends), ends.sockets[1], ends.server.records
        else:
            self.here, self.peer = socket.socketpair()
            records = None
        self.here.setblocking(False)
        self.mux = Mux()
        self.mux.credit(self.mux.top_stream, MiB)
        self.mux.take(MiB)
        self.core = server(config)
        self.opened = self.closed = 0
        self.intake = SocketReader(
            self.mux.receiver,
            self.here.fileno(),
            records,
            memoryview(bytearray(64 * KiB)),
            self.open,
            self.close,
        )
        self.entity: Entity | None = None
        self.payloads: list[bytes] = []
        """Pieces that came by the core's events."""

    def open(self, entity: Entity) -> None:
        self.close()
        inlet = self.core.inlet(9) if entity.identifier == 1 else None
        if inlet is not None:
            self.opened += 1
            self.intake.use(entity, inlet)

    def close(self) -> None:
        if self.intake.inlet is not None:
            self.closed += 1
            self.intake.use(None, None)
            self.core.inlet_done(9, 200.0)

    def read(self, budget: int = 1 << 30) -> int:
        """As a carrier does; the last outcome but CORE and WHOLE."""
        while True:
            outcome, _ = self.intake.read(budget)
            self.close()
            if outcome == Outcome.WHOLE:
                continue
            if outcome != Outcome.CORE:
                return outcome
            self.mux.go_on(self.intake.step)
            for event in self.mux.events_received():
                if event[0] == events.PAYLOAD:
                    self.payloads.append(bytes(event[2]))
                    if event[1].identifier == 1:
                        self.core.receive_stream(9, bytes(event[2]), False, 200.0)
            if self.mux.error is not None or self.intake.drained:
                return Outcome.DRAINED

    def begin(self) -> None:
        """Stream 1 is open, routed to a channel, with all the credit that there is."""
        self.peer.sendall(chunk(PREFIX))
        self.read()
        entity = self.mux.find(STREAM_IN, 1)
        assert entity is not None
        self.mux.credit(entity, 1 << 40)
        self.mux.take(MiB)
        self.payloads.clear()


@pytest.fixture(params=[False, True], ids=["socket", "decrypted"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    reader = Reader(WIDE, decrypts=request.param)
    reader.begin()
    yield reader
    reader.here.close()
    reader.peer.close()


def test_messages_in_any_pieces(reader: Reader) -> None:
    choices = random.Random(5)
    sizes = [choices.choice([0, 1, 100, 4095, 4096, 20_000, 70_000, 300_000]) for _ in range(60)]
    sent = [(number, choices.randbytes(size)) for number, size in enumerate(sizes)]
    bytes_ = b"".join(message(*each) for each in sent)
    wire, at = b"", 0
    while at < len(bytes_):
        size = choices.choice([1, 500, 5000, 65_536, 262_138])
        wire += chunk(bytes_[at : at + size])
        at += size
    at = 0
    found = []
    while at < len(wire):
        size = choices.randint(1, 100_000)
        reader.peer.sendall(wire[at : at + size])
        at += size
        assert reader.read() == Outcome.DRAINED
        if choices.random() < 0.3:
            found += taken(reader.core, 200.0)
    found += taken(reader.core, 200.0)
    assert found == sent
    assert reader.opened == reader.closed > 10
    reader.mux.receive_eof()
    assert reader.mux.error is None  # it stands between two chunks


def test_large_payloads_are_hardly_copied() -> None:
    reader = Reader(WIDE)
    reader.begin()
    before = 0
    for number in range(9):
        wire = message(number, bytes(MiB))
        for at in range(0, len(wire), 262_138):
            piece = chunk(wire[at : at + 262_138])
            for part in range(0, len(piece), 50_000):
                reader.peer.sendall(piece[part : part + 50_000])
                reader.read()
        assert len(taken(reader.core, 200.0)) == 1
        if not number:
            before = bytes_copied()  # of the first one the beginning came before it was known
    assert bytes_copied() - before < 0.03 * 8 * MiB
    assert not reader.payloads
    reader.here.close()
    reader.peer.close()


def test_a_large_message_is_given_before_the_next_one_has_memory(reader: Reader) -> None:
    """So that one lands in the memory of the one that its user lets go of for it."""
    held = empty_pool()
    size = 300 * KiB
    places: list[int] = []
    wire = b"".join(chunk(message(number, bytes([number]) * size)) for number in range(4))
    # In pieces that leave more than a few KiB for the last of each message, and the next behind it.
    for at in range(0, len(wire), 21_000):
        reader.peer.sendall(wire[at : at + 21_000])
        while True:
            outcome, _ = reader.intake.read(1 << 30)
            reader.close()
            if outcome != Outcome.WHOLE:
                break
            received = reader.core.receive(entry(reader.core), 200.0)
            assert received is not None and received.number == len(places)
            assert bytes(received.payload) == bytes([received.number]) * size
            places.append(np.frombuffer(received.payload, np.uint8).ctypes.data)
            del received
        assert outcome == Outcome.DRAINED
    assert len(places) == 4 and len(set(places)) == 1
    del held


def test_a_large_message_with_a_short_last_chunk_ends_a_read_too(reader: Reader) -> None:
    """Of that chunk only the head is read with the one before: the rest lands in its place.

    What little there is behind the message is read with it, but not with TLS.
    """
    rest = 5000
    held = empty_pool()
    wire, behind = message(0, bytes(280 * KiB)), chunk(message(1, b"behind"))
    data = chunk(wire[:-rest]) + chunk(wire[-rest:]) + behind
    for part in (data[: 100 * KiB], data[100 * KiB : -15 * KiB]):
        reader.peer.sendall(part)
        assert reader.read() == Outcome.DRAINED
    reader.peer.sendall(data[-15 * KiB :])
    read = 15 * KiB - (len(behind) if isinstance(reader.peer, Sealing) else 0)
    assert reader.intake.read(1 << 30) == (Outcome.WHOLE, read)
    reader.close()
    assert reader.read() == Outcome.DRAINED
    assert taken(reader.core, 200.0) == [(0, bytes(280 * KiB)), (1, b"behind")]
    del held


def test_what_comes_behind_a_large_message_has_no_memory_before_that_is_taken(
    reader: Reader,
) -> None:
    """Also where the beginning of the next payload was read along with it."""
    size = 300 * KiB
    held = empty_pool()
    first, second = (message(number, bytes([7 + number]) * size) for number in range(2))
    data = chunk(first) + chunk(second)
    for at in range(0, size - 20 * KiB, 20 * KiB):
        reader.peer.sendall(data[at : at + 20 * KiB])
        assert reader.read() == Outcome.DRAINED
    reader.peer.sendall(data[size - 20 * KiB : size + 8 * KiB])
    before = pooled_bytes()
    assert reader.intake.read(1 << 30)[0] == Outcome.WHOLE
    reader.close()
    assert pooled_bytes() == before
    received = reader.core.receive(entry(reader.core), 200.0)
    assert received is not None and bytes(received.payload) == bytes([7]) * size
    place = np.frombuffer(received.payload, np.uint8).ctypes.data
    del received
    assert pooled_bytes() > before  # it was let go
    assert reader.read() == Outcome.DRAINED
    assert pooled_bytes() == before  # and is in use again
    for at in range(size + 8 * KiB, len(data), 20 * KiB):
        reader.peer.sendall(data[at : at + 20 * KiB])
        assert reader.read() == Outcome.DRAINED
    received = reader.core.receive(entry(reader.core), 200.0)
    assert received is not None and bytes(received.payload) == bytes([8]) * size
    assert np.frombuffer(received.payload, np.uint8).ctypes.data == place
    del held


def test_a_large_message_behind_small_ones_is_hardly_copied() -> None:
    """Nobody could take these first, as they end no read."""
    reader = Reader(WIDE)
    reader.begin()
    wire = message(0, b"small") + message(1, bytes(MiB)) + message(2, b"end")
    data = b"".join(chunk(wire[at : at + 262_138]) for at in range(0, len(wire), 262_138))
    before = bytes_copied()
    for at in range(0, len(data), 100 * KiB):
        reader.peer.sendall(data[at : at + 100 * KiB])
        while reader.intake.read(1 << 30)[0] == Outcome.WHOLE:
            pass  # the inlet stays open
    reader.close()
    # Of the first read, 64 KiB, and for each chunk what was read along with the one before.
    assert bytes_copied() - before < 80 * KiB
    assert [len(payload) for _, payload in taken(reader.core, 200.0)] == [5, MiB, 3]
    reader.here.close()
    reader.peer.close()


def pages_come() -> bool:
    """Whether the system gives pages before they are written to: Linux since 5.14."""
    with mmap.mmap(-1, MiB) as memory:
        try:
            memory.madvise(23)  # MADV_POPULATE_WRITE
        except (OSError, AttributeError):
            return False
    return True


@pytest.mark.skipif(not pages_come(), reason="this system has no MADV_POPULATE_WRITE")
def test_pages_of_a_payload_on_its_way_come_before_its_bytes() -> None:
    """Those of a chunk at once, or each would be a fault of its own, and none of what is behind."""
    held = empty_pool()
    reader = Reader(WIDE)
    reader.begin()
    wire = message(0, bytes(7 * MiB))
    size = 262_138
    # What earlier tests have freed, and the allocator still has, has its pages.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)

    def arrive(piece: bytes) -> None:
        for part in range(0, len(piece), 20_000):
            reader.peer.sendall(piece[part : part + 20_000])
            reader.read()

    arrive(chunk(wire[:size]))
    piece = chunk(wire[size : 2 * size])  # before: its memory may be new as well
    before = resident()
    arrive(piece[:20_000])
    come = resident() - before
    assert size - 16 * KiB <= come < size + 64 * KiB
    arrive(piece[20_000:])
    for at in range(2 * size, len(wire), size):
        arrive(chunk(wire[at : at + size]))
    assert taken(reader.core, 200.0) == [(0, bytes(7 * MiB))]
    reader.here.close()
    reader.peer.close()
    del held


def resident() -> int:
    """Bytes of this process in memory, counted page by page."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line[:4] == "Rss:")


def test_what_is_for_another_stream_comes_as_events_in_its_place(reader: Reader) -> None:
    entity_2 = chunk(b"opens", 2)
    wire = message(0, b"a" * 5000)
    reader.peer.sendall(chunk(wire[:2000]) + entity_2 + chunk(wire[2000:]))
    assert reader.read() == Outcome.DRAINED
    assert taken(reader.core, 200.0) == [(0, b"a" * 5000)]
    assert b"opens" in reader.payloads


def test_nothing_overtakes_what_came_in_one_chunk(reader: Reader) -> None:
    """Not even bytes for the inlet that is open."""
    brief = encode_head(SINK, PAYLOAD | END, 2, 3) + b"abc" + encode_rest(END, 0, 0)
    behind = chunk(message(1, b"b" * 2000))
    reader.peer.sendall(chunk(message(0, b"a" * 2000)) + brief + behind)
    outcome, _ = reader.intake.read(MiB)
    assert outcome == Outcome.CORE
    reader.close()
    assert taken(reader.core, 200.0) == [(0, b"a" * 2000)]
    reader.mux.go_on(reader.intake.step)
    found = [event[1].identifier for event in reader.mux.events_received()]
    assert found[0] == 2 and found[-1] == 1


def test_the_outcomes(reader: Reader) -> None:
    assert reader.intake.read(100) == (Outcome.DRAINED, 0)
    wire = chunk(message(0, b"x" * 40_000))
    reader.peer.sendall(wire)
    outcome, size = reader.intake.read(1)  # one read, however little is wanted
    assert outcome in (Outcome.TURN, Outcome.DRAINED) and 0 < size <= len(wire)
    assert reader.read() == Outcome.DRAINED
    assert len(taken(reader.core, 200.0)) == 1
    reader.peer.close()
    assert reader.intake.read(100) == (Outcome.END, 0)


def test_the_core_is_told_of_what_the_peer_does_wrong(reader: Reader) -> None:
    reader.peer.sendall(chunk(message(0, b"f" * 2000)) + b"\xe0\x00" + chunk(b"never"))
    reader.read()
    assert isinstance(reader.mux.error, FrameError)
    assert "BP-16" in str(reader.mux.error)
    assert taken(reader.core, 200.0) == [(0, b"f" * 2000)]


def credit(size: int, identifier: int = 1) -> bytes:
    """The peer's, for a sink that we write to."""
    return encode_head(5, CREDIT, identifier, 0) + encode_rest(CREDIT, size, 0)


def written_to(reader: Reader, queued: int) -> Entity:
    """A sink that is open, with so many bytes that wait for credit."""
    sink = reader.mux.open_sink(identifier=1)
    reader.peer.sendall(credit(MiB, identifier=0))
    reader.read()
    assert reader.mux.take(MiB)[1] > 0
    reader.mux.write(sink, bytes(queued))
    reader.mux.take(MiB)
    reader.mux.events_received()
    return sink


def test_credit_needs_no_step_of_the_core(reader: Reader) -> None:
    sink = written_to(reader, 0)
    before = sink.credit_out
    wire = credit(1) + credit(300_000)
    for at in range(len(wire)):  # wherever a read ends
        reader.peer.sendall(wire[at : at + 1])
        assert reader.intake.read(1 << 20) == (Outcome.DRAINED, 1)
    assert sink.credit_out == before + 300_001
    assert reader.mux.idle and reader.mux.events_received() == []
    wire = message(0, b"after")
    reader.peer.sendall(chunk(wire))
    reader.read()
    assert reader.payloads == [wire]


def test_credit_lets_go_what_waits_for_it(reader: Reader) -> None:
    sink = written_to(reader, 500_000)
    assert reader.mux.idle and sink.queued == 500_000
    reader.peer.sendall(credit(200_000))
    assert reader.intake.read(1 << 20)[0] == Outcome.DRAINED
    assert not reader.mux.idle
    assert sum(size for _, size in reader.mux.take(MiB)[2]) == 200_000


@pytest.mark.parametrize(
    ("identifier", "size", "wrong"),
    [(1, 2**64 - 1, "BP-10"), (7, 1, "names nothing that this side has opened")],
)
def test_credit_that_may_not_be_is_left_to_the_core(
    reader: Reader, identifier: int, size: int, wrong: str
) -> None:
    written_to(reader, 0)
    reader.peer.sendall(credit(1) + credit(size, identifier))
    reader.read()
    assert wrong in str(reader.mux.error)


def test_a_little_of_a_chunk_under_way_wakes_no_task() -> None:
    """Nothing can be behind it that anybody waits for; where none is, any byte wakes."""
    reader = Reader(WIDE)
    reader.begin()

    def threshold() -> int:
        return reader.here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    wire = chunk(message(0, b"x" * 300_000))
    reader.peer.sendall(wire[:10_000])
    reader.read()
    assert threshold() == 128 * KiB
    assert reader.intake.relax()
    assert threshold() == 1
    assert not reader.intake.relax()
    reader.peer.sendall(wire[10_000:110_000])
    reader.read()
    assert threshold() == 128 * KiB
    reader.peer.sendall(wire[110_000:210_000])
    reader.read()
    assert threshold() == len(wire) - 210_000
    reader.peer.sendall(wire[210_000:] + chunk(b"")[:1])
    reader.read()
    assert threshold() == 1
    assert [number for number, _ in taken(reader.core, 200.0)] == [0]
    reader.here.close()
    reader.peer.close()


def test_with_tls_any_byte_wakes() -> None:
    """The peer may close it in the middle of a chunk and wait for the answer."""
    reader = Reader(WIDE, decrypts=True)
    reader.begin()
    reader.peer.sendall(chunk(message(0, b"x" * 300_000))[:10_000])
    reader.read()
    assert reader.here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert not reader.intake.relax()
    reader.here.close()
    reader.peer.close()


def test_a_close_of_tls_behind_the_last_bytes_is_seen_with_them() -> None:
    """It was read with them, so the socket says nothing of it any more."""
    reader = Reader(WIDE, decrypts=True)
    reader.begin()
    peer = reader.peer
    assert isinstance(peer, Sealing)
    client, sock = peer.ends.client, peer.ends.sockets[0]
    said = b"".join(client.seal([chunk(message(0, b"x" * 3_000))[:2_000]]))
    sock.sendall(said + client.farewell())
    assert reader.read() == Outcome.END
    reader.here.close()
    reader.peer.close()


@pytest.mark.parametrize("room", [64, 100, 5000])
def test_little_memory_to_read_ahead_is_enough(room: int) -> None:
    """And what is read stays in it, though a large payload leaves room for more."""
    reader = Reader(WIDE)
    reader.begin()
    memory = bytearray(b"#" * 10_000)
    reader.intake = SocketReader(
        reader.mux.receiver,
        reader.here.fileno(),
        None,
        memoryview(memory)[:room],
        reader.open,
        reader.close,
    )
    sent = [(number, bytes([number]) * 40_000) for number in range(3)]
    wire = b"".join(message(*each) for each in sent)
    reader.peer.sendall(
        b"".join(chunk(wire[at : at + 30_000]) for at in range(0, len(wire), 30_000))
    )
    for _ in range(5000):
        reader.read()
    assert taken(reader.core, 200.0) == sent
    assert memory[room:] == b"#" * (10_000 - room)
    wrong: list[Any] = [memoryview(bytearray(63)), memoryview(bytes(100)), bytearray(100)]
    for bad in wrong:
        with pytest.raises(ValueError, match="a writable memoryview of 64 bytes"):
            SocketReader(reader.mux.receiver, 0, None, bad, reader.open, reader.close)
    reader.here.close()
    reader.peer.close()


def test_none_is_made_or_used_by_halves() -> None:
    """Or the next byte would be written to nowhere."""
    reader = Reader()
    with pytest.raises(TypeError):
        DirectRead.__new__(DirectRead)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        EntityReceiver.__new__(EntityReceiver)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SocketReader.__new__(SocketReader)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        DirectRead(codec.FrameDecoder(from_server=True), 0, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="or neither"):
        reader.intake.use(reader.mux.top_stream, None)
    reader.here.close()
    reader.peer.close()


def test_less_memory_than_a_head_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ByteStream.read_ahead is 63; at least 64 bytes"):
        ByteStream(read_ahead=63)
    assert ByteStream(read_ahead=64).read_ahead == 64


def test_a_socket_that_is_gone_is_an_os_error() -> None:
    reader = Reader()
    reader.here.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.intake.read(100)
    reader.peer.close()
