"""Messages of a link between a socket and its reader."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from aqueduct._speedups.relink import packets
from aqueduct._speedups.relink.packets import PacketDecoder
from aqueduct._speedups.stream.tunnel import Tunnel
from aqueduct.errors import SequenceError

NOP = packets.encode_general(packets.NOP)


def message(data: bytes) -> bytes:
    head = packets.encode_message_head((0,), 0, (len(data),))
    return head + data + bytes(packets.padding_of(len(data)))


class Owner:
    """What a tunnel tells; ``handed`` bytes of the next message came before."""

    def __init__(self) -> None:
        self.packets = 0
        self.begun: list[int] = []
        self.ended = 0
        self.handed = 0

    def take_packet(self, decoder: PacketDecoder) -> None:
        self.packets += 1

    def begin_message(self, decoder: PacketDecoder) -> int:
        self.begun.append(decoder.sizes[0])
        handed, self.handed = self.handed, 0
        return handed

    def end_message(self, decoder: PacketDecoder) -> None:
        self.ended += 1

    def keep(self, parts: list[Any], size: int) -> None:
        raise AssertionError("nothing is sent")

    def may_send(self) -> bool:
        return False

    def waits(self) -> bool:
        return False

    def take(self) -> list[Any]:
        return []


class Ends:
    """A tunnel on one end of a socket, and the other end."""

    def __init__(self) -> None:
        self.peer, self.sock = socket.socketpair()
        self.sock.setblocking(False)
        self.owner = Owner()
        memory = memoryview(bytearray(65_536))
        self.tunnel = Tunnel(self.owner, PacketDecoder(0, 0), self.sock.fileno(), None, memory)

    def read(self, size: int = 65_536) -> bytes | None:
        """What is there now; None: nothing."""
        target = bytearray(size)
        try:
            got = self.tunnel.recv_into(target)
        except BlockingIOError:
            return None
        return bytes(target[:got])


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.peer.close()
    found.sock.close()


def test_the_bytes_of_messages_come_without_what_stands_around_them(ends: Ends) -> None:
    ends.peer.sendall(message(b"one") + NOP + message(b"") + message(b"two"))
    assert ends.read() == b"onetwo"
    assert ends.owner.begun == [3, 0, 3]
    assert (ends.owner.ended, ends.owner.packets) == (3, 1)
    assert ends.read() is None


def test_a_large_message_comes_in_pieces_of_any_size(ends: Ends) -> None:
    payload = bytes(range(256)) * 400
    ends.peer.sendall(message(payload) + message(b"behind"))
    got = b""
    for size in (1, 63, 5000, 4096, 64, 100_000, 100_000):
        got += ends.read(size) or b""
    assert got == payload + b"behind"


def test_what_came_before_is_not_handed_over_again(ends: Ends) -> None:
    payload = bytes(range(250)) * 40
    ends.owner.handed = 7777
    ends.peer.sendall(message(payload) + message(b"next"))
    got = b""
    while (more := ends.read(1000)) is not None:
        got += more
    assert got == payload[7777:] + b"next"


def test_how_much_was_handed_over_is_known_in_the_middle(ends: Ends) -> None:
    ends.peer.sendall(message(bytes(10_000))[:6000])
    got = ends.read(2000)
    assert got is not None
    assert ends.tunnel.handed == len(got) == 2000
    rest = ends.read()
    assert rest is not None
    assert ends.tunnel.handed == 2000 + len(rest)


def test_packets_without_a_payload_let_others_have_their_turn(ends: Ends) -> None:
    ends.peer.sendall(NOP * 1000 + message(b"x"))
    turns = [ends.owner.packets]
    while (got := ends.read()) is None:
        assert ends.tunnel.hurried
        turns.append(ends.owner.packets)
    assert got == b"x"
    assert turns == [0, 256, 512, 768]
    assert ends.owner.packets == 1000


def test_a_message_to_nobody_has_no_effect(ends: Ends) -> None:
    nobody = packets.encode_message_head((), 0, (6,), multicast=True) + b"ignore" + bytes(2)
    ends.peer.sendall(nobody + message(b"x"))
    assert ends.read() == b"x"
    assert ends.owner.begun == [1]


def test_a_message_of_several_parts_is_an_error(ends: Ends) -> None:
    head = packets.encode_message_head((0,), 0, (1, 1))
    ends.peer.sendall(head + b"a" + bytes(7) + b"b" + bytes(7))
    with pytest.raises(SequenceError, match="2 parts"):
        ends.read()


def test_what_came_before_the_end_is_read_first(ends: Ends) -> None:
    ends.peer.sendall(message(b"last"))
    ends.peer.close()
    assert ends.read(2) == b"la"
    assert ends.read() == b"st"
    assert ends.read() == b""


def test_what_came_before_an_error_is_read_first() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listening.getsockname())
    sock, _ = listening.accept()
    sock.setblocking(False)
    memory = memoryview(bytearray(65_536))
    tunnel = Tunnel(Owner(), PacketDecoder(0, 0), sock.fileno(), None, memory)
    peer.sendall(message(b"last"))
    target = bytearray(100)
    while True:
        try:
            assert tunnel.recv_into(target) == 4
            break
        except BlockingIOError:
            continue
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, 0, 0, 0, 0, 0, 0, 0)))
    peer.close()
    with pytest.raises(ConnectionResetError):
        while True:
            try:
                tunnel.recv_into(target)
            except BlockingIOError:
                continue
    sock.close()
    listening.close()


def test_memory_that_cannot_be_written_is_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="writable"):
        Tunnel(Owner(), PacketDecoder(0, 0), ends.sock.fileno(), None, memoryview(bytes(65_536)))
