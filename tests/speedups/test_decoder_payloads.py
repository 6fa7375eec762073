"""How payloads are admitted and land: once, aligned, where they are wanted."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given

from aqueduct._speedups import channels as codec
from aqueduct._speedups.base.buffers import AlignedBuffer, bytes_copied
from aqueduct.errors import FrameError, LocalProtocolError
from tests.reference import codec as model
from tests.speedups.strategies import ROUTE, client_decoder, cut, cuts, message, read_all

MiB = 1 << 20


@given(cuts)
def test_a_large_payload_lands_once_aligned(places: list[int]) -> None:
    payload = bytes(range(256)) * 400
    before = bytes_copied()
    data = message(7, payload)
    assert bytes_copied() == before
    decoder = client_decoder()
    (frame,) = read_all(decoder, cut(data, places))
    assert bytes_copied() - before == len(payload)
    assert isinstance(frame.payload, AlignedBuffer)
    assert frame.payload.address % 64 == 0
    assert len(frame.payload) == frame.size == len(payload)
    assert bytes(frame.payload) == payload


def test_a_mebibyte_is_copied_once_in_and_never_out() -> None:
    payload = bytearray(MiB)
    before = bytes_copied()
    head, body = codec.encode_message(0, payload)
    assert bytes_copied() == before
    decoder = client_decoder()
    assert read_all(decoder, [head]) == []
    assert decoder.remaining == MiB
    (frame,) = read_all(decoder, [body])
    assert bytes_copied() - before == MiB
    assert frame.payload.address % 64 == 0


def test_bytes_land_from_anywhere_to_anywhere() -> None:
    payload = bytes(range(251)) * 40
    whole = message(7, payload)
    start = len(whole) - len(payload)
    for shift in range(66):  # of the source and, by what came before, of the target
        for size in (63, 64, 65, 127, 128, 1000 + shift):
            memory = memoryview(bytes(shift) + whole[start + shift :])
            pieces = [whole[: start + shift], memory[shift:][:size], memory[shift:][size:]]
            (frame,) = read_all(client_decoder(), pieces)
            assert bytes(frame.payload) == payload


def test_small_payloads_are_bytes() -> None:
    for size in (0, 1, codec.COALESCE - 1):
        data = message(0, b"s" * size)
        for pieces in ([data], [data[:-1], data[-1:]]):
            (frame,) = read_all(client_decoder(), pieces)
            assert type(frame.payload) is bytes
            assert frame.payload == b"s" * size
    (frame,) = read_all(client_decoder(), [message(0, b"s" * codec.COALESCE)])
    assert type(frame.payload) is AlignedBuffer


def test_admission() -> None:
    decoder = client_decoder()
    decoder.auto_admit = 10
    pairs = ((b"a", b"1"),)
    attached = ((8, ()),)
    decoder.feed(message(3, b"small") + message(4, b"p" * 5000, pairs, attached) + message(5))
    assert decoder.next() == codec.MessageFrame(3, (), (), b"small")
    before = bytes_copied()
    assert decoder.next() == codec.MessageHead(4, pairs, attached, 5000)
    assert decoder.waiting
    assert decoder.next() is None
    assert (decoder.remaining, bytes_copied()) == (0, before)
    assert decoder.buffered == 5000 + len(message(5))
    decoder.admit()
    assert (decoder.waiting, decoder.remaining) == (False, 5000)
    frame = decoder.next()
    assert frame == codec.MessageFrame(4, pairs, attached, b"p" * 5000)
    assert decoder.next() == codec.MessageFrame(5, (), (), b"")
    with pytest.raises(LocalProtocolError, match="no message waits"):
        decoder.admit()


def test_everything_can_be_made_to_ask() -> None:
    decoder = client_decoder()
    decoder.auto_admit = -1
    decoder.feed(message(0))
    assert decoder.next() == codec.MessageHead(0, (), (), 0)
    decoder.admit()
    assert decoder.next() == codec.MessageFrame(0, (), (), b"")


def test_admission_into_a_given_buffer() -> None:
    target = bytearray(6000)
    for size in (10, 6000):
        view = memoryview(target)[:size]
        decoder = client_decoder()
        decoder.auto_admit = 0
        decoder.feed(message(0, b"t" * size))
        assert isinstance(decoder.next(), codec.MessageHead)
        decoder.admit(view)
        frame = decoder.next()
        assert isinstance(frame, codec.MessageFrame)
        assert frame.payload is view
        assert target[:size] == b"t" * size
        view.release()


@pytest.mark.parametrize(
    "target",
    [bytearray(99), bytearray(101), bytes(100), memoryview(bytearray(200))[::2]],
    ids=["short", "long", "read-only", "strided"],
)
def test_a_target_that_does_not_fit_leaves_the_head_waiting(target: Any) -> None:
    decoder = client_decoder()
    decoder.auto_admit = 0
    decoder.feed(message(0, b"p" * 100))
    decoder.next()
    with pytest.raises((LocalProtocolError, BufferError)):
        decoder.admit(target)
    assert decoder.waiting
    decoder.admit()
    assert decoder.next() == codec.MessageFrame(0, (), (), b"p" * 100)


@pytest.mark.requirement("AQ-R31")
def test_a_declared_size_takes_no_memory_before_admission() -> None:
    size = 1 << 60  # no machine has it, so taking it would fail
    decoder = client_decoder()
    decoder.auto_admit = 0
    decoder.feed(b"\x04\x00\x00\x00" + model.varint(size) + b"some of it")
    assert decoder.next() == codec.MessageHead(0, (), (), size)
    with pytest.raises(MemoryError):
        decoder.admit()
    assert decoder.waiting
    assert decoder.error is None
    decoder = client_decoder()
    decoder.feed(b"\x04\x00\x00\x00" + model.varint(size))
    for _ in range(2):
        with pytest.raises(MemoryError):
            decoder.next()
    assert (decoder.error, decoder.remaining) == (None, size)
    assert decoder.receive_buffer(0) is None


@pytest.mark.parametrize("block", ["headers", "attachments", "ranges", "connection"])
def test_a_declared_block_takes_only_what_comes(block: str) -> None:
    size = model.varint(1 << 60)
    decoder = codec.FrameDecoder(from_server=block == "ranges")
    decoder.feed(
        {
            "headers": ROUTE + b"\x04\x00" + size,
            "attachments": ROUTE + b"\x04\x00\x00" + size,
            "ranges": ROUTE + b"\x08" + size,
            "connection": b"\x02" + size,
        }[block]
    )
    assert [*iter(decoder.next, None)] == ([] if block == "connection" else [codec.RouteTo(0)])
    for _ in range(100):
        decoder.feed(b"\x01" * 100)
        assert decoder.next() is None
    assert decoder.gathered == 10_000
    with pytest.raises(FrameError, match="inside a frame"):
        decoder.end()
    assert decoder.gathered == 0


@pytest.mark.parametrize("give_target", [False, True])
def test_bytes_can_go_straight_to_their_place(give_target: bool) -> None:
    payload = bytes(range(256)) * 100
    data = message(0, payload)
    head = data[: len(data) - len(payload)]
    target = bytearray(len(payload)) if give_target else None
    decoder = client_decoder()
    decoder.auto_admit = 0
    decoder.feed(head + payload[:1000])
    assert decoder.receive_buffer(100) is None
    assert isinstance(decoder.next(), codec.MessageHead)
    decoder.admit(target)
    assert decoder.receive_buffer(100) is None  # the fed bytes come first
    assert decoder.next() is None
    before = bytes_copied()
    view = decoder.receive_buffer(600)
    assert view is not None
    assert (len(view), view.readonly, view.format) == (600, False, "B")
    view[:] = payload[1000:1600]
    decoder.received(500)  # the rest of the view is not counted yet
    assert decoder.consumed == len(ROUTE) + len(head) + 1500
    rest = decoder.receive_buffer(0)
    assert rest is not None
    assert len(rest) == decoder.remaining == len(payload) - 1500
    rest[:] = payload[1500:]
    assert decoder.next() is None
    with pytest.raises(LocalProtocolError, match="bytes of the payload are missing"):
        decoder.received(len(rest) + 1)
    decoder.received(len(rest))
    decoder.end()
    assert bytes_copied() == before
    frame = decoder.next()
    assert isinstance(frame, codec.MessageFrame)
    assert bytes(frame.payload) == payload
    if give_target:
        assert frame.payload is target
    assert decoder.finished
    assert decoder.receive_buffer(10) is None
    with pytest.raises(LocalProtocolError):
        decoder.received(0)


def test_no_receive_buffer_for_small_payloads() -> None:
    decoder = client_decoder()
    decoder.feed(message(0, b"small")[:-2])
    assert decoder.next() is None
    assert decoder.remaining == 2
    assert decoder.receive_buffer(100) is None


@pytest.mark.parametrize("pairs", [(), ((b"k", b"v"),), ((b"k", b"v"),) * 400])
@pytest.mark.parametrize("attached", [(), ((8, ()),), tuple((8 * n, ()) for n in range(1, 700))])
def test_messages_know_their_overhead(pairs: Any, attached: Any) -> None:
    data = message(0, b"p" * 100, pairs, attached)
    overhead = len(data) - len(message(0, b"p" * 100))
    decoder = client_decoder()
    decoder.auto_admit = 0
    decoder.feed(data)
    head = decoder.next()
    assert isinstance(head, codec.MessageHead)
    decoder.admit()
    frame = decoder.next()
    assert isinstance(frame, codec.MessageFrame)
    assert 0 <= overhead - frame.overhead <= 4  # their lengths may be longer than one byte
    assert head.overhead == frame.overhead
    for _ in range(2):
        assert (head.headers, head.attachments) == (pairs, attached)
        assert (frame.headers, frame.attachments) == (pairs, attached)
    assert codec.MessageFrame(0, pairs, attached, b"").overhead == 0


def test_large_blocks_that_wait_cost_little_more_than_their_bytes() -> None:
    """As tuples these headers take twenty times their bytes on the wire."""
    pairs = tuple((b"%02x" % (number % 256), b"") for number in range(4000))
    attached = tuple((8 * number, ()) for number in range(1, 4000))
    data = message(0, b"p" * 100, pairs, attached)
    decoders = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            decoder = client_decoder()
            decoder.auto_admit = 0
            decoder.feed(memoryview(data))
            head = decoder.next()
            decoders.append((decoder, head))
        assert tracemalloc.get_traced_memory()[0] - before < 50 * 2 * len(data)
    finally:
        tracemalloc.stop()
    for decoder, head in decoders:
        assert head == codec.MessageHead(0, pairs, attached, 100)
        decoder.admit()
        assert decoder.next() == codec.MessageFrame(0, pairs, attached, b"p" * 100)


def test_a_long_copy_lets_other_threads_run() -> None:
    """And the decoder refuses them, so that nothing moves under the copy."""
    size = 64 * MiB
    refused = 0
    for _ in range(50):
        decoder = client_decoder()
        decoder.feed(message(0, bytes(size)))
        begun = threading.Event()
        frames: list[Any] = []

        def land(decoder: codec.FrameDecoder, begun: threading.Event, frames: list[Any]) -> None:
            begun.set()
            frames.append(decoder.next())

        thread = threading.Thread(target=land, args=(decoder, begun, frames))
        thread.start()
        begun.wait(10)
        while thread.is_alive():
            try:
                decoder.feed(b"")
            except RuntimeError as error:
                assert "two threads" in str(error)  # noqa: PT017 - it need not be raised
                refused += 1
                break
        thread.join(10)
        assert frames[0].size == size
        if refused:
            break
    assert refused
