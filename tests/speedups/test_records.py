"""Records of TLS: what one end encrypts the other decrypts, whatever the sizes and the pieces."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.bindings._rust import _openssl
from OpenSSL import SSL

from aqueduct._speedups.bpmux.entities import Entity
from aqueduct._speedups.bpmux.scheduler import write_out
from aqueduct._speedups.io.gather import IovecWriter
from aqueduct._speedups.io.tls_records import OpenSslRecords, use
from aqueduct.carriers import tls_openssl, tls_stdlib
from aqueduct.carriers.certificates import ClientTls, dev_certificate
from aqueduct.carriers.tls_library import Tls
from aqueduct.carriers.verify import TlsError
from aqueduct.dissect.bpmux import read_chunks
from tests.speedups.test_turns import KiB, content, sinks

RECORD = 16_384
SCRATCH = 256 << 10
CERTIFICATE = dev_certificate()


class Ends:
    """Two ends of TLS after the handshake, on a pair of sockets."""

    def __init__(self, library: Any) -> None:
        self.sockets = socket.socketpair()
        for sock in self.sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        pinned = ClientTls(fingerprint=CERTIFICATE.fingerprint)
        asks, shows = (
            library.client_context(pinned, "", "test"),
            library.server_context(CERTIFICATE, "test"),
        )
        memory = memoryview(bytearray(SCRATCH))
        made = library.Tls if library is tls_openssl else library.PlainTls
        self.client: Tls = made(self.sockets[0], asks, "localhost", server=False, scratch=memory)
        self.server: Tls = made(self.sockets[1], shows, None, server=True, scratch=memory)
        for _ in range(3):
            self.sockets[0].sendall(self.client.handshake())
            self.sockets[1].sendall(self.server.handshake())
        assert self.client.complete and self.server.complete

    def send(self, *buffers: Any) -> list[bytes]:
        sealed = self.client.seal(buffers)
        self.sockets[0].sendall(b"".join(sealed))
        return sealed

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@pytest.fixture(params=[tls_openssl, tls_stdlib], ids=["openssl", "stdlib"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


@pytest.fixture
def fast() -> Iterator[Ends]:
    """By OpenSSL, whose records are cut here."""
    made = Ends(tls_openssl)
    yield made
    made.close()


def received(end: Tls, size: int, step: int) -> bytes:
    """``size`` bytes, ``step`` at a time; there must be no more."""
    memory = memoryview(bytearray(size))
    at = 0
    while at < size:
        got = end.recv_into(memory[at : at + step])
        assert 0 < got <= step
        at += got
    with pytest.raises(BlockingIOError):
        end.recv_into(bytearray(1))
    return bytes(memory)


@pytest.mark.parametrize("step", [1_000, RECORD, 100_000, 1 << 20])
def test_bytes_arrive_as_they_left(ends: Ends, step: int) -> None:
    chance = random.Random(step)
    sizes = [0, 1, 4_095, 4_096, RECORD - 1, RECORD, RECORD + 1, 70_000, 3, 5, 300_000, 9_000, 2]
    for _ in range(3):
        chance.shuffle(sizes)
        data = [chance.randbytes(size) for size in sizes]
        # Buffers of every kind that a carrier hands on.
        kinds = (bytes, bytearray, memoryview)
        ends.send(*(kinds[at % 3](one) for at, one in enumerate(data)))
        assert received(ends.server, sum(sizes), step) == b"".join(data)


def test_short_buffers_share_a_record(fast: Ends) -> None:
    one = len(b"".join(fast.send(b"x" * 900)))
    overhead = one - 900
    assert len(b"".join(fast.send(*[b"x" * 9] * 100))) == one
    # What does not fit goes into the next; a large buffer has records of its own.
    assert len(b"".join(fast.send(*[b"x" * 4_000] * 5))) == 20_000 + 2 * overhead
    assert len(b"".join(fast.send(b"head", b"x" * 2 * RECORD, b"tail"))) == (
        8 + 2 * RECORD + 4 * overhead
    )
    assert len(received(fast.server, 1_800 + 20_000 + 8 + 2 * RECORD, 8_192)) == 54_576


def test_what_is_encrypted_comes_in_pieces(fast: Ends) -> None:
    sealed = fast.send(bytes(1 << 20))
    assert [len(piece) // RECORD for piece in sealed] == [4] * 16
    assert fast.client.seal([]) == []
    assert fast.client.seal([b"", b""]) == []


def test_a_record_that_is_not_whole_is_waited_for(ends: Ends) -> None:
    data = random.Random(1).randbytes(3 * RECORD)
    sealed = b"".join(ends.client.seal([data]))
    memory = memoryview(bytearray(len(data) + 1))
    ends.sockets[0].sendall(sealed[:RECORD])
    with pytest.raises(BlockingIOError):
        ends.server.recv_into(memory)
    ends.sockets[0].sendall(sealed[RECORD:-1])
    assert ends.server.recv_into(memory) == 2 * RECORD
    ends.sockets[0].sendall(sealed[-1:])
    assert ends.server.recv_into(memory[2 * RECORD :]) == RECORD
    assert memory[:-1] == data


@pytest.mark.parametrize("told", [True, False])
def test_the_end_comes_after_the_bytes(ends: Ends, told: bool) -> None:
    ends.send(b"the last")
    if told:
        ends.sockets[0].sendall(ends.client.farewell())
    ends.sockets[0].shutdown(socket.SHUT_WR)
    memory = bytearray(100)
    assert ends.server.recv_into(memory) == 8
    assert memory.startswith(b"the last")
    for _ in range(2):
        assert ends.server.recv_into(memory) == 0


def test_a_record_that_was_changed(ends: Ends) -> None:
    sealed = bytearray(b"".join(ends.client.seal([b"as it was"])))
    sealed[-1] ^= 1
    ends.sockets[0].sendall(sealed)
    # Some builds of OpenSSL 3.5 have one text for every record that cannot be read.
    texts = r"decryption failed or bad record mac|record layer failure"
    with pytest.raises(TlsError, match=texts):
        ends.server.recv_into(bytearray(100))
    ends.sockets[1].sendall(ends.server.pending())
    with pytest.raises(TlsError, match="alert bad record mac"):
        ends.client.recv_into(bytearray(100))


@pytest.mark.parametrize("offered", [0, 3])
def test_a_take_of_a_single_entity_leaves_encrypted(ends: Ends, offered: int) -> None:
    """With nothing plain behind it, whatever TCP is offered otherwise."""
    mux, (entity,) = sinks(1, 16 * KiB)
    payload = content(7, 100 * KiB)
    mux.turns.write_run(entity, [payload])
    out, fd = IovecWriter(), ends.sockets[0].fileno()
    data, memory = b"", memoryview(bytearray(2 << 20))
    while not (mux.idle and not out.left):
        write_out(mux.scheduler, out, fd, 16 * KiB, 1 << 20, [], ends.client.records, offered)
        try:
            data += memory[: ends.server.recv_into(memory)]
        except BlockingIOError:
            pass
    assert b"".join(chunk.payload for chunk in read_chunks(data)) == payload


def test_takes_leave_encrypted(ends: Ends) -> None:
    mux, entities = sinks(3, 16 * KiB)
    payloads = {entity: content(entity.identifier, 300 * KiB) for entity in entities}
    for entity in entities:
        mux.turns.write_run(entity, [payloads[entity]])
    out = IovecWriter()
    fd = ends.sockets[0].fileno()
    told = dict.fromkeys(entities, 0)
    data, memory = b"", memoryview(bytearray(2 << 20))
    while not (mux.idle and not out.left):
        written: list[tuple[Entity, int]] = []
        sent = write_out(mux.scheduler, out, fd, 64 * KiB, 1 << 20, written, ends.client.records)
        for entity, size in written:
            told[entity] += size
        try:
            data += memory[: ends.server.recv_into(memory)]
        except BlockingIOError:
            assert sent == 0
    assert told == dict.fromkeys(entities, 300 * KiB)
    found = dict.fromkeys((entity.identifier for entity in entities), b"")
    for chunk in read_chunks(data):
        found[chunk.identifier] += chunk.payload
    assert found == {entity.identifier: payloads[entity] for entity in entities}


def test_what_cannot_be_encrypted_does_not_leave(ends: Ends) -> None:
    mux, (entity,) = sinks(1, 64 * KiB)
    mux.turns.write_run(entity, [bytes(100 * KiB)])
    out = IovecWriter()
    ends.client.farewell()
    with pytest.raises(TlsError, match="protocol is shutdown"):
        fd = ends.sockets[0].fileno()
        write_out(mux.scheduler, out, fd, 64 * KiB, 1 << 20, [], ends.client.records)
    assert (out.left, out.size, out.buffers) == (0, 0, [])
    with pytest.raises(BlockingIOError):
        ends.sockets[1].recv(1)


def test_errors_of_the_socket(ends: Ends) -> None:
    ends.sockets[1].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        ends.server.recv_into(bytearray(100))


def test_nothing_is_read_into_what_cannot_be_written(ends: Ends) -> None:
    ends.send(b"data")
    with pytest.raises(BufferError):
        ends.server.recv_into(b"1234")
    assert received(ends.server, 4, 4) == b"data"


def test_addresses_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no connection"):
        OpenSslRecords(None, 0, 0, 0, 0, OSError, memoryview(b""))
    with pytest.raises(TypeError):
        OpenSslRecords.__new__(OpenSslRecords)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="a function has no address"):
        use(1, 2, 3, 4, 5, 0)


def test_what_the_library_does_not_promise() -> None:
    """The names that are private to it, and how its functions are called."""
    lib, ffi = _openssl.lib, _openssl.ffi
    connection: Any = SSL.Connection(SSL.Context(SSL.TLS_METHOD))
    assert ffi.typeof(connection._ssl) is ffi.typeof("SSL *")
    assert ffi.typeof(connection._into_ssl) is ffi.typeof("BIO *")
    assert ffi.typeof(connection._from_ssl) is ffi.typeof("BIO *")
    for name, called in {
        "SSL_read": "int(*)(SSL *, void *, int)",
        "SSL_write": "int(*)(SSL *, void *, int)",
        "SSL_get_error": "int(*)(SSL *, int)",
        "BIO_read": "int(*)(BIO *, void *, int)",
        "BIO_write": "int(*)(BIO *, void *, int)",
        "BIO_get_mem_data": "long(*)(BIO *, char * *)",
    }.items():
        # Whether an argument is const the library's face has changed before; the call is the same.
        found = ffi.typeof(ffi.addressof(lib, name)).cname.replace("const ", "")
        assert found == called, name
    assert (lib.SSL_ERROR_WANT_READ, lib.SSL_ERROR_ZERO_RETURN) == (2, 6)
