"""Chunks made by hand are those of the public vectors, written and read."""

from __future__ import annotations

import socket

import pytest

from tests.carriers.chunks import Chunk, Kind, RawPeer, chunk, partial, read_chunks

MOST = 2**64 - 1
EXAMPLES: list[tuple[str, list[Chunk]]] = [
    ("7000026869", [Chunk(Kind.IN_SINK, 0, b"hi")]),
    ("a800f8ff", [Chunk(Kind.IN_STREAM, 0, credit=255)]),
    ("0101", [Chunk(Kind.OUT_REQUEST, 1, ack=True)]),
    ("d00500", [Chunk(Kind.DUPLEX, 5, b"")]),
    ("8403", [Chunk(Kind.OUT_STREAM, 3, ping=True)]),
    ("7e0101aa0201bb", [Chunk(Kind.IN_SINK, 1, b"\xaa", 2, True, b"\xbb")]),
    ("60f7", [Chunk(Kind.IN_SINK, 247)]),
    ("60fb01000000", [Chunk(Kind.IN_SINK, 1 << 24)]),
    ("6801ffffffffffffffffff", [Chunk(Kind.IN_SINK, 1, credit=MOST)]),
    ("e7ffffffffffffffff700001aa", [Chunk(Kind.PARTIAL, MOST), Chunk(Kind.IN_SINK, 0, b"\xaa")]),
    (
        "e002520102aabb01cc",
        [Chunk(Kind.PARTIAL, 2), Chunk(Kind.OUT_SINK, 1, b"\xaa\xbb", end=b"\xcc")],
    ),
]


@pytest.mark.parametrize(("text", "wanted"), EXAMPLES)
def test_chunks_are_written_and_read(text: str, wanted: list[Chunk]) -> None:
    written = b""
    for one in wanted:
        if one.kind is Kind.PARTIAL:
            written += partial(one.id)
        else:
            written += chunk(
                one.kind,
                one.id,
                one.payload,
                credit=one.credit,
                ping=one.ping,
                end=one.end,
                ack=one.ack,
            )
    assert written == bytes.fromhex(text)
    assert read_chunks(written) == (wanted, b"")
    for at in range(len(written)):
        found, rest = read_chunks(written[:at])
        assert found == wanted[: len(found)]
        assert read_chunks(rest + written[at:]) == (wanted[len(found) :], b"")


async def test_a_peer_by_hand_collects_what_comes() -> None:
    left, right = socket.socketpair()
    peer = RawPeer(left)
    with right:
        pieces = chunk(Kind.OUT_SINK, 1, b"abc", credit=5), chunk(Kind.OUT_SINK, 1, b"def")
        right.send(pieces[0] + pieces[1][:2])
        await peer.until(lambda: peer.chunks)
        right.send(pieces[1][2:])
        await peer.until(lambda: len(peer.chunks) == 2)
        assert peer.payload(Kind.OUT_SINK, 1) == b"abcdef"
        assert peer.credit(Kind.OUT_SINK, 1) == 5
        assert peer.received == len(b"".join(pieces))
        peer.read(False)
        await peer.say(b"hello")
        assert right.recv(10) == b"hello"
        peer.read(True)
    await peer.until_over()
    peer.close()
