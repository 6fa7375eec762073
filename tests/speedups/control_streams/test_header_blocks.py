"""Header blocks: the headers of a message in front of its payload, for Arrow calls."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from aqueduct._speedups.base.buffers import AlignedBuffer, bytes_copied
from aqueduct._speedups.channels.frames import MessageFrame, MessageHead
from aqueduct._speedups.control_streams.control_encoder import encode_control_message
from aqueduct._speedups.control_streams.control_frames import ControlFrameDecoder
from aqueduct.config import DEFAULT
from aqueduct.errors import FrameError, LocalProtocolError
from tests.reference.codec import header_data, varbytes, varint
from tests.reference.control_streams import header_block
from tests.speedups.strategies import headers, payloads

requirement = pytest.mark.requirement
KEY = b"arrow-batch-2179bf"
PAIRS = ((KEY, b"7"), (b"other", b"\xff" * 70))
BLOCK = header_block(PAIRS)
HIGHEST = (1 << 64) - 1
MiB = 1 << 20


def decoder(**options: Any) -> ControlFrameDecoder:
    """Reads a unidirectional stream of a client; each message waits to be admitted."""
    limits = DEFAULT.limits
    found = ControlFrameDecoder(
        from_server=False,
        carrier="uni",
        header_blocks=True,
        **{"frame_limit": limits.frame_bytes, "header_limit": limits.header_bytes, **options},
    )
    found.auto_admit = -1
    return found


def raw(payload: bytes, number: int = 0, attached: bytes = b"") -> bytes:
    """A Message on the entrypoint whose payload is what it is."""
    return b"\x03\x00" + varint(number) + varbytes(attached) + varbytes(payload)


def take(reader: ControlFrameDecoder, *pieces: bytes) -> list[MessageFrame]:
    """The messages, each admitted when its head has come."""
    found = []
    for piece in pieces:
        reader.feed(piece)
        while (frame := reader.next()) is not None:
            if isinstance(frame, MessageHead):
                reader.admit()
            else:
                assert isinstance(frame, MessageFrame)
                found.append(frame)
    return found


def fault(message: MessageFrame) -> str:
    """What a message says that was broken by its block."""
    assert bytes(message.payload) == b""
    ((key, text),) = message.headers
    assert key == b""
    return text.decode()


@requirement("AC-95")
@pytest.mark.parametrize("pairs", [(), ((KEY, b"7"),), PAIRS, ((b"k", b"v" * 59),)])
def test_a_message_begins_with_its_headers_and_zeros(pairs: Any) -> None:
    parts = encode_control_message(0, 5, b"payload", (), pairs)
    payload = b"".join(map(bytes, parts))
    block = header_block(pairs)
    assert payload == raw(block + b"payload", 5)
    assert len(block) % 64 == 0 and block.startswith(header_data(pairs))


@requirement("AC-96")
def test_the_payload_is_what_follows_the_block() -> None:
    reader = decoder()
    reader.feed(raw(BLOCK + b"payload"))
    head = reader.next()
    assert isinstance(head, MessageHead)
    assert (head.size, head.headers) == (7, PAIRS)
    assert head.overhead == len(BLOCK)
    reader.admit()
    message = reader.next()
    assert isinstance(message, MessageFrame)
    assert (bytes(message.payload), message.headers) == (b"payload", PAIRS)


def test_a_message_without_payload_has_its_headers() -> None:
    (message,) = take(decoder(), raw(BLOCK))
    assert (bytes(message.payload), message.headers) == (b"", PAIRS)


def test_large_payloads_are_not_copied_on_either_side() -> None:
    payload = AlignedBuffer(MiB)
    memoryview(payload)[:] = bytes(range(256)) * (MiB >> 8)
    before = bytes_copied()
    parts = encode_control_message(0, 5, [payload], (), PAIRS)
    assert bytes_copied() - before == len(BLOCK)
    whole = b"".join(map(bytes, parts))
    reader = decoder()
    reader.feed(whole[:-MiB])
    assert isinstance(reader.next(), MessageHead)
    reader.admit()
    reader.next()
    room = reader.receive_buffer(0)
    assert room is not None
    before = bytes_copied()
    room[:] = whole[-MiB:]
    reader.received(MiB)
    message = reader.next()
    assert isinstance(message, MessageFrame)
    assert bytes_copied() == before
    assert type(message.payload) is AlignedBuffer
    assert pa.py_buffer(message.payload).address % 64 == 0
    assert bytes(message.payload) == bytes(memoryview(payload))


def test_a_payload_lands_where_it_is_told() -> None:
    reader = decoder()
    reader.feed(raw(BLOCK + b"payload"))
    assert isinstance(reader.next(), MessageHead)
    target = bytearray(7)
    reader.admit(target)
    reader.next()
    assert target == b"payload"


@given(headers, payloads)
def test_it_comes_back_by_single_bytes(pairs: Any, payload: bytes) -> None:
    data = b"".join(map(bytes, encode_control_message(0, 0, payload, (), pairs)))
    (message,) = take(
        decoder(header_limit=1 << 20), *(data[at : at + 1] for at in range(len(data)))
    )
    assert (bytes(message.payload), message.headers) == (payload, pairs)


MALFORMED = {
    "nothing": (b"", "it has 64 bytes or more, and the message 0"),
    "too short": (bytes(63), "and the message 63"),
    "beyond the message": (varint(127) + bytes(126), "127 bytes, and the message 126 behind"),
    "a huge length": (varint(HIGHEST) + bytes(64), "allowed"),
    "zeros beyond the message": (varint(64) + b"\x01k\x3d" + bytes(62), "within the zeros"),
    "an odd number of parts": (varbytes(b"\x01k").ljust(64, b"\0"), "has no value"),
    "an empty key": (varbytes(b"\x00\x01v").ljust(64, b"\0"), "an empty key"),
    "a key that is not ASCII": (varbytes(b"\x01\xe9\x00").ljust(64, b"\0"), "is not ASCII"),
    "a value that is cut": (varbytes(b"\x01k\x05v").ljust(64, b"\0"), "5 bytes are declared"),
    "a part's length that is cut": (varbytes(b"\x01k\x80").ljust(64, b"\0"), "inside a varint"),
    "zeros that are none": (varbytes(b"\x01k\x00").ljust(63, b"\0") + b"\x01", "is not zeros"),
    "a longer form of its length": (b"\x83\x00\x01k\x00".ljust(64, b"\0"), "varint"),
    "a length above 64 bits": (b"\xff" * 10 + bytes(54), "varint"),
}


@requirement("AC-97")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_block_breaks_its_own_message(name: str, *, single: bool) -> None:
    block, text = MALFORMED[name]
    data = raw(block + (b"the payload" if name == "zeros that are none" else b""))
    data += raw(BLOCK + b"next", 1)
    pieces = [data[at : at + 1] for at in range(len(data))] if single else [data]
    reader = decoder()
    broken, following = take(reader, *pieces)
    assert text in fault(broken)
    assert fault(broken).startswith("the header block of a message is malformed: ")
    assert (following.num, following.headers, bytes(following.payload)) == (1, PAIRS, b"next")
    reader.end()
    assert reader.finished and reader.consumed == len(data)
    assert not reader.gathered and not reader.remaining


@requirement("AC-97")
@pytest.mark.parametrize("size", range(len(BLOCK)))
def test_a_block_that_is_cut_at_any_byte_breaks_its_message(size: int) -> None:
    broken, following = take(decoder(), raw(BLOCK[:size]) + raw(BLOCK, 1))
    assert fault(broken)
    assert following.headers == PAIRS


@pytest.mark.parametrize("size", range(1, len(BLOCK)))
def test_a_stream_that_ends_within_a_block_is_truncated(size: int) -> None:
    reader = decoder()
    head = len(raw(BLOCK)) - len(BLOCK)
    reader.feed(raw(BLOCK)[: head + size])
    assert reader.next() is None
    with pytest.raises(FrameError) as caught:
        reader.end()
    assert caught.value.truncated


def test_attachments_of_a_broken_message_are_there() -> None:
    attached = varint(8 | 1) + varint(16)  # both are the client's
    (broken,) = take(decoder(), raw(b"\x01" + bytes(80), attached=attached))
    assert [channel for channel, _ in broken.attachments] == [9, 16]


def test_headers_are_those_of_their_own_message() -> None:
    first, second, third = take(decoder(), raw(BLOCK) + raw(header_block(()), 1) + raw(bytes(3), 2))
    assert (first.headers, second.headers) == (PAIRS, ())
    assert fault(third)


@requirement("AC-98")
def test_headers_above_the_limit_break_their_message() -> None:
    block = header_block(((b"k", b"v" * 200),))
    assert take(decoder(header_limit=204), raw(block))[0].headers == ((b"k", b"v" * 200),)
    (broken,) = take(decoder(header_limit=203), raw(block))
    assert "204 bytes, 203 are allowed (Limits.header_bytes)" in fault(broken)


@requirement("AC-98")
def test_a_length_takes_no_memory() -> None:
    size = DEFAULT.limits.frame_bytes - 100
    reader = decoder()
    reader.feed(b"\x03\x00\x00\x00" + varint(size) + varint(size - 100))
    assert reader.next() is None
    assert reader.remaining == size - len(varint(size - 100))
    chunk = bytes(64 << 10)
    for _ in range(100):
        reader.feed(chunk)
        assert reader.next() is None
        assert not reader.gathered
        assert not reader.buffered


def test_a_message_with_a_block_is_skipped() -> None:
    reader = decoder()
    reader.feed(raw(BLOCK + bytes(5000)) + raw(b"", 1) + raw(BLOCK, 2))
    assert isinstance(reader.next(), MessageHead)
    reader.skip()
    assert isinstance(reader.next(), MessageHead)  # whose block is malformed
    reader.skip()
    head = reader.next()
    assert isinstance(head, MessageHead)
    assert (head.num, head.headers) == (2, PAIRS)


@pytest.mark.parametrize(
    ("pairs", "text"),
    [(((b"", b"v"),), "must be ASCII and not empty"), (((b"\xe9", b"v"),), "must be ASCII")],
)
def test_headers_that_cannot_be_sent(pairs: Any, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        encode_control_message(0, 0, b"", (), pairs)
